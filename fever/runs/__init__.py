"""The run directory: what is in it, and what reads it."""
