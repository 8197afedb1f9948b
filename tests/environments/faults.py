"""Environments that break the contract, raise, cannot be made, or end their process."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces

from fever.errors import FeverError
from tests.environments.episodes import TimeLimitEnv

FAULTS = (
    "nan_reward", "nan_observation", "wrong_shape", "wrong_dtype", "four_values", "bad_reset", "none_observation",
)  # fmt: skip


class BrokenEnv(gym.Env):
    """Breaks Gymnasium's contract at step `at`, counted over all episodes.

    Only the environment with index `only` does so, or (`only=None`) all of them. `bad_reset` breaks every reset from
    that step on; `at=0` includes the very first. Episodes are truncated at `length`.
    """

    observation_space = spaces.Box(-1, 1, (3,))
    action_space = spaces.Discrete(2)

    def __init__(self, fault: str, at: int = 3, only: int | None = None, length: int = 100, env_index: int = 0) -> None:
        if fault not in FAULTS:
            raise ValueError(f"there is no fault {fault}")
        self.fault, self.at, self.length = fault, at, length
        self.broken = only is None or only == env_index
        self.steps = self.count = 0

    def _now(self, fault: str) -> bool:
        return self.broken and self.fault == fault and self.steps == self.at

    def _observe(self) -> Any:
        observation = np.zeros(3, np.float32)
        if self._now("nan_observation"):
            observation[1] = np.nan
        if self._now("wrong_shape"):
            return np.zeros(4, np.float32)
        if self._now("wrong_dtype"):
            return np.array(["a", "b", "c"])
        return None if self._now("none_observation") else observation

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.count = 0
        observation = np.zeros(3, np.float32)
        return observation if self.broken and self.fault == "bad_reset" and self.steps >= self.at else (observation, {})

    def step(self, action: Any) -> Any:
        self.steps += 1
        self.count += 1
        reward = float("nan") if self._now("nan_reward") else 1.0
        if self._now("four_values"):
            return self._observe(), reward, False, {}
        return self._observe(), reward, False, self.count == self.length, {}


class FailingEnv(TimeLimitEnv):
    """Raises gymnasium.error.Error in step `at` over all episodes, or (`in_reset`) in the first reset after it."""

    def __init__(self, at: int = 3, in_reset: bool = False, limit: int = 5) -> None:
        super().__init__(limit)
        self.at, self.in_reset, self.steps = at, in_reset, 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        if self.in_reset and self.steps >= self.at:
            raise gym.error.Error("the engine has ended")
        return super().reset(seed=seed)

    def step(self, action: Any) -> Any:
        self.steps += 1
        if not self.in_reset and self.steps == self.at:
            raise gym.error.Error("the engine has ended")
        return super().step(action)


class ClosingEnv(TimeLimitEnv):
    """Writes `closed-INDEX` into a folder when it is closed.

    The environment with index `fails` cannot be constructed; the one with index `sticks` raises after it has closed.
    """

    def __init__(
        self,
        folder: str | Path,
        env_index: int = 0,
        fails: int | None = None,
        sticks: int | None = None,
        action_space: spaces.Space | None = None,
        observation_space: spaces.Space | None = None,
    ) -> None:
        super().__init__()
        if env_index == fails:
            raise RuntimeError("this environment cannot be made")
        self.marker, self.raises = Path(folder) / f"closed-{env_index}", env_index == sticks
        self.action_space = action_space or self.action_space
        self.observation_space = observation_space or self.observation_space

    def close(self) -> None:
        self.marker.touch()
        if self.raises:
            raise RuntimeError("this environment does not like to be closed")


class CrashEnv(TimeLimitEnv):
    """Ends its process at step `at` over all episodes; only once if `marker` is given, a file that it then writes."""

    def __init__(self, marker: str | Path | None = None, at: int = 10, limit: int = 5) -> None:
        super().__init__(limit)
        self.marker, self.at, self.steps = marker and Path(marker), at, 0

    def step(self, action: Any) -> Any:
        self.steps += 1
        if self.steps == self.at and not (self.marker and self.marker.exists()):
            if self.marker:
                self.marker.touch()
            os._exit(1)
        return super().step(action)


class PrintingEnv(TimeLimitEnv):
    """Prints when it is made, at every step and when it is closed; ends its process at step `at`."""

    def __init__(self, at: int | None = None, flood: int = 0) -> None:
        super().__init__()
        self.at, self.flood, self.steps = at, flood, 0
        print("made")

    def step(self, action: Any) -> Any:
        self.steps += 1
        print("x" * self.flood, end="\n" if self.flood else "")
        os.write(2, f"step {self.steps}\n".encode())  # as a library in C does
        if self.steps == self.at:
            os.write(2, b"last words\n")
            os._exit(1)
        return super().step(action)

    def close(self) -> None:
        print("closed")


class OnlyHereEnv(TimeLimitEnv):
    """Can be made only in the process with this id."""

    def __init__(self, process: int) -> None:
        super().__init__()
        if os.getpid() != process:
            raise FeverError("this environment can be made only in its own process")


class ExitEnv(TimeLimitEnv):
    """Ends the process that makes it, as a library that calls exit() would."""

    def __init__(self, code: int = 3) -> None:
        os._exit(code)


class ExitElsewhereEnv(TimeLimitEnv):
    """Ends every process that makes it, except the one with this id."""

    def __init__(self, process: int) -> None:
        super().__init__()
        if os.getpid() != process:
            os._exit(3)


class Panic(BaseException):
    """As libraries in Rust raise it: it is no Exception."""


class UnreliableEnv(TimeLimitEnv):
    """Fails now and then, in ways that can be traced in what is learned from it.

    The observation is [number of this environment in its process, episode in it, step in that]; the reward is the step
    that it was given for. `fault` is what happens in steps with probability `chance`, but only from step `after` of the
    first environment on: it raises, panics, hangs (for `seconds`), calls sys.exit, or returns NaN in a reward or an
    observation. `fault` "reset" raises in reset. `close` may "raise", "panic", "hang" or "exit".
    """

    observation_space = spaces.Box(0, 1e6, (3,))
    made = 0  # in this process

    def __init__(
        self,
        fault: str = "raise",
        chance: float = 0.02,
        limit: int = 20,
        after: int = 0,
        seconds: float = 60,
        close: str = "",
        continuous: bool = False,
        env_index: int = 0,
    ) -> None:
        super().__init__(limit)
        self.action_space = spaces.Box(-1, 1, (1,)) if continuous else self.action_space
        UnreliableEnv.made += 1
        self.number, self.episode, self.steps = UnreliableEnv.made, 0, 0
        self.fault, self.chance, self.after, self.seconds, self.closing = fault, chance, after, seconds, close
        self.luck = np.random.default_rng([self.number, env_index])

    def _observe(self) -> np.ndarray:
        return np.array([self.number, self.episode, self.count], np.float32)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.episode += 1
        if self.fault == "reset" and self.steps > self.after and self.luck.random() < self.chance:
            raise ConnectionError("the simulator did not answer")
        return super().reset(seed=seed)

    def step(self, action: Any) -> Any:
        self.steps += 1
        observation, _, terminated, truncated, info = super().step(action)
        reward = float(self.count)
        if self.fault != "reset" and self.steps > self.after and self.luck.random() < self.chance:
            if self.fault == "raise":
                raise ValueError("the robot fell over")
            if self.fault == "panic":
                raise Panic("index out of bounds")
            if self.fault == "hang":
                time.sleep(self.seconds)
            if self.fault == "exit":
                sys.exit("the licence is gone")
            reward = np.nan if self.fault == "reward" else reward
            observation = observation * (np.nan if self.fault == "observation" else 1)
        return observation, reward, terminated, truncated, info

    def close(self) -> None:
        if self.closing == "raise":
            raise RuntimeError("the simulator is gone")
        if self.closing == "panic":
            raise Panic("already borrowed")
        if self.closing == "hang":
            time.sleep(self.seconds)
        if self.closing == "exit":
            sys.exit(3)
