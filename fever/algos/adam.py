"""Adam (Kingma & Ba 2015) for weights that are one vector, see `fever.algos.flat_params`. JAX, traceable."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.numpy as jnp

MEAN_DECAY, SQUARE_DECAY = 0.9, 0.999  # Kingma & Ba 2015


class AdamState(NamedTuple):
    """Steps taken, and the running mean and mean square of the gradients `[P]`."""

    count: Any
    mean: Any
    square: Any

    def arrays(self, name: str) -> dict[str, Any]:
        """For a checkpoint."""
        return {f"{name}/{field}": value for field, value in self._asdict().items()}

    @classmethod
    def from_arrays(cls, name: str, arrays: dict[str, Any]) -> AdamState:
        return cls(*(jnp.asarray(arrays[f"{name}/{field}"]) for field in cls._fields))


@dataclass(frozen=True)
class Adam:
    """Turns gradients into directions; the caller multiplies them by its learning rate and subtracts."""

    epsilon: float = 1e-8
    max_norm: float | None = None  # longer gradients are scaled down to this length first

    def init(self, params: Any) -> AdamState:
        return AdamState(jnp.zeros((), jnp.int32), jnp.zeros_like(params), jnp.zeros_like(params))

    def update(self, gradient: Any, state: AdamState) -> tuple[Any, AdamState]:
        """Gradient `[P]` to direction `[P]` and the next state."""
        if self.max_norm is not None:
            gradient = gradient * (self.max_norm / jnp.maximum(jnp.sqrt((gradient**2).sum()), self.max_norm))
        count = state.count + 1
        mean = MEAN_DECAY * state.mean + (1 - MEAN_DECAY) * gradient
        square = SQUARE_DECAY * state.square + (1 - SQUARE_DECAY) * gradient**2
        scale = jnp.sqrt(1 - SQUARE_DECAY**count) / (1 - MEAN_DECAY**count)
        epsilon = self.epsilon * jnp.sqrt(1 - SQUARE_DECAY**count)
        return scale * mean / (jnp.sqrt(square) + epsilon), AdamState(count, mean, square)
