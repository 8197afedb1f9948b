"""Environments whose episodes differ by a scenario, and how it is drawn: from the seed of a reset, or in other ways."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces


class ScenarioEnv(gym.Env):
    """The observation is the scenario, a number from 0 to 1; the return is its hundredfold, given in the last step.

    `drawn` says how the scenario is drawn: "reset" (from the seed), "never" (it is always the same), "index" (from
    `env_index`, when the environment is made) or "stream" (by every reset, whatever its seed, the same in all
    environments). Episodes take `length` steps; 0: they never end. The observation
    repeats the number `width` times.
    """

    action_space = spaces.Discrete(2)

    def __init__(self, drawn: str = "reset", length: int = 3, width: int = 1, env_index: int = 0) -> None:
        self.observation_space = spaces.Box(0, 1, (width,))
        self.drawn, self.length, self.count = drawn, length, 0
        self.stream = np.random.default_rng(7)
        self.scenario = np.random.default_rng(env_index).random() if drawn == "index" else 0.5

    def _observe(self) -> np.ndarray:
        return np.full(self.observation_space.shape, self.scenario, np.float32)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.count = 0
        if self.drawn == "reset":
            self.scenario = self.np_random.random()
        elif self.drawn == "stream":
            self.scenario = self.stream.random()
        return self._observe(), {}

    def step(self, action: Any) -> Any:
        self.count += 1
        ended = self.count == self.length
        return self._observe(), 100 * self.scenario if ended else 0.0, ended, False, {}
