"""This machine: cores and memory that this process may use, and child processes. Reads Linux's /proc.

Standard library only: it is also sent to SSH hosts.
"""

from __future__ import annotations

import ctypes
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

STOP_SECONDS = 4.0  # for Ray to exit after SIGTERM
FAMILY_SECONDS = 0.5  # for its child processes to exit after it

STOPPED = "T"  # the state of a process after SIGSTOP


def usable_cores(root: Path = Path("/")) -> int:
    """Number of cores this process may use: limited by CPU affinity and by the quotas of its control groups."""
    found = [len(os.sched_getaffinity(0))]
    for folder, older in control_groups("cpu", root).items():
        with suppress(OSError, ValueError):  # no such folder, or "max": no quota
            if older:
                quota, period = (int((folder / f"cpu.cfs_{name}_us").read_text()) for name in ("quota", "period"))
            else:
                quota, period = map(int, (folder / "cpu.max").read_text().split())
            if quota > 0 and period > 0:  # -1: no quota
                found.append(math.ceil(quota / period))
    return min(found)


def control_groups(controller: str, root: Path = Path("/")) -> dict[Path, bool]:
    """Folders of this process's control groups -> whether they are of version 1 (a hierarchy per controller)."""
    unified, own = root / "sys/fs/cgroup", root / "sys/fs/cgroup" / controller
    folders = {unified: False, own: True}
    with suppress(OSError, ValueError):
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            number, controllers, path = line.split(":", 2)
            if number == "0" or controller in controllers.split(","):
                top = unified if number == "0" else own
                group = top / path.strip("/")
                parts = (folder for folder in (group, *group.parents) if folder.is_relative_to(top))
                folders.update(dict.fromkeys(parts, top == own))
    return folders


def free_memory(root: Path = Path("/")) -> int | None:
    """Bytes that this process may still allocate: limited by the machine and its control groups; None if unknown."""
    found = []
    with suppress(OSError, ValueError, KeyError):
        rows = dict(line.split(":", 1) for line in (root / "proc/meminfo").read_text().splitlines())
        found.append(int(rows["MemAvailable"].split()[0]) * 1024)
    for folder, older in control_groups("memory", root).items():
        names = ("memory.max", "memory.current", "inactive_file")
        if older:
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        with suppress(OSError, ValueError, KeyError):  # no such folder, or "max": no limit
            limit, usage = (int((folder / name).read_text()) for name in names[:2])
            counts = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
            found.append(max(limit - usage + int(counts[names[2]]), 0))  # file cache can be reclaimed
    return min(found, default=None)


def age() -> float:
    """Seconds since this process started, including the time as a shell that exec'ed it."""
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    return float(Path("/proc/uptime").read_text().split()[0]) - ticks / os.sysconf("SC_CLK_TCK")


def start(command: list[str], environ: Mapping[str, str], **more: Any) -> subprocess.Popen[bytes]:
    """Start a program that gets SIGTERM when this process dies."""
    return _start(command, environ, signal.SIGTERM, (), more)


def start_deaf(
    command: list[str], environ: Mapping[str, str], signals: Collection[signal.Signals], **more: Any
) -> subprocess.Popen[bytes]:
    """Start a program that blocks these signals, as its descendants then do, unless they let them in. It is killed when
    this process dies; `end` it with 0 seconds."""
    return _start(command, environ, signal.SIGKILL, signals, more)


def _start(
    command: list[str],
    environ: Mapping[str, str],
    ending: signal.Signals,
    blocked: Collection[signal.Signals],
    more: dict[str, Any],
) -> subprocess.Popen[bytes]:
    libc = ctypes.CDLL(None)

    def prepare() -> None:
        libc.prctl(1, ending)  # PR_SET_PDEATHSIG
        signal.pthread_sigmask(signal.SIG_BLOCK, blocked)

    return subprocess.Popen(command, env=dict(environ), preexec_fn=prepare, **more)


def end(process: subprocess.Popen[bytes], seconds: float = STOP_SECONDS) -> list[str]:
    """End a process and its descendants: SIGTERM, then SIGKILL.

    Returns the names of those that had to be killed.
    """
    if process.poll() is not None:
        return []
    family = descendants(process.pid)
    process.send_signal(signal.SIGTERM)
    deadline = time.monotonic() + seconds
    while process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    deadline = min(deadline, time.monotonic() + FAMILY_SECONDS)
    while any(alive(*process) for process in family.items()) and time.monotonic() < deadline:
        time.sleep(0.05)
    if process.poll() is None:
        family |= descendants(process.pid) | {process.pid: began(process.pid)}
    killed = _kill(family)
    process.wait()
    return killed


def exit_code(returncode: int) -> int:
    """The exit code as shells report it: 128 + the signal's number, if a signal ended the process."""
    return returncode if returncode >= 0 else 128 - returncode


def adopt_orphans() -> None:
    """Become the parent of descendants whose parents die, so that `end_orphans` finds them."""
    ctypes.CDLL(None).prctl(36, 1)  # PR_SET_CHILD_SUBREAPER


def end_orphans() -> None:
    """Kill all descendants of this process that still run, such as simulators whose worker died."""
    _kill(descendants(os.getpid()))


def _kill(family: Mapping[int, str]) -> list[str]:
    """Kill the processes that still run; returns their names."""
    killed = []
    for pid, start in family.items():
        with suppress(OSError):
            if alive(pid, start):
                killed.append(Path(f"/proc/{pid}/comm").read_text().strip())
                os.kill(pid, signal.SIGKILL)
    return killed


def descendants(pid: int) -> dict[int, str]:
    """Descendants of a process: pid -> start time, which tells a reused pid apart."""
    children: dict[int, list[int]] = {}
    starts: dict[int, str] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal() and (fields := _stat(int(entry.name))):
            children.setdefault(int(fields[1]), []).append(int(entry.name))
            starts[int(entry.name)] = fields[19]
    found: dict[int, str] = {}
    pending = [pid]
    while pending:
        for child in children.get(pending.pop(), []):
            found[child] = starts[child]
            pending.append(child)
    return found


def alive(pid: int, began: str) -> bool:
    """Whether a process still runs, and its pid was not reused."""
    fields = _stat(pid)
    return bool(fields) and fields[19] == began and fields[0] != "Z"


def began(pid: int) -> str:
    """The start time of a process, for `alive`; empty if it does not exist."""
    return (_stat(pid) or [""] * 20)[19]


def process_state(pid: int) -> str:
    """The state of a process, one letter such as STOPPED; empty if it does not exist."""
    return (_stat(pid) or [""])[0]


def _stat(pid: int) -> list[str]:
    """The fields of /proc/PID/stat after the command name: state, parent, ...; the 20th is the start time."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def absolute_sys_path() -> list[str]:
    """`sys.path` with absolute entries, so that workers find the same modules."""
    return [path or os.getcwd() for path in sys.path]
