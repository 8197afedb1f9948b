"""What fever does on a host that it reaches by ssh. The source is sent along with every call (`launch/ssh.py`), so it
uses nothing but the standard library, `host.py` and `files.py`, and nothing of fever has to be installed there.

    look      what the host is like, and whether a node of this cluster runs on it
    install   make the environment that Ray and the training run in, once for a set of versions
    start     start a node of Ray that outlives the connection, with a keeper that cleans up after it
    stop      end it, and say what is left
    serve     answer about files until the connection closes (`files.py`)
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
from fever.files import write_whole
from fever.launch.on_host import host
from fever.runs import mirror as files

MARK = files.REPLY  # before a reply: shells' start-up files may print lines too
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
STOP_SECONDS = 15.0  # for a keeper to clean up
LOOK_SECONDS = 0.25  # over which cores in use are counted


def main(request: dict[str, Any]) -> None:
    """Do what is asked and print the reply; a mistake is a reply too."""
    print(flush=True)  # a shell's start-up files may have left a line without its end
    try:
        reply = ACTIONS[request["action"]](request)
    except FeverError as error:
        reply = {"error": str(error)}
    except OSError as error:
        reply = {"error": f"{error.filename}: {error.strerror}" if error.filename else str(error)}
    except Exception:  # noqa: BLE001 - whatever it is, the other side prints it
        reply = {"error": traceback.format_exc()}
    say(reply)


def say(reply: dict[str, Any]) -> None:
    sys.stdout.write(MARK + json.dumps(reply) + "\n")
    sys.stdout.flush()


# the host and its environment


def home() -> Path:
    """The folder of this user's that outlives clusters."""
    return Path(os.path.expanduser("~/.fever"))


def look(request: dict[str, Any]) -> dict[str, Any]:
    """What the host is like."""
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
    """The Python that Ray is to run with; None if its environment is not there yet."""
    if request.get("python"):
        found = shutil.which(os.path.expanduser(request["python"]))
        if found is None:
            raise FeverError(f"there is no {request['python']}")
        return found
    python = environment(request) / "bin" / "python"
    ready = (environment(request) / ".ready").exists() and os.access(python, os.X_OK)
    return str(python) if ready else None


def environment(request: dict[str, Any]) -> Path:
    """The folder of an environment, for this Python on this kind of machine: others may share the home."""
    kind = f"{sys.version_info.major}.{sys.version_info.minor}-{platform.machine()}"
    return home() / "environments" / f"{request['environment']}-{kind}"


def versions(python: str) -> dict[str, str]:
    """What a Python has, without importing any of it."""
    try:
        done = subprocess.run([python, "-c", FACTS], capture_output=True, text=True)
    except OSError as error:
        raise FeverError(f"{python} does not run: {error.strerror}") from None
    if done.returncode:
        raise FeverError(f"{python} does not run: {last_line(done.stderr)}")
    return json.loads(done.stdout)


def free(folder: Path) -> float:
    """Bytes free on the disk of a folder, which need not exist yet."""
    return shutil.disk_usage(next(path for path in (folder, *folder.parents) if path.exists())).free


def require_room(folder: Path, least: float) -> None:
    if (room := free(folder)) < least:
        raise FeverError(f"its disk is full: {folder} has {room / 1e9:.1f} GB, {least / 1e9:.1f} GB are needed")


def busy_cores() -> float:
    """Cores that are in use here, by whatever runs."""

    def ticks() -> float:
        fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]
        return sum(map(float, fields[:3])) + sum(map(float, fields[5:8]))

    before, began = ticks(), time.monotonic()
    time.sleep(LOOK_SECONDS)
    return (ticks() - before) / os.sysconf("SC_CLK_TCK") / (time.monotonic() - began)


def install(request: dict[str, Any]) -> dict[str, Any]:
    """Make the environment, unless it is there; hosts that share a home make it once."""
    folder, began = environment(request), time.monotonic()
    folder.parent.mkdir(parents=True, exist_ok=True)
    threading.Thread(target=_end_with_connection, daemon=True).start()
    with open(f"{folder}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / ".ready").exists():
            require_room(folder, LEAST_HOME)
            shutil.rmtree(folder, ignore_errors=True)
            try:
                _install(request, folder)
            except BaseException:
                shutil.rmtree(folder, ignore_errors=True)
                raise
    python = str(folder / "bin" / "python")
    return {"python": python, "versions": versions(python), "seconds": time.monotonic() - began}


def _end_with_connection() -> None:
    """Nobody waits for this any more when the connection closes: end, with all that was started."""
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
            raise FeverError(f"there is no folder of wheels {wheels}")
        words += ["--no-index", "--find-links", wheels]
    _run([*words, *request["requirements"]])
    (folder / ".ready").touch()


def _run(words: list[str]) -> None:
    done = subprocess.run(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        lines = [line for line in done.stdout.splitlines() if "ERROR" in line] or [last_line(done.stdout)]
        raise FeverError(f"its environment cannot be made: {lines[0].strip()}")


def last_line(text: str) -> str:
    return (text.strip().splitlines() or ["it says nothing"])[-1]


# the node of Ray


def scratch_folders(request: dict[str, Any]) -> set[Path]:
    """Where temporary folders of this host's nodes may be."""
    return {host.scratch_folder(request["scratch"]), host.FALLBACK}


def noted_nodes(request: dict[str, Any]) -> list[dict[str, Any]]:
    """The nodes of a cluster that this user has on this host, those that were killed included."""
    found = []
    for path in (path for folder in scratch_folders(request) for path in folder.glob(f"{host.PREFIX}*/node.json")):
        with suppress(OSError, ValueError):
            if {path.stat().st_uid, path.parent.stat().st_uid} != {os.getuid()}:
                continue  # somebody else's, made to look like ours perhaps
            node = json.loads(path.read_text())
            if (node["cluster"], node["host"]) == (request["cluster"], socket.gethostname()):
                found.append(node)
    return found


def find_nodes(request: dict[str, Any]) -> list[dict[str, Any]]:
    """Those of them that run, or are just starting or ending; there is one at most, unless something went wrong."""
    return [node for node in noted_nodes(request) if system.alive(node["pid"], node["began"])]


def find_node(request: dict[str, Any]) -> dict[str, Any] | None:
    """The node of a cluster that is up on this host."""
    return next((node for node in find_nodes(request) if node.get("address")), None)


def start(request: dict[str, Any]) -> dict[str, Any]:
    """Start this host's node and wait until it has joined; returns what it is. Does nothing if it runs."""
    if (node := find_node(request)) is not None and (not request["head"] or node["address"] == request["head"]):
        return node
    stop(request)  # of another head, or one that never came up
    require_room(host.scratch_folder(request["scratch"]), LEAST_SCRATCH)
    reader, writer = os.pipe()
    if os.fork() == 0:
        os.close(reader)
        code = 1
        try:
            os.setsid()
            code = Keeper(request, writer).run()
        finally:
            os._exit(code)
    os.close(writer)
    ready = select.select([reader, 0], [], [], request["seconds"])[0]
    if reader not in ready:  # the keeper notices that nobody reads what it answers, and ends too
        stop(request)
        raise FeverError("interrupted" if ready else f"Ray did not start within {request['seconds']:.0f} s")
    with open(reader) as lines:
        reply = json.loads(lines.read() or '{"error": "Ray did not start"}')
    if "error" in reply:
        raise FeverError(reply["error"])
    return reply


class Keeper:
    """The process that stays: starts Ray, waits for its end or for being told to stop, and leaves nothing behind."""

    def __init__(self, request: dict[str, Any], writer: int) -> None:
        self.request, self.writer = request, writer
        self.told = False
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._tell)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)

    def _tell(self, number: int, frame: Any) -> None:
        self.told = True

    def run(self) -> int:
        system.adopt_orphans()
        scratch: host.Scratch | None = None
        ray = None
        try:
            try:
                scratch = host.Scratch(self.request["scratch"])
                self._let_go(scratch.path / "log.txt")
                self._note(scratch)
                ray = self._start_ray(scratch)
            except Exception as error:  # noqa: BLE001 - whatever it is, those who wait for the start want to know
                self._answer({"error": str(error)})
                return 1
            self._answer(self._await_ray(scratch, ray))
            while not self.told and ray.poll() is None:
                time.sleep(0.1)
        finally:
            if ray is not None:
                system.end(ray)
            system.end_orphans()
            if scratch is not None:
                scratch.remove()
        return 0

    def _let_go(self, log: Path) -> None:
        """Nothing of the connection is held, so that it can close; what Ray prints is kept."""
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        for descriptor, source in ((0, os.open(os.devnull, os.O_RDONLY)), (1, output), (2, output)):
            os.dup2(source, descriptor)

    def _note(self, scratch: host.Scratch, **more: Any) -> dict[str, Any]:
        """Write down what runs here, for later calls to find."""
        own = {"cluster": self.request["cluster"], "host": socket.gethostname(), "pid": os.getpid()}
        own |= {"interpreter": self.request["interpreter"]}
        node = {**own, "began": system.began(os.getpid()), "since": time.time(), "scratch": str(scratch.path), **more}
        write_whole(scratch.path / "node.json", json.dumps(node))
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
        """What is told to those who wait for the start."""
        while not self.told and ray.poll() is None:
            cluster = host.cluster_of(scratch.ray)
            if cluster is not None and (not self.dashboard or self._page_answers()):
                return self._note(scratch, address=cluster, dashboard=self.dashboard, cores=self.cores)
            time.sleep(0.05)
        said = (scratch.path / "log.txt").read_text(errors="replace").strip().splitlines()[-3:]
        self.told = True
        return {"error": f"Ray did not start: {' | '.join(said)}"}

    def _page_answers(self) -> bool:
        url = f"http://127.0.0.1:{self.dashboard}/api/version"
        header = {"Authorization": f"Bearer {self.request['token']}"}
        direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # a proxy is not to see the token
        try:
            with direct.open(urllib.request.Request(url, headers=header), timeout=2) as answer:
                return answer.status == 200
        except OSError:
            return False

    def _answer(self, reply: dict[str, Any]) -> None:
        """Tell the process that waits for this; if it is gone, nobody wants this node."""
        try:
            os.write(self.writer, json.dumps(reply).encode())
            os.close(self.writer)
        except OSError:
            self.told = True


def stop(request: dict[str, Any]) -> dict[str, Any]:
    """End this host's node, and remove the folder of one that was killed; returns what is left."""
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
    """Answer about files until the other side closes; what is said first is that the connection stands."""
    say({"ready": True})
    files.serve(sys.stdin.buffer, sys.stdout.buffer)
    return {}


ACTIONS = {"look": look, "install": install, "start": start, "stop": stop, "serve": serve}
