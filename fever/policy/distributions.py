"""Action distributions, for NumPy and JAX alike: `xp` is `numpy` or `jax.numpy`.

The parameters of a distribution are the last axis of the policy head's output. Sampling is split in two, so that a
sampler draws the noise of a whole fragment at once: `noise` (random) and `sample` (a function of noise).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import numpy as np

from .spaces import Description

LOG_2PI = math.log(2 * math.pi)


class Distribution(Protocol):
    """Interface of action distributions; `...` are any leading axes."""

    @property
    def outputs(self) -> int:
        """Width of the policy head."""
        ...

    @property
    def action_shape(self) -> tuple[int, ...]:
        """Shape of one action as it is stored and learned from."""
        ...

    @property
    def action_dtype(self) -> Any: ...

    def noise(self, rng: np.random.Generator, leading: tuple[int, ...]) -> np.ndarray: ...
    def sample(self, parameters: Any, noise: Any, xp: Any = np) -> Any: ...
    def mode(self, parameters: Any, xp: Any = np) -> Any: ...
    def log_prob(self, parameters: Any, actions: Any, xp: Any = np) -> Any: ...
    def entropy(self, parameters: Any, xp: Any = np) -> Any: ...
    def kl(self, old: Any, new: Any, xp: Any = np) -> Any: ...
    def uniform(self, rng: np.random.Generator, leading: tuple[int, ...]) -> np.ndarray: ...
    def to_env(self, actions: np.ndarray) -> np.ndarray: ...


@dataclass(frozen=True)
class Categorical:
    """K independent categorical choices: Discrete (K = 1), MultiDiscrete and MultiBinary (K choices of two).

    Every choice gets `max(sizes)` logits; those beyond its own size are pushed to minus a billion, which makes their
    probability exactly zero without a loop over choices. Stored actions are int32 `[..., K]`, counted from zero.
    """

    sizes: tuple[int, ...]
    starts: tuple[int, ...]
    env_shape: tuple[int, ...]
    env_dtype: str = "int64"

    @property
    def outputs(self) -> int:
        return len(self.sizes) * max(self.sizes)

    @property
    def action_shape(self) -> tuple[int, ...]:
        return (len(self.sizes),)

    @property
    def action_dtype(self) -> Any:
        return np.int32

    def _logits(self, parameters: Any) -> Any:
        logits = parameters.reshape(*parameters.shape[:-1], len(self.sizes), max(self.sizes))  # [..., K, max]
        if len(set(self.sizes)) == 1:
            return logits
        outside = np.arange(max(self.sizes)) >= np.asarray(self.sizes)[:, None]  # [K, max]
        return logits - 1e9 * outside.astype(np.float32)

    def _log_probabilities(self, parameters: Any, xp: Any) -> Any:
        logits = self._logits(parameters)
        logits = logits - logits.max(-1, keepdims=True)
        return logits - xp.log(xp.exp(logits).sum(-1, keepdims=True))

    def noise(self, rng: np.random.Generator, leading: tuple[int, ...]) -> np.ndarray:
        """Gumbel noise: the argmax of logits plus this is an exact sample."""
        uniform = rng.random((*leading, len(self.sizes), max(self.sizes)), dtype=np.float32)
        return -np.log(-np.log(uniform + 1e-12) + 1e-12)

    def sample(self, parameters: Any, noise: Any, xp: Any = np) -> Any:
        return (self._logits(parameters) + noise).argmax(-1).astype(np.int32)

    def mode(self, parameters: Any, xp: Any = np) -> Any:
        return self._logits(parameters).argmax(-1).astype(np.int32)

    def log_prob(self, parameters: Any, actions: Any, xp: Any = np) -> Any:
        chosen = actions[..., None] == np.arange(max(self.sizes))  # a product fuses in XLA, a gather does not
        return (self._log_probabilities(parameters, xp) * chosen).sum((-1, -2))

    def entropy(self, parameters: Any, xp: Any = np) -> Any:
        log_probabilities = self._log_probabilities(parameters, xp)
        return -(xp.exp(log_probabilities) * log_probabilities).sum((-1, -2))

    def kl(self, old: Any, new: Any, xp: Any = np) -> Any:
        log_old, log_new = self._log_probabilities(old, xp), self._log_probabilities(new, xp)
        return (xp.exp(log_old) * (log_old - log_new)).sum((-1, -2))

    def uniform(self, rng: np.random.Generator, leading: tuple[int, ...]) -> np.ndarray:
        """Stored actions, uniform over the space."""
        return rng.integers(0, self.sizes, (*leading, len(self.sizes)), np.int32)

    def to_env(self, actions: np.ndarray) -> np.ndarray:
        """Stored actions `[N, K]` to a batch of actions as the environment takes them."""
        shifted = actions.astype(self.env_dtype) + np.asarray(self.starts, self.env_dtype)
        return shifted.reshape(len(actions), *self.env_shape)


@dataclass(frozen=True)
class Gaussian:
    """A diagonal Gaussian over a bounded Box, scaled so that -1 and 1 are the bounds.

    Parameters are the means and the log standard deviations side by side. Stored actions are float32 `[..., D]`,
    before clipping: the learner gets the sample, the environment the sample clipped to its bounds.
    """

    low: tuple[float, ...]
    high: tuple[float, ...]
    env_shape: tuple[int, ...]
    env_dtype: str = "float32"

    @property
    def outputs(self) -> int:
        return 2 * len(self.low)

    @property
    def action_shape(self) -> tuple[int, ...]:
        return (len(self.low),)

    @property
    def action_dtype(self) -> Any:
        return np.float32

    def _split(self, parameters: Any) -> tuple[Any, Any]:
        return parameters[..., : len(self.low)], parameters[..., len(self.low) :]

    def noise(self, rng: np.random.Generator, leading: tuple[int, ...]) -> np.ndarray:
        return rng.standard_normal((*leading, len(self.low)), dtype=np.float32)

    def sample(self, parameters: Any, noise: Any, xp: Any = np) -> Any:
        mean, log_std = self._split(parameters)
        return mean + xp.exp(log_std) * noise

    def mode(self, parameters: Any, xp: Any = np) -> Any:
        return self._split(parameters)[0]

    def log_prob(self, parameters: Any, actions: Any, xp: Any = np) -> Any:
        mean, log_std = self._split(parameters)
        scaled = (actions - mean) * xp.exp(-log_std)
        return -(0.5 * scaled**2 + log_std + 0.5 * LOG_2PI).sum(-1)

    def entropy(self, parameters: Any, xp: Any = np) -> Any:
        return (self._split(parameters)[1] + 0.5 * (1 + LOG_2PI)).sum(-1)

    def kl(self, old: Any, new: Any, xp: Any = np) -> Any:
        mean_old, log_old = self._split(old)
        mean_new, log_new = self._split(new)
        spread = (xp.exp(2 * log_old) + (mean_old - mean_new) ** 2) * xp.exp(-2 * log_new)
        return (log_new - log_old + 0.5 * spread - 0.5).sum(-1)

    def uniform(self, rng: np.random.Generator, leading: tuple[int, ...]) -> np.ndarray:
        """Stored actions, uniform within the bounds."""
        return rng.random((*leading, len(self.low)), np.float32) * 2 - 1

    def to_env(self, actions: np.ndarray) -> np.ndarray:
        """Stored actions `[N, D]` to a batch of actions within the environment's bounds."""
        low, high = self._bounds
        scaled = (low + high) / 2 + actions * ((high - low) / 2)
        inside = np.minimum(np.maximum(scaled, low), high)  # several times faster than clip on small arrays
        return inside.astype(self.env_dtype, copy=False).reshape(len(actions), *self.env_shape)

    @cached_property
    def _bounds(self) -> tuple[np.ndarray, np.ndarray]:
        return np.asarray(self.low, self.env_dtype), np.asarray(self.high, self.env_dtype)


@dataclass(frozen=True)
class SquashedGaussian(Gaussian):
    """The tanh of a diagonal Gaussian, scaled to a bounded Box (Haarnoja et al. 2018, appendix C).

    Stored actions are within -1 and 1. Log probabilities are those of a sample whose noise is known: computing them
    from the action alone would lose all precision near the bounds.
    """

    def _split(self, parameters: Any) -> tuple[Any, Any]:
        mean, log_std = super()._split(parameters)
        return mean, log_std.clip(-20, 2)

    def sample(self, parameters: Any, noise: Any, xp: Any = np) -> Any:
        return xp.tanh(super().sample(parameters, noise, xp))

    def sample_and_log_prob(self, parameters: Any, noise: Any, xp: Any = np) -> tuple[Any, Any]:
        """Actions `[..., D]` and their log probabilities `[...]`."""
        _, log_std = self._split(parameters)
        drawn = super().sample(parameters, noise, xp)
        stretch = 2 * (math.log(2) - drawn - xp.logaddexp(0.0, -2 * drawn))  # log(1 - tanh^2), without cancellation
        return xp.tanh(drawn), -(0.5 * noise**2 + log_std + 0.5 * LOG_2PI + stretch).sum(-1)

    def mode(self, parameters: Any, xp: Any = np) -> Any:
        return xp.tanh(super().mode(parameters, xp))

    def log_prob(self, parameters: Any, actions: Any, xp: Any = np) -> Any:
        inside = actions.clip(-1 + 1e-6, 1 - 1e-6)
        return super().log_prob(parameters, xp.arctanh(inside), xp) - xp.log(1 - inside**2).sum(-1)


@dataclass(frozen=True)
class Deterministic(Gaussian):
    """One action for each observation: the tanh of the policy head's output, scaled to a bounded Box (TD3).

    Stored actions are within -1 and 1. There is nothing to draw and no density; explorers add noise to the action.
    """

    @property
    def outputs(self) -> int:
        return len(self.low)

    def _split(self, parameters: Any) -> tuple[Any, Any]:
        raise TypeError("a deterministic action has neither a deviation nor a density")

    def noise(self, rng: np.random.Generator, leading: tuple[int, ...]) -> np.ndarray:
        return np.zeros((*leading, len(self.low)), np.float32)

    def sample(self, parameters: Any, noise: Any, xp: Any = np) -> Any:
        return self.mode(parameters, xp)

    def mode(self, parameters: Any, xp: Any = np) -> Any:
        return xp.tanh(parameters)


def distribution_for(description: Description, squashed: bool | str = False) -> Categorical | Gaussian:
    """The distribution for a described action space; raises ValueError if it is not supported.

    `squashed` is `Network.squashed`.
    """
    shape = tuple(description.get("shape", ()))
    if description["type"] == "discrete":
        return Categorical(tuple(description["sizes"]), tuple(description["starts"]), shape)
    if description["type"] == "binary":
        size = int(np.prod(shape))
        return Categorical((2,) * size, (0,) * size, shape, "int8")
    if description["type"] == "box" and np.dtype(description["dtype"]).kind == "f":
        low, high = description["low"], description["high"]
        if None in low or None in high:
            raise ValueError("the action space has no bounds; give its Box finite low and high")
        kind = Deterministic if squashed == "deterministic" else SquashedGaussian if squashed else Gaussian
        return kind(tuple(low), tuple(high), shape, description["dtype"])
    raise ValueError(
        "this action space is not supported; use Discrete, MultiDiscrete, MultiBinary or a bounded Box of floats"
    )
