"""The lock of a run directory: one process at a time trains a run.

It is the kernel's lock on the file `lock` (flock), which ends with the process, on whatever machine that is. Forked
children would hold it beyond that, so they close their copy. Children that C code forked cannot: if the owner that the
file names is dead, its lock counts for nothing, and the file is replaced.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from fever import layout
from fever.errors import FeverError
from fever.files import open_regular
from fever.system import alive, began

LOCK_SECONDS = 1.0  # to claim a run: others hold a lock for a moment to look at it
PAUSE_SECONDS = 0.02
NO_LOCKS = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK)  # of file systems without locks
_held: set[int] = set()  # descriptors of the locks of this process


class RunLock:
    """The lock of one run directory; raises `FeverError` if another process has it, or it cannot be written."""

    def __init__(self, run: Path) -> None:
        self.path = run / layout.LOCK
        try:
            with _guard(run) as guarded:
                self.file = self._acquire(guarded)
                os.ftruncate(self.file, 0)
                with suppress(OSError):  # the disk is full: then the kernel's lock has to do
                    os.write(self.file, (json.dumps(_owner()) + "\n").encode())
        except OSError as error:
            raise FeverError(f"{run} cannot be written: {error.strerror}") from error
        _held.add(self.file)

    def _acquire(self, guarded: bool) -> int:
        file = self._open()
        if _try(file, fcntl.LOCK_EX, 0.0 if guarded else LOCK_SECONDS):
            return file
        owner = _read(file)
        os.close(file)
        if not (guarded and _is_dead(owner)):
            raise FeverError(f"{self.path.parent} is being trained right now by {_describe(owner)}")
        self.path.unlink()  # held by children of a dead process; nobody else can acquire it while we have the guard
        file = self._open()
        _try(file, fcntl.LOCK_EX, 0.0)  # cannot fail: nobody else knows the new file
        return file

    def _open(self) -> int:
        return os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)

    def release(self) -> None:
        """Release it; in a forked child, which does not have it, nothing happens."""
        if self.file in _held:
            _held.discard(self.file)
            with suppress(OSError):
                os.ftruncate(self.file, 0)
                fcntl.flock(self.file, fcntl.LOCK_UN)
            os.close(self.file)


def is_locked(run: Path) -> bool:
    """Whether a process trains the run."""
    try:
        with _guard(run), open_regular(run / layout.LOCK, os.O_RDONLY | os.O_NOFOLLOW) as file:
            return not _try(file.fileno(), fcntl.LOCK_SH, 0.0) and not _is_dead(_read(file.fileno()))
    except FeverError:
        return True
    except OSError:
        return False


@contextmanager
def _guard(run: Path) -> Iterator[bool]:
    """Have the run's lock file to oneself while it is looked at, through a lock on the directory. Yields False where
    directories cannot be locked, as on NFS; then a dead owner's lock is not replaced. Raises `FeverError` if another
    process has it for long."""
    folder = os.open(run, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    _held.add(folder)
    try:
        try:
            guarded = _try(folder, fcntl.LOCK_EX, LOCK_SECONDS)
        except OSError:
            yield False
            return
        if not guarded:
            raise FeverError(f"another process is opening {run} right now; try again")
        try:
            yield True
        finally:
            fcntl.flock(folder, fcntl.LOCK_UN)  # for copies in forked children as well
    finally:
        _held.discard(folder)
        os.close(folder)


def _try(file: int, kind: int, seconds: float) -> bool:
    """Lock a file within some time. A file system without locks is not an obstacle, unless a living owner is known."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            fcntl.flock(file, kind | fcntl.LOCK_NB)
            return True
        except OSError as error:
            if error.errno in NO_LOCKS:
                owner = _read(file)
                return not owner or _is_dead(owner)
            if error.errno not in (errno.EACCES, errno.EAGAIN):
                raise
        if time.monotonic() >= deadline:
            return False
        time.sleep(PAUSE_SECONDS)


def _owner() -> dict[str, Any]:
    return {"host": socket.gethostname(), "pid": os.getpid(), "started": _start_time(os.getpid()), "boot": _boot()}


def _read(file: int) -> dict[str, Any]:
    """The owner that a lock file names; empty if it names none."""
    try:
        owner = json.loads(os.pread(file, 4096, 0))
    except (OSError, ValueError):
        return {}
    return owner if isinstance(owner, dict) and isinstance(owner.get("pid"), int) else {}


def _is_dead(owner: dict[str, Any]) -> bool:
    """Whether the owner is known to be dead. Process numbers mean something on their own machine only."""
    if owner.get("host") != socket.gethostname() or not owner.get("boot") or owner["boot"] != _boot():
        return False
    return _start_time(owner["pid"]) != owner.get("started")


def _boot() -> str:
    """What distinguishes machines of the same name, and containers that have process numbers of their own."""
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip() + os.readlink("/proc/self/ns/pid")
    return ""


def _start_time(pid: int) -> int | None:
    """When a process started, in the kernel's ticks, so that another one with its number is not taken for it."""
    found = began(pid)
    return int(found) if found and alive(pid, found) else None


def _describe(owner: dict[str, Any]) -> str:
    if not owner:
        return "process unknown"
    elsewhere = "" if owner.get("host") == socket.gethostname() else f" on {owner.get('host')}"
    return f"process {owner['pid']}{elsewhere}"


def _close_in_child() -> None:
    for file in _held:
        with suppress(OSError):
            os.close(file)
    _held.clear()


os.register_at_fork(after_in_child=_close_in_child)
