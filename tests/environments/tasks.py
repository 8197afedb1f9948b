"""Tasks with a right answer, which a test can learn: one for every kind of space, images, memory, action masks."""

from __future__ import annotations

import copy
import functools
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode

SPACES = {
    "discrete": spaces.Discrete(3),
    "discrete_start": spaces.Discrete(3, start=5),
    "multidiscrete": spaces.MultiDiscrete([2, 4, 3]),
    "multibinary": spaces.MultiBinary(3),
    "box": spaces.Box(np.array([-2.0, 0.0], np.float32), np.array([2.0, 5.0], np.float32)),
    "dict": spaces.Dict(
        {
            "cue": spaces.Discrete(3),
            "distraction": spaces.Box(-1, 1, (2,)),
            "nested": spaces.Dict({"flags": spaces.MultiBinary(2)}),
        }
    ),
    "tuple": spaces.Tuple((spaces.Discrete(3, start=1), spaces.Box(-1, 1, (2,)), spaces.MultiBinary(2))),
}


def fractions(space: spaces.Space, value: Any) -> np.ndarray:
    """A value of a bounded space, flattened and scaled to numbers from 0 to 1."""
    if isinstance(space, spaces.Dict):
        return np.concatenate([fractions(part, value[key]) for key, part in space.spaces.items()])
    if isinstance(space, spaces.Tuple):
        return np.concatenate([fractions(part, item) for part, item in zip(space.spaces, value, strict=True)])
    if isinstance(space, spaces.Box):
        return ((value - space.low) / (space.high - space.low)).ravel().astype(np.float64)
    sizes, starts = _choices(space)
    return (np.ravel(value) - starts) / sizes


def value_at(space: spaces.Space, parts: np.ndarray) -> Any:
    """The inverse of `fractions`. Too few numbers are repeated, too many are cut off."""
    if isinstance(space, spaces.Box):
        return (space.low + np.resize(parts, space.shape) * (space.high - space.low)).astype(space.dtype)
    sizes, starts = _choices(space)
    index = np.minimum(np.floor(np.resize(parts, len(sizes)) * sizes + 1e-9), sizes - 1).astype(np.int64)
    return (index + starts).reshape(space.shape)


def _choices(space: spaces.Space) -> tuple[np.ndarray, np.ndarray]:
    """The number of options and the first value of every choice in a Discrete, MultiDiscrete or MultiBinary space."""
    if isinstance(space, spaces.Discrete):
        return np.array([space.n]), np.array([space.start])
    if isinstance(space, spaces.MultiDiscrete):
        return space.nvec.ravel(), space.start.ravel()
    size = int(np.prod(space.shape))
    return np.full(size, 2), np.zeros(size, np.int64)


class IdentityEnv(gym.Env):
    """The observation determines the right action: reward 1 for it, or minus the distance to it if actions are a Box.

    If no observation space is given, the observation is the right action itself.
    """

    def __init__(self, action_space: Any = "discrete", observation_space: Any = None, length: int = 8) -> None:
        observation_space = action_space if observation_space is None else observation_space
        self.action_space = SPACES[action_space] if isinstance(action_space, str) else action_space
        space = SPACES[observation_space] if isinstance(observation_space, str) else observation_space
        self.observation_space = copy.deepcopy(space)  # observations are drawn with the space's own random generator
        self.length, self.count = length, 0

    def right_action(self, observation: Any) -> Any:
        return value_at(self.action_space, fractions(self.observation_space, observation))

    def _show(self) -> Any:
        self.observation = self.observation_space.sample()
        return self.observation

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        if seed is not None:
            self.observation_space.seed(seed)
        self.count = 0
        return self._show(), {}

    def step(self, action: Any) -> Any:
        if not self.action_space.contains(action):
            raise ValueError(f"{action!r} is not in {self.action_space}")
        right = self.right_action(self.observation)
        if isinstance(self.action_space, spaces.Box):
            reward = -float(np.linalg.norm(action - right))
        else:
            reward = float(np.array_equal(action, right))
        self.count += 1
        return self._show(), reward, self.count == self.length, False, {}


class DictEnv(IdentityEnv):
    """The cue in a nested Dict observation is the right action."""

    def __init__(self, length: int = 8) -> None:
        super().__init__("discrete", "dict", length)


class TupleEnv(IdentityEnv):
    """The first part of a Tuple observation is the right action."""

    def __init__(self, length: int = 8) -> None:
        super().__init__("discrete", "tuple", length)


class ImageEnv(gym.Env):
    """The left (action 0) or the right half (action 1) of a uint8 image is brighter: reward 1 for the brighter half.

    If it is `continuous`, the action is a number from -1 (left) to 1 (right); its product with the right one of both is
    the reward.
    """

    def __init__(
        self, order: str = "hwc", height: int = 10, width: int = 12, length: int = 8, continuous: bool = False
    ) -> None:
        self.action_space = spaces.Box(-1, 1, (1,)) if continuous else spaces.Discrete(2)
        self.order, self.length, self.count = order, length, 0
        shape = {"hwc": (height, width, 3), "chw": (3, height, width), "hw": (height, width)}[order]
        self.observation_space = spaces.Box(0, 255, shape, np.uint8)
        self.size = (height, width)

    def _show(self) -> np.ndarray:
        height, width = self.size
        image = self.np_random.integers(0, 100, (height, width, 3))
        self.right = int(self.np_random.integers(2))
        half = slice(width // 2, None) if self.right else slice(width // 2)
        image[:, half] += 150
        image = image.astype(np.uint8)
        return {"hwc": image, "chw": image.transpose(2, 0, 1), "hw": image[..., 0]}[self.order]

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.count = 0
        return self._show(), {}

    def step(self, action: Any) -> Any:
        continuous = isinstance(self.action_space, spaces.Box)
        reward = float(action[0]) * (2 * self.right - 1) if continuous else float(action == self.right)
        self.count += 1
        return self._show(), reward, self.count == self.length, False, {}


class MemoryEnv(gym.Env):
    """A cue, -1 or 1, is shown in the first step and is the answer in the last: without memory the best return is 0.5.

    The observation is the cue (0 after the first step) and whether the answer is due in this step.
    """

    observation_space = spaces.Box(-1, 1, (2,))
    action_space = spaces.Discrete(2)

    def __init__(self, length: int = 4) -> None:
        self.length, self.count = length, 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.count, self.answer = 0, int(self.np_random.integers(2))
        return np.array([2 * self.answer - 1, 0], np.float32), {}

    def step(self, action: Any) -> Any:
        self.count += 1
        ended = self.count == self.length
        observation = np.array([0, self.count == self.length - 1], np.float32)
        return observation, float(ended and action == self.answer), ended, False, {}


class MaskedEnv(gym.Env):
    """`IdentityEnv` with an action mask; raises ValueError if an action is forbidden. The right action is always
    allowed, the others at random. Episodes are terminated and truncated in turn; with `dead`, their last mask allows
    nothing.

    The mask is in the "info", in a Dict observation ("dict") or in "both". It is one flat array, or (`parts`) one array
    for each choice. A fault breaks the mask at step `at`, counted over all episodes, in the environment with index
    `only`, or (`only=None`) in all of them.
    """

    def __init__(
        self,
        action_space: Any = "discrete_start",
        observation_space: Any = None,
        where: str = "info",
        parts: bool = False,
        dead: bool = True,
        fault: str = "",  # "size", "nothing" or "missing"
        at: int = 3,
        only: int | None = None,
        length: int = 8,
        env_index: int = 0,
    ) -> None:
        self.inner = IdentityEnv(action_space, observation_space, length)
        self.action_space, self.observation_space = self.inner.action_space, self.inner.observation_space
        self.sizes, self.starts = _choices(self.action_space)
        if where != "info":
            mask = spaces.MultiBinary(int(self.sizes.sum()))
            self.observation_space = spaces.Dict({"action_mask": mask, "cue": self.observation_space})
        self.where, self.parts, self.dead = where, parts, dead
        self.fault, self.at = fault if only in (None, env_index) else "", at
        self.steps, self.episode = 0, -1

    def _show(self, observation: Any, ended: bool = False) -> tuple[Any, dict[str, Any]]:
        right = np.ravel(self.inner.right_action(observation)) - self.starts
        masks = [self.np_random.random(size) < 0.5 for size in self.sizes]
        self.allowed = [mask | (np.arange(len(mask)) == index) for mask, index in zip(masks, right, strict=True)]
        fault = self.fault if self.steps == self.at else ""
        if (ended and self.dead) or fault == "nothing":
            self.allowed = [np.zeros_like(mask) for mask in self.allowed]
        flat = np.concatenate([*self.allowed, *[[True]] * (fault == "size")]).astype(np.int8)
        given = {} if fault == "missing" else {"action_mask": flat}
        observation = observation if self.where == "info" else {"cue": observation, **given}
        info = {} if self.where == "dict" else given
        return observation, {"action_mask": tuple(self.allowed)} if info and self.parts else info

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.episode += 1
        return self._show(self.inner.reset(seed=seed)[0])

    def step(self, action: Any) -> Any:
        chosen = np.ravel(action) - self.starts
        if not all(mask[index] for mask, index in zip(self.allowed, chosen, strict=True)):
            raise ValueError(f"{action} is forbidden")
        self.steps += 1
        observation, reward, ended, _, _ = self.inner.step(action)
        observation, info = self._show(observation, ended)
        odd = self.episode % 2 == 1
        return observation, reward, ended and not odd, ended and odd, info


class NextStepMasked(gym.vector.SyncVectorEnv):
    """`MaskedEnv` as a vector environment: the step after an episode's end ignores its action and resets."""

    mode = AutoresetMode.NEXT_STEP

    def __init__(self, num_envs: int, **settings: Any) -> None:
        makers = [functools.partial(MaskedEnv, env_index=index, **settings) for index in range(num_envs)]
        super().__init__(makers, autoreset_mode=self.mode)


class SameStepMasked(NextStepMasked):
    """`MaskedEnv` as a vector environment: the step that ends an episode also resets it."""

    mode = AutoresetMode.SAME_STEP
