"""Returns and advantages: pure functions over time-major arrays, in JAX."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def gae(
    rewards: jax.Array,
    values: jax.Array,
    next_values: jax.Array,
    terminated: jax.Array,
    truncated: jax.Array,
    gamma: float,
    lam: float,
) -> jax.Array:
    """Generalised advantage estimation (Schulman et al. 2016), every argument `[T, N]`.

    `next_values[t]` is the value of the state that step t led to, the *last* state of its episode where it ended there.
    A termination makes that value zero; a truncation (a time limit) keeps it. Neither lets the next episode leak in.
    """
    delta = rewards + gamma * next_values * (1.0 - terminated) - values
    carry_on = gamma * lam * (1.0 - jnp.logical_or(terminated, truncated))

    def step(following: jax.Array, row: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        advantage = row[0] + row[1] * following
        return advantage, advantage

    return jax.lax.scan(step, jnp.zeros_like(delta[0]), (delta, carry_on), reverse=True, unroll=8)[1]
