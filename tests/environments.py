"""Small environments for tests, found as "tests.environments:Name".

Every constructor takes plain JSON values (a space may also be given by its name in `SPACES`), so that all of them can
be written on a command line and into a run's configuration.
"""

from __future__ import annotations

import copy
import functools
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv

from fever.errors import FeverError

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
    """A value of a bounded space as numbers from 0 to 1, its parts side by side."""
    if isinstance(space, spaces.Dict):
        return np.concatenate([fractions(part, value[key]) for key, part in space.spaces.items()])
    if isinstance(space, spaces.Tuple):
        return np.concatenate([fractions(part, item) for part, item in zip(space.spaces, value, strict=True)])
    if isinstance(space, spaces.Box):
        return ((value - space.low) / (space.high - space.low)).ravel().astype(np.float64)
    sizes, starts = _choices(space)
    return (np.ravel(value) - starts) / sizes


def value_at(space: spaces.Space, parts: np.ndarray) -> Any:
    """The value of a space that these fractions stand for; they are repeated or cut to as many as it needs."""
    if isinstance(space, spaces.Box):
        return (space.low + np.resize(parts, space.shape) * (space.high - space.low)).astype(space.dtype)
    sizes, starts = _choices(space)
    index = np.minimum(np.floor(np.resize(parts, len(sizes)) * sizes + 1e-9), sizes - 1).astype(np.int64)
    return (index + starts).reshape(space.shape)


def _choices(space: spaces.Space) -> tuple[np.ndarray, np.ndarray]:
    """Sizes and starts of a space of choices."""
    if isinstance(space, spaces.Discrete):
        return np.array([space.n]), np.array([space.start])
    if isinstance(space, spaces.MultiDiscrete):
        return space.nvec.ravel(), space.start.ravel()
    size = int(np.prod(space.shape))
    return np.full(size, 2), np.zeros(size, np.int64)


class IdentityEnv(gym.Env):
    """The observation says which action is right: reward 1 for it, or minus the distance to it where it is a Box.

    Without an observation space of its own, the observation is the right action itself.
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
    """The same, but the end is a termination."""

    terminates = True


class ImageEnv(gym.Env):
    """One half of a uint8 image is brighter, the left (action 0) or the right (action 1): reward 1 for saying which."""

    action_space = spaces.Discrete(2)

    def __init__(self, order: str = "hwc", height: int = 10, width: int = 12, length: int = 8) -> None:
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
        reward = float(action == self.right)
        self.count += 1
        return self._show(), reward, self.count == self.length, False, {}


FAULTS = (
    "nan_reward", "nan_observation", "wrong_shape", "wrong_dtype", "four_values", "bad_reset", "none_observation",
)  # fmt: skip


class BrokenEnv(gym.Env):
    """Breaks Gymnasium's contract at step `at` of its life, in one environment only or (`only=None`) in all of them.

    `bad_reset` breaks the first reset from that step on; `at=0` is the very first. Episodes are truncated at `length`.
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
    """Raises an error of Gymnasium's in step `at` of its life, or (`in_reset`) in the first reset from then on."""

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


class ContextEnv(TimeLimitEnv):
    """Writes where it runs into a file of its private folder."""

    def __init__(self, worker_index: int, env_index: int, workdir: Path | None = None, limit: int = 5) -> None:
        super().__init__(limit)
        self.worker_index, self.env_index, self.workdir = worker_index, env_index, workdir
        if workdir is not None:
            Path(workdir, "context.txt").write_text(f"worker {worker_index}, environment {env_index}")


class InfoEnv(TimeLimitEnv):
    """Puts scalars, and things that are none, into its info: `score` is ten times the step."""

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


class ClosingEnv(TimeLimitEnv):
    """Writes `closed-INDEX` into a folder when it is closed.

    The environment of index `fails` cannot be constructed; that of index `sticks` raises after it has closed.
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


class MemoryEnv(gym.Env):
    """A cue, -1 or 1, is shown at the first step only and asked for at the last: without memory the best return is 0.5.

    The observation is the cue (0 after the first step) and whether the answer is due now.
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


class SleepEnv(TimeLimitEnv):
    """Every step waits, as for a simulator in another process."""

    def __init__(self, milliseconds: float, limit: int = 50) -> None:
        super().__init__(limit)
        self.milliseconds = milliseconds

    def step(self, action: Any) -> Any:
        time.sleep(self.milliseconds / 1000)
        return super().step(action)


class BusyEnv(SleepEnv):
    """Every step computes: milliseconds of processor time."""

    def step(self, action: Any) -> Any:
        end = time.thread_time() + self.milliseconds / 1000
        while time.thread_time() < end:
            pass
        return TimeLimitEnv.step(self, action)


class CrashEnv(TimeLimitEnv):
    """Ends its whole process at step `at` of its life: once, if there is a marker file to remember it by."""

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


class Counter:
    """The dynamics that the scalar and the vector counters share. Actions change nothing.

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
    """One counter as an ordinary environment."""

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
    """The same counters natively vectorised: the step after an episode's end ignores its action and resets."""

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
    """The same counters natively vectorised: the step that ends an episode also resets it."""

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


gym.register("FeverCounter-v0", entry_point=CounterEnv)


def make_time_limit(limit: int = 7) -> gym.Env:
    """A factory function."""
    return TimeLimitEnv(limit)


class TextEnv(TimeLimitEnv):
    """Observes text, which no network here can take."""

    observation_space = spaces.Text(5)


class UnboundedEnv(TimeLimitEnv):
    """Takes actions without bounds."""

    action_space = spaces.Box(-np.inf, np.inf, (2,))


class OnlyHereEnv(TimeLimitEnv):
    """Can be made in one process only."""

    def __init__(self, process: int) -> None:
        super().__init__()
        if os.getpid() != process:
            raise FeverError("this environment can be made only in its own process")


class MaskedEnv(gym.Env):
    """`IdentityEnv` that raises when it gets a forbidden action. Which others than the right one are allowed is drawn
    anew in every step. Episodes are terminated and truncated by turns; the last mask of one allows nothing, if `dead`.

    The mask is in the "info", in a Dict observation ("dict") or in "both"; flat, or (`parts`) an array for each choice.
    A fault breaks the masks of one environment, or (`only=None`) of all of them, at step `at` of its life.
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
    """The same as a vector environment: the step after an episode's end ignores its action and resets."""

    mode = AutoresetMode.NEXT_STEP

    def __init__(self, num_envs: int, **settings: Any) -> None:
        makers = [functools.partial(MaskedEnv, env_index=index, **settings) for index in range(num_envs)]
        super().__init__(makers, autoreset_mode=self.mode)


class SameStepMasked(NextStepMasked):
    """The same as a vector environment: the step that ends an episode also resets it."""

    mode = AutoresetMode.SAME_STEP


class DrawnEnv(gym.Env):
    """Everything of an episode is drawn at its reset with a seed: its length (from 1 to 60 steps), how it ends, rewards
    and how long it waits. The action is rewarded, too.

    If there is a file `folder`/gate with a seed and a number, then the first episode with that seed waits in its first
    step until so many others have ended or there is a file `folder`/open. Meanwhile its process is in `folder`/waiting.
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


class UnevenEnv(SleepEnv):
    """Those of worker 0 wait ten times as long as others."""

    def __init__(self, milliseconds: float, worker_index: int = 0) -> None:
        super().__init__(milliseconds * (10 if worker_index == 0 else 1))


class ExitEnv(TimeLimitEnv):
    """Ends the process that makes it, as a library that calls exit() does."""

    def __init__(self, code: int = 3) -> None:
        os._exit(code)


class ExitElsewhereEnv(TimeLimitEnv):
    """Ends every process but one that makes it."""

    def __init__(self, process: int) -> None:
        super().__init__()
        if os.getpid() != process:
            os._exit(3)


SIMULATOR = """
import sys, time
for line in sys.stdin:
    end = time.process_time() + float(sys.argv[1]) / 1000
    while time.process_time() < end:
        pass
    print(flush=True)
"""


class SimulatorEnv(TimeLimitEnv):
    """Every step is computed in another process: milliseconds of its processor time."""

    def __init__(self, milliseconds: float, limit: int = 50) -> None:
        super().__init__(limit)
        command = [sys.executable, "-c", SIMULATOR, str(milliseconds)]
        self.simulator = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def step(self, action: Any) -> Any:
        assert self.simulator.stdin
        assert self.simulator.stdout
        self.simulator.stdin.write(b"\n")
        self.simulator.stdin.flush()
        self.simulator.stdout.readline()
        return super().step(action)

    def close(self) -> None:
        self.simulator.communicate()


class ReusingCounters(NextStepCounters):
    """The same counters natively vectorised, in one array that is written over."""

    def __init__(self, num_envs: int) -> None:
        super().__init__(num_envs)
        self.shown = np.zeros((num_envs, 3), np.float32)

    def _observe(self) -> np.ndarray:
        self.shown[:] = super()._observe()
        return self.shown
