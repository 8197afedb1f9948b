"""Temporary folders of Ray on this machine, with short paths. Each has an owner; those of owners that died are removed.

Uses the standard library only, since it is sent to hosts over ssh; so locks are fcntl's and not filelock's.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import shutil
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from fever.errors import FeverError
from fever.files import user_path

PREFIX = "fever-ray-"  # of the folders of jobs and clusters
FALLBACK = Path("/tmp")  # for temporary folders that cannot be where they should
LONGEST_PATH = 43  # bytes of Ray's temporary folder: the paths of the sockets below it may have 107 bytes
STALE_SECONDS = 3600.0  # after which a folder without an owner is removed


def scratch_folder(setting: str) -> Path:
    """The folder for temporary folders on this host; environment variables and ~ are expanded."""
    return user_path(os.path.expandvars(setting))


def delete(folder: Path) -> None:
    """Delete a folder, as far as that is possible."""
    shutil.rmtree(folder, ignore_errors=True)


class Scratch:
    """A temporary folder with a short path on this host. Its owner holds a lock in it until `remove`, or until the
    process ends."""

    def __init__(
        self,
        parent: str,
        prefix: str = PREFIX,
        clear: Callable[[Path], None] = delete,
        for_ray: bool = True,
    ) -> None:
        """Make the folder, and remove those of owners that were killed. `clear(folder)` is how one is removed.
        `for_ray`: whether the path must be short enough for Ray's sockets."""
        self.note, self.clear = "", clear
        folder = scratch_folder(parent)
        name = f"{prefix}{secrets.token_hex(3)}"
        if (for_ray and len(str(folder / name / "r")) > LONGEST_PATH) or not folder.is_dir():
            self.note = f"scratch {folder} is too long a path for Ray or does not exist; {FALLBACK} is used"
            folder = FALLBACK
        sweep(folder, prefix, clear)
        hidden, self.path = folder / f".{name}", folder / name
        try:
            hidden.mkdir(mode=0o700)
            # A bare descriptor: unlike a file, it stays open when nobody refers to this object any more.
            self.lock = os.open(hidden / "owner", os.O_WRONLY | os.O_CREAT, 0o600)
            fcntl.flock(self.lock, fcntl.LOCK_EX)
            hidden.rename(self.path)  # `sweep` sees it only once it is locked
        except OSError as error:
            reason = f"{folder} cannot be used on {socket.gethostname()}: {error.strerror}"
            raise FeverError(f"{reason}; set scratch to a folder that can") from error

    @property
    def ray(self) -> Path:
        """Ray's own folder. Ray makes it readable for everybody, so it is in a folder that only this user can enter."""
        return self.path / "r"

    def remove(self) -> None:
        deadline = time.monotonic() + 1.0
        while self.path.exists() and time.monotonic() < deadline:  # processes that are ending may still write into it
            self.clear(self.path)
        self.release()

    def release(self) -> None:
        """Own the folder no longer, as if this process had ended."""
        if self.lock >= 0:
            os.close(self.lock)
            self.lock = -1


def sweep(folder: Path, prefix: str = PREFIX, clear: Callable[[Path], None] = delete) -> None:
    """Remove the temporary folders of owners that were killed."""
    for path in folder.glob(f"{prefix}*"):
        with suppress(OSError):
            if path.lstat().st_uid != os.getuid():
                continue
            if not (path / "owner").exists():
                if time.time() - path.lstat().st_mtime > STALE_SECONDS:
                    clear(path)
                continue
            with open(path / "owner") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                clear(path)
