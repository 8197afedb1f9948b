"""Jobs: submitted or started elsewhere, found again by name. The same words for every kind of target.

A job's record is a line in the user's folder that says where its run directory is; everything else is read from there
and asked of the scheduler.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fever import layout
from fever.config import RunConfig
from fever.errors import FeverError
from fever.job import CONTINUED, JobFolder, records
from fever.launch.rendezvous.member import LOST_SECONDS
from fever.launch.schedulers.scripts import render
from fever.launch.targets import Scheduler, Target

PATIENCE_SECONDS = 90.0  # for a run to save, before its job is cancelled
LOOK_SECONDS = 0.5  # between two looks at whether a job has stopped,
ASK_SECONDS = 10.0  # and between two questions to its scheduler
REQUEUE_SECONDS = 30.0  # for a job that goes on to be in its queue again
QUEUED, RUNNING, ENDED = "queued", "running", "ended"
SILENT = "does not answer"  # how the word about a job begins whose cluster cannot be asked


@dataclass(frozen=True)
class Job:
    """One job of this user's."""

    name: str  # kind and the scheduler's number: slurm-17; or a cluster's name and a number: lab-3
    run: Path

    @property
    def folder(self) -> JobFolder:
        return JobFolder(self.run / layout.JOB)

    @property
    def facts(self) -> dict[str, Any]:
        """What was written when it was submitted."""
        try:
            return json.loads((self.run / layout.JOB / "job.json").read_text())
        except (OSError, ValueError):
            return {"kind": self.name.partition("-")[0], "id": self.name.partition("-")[2], "submitted": 0.0}

    @property
    def log(self) -> Path:
        return self.folder.log

    @property
    def code(self) -> int | None:
        """The exit code of the last attempt; None if it has not ended."""
        ending = self.folder.read("exit.json")
        return int(ending["code"]) if ending is not None else None

    @property
    def home(self) -> bool:
        """Whether a job on a cluster has ended and all of it was brought home since."""
        return bool((self.folder.read("exit.json") or {}).get("home"))

    def state(self) -> tuple[str, str]:
        """QUEUED, RUNNING or ENDED, and a word about it."""
        known = STATES.get(self.facts["kind"])
        return known(self) if known else (ENDED, "its job.json is missing")

    def describe(self) -> dict[str, str]:
        """One row of a list of jobs."""
        state, word = self.state()
        return {"job": self.name, "state": state, "reason": word, "run": str(self.run)}


def remember(name: str, run: Path) -> Job:
    """Record a job in this user's folder."""
    job = Job(name, run.resolve())
    JobFolder(records("jobs")).write(f"{job.name}.json", {"run": str(job.run)})
    return job


def forget(job: Job) -> None:
    """Take back what `remember` wrote."""
    (records("jobs") / f"{job.name}.json").unlink(missing_ok=True)


def list_jobs(gone: bool = False) -> list[Job]:
    """All jobs whose run directory is still there, or only those of which it is `gone`, the oldest first; of a run only
    its latest, which is what counts."""
    latest: dict[Path, Job] = {}
    for _, path in sorted((path.stat().st_mtime_ns, path) for path in records("jobs").glob("*.json")):
        with suppress(OSError, ValueError, KeyError):  # a name that was only claimed, a file that was damaged
            job = Job(path.stem, Path(json.loads(path.read_text())["run"]))
            latest.pop(job.run, None)
            if (job.run / layout.JOB).is_dir() is not gone:
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


# states


def _ask(gone: str, *command: str) -> str | None:
    """What a scheduler's program prints; empty if it does not know the job (any more), None if it does not answer."""
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return None
    if answer.returncode == 0:
        return answer.stdout.strip()
    return "" if re.search(gone, answer.stderr) else None


def ended(job: Job) -> tuple[str, str]:
    """The state of a job that is over."""
    code = job.code
    if code == CONTINUED and job.facts.get("target", {}).get("requeue"):
        with suppress(OSError):  # its script hands it in again right now, under another number perhaps
            if time.time() - (job.run / layout.JOB / "exit.json").stat().st_mtime < REQUEUE_SECONDS:
                return QUEUED, "about to go on"
    if code is not None:
        return ENDED, f"exit code {code}"
    return ENDED, "was killed" if job.log.exists() else "was cancelled before it began"


def _slurm_state(job: Job) -> tuple[str, str]:
    if not (number := job.facts["id"]):
        return ENDED, "was not submitted"
    answer = _ask("Invalid job id", "squeue", "--noheader", "--jobs", number, "--format", "%T %r")
    if answer is None:
        return RUNNING, "squeue does not answer"
    state, _, reason = answer.partition("\n")[0].partition(" ")
    if state in ("PENDING", "REQUEUED", "CONFIGURING", "REQUEUE_HOLD"):
        return QUEUED, reason if reason != "None" else "starting"
    over = ("", "COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED", "BOOT_FAIL", "DEADLINE")
    return ended(job) if state in (*over, "OUT_OF_MEMORY") else (RUNNING, "")


def _pbs_state(job: Job) -> tuple[str, str]:
    if not job.facts["id"]:
        return ENDED, "was not submitted"
    answer = _ask("Unknown Job|has finished", "qstat", "-f", job.facts["id"])
    if answer is None:
        return RUNNING, "qstat does not answer"
    state = re.search(r"job_state = (\w)", answer)
    if state is None or state[1] in "FCX":
        return ended(job)
    return (RUNNING, "") if state[1] in "RE" else (QUEUED, "")


def _mpi_state(job: Job) -> tuple[str, str]:
    if job.code is not None or job.folder.read_text("alive") is None:
        return ended(job)
    silent = time.time() - (job.run / layout.JOB / "alive").stat().st_mtime
    return (RUNNING, "") if silent < LOST_SECONDS else (ENDED, "was killed")


def _cluster_state(job: Job) -> tuple[str, str]:
    from fever.launch.clusters import jobs as cluster_jobs

    return cluster_jobs.state(job)


STATES = {
    "slurm": _slurm_state,
    "pbs": _pbs_state,
    "mpi": _mpi_state,
    **dict.fromkeys(("ssh", "aws", "ray"), _cluster_state),
}


# submitting, following, stopping


def refuse_busy(run: Path) -> None:
    """Leave a run alone that a job has not finished with."""
    for job in list_jobs():
        if job.run != run.resolve():
            continue
        state, word = job.state()
        if word.startswith(SILENT):
            gone = "if its machines are gone for good: fever down FILE --force"
            raise FeverError(f"{run} belongs to {job.name}, which {word}; {gone}")
        if state != ENDED:
            raise FeverError(f"{run} belongs to {job.name}, which has not ended; end it with: fever stop {job.name}")


def prepare(
    config: RunConfig, target: Target, run: Path, flags: list[str], number: str = "", runs: str = ""
) -> JobFolder:
    """Make the meeting place in the run directory: what is trained, and the settings of the job.

    `runs`: the folder of run directories where it is trained, if that is another machine's.
    """
    from fever.runs.run import to_yaml

    folder = JobFolder(run / layout.JOB)
    try:
        folder.path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise FeverError(f"{run} cannot be made: {error.strerror}") from error
    where = {"runs": runs or str(run.parent), "name": run.name}
    text = to_yaml(config.model_copy(update=where))
    folder.write_text("run.yaml", text)
    if (run / layout.CONFIG).is_file():  # it goes on, with the stop rules that were given now
        JobFolder(run).write_text(layout.CONFIG, text)
    facts = {"kind": target.kind, "id": number, "submitted": time.time(), "flags": flags}
    folder.write("job.json", {**facts, "target": target.model_dump(mode="json")}, mode=0o600)  # has its variables
    return folder


def claim_name(prefix: str) -> str:
    """A name for the next job of a cluster that nobody else gets; `remember` or `forget` it."""
    records("jobs").mkdir(parents=True, exist_ok=True)
    numbers = [path.stem.rpartition("-")[2] for path in records("jobs").glob(f"{prefix}-*.json")]
    number = max((int(number) for number in numbers if number.isdecimal()), default=0) + 1
    while True:
        try:
            (records("jobs") / f"{prefix}-{number}.json").touch(exist_ok=False)
            return f"{prefix}-{number}"
        except FileExistsError:
            number += 1


def undo_for(run: Path) -> Callable[[], None]:
    """What puts a run directory back to how it is now, or away if there is none, should a submission fail."""
    if not run.exists():
        return lambda: discard(run)
    names = (layout.CONFIG, *(f"{layout.JOB}/{name}" for name in ("job.json", "run.yaml", "exit.json", "script.sh")))
    before = {name: (run / name).read_bytes() if (run / name).is_file() else None for name in names}

    def undo() -> None:
        for name, content in before.items():
            if content is None:
                (run / name).unlink(missing_ok=True)
            else:
                (run / name).write_bytes(content)
        with suppress(OSError):  # it has more in it than was made now
            (run / layout.JOB).rmdir()

    return undo


def discard(run: Path) -> None:
    """Remove a run directory that was made for nothing, and the folder of runs if it was made for it."""
    shutil.rmtree(run, ignore_errors=True)
    with suppress(OSError):
        run.parent.rmdir()


def script_for(target: Scheduler, run: Path) -> str:
    """The script of a run's job, submitted from here with this Python."""
    return render(target, run.name, Path.cwd(), run / layout.JOB, sys.executable)


def submit(config: RunConfig, target: Scheduler, run: Path, flags: list[str]) -> Job:
    """Hand a run to the scheduler; nothing is left if it refuses."""
    program = {"slurm": "sbatch", "pbs": "qsub"}[target.kind]
    if shutil.which(program) is None:
        raise FeverError(f"there is no {program} here; submit from a login node of the cluster, or see --dry-run")
    with ExitStack() as undo:
        undo.callback(undo_for(run))
        folder = prepare(config, target, run, flags)
        folder.clear()
        folder.write_text("script.sh", script_for(target, run), mode=0o700)
        refused = undo.pop_all()
    words = [program, *(["--parsable"] if program == "sbatch" else []), str(folder.path / "script.sh")]
    answer = subprocess.run(words, capture_output=True, text=True, start_new_session=True)  # Ctrl-C is not for it
    if answer.returncode:
        refused.close()
        raise FeverError(f"{program} refused the job: {' '.join(answer.stderr.split())}")
    number = answer.stdout.strip().partition(";")[0]
    note(folder, id=number)
    return remember(f"{target.kind}-{number}", run)


def note(folder: JobFolder, **facts: Any) -> None:
    """Add to what is known of a job."""
    folder.write("job.json", {**(folder.read("job.json") or {}), **facts}, mode=0o600)


def stop(job: Job, now: bool = False) -> str:
    """End a job: let a running one save first, unless it is to end at once. Returns what happened."""
    state, word = job.state()
    if state == ENDED:
        return f"{job.name} has ended already: {word}"
    if "cluster" in job.facts:
        from fever.launch.clusters import jobs as cluster_jobs

        if now:
            seconds = cluster_jobs.STOP_SECONDS
            raise FeverError(f"a job on a cluster saves before it stops, within {seconds} s; leave out --now")
        return cluster_jobs.stop(job)
    if state == RUNNING and not now and _let_save(job):
        return stopped(job)
    cancel = {"slurm": "scancel", "pbs": "qdel"}.get(job.facts["kind"])
    if cancel is None:
        raise FeverError(f"{job.name} does not stop; end its launcher (mpirun) where it was started")
    answer = subprocess.run([cancel, job.facts["id"]], capture_output=True, text=True)
    if answer.returncode:
        raise FeverError(f"{cancel} refused: {' '.join(answer.stderr.split())}")
    return f"{job.name} is cancelled"


def stopped(job: Job) -> str:
    """What is said of a job that was let save."""
    if not job.folder.saved:
        return f"{job.name} has stopped"
    return f"{job.name} has saved and stopped; go on with: {resume_words(job.run)}"


def resume_words(run: Path) -> str:
    """The command that goes on with a run."""
    from fever.runs.run import Run, trust_word

    try:
        return f"fever resume {run}{trust_word(Run(run).config)}"
    except FeverError:  # of a copy that is not whole
        return f"fever resume {run}"


def _let_save(job: Job) -> bool:
    """Ask a job to save and stop, again if it was only just beginning; whether it has done so in time."""
    deadline, asked = time.monotonic() + PATIENCE_SECONDS, time.monotonic()
    while time.monotonic() < deadline:
        if job.code is None and job.folder.read_text("stop") is None:
            job.folder.write_text("stop", "cancelled")
        if job.code is not None or time.monotonic() - asked >= ASK_SECONDS:
            asked = time.monotonic()
            if job.state()[0] == ENDED:
                return True
        time.sleep(LOOK_SECONDS)
    return False
