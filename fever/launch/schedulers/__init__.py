"""Batch schedulers: one file each."""
