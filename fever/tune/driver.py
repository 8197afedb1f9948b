"""What belongs to the process that drives a search: its log, its environment variables, how busy its machine is."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fever.training.logs import log_to_file


@contextmanager
def quiet(log: Path) -> Iterator[None]:
    """Send all that libraries say to the log."""
    with log_to_file(log), warnings.catch_warnings():
        warnings.simplefilter("default")
        yield


@contextmanager
def ray_messages_to_log() -> Iterator[None]:
    """Send to the log what Ray's own processes have to say, such as that a process has died; Ray prints it."""
    from ray._private import worker

    send_to_root("ray")  # it takes up its own ways when it is imported
    kept = worker.print_to_stdstream
    worker.print_to_stdstream = lambda data, ignore_prefix: logging.warning("Ray: %s", "\n".join(data["lines"]))
    try:
        yield
    finally:
        worker.print_to_stdstream = kept


def send_to_root(name: str) -> None:
    """Have a library log like any other instead of writing to the terminal by itself."""
    logger = logging.getLogger(name)
    logger.handlers, logger.propagate = [], True


@contextmanager
def environment(variables: dict[str, str]) -> Iterator[None]:
    """Set environment variables for a while."""
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
    """The share of this machine's cores that is busy, from its making on; whoever keeps them busy."""

    def __init__(self) -> None:
        self.began = self._read()

    def _read(self) -> tuple[int, int] | None:
        """Ticks in which cores were busy, and all."""
        try:
            with open("/proc/stat") as file:
                ticks = [int(word) for word in file.readline().split()[1:9]]
        except (OSError, ValueError):
            return None
        return sum(ticks) - ticks[3] - ticks[4], sum(ticks)  # idle, and idle for waiting for a disk

    def share(self) -> float | None:
        now = self._read()
        if now is None or self.began is None or now[1] == self.began[1]:
            return None
        return round((now[0] - self.began[0]) / (now[1] - self.began[1]), 3)
