"""Environments whose episodes are known beforehand: lengths, ends, rewards, infos. Actions matter little."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv


class TimeLimitEnv(gym.Env):
    """Reward 1 for every step; the observation counts them. Truncated at `limit`, never terminated."""

    observation_space = spaces.Box(0, 1000, (1,))
    action_space = spaces.Discrete(2)
    terminates = False

    def __init__(self, limit: int = 5) -> None:
        self.limit, self.count = limit, 0

    def _observe(self) -> np.ndarray:
        return np.array([self.count], np.float32)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.count = 0
        return self._observe(), {}

    def step(self, action: Any) -> Any:
        self.count += 1
        ended = self.count == self.limit
        return self._observe(), 1.0, ended and self.terminates, ended and not self.terminates, {}


class TerminatingEnv(TimeLimitEnv):
    """`TimeLimitEnv` whose episodes are terminated instead of truncated."""

    terminates = True


def make_time_limit(limit: int = 7) -> gym.Env:
    """A factory function instead of a class."""
    return TimeLimitEnv(limit)


class ContextEnv(TimeLimitEnv):
    """Writes its worker and environment index to a file in its private folder."""

    def __init__(self, worker_index: int, env_index: int, workdir: Path | None = None, limit: int = 5) -> None:
        super().__init__(limit)
        self.worker_index, self.env_index, self.workdir = worker_index, env_index, workdir
        if workdir is not None:
            Path(workdir, "context.txt").write_text(f"worker {worker_index}, environment {env_index}")


class InfoEnv(TimeLimitEnv):
    """Its info has scalars and values that are not scalars; `score` is ten times the step."""

    def step(self, action: Any) -> Any:
        *result, _ = super().step(action)
        info = {
            "score": 10 * self.count,
            "success": self.count == self.limit,
            "speed": np.float32(0.5),
            "distance": np.array(2.5),
            "name": "a string",
            "path": np.arange(3.0),
            "nothing": None,
        }
        return *result, info


class TextEnv(TimeLimitEnv):
    """Observes text, which is not supported."""

    observation_space = spaces.Text(5)


class UnboundedEnv(TimeLimitEnv):
    """Has an action space without bounds."""

    action_space = spaces.Box(-np.inf, np.inf, (2,))


class Counter:
    """The dynamics that the scalar and the vector counters share. Actions have no effect.

    The even episodes of environment i terminate after 3 + i steps, the odd ones are truncated after 4. Step s gives
    reward (i + 1) * s. The observation is [environment, episode, steps taken in it].
    """

    observation_space = spaces.Box(0, 1000, (3,))
    action_space = spaces.Discrete(2)

    def __init__(self, index: int) -> None:
        self.index, self.episode, self.steps = index, -1, 0

    def begin(self) -> None:
        self.episode, self.steps = self.episode + 1, 0

    def advance(self) -> tuple[float, bool, bool]:
        """Reward, terminated, truncated."""
        self.steps += 1
        odd = self.episode % 2 == 1
        ended = self.steps == (4 if odd else 3 + self.index)
        return float((self.index + 1) * self.steps), ended and not odd, ended and odd

    def observe(self) -> np.ndarray:
        return np.array([self.index, self.episode, self.steps], np.float32)


class CounterEnv(gym.Env):
    """A counter as an ordinary environment."""

    observation_space, action_space = Counter.observation_space, Counter.action_space

    def __init__(self, env_index: int = 0) -> None:
        self.counter = Counter(env_index)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.counter.begin()
        return self.counter.observe(), {}

    def step(self, action: Any) -> Any:
        reward, terminated, truncated = self.counter.advance()
        return self.counter.observe(), reward, terminated, truncated, {"steps": self.counter.steps}


class NextStepCounters(VectorEnv):
    """Counters as a vector environment: the step after an episode's end ignores its action and resets."""

    metadata = {"autoreset_mode": AutoresetMode.NEXT_STEP}

    def __init__(self, num_envs: int) -> None:
        self.num_envs = num_envs
        self.single_observation_space, self.single_action_space = Counter.observation_space, Counter.action_space
        self.observation_space = gym.vector.utils.batch_space(self.single_observation_space, num_envs)
        self.action_space = gym.vector.utils.batch_space(self.single_action_space, num_envs)
        self.counters = [Counter(index) for index in range(num_envs)]
        self.ended = np.zeros(num_envs, bool)

    def _observe(self) -> np.ndarray:
        return np.stack([counter.observe() for counter in self.counters])

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        for counter in self.counters:
            counter.begin()
        self.ended[:] = False
        return self._observe(), {}

    def step(self, actions: Any) -> Any:
        rewards = np.zeros(self.num_envs)
        terminated, truncated = np.zeros(self.num_envs, bool), np.zeros(self.num_envs, bool)
        for index, counter in enumerate(self.counters):
            if self.ended[index]:
                counter.begin()
            else:
                rewards[index], terminated[index], truncated[index] = counter.advance()
        self.ended = terminated | truncated
        steps = np.array([counter.steps for counter in self.counters])
        return self._observe(), rewards, terminated, truncated, {"steps": steps, "_steps": np.ones_like(steps, bool)}


class SameStepCounters(NextStepCounters):
    """Counters as a vector environment: the step that ends an episode also resets it."""

    metadata = {"autoreset_mode": AutoresetMode.SAME_STEP}

    def step(self, actions: Any) -> Any:
        self.ended[:] = False
        last, rewards, terminated, truncated, info = super().step(actions)
        ended = terminated | truncated
        if not ended.any():
            return last, rewards, terminated, truncated, info
        final = np.full(self.num_envs, None, object)
        for index in np.flatnonzero(ended):
            final[index] = last[index]
            self.counters[index].begin()
        info = {"final_obs": final, "_final_obs": ended, "final_info": info, "_final_info": ended}
        return self._observe(), rewards, terminated, truncated, info


class ReusingCounters(NextStepCounters):
    """Counters as a vector environment that overwrites and returns the same observation array in every step."""

    def __init__(self, num_envs: int) -> None:
        super().__init__(num_envs)
        self.shown = np.zeros((num_envs, 3), np.float32)

    def _observe(self) -> np.ndarray:
        self.shown[:] = super()._observe()
        return self.shown


gym.register("FeverCounter-v0", entry_point=CounterEnv)


class DrawnEnv(gym.Env):
    """The seed of a reset determines the whole episode: its length (1 to 60 steps), how it ends, its rewards and how
    long its steps wait. The action is added to the reward.

    With a file `folder`/gate that holds a seed and a number, the first episode with that seed waits in its first step
    until that number of other episodes has ended, or `folder`/open exists. While it waits, `folder`/waiting holds its
    process id.
    """

    observation_space = spaces.Box(-1, 1, (2,))
    action_space = spaces.Discrete(2)

    def __init__(self, milliseconds: float = 0, folder: str | None = None) -> None:
        self.milliseconds, self.folder = milliseconds, folder and Path(folder)

    def _observe(self) -> np.ndarray:
        return self.np_random.uniform(-1, 1, 2).astype(np.float32)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.seed, self.count = seed, 0
        self.length = int(self.np_random.choice([1, 2, 5, 12, 60], p=[0.2, 0.2, 0.3, 0.2, 0.1]))
        self.terminates = bool(self.np_random.integers(2))
        self.pause = self.milliseconds * self.np_random.integers(3)
        return self._observe(), {}

    def step(self, action: Any) -> Any:
        time.sleep(self.pause / 1000)
        if self.count == 0 and self.folder and (self.folder / "gate").exists():
            self._wait(self.folder)
        self.count += 1
        ended = self.count == self.length
        if ended and self.folder:
            (self.folder / f"ended-{self.seed}").touch()
        reward = float(self.np_random.normal() + action)
        return self._observe(), reward, ended and self.terminates, ended and not self.terminates, {}

    def _wait(self, folder: Path) -> None:
        gate, others = map(int, (folder / "gate").read_text().split())
        deadline = time.monotonic() + 60
        if self.seed != gate or (folder / "waiting").exists():
            return
        (folder / "pid").write_text(str(os.getpid()))
        (folder / "pid").rename(folder / "waiting")
        while not (folder / "open").exists() and len(list(folder.glob("ended-*"))) < others:
            if time.monotonic() > deadline:
                raise TimeoutError("the gate stays closed")
            time.sleep(0.01)
