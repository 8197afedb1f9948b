"""The step contract: N environments stepped together, and their spaces as descriptions."""

from __future__ import annotations

import math
from typing import Any, NamedTuple, Protocol

import numpy as np
from gymnasium import spaces

from fever.envs.recovery import EnvRecovery
from fever.errors import FeverError
from fever.policy.spaces import Description, native_shape, with_mask

LARGEST = 10_000_000  # numbers in an observation or an action; the weights of a first layer would not fit into memory
MASK = "action_mask"  # name of a mask of allowed actions, in infos or in a Dict observation


class Step(NamedTuple):
    """The result of one step of N environments.

    The caller owns the arrays. The next action is chosen from `observations`. Where an episode ended and the
    environment was reset in the same step, `final` has the episode's last observation; otherwise the next step is a
    phantom step (see `Envs.next_step`).

    An environment that failed in this step gave no transition. It was made anew, and its row of `observations` begins
    its next episode; its reward is 0 and its flags are false.
    """

    observations: np.ndarray  # encoded [N, ...]
    rewards: np.ndarray  # [N]
    terminated: np.ndarray  # [N] bool
    truncated: np.ndarray  # [N] bool
    final: dict[int, np.ndarray]  # index -> encoded last observation of the episode that ended
    infos: dict[int, dict[str, Any]]  # index -> the last info of the episode that ended
    failed: frozenset[int] = frozenset()  # indices of environments that failed

    def without(self, rows: dict[int, np.ndarray]) -> Step:
        """This step, in which these environments have failed after all: index -> encoded first observation of the
        environment that was made in its place."""
        for index, row in rows.items():
            self.observations[index] = row
            self.rewards[index] = 0
            self.terminated[index] = self.truncated[index] = False
            self.final.pop(index, None)
            self.infos.pop(index, None)
        return self._replace(failed=self.failed | rows.keys())


class Envs(Protocol):
    """N environments stepped together."""

    name: str  # for messages
    count: int
    observation: Description  # final after the first reset, whose info may have an action mask
    action: Description
    next_step: bool  # Gymnasium's NEXT_STEP autoreset: the step after an episode's end, the phantom step, only resets
    recovery: EnvRecovery  # what is known of their failures
    stack: int  # frames in the last axis of an encoded image, newest last, shifted by one in every step; 1: not stacked

    def reset(self, seeds: list[int]) -> np.ndarray: ...
    def step(self, actions: np.ndarray) -> Step: ...
    def change(self, kwargs: dict[str, Any]) -> None: ...  # new arguments, for every environment when its episode ends
    def close(self) -> None: ...

    def fail(self, index: int, error: Exception, ago: int = 0) -> dict[int, np.ndarray]:
        """Make an environment anew that did not deliver what it should, `ago` steps before the last. `Step.without`
        takes what is returned. Raises the error if environments are not made anew."""
        ...


def describe_spaces(name: str, observation_space: Any, action_space: Any) -> tuple[Description, Description]:
    """Describe both spaces of an environment; raises FeverError if one cannot be used."""
    found = []
    for which, space in (("observation", observation_space), ("action", action_space)):
        try:
            found.append(describe_space(space))
        except ValueError as error:
            raise FeverError(f"{name} cannot be trained on: its {which} space: {error}") from error
    observation, action = found
    if observation["type"] == "dict" and MASK in observation["spaces"]:
        observation = _describe_mask(name, observation, action, MASK)
    return observation, action


def describe_space(space: Any) -> Description:
    """Describe a Gymnasium space; raises ValueError for a kind or a size that no network accepts."""
    _check_size(space)
    if isinstance(space, spaces.Box):
        if space.dtype == np.uint8 and len(space.shape) in (2, 3):
            return _describe_image(space.shape)
        return {
            "type": "box",
            "shape": list(space.shape),
            "dtype": str(space.dtype),
            "low": _bounds(space.low),
            "high": _bounds(space.high),
        }
    if isinstance(space, spaces.Discrete):
        return {"type": "discrete", "sizes": [int(space.n)], "starts": [int(space.start)], "shape": []}
    if isinstance(space, spaces.MultiDiscrete):
        return {
            "type": "discrete",
            "sizes": [int(n) for n in space.nvec.ravel()],
            "starts": [int(n) for n in space.start.ravel()],
            "shape": list(space.shape),
        }
    if isinstance(space, spaces.MultiBinary):
        return {"type": "binary", "shape": list(space.shape)}
    if isinstance(space, spaces.Dict):
        return {"type": "dict", "spaces": {key: describe_space(part) for key, part in space.spaces.items()}}
    if isinstance(space, spaces.Tuple):
        return {"type": "tuple", "spaces": [describe_space(part) for part in space.spaces]}
    kinds = "Box, Discrete, MultiDiscrete, MultiBinary, Dict and Tuple"
    if not isinstance(space, spaces.Space):
        raise ValueError(f"it is a {type(space).__name__} and must be a gymnasium.Space: {kinds} are supported")
    raise ValueError(f"{type(space).__name__} is not supported; use {kinds}")


def _check_size(space: Any) -> None:
    """Raise ValueError for a space without any number, or with so many that no network takes them."""
    if isinstance(space, spaces.Discrete | spaces.MultiDiscrete):
        size = int(np.sum(getattr(space, "nvec", getattr(space, "n", 0)), dtype=np.float64))
    elif isinstance(space, spaces.Box | spaces.MultiBinary):
        size = math.prod(space.shape)
    elif isinstance(space, spaces.Dict | spaces.Tuple):
        size = len(space.spaces)
    else:
        return
    if not 0 < size <= LARGEST:
        raise ValueError(f"a {type(space).__name__} of size {size:,}; it must be from 1 to {LARGEST:,}")


def _bounds(values: np.ndarray) -> list[float | None]:
    """Bounds as JSON numbers; infinite ones are null, because JSON has no infinity."""
    return [float(value) if np.isfinite(value) else None for value in values.ravel()]


def _describe_image(shape: tuple[int, ...]) -> Description:
    """Find the channel axis: the smaller of the first and the last axis; the last one if they are equal."""
    if len(shape) == 2:
        return {"type": "image", "shape": [*shape, 1], "order": "hw"}
    if shape[0] < shape[2]:
        return {"type": "image", "shape": [shape[1], shape[2], shape[0]], "order": "chw"}
    return {"type": "image", "shape": list(shape), "order": "hwc"}


def describe_info(name: str, observation: Description, action: Description, info: dict[str, Any]) -> Description:
    """The description of observations after the first reset, whose info may have an action mask."""
    if MASK not in info or observation["type"] == "masked":
        return observation
    return _describe_mask(name, observation, action, None)


def _describe_mask(name: str, observation: Description, action: Description, key: str | None) -> Description:
    try:
        return with_mask(observation, action, key)
    except ValueError as error:
        raise FeverError(f"{name} cannot be trained on: {error}") from error


def stack_observations(description: Description, observations: list[Any]) -> Any:
    """Stack N single observations to one batch: every leaf gets a leading axis N."""
    if description["type"] == "masked":
        batch, key = stack_observations(description["observation"], observations), description["key"]
        if key is None:
            return batch
        try:
            return {**batch, key: np.array([item[key] for item in observations])}
        except KeyError as error:
            raise ValueError(f"the observation has no part {key!r}") from error
    if description["type"] in ("dict", "tuple"):
        parts = description["spaces"]
        pairs = parts.items() if description["type"] == "dict" else enumerate(parts)
        batch = {}
        for key, part in pairs:
            try:
                items = [item[key] for item in observations]
            except (KeyError, IndexError, TypeError) as error:
                raise ValueError(f"the observation has no part {key!r}") from error
            try:
                batch[key] = stack_observations(part, items)
            except ValueError as error:
                raise ValueError(f"in part {key!r}, {error}") from error
        return batch
    try:
        return np.array(observations)
    except ValueError as error:
        shapes = sorted({np.shape(item) for item in observations})
        raise ValueError(
            f"the observation has shape {shapes[0]} and its space says {native_shape(description)}"
        ) from error
