"""Runs on other machines: `run_elsewhere` is what `--on` does.

The kinds of targets are classes: schedulers in `schedulers/`, ranks of MPI in `rendezvous/`, machines of the user's own
in `clusters/` and `aws/`. `targets.py` lists them; `jobs.py` finds the jobs of every kind again.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fever import layout
from fever.errors import FeverError
from fever.files import user_path
from fever.job import RECORD, current_job
from fever.launch.jobs import list_jobs, refuse_busy, resume_words, sweep
from fever.launch.targets import load_target
from fever.text import say

if TYPE_CHECKING:
    from fever.config import RunConfig
    from fever.launch.jobs import Job
    from fever.runs.run import Run


@dataclass(frozen=True)
class Order:
    """What is to be trained elsewhere, and the steps that all kinds of targets have in common."""

    config: RunConfig
    on: str  # where: a kind of target or a file
    run: Path | None = None  # the run to resume; None: a new one
    flags: list[str] = field(default_factory=list)  # for the command that trains: --json, --quiet
    dry_run: bool = False  # print the job's script only
    detach: bool = False  # submit and do not follow the log
    options: dict[str, Any] = field(default_factory=dict)  # the target's settings that the command line gives

    def run_directory(self, name: str = "") -> Path:
        """The run to resume, or a directory for a new one: with the configuration's name, this one, or a fresh one."""
        from fever.runs.run import fresh_name

        runs, config = user_path(self.config.runs).resolve(), self.config
        return self.run or user_path(runs / (config.name or name or fresh_name(config)))

    def reserve(self, run: Path) -> None:
        """Make sure that nobody else uses the run directory, jobs included that are still queued."""
        if self.run is not None:
            fetch_before_resume(run)
            return
        if (run / layout.CONFIG).exists():
            other = f"{resume_words(run)} --on {self.on}"
            raise FeverError(f"{run} exists already; choose another --name, or resume it with: {other}")
        refuse_busy(run)

    def check(self, environment: bool) -> None:
        """Find mistakes in the settings, and in the environment's name, before a job waits in a queue."""
        from fever.algos.batch import check_sizes
        from fever.algos.registry import check_settings
        from fever.envs.source import EnvSource
        from fever.plugins.names import import_name
        from fever.sampling.ray_machines import require_processes
        from fever.training.named import find_callback
        from fever.zoo.preset import blames, find_preset, with_preset

        check_settings(self.config.algo, self.config.settings)
        require_processes(self.config.workers, self.config.cpus_per_worker)
        source = EnvSource(self.config.env, self.config.env_kwargs)
        row = find_preset(self.config, source.name, source.kwargs)
        if environment:
            source.resolve()
            for word in self.config.callbacks:
                find_callback(word)
            if ":" in str(network := self.config.settings.get("network")):
                import_name(str(network))
        with blames(row, config := with_preset(self.config, row)):
            check_sizes(config)

    def follow(self, job: Job, shown: int = 0) -> int:
        """Show a job that was submitted until it ends, unless detached; returns its exit code.

        `shown`: the bytes of its log that were there before.
        """
        from fever.launch.follow import show, summary_of

        sweep()
        say(f"submitted {job.name}: {job.run}", sys.stderr)
        if self.detach:
            return 0
        as_json = "--json" in self.flags
        code = show(job, shown, quiet=as_json or "--quiet" in self.flags)
        if as_json and (summary := summary_of(job)) is not None:
            say(json.dumps(summary))
        return code


def run_elsewhere(order: Order) -> int:
    """Train on the target that `--on` names; returns the exit code."""
    return load_target(order.on, order.options).run(order)


def open_to_resume(word: str, runs: str, here: bool = True) -> Run:
    """Find a run to resume, after fetching what its last job wrote on another machine.

    If the run is resumed elsewhere (not `here`), the launcher fetches: once, though this may be one of many ranks.
    """
    from fever.runs.run import Run

    if current_job() is not None:
        return Run.open(word, runs)
    try:
        found = Run.open(word, runs)
    except FeverError:  # perhaps the run of a job whose files were not fetched yet
        path = next((job.run for job in list_jobs() if word in (job.name, job.run.name, str(job.run))), None)
        if path is None:
            raise
        fetch_before_resume(path)
        return Run.open(str(path), runs)
    found.refuse_links()
    if here and (found.job / RECORD).is_file():
        fetch_before_resume(found.path)
    return found


def fetch_before_resume(run: Path) -> None:
    """Before a run is resumed: refuse one that is being trained, and fetch what its last job wrote."""
    from fever.runs.run import Run

    if Run(run).running:
        raise FeverError(f"{run} is being trained right now; stop that first")
    refuse_busy(run)
    for job in list_jobs():
        if job.run == run.resolve() and (target := job.target) is not None:
            target.fetch(job)
