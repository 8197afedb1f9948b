"""Environments: from a name to N of them that are stepped together under one contract."""
