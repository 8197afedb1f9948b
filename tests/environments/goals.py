"""Goal environments: observation, achieved goal and desired goal."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from gymnasium.vector import VectorEnv


class BitFlipEnv(gym.Env):
    """Flip one of N bits in each of N steps, until they are the goal (Andrychowicz et al. 2017): reward -1, then 0."""

    def __init__(self, bits: int = 10) -> None:
        self.bits = bits
        names = ("observation", "achieved_goal", "desired_goal")
        self.observation_space = spaces.Dict({name: spaces.MultiBinary(bits) for name in names})
        self.action_space = spaces.Discrete(bits)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.state, self.goal = self.np_random.integers(0, 2, (2, self.bits), np.int8)
        self.time = 0
        return self.look(), {}

    def look(self) -> dict[str, np.ndarray]:
        return {"observation": self.state.copy(), "achieved_goal": self.state.copy(), "desired_goal": self.goal.copy()}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.state[action] ^= 1
        self.time += 1
        reward = self.compute_reward(self.state, self.goal, {})
        return self.look(), reward, reward == 0, self.time == self.bits, {}

    def compute_reward(self, achieved_goal: Any, desired_goal: Any, info: dict[str, Any]) -> float:
        return 0.0 if np.array_equal(achieved_goal, desired_goal) else -1.0

    def compute_terminated(self, achieved_goal: Any, desired_goal: Any, info: dict[str, Any]) -> bool:
        return np.array_equal(achieved_goal, desired_goal)


class WalkEnv(gym.Env):
    """Walks along a line, whatever the action: 3 steps in the first episode, 2 in the next, then 3, ...

    An episode of 2 steps terminates, one of 3 is truncated. The observation is (episode, place); the achieved goal is
    the place, the desired one is far away. The reward is minus the distance between the goals.
    """

    def __init__(self, continuous: bool = False) -> None:
        far = spaces.Box(-100.0, 100.0, (1,), np.float64)
        self.observation_space = spaces.Dict(
            {"observation": spaces.Box(-100.0, 100.0, (2,)), "achieved_goal": far, "desired_goal": far}
        )
        self.action_space = spaces.Box(-1.0, 1.0, (1,)) if continuous else spaces.Discrete(2)
        self.episode = -1

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.episode, self.place, self.time = self.episode + 1, 0, 0
        return self.look(), {}

    def look(self) -> dict[str, np.ndarray]:
        here = np.array([self.episode, self.place], np.float32)
        return {"observation": here, "achieved_goal": np.array([float(self.place)]), "desired_goal": np.array([50.0])}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.place += 1
        self.time += 1
        short = self.episode % 2 == 1
        observation = self.look()
        reward = self.compute_reward(observation["achieved_goal"], observation["desired_goal"], {})
        return observation, reward, short and self.time == 2, not short and self.time == 3, {}

    def compute_reward(self, achieved_goal: Any, desired_goal: Any, info: dict[str, Any]) -> float:
        assert achieved_goal.shape == desired_goal.shape == (1,)
        assert achieved_goal.dtype == np.float64
        return -float(abs(achieved_goal - desired_goal)[0])


class EndingWalkEnv(WalkEnv):
    """Says for any goal whether reaching it ends an episode."""

    def compute_terminated(self, achieved_goal: Any, desired_goal: Any, info: dict[str, Any]) -> bool:
        return bool(achieved_goal[0] == desired_goal[0])


class NoRewardEnv(WalkEnv):
    """A goal environment without `compute_reward`."""

    compute_reward = None  # type: ignore[assignment]

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        return self.look(), 0.0, False, True, {}


class OddRewardEnv(WalkEnv):
    """Its `compute_reward` returns what is no reward."""

    def __init__(self, reward: Any = None) -> None:
        super().__init__()
        self.reward = float("nan") if reward == "nan" else reward

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        return self.look(), 0.0, False, True, {}

    def compute_reward(self, achieved_goal: Any, desired_goal: Any, info: dict[str, Any]) -> Any:
        return self.reward


class VectorGoals(VectorEnv):
    """A natively vectorised goal environment."""

    def __init__(self, num_envs: int = 1) -> None:
        self.num_envs = num_envs
        self.single_observation_space, self.single_action_space = WalkEnv().observation_space, spaces.Discrete(2)

    def reset(self, *, seed: Any = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        widths = {"observation": 2, "achieved_goal": 1, "desired_goal": 1}
        return {name: np.zeros((self.num_envs, width)) for name, width in widths.items()}, {}
