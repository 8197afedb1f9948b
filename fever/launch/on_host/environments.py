"""Python environments on a host: set up once for a set of versions, listed, and removed when nothing uses them.

    ~/.fever/environments/
      NAME-3.12-x86_64/        one for every set of packages, version of Python and kind of processor
        .ready                 it is complete; the text is its size in bytes
        .users/HOST-PID-BEGAN  a node of Ray on HOST runs in it; touched as long as it does
      NAME-3.12-x86_64.lock    held while it is set up or removed

Hosts may share the folder through their home folder. Standard library only, since it is sent over ssh.
"""

from __future__ import annotations

import fcntl
import json
import os
import platform
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from fever import system
from fever.errors import FeverError
from fever.launch.on_host.host import require_space

FACTS = """
import json, platform
from importlib.metadata import PackageNotFoundError, version
found = {"Python": platform.python_version()}
for package in ("ray", "jax"):
    try:
        found[package] = version(package)
    except PackageNotFoundError:
        found[package] = "none"
print(json.dumps(found))
"""
LEAST_HOME = 3e9  # bytes that an environment needs
PROBE_SECONDS = 10  # for a package registry to answer
PROBE_LIMIT = 45.0  # for all that pip tries in order to reach one
TOUCH_SECONDS = 60.0  # between two touches of the file of a node that uses an environment
SILENT_SECONDS = 600.0  # without a touch, after which a node on another host is taken to be gone
READY, USERS = ".ready", ".users"
ERRNO = re.compile(r"\[Errno -?\d+\] ([^'\")]+)")  # the reason in what pip prints of a connection
FAILED_CONNECTION = ("connection broken by", "Failed to establish a new connection", "Max retries exceeded")


def home() -> Path:
    """The folder of this user's files that outlive clusters."""
    return Path(os.path.expanduser("~/.fever"))


def environments() -> Path:
    return home() / "environments"


def interpreter(request: dict[str, Any]) -> str | None:
    """The Python that Ray is to run with; None if its environment has not been set up."""
    if request.get("python"):
        found = shutil.which(os.path.expanduser(request["python"]))
        if found is None:
            raise FeverError(f"{request['python']} was not found on it")
        return found
    python = environment(request) / "bin" / "python"
    ready = (environment(request) / READY).exists() and os.access(python, os.X_OK)
    return str(python) if ready else None


def environment(request: dict[str, Any]) -> Path:
    """The folder of an environment for this Python and processor; other kinds of machines may share the home folder."""
    kind = f"{sys.version_info.major}.{sys.version_info.minor}-{platform.machine()}"
    return environments() / f"{request['environment']}-{kind}"


def versions(python: str) -> dict[str, str]:
    """Versions of a Python and of its packages, without importing them."""
    try:
        done = subprocess.run([python, "-c", FACTS], capture_output=True, text=True)
    except OSError as error:
        raise FeverError(f"{python} does not run: {error.strerror}") from None
    if done.returncode:
        raise FeverError(f"{python} does not run: {last_line(done.stderr)}")
    return json.loads(done.stdout)


# setting up


def install(request: dict[str, Any]) -> dict[str, Any]:
    """Set up the environment, unless it exists; hosts that share a home folder do so once."""
    folder, began = environment(request), time.monotonic()
    folder.parent.mkdir(parents=True, exist_ok=True)
    threading.Thread(target=_end_with_connection, daemon=True).start()
    with _locked(folder):
        if not (folder / READY).exists():
            require_space(folder, LEAST_HOME)
            shutil.rmtree(folder, ignore_errors=True)
            try:
                _install(request, folder)
            except BaseException:
                shutil.rmtree(folder, ignore_errors=True)
                raise
    python = str(folder / "bin" / "python")
    return {"python": python, "versions": versions(python), "seconds": time.monotonic() - began}


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold the lock of an environment, which is removed together with the environment."""
    path = Path(f"{folder}.lock")
    lock = open(path, "w")  # noqa: SIM115 - closed below
    fcntl.flock(lock, fcntl.LOCK_EX)
    while not (path.exists() and os.path.samestat(os.fstat(lock.fileno()), path.stat())):  # it was removed meanwhile
        lock.close()
        lock = open(path, "w")  # noqa: SIM115
        fcntl.flock(lock, fcntl.LOCK_EX)
    with lock:
        yield


def _end_with_connection() -> None:
    """End this process and all that it started when the connection closes, since nobody waits for the result."""
    while os.read(0, 1 << 16):
        pass
    system.end_orphans()
    os._exit(1)


def _install(request: dict[str, Any], folder: Path) -> None:
    _make(folder)
    if problem := _registry_problem(request, folder):
        raise FeverError(problem)
    (folder / "constraints.txt").write_text(request["constraints"])
    words = [*_pip(folder), "install", "-c", str(folder / "constraints.txt"), *_sources(request)]
    words += request["requirements"]
    done = subprocess.run(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        raise FeverError(f"its environment cannot be set up: {_pip_reason(done.stdout)}")
    (folder / READY).write_text(str(size(folder)))


def _make(folder: Path) -> None:
    """An environment with pip and nothing else."""
    words = [sys.executable, "-m", "venv", str(folder)]
    done = subprocess.run(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode and "ensurepip" in done.stdout:
        raise FeverError(
            f"{sys.executable} cannot make environments, for want of its module ensurepip; on Debian and Ubuntu, "
            "install python3-venv"
        )
    if done.returncode:
        raise FeverError(f"its environment cannot be set up: {last_line(done.stdout)}")


def _pip(folder: Path, *options: str) -> list[str]:
    """The first words of the command line of an environment's pip."""
    words = [str(folder / "bin" / "python"), "-m", "pip", "--quiet", "--disable-pip-version-check", "--no-input"]
    return [*words, *options]


def _sources(request: dict[str, Any]) -> list[str]:
    """Options of pip that say where packages come from."""
    if not request["wheels"]:
        return []
    wheels = os.path.expanduser(request["wheels"])
    if not os.path.isdir(wheels):
        raise FeverError(f"wheels: {wheels} is not a folder on it")
    return ["--no-index", "--find-links", wheels]


def check(request: dict[str, Any]) -> dict[str, Any]:
    """Whether the environment could be set up: why not, or None. What that takes is made in a folder of its own, and
    removed."""
    if interpreter(request) is not None:
        return {"problem": None}
    with tempfile.TemporaryDirectory(prefix="fever-check-") as folder:
        try:
            _make(Path(folder) / "environment")
            return {"problem": _registry_problem(request, Path(folder) / "environment")}
        except FeverError as error:
            return {"problem": str(error)}


def _registry_problem(request: dict[str, Any], folder: Path) -> str | None:
    """Why pip, asked for the versions of Ray that it could install, knows none; None if it does."""
    limits = ["--retries", "1", "--timeout", str(PROBE_SECONDS)]
    words = [*_pip(folder, *limits), "index", "versions", *_sources(request), "ray"]
    try:
        done = subprocess.run(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=PROBE_LIMIT)
    except subprocess.TimeoutExpired:
        return _no_registry(f"no answer within {PROBE_LIMIT:.0f} s")
    if not done.returncode:
        return None
    if request["wheels"]:
        return f"wheels: {request['wheels']} on it has no ray that fits Python {platform.python_version()}"
    if any(sign in done.stdout for sign in FAILED_CONNECTION):
        return _no_registry(_connection_reason(done.stdout))
    return f"its package registry has no ray: {_pip_reason(done.stdout)}"


def _no_registry(reason: str) -> str:
    return (
        f"no package registry answers it ({reason}); set `wheels:` to a folder of wheels on it, or `python:` to an "
        "interpreter that has fever's dependencies"
    )


def _connection_reason(printed: str) -> str:
    found = ERRNO.search(printed)
    return found[1] if found else "timeout" if "timed out" in printed else "the connection failed"


def _pip_reason(printed: str) -> str:
    """The line of pip's output that says best why it failed; the first errors are named by what follows from them."""
    if any(sign in printed for sign in FAILED_CONNECTION):
        return _no_registry(_connection_reason(printed))
    errors = [line for line in printed.splitlines() if "ERROR" in line]
    missing = [line for line in errors if "No matching distribution" in line]
    return [*missing, *errors, last_line(printed)][0].strip()


def last_line(text: str) -> str:
    return (text.strip().splitlines() or ["it printed nothing"])[-1]


# use


class Use:
    """Notes that a node of Ray runs in an environment, for hosts that share its folder; of another Python, nothing."""

    def __init__(self, python: str) -> None:
        folder = Path(python).parent.parent
        self.folder = folder if folder.parent == environments() else None
        pid = os.getpid()
        self.file = folder / USERS / f"{socket.gethostname()}-{pid}-{system.began(pid)}"
        self.touched = 0.0
        self.touch()

    def touch(self) -> None:
        """To be called again and again while the node runs."""
        if self.folder is not None and time.monotonic() - self.touched > TOUCH_SECONDS:
            self.touched = time.monotonic()
            with suppress(OSError):  # a full disk, or a file server that does not answer, ends no node
                self.file.parent.mkdir(exist_ok=True)
                self.file.touch()

    def end(self) -> None:
        if self.folder is not None:
            with suppress(OSError):
                self.file.unlink(missing_ok=True)
                (self.folder / READY).touch()


def _users(folder: Path) -> list[str]:
    """The hosts on which a node of Ray runs in an environment."""
    found = set()
    for file in (folder / USERS).glob("*-*-*"):
        host, pid, began = file.name.rsplit("-", 2)
        with suppress(OSError, ValueError):
            here = host == socket.gethostname()
            young = time.time() - file.stat().st_mtime < SILENT_SECONDS
            if system.alive(int(pid), began) if here else young:
                found.add(host)
    return sorted(found)


def _last_use(folder: Path) -> float:
    """Seconds since the epoch."""
    files = [folder / READY, *(folder / USERS).glob("*")]
    return max((file.stat().st_mtime for file in files if file.exists()), default=0.0)


def list_environments() -> list[dict[str, Any]]:
    """The environments of this user on this host, with their size, the days since their last use, and who uses them."""
    rows = []
    for folder in sorted(environments().glob("*-*")):
        if (ready := folder / READY).is_file():
            text = ready.read_text()
            days = max(time.time() - _last_use(folder), 0.0) / 86400
            row = {"name": folder.name, "bytes": int(text) if text.isdecimal() else size(folder)}
            rows.append({**row, "days": days, "users": _users(folder)})
    return rows


def size(folder: Path) -> int:
    """Bytes of all files below a folder, without following links."""
    total, folders = 0, [str(folder)]
    while folders:
        with suppress(OSError), os.scandir(folders.pop()) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    folders.append(entry.path)
                else:
                    total += entry.stat(follow_symlinks=False).st_size
    return total


# what stays when a cluster is down


def _copies(request: dict[str, Any]) -> list[Path]:
    """The folders of a cluster's jobs, each with the directory of a run: RUNS/CLUSTER-NUMBER-HASH."""
    if not request.get("runs"):
        return []
    named = re.compile(rf"{re.escape(request['name'])}-\d+-[0-9a-f]+")
    found = Path(os.path.expanduser(request["runs"])).glob(f"{request['name']}-*")
    return [path for path in found if named.fullmatch(path.name) and path.is_dir() and not path.is_symlink()]


def remains(request: dict[str, Any]) -> dict[str, Any]:
    """What `fever down` leaves on this host: environments, and copies of the cluster's runs."""
    copies = _copies(request)
    runs = {"count": len(copies), "bytes": sum(size(path) for path in copies)}
    return {"environments": list_environments(), "runs": runs}


def purge(request: dict[str, Any]) -> dict[str, Any]:
    """Remove the environments and the folders of jobs that are named; returns what was removed, and what was not.

    An environment that a node of Ray uses is kept, as is all that is not fever's own.
    """
    removed, kept = [], []
    for row in list_environments():
        if row["name"].partition("-")[0] in request["environments"] or row["days"] > request["days"]:
            folder = environments() / row["name"]
            with _locked(folder):
                users = _users(folder)
                if not users:
                    shutil.rmtree(folder, ignore_errors=True)
                    Path(f"{folder}.lock").unlink(missing_ok=True)
            if folder.exists():
                kept.append(f"environment {row['name']}" + (f", used by {', '.join(users)}" if users else ""))
            else:
                removed.append({"what": f"environment {row['name']}", "bytes": row["bytes"]})
    for path in _copies(request):
        if path.name in request["jobs"]:
            removed.append({"what": f"{path}", "bytes": size(path)})
            shutil.rmtree(path, ignore_errors=True)
            if path.exists():
                kept.append(f"{path}")
                removed.pop()
    return {"removed": removed, "kept": kept}
