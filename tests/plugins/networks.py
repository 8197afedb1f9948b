"""Networks as users write them: Flax, Equinox and plain functions, and some that do not fit."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np


def columns(observation: Any) -> Any:
    """All parts of an observation side by side, `[N, F]`."""
    return jnp.concatenate([part.reshape(len(part), -1) for part in jax.tree.leaves(observation)], axis=1)


class FlaxNet(nn.Module):
    """Two layers; nothing of fever is in it."""

    width: int = 16

    @nn.compact
    def __call__(self, observation: Any) -> Any:
        return nn.tanh(nn.Dense(self.width)(nn.tanh(nn.Dense(self.width)(columns(observation)))))


class FlaxMemory(nn.Module):
    """A GRU with a state of its own."""

    state_size: int = 16

    @nn.compact
    def __call__(self, observation: Any, state: Any) -> Any:
        state, features = nn.GRUCell(self.state_size)(state, columns(observation))
        return features, state


class EquinoxNet:
    """The arrays of an Equinox module are its weights; the rest of it stays here."""

    def _make(self, key: Any, observation: Any) -> Any:
        size = columns(observation).shape[1]
        return eqx.partition(eqx.nn.MLP(size, 8, 16, 1, key=key), eqx.is_array)

    def init(self, key: Any, observation: Any) -> Any:
        return self._make(key, observation)[0]

    def apply(self, params: Any, observation: Any) -> Any:
        _, rest = eqx.filter_eval_shape(self._make, jax.random.key(0), observation)
        return jax.vmap(eqx.combine(params, rest))(columns(observation))


def plain(width: int = 8) -> Any:
    """Two functions."""

    def init(key: Any, observation: Any) -> Any:
        size = columns(observation).shape[1]
        return {"w": jax.random.normal(key, (size, width)) / size**0.5, "b": jnp.zeros(width)}

    def apply(params: Any, observation: Any) -> Any:
        return jnp.tanh(columns(observation) @ params["w"] + params["b"])

    return SimpleNamespace(init=init, apply=apply)


class OnNumpy:
    """Has its own NumPy side; `calls` counts them."""

    calls = 0

    def init(self, key: Any, observation: Any) -> Any:
        return {"w": jax.random.normal(key, (observation.shape[1], 8))}

    def apply(self, params: Any, observation: Any) -> Any:
        return jnp.tanh(observation @ params["w"])

    def apply_numpy(self, params: Any, observation: Any) -> Any:
        OnNumpy.calls += 1
        return np.tanh(observation @ params["w"])


# networks that do not fit

no_apply = lambda: SimpleNamespace(init=lambda key, observation: {})  # noqa: E731
whole_numbers = lambda: SimpleNamespace(  # noqa: E731
    init=lambda key, observation: {"steps": jnp.zeros(2, int)}, apply=lambda params, observation: observation
)
flat_features = lambda: SimpleNamespace(  # noqa: E731
    init=lambda key, observation: {"w": jnp.zeros(2)}, apply=lambda params, observation: observation.sum()
)
nothing = lambda: SimpleNamespace(  # noqa: E731
    init=lambda key, observation: {"w": jnp.zeros(2)}, apply=lambda params, observation: None
)
no_state = lambda: SimpleNamespace(  # noqa: E731
    state_size=3, init=lambda key, observation, state: {}, apply=lambda params, observation, state: observation
)
raising = lambda: SimpleNamespace(  # noqa: E731
    init=lambda key, observation: observation["cells"], apply=lambda params, observation: observation
)
