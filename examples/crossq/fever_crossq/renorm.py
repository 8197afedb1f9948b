"""Batch renormalisation (Ioffe 2017): batch normalisation that trains with nearly the statistics it is used with."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

EPSILON = 1e-3  # added to variances; all numbers here are those of sb3-contrib's CrossQ
MOMENTUM = 0.01  # share of the way that running statistics move in a gradient step
SCALE_LIMIT, SHIFT_LIMIT = 3.0, 5.0  # of the correction (Ioffe 2017: r_max and d_max)


def normalise(x: Any, statistics: tuple[Any, Any], warm: Any) -> tuple[Any, Any]:
    """A normalised batch `[B, F]`, and the new running statistics: mean and variance `[F]`.

    If `warm` is None, the running statistics normalise the batch, and stay. Otherwise the batch's own do; if `warm` is
    true, its mean and deviation are then corrected towards the running ones, within limits.
    """
    mean, variance = statistics
    running = jnp.sqrt(variance + EPSILON)
    if warm is None:
        return (x - mean) / running, statistics
    batch_mean, batch_variance = x.mean(0), x.var(0)
    deviation = jnp.sqrt(batch_variance + EPSILON)
    scale = jnp.where(warm, jnp.clip(deviation / running, 1 / SCALE_LIMIT, SCALE_LIMIT), 1.0)
    shift = jnp.where(warm, jnp.clip((batch_mean - mean) / running, -SHIFT_LIMIT, SHIFT_LIMIT), 0.0)
    scale, shift = jax.lax.stop_gradient((scale, shift))
    moved = mean + MOMENTUM * (batch_mean - mean), variance + MOMENTUM * (batch_variance - variance)
    return (x - batch_mean) / deviation * scale + shift, jax.lax.stop_gradient(moved)
