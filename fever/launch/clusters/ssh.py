"""Runs `on_host/agent.py` on other hosts through the system's `ssh`, with its configuration, agents and jump hosts.

The agent's source and the request are sent through standard input. So no token is in a command line, and the host needs
nothing but Python.
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
from fever.launch.on_host.host import free_port
from fever.runs.mirror import REPLY

SETTINGS = ("BatchMode=yes", "ConnectTimeout=10", "ServerAliveInterval=10", "RemoteCommand=none")
ALONE = ("-o", "ControlPath=none")  # a connection of its own, even if the user's configuration shares connections
ANSWER_SECONDS = 60.0  # for a host to answer, in addition to the time that the request itself may take
OPTIONS = ("-T", *(word for setting in SETTINGS for word in ("-o", setting)))
LOADER = (  # has no single quotes, and nothing that a shell would expand between them
    'import sys;sys.version_info>=(3,11) or sys.exit("fever-python "+sys.version.split()[0]);'
    "b=sys.stdin.buffer;exec(b.read(int(b.readline())))"
)
AGENT = "fever.launch.on_host.agent"
PACKAGES = ("fever", "fever.launch", "fever.launch.on_host", "fever.runs")
MODULES = (
    "fever.errors",
    "fever.files",
    "fever.layout",
    "fever.scratch",
    "fever.system",
    "fever.launch.on_host.host",
    "fever.launch.on_host.environments",
    "fever.runs.mirror",
    AGENT,
    "fever.launch.on_host.login",
)
REASONS = {  # a pattern in what ssh prints -> what it means
    r"Could not resolve hostname": "there is no host of this name",
    r"IDENTIFICATION HAS CHANGED": "its host key has changed since you last connected; if it was reinstalled, forget "
    "the old one with: ssh-keygen -R {host}",
    r"Host key verification failed": "its host key is not known here; connect once by hand: ssh {host}",
    r"Permission denied": "it refused the key; try by hand: ssh {host}",
    r"Connection refused": "nothing listens on its ssh port",
    r"timed out|No route to host|Network is unreachable": "it does not answer",
    r"fever-no-python": "it has no python3; set `python:` to an interpreter on it",
    r"fever-python ([\w.+]+)": "its Python is {0}; fever needs 3.11 or newer; set `python:` to another interpreter",
}


class Unreachable(FeverError):
    """A host that could not be reached, or whose connection broke."""


def program() -> bytes:
    """The agent as one Python program, which creates the modules that it needs."""
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
        f"sys.modules[{AGENT!r}].main(json.loads(b.read(int(b.readline()))))",
    ]
    return "\n".join(lines).encode()


def shell_word(path: str) -> str:
    """A path quoted for the host's shell; `~` is the home folder on the host."""
    return f'"$HOME"/{shlex.quote(path[2:])}' if path[:2] == "~/" else shlex.quote(path)


def command(python: str | None) -> str:
    """The command for the host's shell: the given Python, or the first one that is found, running the loader."""
    return f"exec sh -c {shlex.quote(load(python))}"


def load(python: str | None) -> str:
    """The same for a POSIX shell."""
    candidates = [python] if python else [f"python3.{sys.version_info.minor}", "python3"]
    tries = " ".join(shell_word(name) for name in candidates)
    loop = f'for p in {tries}; do command -v "$p" > /dev/null 2>&1 && exec "$p" -c \'{LOADER}\'; done'
    return f"{loop}; echo fever-no-python >&2; exit 1"


class Call:
    """A running agent on a host."""

    running: ClassVar[set[Call]] = set()  # ended on Ctrl-C

    def __init__(
        self,
        ssh_command: list[str],
        request: dict[str, Any],
        python: str | None,
        forward: int = 0,
        port: int = 0,
        remote_command: str | None = None,
    ) -> None:
        """`ssh_command`: the words of ssh that run a command on the host; `forward`: a port of the host's loopback
        device, to which `port` of this machine, or any free one, is forwarded; 0: none. `remote_command`: for the
        host's shell, instead of `command`; the connection may then be one that the user's ssh shares, with its second
        factor."""
        self.host = ssh_command[-1].rpartition("@")[2]
        self.port = port or (free_port() if forward else 0)
        words = [*OPTIONS, *(ALONE if remote_command is None else ())]
        if forward:
            words += ["-o", "ExitOnForwardFailure=yes", "-L", f"127.0.0.1:{self.port}:127.0.0.1:{forward}"]
        self.errors = tempfile.TemporaryFile()  # noqa: SIM115 - read when the call has ended
        try:
            self.process = subprocess.Popen(
                [ssh_command[0], *words, *ssh_command[1:], remote_command or command(python)],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.errors,
                start_new_session=True,  # Ctrl-C is for this process
            )  # fmt: skip
        except FileNotFoundError:
            raise FeverError("ssh was not found on this machine; install OpenSSH's client") from None
        Call.running.add(self)
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.requests: BinaryIO = self.process.stdin  # type: ignore[assignment]
        self.answers: BinaryIO = self.process.stdout  # type: ignore[assignment]
        threading.Thread(target=self._send, args=(program(), json.dumps(request).encode()), daemon=True).start()

    def _send(self, *parts: bytes) -> None:
        with suppress(OSError):  # `reason` says why
            for part in parts:
                self.requests.write(b"%d\n%s" % (len(part), part))
            self.requests.flush()

    def reply(self, seconds: float | None = None) -> dict[str, Any]:
        """The agent's reply; raises FeverError with its error, Unreachable if there is none within so many seconds."""
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
                if line.startswith(REPLY.encode()):
                    reply = json.loads(line[len(REPLY) :])
                    if "error" in reply:
                        raise FeverError(reply["error"])
                    return reply
        finally:
            timer.cancel()
        raise Unreachable(f"it does not answer within {seconds:.0f} s" if late.is_set() else self.reason())

    def reason(self) -> str:
        """Why there is no reply, as a sentence."""
        try:
            self.process.wait(5)
        except subprocess.TimeoutExpired:  # the agent has ended, ssh has not
            self.process.terminate()
            self.process.wait()
        self.errors.seek(0)
        printed = self.errors.read().decode(errors="replace")
        for pattern, sentence in REASONS.items():
            if found := re.search(pattern, printed):
                return sentence.format(*found.groups(), host=self.host)
        lines = [line for line in printed.strip().splitlines() if not line.startswith("Warning:")]
        return lines[-1] if lines else "its connection broke"

    def close(self) -> None:
        Call.running.discard(self)
        self.process.terminate()
        self.process.wait()
        for stream in (self.requests, self.answers, self.errors):
            with suppress(OSError):  # what could not be sent
                stream.close()

    def __enter__(self) -> Call:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def ask(
    ssh_command: list[str], request: dict[str, Any], python: str | None = None, remote_command: str | None = None
) -> dict[str, Any]:
    """Run an agent for one request and return its reply; only the setup of an environment has no time limit."""
    limit = None if request["action"] == "install" else ANSWER_SECONDS + request.get("seconds", 0.0)
    with Call(ssh_command, request, python, remote_command=remote_command) as call:
        return call.reply(limit)


def at_once(work: dict[str, Any]) -> dict[str, Any]:
    """Call the functions of several hosts in parallel; a host's result may be the FeverError that it raised."""

    def one(function: Any) -> Any:
        try:
            return function()
        except FeverError as error:
            return error

    with ThreadPoolExecutor(max_workers=max(len(work), 1)) as pool:
        futures = {host: pool.submit(one, function) for host, function in work.items()}
        try:
            return {host: future.result() for host, future in futures.items()}
        except BaseException:  # Ctrl-C: the replies are not needed
            for call in list(Call.running):
                call.process.terminate()
            raise
