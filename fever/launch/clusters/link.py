"""The connection to a cluster that is up: Ray's jobs, and copies of run directories.

One ssh connection to the head carries both: a port forwarding for the Jobs API, and `on_host/agent.py` for the files.
`existing.py` has the connection to a Ray that fever did not start.

A job's run directory on this machine is a copy of the one on the cluster. `sync` brings it up to date, so everything
that reads run directories works while the job runs, after its end, and when the cluster is gone.
"""

from __future__ import annotations

import shutil
import time
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Self, cast

from filelock import FileLock

from fever import layout
from fever.errors import FeverError
from fever.job import EXIT, LOG
from fever.launch.clusters.ray_jobs import OVER, RayJobs
from fever.launch.clusters.record import ClusterRecord, find_record
from fever.launch.clusters.ssh import Call, Unreachable
from fever.launch.targets import restore_target
from fever.runs.mirror import Mirror
from fever.system import exit_code

if TYPE_CHECKING:
    from fever.launch.clusters.base import ClusterTarget
    from fever.launch.jobs import Job

UNKNOWN = "UNKNOWN"  # the state of a job whose Ray does not answer
READY_SECONDS = 30.0  # within which a connection must be ready
SUBMIT_SECONDS = 600.0  # within which a job that Ray does not know may still be on its way to it
PULLED_LATER = (f"{layout.REPLAY}/", f"{layout.WORK}/")  # large, or unfinished while a job runs


class Link:
    """A connection to a cluster."""

    jobs: RayJobs
    name: str  # of the cluster
    id: str
    head: str
    runs: str  # the folder of run directories on the cluster
    python: str  # the interpreter on the cluster
    kept_there: tuple[str, ...] = ()  # prefixes of the names of files that are never copied

    def __init__(self) -> None:
        self.mirrors: dict[tuple[Path, str], Mirror] = {}

    def prepare(self) -> None:
        """Find out what must be known before a job is submitted."""

    def mirror(self, run: Path, remote_path: str) -> Mirror:
        """The mirror of a run directory, made once per connection."""
        if (run, remote_path) not in self.mirrors:
            self.mirrors[run, remote_path] = Mirror(run, remote_path, *self.streams())
        return self.mirrors[run, remote_path]

    def streams(self) -> tuple[BinaryIO, BinaryIO]:
        """The streams for a mirror's requests and their answers."""
        raise NotImplementedError

    def log_of(self, name: str) -> dict[str, str]:
        """The path of a job's log on the cluster, by its name in the run directory; empty if it is not a file there."""
        return {}

    def broken(self) -> str:
        """Why the connection broke."""
        return "its connection broke"

    def sync(self, job: Job, to: Path | None = None, whole: bool = True) -> int:
        """Copy what is new of a job into its run directory here, or into another folder; returns the bytes moved.

        Waits while another process does so. Replay buffers and the environments' own files are copied only after the
        job's end, unless `whole`.
        """
        facts, over, folder = job.facts, job.folder.read(EXIT) is not None, to or job.run
        (folder / layout.JOB).mkdir(parents=True, exist_ok=True)
        latest = folder / layout.JOB / ".mirror"  # the id of the mirror that last changed the folder
        with FileLock(latest):
            mirror = self.mirror(folder, facts["remote_path"])
            if latest.read_text() != mirror.id:
                mirror.announced = False  # the server is told again what is here
                latest.write_text(mirror.id)
            before = mirror.moved
            try:
                later = () if whole or over else PULLED_LATER
                mirror.pull(self.log_of(facts["id"]), skip=(*self.kept_there, *later))
            except (EOFError, OSError, ValueError):
                raise Unreachable(self.broken()) from None
            if to is not None and (signed := job.folder.path / layout.SIGNATURE).is_file():
                shutil.copy(signed, to / layout.JOB)
            if to is None and over:  # it had ended before the files were copied, so this is all of it
                job.folder.write(EXIT, {**(job.folder.read(EXIT) or {}), "home": True})
        return mirror.moved - before

    def look(self, job: Job) -> str:
        """Ray's status of a job, after copying what is new; files are copied even if the head's Ray is dead."""
        try:
            status, _ = self.state(job)
        except Unreachable:
            status = UNKNOWN
        self.refresh(job)
        return status

    def refresh(self, job: Job) -> None:
        """Copy what is cheap enough to copy at every look."""
        self.sync(job, whole=False)

    def push(self, run: Path, remote_path: str) -> None:
        """Bring a run directory on the cluster up to date with the one here."""
        try:
            self.mirror(run, remote_path).push()
        except (EOFError, OSError, ValueError):
            raise Unreachable(self.broken()) from None

    def state(self, job: Job) -> tuple[str, int | None]:
        """Ray's status of a job, and its exit code if it has ended, which is noted in the run directory."""
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
    """Note a job's end in its run directory, so that the cluster need not be asked again."""
    if job.code is None:
        job.folder.write(EXIT, {"plan": "", "code": code, "reason": ""})
    return code


class SshLink(Link):
    """To the head of a cluster that fever has brought up."""

    def __init__(self, record: ClusterRecord, port: int = 0) -> None:
        """`port`: of this machine, for Ray's dashboard; 0: any."""
        super().__init__()
        self.record = record
        self.name, self.id, self.head = record.name, record.id, record.head
        self.runs, self.python = record.runs, record.python
        self.call = Call(record.ssh_command, {"action": "serve"}, record.python, record.dashboard, port)
        try:
            self.call.reply(READY_SECONDS)
        except BaseException:
            self.call.close()
            raise
        self.jobs = RayJobs(f"http://127.0.0.1:{self.call.port}", record.token)

    def streams(self) -> tuple[BinaryIO, BinaryIO]:
        return self.call.requests, self.call.answers

    def log_of(self, name: str) -> dict[str, str]:
        return {f"{layout.JOB}/{LOG}": f"{self.record.logs}/job-driver-{name}.log"}

    def broken(self) -> str:
        return self.call.reason()

    def close(self) -> None:
        self.call.close()


def record_of(job: Job) -> ClusterRecord | None:
    """The cluster that a job was submitted to, if it is still up and has the same head."""
    facts = job.facts
    record = find_record(facts["cluster"])
    same = record is not None and (record.id, record.head) == (facts["cluster_id"], facts["head"])
    return record if same else None


def connect(job: Job) -> Link:
    """A connection to the cluster that a job was submitted to; raises ClusterDown if that is no longer up."""
    target = cast("ClusterTarget", restore_target(job.facts["target"]))
    return target.connect(job)


class ClusterDown(FeverError):
    """The cluster that a job was submitted to is no longer up."""
