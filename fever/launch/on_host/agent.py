"""What fever does on a host that it reaches by ssh.

The source is sent along with every call (`clusters/ssh.py`), so nothing of fever has to be installed on the host. This
module, `environments.py`, `host.py` and `runs/mirror.py` use the standard library only: locks are fcntl's, not
filelock's.

    look      describe the host, and the node of this cluster that runs on it
    check     find out whether the environment that Ray and the training run in could be set up
    install   set it up, once for a set of versions
    start     start a node of Ray that outlives the connection, with a daemon that cleans up after it
    stop      end it, and report what is left
    serve     answer the requests of a mirror until the connection closes (`runs/mirror.py`)
    remains   report what stays when a cluster is down: environments, copies of runs
    purge     remove what nothing uses of that
"""

from __future__ import annotations

import json
import os
import platform
import select
import signal
import socket
import subprocess
import sys
import time
import traceback
import urllib.request
from contextlib import suppress
from pathlib import Path
from typing import Any

from fever import system
from fever.errors import FeverError
from fever.files import write_atomically
from fever.launch.on_host import environments, host
from fever.launch.on_host.host import free, require_space
from fever.runs import mirror
from fever.scratch import FALLBACK, PREFIX, Scratch, scratch_folder, sweep

LEAST_SCRATCH = 5e8  # bytes that a node of Ray needs
STOP_SECONDS = 15.0  # for a daemon to clean up
LOOK_SECONDS = 0.25  # over which the use of cores is measured


def main(request: dict[str, Any]) -> None:
    """Do what the request asks, with its variables `environ`, and print the reply; an error is a reply as well."""
    print(flush=True)  # a shell's start-up files may have printed a line without its end
    os.environ.update(request.get("environ", {}))
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


# the host


def look(request: dict[str, Any]) -> dict[str, Any]:
    """Describe the host: cores, Python, free disk space in bytes, and its node of this cluster."""
    python, node = environments.interpreter(request), find_node(request)
    scratch = scratch_folder(request["scratch"])
    used = node["interpreter"] if node else python
    return {
        "host": socket.gethostname(),
        "home": os.path.realpath(os.path.expanduser("~")),
        "cores": len(os.sched_getaffinity(0)),
        "busy": round(busy_cores(), 1) if request.get("measure") else None,
        "own_python": platform.python_version(),  # of which an environment would be made
        "python": python,
        "versions": environments.versions(used) if used else None,
        "environments": environments.list_environments() if request.get("list") else [],
        "free": {"home": free(environments.home()), "scratch": free(scratch)},
        "node": node,
    }


def busy_cores() -> float:
    """Cores that are in use on this host, by any process."""

    def ticks() -> float:
        fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]
        return sum(map(float, fields[:3])) + sum(map(float, fields[5:8]))

    before, began = ticks(), time.monotonic()
    time.sleep(LOOK_SECONDS)
    return (ticks() - before) / os.sysconf("SC_CLK_TCK") / (time.monotonic() - began)


# the node of Ray


def scratch_folders(request: dict[str, Any]) -> set[Path]:
    """Folders in which this host's nodes may have their temporary folders."""
    return {scratch_folder(request["scratch"]), FALLBACK}


def noted_nodes(request: dict[str, Any]) -> list[dict[str, Any]]:
    """The nodes of a cluster that have a temporary folder of this user's on this host, killed ones included."""
    found = []
    for path in (path for folder in scratch_folders(request) for path in folder.glob(f"{PREFIX}*/node.json")):
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
    require_space(scratch_folder(request["scratch"]), LEAST_SCRATCH)
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
        scratch: Scratch | None = None
        ray = None
        use = environments.Use(self.request["interpreter"])
        try:
            try:
                scratch = Scratch(self.request["scratch"])
                self._detach(scratch.path / "log.txt")
                self._note(scratch)
                ray = self._start_ray(scratch)
            except Exception as error:  # noqa: BLE001 - reported by the call that waits for the start
                self._answer({"error": str(error)})
                return 1
            self._answer(self._await_ray(scratch, ray))
            while not self.stopping and ray.poll() is None:
                use.touch()
                time.sleep(0.1)
        finally:
            if ray is not None:
                system.end(ray)
            system.end_orphans()
            if scratch is not None:
                scratch.remove()
            use.end()
        return 0

    def _detach(self, log: Path) -> None:
        """Replace the standard streams, so that the connection can close; output goes to a log."""
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        for descriptor, source in ((0, os.open(os.devnull, os.O_RDONLY)), (1, output), (2, output)):
            os.dup2(source, descriptor)

    def _note(self, scratch: Scratch, **more: Any) -> dict[str, Any]:
        """Write node.json, by which later calls find this node."""
        own = {"cluster": self.request["cluster"], "host": socket.gethostname(), "pid": os.getpid()}
        own |= {"interpreter": self.request["interpreter"]}
        node = {**own, "began": system.began(os.getpid()), "since": time.time(), "scratch": str(scratch.path), **more}
        write_atomically(scratch.path / "node.json", json.dumps(node), fsync=False)
        return node

    def _start_ray(self, scratch: Scratch) -> subprocess.Popen[bytes]:
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

    def _await_ray(self, scratch: Scratch, ray: subprocess.Popen[bytes]) -> dict[str, Any]:
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
        sweep(folder)
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


ACTIONS = {
    "look": look,
    "check": environments.check,
    "install": environments.install,
    "start": start,
    "stop": stop,
    "serve": serve,
    "remains": environments.remains,
    "purge": environments.purge,
}
