"""Jobs on a cluster that is up: submitted, asked for their state, stopped, and fetched before the cluster goes down."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from shlex import join
from typing import TYPE_CHECKING

from fever import layout
from fever.config import RunConfig
from fever.errors import FeverError
from fever.job import ENDED, HOSTS, JOB, QUEUED, RUN, RUNNING
from fever.launch.clusters.link import ClusterDown, Link, SshLink, connect, note_end
from fever.launch.clusters.package import Package
from fever.launch.clusters.ray_jobs import OVER
from fever.launch.clusters.record import ClusterRecord
from fever.launch.clusters.ssh import Unreachable, shell_word
from fever.launch.jobs import PATIENCE_SECONDS, SILENT, Job, claim_name, forget, list_jobs, prepare, remember, undo_for
from fever.training.start_from import pack_start

if TYPE_CHECKING:
    from fever.launch.clusters.base import ClusterTarget

STOP_SECONDS = 60  # for a run to save, before Ray kills it


def submit(config: RunConfig, target: ClusterTarget, link: Link, run: Path, flags: list[str], package: Package) -> Job:
    """Send a run directory and the code to a cluster, and submit a job to its Ray.

    If that fails, everything on this machine is as it was before, unless Ray may have the job all the same.
    """
    with ExitStack() as undo:
        job = Job(claim_name(link.name), run.resolve())
        undo.callback(forget, job)
        number = f"{job.name}-{secrets.token_hex(4)}"  # Ray may have jobs of others, or of an earlier cluster
        before = job.facts
        same = before.get("cluster_id") == link.id and before.get("head") == link.head
        remote_path = before["remote_path"] if same else f"{link.runs}/{number}/{run.name}"
        undo.callback(undo_for(run))
        folder = prepare(config, target, run, flags, number, str(Path(remote_path).parent))
        folder.note(cluster=link.name, cluster_id=link.id, head=link.head, remote_path=remote_path, sent=False)
        folder.clear()
        if folder.log.exists():  # of the job that trained this run before
            old = folder.path / f"log-{len(list(folder.path.glob('log-*.txt'))) + 1}.txt"
            folder.log.rename(old)
            undo.callback(old.rename, folder.log)
        if config.start_from is not None and not folder.saved:
            pack_start(config, folder)
        words = ["resume", remote_path] if folder.saved else ["train", "-f", f"{remote_path}/{layout.JOB}/{RUN}"]
        variables = {**target.job_variables, JOB: f"{remote_path}/job", "PYTHONWARNINGS": "ignore"}
        variables["RAY_JOB_STOP_WAIT_TIME_S"] = str(STOP_SECONDS)
        variables |= {HOSTS: str(target.max_hosts)} if target.max_hosts is not None else {}
        link.push(job.run, remote_path)
        link.jobs.upload(package)
        command = f"exec {shell_word(link.python)} {join(['-m', 'fever', *words, *flags])}"
        remember(job.name, run)
        try:
            link.jobs.submit(number, command, {"working_dir": package.uri, "env_vars": variables})
        except BaseException:
            if not _is_unknown(link, number):
                undo.pop_all()
            raise
        undo.pop_all()
    folder.note(sent=True)
    return job


def _is_unknown(link: Link, number: str) -> bool:
    """Whether Ray certainly does not have, or is ending, a job whose submission failed."""
    try:
        if link.jobs.details(number) is None:
            return True
        link.jobs.stop(number)
    except FeverError:
        return False
    return True


def state(job: Job) -> tuple[str, str]:
    """QUEUED, RUNNING or ENDED, and a short reason."""
    if job.code is not None:
        return job.ended()
    try:
        with connect(job) as link:
            status, code = link.state(job)
    except ClusterDown:
        return ENDED, "its cluster is down"
    except FeverError as error:
        return RUNNING, f"{SILENT}: {error}"
    if code is not None:
        return job.ended()
    return (QUEUED, "starting") if status == "PENDING" else (RUNNING, "")


def stop(job: Job) -> str:
    """Have Ray tell a run to save and stop, and fetch what it saved; Ray kills it if it takes too long."""
    with connect(job) as link:
        link.jobs.stop(job.facts["id"])
        if _wait_for_end(link, job) is None:
            raise FeverError(f"{job.name} does not stop; its log: fever logs {job.name}")
    return job.stopped()


def _wait_for_end(link: Link, job: Job) -> int | None:
    """Wait for a job's end and fetch all of it; returns its exit code, None if it does not end in time."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while time.monotonic() < deadline:
        if link.state(job)[1] is not None:
            link.sync(job)
            return job.code
        time.sleep(0.3)
    return None


def jobs_of(record: ClusterRecord) -> list[Job]:
    """The jobs of a cluster that is up."""
    return [job for job in list_jobs() if job.facts.get("cluster_id") == record.id]


def unfetched_jobs(record: ClusterRecord) -> list[Job]:
    """The jobs of a cluster of which it may have the only copy of something."""
    return [job for job in jobs_of(record) if not job.home]


def fetch_all(record: ClusterRecord, say: Callable[[str], None], force: bool = False) -> None:
    """Have a cluster's jobs save and stop, and fetch what is not here yet.

    Raises FeverError if something cannot be fetched; with `force` it only says what is lost.
    """
    waiting = unfetched_jobs(record)
    gone = [job for job in list_jobs(gone=True) if job.name.startswith(f"{record.name}-")]
    lost: dict[str, FeverError] = {}
    if not waiting and not gone:
        return
    try:
        with SshLink(record) as link:
            lost |= _without_directory(link, record, gone) if gone else {}
            for job in waiting:
                try:
                    _stop_and_fetch(link, job, say)
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


def _without_directory(link: Link, record: ClusterRecord, gone: list[Job]) -> dict[str, FeverError]:
    """Of the jobs whose run directory is no longer on this machine, those that would be lost with the cluster."""
    states: dict[str, str] = {}
    with suppress(FeverError):  # if Ray does not answer, nothing runs
        states = {name.rpartition("-")[0]: state for name, state in link.jobs.states().items()}
    harmless = (None, *OVER) if record.target.keeps_runs else (None,)
    lost = [job for job in gone if states.get(job.name) not in harmless]
    return {job.name: FeverError(f"its run directory is no longer at {job.run}") for job in lost}


def _stop_and_fetch(link: Link, job: Job, say: Callable[[str], None]) -> None:
    try:
        if link.state(job)[1] is None:
            say(f"{job.name}: asked to save and stop")
            link.jobs.stop(job.facts["id"])
        if _wait_for_end(link, job) is None:
            raise FeverError(f"{job.name} does not stop")
    except Unreachable:  # Ray is dead on the head, but the files may be there
        link.sync(job)  # raises if it is the connection that broke: the job may still run
        note_end(job, 1)
        link.sync(job)
    say(f"{job.name}: fetched and verified, {job.run}")
