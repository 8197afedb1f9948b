"""`--tensorboard`: TensorBoard on this machine while a run trains."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO

from fever.config import RunConfig
from fever.errors import FeverError
from fever.system import end, start
from fever.training.callbacks import Callback, TrainingInfo

START_SECONDS = 120.0  # for it to say its address
LOOK_SECONDS = 0.25  # between two looks at what it said
ADDRESS = re.compile(rb"^TensorBoard \S+ at (http://\S+)", re.MULTILINE)  # once it serves: "... (Press CTRL+C to quit)"
INSTALL = "TensorBoard is not installed; install it with: pip install tensorboard"


def find_program() -> str | None:
    """The program `tensorboard` of this Python, or else of the search path; None if there is none."""
    own = Path(sys.executable).with_name("tensorboard")
    return str(own) if own.exists() else shutil.which("tensorboard")


class Server(Callback):
    """TensorBoard as a child of this process, on the folder of the run. It ends with the training, however that ends:
    the system ends it when this process dies. If it does not start, the training goes on."""

    def __init__(self, say: Callable[[str], None]) -> None:
        """`say` shows a sentence to a person. Raises `FeverError` if it is not installed."""
        program = find_program()
        if program is None:
            raise FeverError(f"--tensorboard: {INSTALL}")
        self.program, self.say = program, say
        self.process: subprocess.Popen[bytes] | None = None
        self.over = threading.Event()
        self.thread: threading.Thread | None = None

    def on_start(self, info: TrainingInfo) -> None:
        # Without --port it takes 6006, or the next free one, and says which.
        words = [self.program, "--logdir", str(info.run.path.resolve().parent), "--host", "127.0.0.1"]
        self.output: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - `on_stop` closes it
        pipes = {"stdin": subprocess.DEVNULL, "stdout": self.output, "stderr": subprocess.STDOUT}
        try:  # in a session of its own: Ctrl-C is not for it
            self.process = start(words, os.environ, start_new_session=True, **pipes)
        except OSError as error:
            self._say_that_it_failed(str(error.strerror))
            return
        self.thread = threading.Thread(target=self._announce, args=(self.process,), daemon=True)
        self.thread.start()

    def _announce(self, process: subprocess.Popen[bytes]) -> None:
        """Say the address once TensorBoard has said it, or that it did not start."""
        deadline = time.monotonic() + START_SECONDS
        while not self.over.wait(LOOK_SECONDS):
            if process.poll() is not None:
                return self._say_that_it_failed(self._last_words())
            if address := ADDRESS.search(self._output()):
                return self.say(f"TensorBoard: {address[1].decode()}")
            if time.monotonic() > deadline:
                return self._say_that_it_failed(f"it has not answered within {START_SECONDS:g} s")

    def _say_that_it_failed(self, why: str) -> None:
        self.say(f"note: TensorBoard did not start, and training goes on: {why}")

    def _output(self) -> bytes:
        """What it said so far. (Reading at a position: to seek would move where TensorBoard writes.)"""
        descriptor = self.output.fileno()
        return os.pread(descriptor, os.fstat(descriptor).st_size, 0)

    def _last_words(self) -> str:
        lines = self._output().decode(errors="replace").strip().splitlines()
        return lines[-1].strip() if lines else "it ended without a word"

    def on_stop(self, info: TrainingInfo) -> None:
        self.over.set()
        if self.thread is not None:
            self.thread.join()
        if self.process is not None:
            end(self.process)
        self.output.close()


def check(config: RunConfig, elsewhere: bool, several: bool = False) -> None:
    """Raise `FeverError` where `--tensorboard` has no place: with `--on`, and for searches and several seeds."""
    board = f"tensorboard --logdir {config.runs}"
    if elsewhere:
        raise FeverError(
            "--tensorboard starts TensorBoard where fever runs, and with --on that is elsewhere; the run directory "
            f"comes here while it trains: {board} (for machines of your own also: fever tunnel FILE)"
        )
    if config.search is not None:
        raise FeverError(f"--tensorboard is for one run; for a search: {board}")
    if several:
        raise FeverError(f"--tensorboard is for one run; for several seeds: {board}")
