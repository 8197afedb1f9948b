"""Policies: everything that is needed to act, on NumPy alone.

This package imports nothing but NumPy and the standard library. The samplers act with it, `fever export` copies it
next to the weights, and the learner calls the very same functions with `jax.numpy` in place of `numpy`, so there is
one definition of every network.
"""

from .distributions import Categorical, Deterministic, Distribution, Gaussian, SquashedGaussian, distribution_for
from .networks import Network, Params, draw_uniform
from .policy import Policy

__all__ = [
    "Categorical", "Deterministic", "Distribution", "Gaussian", "Network", "Params", "Policy", "SquashedGaussian",
    "distribution_for", "draw_uniform",
]  # fmt: skip
