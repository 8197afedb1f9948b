"""Log records, warnings and standard error of a training process go to the run's log file."""

from __future__ import annotations

import logging
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def log_to_file(path: Path) -> Iterator[None]:
    """Send log records and libraries' warnings to the run's log instead of the terminal."""
    handler = logging.FileHandler(path)
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
