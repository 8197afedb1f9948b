"""The environment of the chaos: quickly learned, and broken when a token in its folder says so.

Its folder has three parts. `tokens` holds files named KIND.NUMBER: the first environment that renames one into
`claimed`, as KIND.NUMBER.PID, does what it says. `ledger` has a file for each environment with the number of steps that
it took, which survives the death of its process.
"""

from __future__ import annotations

import mmap
import os
import secrets
import struct
import time
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np

from fever.training.callbacks import Callback, TrainingInfo

LIMIT = 100  # steps of an episode, and so its highest return; random actions last for about 20
TIME_STEP, PULL, FORCE = 0.05, 4.0, 3.0  # seconds; acceleration per distance from the middle; of an action
LEAK_BYTES = 64 << 20
EPISODES = 1 << 20  # of one environment, at most: identities are below 2**53, so that JSON keeps them
TOKENS, CLAIMED, LEDGER, STOP = "tokens", "claimed", "ledger", "stop"

leaked: list[bytes] = []


class Balance(gym.Env):
    """Stay within a distance of 1 from the middle, which pushes away; reward 1 for every step.

    `folder`: of the tokens. `pause`: seconds that a step takes. The last `info` of an episode has `chaos_episode`, a
    number that no other episode of any process has, and `chaos_length`.
    """

    observation_space = gym.spaces.Box(-np.inf, np.inf, (2,), np.float32)

    def __init__(self, folder: str, continuous: bool = False, pause: float = 0.001) -> None:
        self.folder, self.continuous, self.pause = Path(folder), continuous, pause
        self.action_space = gym.spaces.Box(-1, 1, (1,), np.float32) if continuous else gym.spaces.Discrete(2)
        self.identity, self.episode, self.length = secrets.randbits(32), 0, 0
        self.taken = 0
        self.state = np.zeros(2)
        self.blocks = False
        self.counter = _counter(self.folder / LEDGER / f"{os.getpid()}-{self.identity:08x}")

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, dict]:
        super().reset(seed=seed)
        self.state = self.np_random.uniform(-0.2, 0.2, 2)
        self.episode, self.length = self.episode + 1, 0
        return self.state.astype(np.float32), {}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict]:
        time.sleep(self.pause)
        kind = claim(self.folder)
        if kind is not None:
            self._break(kind)
        force = float(np.clip(action, -1, 1)[0]) if self.continuous else float(2 * action - 1)
        place, speed = self.state
        speed += TIME_STEP * (PULL * place + FORCE * force)
        self.state = np.array([place + TIME_STEP * speed, speed])
        self.length += 1
        self.taken += 1
        struct.pack_into("<q", self.counter, 0, self.taken)
        terminated, truncated = bool(abs(self.state[0]) > 1), self.length >= LIMIT
        info = {"chaos_episode": self.identity * EPISODES + self.episode, "chaos_length": self.length}
        observation, reward = self.state.astype(np.float32), 1.0
        if kind == "nan":
            observation, reward = np.full(2, np.nan, np.float32), float("nan")
        return observation, reward, terminated, truncated and not terminated, info if terminated or truncated else {}

    def close(self) -> None:
        while self.blocks:
            time.sleep(60)

    def _break(self, kind: str) -> None:
        """Do what a token says."""
        if kind == "hang":
            while True:
                time.sleep(60)
        elif kind == "exit":
            os._exit(13)
        elif kind == "leak":
            leaked.append(b"x" * LEAK_BYTES)
        elif kind in ("raise", "block"):
            self.blocks = kind == "block"
            raise RuntimeError("chaos: the environment was told to raise")


class StopFile(Callback):
    """Ends a training, by the word "chaos", once there is a file `stop` in a folder."""

    def __init__(self, folder: str) -> None:
        self.file = Path(folder) / STOP

    def on_iteration(self, info: TrainingInfo) -> None:
        if self.file.exists():
            info.request_stop("chaos")


def make_folder(folder: Path) -> None:
    """Make the parts of an environment's folder."""
    for part in (TOKENS, CLAIMED, LEDGER):
        (folder / part).mkdir(parents=True)


def claim(folder: Path) -> str | None:
    """The kind of a token that nobody else has claimed; None if there is none."""
    for name in os.listdir(folder / TOKENS):
        try:
            os.rename(folder / TOKENS / name, folder / CLAIMED / f"{name}.{os.getpid()}")
        except FileNotFoundError:  # another environment was faster
            continue
        return name.partition(".")[0]
    return None


def _counter(path: Path) -> mmap.mmap:
    """Eight bytes of a new file, as memory."""
    with open(path, "w+b") as file:
        file.truncate(8)
        return mmap.mmap(file.fileno(), 8)


def steps_taken(folder: Path) -> int:
    """The steps that all environments of a folder have taken, those of dead processes included."""
    return sum(struct.unpack("<q", path.read_bytes())[0] for path in (folder / LEDGER).iterdir())
