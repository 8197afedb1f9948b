"""What belongs to the process that trains: JAX's settings, facts for the record, the log file, signals."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fever.errors import FeverError


def prepare_jax(device: str) -> None:
    """Settings that JAX reads when it is first imported: no preallocation, the device that was asked for."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    if device == "cpu" or (device == "auto" and not Path("/dev/nvidia0").exists() and not Path("/dev/kfd").exists()):
        os.environ.setdefault("JAX_PLATFORMS", "cpu")
    import jax

    if device == "gpu" and jax.default_backend() == "cpu":
        raise FeverError('JAX sees no GPU here; install it with: pip install "jax[cuda12]", or leave --device out')


def limit_learner_threads(small: bool) -> None:
    """Let XLA compute on one thread where the network is small: handing such pieces around costs more than it saves.

    Works until JAX computes for the first time in this process; compilation still uses all cores.
    """
    if small:
        os.environ.setdefault("PJRT_NPROC", "1")


def facts() -> dict[str, Any]:
    """Versions, machine and git state, for the run directory."""
    import platform
    from importlib.metadata import version

    from fever import __version__

    packages = ("jax", "jaxlib", "numpy", "gymnasium", "ray")
    return {
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "command": sys.argv,
        "fever": __version__,
        "python": platform.python_version(),
        "packages": {name: version(name) for name in packages},
        "system": platform.platform(),
        "cores": os.cpu_count(),
        "git": git_state(),
    }


def git_state() -> dict[str, Any] | None:
    """Commit and whether there were changes, of the folder where training was started."""
    import subprocess

    def git(*words: str) -> str:
        command = ["git", *words]
        return subprocess.run(command, capture_output=True, text=True, timeout=5, check=True).stdout.strip()

    try:
        return {"commit": git("rev-parse", "HEAD"), "changed": bool(git("status", "--porcelain"))}
    except (OSError, subprocess.SubprocessError):
        return None


@contextmanager
def log_to_file(path: Path) -> Iterator[None]:
    """Send log records and libraries' warnings to the run's log instead of the terminal."""
    handler = logging.FileHandler(path)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    root = logging.getLogger()
    level = root.level
    root.addHandler(handler)
    root.setLevel(logging.INFO)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=r"os\.fork\(\) was called")  # JAX's; Ray's children exec at once
        logging.captureWarnings(True)
        try:
            yield
        finally:
            logging.captureWarnings(False)
            root.removeHandler(handler)
            root.setLevel(level)
            handler.close()


class Interrupts:
    """Ctrl-C and SIGTERM raise KeyboardInterrupt at once, but inside `shield` only when it is left.

    Between two iterations the state is whole, so sampling may be cut short anywhere and nothing is lost.
    """

    def __init__(self) -> None:
        self.shielded = self.pending = False
        self.previous: dict[int, Any] = {}

    def __enter__(self) -> Interrupts:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self.previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self.previous.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: Any) -> None:
        if self.shielded:
            self.pending = True
        else:
            raise KeyboardInterrupt

    @contextmanager
    def shield(self) -> Iterator[None]:
        self.shielded = True
        try:
            yield
        finally:
            self.shielded = False
        if self.pending:
            self.pending = False
            raise KeyboardInterrupt
