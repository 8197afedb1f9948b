"""Helpers of the process that drives a search: its log, environment variables, how busy the machine is."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fever.runs.disk import Disk
from fever.training.logs import log_to_file


@contextmanager
def quiet(log: Path, disk: Disk) -> Iterator[None]:
    """Send log records and all warnings of libraries to the log; on a full disk they wait."""
    with log_to_file(log, disk), warnings.catch_warnings():
        warnings.simplefilter("default")
        yield


def send_to_root(name: str) -> None:
    """Remove the handlers of a library's logger, so that its records go to the root logger only."""
    logger = logging.getLogger(name)
    logger.handlers, logger.propagate = [], True


@contextmanager
def environment(variables: dict[str, str]) -> Iterator[None]:
    """Set environment variables inside the `with` block."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


class CoresBusy:
    """The share of this machine's cores that has been busy, with any process, since this object was created."""

    def __init__(self) -> None:
        self.began = self._read()

    def _read(self) -> tuple[int, int] | None:
        """Clock ticks in which cores were busy, and all ticks; None where they cannot be read."""
        try:
            with open("/proc/stat") as file:
                ticks = [int(word) for word in file.readline().split()[1:9]]
        except (OSError, ValueError):
            return None
        return sum(ticks) - ticks[3] - ticks[4], sum(ticks)  # idle, and idle while waiting for a disk

    def share(self) -> float | None:
        now = self._read()
        if now is None or self.began is None or now[1] == self.began[1]:
            return None
        return round((now[0] - self.began[0]) / (now[1] - self.began[1]), 3)
