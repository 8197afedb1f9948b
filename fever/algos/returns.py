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
    """Generalised advantage estimation (Schulman et al. 2016), every array `[T, N]`.

    A_t = delta_t + gamma lam A_{t+1},  delta_t = r_t + gamma V(s_{t+1}) - V(s_t)
    """
    delta = rewards + gamma * next_values * (1.0 - terminated) - values
    return accumulate(delta, gamma * lam * (1.0 - jnp.logical_or(terminated, truncated)))


class VTrace(NamedTuple):
    """Results of V-trace, both `[T, N]`."""

    value_targets: jax.Array
    advantages: jax.Array  # not yet weighted by the probability ratio


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
    """V-trace (Espeholt et al. 2018, section 4.1), every array `[T, N]`.

    v_t = V(s_t) + delta_t + gamma c_t (v_{t+1} - V(s_{t+1})),  delta_t = rho_t (r_t + gamma V(s_{t+1}) - V(s_t)),
    rho_t = min(ratio_t, delta_limit),  c_t = lam min(ratio_t, trace_limit)

    `ratios` are the probabilities of the actions under the learner's policy divided by those under the policy that
    acted. With ratios of 1 and lam = 1 the value targets are n-step returns.
    """
    ended = jnp.logical_or(terminated, truncated)
    next_values = next_values * (1.0 - terminated)
    delta = jnp.minimum(ratios, delta_limit) * (rewards + gamma * next_values - values)
    traces = lam * jnp.minimum(ratios, trace_limit)
    targets = values + accumulate(delta, gamma * traces * (1.0 - ended))
    last = jnp.zeros((1, *ended.shape[1:]), bool)
    following = jnp.concatenate([targets[1:], next_values[-1:]])  # target of the next state, where there is a next row,
    goes_on = jnp.concatenate([~ended[:-1], last])  # and the episode goes on in it
    advantages = rewards + gamma * jnp.where(goes_on, following, next_values) - values
    return VTrace(targets, advantages)


def normalize_advantages(advantages: jax.Array, valid: jax.Array) -> jax.Array:
    """Advantages with zero mean and unit standard deviation over valid rows: (A - mean) / (deviation + 1e-8).

    `valid` is 1 or 0, float, of the same shape.
    """
    total = jnp.maximum(valid.sum(), 1.0)
    centred = advantages - (advantages * valid).sum() / total
    return centred / (jnp.sqrt((centred**2 * valid).sum() / total) + 1e-8)


def explained_variance(returns: jax.Array, errors: jax.Array, valid: jax.Array) -> jax.Array:
    """1 - Var[errors] / Var[returns] over valid rows, where errors are returns minus values, all one shape."""
    weight = valid / jnp.maximum(valid.sum(), 1)
    pair = jnp.stack([returns, errors])
    axes = tuple(range(1, pair.ndim))
    centred = pair - (pair * weight).sum(axes, keepdims=True)
    spread, unexplained = (centred**2 * weight).sum(axes)
    return 1 - unexplained / (spread + 1e-8)


def accumulate(deltas: jax.Array, decays: jax.Array) -> jax.Array:
    """`sums[t] = deltas[t] + decays[t] * sums[t + 1]`, all `[T, N]`."""

    def step(following: jax.Array, row: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        total = row[0] + row[1] * following
        return total, total

    return jax.lax.scan(step, jnp.zeros_like(deltas[0]), (deltas, decays), reverse=True, unroll=8)[1]
