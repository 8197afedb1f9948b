"""Experiments: runs that differ in their seed only, started together, compared and drawn (docs/seeds.md)."""
