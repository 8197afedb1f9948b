"""A trained policy: weights, network and spaces together; acts with NumPy alone."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np

from .distributions import distribution_for
from .networks import Network, Params
from .spaces import Description, encode, encoded_shape, mask_width


class Policy:
    """Acts on raw observations of one environment or of a batch.

    A recurrent policy carries its state from call to call: call `reset()` when an episode begins.
    """

    def __init__(self, observation: Description, action: Description, network: Network, params: Params) -> None:
        self.observation, self.action = observation, action
        self.network, self.params = network, params
        self.distribution = distribution_for(action, network.squashed)
        self.rng = np.random.default_rng(0)
        self._state: np.ndarray | None = None
        self._actor: tuple[Params, Any] | None = None  # weights, and the network prepared for them

    def reset(self) -> None:
        """Reset the recurrent state: the next `act` begins new episodes."""
        self._state = None

    def keep(self, rows: np.ndarray) -> None:
        """Go on with these rows (`[N]` bool) of the last batch: the episodes of the others have ended."""
        if self._state is not None:
            self._state = self._state[rows]

    def act(self, observation: Any, deterministic: bool = True, mask: Any = None) -> Any:
        """One observation, as the environment gives it, to one action, as the environment takes it.

        `mask` is `info["action_mask"]`, for environments that have it; None: as the observation says, or everything.
        """
        masks = None if mask is None else [mask]
        return self.act_batch(_add_axis(self.observation, observation), deterministic, masks)[0]

    def act_batch(self, observations: Any, deterministic: bool = True, masks: Any = None) -> np.ndarray:
        """A batch of observations (a leading axis N on every leaf), and N masks, to a batch of actions."""
        return self.act_encoded(encode(self.observation, observations, masks), None, deterministic)

    def act_encoded(self, encoded: np.ndarray, first: np.ndarray | None, deterministic: bool) -> np.ndarray:
        """Encoded observations `[N, ...]` to actions; `first` `[N]` marks the rows where an episode begins."""
        if self._state is None or len(self._state) != len(encoded):
            self._state = self.network.initial_state(len(encoded))
        if first is not None:
            self._state = np.where(first[:, None], np.float32(0), self._state)
        if self._actor is None or self._actor[0] is not self.params:
            self._actor = self.params, self.network.actor(self.params)
        parameters, self._state = self._actor[1](encoded, self._state)
        if deterministic or self.network.action_values:
            return self.distribution.to_env(self.distribution.mode(parameters))
        noise = self.distribution.noise(self.rng, (len(encoded),))
        return self.distribution.to_env(self.distribution.sample(parameters, noise))

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_actor": None}  # which is prepared again

    def describe(self) -> dict[str, Any]:
        """Everything but the weights, as JSON."""
        return {"observation": self.observation, "action": self.action, "network": dataclasses.asdict(self.network)}

    @classmethod
    def from_description(cls, description: dict[str, Any], params: Params, kind: type[Network] = Network) -> Policy:
        """The inverse of `describe`, for a network of this kind."""
        fields = {key: _tuples(value) for key, value in description["network"].items()}
        return cls(description["observation"], description["action"], kind(**fields), params)

    @classmethod
    def from_files(cls, folder: str | Path) -> Policy:
        """Load an exported policy: `policy.json` and `weights.npz` in one folder."""
        folder = Path(folder)
        with np.load(folder / "weights.npz", allow_pickle=False) as weights:
            return cls.from_description(json.loads((folder / "policy.json").read_text()), dict(weights))


def network_for(observation: Description, action: Description, **settings: Any) -> Network:
    """A network that fits a pair of spaces; `settings` are the remaining fields of `Network`."""
    shape, dtype = encoded_shape(observation)
    distribution = distribution_for(action, settings.get("squashed", False))
    mask = mask_width(observation)
    return Network(input_shape=shape, input_dtype=str(dtype), outputs=distribution.outputs, mask=mask, **settings)


def _tuples(value: Any) -> Any:
    return tuple(_tuples(item) for item in value) if isinstance(value, list) else value


def _add_axis(description: Description, observation: Any) -> Any:
    if description["type"] == "masked":
        batch = _add_axis(description["observation"], observation)
        key = description["key"]
        return batch if key is None else {**batch, key: np.asarray(observation[key])[None]}
    if description["type"] == "dict":
        return {key: _add_axis(part, observation[key]) for key, part in description["spaces"].items()}
    if description["type"] == "tuple":
        return tuple(_add_axis(part, item) for part, item in zip(description["spaces"], observation, strict=True))
    return np.asarray(observation)[None]
