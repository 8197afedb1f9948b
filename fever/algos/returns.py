"""Returns and advantages: pure functions over time-major arrays, in JAX.

Where an episode ends, `terminated` makes the value of what follows zero, and `truncated` (a time limit) keeps it;
neither lets the next episode leak in. `next_values[t]` is the value of the state that step t led to, the *last* state
of its episode where it ended there.
"""

from __future__ import annotations

from typing import NamedTuple

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
    """Generalised advantage estimation (Schulman et al. 2016), every argument `[T, N]`."""
    delta = rewards + gamma * next_values * (1.0 - terminated) - values
    return accumulate(delta, gamma * lam * (1.0 - jnp.logical_or(terminated, truncated)))


class VTrace(NamedTuple):
    """What V-trace makes of a batch, both `[T, N]`."""

    goals: jax.Array  # for the values
    advantages: jax.Array  # of the actions, not yet weighted by the ratio


def vtrace(
    ratios: jax.Array,
    rewards: jax.Array,
    values: jax.Array,
    next_values: jax.Array,
    terminated: jax.Array,
    truncated: jax.Array,
    gamma: float,
    lam: float = 1.0,
    delta_limit: float = 1.0,
    trace_limit: float = 1.0,
) -> VTrace:
    """V-trace (Espeholt et al. 2018, section 4.1), every array `[T, N]`; with ratios of 1 these are n-step returns.

    `ratios` are the probabilities of the actions under the policy that learns over those under the one that acted;
    `delta_limit` and `trace_limit` are the paper's rho and c with a bar, `lam` its lambda.
    """
    ended = jnp.logical_or(terminated, truncated)
    next_values = next_values * (1.0 - terminated)
    delta = jnp.minimum(ratios, delta_limit) * (rewards + gamma * next_values - values)
    traces = lam * jnp.minimum(ratios, trace_limit)
    goals = values + accumulate(delta, gamma * traces * (1.0 - ended))
    last = jnp.zeros((1, *ended.shape[1:]), bool)
    following = jnp.concatenate([goals[1:], next_values[-1:]])  # goal of the next state, where there is a next row,
    goes_on = jnp.concatenate([~ended[:-1], last])  # and the episode goes on in it
    advantages = rewards + gamma * jnp.where(goes_on, following, next_values) - values
    return VTrace(goals, advantages)


def accumulate(deltas: jax.Array, decays: jax.Array) -> jax.Array:
    """`sums[t] = deltas[t] + decays[t] * sums[t + 1]`, all `[T, N]`."""

    def step(following: jax.Array, row: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        total = row[0] + row[1] * following
        return total, total

    return jax.lax.scan(step, jnp.zeros_like(deltas[0]), (deltas, decays), reverse=True, unroll=8)[1]
