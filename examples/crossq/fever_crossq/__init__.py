"""CrossQ (Bhatt et al. 2024) as an algorithm outside of fever: `fever train Pendulum-v1 --algo fever_crossq:CrossQ`."""

from fever_crossq.crossq import CrossQ

__all__ = ["CrossQ"]
