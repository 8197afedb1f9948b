"""The processes of a training: all that have its mark in their environment, whoever their parent is by now."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

MARK = "FEVER_CHAOS"  # environment variable that all processes of a training inherit
KINDS = {"sampler": "ray::WorkerActor", "shard": "ray::ShardActor", "raylet": "raylet", "gcs": "gcs_server"}


class Process(NamedTuple):
    """A process that was found alive."""

    pid: int
    started: str  # by the kernel's clock: another process that has the same number started at another time
    title: str  # its command line

    @property
    def kind(self) -> str:
        """One of KINDS, or nothing."""
        name = self.title.split(" ")[0].rpartition("/")[2]
        return next((kind for kind, start in KINDS.items() if name.startswith(start)), "")

    def alive(self) -> bool:
        found = _look(self.pid)
        return found is not None and found.started == self.started

    def signal(self, number: int) -> None:
        """Send a signal, if it is still this process that has the number."""
        with suppress(ProcessLookupError):
            handle = os.pidfd_open(self.pid)
            try:
                if self.alive():
                    signal.pidfd_send_signal(handle, number)
            finally:
                os.close(handle)


def marked(mark: str) -> list[Process]:
    """All living processes that inherited a mark that begins like this."""
    wanted, found = f"\0{MARK}={mark}".encode(), []
    for entry in os.listdir("/proc"):
        if entry.isdecimal() and wanted in b"\0" + _read(entry, "environ"):
            process = _look(int(entry))
            if process is not None:
                found.append(process)
    return found


def _read(pid: int | str, file: str) -> bytes:
    try:
        return Path(f"/proc/{pid}/{file}").read_bytes()
    except OSError:
        return b""


def _look(pid: int) -> Process | None:
    """The process of a number; None if there is none, or only its exit code is left."""
    fields = _read(pid, "stat").rpartition(b")")[2].split()  # from the third field on: the state is the first of them
    if not fields or fields[0] in (b"Z", b"X"):
        return None
    title = _read(pid, "cmdline").replace(b"\0", b" ").decode(errors="replace").strip()
    return Process(pid, fields[19].decode(), title)
