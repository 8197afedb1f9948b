"""Environments that change the working folder of the process in which they and fever are, as simulators do."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest

import fever


class Moving(gym.Env):
    """Goes to a folder of its own with its constructor, reads a file there in every step, and removes it at its end."""

    observation_space = gym.spaces.Box(0, 1, (2,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def __init__(self) -> None:
        self.folder = tempfile.mkdtemp(prefix="moving-")
        os.chdir(self.folder)
        Path("input.txt").write_text("0.5")

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed)
        self.length = 0
        return self.observation(), {}

    def observation(self) -> np.ndarray:
        return np.full(2, float(Path("input.txt").read_text()), np.float32)

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        self.length += 1
        return self.observation(), float(action), self.length == 5, False, {}

    def close(self) -> None:
        shutil.rmtree(self.folder)


def test_a_run_keeps_its_files_where_it_was_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = fever.train(Moving, envs=1, steps=32, minibatch=32, stop={"steps": 64}, name="one")
    saved = tmp_path / "runs" / "one"
    assert result.run.path == saved
    assert {path.name for path in saved.iterdir()} >= {"metrics.jsonl", "summary.json", "checkpoints", "episodes.jsonl"}
    monkeypatch.chdir(tmp_path)
    resumed = fever.resume("one", env=Moving, stop={"steps": 128})
    assert resumed.summary["steps"] >= 128
    assert resumed.summary["env_failures"] == 0
    assert len((saved / "metrics.jsonl").read_text().splitlines()) == resumed.summary["iterations"]
    monkeypatch.chdir(tmp_path)
    assert len(fever.evaluate("one", env=Moving, episodes=3).returns) == 3
