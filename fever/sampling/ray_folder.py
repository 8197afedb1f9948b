"""The temporary folder of a private Ray. Ray itself would leave its logs and sockets in /tmp/ray for ever."""

from __future__ import annotations

import os
import signal
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from fever.scratch import Scratch, delete

PREFIX = "fever-private-ray-"
ENDING_SECONDS = 1.0  # for the processes of a folder to end


def make_folder() -> Scratch:
    """A new folder; those of processes that were killed are removed."""
    return Scratch(tempfile.gettempdir(), PREFIX, clear)


def clear(folder: Path) -> None:
    """End the processes that have files in such a folder open, and delete it. After the death of a raylet, its agents
    would stay for a minute."""
    deadline = time.monotonic() + ENDING_SECONDS
    while True:
        users = _users(folder)
        for process in users:
            with suppress(OSError):
                os.kill(process, signal.SIGKILL)
        delete(folder)
        if not (users or folder.exists()) or time.monotonic() > deadline:
            return
        time.sleep(0.01)  # one of them may have been starting another


def _users(folder: Path) -> list[int]:
    """Processes that have a file in a folder open which this process has not: any child may have inherited those."""
    own = _open_files(os.getpid(), folder)
    others = {int(entry.name) for entry in Path("/proc").glob("[0-9]*")} - {os.getpid()}
    return [process for process in others if _open_files(process, folder) - own]


def _open_files(process: int, folder: Path) -> set[str]:
    found = set()
    with suppress(OSError):  # it has ended, or is another user's
        for link in Path(f"/proc/{process}/fd").iterdir():
            with suppress(OSError):
                found.add(os.readlink(link))
    return {path for path in found if path.startswith(f"{folder}/")}
