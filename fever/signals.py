"""What belongs to the process that trains: JAX's settings, facts for the record, the log file, signals."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
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

    packages = ("jax", "jaxlib", "numpy", "gymnasium", "ray", *(("torch",) if "torch" in sys.modules else ()))
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
    """Take away the handlers of Ray's loggers, which write to the terminal: records go to the root's alone."""
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


class Interrupts:
    """Ctrl-C, SIGTERM and SIGUSR1 raise KeyboardInterrupt at once, but inside `shield` only when it is left. Where they
    are `held`, they wait everywhere but inside `open`, for that or for `check`.

    Between two iterations the state is whole, so sampling may be cut short anywhere and nothing is lost. `notice` is
    called with the first signal that has to wait; a second Ctrl-C does not, where `impatient` says so.
    """

    def __init__(self, notice: Callable[[], None] = lambda: None, held: bool = False) -> None:
        self.notice = notice
        self.impatient = False  # whether a second Ctrl-C cuts what the first one waits for
        self.shielded = held
        self.pending = self.told = False
        self.reason = "interrupted"  # or "limit": SIGUSR1, with which schedulers announce the end of a job's time
        self.previous: dict[int, Any] = {}

    def __enter__(self) -> Interrupts:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
                self.previous[number] = signal.signal(number, self._handle)
        self.token = IN_FORCE.set(self)
        return self

    def __exit__(self, *error: object) -> None:
        IN_FORCE.reset(self.token)
        for number, handler in self.previous.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: Any) -> None:
        if self.told and number != signal.SIGINT:  # twice: by a scheduler and by what passes its signals on
            return
        if not self.told:
            self.told, self.reason = True, "limit" if number == signal.SIGUSR1 else "interrupted"
        if self.shielded and not (self.pending and number == signal.SIGINT and self.impatient):
            if not self.pending:
                self.notice()
            self.pending = True
        else:
            raise KeyboardInterrupt

    def check(self) -> None:
        """Raise what has waited."""
        if self.pending:
            self.pending = False
            raise KeyboardInterrupt

    @contextmanager
    def shield(self) -> Iterator[None]:
        """Let signals wait until the outermost shield is left."""
        outer, self.shielded = self.shielded, True
        try:
            yield
        finally:
            self.shielded = outer
        if not outer:
            self.check()

    @contextmanager
    def open(self) -> Iterator[None]:
        """Let signals through, also one that has waited."""
        outer, self.shielded = self.shielded, False
        try:
            self.check()
            yield
        finally:
            self.shielded = outer


IN_FORCE: ContextVar[Interrupts | None] = ContextVar("interrupts", default=None)  # those of this thread


def cuttable() -> AbstractContextManager[None]:
    """What a signal may cut short although this thread's `Interrupts` hold it back elsewhere."""
    interrupts = IN_FORCE.get()
    return nullcontext() if interrupts is None else interrupts.open()


def uncut() -> AbstractContextManager[None]:
    """What no signal may cut short, inside `cuttable`."""
    interrupts = IN_FORCE.get()
    return nullcontext() if interrupts is None else interrupts.shield()
