"""Runs on other machines: `run_elsewhere` is what `--on` does.

`targets.py` has the settings, and `jobs.py` finds jobs of every kind again. For schedulers `scripts.py` renders a
script, `batch.py` is its last line, and `node.py` the one rendezvous that every rank of every kind of job runs. For
machines of the user's own `clusters.py` has up and down, `cluster_jobs.py` submits, and `remote.py` is the way there.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fever import layout
from fever.errors import FeverError

if TYPE_CHECKING:
    from fever.config import RunConfig
    from fever.launch.jobs import Job
    from fever.launch.targets import Machines, Mpi, Scheduler


@dataclass(frozen=True)
class Order:
    """What is to be trained elsewhere."""

    config: RunConfig
    on: str  # where: a kind of target or a file
    run: Path | None = None  # one that exists, to go on with; None: a new one
    flags: list[str] = field(default_factory=list)  # for the command that trains: --json, --quiet
    dry_run: bool = False  # print the job's script only
    detach: bool = False  # submit and do not follow the log


def run_elsewhere(order: Order, options: dict[str, Any]) -> int:
    """Train on the target that `--on` names, with these of its settings; returns the exit code."""
    from fever.launch.targets import Machines, Mpi, Scheduler, load_target

    target = load_target(order.on, options)
    if isinstance(target, Mpi):
        if order.dry_run or order.detach:
            raise FeverError("--dry-run and --detach are for schedulers; ranks of --on mpi are started by you")
        return run_as_rank(order, target)
    if order.run is not None and not order.dry_run:
        settle(order.run)
    if isinstance(target, Machines):
        if options:
            first = f"--{next(iter(options)).replace('_', '-')}"
            raise FeverError(f"{first} is for jobs that bring their machines; for {order.on} write it into the file")
        return run_on_cluster(order, target)
    assert isinstance(target, Scheduler)
    return run_as_job(order, target)


def run_as_rank(order: Order, target: Mpi) -> int:
    """Take part as one of the ranks that a launcher has started."""
    from fever.job import JobFolder
    from fever.launch import jobs
    from fever.launch.rendezvous.launchers import find_rank
    from fever.launch.rendezvous.rank import run_rank

    config, rank = order.config, find_rank()
    if order.run is None and config.name is None and rank.launch is None:
        raise FeverError(f"{rank.launcher} gives this launch no name that all its ranks know; choose one with --name")
    run = order.run or folder_of(config, f"{config.stem}-{rank.launch}")

    def prepare() -> None:  # in rank 0, once the others can be told what is wrong
        refuse_existing(order, run)
        if order.run is not None:
            settle(order.run)
        number = rank.launch or run.name
        jobs.prepare(config, target, run, order.flags, number)
        jobs.remember(f"mpi-{number}", run)

    return run_rank(JobFolder(run / layout.JOB), target, rank, prepare)


def run_as_job(order: Order, target: Scheduler) -> int:
    """Submit a job and follow its log; Ctrl-C detaches, the job goes on."""
    from fever.launch import jobs
    from fever.runs.run import fresh_name

    run = order.run or folder_of(order.config, fresh_name(order.config))
    if order.dry_run:
        print(jobs.script_for(target, run), end="")
        return 0
    refuse_existing(order, run)
    own = target.modules or target.conda or target.venv or target.shell  # an environment that only the job has
    check(order.config, environment=not own)
    log = run / layout.JOB / "log.txt"
    place = log.stat().st_size if log.exists() else 0  # a run that goes on has a log already
    job = jobs.submit(order.config, target, run, order.flags)
    print(f"submitted {job.name}: {run}", file=sys.stderr)
    if order.detach:
        return 0
    return follow_to_end(job, order, place)


def follow_to_end(job: Job, order: Order, place: int = 0) -> int:
    """Show a job until it ends, and how it ended."""
    from fever.launch.follow import show, summary_of

    as_json = "--json" in order.flags
    code = show(job, place, quiet=as_json or "--quiet" in order.flags)
    if as_json and (summary := summary_of(job)) is not None:
        print(json.dumps(summary))
    return code


def run_on_cluster(order: Order, target: Machines) -> int:
    """Send the code and have it trained on a cluster that is up; Ctrl-C detaches, the run goes on."""
    from fever.algos.registry import without_prefix
    from fever.launch.clusters import jobs as cluster_jobs
    from fever.launch.clusters.existing import JobsOnly
    from fever.launch.clusters.link import Connection
    from fever.launch.clusters.package import pack
    from fever.launch.clusters.ssh_up import require_record
    from fever.launch.targets import Existing
    from fever.runs.run import fresh_name

    if order.dry_run:
        raise FeverError("--dry-run shows a scheduler's script; there is none here")
    if not isinstance(target, Existing):
        require_record(target, order.on)
    run = order.run or folder_of(order.config, fresh_name(order.config))
    refuse_existing(order, run)
    check(order.config, environment=True)
    package = pack(without_prefix(order.config.algo), *order.config.names(), skip=run.parent)
    way = JobsOnly(target) if isinstance(target, Existing) else Connection(require_record(target, order.on))
    with way as link:
        link.prepare()
        print(f"sending {package.what}", file=sys.stderr)
        job = cluster_jobs.submit(order.config, target, link, run, order.flags, package)
    print(f"submitted {job.name}: {run}", file=sys.stderr)
    return 0 if order.detach else follow_to_end(job, order)


def settle(run: Path) -> None:
    """Before a run goes on, here or elsewhere: nobody else has it, and all that its last job has made is here."""
    from fever.launch.clusters.jobs import bring_run_home
    from fever.launch.jobs import refuse_busy
    from fever.runs.run import Run

    if Run(run).running:
        raise FeverError(f"{run} is being trained right now; stop that first")
    refuse_busy(run)
    bring_run_home(run)


def folder_of(config: RunConfig, name: str) -> Path:
    """A new run's directory."""
    return Path(config.runs).expanduser().resolve() / (config.name or name)


def refuse_existing(order: Order, run: Path) -> None:
    """Let no new run have the directory of another, also of one whose job has not begun yet."""
    from fever.launch.jobs import refuse_busy, resume_words

    if order.run is not None:
        return
    if (run / layout.CONFIG).exists():
        other = f"{resume_words(run)} --on {order.on}"
        raise FeverError(f"{run} exists already; choose another --name, or go on with: {other}")
    refuse_busy(run)


def check(config: RunConfig, environment: bool) -> None:
    """Find mistakes in the settings, and in the environment's name, before anything waits in a queue for them."""
    from fever.algos.registry import check_settings
    from fever.envs.source import EnvSource

    check_settings(config.algo, config.settings)
    if environment:
        EnvSource(config.env, config.env_kwargs).resolve()
