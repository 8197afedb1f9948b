"""Cores of their own for workers: each claims some of its machine's. It and the processes that it starts run there.

A claim is a socket with a name in the kernel, not in the file system. So it ends with the worker's process, however
that ends, and all workers of a machine see each other, whichever run they belong to.
"""

from __future__ import annotations

import os
import socket
import time
from contextlib import suppress
from itertools import pairwise
from pathlib import Path

CLAIM = "fever-core-"  # and the core's number: name of an abstract Unix socket
FREE_SECONDS = 2.0  # for a worker that is replaced to end
CLAIMED: list[socket.socket] = []  # by this process, until it ends
BOUND: list[int] = []  # cores that this process is bound to


def bind_to_cores(count: int) -> list[int]:
    """Bind this process, and processes that it starts from now on, to `count` cores that no other worker has claimed.
    Returns them; empty if so many are not free, and then nothing is bound."""
    deadline = time.monotonic() + FREE_SECONDS
    while not (cores := _claim_any(count)) and time.monotonic() < deadline:
        time.sleep(0.1)
    for thread in Path("/proc/self/task").iterdir() if cores else ():
        with suppress(OSError):  # it has just ended
            os.sched_setaffinity(int(thread.name), cores)
    BOUND[:] = cores
    return cores


def _claim_any(count: int) -> list[int]:
    """Claim `count` cores that follow one another, which mostly share caches and memory; empty if there are none."""
    usable = sorted(os.sched_getaffinity(0))
    groups = (usable[first : first + count] for first in range(0, len(usable) - count + 1, count))
    return next(filter(_claim, groups), [])


def _claim(cores: list[int]) -> bool:
    """Claim all of these cores, or none."""
    claims = []
    for core in cores:
        claim = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        claims.append(claim)
        try:
            claim.bind(f"\0{CLAIM}{core}")
        except OSError:
            for one in claims:
                one.close()
            return False
    CLAIMED.extend(claims)
    return True


def own_cores() -> str:
    """The cores that this process is bound to, as `0-3`; empty if it was not bound here."""
    return core_list(BOUND)


def claimed_cores() -> list[int]:
    """Cores of this machine that workers have claimed."""
    with suppress(OSError):
        names = [line.rpartition(f"@{CLAIM}")[2] for line in Path("/proc/net/unix").read_text().splitlines()]
        return sorted({int(name) for name in names if name.isdecimal()})
    return []


def core_list(cores: list[int]) -> str:
    """Numbers of cores as `taskset` takes them: `0-3,8`."""
    starts = [core for before, core in pairwise([-2, *cores]) if core != before + 1]
    ends = [core for core, after in pairwise([*cores, -2]) if after != core + 1]
    return ",".join(str(one) if one == last else f"{one}-{last}" for one, last in zip(starts, ends, strict=True))
