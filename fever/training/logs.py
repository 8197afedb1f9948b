"""Log records, warnings and standard error of a training process go to the run's log file."""

from __future__ import annotations

import logging
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fever.runs.disk import Appender, Disk
from fever.text import format_bytes

LOG_BYTES = 8 << 20  # size at which a log is shortened
HEAD_BYTES, TAIL_BYTES = 1 << 20, 4 << 20  # what stays of it


class LogHandler(logging.Handler):
    """Appends records to a log, which is shortened when long. On a full disk they wait, and nothing is printed."""

    def __init__(self, path: Path, disk: Disk) -> None:
        super().__init__()
        self.file = Appender(path, disk)

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self.file.write(f"{self.format(record)}\n".encode(errors="backslashreplace"))
            if self.file.size >= LOG_BYTES:
                shorten(self.file.path)
        except Exception:  # noqa: BLE001 - of a record that cannot be formatted, for example
            self.handleError(record)

    def close(self) -> None:
        self.file.close()
        super().close()


@contextmanager
def log_to_file(path: Path, disk: Disk | None = None) -> Iterator[None]:
    """Send log records and libraries' warnings to the run's log instead of the terminal."""
    handler = LogHandler(path, disk or Disk(path.parent))
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    root = logging.getLogger()
    level = root.level
    root.addHandler(handler)
    root.setLevel(logging.INFO)
    with quiet_ray(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=r"os\.fork\(\) was called")  # JAX's; Ray's children exec at once
        logging.captureWarnings(True)
        try:
            yield
        finally:
            logging.captureWarnings(False)
            root.removeHandler(handler)
            root.setLevel(level)
            handler.close()


def shorten(path: Path) -> None:
    """Leave out the middle of a log, in place: others have the file open to append. A kill leaves some lines twice."""
    with open(path, "r+b") as file:
        file.seek(HEAD_BYTES)
        start = HEAD_BYTES + len(file.readline())
        left_out = file.seek(-TAIL_BYTES, os.SEEK_END) + len(file.readline()) - start
        tail = file.read()
        file.seek(start)
        file.write(f"[{format_bytes(left_out)} of the log left out here]\n".encode() + tail)
        file.truncate()


@contextmanager
def quiet_ray() -> Iterator[None]:
    """Remove the handlers of Ray's loggers, which write to the terminal; their records go to the root logger only."""
    names = [name for name in logging.root.manager.loggerDict if name == "ray" or name.startswith("ray.")]
    loggers = [logging.getLogger(name) for name in ["ray", *names]]
    kept = [(logger.handlers, logger.propagate) for logger in loggers]
    for logger in loggers:
        logger.handlers, logger.propagate = [], True
    try:
        yield
    finally:
        for logger, (handlers, propagate) in zip(loggers, kept, strict=True):
            logger.handlers, logger.propagate = handlers, propagate


@contextmanager
def errors_to(path: Path) -> Iterator[None]:
    """Append to a file what this process and its libraries, C++ included, write to standard error."""
    sys.stderr.flush()
    kept = os.dup(2)
    with open(path, "a") as file:
        os.dup2(file.fileno(), 2)
    try:
        yield
    finally:
        sys.stderr.flush()
        os.dup2(kept, 2)
        os.close(kept)
