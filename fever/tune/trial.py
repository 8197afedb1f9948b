"""One trial: the runs of its seeds, one after the other, in a thread that pauses at every report to Ray Tune.

    trials/0007/           the run of the first seed
    trials/0007-seed-1/    the run of the next one; both are ordinary run directories

A run that an interrupted search left behind is resumed from its checkpoint; one that ended is scored and not repeated.
"""

from __future__ import annotations

import json
import logging
import queue
import shutil
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fever import layout
from fever.algos.registry import find_provider
from fever.config import RunConfig
from fever.envs.source import EnvSource
from fever.errors import FeverError, TrainingError
from fever.files import read_json, refuse_link, write_atomically
from fever.runs.facts import facts
from fever.runs.run import Run
from fever.training.callbacks import Callback, TrainingInfo
from fever.tune.score import BUDGET, LearningCurve, mean_score
from fever.tune.space import Space
from fever.tune.store import SearchFolder, TrialFolder, read_list

REPORT_SHARE = 0.01  # share of the budget between two reports,
REPORT_SECONDS = 1.0  # but at most this long
SEND_SECONDS = 20.0  # between two copies of a trial's files from another machine to the driver's
PERTURBATIONS = 8  # parts of a trial's budget; after each it may be copied, or continue from another's copy
ENDED = ("reward", "steps", "iterations", "time")  # stop reasons of a run that needs no more
HISTORY = (  # what a copy of a run has besides a checkpoint
    layout.METRICS, layout.EPISODES, layout.OLD_EPISODES, layout.EVALUATIONS
)  # fmt: skip


@dataclass(frozen=True)
class Plan:
    """What every trial of a search needs to know."""

    config: RunConfig  # of every run, except for what a trial changes
    space: Space
    seeds: int
    copies: bool  # population-based training: trials continue from copies of others
    folder: SearchFolder
    compiled: str  # folder on the driver's machine for what JAX has compiled

    def run_config(self, number: int, settings: dict[str, Any], index: int, root: Path) -> RunConfig:
        """The configuration of one of a trial's runs."""
        more: dict[str, Any] = {
            "settings": {**self.config.settings, **settings},
            "seed": self.config.seed + index,
            "runs": str(root / layout.TRIALS),
            "name": run_name(number, self.config.seed + index if index else None),
        }
        return self.config.model_copy(update=more)


def run_name(number: int, seed: int | None = None) -> str:
    """The name of a trial's run directory; the first one has no seed in it."""
    return f"{number:04d}" if seed is None else f"{number:04d}-seed-{seed}"


class Trial(Callback):
    """The work of one trial. `next` lets it run until its next report; `end` interrupts it.

    It is a callback of its own runs: it makes the trainer wait between two iterations, from a report until `next`.
    """

    def __init__(
        self, plan: Plan, folder: TrialFolder, source: EnvSource, number: int, settings: dict[str, Any]
    ) -> None:
        self.plan, self.folder, self.source = plan, folder, source
        self.number, self.settings = number, settings
        self.ended: list[float] = []  # scores of the seeds that are done
        self.steps_before, self.seconds_before = 0, 0.0  # in those
        self.curve: LearningCurve | None = None  # of the seed that is being trained
        self.reported = self.sent = time.monotonic()
        self.reported_share = 0.0
        self.parts = 0  # of PERTURBATIONS that have been reported
        self.stopping = False
        self.reports: queue.Queue[dict[str, Any] | Exception] = queue.Queue()
        self.may_continue = threading.Semaphore(0)
        self.thread = threading.Thread(target=self._main, name="trial", daemon=True)

    # what the actor calls, between reports

    def next(self) -> dict[str, Any]:
        """Run until the next report and return it. Raises `FeverError` or `TrainingError` if the trial fails."""
        if self.thread.ident is None:
            self.thread.start()
        else:
            self.may_continue.release()
        report = self.reports.get()
        if isinstance(report, (FeverError, TrainingError)):
            raise report
        if isinstance(report, Exception):
            raise TrainingError(f"{type(report).__name__}: {report}") from report
        return report

    def end(self) -> None:
        """Stop; a run that is being trained saves its state, which is copied to the driver's machine.

        At the end of a search Ray Tune waits about ten seconds for that and then kills the process. A run that takes
        longer, for example to finish an iteration, later continues from the checkpoint before.
        """
        if self.thread.is_alive():
            self.stopping = True
            self.may_continue.release()
            self.thread.join()

    # the thread

    def _main(self) -> None:
        try:
            for index in range(self.plan.seeds):
                self._run(index)
            self.reports.put(self._report(finished=True))
        except BaseException as error:  # noqa: BLE001 - raised where it was waited for; environments may call sys.exit
            if self.stopping:
                logging.info("trial %d was cut off: %r", self.number, error)
            elif isinstance(error, Exception):
                self.reports.put(error)
            else:
                self.reports.put(TrainingError(f"the environment or algorithm exited with {error!r}"))

    def _run(self, index: int) -> None:
        """Train one seed to its end, from its last checkpoint if it has one."""
        from fever.training.resume import resume
        from fever.training.trainer import train

        config = self.plan.run_config(self.number, self.settings, index, self.folder.root)
        name = f"{layout.TRIALS}/{config.name}"
        run = self._previous_run(self.folder.fetch(name), config)
        self.curve = LearningCurve(config.stop)
        self.reported_share = 0.0
        reason = self._score_previous(run) if run else ""
        self.parts = int(PERTURBATIONS * self.curve.share)
        try:
            if run is None:
                reason = train(config, self.source, callbacks=[self]).stop_reason
            elif not reason:
                reason = resume(run, config, "last", self.source, callbacks=[self], trust=True).stop_reason
        finally:
            self.folder.send(name)
        if reason not in ENDED or self.stopping:
            raise KeyboardInterrupt
        score = self.curve.end(reason)
        if score is None:
            raise TrainingError(f"no episode ended within {self.curve.row.get('steps', 0):,} steps: there is no score")
        self.ended.append(score)
        self.steps_before += self.curve.row["steps"]
        self.seconds_before += self.curve.row["seconds"]

    def _previous_run(self, path: Path, config: RunConfig) -> Run | None:
        """The run that an interrupted search left for this trial, or None. A run with other settings is removed. Raises
        `FeverError` if it is a link to some other run."""
        refuse_link(path)
        if not (path / layout.CONFIG).is_file():
            shutil.rmtree(path, ignore_errors=True)
            return None
        run = Run(path)
        if (self.plan.copies or self._is_mine(run, config)) and run.checkpoints():
            return run
        shutil.rmtree(path)
        return None

    def _is_mine(self, run: Run, config: RunConfig) -> bool:
        """Whether a run has this trial's settings, which a provider may have kept by other names."""
        provider = find_provider(config.algo)
        wanted = provider.resolve(config).model_dump(mode="json")["settings"] if provider is not None else self.settings
        kept = run.config.settings
        return all(name in kept and kept[name] == value for name, value in wanted.items())

    def _score_previous(self, run: Run) -> str:
        """Score a run up to its last checkpoint; returns its stop reason, empty if it has not ended."""
        assert self.curve is not None
        last = run.checkpoint()
        for row in run.metrics():
            if row["iteration"] <= last.iteration:
                self.curve.add(row)
        if run.summary is not None and run.summary["stop_reason"] in ENDED and self.curve.row == run.metrics()[-1]:
            return run.summary["stop_reason"]
        if last.met(self.curve.stop) == "reward":
            return "reward"
        return "steps" if self.curve.share >= 1 else ""

    # what the trainer calls

    def on_iteration(self, info: TrainingInfo) -> None:
        """Report if it is time to. Where other trials may continue from this one, a checkpoint comes first."""
        curve = self.curve
        assert curve is not None
        curve.add(info.metrics)
        now = time.monotonic()
        due = curve.share - self.reported_share >= REPORT_SHARE or now - self.reported >= REPORT_SECONDS
        if due and self._may_report(curve):
            if self.plan.copies and int(PERTURBATIONS * curve.share) > self.parts:
                info.request_checkpoint()
            else:
                self._pause(info)
        if self.folder.store is not None and now - self.sent >= SEND_SECONDS:
            self.sent = now
            self.folder.send(f"{layout.TRIALS}/{run_name(self.number, self._seed())}")

    def on_checkpoint(self, info: TrainingInfo, path: Path) -> None:
        curve = self.curve
        assert curve is not None
        parts = int(PERTURBATIONS * curve.share)
        if self.plan.copies and parts > self.parts and self._may_report(curve) and not self.stopping:
            self.parts = parts
            self._pause(info)

    def _may_report(self, curve: LearningCurve) -> bool:
        return curve.share < 1 and curve.mean is not None

    def _pause(self, info: TrainingInfo) -> None:
        """Report, and wait until the trial may continue or is to stop. Between iterations the state is whole."""
        assert self.curve is not None
        self.reported, self.reported_share = time.monotonic(), self.curve.share
        self.reports.put(self._report())
        self.may_continue.acquire()
        if self.stopping:
            info.request_stop("interrupted")

    def _seed(self) -> int | None:
        return self.plan.config.seed + len(self.ended) if self.ended else None

    def _report(self, finished: bool = False) -> dict[str, Any]:
        """The report to Ray Tune, which compares trials at the same `time`. Where trials are copied, `time` advances
        with checkpoints only."""
        curve = None if finished else self.curve
        row = self.curve.row if self.curve else {}
        share = 0.0 if curve is None else self.parts / PERTURBATIONS if self.plan.copies else curve.share
        return {
            "score": mean_score(self.ended, curve),
            "time": int(BUDGET * (len(self.ended) + share)),  # reaches the whole budget only when finished
            "return_mean": row.get("return_mean"),
            "steps": self.steps_before + (row["steps"] if curve else 0),
            "seconds": round(self.seconds_before + (row["seconds"] if curve else 0.0), 3),
            "copied": json.dumps([copy["trial"] for copy in self._copied()]),
            "finished": finished,
            "done": finished,
        }

    # copies, for population-based training

    def copy(self, name: str) -> bool:
        """Copy the last checkpoint and the metrics to a folder of this name; False if there is no checkpoint yet, or
        no room for the copy."""
        path = self.folder.root / layout.TRIALS / run_name(self.number)
        found = Run(path).checkpoints()
        if not found:
            return False
        target = self.folder.place(name)
        shutil.rmtree(target, ignore_errors=True)
        origin = {"copy": name, "trial": self.number, "steps": found[-1].manifest["steps"]}
        try:
            shutil.copytree(found[-1].path, target / layout.CHECKPOINTS / found[-1].path.name)
            for file in HISTORY:
                if (path / file).is_file():
                    shutil.copy(path / file, target / file)
            write_atomically(target / layout.ORIGIN, json.dumps(origin) + "\n")
        except OSError as error:  # a full disk
            logging.warning("trial %d is not copied: %s", self.number, error)
            shutil.rmtree(target, ignore_errors=True)
            return False
        self.folder.send(name)
        return True

    def adopt(self, name: str) -> None:
        """Continue from another trial's copy, with this trial's settings. A copy that is this trial's own, that it has
        continued from already, that is gone, or that the disk has no room for changes nothing."""
        copy = self.folder.fetch(name)
        if not (copy / layout.ORIGIN).is_file():
            logging.warning("trial %d continues from its own checkpoint: %s is gone", self.number, name)
            return
        origin = read_json(copy / layout.ORIGIN)
        copied = self._copied()
        if origin["trial"] == self.number or origin["copy"] in [one["copy"] for one in copied]:
            return
        config = self.plan.run_config(self.number, self.settings, 0, self.folder.root)
        path = self.folder.fetch(f"{layout.TRIALS}/{config.name}")
        run = Run(path) if (path / layout.CONFIG).is_file() else Run.create(config, facts())
        run.refuse_links()
        new = path.with_name(f".{path.name}.adopted")  # complete before anything of the trial's own is removed
        shutil.rmtree(new, ignore_errors=True)
        try:
            shutil.copytree(copy, new, ignore=shutil.ignore_patterns(layout.ORIGIN))
            write_atomically(new / layout.COPIED, json.dumps({"list": [*copied, origin]}) + "\n")
        except OSError as error:  # a full disk
            logging.warning("trial %d continues from its own checkpoint: %s", self.number, error)
            shutil.rmtree(new, ignore_errors=True)
            return
        _take_over(path, new)
        run.write_config(config)
        self.folder.send(f"{layout.TRIALS}/{config.name}")

    def _copied(self) -> list[dict[str, Any]]:
        """The copies that this trial has continued from, the first one first."""
        if not self.plan.copies:
            return []
        return read_list(self.folder.root / layout.TRIALS / run_name(self.number) / layout.COPIED)


def _take_over(path: Path, new: Path) -> None:
    """Replace what a run has learned by what is in the folder `new`."""
    for name in (layout.CHECKPOINTS, *HISTORY, layout.SUMMARY):
        shutil.rmtree(path / name, ignore_errors=True)
        (path / name).unlink(missing_ok=True)
    for part in new.iterdir():
        part.replace(path / part.name)
    new.rmdir()
