"""Jobs on a cluster that is up: submitted, asked about, stopped, and brought home before the cluster goes."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from shlex import join

from fever.config import RunConfig
from fever.errors import FeverError
from fever.job import AUTOSCALED, ENDED, JOB, QUEUED, RUNNING
from fever.launch.clusters.link import Connection, Down, Link, connect, note_end
from fever.launch.clusters.package import Package
from fever.launch.clusters.ray_jobs import OVER
from fever.launch.clusters.ssh import Unreachable, shell_word
from fever.launch.clusters.ssh_up import Record
from fever.launch.jobs import (
    PATIENCE_SECONDS,
    SILENT,
    Job,
    claim_name,
    forget,
    list_jobs,
    prepare,
    remember,
    undo_for,
)
from fever.launch.targets import Aws, Existing, Machines, Ssh

STOP_SECONDS = 60  # for a run to save, before Ray kills it


def submit(config: RunConfig, target: Machines, link: Link, run: Path, flags: list[str], package: Package) -> Job:
    """Send a run directory and the code to a cluster, and have Ray train there.

    What cannot be submitted leaves everything here as it was; what may have been is kept and found again.
    """
    with ExitStack() as undo:
        job = Job(claim_name(link.name), run.resolve())
        undo.callback(forget, job)
        number = f"{job.name}-{secrets.token_hex(4)}"  # Ray may have others' jobs, and those of an earlier cluster
        was = job.facts
        same = was.get("cluster_id") == link.id and was.get("head") == link.head
        there = was["there"] if same else f"{link.runs}/{number}/{run.name}"
        undo.callback(undo_for(run))
        folder = prepare(config, target, run, flags, number, str(Path(there).parent))
        folder.note(cluster=link.name, cluster_id=link.id, head=link.head, there=there, sent=False)
        folder.clear()
        if folder.log.exists():  # of the job that trained this run before
            old = folder.path / f"log-{len(list(folder.path.glob('log-*.txt'))) + 1}.txt"
            folder.log.rename(old)
            undo.callback(old.rename, folder.log)
        words = ["resume", there] if folder.saved else ["train", "-f", f"{there}/job/run.yaml"]
        variables = {JOB: f"{there}/job", "RAY_JOB_STOP_WAIT_TIME_S": str(STOP_SECONDS), "PYTHONWARNINGS": "ignore"}
        if isinstance(target, Aws):
            variables[AUTOSCALED] = str(target.workers.count)
        if isinstance(target, Existing):  # where Ray itself was not started with them
            variables = {**target.env, **variables}
        link.push(job.run, there)
        link.jobs.upload(package)
        command = f"exec {shell_word(link.python)} {join(['-m', 'fever', *words, *flags])}"
        remember(job.name, run)
        try:
            link.jobs.submit(number, command, {"working_dir": package.uri, "env_vars": variables})
        except BaseException:
            if not _is_unknown(link, number):  # who knows
                undo.pop_all()
            raise
        undo.pop_all()
    folder.note(sent=True)
    return job


def _is_unknown(link: Link, number: str) -> bool:
    """Whether Ray surely does not have a job whose submission failed; one that it has is told to stop."""
    try:
        if link.jobs.details(number) is None:
            return True
        link.jobs.stop(number)
    except FeverError:
        return False
    return True


def state(job: Job) -> tuple[str, str]:
    """QUEUED, RUNNING or ENDED, and a word about it."""
    if job.code is not None:
        return job.ended()
    try:
        with connect(job) as link:
            status, code = link.state(job)
    except Down:
        return ENDED, "its cluster is down"
    except FeverError as error:
        return RUNNING, f"{SILENT}: {error}"
    if code is not None:
        return job.ended()
    return (QUEUED, "starting") if status == "PENDING" else (RUNNING, "")


def stop(job: Job) -> str:
    """Ray tells the run to save and stop, and kills it if it takes too long; what it saved comes home."""
    with connect(job) as link:
        link.jobs.stop(job.facts["id"])
        if _wait_for_end(link, job) is None:
            raise FeverError(f"{job.name} does not stop; its log: fever logs {job.name}")
    return job.stopped()


def _wait_for_end(link: Link, job: Job) -> int | None:
    """A job's exit code, or None if it does not end in time; otherwise all of it has come home."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while time.monotonic() < deadline:
        if link.state(job)[1] is not None:
            link.sync(job)
            return job.code
        time.sleep(0.3)
    return None


def jobs_of(record: Record) -> list[Job]:
    """The jobs of a cluster that is up."""
    return [job for job in list_jobs() if job.facts.get("cluster_id") == record.id]


def not_home(record: Record) -> list[Job]:
    """The jobs of a cluster of which something may be only there."""
    return [job for job in jobs_of(record) if not job.home]


def bring_home(record: Record, say: Callable[[str], None], force: bool = False) -> None:
    """Let a cluster's jobs save and stop, and fetch what is not here yet; raises if that cannot be done.

    With `force` only says what is lost.
    """
    waiting = not_home(record)
    gone = [job for job in list_jobs(gone=True) if job.name.startswith(f"{record.name}-")]
    lost: dict[str, FeverError] = {}
    if not waiting and not gone:
        return
    try:
        with Connection(record) as link:
            lost |= _out_of_sight(link, record, gone) if gone else {}
            for job in waiting:
                try:
                    _bring_home(link, job, say)
                except FeverError as error:
                    lost[job.name] = error
    except FeverError as error:
        lost = dict.fromkeys((job.name for job in waiting), error)
    if not lost:
        return
    names, reason = ", ".join(lost), next(iter(lost.values()))
    if not force:
        raise FeverError(f"{record.head} may have the only copy of {names} ({reason}); --force gives it up") from None
    for job in waiting:
        if job.name in lost:
            note_end(job, 1)
    say(f"given up: {names} ({reason})")


def _out_of_sight(link: Link, record: Record, gone: list[Job]) -> dict[str, FeverError]:
    """Those of the jobs whose run directory here is `gone` that would be lost with the cluster."""
    states: dict[str, str] = {}
    with suppress(FeverError):  # a Ray that does not answer has nothing that runs
        states = {name.rpartition("-")[0]: state for name, state in link.jobs.states().items()}
    harmless = (None, *OVER) if isinstance(record.target, Ssh) else (None,)  # ssh hosts keep what has ended
    lost = [job for job in gone if states.get(job.name) not in harmless]
    return {job.name: FeverError(f"its run directory is not at {job.run} any more") for job in lost}


def _bring_home(link: Link, job: Job, say: Callable[[str], None]) -> None:
    try:
        if link.state(job)[1] is None:
            say(f"{job.name}: is told to save and stop")
            link.jobs.stop(job.facts["id"])
        if _wait_for_end(link, job) is None:
            raise FeverError(f"{job.name} does not stop")
    except Unreachable:  # Ray is dead on the head, but its files may be there
        link.sync(job)  # raises if it is the way there that broke: the job may run still
        note_end(job, 1)
        link.sync(job)
    say(f"{job.name}: fetched and verified, {job.run}")
