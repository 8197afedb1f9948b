"""Run a program that may crash, hang or write half a file, in a folder of its own for every try."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from fever.errors import FeverError

HERE = Path(__file__).resolve().parent
CLOSED = "the environment was closed in the middle of a step"
LOG = "log.txt"  # in the folder of a try: all that the program printed, and why the try failed
# Is told which process group runs, a line for every change, and kills it when its input ends: then this process is
# gone, perhaps by SIGKILL. In the background it is no child of this process: Ray kills those along with a worker.
GUARD = """exec 3<&0
{ while read -r group <&3; do running=$group; done; [ -z "$running" ] || kill -s KILL -- "-$running"; } &"""
# The program's own process tells the guard its group, before it becomes the program: this process may be killed at any
# moment, also before it knows that group.
START = 'echo "$$" >&0; exec "$@" 0</dev/null'
Result = TypeVar("Result")


class Failure(Exception):
    """The program did not do what it should."""


class Program:
    """A program with a time limit in seconds and a number of retries.

    Of the folders that it makes in `workdir`, which no one else may use, two are kept: the last in which the program
    went well, and as `failed` the last in which it did not.
    """

    def __init__(self, command: str | Sequence[str], timeout: float, retries: int, workdir: str | Path | None) -> None:
        words = shlex.split(command) if isinstance(command, str) else list(command)
        words = [str(HERE / word) if (HERE / word).is_file() else word for word in words]  # it starts in other folders
        found = shutil.which(words[0]) if words else None
        if found is None:
            raise FeverError(f"there is no program {command!r}; give its full path, or put it on PATH")
        self.command = [str(Path(found).absolute()), *words[1:]]
        self.timeout, self.retries = timeout, retries
        self.temporary: tempfile.TemporaryDirectory[str] | None = None
        if workdir is None:
            self.temporary = tempfile.TemporaryDirectory(prefix="simulator-")
            workdir = self.temporary.name
        self.workdir = Path(workdir).absolute()
        self.failed = self.workdir / "failed"
        self.failures = 0  # tries so far that failed
        self.process: subprocess.Popen[bytes] | None = None
        self.closed = False
        self._clean()
        self.guard = subprocess.Popen(
            ["sh", "-c", GUARD], stdin=subprocess.PIPE, stderr=subprocess.DEVNULL, bufsize=0, start_new_session=True
        )
        self.guard.wait()  # for the shell that put it into the background

    def run(self, name: str, prepare: Callable[[Path], None], read: Callable[[Path], Result]) -> tuple[Path, Result]:
        """Fill a folder with `prepare`, run the program there, `read` its result; returns the folder and the result.

        `read` raises OSError or ValueError if files are missing or wrong. Raises Failure if no try went well.
        """
        for number in range(self.retries + 1):
            folder = self.workdir / f"try-{name}-{number}"
            folder.mkdir()
            prepare(folder)
            try:
                self._execute(folder)
                result = read(folder)
            except (OSError, ValueError, Failure) as error:
                self._keep(folder, str(error))
            else:
                self._clean(folder)
                return folder, result
        raise Failure(self._last_lines())

    def _execute(self, folder: Path) -> None:
        """Run the program to its end. Whatever happens, Ctrl-C included, no process of it is left after this."""
        begin = time.monotonic()
        with (folder / LOG).open("wb") as log:
            try:
                self.process = subprocess.Popen(
                    ["sh", "-c", START, "sh", *self.command],
                    cwd=folder,
                    stdin=self.guard.stdin,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,  # makes it and its children one group, which can be killed as a whole
                )
            except ValueError:  # another thread has closed the guard's input
                raise FeverError(CLOSED) from None
        timer = threading.Timer(self.timeout, self._kill)  # wait(timeout) looks only every 50 ms
        try:
            timer.start()
            code = None if self.closed else self.process.wait()
        finally:
            timer.cancel()
            self._kill()
            self.process = None
            self._tell_guard_that_nothing_runs()
        if self.closed:
            raise FeverError(CLOSED)
        if code != 0:
            late = time.monotonic() - begin >= self.timeout
            raise Failure(f"killed after {self.timeout:g} s" if late else f"ended with exit code {code}")

    def _kill(self) -> None:
        """Kill the program and its children, also children that it left behind when it ended."""
        process = self.process
        if process is not None:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def _tell_guard_that_nothing_runs(self) -> None:
        assert self.guard.stdin is not None
        with suppress(OSError, ValueError):  # without it steps go on; ValueError: closed by another thread
            self.guard.stdin.write(b"\n")

    def _keep(self, folder: Path, reason: str) -> None:
        """Make a folder that of the last failure, for people to look at."""
        self.failures += 1
        with (folder / LOG).open("a") as log:
            log.write(f"\n{folder.name} failed: {reason}\n")
        shutil.rmtree(self.failed, ignore_errors=True)
        folder.rename(self.failed)

    def _last_lines(self, count: int = 5) -> str:
        """The end of the last failure's log, with bars between the lines."""
        with (self.failed / LOG).open("rb") as log:
            log.seek(max(0, os.fstat(log.fileno()).st_size - 2000))
            lines = log.read().decode(errors="replace").splitlines()
        return " | ".join([line.strip() for line in lines if line.strip()][-count:])

    def _clean(self, keep: Path | None = None) -> None:
        """Remove the folders of earlier tries but one; also those of a process before this one, which was killed."""
        for folder in self.workdir.glob("try-*"):
            if folder != keep:
                shutil.rmtree(folder, ignore_errors=True)

    def close(self) -> None:
        """Kill what runs, even if another thread waits for it. The folder of the last failure stays."""
        self.closed = True
        self._kill()
        assert self.guard.stdin is not None
        self.guard.stdin.close()
        self._clean()
        if self.temporary is not None:
            self.temporary.cleanup()
