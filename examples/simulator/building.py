"""A heated building as an environment; an external program, started anew for every step, computes its physics."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
from external import Failure, Program

from fever.errors import FeverError

HEATSIM = (sys.executable, "-I", "-S", "heatsim.py")  # without its site packages Python starts faster
COLUMNS = ["minute", "room", "wall", "outside", "kwh"]  # of output.csv
MINUTES, STEPS = 15, 96  # minutes in a step, steps in a day
COLDEST, WARMEST = -50.0, 80.0  # °C; the program's numbers beyond these are garbage
PRICE = 0.2  # of a kWh, in degrees of discomfort over one step


class Building(gym.Env):
    """Heat a room for a day, 15 minutes a step: warm enough while people are in, with little energy.

    Observation `[5]`: °C of room, walls and outside, sine and cosine of the time of day. Action `[1]`: the heater's
    power. Reward: minus discomfort in °C, minus the price of the energy. A step that fails `1 + retries` times ends the
    episode as truncated, with `simulator_failed` 1 in its info; `failed_episodes` of those in a row raise an error.
    """

    def __init__(
        self,
        program: str | Sequence[str] = HEATSIM,
        timeout: float = 10.0,
        retries: int = 2,
        failed_episodes: int = 5,
        workdir: str | Path | None = None,
        worker_index: int = 0,
        env_index: int = 0,
    ) -> None:
        low = np.array([COLDEST, COLDEST, COLDEST, -1, -1], np.float32)
        high = np.array([WARMEST, WARMEST, WARMEST, 1, 1], np.float32)
        self.observation_space = gym.spaces.Box(low, high)
        self.action_space = gym.spaces.Box(0.0, 1.0, (1,))
        self.program = Program(program, timeout, retries, workdir)
        self.name = f"environment {env_index} of worker {worker_index}"
        self.failed_episodes, self.failed_in_a_row = failed_episodes, 0
        self.episode = 0
        self.last_good: Path | None = None  # folder of this episode's last step; None: not reset yet, or it failed

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, dict]:
        super().reset(seed=seed)
        if self.last_good is not None:  # the episode before did not fail, whoever ended it
            self.failed_in_a_row = 0
        room, wall, mean = self.np_random.uniform([14.0, 10.0, -5.0], [22.0, 18.0, 8.0]).tolist()
        self.initial = json.dumps({"minute": 0, "room": room, "wall": wall, "mean": mean})
        self.episode, self.steps, self.kwh = self.episode + 1, 0, 0.0
        self.failures_before = self.program.failures
        self.last_good = None
        while (rows := self._simulate(0, 0.0)) is None:  # a reset cannot be cut short; too many failures raise
            pass
        self.observation = observe(rows)
        return self.observation, {}

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool, bool, dict[str, float]]:
        if self.last_good is None:
            raise gym.error.ResetNeeded("the episode has ended; call reset()")
        self.steps += 1
        rows = self._simulate(MINUTES, float(np.clip(action[0], 0.0, 1.0)))
        if rows is None:  # not the agent's doing: truncated, so that what would have followed is estimated
            return self.observation, 0.0, False, True, self._info(failed=True)
        self.observation = observe(rows)
        kwh = float(rows[-1, 4])
        self.kwh += kwh
        done = self.steps == STEPS
        return self.observation, -discomfort(rows) - PRICE * kwh, False, done, self._info(failed=False)

    def _simulate(self, minutes: int, power: float) -> np.ndarray | None:
        """Rows `[minutes + 1, 5]` of the program's output, from where the last good step ended; None if it failed."""

        def prepare(folder: Path) -> None:
            if self.last_good is None:
                (folder / "start.json").write_text(self.initial)
            else:
                shutil.copyfile(self.last_good / "end.json", folder / "start.json")
            (folder / "control.json").write_text(json.dumps({"minutes": minutes, "power": power}))

        try:
            name = f"episode-{self.episode}-step-{self.steps}"
            self.last_good, rows = self.program.run(name, prepare, lambda folder: read_output(folder, minutes))
            return rows
        except Failure as failure:
            self.last_good = None
            self.failed_in_a_row += 1
            if self.failed_in_a_row < self.failed_episodes:
                return None
            raise FeverError(
                f"the simulator of {self.name} failed in {self.failed_in_a_row} episodes in a row; "
                f"the last log, in {self.program.failed}, ended with: {failure}"
            ) from failure

    def _info(self, failed: bool) -> dict[str, float]:
        retries = self.program.failures - self.failures_before
        return {"simulator_failed": float(failed), "failed_tries": float(retries), "kwh": self.kwh}

    def close(self) -> None:
        self.program.close()


def read_output(folder: Path, minutes: int) -> np.ndarray:
    """Rows `[minutes + 1, 5]` of output.csv. ValueError or OSError unless all that the next step needs is there."""
    header, *lines = (folder / "output.csv").read_text().split("\n")
    if header != ",".join(COLUMNS) or len(lines) != minutes + 2 or lines[-1]:
        raise ValueError(f"output.csv has not the header and {minutes + 1} whole lines")
    rows = np.array([line.split(",") for line in lines[:-1]], np.float64)
    if rows.shape[1] != len(COLUMNS) or not np.isfinite(rows).all():
        raise ValueError("output.csv has lines that are not five numbers")
    if rows[:, 1:4].min() < COLDEST or rows[:, 1:4].max() > WARMEST:
        raise ValueError("output.csv has temperatures that cannot be")
    json.loads((folder / "end.json").read_text())
    return rows


def observe(rows: np.ndarray) -> np.ndarray:
    """The observation `[5]` at the end of these rows `[M, 5]`."""
    minute, room, wall, outside, _ = rows[-1]
    angle = 2 * np.pi * minute / (24 * 60)
    return np.array([room, wall, outside, np.sin(angle), np.cos(angle)], np.float32)


def discomfort(rows: np.ndarray) -> float:
    """Mean °C by which the room was too cold or too warm, over the minutes after the first of rows `[M, 5]`."""
    minute, room = rows[1:, 0], rows[1:, 1]
    wanted = np.where((minute >= 7 * 60) & (minute < 22 * 60), 20.0, 16.0)
    return float(np.mean(np.maximum(wanted - room, 0) + np.maximum(room - 23.0, 0)))
