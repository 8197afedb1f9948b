"""A network for sets: attention over the rows that are there. The order of rows makes no difference to it."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp


class Attention(nn.Module):
    """Every berry is embedded alone; learned queries then look for the berries that matter (`heads` of them)."""

    width: int = 64
    heads: int = 8

    @nn.compact
    def __call__(self, observation: dict[str, Any]) -> jax.Array:
        berries, there = observation["berries"], observation["there"]  # [N, M, 3], [N, M]
        hidden = nn.relu(nn.Dense(self.width)(berries))
        hidden = nn.relu(nn.Dense(self.width)(hidden))  # [N, M, width]
        scores = nn.Dense(self.heads)(hidden)  # [N, M, heads]
        scores = jnp.where(there[..., None] > 0, scores, -1e9)
        weights = jax.nn.softmax(scores, axis=1) * there[..., None]  # no berry left: all weights are 0
        values = nn.Dense(self.width)(hidden)
        seen = jnp.einsum("nmh,nmw->nhw", weights, values)  # [N, heads, width]
        return nn.relu(nn.Dense(self.width)(seen.reshape(len(seen), -1)))
