"""Calls of `agent.py` on other hosts, by the system's own `ssh`: its configuration, agents and jump hosts count.

The agent's source and the request go through standard input, so a token is in no command line, and nothing has to be
installed on the host but Python.
"""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from importlib.resources import files as resources
from typing import Any, BinaryIO, ClassVar

from fever.errors import FeverError
from fever.launch.on_host.agent import MARK
from fever.launch.on_host.host import free_port

SETTINGS = ("BatchMode=yes", "ConnectTimeout=10", "ServerAliveInterval=10", "RemoteCommand=none", "ControlPath=none")
ANSWER_SECONDS = 60.0  # for a host to answer, besides what it waits for
OPTIONS = ("-T", *(word for setting in SETTINGS for word in ("-o", setting)))
LOADER = (  # has neither quotes of the other kind nor anything that some shell would take for its own
    'import sys;sys.version_info>=(3,11) or sys.exit("fever-python "+sys.version.split()[0]);'
    "b=sys.stdin.buffer;exec(b.read(int(b.readline())))"
)
AGENT = "fever.launch.on_host.agent"
PACKAGES = ("fever", "fever.launch", "fever.launch.on_host", "fever.runs")
MODULES = (
    "fever.errors",
    "fever.files",
    "fever.layout",
    "fever.system",
    "fever.launch.on_host.host",
    "fever.runs.mirror",
    AGENT,
)
REASONS = {  # what ssh says -> what it means
    r"Could not resolve hostname": "there is no host of this name",
    r"IDENTIFICATION HAS CHANGED": "its host key has changed since you last connected; if it was set up anew, forget "
    "the old one with: ssh-keygen -R {host}",
    r"Host key verification failed": "its host key is not known here; connect once by hand: ssh {host}",
    r"Permission denied": "it refused the key; try by hand: ssh {host}",
    r"Connection refused": "nothing listens on its ssh port",
    r"timed out|No route to host|Network is unreachable": "it does not answer",
    r"fever-no-python": "it has no python3; set `python:` to an interpreter there",
    r"fever-python ([\w.+]+)": "its Python is {0}; fever needs 3.11 or newer; set `python:` to another interpreter",
}


class Unreachable(FeverError):
    """A host that could not be reached, or whose connection broke."""


def program() -> bytes:
    """The agent as one text: the modules that it needs, made where it runs."""
    lines = ["import json, sys, types"]
    for name in (*PACKAGES, *MODULES):
        package = name in PACKAGES
        folder, _, module = name.rpartition(".")
        source = "" if package else (resources(folder) / f"{module}.py").read_text()
        lines += [f"m = sys.modules[{name!r}] = types.ModuleType({name!r})"]
        lines += ["m.__path__ = []"] if package else [f"exec(compile({source!r}, {name!r}, 'exec'), m.__dict__)"]
        lines += [f"setattr(sys.modules[{folder!r}], {module!r}, m)"] if folder else []
    lines += [
        "b = sys.stdin.buffer",
        "sys.modules['fever.launch.on_host.agent'].main(json.loads(b.read(int(b.readline()))))",
    ]
    return "\n".join(lines).encode()


def shell_word(path: str) -> str:
    """A path as a shell is told it, `~` being the home there."""
    return f'"$HOME"/{shlex.quote(path[2:])}' if path[:2] == "~/" else shlex.quote(path)


def command(python: str | None) -> str:
    """What the host's shell is told to run: the Python that is named, or the first that is found."""
    candidates = [python] if python else [f"python3.{sys.version_info.minor}", "python3"]
    tries = " ".join(shell_word(name) for name in candidates)
    loop = f'for p in {tries}; do command -v "$p" > /dev/null 2>&1 && exec "$p" -c \'{LOADER}\'; done'
    return f"exec sh -c {shlex.quote(f'{loop}; echo fever-no-python >&2; exit 1')}"


class Call:
    """One running agent."""

    running: ClassVar[set[Call]] = set()

    def __init__(
        self, reach: list[str], request: dict[str, Any], python: str | None, forward: int = 0, port: int = 0
    ) -> None:
        """`reach`: the words of ssh that run a command there; `forward`: a port of the host's loopback device that
        `port` of this one, or any that is free, leads to."""
        self.host = reach[-1].rpartition("@")[2]
        self.port = port or (free_port() if forward else 0)
        words = [*OPTIONS]
        if forward:
            words += ["-o", "ExitOnForwardFailure=yes", "-L", f"127.0.0.1:{self.port}:127.0.0.1:{forward}"]
        self.errors = tempfile.TemporaryFile()  # noqa: SIM115 - read when the call has ended
        try:
            self.process = subprocess.Popen(
                [reach[0], *words, *reach[1:], command(python)], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                stderr=self.errors, start_new_session=True,  # Ctrl-C is for us
            )  # fmt: skip
        except FileNotFoundError:
            raise FeverError("there is no ssh here; install OpenSSH's client") from None
        Call.running.add(self)
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.requests: BinaryIO = self.process.stdin  # type: ignore[assignment]
        self.answers: BinaryIO = self.process.stdout  # type: ignore[assignment]
        threading.Thread(target=self._send, args=(program(), json.dumps(request).encode()), daemon=True).start()

    def _send(self, *parts: bytes) -> None:
        with suppress(OSError):  # the host's own words say why
            for part in parts:
                self.requests.write(b"%d\n%s" % (len(part), part))
            self.requests.flush()

    def reply(self, seconds: float | None = None) -> dict[str, Any]:
        """What the agent answers; what is wrong there, or with the way there, is raised as one sentence."""
        late = threading.Event()

        def give_up() -> None:
            late.set()
            self.process.terminate()

        timer = threading.Timer(seconds or 0.0, give_up)
        timer.daemon = True
        if seconds is not None:
            timer.start()
        try:
            for line in iter(self.answers.readline, b""):
                if line.startswith(MARK.encode()):
                    reply = json.loads(line[len(MARK) :])
                    if "error" in reply:
                        raise FeverError(reply["error"])
                    return reply
        finally:
            timer.cancel()
        raise Unreachable(f"it does not answer within {seconds:.0f} s" if late.is_set() else self.reason())

    def reason(self) -> str:
        """Why there is no answer, in words."""
        try:
            self.process.wait(5)
        except subprocess.TimeoutExpired:  # it is not ssh that ended
            self.process.terminate()
            self.process.wait()
        self.errors.seek(0)
        said = self.errors.read().decode(errors="replace")
        for pattern, sentence in REASONS.items():
            if found := re.search(pattern, said):
                return sentence.format(*found.groups(), host=self.host)
        lines = [line for line in said.strip().splitlines() if not line.startswith("Warning:")]
        return lines[-1] if lines else "its connection broke"

    def close(self) -> None:
        Call.running.discard(self)
        self.process.terminate()
        self.process.wait()
        for stream in (self.requests, self.answers, self.errors):
            with suppress(OSError):  # what could not be sent any more
                stream.close()

    def __enter__(self) -> Call:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def ask(reach: list[str], request: dict[str, Any], python: str | None = None) -> dict[str, Any]:
    """One request and its reply; only setting up an environment may take its time."""
    limit = None if request["action"] == "install" else ANSWER_SECONDS + request.get("seconds", 0.0)
    with Call(reach, request, python) as call:
        return call.reply(limit)


def at_once(work: dict[str, Any]) -> dict[str, Any]:
    """Call functions for several hosts at the same time; gives every host's result, or the FeverError it raised."""

    def one(function: Any) -> Any:
        try:
            return function()
        except FeverError as error:
            return error

    with ThreadPoolExecutor(max_workers=max(len(work), 1)) as pool:
        futures = {host: pool.submit(one, function) for host, function in work.items()}
        try:
            return {host: future.result() for host, future in futures.items()}
        except BaseException:  # Ctrl-C: nobody waits for the hosts any more
            for call in list(Call.running):
                call.process.terminate()
            raise
