"""The trainer: from a configuration to a finished run."""
