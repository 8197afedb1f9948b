"""A disk that is full, fails or is gone for a while does not end a run: what it refuses is written when it takes it
again."""

from __future__ import annotations

import errno
import io
import logging
import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from fever.errors import TrainingError
from fever.files import open_unbuffered

RETRY_SECONDS = 10.0  # between two attempts to write to a disk that has refused
WAITING_BYTES = 64 << 20  # of rows that a file keeps in memory until there is room; later ones are dropped
REFUSALS = {
    errno.ENOSPC: "is full",
    errno.EDQUOT: "is full (your quota)",
    errno.EIO: "fails (input/output error)",
    errno.EROFS: "is read-only",
    errno.EACCES: "may not be written (permission denied)",  # a ticket for a network file system has expired
    errno.ESTALE: "is gone (stale file handle)",
    errno.ENOTCONN: "is gone (not connected)",
    errno.ETIMEDOUT: "does not answer (timed out)",
    errno.ENOENT: "is gone",  # if the run directory is
}


class Disk:
    """Where a run is written. A refusal is said once, and so is that everything is written again."""

    def __init__(self, run: Path) -> None:
        self.run = run
        self.say: Callable[[str], None] = lambda text: None  # to the person who watches; the trainer sets it
        self.problem = ""  # what the disk does, such as "is full"; empty if it takes everything
        self.unsaved: dict[str, None] = {}  # what could not be written so far, in order
        self.lost: dict[str, int] = {}  # file -> lines of it that will never be written
        self.retry = 0.0

    def ready(self) -> bool:
        """Whether writing is worth an attempt now."""
        return not self.problem or time.monotonic() >= self.retry

    def try_now(self) -> None:
        """Make the next attempt at once: it is the last one."""
        self.retry = 0.0

    @contextmanager
    def writing(self, what: str) -> Iterator[None]:
        """Around writing something, which is named: a refusal of the disk is noted and goes no further."""
        try:
            yield
        except Exception as error:
            problem = self._refusal(error)
            if problem is None:
                raise
            self.unsaved[what] = None
            self._fail(problem)
        else:
            self._succeed(what)

    def _refusal(self, error: BaseException) -> str | None:
        """What is wrong with the disk, if that is what an error says."""
        number = error.errno if isinstance(error, OSError) else None
        if found := re.search(r"\(os error (\d+)\)", str(error)):  # how safetensors reports it
            number = int(found[1])
        if number is None or (number == errno.ENOENT and os.path.isdir(self.run)):
            return None
        return REFUSALS.get(number)

    def _fail(self, problem: str) -> None:
        known, self.problem = self.problem, problem
        self.retry = time.monotonic() + RETRY_SECONDS
        if not known:
            until = "there is room" if "full" in problem else "it works again"
            self._tell(f"the disk of {self.run} {problem}: nothing is saved until {until}")

    def _succeed(self, what: str) -> None:
        self.unsaved.pop(what, None)
        if self.problem and not self.unsaved:
            self.problem = ""
            self._tell(f"the disk of {self.run} takes files again: everything is saved")

    def _tell(self, text: str) -> None:
        logging.info("%s", text)  # no warning: without a log, those are printed, too
        self.say(text)

    def lose(self, what: str, lines: int) -> None:
        """Note that lines of a file are lost for good; those of a file without lines are not counted."""
        self.lost[what] = self.lost.get(what, 0) + lines

    def require_saved(self) -> None:
        """Raise `TrainingError` with what could not be written until the end."""
        missing = {**self.unsaved, **dict.fromkeys(self.lost)}
        if missing:
            parts = [f"{what} ({self.lost[what]} lines)" if self.lost.get(what) else what for what in missing]
            why = self.problem or "was full"
            raise TrainingError(f"the disk of {self.run} {why}; not saved: {', '.join(parts)}")


class Appender:
    """A file that is appended to without a buffer. What the disk refuses waits in memory, so nothing is lost or cut.
    After that, and when it was deleted, the file is opened anew."""

    def __init__(self, path: Path, disk: Disk, lines: bool = True) -> None:
        """`lines`: whether the file has lines, of which one that a kill has cut is ended before the next."""
        self.path, self.disk, self.lines = path, disk, lines
        self.file: io.FileIO | None = None
        self.waiting = bytearray()
        self.cut = False  # whether the file ends in the middle of a line, whose rest waits

    def write(self, data: bytes) -> None:
        """Append whole lines or records."""
        if len(self.waiting) + len(data) > WAITING_BYTES and self.waiting:
            self._lose(data)
            return
        self.waiting += data
        if self.disk.ready():
            self._write_waiting()

    def _lose(self, data: bytes | bytearray) -> None:
        self.disk.lose(self.path.name, data.count(b"\n") if self.lines else 0)

    def _write_waiting(self) -> None:
        with self.disk.writing(self.path.name):
            try:
                if self.file is not None and not os.fstat(self.file.fileno()).st_nlink:
                    self._close()
                    self.cut = False
                if self.file is None:
                    self.file = open_unbuffered(self.path, self.lines and not self.cut)
                while self.waiting:
                    written = self.file.write(self.waiting)
                    self.cut = self.waiting[:written][-1:] != b"\n"
                    del self.waiting[:written]
            except OSError:
                self._close()
                raise

    def _close(self) -> None:
        file, self.file = self.file, None
        if file is not None:
            with suppress(OSError):
                file.close()

    @property
    def size(self) -> int:
        """Bytes in the file, without those that wait."""
        return 0 if self.file is None else os.fstat(self.file.fileno()).st_size

    def close(self) -> None:
        """Write what waits, if there is room by now, and close the file."""
        if self.waiting:
            self._write_waiting()
        if self.waiting:
            self._lose(self.waiting)
            self.waiting.clear()
        self._close()
