"""Hindsight experience replay (Andrychowicz et al. 2017): when an episode is over, its transitions are added once more,
with goals that it did reach. NumPy only: no JAX, no Ray.

It needs observations that are a Dict of `observation`, `achieved_goal` and `desired_goal`, and environments with
`compute_reward(achieved_goal, desired_goal, info)`, as Gymnasium-Robotics defines them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from fever.envs.contract import Envs
from fever.envs.loop import LoopEnvs
from fever.errors import ContractError, FeverError
from fever.policy.spaces import Description, encoded_shape
from fever.sampling.runner import Trajectory

PARTS = ("observation", "achieved_goal", "desired_goal")
Strategy = Literal["future", "final"]


@dataclass
class Copies:
    """M transitions over one step with other goals; observations are encoded."""

    observations: np.ndarray  # [M, size]
    next_observations: np.ndarray  # [M, size]
    actions: np.ndarray  # [M, *action_shape]
    rewards: np.ndarray  # float32 [M]
    terminated: np.ndarray  # bool [M]


def check_goals(name: str, observation: Description) -> None:
    """Raise FeverError if observations are not those of a goal environment."""
    if observation["type"] == "masked":
        raise FeverError(f"{name} has action masks, which her does not support")
    parts = observation["spaces"] if observation["type"] == "dict" else {}
    if not set(PARTS) <= set(parts):
        raise FeverError(f"her needs Dict observations with {', '.join(PARTS)}, which {name} does not have")
    achieved, desired = (
        {key: value for key, value in parts[part].items() if key not in ("low", "high")} for part in PARTS[1:]
    )
    if achieved != desired or achieved["type"] not in ("box", "discrete", "binary"):
        raise FeverError(
            f"her needs goals that are Box, Discrete, MultiDiscrete or MultiBinary, and achieved_goal and desired_goal "
            f"of one shape and type, which those of {name} are not"
        )


class Hindsight:
    """Collects the episodes of N environments and relabels each when it is over.

    Every transition is copied `copies` times. The goal of a copy was achieved in the same episode: in one of the states
    that this transition and later ones led to, drawn at random ("future", as in SB3), or in the last one ("final"). The
    reward is `compute_reward` of the new goal. A copy is terminated if the environment's `compute_terminated` says so;
    where there is none, if the transition itself was, as in SB3's HerReplayBuffer. Both get single goals and an empty
    info, as SB3 passes by default.
    """

    def __init__(self, envs: Envs, copies: int, strategy: Strategy, rng: np.random.Generator) -> None:
        check_goals(envs.name, envs.observation)
        if not isinstance(envs, LoopEnvs):
            raise FeverError(f"{envs.name} is natively vectorised, which her does not support")
        self.name, self.copies, self.strategy, self.rng = envs.name, copies, strategy, rng
        self.envs = envs
        if not all(callable(getattr(self._env(index), "compute_reward", None)) for index in range(envs.count)):
            raise FeverError(
                f"her needs an environment with compute_reward(achieved_goal, desired_goal, info), which {self.name} "
                "does not have"
            )
        parts = envs.observation["spaces"]
        self.goal: Description = parts["achieved_goal"]
        self.achieved, self.desired = (part_columns(parts, part) for part in PARTS[1:])
        self.open: list[list[list[np.ndarray]]] = [[] for _ in range(envs.count)]  # pieces of the running episodes

    def _env(self, index: int) -> Any:
        """The environment itself, without wrappers; a curriculum may have made it anew."""
        env = self.envs.envs[index]
        return getattr(env, "unwrapped", env)

    def relabel(self, trajectory: Trajectory) -> list[Copies]:
        """The copies of every episode that ended in this trajectory, or was cut by a failure of its environment; the
        steps of the others are kept."""
        reached = trajectory.observations[1:].copy()
        for t, step in enumerate(trajectory.steps):
            for index, last in step.final.items():
                reached[t, index] = last
        rows = (trajectory.observations[:-1], reached, trajectory.actions, trajectory.terminated)
        finished = []
        for index, pieces in enumerate(self.open):
            begin = 0
            failed = trajectory.failed[1:, index]
            for end in (np.flatnonzero(trajectory.ended[2:, index] | failed) + 1).tolist():
                pieces.append([array[begin : end - failed[end - 1], index] for array in rows])
                episode = [*map(np.concatenate, zip(*pieces, strict=True))]
                finished += [self._copy(index, *episode)] if len(episode[0]) else []
                pieces.clear()
                begin = end
            if begin < len(reached):
                pieces.append([array[begin:, index] for array in rows])
        return finished

    def _copy(
        self, index: int, observations: np.ndarray, reached: np.ndarray, actions: np.ndarray, terminated: np.ndarray
    ) -> Copies:
        """The copies of one episode of L steps in environment `index`, from arrays `[L, ...]`."""
        length = len(actions)
        steps = np.repeat(np.arange(length), self.copies)
        later = self.rng.integers(steps, length) if self.strategy == "future" else np.full_like(steps, length - 1)
        goals = reached[later, self.achieved]
        here, there = observations[steps], reached[steps]
        here[:, self.desired] = there[:, self.desired] = goals
        pairs = list(zip(decode(self.goal, there[:, self.achieved]), decode(self.goal, goals), strict=True))
        env = self._env(index)
        rewards = [self._reward(env.compute_reward(*pair, {})) for pair in pairs]
        ends = getattr(env, "compute_terminated", None)
        over = terminated[steps] if ends is None else np.array([bool(ends(*pair, {})) for pair in pairs])
        return Copies(here, there, actions[steps], np.array(rewards, np.float32), over)

    def _reward(self, value: Any) -> float:
        try:
            (reward,) = np.asarray(value, np.float64).ravel().tolist()
        except (TypeError, ValueError):
            reward = math.nan
        if not math.isfinite(reward):
            raise ContractError(f"compute_reward of {self.name} must return one finite number, not {value!r}")
        return reward


def part_columns(parts: dict[str, Description], name: str) -> slice:
    """Where a part of a Dict is in an encoded observation."""
    place = 0
    for part, description in parts.items():
        width = math.prod(encoded_shape(description)[0])
        if part == name:
            return slice(place, place + width)
        place += width
    raise KeyError(name)


def decode(description: Description, columns: np.ndarray) -> np.ndarray:
    """The inverse of `fever.policy.spaces.encode` for a part of a Dict: `[M, width]` to `[M, *shape]`."""
    if description["type"] == "discrete":
        ends = np.cumsum(description["sizes"])[:-1]
        choices = [block.argmax(1) for block in np.split(columns, ends, axis=1)]
        values = np.stack(choices, axis=1) + np.asarray(description["starts"])
        return values.reshape(-1, *description["shape"])
    dtype = np.dtype(description.get("dtype", "int8"))
    values = columns.reshape(-1, *description["shape"])
    if dtype == np.uint8:
        values = values * 255
    return (values if dtype.kind == "f" else values.round()).astype(dtype)
