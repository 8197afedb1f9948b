"""The connection to a login node: the files of run directories, and questions to the fever that runs there."""

from __future__ import annotations

import hashlib
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from fever import layout
from fever.errors import FeverError
from fever.job import ENDED, EXIT, QUEUED, SCRIPT, TRANSIENT
from fever.launch.clusters.link import SUBMIT_SECONDS, Link
from fever.launch.clusters.package import Package
from fever.launch.clusters.ssh import Call, Unreachable
from fever.launch.jobs import PATIENCE_SECONDS
from fever.launch.on_host.login import ARCHIVE
from fever.runs.mirror import LOCAL, RemoteFolderGone, read_line, write_line

if TYPE_CHECKING:
    from fever.launch.jobs import Job
    from fever.launch.login.target import LoginSite

READY_SECONDS = 120.0  # for start-up files and modules there
ASK_SECONDS = 180.0  # for the fever there to answer: a busy scheduler, a slow file system
STOP_SECONDS = PATIENCE_SECONDS + ASK_SECONDS
TEMPORARY = tuple(f"{layout.JOB}/{name}" for name in TRANSIENT)  # of a job that runs, Ray's token among them


class LoginLink(Link):
    """A connection to a login node. Once a job's code is there, `enter` starts the fever in it."""

    kept_there = TEMPORARY

    def __init__(self, target: LoginSite, python: str | None = None) -> None:
        """`python`: the interpreter there of a job that was submitted; None: the one that the settings describe now."""
        super().__init__()
        node = target.login
        self.name, self.head = target.name, node.host
        self.entered: str | None = None  # the folder of the job whose code answers
        own = target.own_python is not None
        request = {"action": "login", "own": own, "python": python, "environment": node.environment.name}
        request["environ"] = target.scheduler.env  # not in the command, which others see
        self.call = Call(node.ssh_command, {**request, "runs": node.runs}, None, remote_command=target.remote_command)
        try:
            self.facts = self.call.reply(READY_SECONDS)
        except Unreachable as error:
            self.call.close()
            raise Unreachable(f"{self.head}: {error}") from None
        except BaseException:
            self.call.close()
            raise
        home, runs = self.facts["home"], node.runs
        self.runs = runs if runs.startswith("/") else f"{home}/{runs.removeprefix('~').lstrip('/')}".rstrip("/")

    def streams(self) -> tuple[BinaryIO, BinaryIO]:
        return self.call.requests, self.call.answers

    def broken(self) -> str:
        return f"{self.head}: {self.call.reason()}"

    def close(self) -> None:
        self.call.close()

    # questions

    def ask(self, request: dict[str, Any], seconds: float = ASK_SECONDS) -> dict[str, Any]:
        """The answer to a request; raises FeverError with its error, Unreachable if there is none in time."""
        timer = threading.Timer(seconds, self.call.process.terminate)
        timer.daemon = True
        timer.start()
        try:
            write_line(self.call.requests, request)
            self.call.requests.flush()
            reply = read_line(self.call.answers)
        except (EOFError, OSError, ValueError):
            raise Unreachable(self.broken()) from None
        finally:
            timer.cancel()
        if "error" in reply:
            raise FeverError(f"{self.head}: {reply['error']}")
        return reply

    def send_code(self, folder: str, package: Package) -> None:
        """Put the code into a job's folder."""
        content = package.content
        header = {"do": "push", "folder": folder, "name": ARCHIVE, "size": len(content)}
        try:
            write_line(self.call.requests, {**header, "hash": hashlib.sha256(content).hexdigest(), "mode": 0o600})
            self.call.requests.write(content)
            self.call.requests.flush()
            read_line(self.call.answers)
        except (EOFError, OSError, ValueError):
            raise Unreachable(self.broken()) from None
        self.ask({"do": "unpack", "folder": folder})

    def enter(self, folder: str) -> bool:
        """Start the fever in a job's folder; False if that has no code (any more)."""
        if self.entered is None and self.ask({"do": "enter", "folder": folder})["entered"]:
            self.entered = folder
        return self.entered == folder

    def send_run(self, run: Path, remote_path: str) -> None:
        """Bring a run directory there up to date, without what belongs to this machine or to an earlier job."""
        skip = (*LOCAL, *TEMPORARY, f"{layout.JOB}/{SCRIPT}")
        try:
            self.mirror(run, remote_path).push(skip)
        except (EOFError, OSError, ValueError):
            raise Unreachable(self.broken()) from None

    # a job

    def observe(self, job: Job, fresh: bool = False) -> tuple[str, str]:
        """QUEUED, RUNNING or ENDED, and a short reason, from the scheduler there, which is asked now and then or, if
        `fresh`, at once. A job's end is noted in its run directory here."""
        facts = job.facts
        reply: dict[str, Any] = {"state": ENDED, "reason": f"{self.head} no longer knows it", "code": None, "id": ""}
        if self.entered is not None:
            reply = self.ask({"do": "state", "folder": facts["remote_path"], "fresh": fresh})
        waited = time.time() - facts["submitted"]
        if not reply["id"] and not facts.get("sent", True) and waited < SUBMIT_SECONDS:
            return QUEUED, "being submitted"
        if reply["id"] and reply["id"] != facts["id"]:  # it was requeued, or the answer to its submission was lost
            job.folder.note(id=reply["id"], sent=True)
        if reply["state"] == ENDED and job.folder.read(EXIT) is None:
            job.folder.write(EXIT, {"plan": "", "code": reply["code"], "reason": reply["reason"]})
        return reply["state"], reply["reason"]

    def state(self, job: Job) -> tuple[str, int | None]:
        state, _ = self.observe(job, fresh=True)
        return state, job.code

    def sync(self, job: Job, to: Path | None = None, whole: bool = True) -> int:
        """As for clusters; once all of an ended job is here, only its run directory stays there."""
        try:
            moved = super().sync(job, to, whole)
        except RemoteFolderGone:
            if to is not None or (ending := job.folder.read(EXIT)) is None:
                raise
            job.folder.write(EXIT, {**ending, "home": True})  # nothing more can be fetched
            return 0
        if to is None and job.home and self.entered is not None:
            self.ask({"do": "tidy", "folder": self.entered})
            self.entered = None
        return moved
