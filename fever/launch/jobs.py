"""Jobs of every kind of target: recorded, found by name, stopped.

A record in the user's folder says where a job's run directory is. Everything else is read from there, or asked of the
job's target.
"""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fever import layout
from fever.config import RunConfig
from fever.errors import FeverError
from fever.files import read_json
from fever.job import CONTINUED, ENDED, EXIT, QUEUED, RECORD, RUN, RUNNING, SCRIPT, STOP, JobFolder, records
from fever.launch.endings import how_it_ended
from fever.launch.targets import Target, restore_target
from fever.text import format_duration

PATIENCE_SECONDS = 90.0  # for a run to save, before its job is cancelled
LOOK_SECONDS = 0.5  # between two looks at a job's files
ASK_SECONDS = 10.0  # between two status queries to its scheduler
BRISK_SECONDS = 20.0  # from its submission on, in which the scheduler is asked every second
REQUEUE_SECONDS = 30.0  # for a requeued job to appear in its queue
RECORD_SECONDS = 30 * 86400.0  # for which the record of a job is kept whose run directory is gone
CLAIM_SECONDS = 86400.0  # within which a claimed name may still become a job
SILENT = "does not answer"  # how the reason begins if a job's cluster cannot be asked
NUMBER = r"(?!-)[^\s\0]*"  # a job's at its scheduler: one word of a command, and no option
FIELDS: dict[str, Any] = {  # of a job's record, which is in the run directory and may be anybody's
    "kind": str, "id": str, "submitted": (int, float), "flags": list, "target": dict, "cluster": str,
    "cluster_id": str, "head": str, "remote_path": str, "sent": bool,
}  # fmt: skip


class Facts(dict[str, Any]):
    """A job's record. A field that it does not have is a `FeverError`."""

    def __missing__(self, name: str) -> Any:
        raise FeverError(f"its job.json is damaged: it has no {name}")


@dataclass(frozen=True)
class Job:
    """One job of this user's."""

    name: str  # kind and the scheduler's number: slurm-17; or a cluster's name and a number: lab-3
    run: Path

    @property
    def folder(self) -> JobFolder:
        return JobFolder.of(self.run)

    @property
    def facts(self) -> dict[str, Any]:
        """The job's record, job.json, or what its name says if that is missing or damaged. Its fields have the types of
        `FIELDS`."""
        with suppress(FeverError):
            kept = read_json(self.folder.path / RECORD)
            whole = all(isinstance(kept[name], FIELDS[name]) for name in FIELDS.keys() & kept.keys())
            if whole and {"kind", "id"} <= kept.keys() and re.fullmatch(NUMBER, kept["id"]):
                return Facts({"submitted": 0.0, **kept})
        return Facts(kind=self.name.partition("-")[0], id=self.name.partition("-")[2], submitted=0.0)

    @property
    def target(self) -> Target | None:
        """Where it runs; None if its record is missing."""
        facts = self.facts
        try:
            return restore_target(facts.get("target") or {"kind": facts["kind"]})
        except FeverError:
            return None

    @property
    def log(self) -> Path:
        return self.folder.log

    @property
    def code(self) -> int | None:
        """The exit code of the last attempt; None if it has not ended."""
        code = (self.folder.read(EXIT) or {}).get("code")
        return code if isinstance(code, int) else None

    @property
    def home(self) -> bool:
        """Whether a job on a cluster has ended and all of its run directory was copied here since."""
        return bool((self.folder.read(EXIT) or {}).get("home"))

    def state(self) -> tuple[str, str]:
        """QUEUED, RUNNING or ENDED, and a short reason."""
        target = self.target
        return target.state(self) if target else (ENDED, "its job.json is missing")

    def ended(self) -> tuple[str, str]:
        """The state of a job that its scheduler says is over."""
        code = self.code
        if code == CONTINUED and self.facts.get("target", {}).get("requeue"):
            with suppress(OSError):  # its script is submitting it again right now, perhaps under another number
                if time.time() - (self.folder.path / EXIT).stat().st_mtime < REQUEUE_SECONDS:
                    return QUEUED, "about to continue"
        self.folder.drop_token()
        if code is not None:
            return ENDED, f"exit code {code}"
        said = self.facts.get("ended")
        return ENDED, how_it_ended(self.folder, said if isinstance(said, str) else "", self.facts["submitted"] or 0.0)

    def watch(self) -> JobWatch:
        return JobWatch(self)

    def describe(self) -> dict[str, str]:
        """One row of a list of jobs; of one whose files are damaged, the reason says so."""
        try:
            state, reason = self.state()
        except FeverError as error:
            state, reason = ENDED, str(error)
        if state == QUEUED:
            reason = self.waited(reason)
        return {"job": self.name, "state": state, "reason": reason, "run": str(self.run)}

    def waited(self, reason: str) -> str:
        """For how long a queued job has waited, and why."""
        submitted = self.facts["submitted"]
        age = f"for {format_duration(max(0.0, time.time() - submitted))}" if submitted else ""
        return ": ".join(filter(None, (age, reason)))

    def let_save(self) -> bool:
        """Ask a running job to save and stop, again if it was only starting; returns whether it has ended in time."""
        deadline, asked = time.monotonic() + PATIENCE_SECONDS, time.monotonic()
        while time.monotonic() < deadline:
            if self.code is None and self.folder.read_text(STOP) is None:
                self.folder.write_text(STOP, "cancelled")
            if self.code is not None or time.monotonic() - asked >= ASK_SECONDS:
                asked = time.monotonic()
                if self.state()[0] == ENDED:
                    return True
            time.sleep(LOOK_SECONDS)
        return False

    def stopped(self) -> str:
        """The sentence about a job that was asked to save and has ended."""
        if not self.folder.saved:
            return f"{self.name} has stopped"
        return f"{self.name} has saved and stopped; resume it with: {resume_words(self.run)}"


class JobWatch:
    """Follows the state of a job whose files are on a shared file system; asks its scheduler only now and then."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.state, self.reason = QUEUED, ""
        self.code: int | None = None  # of an attempt that has ended; its job may be in the queue again
        self.began, self.asked = time.monotonic(), -ASK_SECONDS

    def look(self) -> tuple[str, str]:
        """QUEUED, RUNNING or ENDED, and a short reason."""
        code, now = self.job.code, time.monotonic()
        pause = 1.0 if self.state == QUEUED and now - self.began < BRISK_SECONDS else ASK_SECONDS
        ending = code is not None and self.state == RUNNING
        if ending or code != self.code or now - self.asked >= pause:
            self.state, self.reason = self.job.state()
            self.code, self.asked = code, time.monotonic()
        return self.state, self.reason

    def close(self) -> None: ...


# records


def remember(name: str, run: Path) -> Job:
    """Record a job in this user's folder."""
    job = Job(name, run.resolve())
    JobFolder(records("jobs")).write(f"{job.name}.json", {"run": str(job.run)})
    return job


def _records() -> list[tuple[int, Path]]:
    """The files of all records with their times in ns, the oldest first; other processes may remove some meanwhile."""
    found = []
    for path in records("jobs").glob("*.json"):
        with suppress(FileNotFoundError):
            found.append((path.lstat().st_mtime_ns, path))
    return sorted(found)


def sweep() -> None:
    """Remove records that say nothing any more: of a run that has a later job, of a run directory that is gone for
    long, and names that were claimed for a job that was never submitted. While a cluster is up, its records stay."""
    newest: set[str] = set()
    for written, path in reversed(_records()):
        age, run = time.time() - written / 1e9, _noted_run(path)
        cluster = records("clusters") / path.stem.rpartition("-")[0]
        if run is None:
            old = age > CLAIM_SECONDS
        else:
            gone = age > RECORD_SECONDS and not Path(run).exists() and not cluster.is_dir()
            old = gone or run in newest
            newest.add(run)
        if old:
            path.unlink(missing_ok=True)


def _noted_run(path: Path) -> str | None:
    """The run directory in a record; None for a name that was only claimed, and a damaged file."""
    with suppress(FeverError):
        run = read_json(path).get("run")
        return run if isinstance(run, str) and "\0" not in run else None
    return None


def forget(job: Job) -> None:
    """Remove what `remember` wrote."""
    (records("jobs") / f"{job.name}.json").unlink(missing_ok=True)


def claim_name(prefix: str) -> str:
    """A name for the next job of a cluster that no other process gets; then `remember` or `forget` it."""
    records("jobs").mkdir(parents=True, exist_ok=True)
    numbers = [path.stem.rpartition("-")[2] for path in records("jobs").glob(f"{prefix}-*.json")]
    number = max((int(number) for number in numbers if number.isdecimal()), default=0) + 1
    while True:
        try:
            (records("jobs") / f"{prefix}-{number}.json").touch(exist_ok=False)
            return f"{prefix}-{number}"
        except FileExistsError:
            number += 1


def list_jobs(gone: bool = False) -> list[Job]:
    """The latest job of every run, the oldest first: of runs whose directory exists, or of those where it is `gone`."""
    latest: dict[Path, Job] = {}
    for _, path in _records():
        with suppress(FeverError, KeyError, TypeError, ValueError):  # a name that was only claimed, a damaged file
            job = Job(path.stem, Path(read_json(path)["run"]))
            latest.pop(job.run, None)
            if job.folder.path.is_dir() is not gone:
                latest[job.run] = job
    return list(latest.values())


def find_job(word: str) -> Job:
    """A job by its name, its scheduler's number, its run's name, or `last`."""
    jobs = list_jobs()
    if word == "last" and jobs:
        return jobs[-1]
    for job in reversed(jobs):
        if word in (job.name, job.facts["id"], job.run.name, str(job.run)):
            return job
    names = ", ".join(job.name for job in jobs[-5:])
    raise FeverError(f"there is no job {word}" + (f"; the latest are: {names}" if names else ""))


# submitting and stopping


def refuse_busy(run: Path) -> None:
    """Refuse a run directory whose job has not ended."""
    for job in list_jobs():
        if job.run != run.resolve():
            continue
        state, reason = job.state()
        if reason.startswith(SILENT):
            gone = f"if its machines are gone for good: {job.target.how_to_give_up(job) if job.target else ''}"
            raise FeverError(f"{run} belongs to {job.name}, which {reason}; {gone}")
        if state != ENDED:
            raise FeverError(f"{run} belongs to {job.name}, which has not ended; end it with: fever stop {job.name}")


def prepare(
    config: RunConfig, target: Target, run: Path, flags: list[str], number: str = "", runs: str = ""
) -> JobFolder:
    """Make the job's folder in a run directory: what is trained, and the job's settings.

    `runs`: the folder of run directories on the machine that trains, if that is not this one.
    """
    from fever.runs.run import to_yaml
    from fever.runs.trust import sign

    folder = JobFolder.of(run)
    try:
        folder.path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise FeverError(f"{run} cannot be made: {error.strerror}") from error
    where = {"runs": runs or str(run.parent), "name": run.name}
    text = to_yaml(config.model_copy(update=where))
    folder.write_text(RUN, text)
    sign(folder.path, config)
    if (run / layout.CONFIG).is_file():  # it is resumed, with the stop rules that were given now
        JobFolder(run).write_text(layout.CONFIG, text)
    facts = {"kind": target.kind, "id": number, "submitted": time.time(), "flags": flags}
    folder.write(RECORD, {**facts, "target": target.model_dump(mode="json")}, mode=0o600)  # has its variables
    return folder


def undo_for(run: Path) -> Callable[[], None]:
    """A function that restores a run directory to how it is now, or removes it if there is none yet."""
    if not run.exists():
        return lambda: discard(run)
    names = (layout.CONFIG, *(f"{layout.JOB}/{name}" for name in (RECORD, RUN, EXIT, SCRIPT, layout.SIGNATURE)))
    before = {name: (run / name).read_bytes() if (run / name).is_file() else None for name in names}

    def undo() -> None:
        for name, content in before.items():
            if content is None:
                (run / name).unlink(missing_ok=True)
            else:
                (run / name).write_bytes(content)
        with suppress(OSError):  # it had files before
            (run / layout.JOB).rmdir()

    return undo


def discard(run: Path) -> None:
    """Remove the run directory of a job that was not submitted, and the folder of runs if that is empty."""
    shutil.rmtree(run, ignore_errors=True)
    with suppress(OSError):
        run.parent.rmdir()


def stop(job: Job, now: bool = False) -> str:
    """End a job, after it has saved unless `now`. Returns what happened, for the user."""
    state, reason = job.state()
    target = job.target
    if state == ENDED or target is None:
        return f"{job.name} has ended already: {reason}"
    return target.stop(job, state, now)


def resume_words(run: Path) -> str:
    """The command that resumes a run."""
    from fever.runs.run import Run, trust_word

    try:
        return f"fever resume {run}{trust_word(Run(run).config)}"
    except FeverError:  # the copy of the run directory is incomplete
        return f"fever resume {run}"
