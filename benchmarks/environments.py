"""Environments made for the benchmarks."""

import time
from typing import Any

import gymnasium
import numpy as np


class Busy(gymnasium.Env):
    """Every step burns a fixed time of CPU, however crowded the machine is; episodes are truncated after 100 steps."""

    observation_space = gymnasium.spaces.Box(-1.0, 1.0, (4,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, milliseconds: float = 1.0) -> None:
        self.seconds = milliseconds / 1e3
        self.steps = 0

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        """Begin an episode."""
        super().reset(seed=seed)
        self.steps = 0
        return self._observe(), {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        """Spend the time; the reward is 1 for action 1."""
        self._spend()
        self.steps += 1
        return self._observe(), float(action), False, self.steps >= 100, {}

    def _spend(self) -> None:
        end = time.thread_time() + self.seconds
        while time.thread_time() < end:
            pass

    def _observe(self) -> np.ndarray:
        return self.np_random.uniform(-1, 1, 4).astype(np.float32)


class Waiting(Busy):
    """Every step waits a fixed time, as a slow simulator elsewhere would, and does nothing else."""

    observation_space = gymnasium.spaces.Box(-1.0, 1.0, (1,), np.float32)

    def __init__(self, milliseconds: float = 10.0) -> None:
        super().__init__(milliseconds)
        self.observation = np.zeros(1, np.float32)

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        """Wait; the reward is always the same."""
        time.sleep(self.seconds)
        self.steps += 1
        return self.observation, 1.0, False, self.steps >= 100, {}

    def _observe(self) -> np.ndarray:
        return self.observation


class Uneven(Waiting):
    """Waits `slower` times as long in the first worker."""

    def __init__(self, milliseconds: float = 10.0, slower: float = 1.0, worker_index: int = 0) -> None:
        super().__init__(milliseconds * slower if worker_index == 0 else milliseconds)
