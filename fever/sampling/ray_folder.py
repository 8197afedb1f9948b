"""The temporary folder of a private Ray. Ray itself would leave its logs and sockets in /tmp/ray for ever."""

from __future__ import annotations

import os
import signal
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from fever.envs.local_folder import LOCAL
from fever.scratch import Scratch, delete

PREFIX = "fever-private-ray-"
ENDING_SECONDS = 1.0  # for the processes of a folder to end


def make_folder() -> Scratch:
    """A new folder; those of processes that were killed are removed."""
    return Scratch(tempfile.gettempdir(), PREFIX, clear)


def clear(folder: Path) -> None:
    """End the processes that belong to such a folder, and delete it. After the death of a raylet, its agents would stay
    for a minute; and what environments have started would stay for ever, if their worker was killed."""
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
    """Processes that have a file in a folder open which this process has not: any child may have inherited those. And
    those that workers of the folder have started, wherever their output goes."""
    own = _open_files(os.getpid(), folder)
    others = {int(entry.name) for entry in Path("/proc").glob("[0-9]*")} - {os.getpid()}
    return [process for process in others if _open_files(process, folder) - own or _is_of_worker(process, folder)]


def _is_of_worker(process: int, folder: Path) -> bool:
    """Whether a process has the environment variable by which workers find a folder."""
    with suppress(OSError):  # it has ended, or is another user's
        return f"{LOCAL}={folder}".encode() in Path(f"/proc/{process}/environ").read_bytes().split(b"\0")
    return False


def _open_files(process: int, folder: Path) -> set[str]:
    found = set()
    with suppress(OSError):  # it has ended, or is another user's
        for link in Path(f"/proc/{process}/fd").iterdir():
            with suppress(OSError):
                found.add(os.readlink(link))
    return {path for path in found if path.startswith(f"{folder}/")}
