"""Environments, a disk and a callback that stop answering."""

from __future__ import annotations

import hashlib
import logging
import time
from pathlib import Path
from typing import Any

from fever.runs import checkpoints
from fever.training.callbacks import Callback, TrainingInfo
from tests.environments.episodes import CounterEnv


class StuckEnv(CounterEnv):
    """Never returns from one step: in Python, where signals are handled, or in C, where they are not.

    It writes a file when it is stuck, and only once there.
    """

    def __init__(self, folder: str, how: str = "python", at: int = 500) -> None:
        super().__init__()
        self.folder, self.how, self.left = Path(folder), how, at

    def step(self, action: Any) -> Any:
        self.left -= 1
        if self.left == 0 and not (self.folder / "stuck").exists():
            (self.folder / "stuck").touch()
            while self.how == "python":
                time.sleep(1000)
            hashlib.pbkdf2_hmac("sha256", b"", b"", 10**9)  # minutes, without the interpreter's lock
        return super().step(action)


class WarningEnv(CounterEnv):
    """Writes what the watchdog of a worker writes about a slow step, and is in that step until a file is there."""

    def __init__(self, file: str, seconds: float = 100) -> None:
        """`seconds`: the longest that it waits for the file."""
        super().__init__()
        self.file, self.seconds = Path(file), seconds

    def step(self, action: Any) -> Any:
        if self.seconds:
            logging.warning("it is slow; with --step-timeout SECONDS, an environment that hangs is made anew")
            over = time.monotonic() + self.seconds
            while not self.file.exists() and time.monotonic() < over:
                time.sleep(0.05)
        self.seconds = 0.0
        return super().step(action)


class StuckInCloseEnv(CounterEnv):
    """Raises in step `at`, and then never returns from close(), in C."""

    def __init__(self, at: int = 500) -> None:
        super().__init__()
        self.left = at

    def step(self, action: Any) -> Any:
        self.left -= 1
        if self.left == 0:
            raise ValueError("the robot fell over")
        return super().step(action)

    def close(self) -> None:
        if self.left <= 0:
            hashlib.pbkdf2_hmac("sha256", b"", b"", 10**9)


class StuckDiskEnv(CounterEnv):
    """From step `at` on, the disk takes nothing and never says so."""

    def __init__(self, folder: str, at: int = 500) -> None:
        super().__init__()
        self.folder, self.left = Path(folder), at

    def step(self, action: Any) -> Any:
        self.left -= 1
        if self.left == 0:
            checkpoints.flush_to_disk = self._hang
        return super().step(action)

    def _hang(self, path: Path) -> None:
        (self.folder / "stuck").touch()
        while True:
            time.sleep(1000)


class SlowCallback(Callback):
    """Sleeps in every `on_iteration` after the first, and writes a file in `on_stop`."""

    def __init__(self, folder: str, seconds: float) -> None:
        self.folder, self.seconds = Path(folder), seconds

    def on_iteration(self, info: TrainingInfo) -> None:
        if info.iteration > 1:
            time.sleep(self.seconds)

    def on_stop(self, info: TrainingInfo) -> None:
        assert info.summary is not None
        (self.folder / "stopped").write_text(info.summary["stop_reason"])
