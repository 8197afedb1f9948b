"""One training from its start through its faults to its end, and what became of it."""

from __future__ import annotations

import itertools
import shutil
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

from chaos import ledger
from chaos.envs import STOP
from chaos.faults import DISK_BYTES, MAKERS, Fault, NoVictimError
from chaos.schedule import Case
from chaos.training import CHECKPOINT_SECONDS, TARGET, Training

POLL = 0.1  # seconds
START_SECONDS, TARGET_SECONDS, END_SECONDS = 180.0, 180.0, 60.0
ORPHAN_SECONDS = 80.0  # that Ray's agents live on, by Ray's own clock, after the kill -9 of a driver
EVEN_SECONDS = 60.0
CLEAN_SECONDS = 15.0
IGNORED = shutil.ignore_patterns("replay", "checkpoints")  # of the copy that is kept
SLACK = 0.5  # seconds by which a row is seen late


class FailedError(Exception):
    """The training did not get where it had to, for the reason given."""


@dataclass
class Outcome:
    """What one fault did."""

    case: str
    kind: str
    reason: str = ""  # why it was not survived; empty if it was
    skipped: bool = False  # it could not be caused here
    lost: float | None = None  # seconds' worth of steps
    pause: float | None = None  # seconds, the longest time without a row
    beyond: int | None = None  # iterations lost beyond the checkpoint interval, by a killed driver


@dataclass
class Result:
    """What became of one training."""

    case: str
    outcomes: list[Outcome] = field(default_factory=list)
    reason: str = ""  # why it did not finish by itself; empty if it did
    score: float = float("nan")
    rows_lost: int = 0
    twice: int = 0
    leftovers: list[str] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def finished(self) -> bool:
        return not self.reason

    @property
    def skipped(self) -> bool:
        """Whether it could not be trained here."""
        return bool(self.outcomes) and all(outcome.skipped for outcome in self.outcomes) and not self.seconds

    @property
    def reached(self) -> bool:
        return self.finished and self.score >= TARGET


class Drill:
    """Trains one case in a folder, with the deadline of the whole chaos."""

    training_class = Training

    def __init__(self, case: Case, folder: Path, deadline: float, say: Callable[[str], None]) -> None:
        assert case.recipe is not None
        self.case, self.deadline, self.say = case, deadline, say
        self.rng = Random(case.seed)
        self.disk = self.prepare(folder / "runs")
        self.training = self.training_class(case.recipe, folder, case.seed)
        self.result = Result(case.recipe.label)

    def run(self) -> Result:
        """Train, with all faults; whatever happens becomes part of the result."""
        began = time.monotonic()
        try:
            self.train()
        except Exception as error:  # noqa: BLE001 - one training that cannot be broken as planned does not end the others
            self.result.reason = self.result.reason or explain(error)
        for kind in self.case.kinds[len(self.result.outcomes) :]:
            self.result.outcomes.append(Outcome(self.result.case, kind, "not caused: the training was lost before"))
        self._examine()
        self.result.seconds = time.monotonic() - began
        return self.result

    def prepare(self, folder: Path) -> bool:
        """Make the place of the run directory; whether it is a disk of its own."""
        return mount_disk(folder)

    def make_fault(self, kind: str) -> Fault:
        return MAKERS[kind](kind, self.rng)

    def train(self) -> None:
        """From the start to the end. Raises FailedError."""
        self.training.start()
        self.wait(self._learns, START_SECONDS, "first checkpoint")
        for kind in self.case.kinds:
            self._suffer(self.make_fault(kind))
        self.finish()

    def _learns(self) -> bool:
        return self.training.has_checkpoint() and len(self.training.rows) >= 3

    def wait(self, condition: Callable[[], object], seconds: float, what: str) -> None:
        """Follow the training until a condition holds. Raises FailedError if it ends or takes too long."""
        limit = min(time.monotonic() + seconds, self.deadline)
        while True:
            alive = self.training.alive()
            self.training.follow()
            if condition():
                return
            if not alive:
                raise FailedError(f"it ended while it had to go on, {self.training.why_ended()}")
            if time.monotonic() > limit:
                raise FailedError(f"no {what} within {seconds:.0f} s" if limit < self.deadline else "out of time")
            time.sleep(POLL)

    def _suffer(self, fault: Fault) -> None:
        """Cause a fault and wait until it is over. A training that it ends or stalls is resumed for the next fault."""
        outcome = Outcome(self.result.case, fault.kind)
        self.result.outcomes.append(outcome)
        if fault.kind == "full_disk" and not self.disk:
            outcome.reason, outcome.skipped = "a disk of its own needs root", True
            return
        if time.monotonic() > self.deadline:
            outcome.reason = "not caused: out of time"
            return
        training = self.training
        self.wait(training.runs_evenly, EVEN_SECONDS, "rate to compare with")
        before, moment = len(training.rows), time.monotonic()
        try:
            fault.strike(training)
            try:
                self.wait(lambda: fault.pending(training) is None and training.alive(), fault.limit, "end of it")
            except FailedError as error:
                waits = fault.pending(training) if training.alive() else None
                raise FailedError(f"{error}; it waits for {waits}" if waits else str(error)) from None
            finally:
                fault.clean(training)
        except NoVictimError as error:
            outcome.reason = f"not caused: {error}"
            return
        except FailedError as error:
            outcome.reason = str(error)
            self.rescue(fault)
        self._measure(outcome, moment, before)
        self.say(f"{outcome.case}: {outcome.kind} {outcome.reason or 'survived'}, {outcome.lost or 0:.1f} s lost")

    def rescue(self, fault: Fault) -> None:
        """Resume a training that a fault has ended or stalled, for the faults that follow; it has not finished by
        itself any more."""
        self.result.reason = self.result.reason or f"{fault.kind} had to be helped: {self.result.outcomes[-1].reason}"
        self.training.kill()
        moment = time.monotonic()
        self.training.resume()
        self.wait(lambda: self.training.rows_since(moment) >= 3, START_SECONDS, "resumed training")

    def _measure(self, outcome: Outcome, moment: float, before: int) -> None:
        """What the fault cost: from the rows up to now and the rate before."""
        rows = self.training.rows
        times = [rows[before - 1].time, *(timed.time for timed in rows[before:])]
        outcome.pause = max((later - sooner for sooner, later in itertools.pairwise(times)), default=None)
        rate = self.training.rate(moment)
        if rate > 0 and len(rows) > before:
            gained = rows[-1].row["steps"] - rows[before - 1].row["steps"]
            outcome.lost = max(0.0, rows[-1].time - rows[before - 1].time - gained / rate)
        if outcome.kind == "kill_driver" and not outcome.reason:
            outcome.beyond = self._beyond(moment)

    def _beyond(self, moment: float) -> int:
        """Iterations that a driver, killed at a moment, lost beyond those of the interval between checkpoints."""
        rows, (*_, before, after) = self.training.rows, [0.0, *self.training.resumes]
        kept = next(timed.row["iteration"] for timed in rows if timed.time > after) - 1
        mine = [timed for timed in rows if before < timed.time <= after]  # of the process that was killed
        saved = next((timed.time for timed in mine if timed.row["iteration"] == kept), mine[0].time if mine else moment)
        return sum(timed.time > saved + CHECKPOINT_SECONDS + SLACK for timed in mine)

    def finish(self) -> None:
        """Let the training go on to its target, and end by its own rule."""
        training = self.training
        self.wait(lambda: training.score() >= TARGET, TARGET_SECONDS, f"mean return of {TARGET:g}")
        (training.control / STOP).touch()
        assert training.process is not None
        try:
            training.process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            raise FailedError(f"it did not end within {END_SECONDS:.0f} s of being asked to") from None
        training.follow()
        if training.process.returncode != 0:
            raise FailedError(f"it ended with {training.why_ended()}")

    def _examine(self) -> None:
        """Look at the run directory of the training, and kill it if it still runs."""
        training, result = self.training, self.result
        training.follow()
        result.score = training.score()
        if result.reason:
            training.kill()
        try:
            summary = training.run().summary
            if summary is None or summary["stop_reason"] != "chaos":
                raise FailedError(f"the summary says {summary['stop_reason'] if summary else 'nothing'}")
            result.rows_lost, result.twice, wrong = ledger.examine(training, summary)
            if wrong:
                raise FailedError("; ".join(wrong))
        except Exception as error:  # noqa: BLE001 - a damaged run directory is a result, not the end of the chaos
            result.reason = result.reason or explain(error)

    def sweep(self, limit: float) -> None:
        """Note what is still there, at a moment, of a training that has finished; then remove it."""
        while self.result.finished and (left := self.leftovers()) and time.monotonic() < limit:
            time.sleep(1)
        self.result.leftovers = left if self.result.finished else []
        self.training.kill()
        if self.disk:
            with suppress(OSError, shutil.Error):  # there may be no run directory, or an unreadable one
                shutil.copytree(self.training.path, self.training.folder / "left", ignore=IGNORED)
            subprocess.run(["umount", str(self.training.runs)], check=False, timeout=30)

    def leftovers(self) -> list[str]:
        return ledger.leftovers(self.training)

    @property
    def orphans_until(self) -> float:
        """When the last process of a driver that was killed must have ended by itself."""
        return max((moment + ORPHAN_SECONDS for moment in self.training.resumes), default=0.0)


def explain(error: Exception) -> str:
    """An error in one line."""
    return str(error) if isinstance(error, FailedError) else f"{type(error).__name__}: {error}"


def mount_disk(folder: Path) -> bool:
    """Give a folder a small file system of its own; False where that is not allowed."""
    folder.mkdir(parents=True, exist_ok=True)
    words = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "chaos", str(folder)]
    return subprocess.run(words, check=False, capture_output=True, timeout=30).returncode == 0
