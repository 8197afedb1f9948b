"""What fever does on a host that it reaches by ssh.

The source is sent along with every call (`clusters/ssh.py`), so nothing of fever has to be installed on the host. This
module, `host.py` and `runs/mirror.py` use the standard library only: locks are fcntl's, not filelock's.

    look      describe the host, and the node of this cluster that runs on it
    install   set up the environment that Ray and the training run in, once for a set of versions
    start     start a node of Ray that outlives the connection, with a daemon that cleans up after it
    stop      end it, and report what is left
    serve     answer the requests of a mirror until the connection closes (`runs/mirror.py`)
"""

from __future__ import annotations

import fcntl
import json
import os
import platform
import select
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
import urllib.request
from contextlib import suppress
from pathlib import Path
from typing import Any

from fever import system
from fever.errors import FeverError
from fever.files import write_atomically
from fever.launch.on_host import host
from fever.runs import mirror

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
LEAST_HOME, LEAST_SCRATCH = 3e9, 5e8  # bytes that an environment and a node of Ray need
STOP_SECONDS = 15.0  # for a daemon to clean up
LOOK_SECONDS = 0.25  # over which the use of cores is measured


def main(request: dict[str, Any]) -> None:
    """Do what the request asks and print the reply; an error is a reply as well."""
    print(flush=True)  # a shell's start-up files may have printed a line without its end
    try:
        reply = ACTIONS[request["action"]](request)
    except FeverError as error:
        reply = {"error": str(error)}
    except OSError as error:
        reply = {"error": f"{error.filename}: {error.strerror}" if error.filename else str(error)}
    except Exception:  # noqa: BLE001 - printed where the call was made
        reply = {"error": traceback.format_exc()}
    say(reply)


def say(reply: dict[str, Any]) -> None:
    """Print a reply, marked: shells' start-up files may print lines, too."""
    sys.stdout.write(mirror.REPLY + json.dumps(reply) + "\n")
    sys.stdout.flush()


# the host and its Python environment


def home() -> Path:
    """The folder of this user's files that outlive clusters."""
    return Path(os.path.expanduser("~/.fever"))


def look(request: dict[str, Any]) -> dict[str, Any]:
    """Describe the host: cores, Python, free disk space in bytes, and its node of this cluster."""
    python = interpreter(request)
    scratch = host.scratch_folder(request["scratch"])
    return {
        "host": socket.gethostname(),
        "home": os.path.realpath(os.path.expanduser("~")),
        "cores": len(os.sched_getaffinity(0)),
        "busy": round(busy_cores(), 1) if request.get("measure") else None,
        "python": python,
        "versions": versions(python) if python else None,
        "free": {"home": free(home()), "scratch": free(scratch)},
        "node": find_node(request),
    }


def interpreter(request: dict[str, Any]) -> str | None:
    """The Python that Ray is to run with; None if its environment has not been set up."""
    if request.get("python"):
        found = shutil.which(os.path.expanduser(request["python"]))
        if found is None:
            raise FeverError(f"{request['python']} was not found on it")
        return found
    python = environment(request) / "bin" / "python"
    ready = (environment(request) / ".ready").exists() and os.access(python, os.X_OK)
    return str(python) if ready else None


def environment(request: dict[str, Any]) -> Path:
    """The folder of an environment for this Python and processor; other kinds of machines may share the home folder."""
    kind = f"{sys.version_info.major}.{sys.version_info.minor}-{platform.machine()}"
    return home() / "environments" / f"{request['environment']}-{kind}"


def versions(python: str) -> dict[str, str]:
    """Versions of a Python and of its packages, without importing them."""
    try:
        done = subprocess.run([python, "-c", FACTS], capture_output=True, text=True)
    except OSError as error:
        raise FeverError(f"{python} does not run: {error.strerror}") from None
    if done.returncode:
        raise FeverError(f"{python} does not run: {last_line(done.stderr)}")
    return json.loads(done.stdout)


def free(folder: Path) -> float:
    """Free bytes on the disk of a folder, which need not exist yet."""
    return shutil.disk_usage(next(path for path in (folder, *folder.parents) if path.exists())).free


def require_space(folder: Path, least: float) -> None:
    if (space := free(folder)) < least:
        raise FeverError(f"its disk is full: {folder} has {space / 1e9:.1f} GB, {least / 1e9:.1f} GB are needed")


def busy_cores() -> float:
    """Cores that are in use on this host, by any process."""

    def ticks() -> float:
        fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]
        return sum(map(float, fields[:3])) + sum(map(float, fields[5:8]))

    before, began = ticks(), time.monotonic()
    time.sleep(LOOK_SECONDS)
    return (ticks() - before) / os.sysconf("SC_CLK_TCK") / (time.monotonic() - began)


def install(request: dict[str, Any]) -> dict[str, Any]:
    """Set up the environment, unless it exists; hosts that share a home folder do so once."""
    folder, began = environment(request), time.monotonic()
    folder.parent.mkdir(parents=True, exist_ok=True)
    threading.Thread(target=_end_with_connection, daemon=True).start()
    with open(f"{folder}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / ".ready").exists():
            require_space(folder, LEAST_HOME)
            shutil.rmtree(folder, ignore_errors=True)
            try:
                _install(request, folder)
            except BaseException:
                shutil.rmtree(folder, ignore_errors=True)
                raise
    python = str(folder / "bin" / "python")
    return {"python": python, "versions": versions(python), "seconds": time.monotonic() - began}


def _end_with_connection() -> None:
    """End this process and all that it started when the connection closes, since nobody waits for the result."""
    while os.read(0, 1 << 16):
        pass
    system.end_orphans()
    os._exit(1)


def _install(request: dict[str, Any], folder: Path) -> None:
    _run([sys.executable, "-m", "venv", str(folder)])
    (folder / "constraints.txt").write_text(request["constraints"])
    words = [str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    words += ["--no-input", "-c", str(folder / "constraints.txt")]
    if request["wheels"]:
        wheels = os.path.expanduser(request["wheels"])
        if not os.path.isdir(wheels):
            raise FeverError(f"wheels: {wheels} is not a folder on it")
        words += ["--no-index", "--find-links", wheels]
    _run([*words, *request["requirements"]])
    (folder / ".ready").touch()


def _run(words: list[str]) -> None:
    done = subprocess.run(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        lines = [line for line in done.stdout.splitlines() if "ERROR" in line] or [last_line(done.stdout)]
        raise FeverError(f"its environment cannot be set up: {lines[0].strip()}")


def last_line(text: str) -> str:
    return (text.strip().splitlines() or ["it printed nothing"])[-1]


# the node of Ray


def scratch_folders(request: dict[str, Any]) -> set[Path]:
    """Folders in which this host's nodes may have their temporary folders."""
    return {host.scratch_folder(request["scratch"]), host.FALLBACK}


def noted_nodes(request: dict[str, Any]) -> list[dict[str, Any]]:
    """The nodes of a cluster that have a temporary folder of this user's on this host, killed ones included."""
    found = []
    for path in (path for folder in scratch_folders(request) for path in folder.glob(f"{host.PREFIX}*/node.json")):
        with suppress(OSError, ValueError):
            if {path.stat().st_uid, path.parent.stat().st_uid} != {os.getuid()}:
                continue  # of another user, perhaps made to look like ours
            node = json.loads(path.read_text())
            if (node["cluster"], node["host"]) == (request["cluster"], socket.gethostname()):
                found.append(node)
    return found


def find_nodes(request: dict[str, Any]) -> list[dict[str, Any]]:
    """The nodes whose daemon runs: starting, up or ending. There is at most one, unless something went wrong."""
    return [node for node in noted_nodes(request) if system.alive(node["pid"], node["began"])]


def find_node(request: dict[str, Any]) -> dict[str, Any] | None:
    """The node of a cluster that is up on this host."""
    return next((node for node in find_nodes(request) if node.get("address")), None)


def start(request: dict[str, Any]) -> dict[str, Any]:
    """Start this host's node, unless it runs; returns its description once it has joined the cluster."""
    if (node := find_node(request)) is not None and (not request["head"] or node["address"] == request["head"]):
        return node
    stop(request)  # a node of another head, or one that never came up
    require_space(host.scratch_folder(request["scratch"]), LEAST_SCRATCH)
    reader, writer = os.pipe()
    if os.fork() == 0:
        os.close(reader)
        code = 1
        try:
            os.setsid()
            code = HostDaemon(request, writer).run()
        finally:
            os._exit(code)
    os.close(writer)
    ready = select.select([reader, 0], [], [], request["seconds"])[0]
    if reader not in ready:  # the daemon ends, too, when it cannot write its answer
        stop(request)
        raise FeverError("interrupted" if ready else f"Ray did not start within {request['seconds']:.0f} s")
    with open(reader) as lines:
        reply = json.loads(lines.read() or '{"error": "Ray did not start"}')
    if "error" in reply:
        raise FeverError(reply["error"])
    return reply


class HostDaemon:
    """The process that stays on a host: starts Ray, waits for its end or for a signal, and cleans up."""

    def __init__(self, request: dict[str, Any], writer: int) -> None:
        self.request, self.writer = request, writer
        self.stopping = False
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)

    def _on_signal(self, number: int, frame: Any) -> None:
        self.stopping = True

    def run(self) -> int:
        system.adopt_orphans()
        scratch: host.Scratch | None = None
        ray = None
        try:
            try:
                scratch = host.Scratch(self.request["scratch"])
                self._detach(scratch.path / "log.txt")
                self._note(scratch)
                ray = self._start_ray(scratch)
            except Exception as error:  # noqa: BLE001 - reported by the call that waits for the start
                self._answer({"error": str(error)})
                return 1
            self._answer(self._await_ray(scratch, ray))
            while not self.stopping and ray.poll() is None:
                time.sleep(0.1)
        finally:
            if ray is not None:
                system.end(ray)
            system.end_orphans()
            if scratch is not None:
                scratch.remove()
        return 0

    def _detach(self, log: Path) -> None:
        """Replace the standard streams, so that the connection can close; output goes to a log."""
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        for descriptor, source in ((0, os.open(os.devnull, os.O_RDONLY)), (1, output), (2, output)):
            os.dup2(source, descriptor)

    def _note(self, scratch: host.Scratch, **more: Any) -> dict[str, Any]:
        """Write node.json, by which later calls find this node."""
        own = {"cluster": self.request["cluster"], "host": socket.gethostname(), "pid": os.getpid()}
        own |= {"interpreter": self.request["interpreter"]}
        node = {**own, "began": system.began(os.getpid()), "since": time.time(), "scratch": str(scratch.path), **more}
        write_atomically(scratch.path / "node.json", json.dumps(node), fsync=False)
        return node

    def _start_ray(self, scratch: host.Scratch) -> subprocess.Popen[bytes]:
        request = self.request
        host.raise_limits()
        token = scratch.path / "token"
        with open(os.open(token, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(request["token"])
        head = request["head"]
        self.address = host.own_address(request["interface"], head.rpartition(":")[0] if head else None)
        self.dashboard = 0 if head else host.free_port()
        cores = request["cores"] or len(os.sched_getaffinity(0))
        self.cores = cores
        command = host.ray_command(request["interpreter"], scratch.ray, self.address, cores, head, self.dashboard)
        gone = (*request["unset"], "SSH_CLIENT", "SSH_CONNECTION", "SSH_TTY", "RAY_ADDRESS", "RAY_AUTH_TOKEN")
        environ = {name: value for name, value in os.environ.items() if name not in gone}
        environ |= {**request["variables"], "RAY_AUTH_TOKEN_PATH": str(token)}
        return system.start(command, environ, stdin=subprocess.DEVNULL, cwd=os.path.expanduser("~"))

    def _await_ray(self, scratch: host.Scratch, ray: subprocess.Popen[bytes]) -> dict[str, Any]:
        """Wait until Ray has started; returns the node's description, or an error."""
        while not self.stopping and ray.poll() is None:
            cluster = host.cluster_of(scratch.ray)
            if cluster is not None and (not self.dashboard or self._dashboard_answers()):
                return self._note(scratch, address=cluster, dashboard=self.dashboard, cores=self.cores)
            time.sleep(0.05)
        printed = (scratch.path / "log.txt").read_text(errors="replace").strip().splitlines()[-3:]
        self.stopping = True
        return {"error": f"Ray did not start: {' | '.join(printed)}"}

    def _dashboard_answers(self) -> bool:
        url = f"http://127.0.0.1:{self.dashboard}/api/version"
        header = {"Authorization": f"Bearer {self.request['token']}"}
        direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # a proxy must not see the token
        try:
            with direct.open(urllib.request.Request(url, headers=header), timeout=2) as answer:
                return answer.status == 200
        except OSError:
            return False

    def _answer(self, reply: dict[str, Any]) -> None:
        """Report to the process that waits for the start; if that is gone, this node is not wanted."""
        try:
            os.write(self.writer, json.dumps(reply).encode())
            os.close(self.writer)
        except OSError:
            self.stopping = True


def stop(request: dict[str, Any]) -> dict[str, Any]:
    """End this host's node, and remove the folders of killed ones; returns what is left."""
    left = [thing for node in find_nodes(request) for thing in _stop(node)]
    for folder in scratch_folders(request):
        host.sweep(folder)
    left += [node["scratch"] for node in noted_nodes(request)]
    return {"left": sorted(set(left))}


def _stop(node: dict[str, Any]) -> list[str]:
    family = {node["pid"]: node["began"], **system.descendants(node["pid"])}
    with suppress(ProcessLookupError):
        os.kill(node["pid"], signal.SIGTERM)
    deadline = time.monotonic() + STOP_SECONDS
    while time.monotonic() < deadline and any(system.alive(*process) for process in family.items()):
        time.sleep(0.05)
    left = [f"process {pid}" for pid, began in family.items() if system.alive(pid, began)]
    return left + [node["scratch"]] * os.path.exists(node["scratch"])


def serve(request: dict[str, Any]) -> dict[str, Any]:
    """Report that the connection is ready, then answer the requests of a mirror until it closes."""
    say({"ready": True})
    mirror.serve(sys.stdin.buffer, sys.stdout.buffer)
    return {}


ACTIONS = {"look": look, "install": install, "start": start, "stop": stop, "serve": serve}
