"""Settings that are known to learn: a YAML file for each environment, with a row for each algorithm (docs/zoo.md)."""
