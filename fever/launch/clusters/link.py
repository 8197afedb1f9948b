"""The way to a cluster that is up: Ray's jobs, and the run directory brought home.

One ssh connection to the head carries both: a tunnel for the jobs, and `agent.py` for the files. `existing.py` has the
way to a Ray that is not fever's.

A job's run directory here is a copy of the one there: `sync` brings what is new, so whatever reads run directories
works while the job runs, afterwards, and when the cluster is gone.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Self

from filelock import FileLock

from fever import layout
from fever.errors import FeverError
from fever.job import EXIT
from fever.launch.clusters.ray_jobs import OVER, RayJobs
from fever.launch.clusters.ssh import Call, Unreachable
from fever.launch.clusters.ssh_up import Record, find_record
from fever.launch.targets import Existing, restore_target
from fever.runs.mirror import Mirror
from fever.system import exit_code

if TYPE_CHECKING:
    from fever.launch.jobs import Job

UNKNOWN = "UNKNOWN"  # the state of a job whose Ray does not answer
READY_SECONDS = 30.0  # for a connection to stand
SUBMIT_SECONDS = 600.0  # in which a job that Ray does not know may still be on its way to it
PULLED_LATER = ("replay/", "work/")  # what is large or in the making while a job runs


class Link:
    """A way to a cluster."""

    jobs: RayJobs
    name: str  # of the cluster
    id: str
    head: str
    runs: str  # the folder of run directories there
    python: str  # the interpreter there

    def __init__(self) -> None:
        self.mirrors: dict[tuple[Path, str], Mirror] = {}

    def prepare(self) -> None:
        """Find out what must be known before something is submitted."""

    def mirror(self, run: Path, there: str) -> Mirror:
        """The copy of a run directory."""
        if (run, there) not in self.mirrors:
            self.mirrors[run, there] = Mirror(run, there, *self.streams())
        return self.mirrors[run, there]

    def streams(self) -> tuple[BinaryIO, BinaryIO]:
        """Where requests about files go, and where the answers come from."""
        raise NotImplementedError

    def log_of(self, name: str) -> dict[str, str]:
        """Where the log of a job is, by its name in the run directory."""
        return {}

    def broken(self) -> str:
        """Why the way there broke."""
        return "its connection broke"

    def sync(self, job: Job, to: Path | None = None, whole: bool = True) -> int:
        """Bring home what is new of a job, or into another folder; returns how many bytes were moved.

        Waits if another process is just doing so. Unless the `whole` of it is wanted, replay buffers and simulators'
        own files come only after the job's end.
        """
        facts, over, folder = job.facts, job.code is not None, to or job.run
        (folder / layout.JOB).mkdir(parents=True, exist_ok=True)
        latest = folder / layout.JOB / ".mirror"  # by whom the folder was last changed
        with FileLock(latest):
            mirror = self.mirror(folder, facts["there"])
            if latest.read_text() != mirror.id:
                mirror.begun = False  # the other side is told anew what is here
                latest.write_text(mirror.id)
            before = mirror.moved
            try:
                mirror.pull(self.log_of(facts["id"]), skip=() if whole or over else PULLED_LATER)
            except (EOFError, OSError, ValueError):
                raise Unreachable(self.broken()) from None
            if to is None and over:  # it had ended before the files were looked at: this is all
                job.folder.write(EXIT, {**(job.folder.read(EXIT) or {}), "home": True})
        return mirror.moved - before

    def look(self, job: Job) -> str:
        """Ray's word for a job's state, and bring home what is new; files come also from a head whose Ray is dead."""
        try:
            status, _ = self.state(job)
        except Unreachable:
            status = UNKNOWN
        self.refresh(job)
        return status

    def refresh(self, job: Job) -> None:
        """What can be brought home at every look."""
        self.sync(job, whole=False)

    def push(self, run: Path, there: str) -> None:
        """Make a run directory's copy there what it is here."""
        try:
            self.mirror(run, there).push()
        except (EOFError, OSError, ValueError):
            raise Unreachable(self.broken()) from None

    def state(self, job: Job) -> tuple[str, int | None]:
        """Ray's word for a job's state, and its exit code if it has ended, which is then noted in the run directory."""
        facts = job.facts
        details = self.jobs.details(facts["id"])
        if details is None and not facts.get("sent", True) and time.time() - facts["submitted"] < SUBMIT_SECONDS:
            return "PENDING", None
        if details is None:
            return "LOST", note_end(job, 1)
        status = details["status"]
        if status not in OVER:
            return status, None
        code = details.get("driver_exit_code")
        return status, note_end(job, OVER[status] if code is None else exit_code(code))

    def close(self) -> None: ...

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def note_end(job: Job, code: int) -> int:
    """Write down that a job has ended, so that nobody has to be asked again."""
    if job.code is None:
        job.folder.write(EXIT, {"plan": "", "code": code, "reason": ""})
    return code


class Connection(Link):
    """To the head of a cluster of fever's, by ssh."""

    def __init__(self, record: Record, port: int = 0) -> None:
        """`port`: of this machine, for Ray's page; 0: any."""
        super().__init__()
        self.record = record
        self.name, self.id, self.head = record.name, record.id, record.head
        self.runs, self.python = record.runs, record.python
        self.call = Call(record.reach, {"action": "serve"}, record.python, record.dashboard, port)
        try:
            self.call.reply(READY_SECONDS)
        except BaseException:
            self.call.close()
            raise
        self.jobs = RayJobs(f"http://127.0.0.1:{self.call.port}", record.token)

    def streams(self) -> tuple[BinaryIO, BinaryIO]:
        return self.call.requests, self.call.answers

    def log_of(self, name: str) -> dict[str, str]:
        return {"job/log.txt": f"{self.record.logs}/job-driver-{name}.log"}

    def broken(self) -> str:
        return self.call.reason()

    def close(self) -> None:
        self.call.close()


def record_of(job: Job) -> Record | None:
    """The cluster of fever's that a job is on, if it is still up and has the same head."""
    facts = job.facts
    record = find_record(facts["cluster"])
    same = record is not None and (record.id, record.head) == (facts["cluster_id"], facts["head"])
    return record if same else None


def connect(job: Job) -> Link:
    """A way to the cluster that a job is on."""
    target = restore_target(job.facts["target"])
    if isinstance(target, Existing):
        from fever.launch.clusters.existing import JobsOnly

        return JobsOnly(target)
    if (record := record_of(job)) is None:
        raise Down(f"the cluster of {job.name} is down; what was fetched is in {job.run}")
    return Connection(record)


class Down(FeverError):
    """The cluster that a job was on is not up any more."""
