"""This host as part of a job or a cluster: addresses, cores, versions, and Ray's command line.

Uses the standard library only, since it is sent to hosts over ssh; so locks are fcntl's and not filelock's.
"""

from __future__ import annotations

import fcntl
import os
import platform
import resource
import shutil
import socket
import struct
import time
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from fever.errors import FeverError

OPEN_FILES = 65536  # that a node of Ray with many workers may need


def describe_host() -> dict[str, Any]:
    """What the other ranks need to know of this host."""
    return {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "cpus": sorted(os.sched_getaffinity(0)),
        "allowed_cpus": allowed_cpus(),
        "versions": {"Python": platform.python_version(), "ray": _version("ray"), "fever": _version("fever")},
        "clock": time.time(),
    }


def allowed_cpus() -> list[int]:
    """The cores that this job may use here; a launcher may have bound this rank to fewer."""
    bound = os.sched_getaffinity(0)
    with suppress(OSError):
        os.sched_setaffinity(0, range(os.cpu_count() or 1))  # the kernel leaves out what is not the job's
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, bound)
    return sorted(allowed)


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "none"


# addresses


def interfaces() -> dict[str, str]:
    """The IPv4 address of every network interface that has one."""
    found = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            with suppress(OSError):
                answer = fcntl.ioctl(probe.fileno(), 0x8915, request)  # SIOCGIFADDR
                found[name] = socket.inet_ntoa(answer[20:24])
    return found


def own_address(interface: str | None, towards: str | None = None) -> str:
    """The address that Ray is to use here: the interface's, the one that faces the head, or the host name's."""
    known = interfaces()
    if interface is not None:
        if interface not in known:
            raise FeverError(f"{socket.gethostname()} has no network interface {interface}; it has {', '.join(known)}")
        return known[interface]
    if towards is not None:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((towards, 9))  # sends nothing, but finds the route
            return probe.getsockname()[0]
    outside = [address for address in known.values() if not address.startswith("127.")]
    named: list[str] = []
    with suppress(OSError):
        named = [str(entry[4][0]) for entry in socket.getaddrinfo(socket.gethostname(), None, socket.AF_INET)]
    return next((address for address in named if address in outside), (outside or ["127.0.0.1"])[0])


# limits and folders


def raise_limits() -> str | None:
    """Raise the limit of open files as far as this user may; returns a warning if it remains low."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return f"ulimit -n allows only {wanted} open files; Ray wants 4096" if wanted < 4096 else None


def free(folder: Path) -> float:
    """Free bytes on the disk of a folder, which need not exist yet."""
    return shutil.disk_usage(next(path for path in (folder, *folder.parents) if path.exists())).free


def require_space(folder: Path, least: float) -> None:
    if (space := free(folder)) < least:
        raise FeverError(f"its disk is full: {folder} has {space / 1e9:.1f} GB, {least / 1e9:.1f} GB are needed")


def shared_memory() -> int | None:
    """Bytes for Ray's object store if /dev/shm is so small that Ray would use the disk; None: Ray's default."""
    with suppress(OSError):
        free = shutil.disk_usage("/dev/shm").free
        if 200e6 < free < 0.35 * os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"):
            return int(0.9 * free)
    return None


def free_port() -> int:
    """A free port of the loopback device."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


# Ray

# `ray start` without the server of Ray Client, which no option turns off. It takes a Python process, and a fixed port
# that the heads of two clusters on one machine would both use.
RAY_START = (
    "from ray.scripts import scripts; scripts.get_ray_client_dependency_error = lambda: ImportError(); scripts.main()"
)


def ray_command(python: str, folder: Path, address: str, cores: int, head: str | None, dashboard: int = 0) -> list[str]:
    """The command line of one node of Ray, which runs in the foreground in this folder and on ports of its own.

    `head`: the address of the cluster to join; None: this is its head, with a dashboard on this port of the loopback
    device, 0: none.
    """
    words = [python, "-c", RAY_START, "start", "--block", "--disable-usage-stats", "--include-log-monitor=false"]
    words += [f"--temp-dir={folder}", f"--node-ip-address={address}", f"--num-cpus={cores}"]
    words += ["--dashboard-agent-listen-port=0"]  # the only port that is not chosen automatically
    words += [f"--object-store-memory={room}"] if (room := shared_memory()) else []
    if head is not None:
        return [*words, f"--address={head}"]
    page = ["--include-dashboard=true", "--dashboard-host=127.0.0.1", f"--dashboard-port={dashboard}"]
    return [*words, "--head", "--port=0", "--no-monitor", *(page if dashboard else ["--include-dashboard=false"])]


def cluster_of(folder: Path) -> str | None:
    """The address of the cluster that the node of Ray in this folder belongs to; None while it starts."""
    try:
        return (folder / "ray_current_cluster").read_text().strip() or None
    except OSError:
        return None
