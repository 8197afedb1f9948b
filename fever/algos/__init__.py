"""Algorithms: one file each, on the interfaces of base.py."""
