"""A field of berries, good and bad: observations are a set whose size changes, in no order, with a mask."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces

MOVES = np.array([[0, 0], [1, 0], [-1, 0], [0, 1], [0, -1]], np.float32)


class Swarm(gym.Env[dict[str, np.ndarray], int]):
    """Walk through a square, take good berries (+1) and avoid bad ones (-1); taken berries are gone.

    Every episode has between 4 and `most` berries, half of them good, in random rows of `berries`.

    | part | shape | meaning |
    |---|---|---|
    | `berries` | `[most, 3]` | position relative to the walker, and 1 for good or -1 for bad; zeros in empty rows |
    | `there` | `[most]` | 1 for a row with a berry, 0 for an empty one |

    Actions: stay, right, left, up, down. Episodes are truncated after `steps` steps.
    """

    STRIDE, REACH = 0.2, 0.15  # of a step; distance from which a berry is taken

    def __init__(self, most: int = 16, steps: int = 40) -> None:
        self.most, self.steps = most, steps
        self.observation_space = spaces.Dict(
            {"berries": spaces.Box(-3, 3, (most, 3)), "there": spaces.Box(0, 1, (most,))}
        )
        self.action_space = spaces.Discrete(len(MOVES))

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        count = int(self.np_random.integers(4, self.most + 1))
        rows = self.np_random.permutation(self.most)[:count]
        self.berries, self.there = np.zeros((self.most, 3), np.float32), np.zeros(self.most, np.float32)
        self.berries[rows, :2] = self.np_random.uniform(-1, 1, (count, 2))
        self.berries[rows, 2] = np.where(np.arange(count) % 2, -1, 1)
        self.there[rows] = 1
        self.place, self.time = np.zeros(2, np.float32), 0
        return self._observe(), {}

    def step(self, action: int) -> Any:
        self.time += 1
        self.place = np.clip(self.place + self.STRIDE * MOVES[action], -1, 1)
        distance = np.abs(self.berries[:, :2] - self.place).max(1)
        taken = (distance < self.REACH) & (self.there > 0)
        reward = float(self.berries[taken, 2].sum())
        self.there[taken] = 0
        return self._observe(), reward, False, self.time >= self.steps, {}

    def _observe(self) -> dict[str, np.ndarray]:
        seen = self.berries.copy()
        seen[:, :2] -= self.place
        return {"berries": seen * self.there[:, None], "there": self.there.copy()}
