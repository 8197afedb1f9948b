"""What learners on fragments share: joining them to a batch, the values of its observations, and advantages."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fever.policy import Network, Params
from fever.returns import gae
from fever.sampler import Fragment

IMAGE_CHUNK = 32  # rows of images whose patches stay in a CPU's cache


def join(fragments: list[Fragment]) -> dict[str, np.ndarray]:
    """One batch `[T, B, ...]` out of fragments `[T, N, ...]`, side by side."""
    names = fragments[0].arrays
    if len(fragments) == 1:
        return dict(names)
    axis = {name: 0 if name == "state" else 1 for name in names}
    return {name: np.concatenate([part.arrays[name] for part in fragments], axis[name]) for name in names}


def chain(episodes: list[Fragment], rows: int) -> dict[str, np.ndarray]:
    """One batch `[rows, 1, ...]` out of whole episodes `[L, 1, ...]`, one after the other; what is left over is filled
    with rows that are not valid."""
    batch = {}
    taken = sum(len(part.arrays["rewards"]) for part in episodes)
    filling = {"terminated": True, "bootstrap": np.nan}
    for name, example in episodes[0].arrays.items():
        if name == "state":
            batch[name] = example
            continue
        longer = len(example) - len(episodes[0].arrays["rewards"])  # 1 where the last observation is in it, too
        parts = [part.arrays[name][: len(part.arrays[name]) - longer] for part in episodes]
        spare = np.full((rows + longer - taken, *example.shape[1:]), filling.get(name, 0), example.dtype)
        batch[name] = np.concatenate([*parts, spare])
    return batch


def values_of(network: Network, weights: Params, batch: Params) -> jax.Array:
    """Values `[T+1, B]` of every observation in a batch."""
    observations = batch["observations"]
    if network.convolutions and network.recurrent == "none":
        flat = observations.reshape(-1, *observations.shape[2:])
        features = jax.lax.map(lambda row: network.features(weights, row[None], jnp)[0], flat, batch_size=IMAGE_CHUNK)
        features = features.reshape(*observations.shape[:2], -1)
    else:
        features = network.unroll(weights, observations, batch["state"], batch["first"])
    return network.value(weights, features, jnp)


def following_values(values: jax.Array, batch: Params) -> jax.Array:
    """Values `[T, B]` of the states that steps led to, out of those `[T+1, B]` of all observations: where the next row
    begins another episode already, the sampler's own."""
    return jnp.where(jnp.isnan(batch["bootstrap"]), values[1:], batch["bootstrap"])


def advantages_of(values: jax.Array, batch: Params, gamma: float, lam: float) -> jax.Array:
    """Generalised advantages `[T, B]` of a batch whose observations have these values `[T+1, B]`."""
    ends = batch["terminated"], batch["truncated"]
    return gae(batch["rewards"], values[:-1], following_values(values, batch), *ends, gamma, lam)


def explained_variance(returns: Any, errors: Any, valid: Any) -> jax.Array:
    """The share of the returns' variance that the values foresaw; `errors` are returns minus values, all one shape."""
    weight = valid / valid.sum()
    pair = jnp.stack([returns, errors])
    axes = tuple(range(1, pair.ndim))
    centred = pair - (pair * weight).sum(axes, keepdims=True)
    spread, unexplained = (centred**2 * weight).sum(axes)
    return 1 - unexplained / (spread + 1e-8)
