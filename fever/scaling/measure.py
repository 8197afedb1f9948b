"""Measurements: ordinary trainings, one process each, whose run directories say how fast they were."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from fever import system
from fever.config import RunConfig, Stop
from fever.errors import FeverError
from fever.files import write_atomically
from fever.job import LOG, JobFolder
from fever.runs.run import Run, column, to_yaml
from fever.scaling.warmup import WarmUp, reaches
from fever.text import PHASES, format_duration, one_line, shorten

WORKERS, NODES, HOSTS = "workers", "nodes", "hosts"  # what is counted
START_SECONDS = {WORKERS: 8.0, NODES: 30.0, HOSTS: 20.0}  # about: until a run trains, and until it has ended
WARM_SECONDS = 4.0  # about: until a run is warm
GRACE_SECONDS = 300.0  # beyond its limit, after which a run on this machine is ended
STOP_SECONDS = 30.0  # for a run to save after Ctrl-C
STOP_JOB_SECONDS = 180.0  # the same for a job elsewhere


@dataclass(frozen=True)
class Plan:
    """What is measured."""

    config: RunConfig  # of every run, but for what is counted, its seed, its name and when it ends
    kind: str  # WORKERS, NODES or HOSTS
    counts: tuple[int, ...]  # the smallest first
    rounds: int
    seconds: float  # of every measurement, after its warm-up
    target: float | None  # return whose time is measured
    longest: float  # seconds of one run, warm-up included
    place: dict[str, Any] = field(default_factory=dict)  # options of `fever train` for another place: {"on": "slurm"}

    @property
    def elsewhere(self) -> bool:
        return "on" in self.place

    def name(self, count: int, round_number: int) -> str:
        return f"{self.kind}-{count}-round-{round_number}"

    def run_config(self, count: int, round_number: int, folder: Path) -> RunConfig:
        """The configuration of one run. Rules that would end it early are dropped, but for the number of steps, which
        schedules are relative to; nothing is evaluated."""
        arguments = f'{{"seconds": {self.seconds}, "target": {"null" if self.target is None else self.target}}}'
        ending = f"fever.scaling.warmup:StopWhenMeasured={arguments}"
        stop = Stop(seconds=self.longest, steps=self.config.stop.steps, window=self.config.stop.window)
        changes: dict[str, Any] = {
            "runs": str(folder), "name": self.name(count, round_number), "stop": stop, "eval_every": None,
            "callbacks": (*self.config.callbacks, ending), "seed": self.config.seed + round_number - 1,
        }  # fmt: skip
        return self.config.model_copy(update=changes | ({WORKERS: count} if self.kind == WORKERS else {}))

    def words(self, count: int) -> list[str]:
        """The options that say where one run trains."""
        place = self.place | ({} if self.kind == WORKERS else {self.kind: count})
        return [word for name, value in place.items() for word in (f"--{name.replace('_', '-')}", str(value))]

    @property
    def duration(self) -> float:
        """About how many seconds all of it takes, without waiting in queues."""
        start = START_SECONDS[NODES if self.elsewhere and self.kind == WORKERS else self.kind]
        return len(self.counts) * self.rounds * (start + WARM_SECONDS + self.seconds)


@dataclass(frozen=True)
class Measurement:
    """What one run was like, after its warm-up; with a `problem`, one sentence, it counts for nothing."""

    count: int
    round: int
    run: str  # name of the run directory
    problem: str | None = None
    workers: int = 0
    seconds: float = 0.0  # that were measured
    samples_per_second: float = math.nan
    updates_per_second: float | None = None  # None: not counted by the algorithm
    samples_per_iteration: float = math.nan
    shares: dict[str, float] = field(default_factory=dict)  # of the time, by the metric's name; empty: not known
    target_seconds: float | None = None  # until the target return was reached
    note: str | None = None


def measure(plan: Plan, folder: Path, say: Callable[[str], None]) -> Iterator[Measurement]:
    """Run all counts in turn, round after round. A count that has failed is not run again."""
    failed: set[int] = set()
    for round_number in range(1, plan.rounds + 1):
        for count in plan.counts:
            if count in failed:
                continue
            found = _train(plan, count, round_number, folder)
            if found.problem is not None:
                failed.add(count)
            say(f"round {round_number} of {plan.rounds}, {counted(plan.kind, count)}: {_in_short(found)}")
            yield found


def counted(kind: str, count: int) -> str:
    """`1 worker`, `4 hosts`."""
    return f"{count} {kind[:-1] if count == 1 else kind}"


def _in_short(found: Measurement) -> str:
    return found.problem or f"{found.samples_per_second:,.0f} samples/s" + (f"; {found.note}" if found.note else "")


def _train(plan: Plan, count: int, round_number: int, folder: Path) -> Measurement:
    """One run, from the beginning to its end."""
    config = plan.run_config(count, round_number, folder)
    name = plan.name(count, round_number)
    with tempfile.TemporaryDirectory(prefix="fever-") as place:
        file = Path(place) / "run.yaml"
        write_atomically(file, to_yaml(config))
        problem = _call(plan, ["train", "-f", str(file), *plan.words(count), "--quiet", "--json"], folder / name)
    if problem is not None:
        return Measurement(count, round_number, name, problem)
    try:
        return read(plan, count, round_number, folder / name)
    except FeverError as error:
        return Measurement(count, round_number, name, str(error))


def _call(plan: Plan, words: list[str], run: Path) -> str | None:
    """Call the command line; returns a sentence if it failed. Ctrl-C ends the run, elsewhere too, and is raised."""
    command = [sys.executable, "-P", "-m", "fever", *words]
    streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
    process = system.start(command, os.environ, start_new_session=True, **streams)
    try:
        limit = None if plan.elsewhere else plan.longest + GRACE_SECONDS  # a queue may be long
        errors = process.communicate(timeout=limit)[1].decode(errors="replace").strip().splitlines()
    except subprocess.TimeoutExpired:
        return f"it did not end within {format_duration(plan.longest + GRACE_SECONDS)}"
    except KeyboardInterrupt:
        if plan.elsewhere:
            _stop_job(run)
        raise
    finally:
        system.end(process, STOP_SECONDS)
        if process.stderr is not None:
            process.stderr.close()
    if process.returncode == 0:
        return None
    log = (JobFolder.of(run).read_text(LOG) or "").splitlines() if plan.elsewhere else []
    return _last_words(log) or _last_words(errors) or f"it ended with exit code {process.returncode}"


def _last_words(lines: list[str]) -> str | None:
    """The sentence with which a command ended, out of what it printed; None if there is none."""
    own = [line.removeprefix("fever: ") for line in lines if line.startswith("fever: ")]
    return shorten(one_line(own[-1]), 1000) if own else None


def _stop_job(run: Path) -> None:
    """Have a job elsewhere save and stop; it would train on without whoever submitted it."""
    command = [sys.executable, "-P", "-m", "fever", "stop", str(run.resolve())]
    try:
        subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, timeout=STOP_JOB_SECONDS)
    except subprocess.TimeoutExpired:
        return


def read(plan: Plan, count: int, round_number: int, path: Path) -> Measurement:
    """What a run directory says of a run that has ended. Raises FeverError if it is damaged."""
    run = Run(path)
    rows, summary = run.metrics(), run.summary or {}
    place = f"{path.name} ended after {format_duration(float(summary.get('seconds') or 0))}"
    warm = _warm_rows(rows)
    if len(warm) < 2:
        return Measurement(count, round_number, path.name, f"{place}, before it was warm; raise --longest")
    first, last = warm[0], warm[-1]
    seconds, samples = last["seconds"] - first["seconds"], last["steps"] - first["steps"]
    if seconds <= 0 or samples <= 0:
        raise FeverError(f"{path.name} has no samples after its warm-up")
    hosts = summary.get("hosts") or {}
    if plan.kind in (NODES, HOSTS) and len(hosts) != count:
        return Measurement(count, round_number, path.name, f"it sampled on {counted(HOSTS, len(hosts))} only")
    updates = column(warm[1:], "updates")
    return Measurement(
        count, round_number, path.name,
        workers=int(summary.get("workers") or 0),
        seconds=seconds,
        samples_per_second=samples / seconds,
        updates_per_second=None if np.isnan(updates).any() else float(updates.sum()) / seconds,
        samples_per_iteration=samples / (len(warm) - 1),
        shares=_shares(warm),
        target_seconds=_seconds_to(plan.target, rows, run.config.stop.window),
        note=None if seconds >= 0.9 * plan.seconds else f"measured for {format_duration(round(seconds, 1))} only",
    )  # fmt: skip


def _warm_rows(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The last row of the warm-up and all rows after it; empty if the run never was warm."""
    warmup = WarmUp()
    needed = ("seconds", "steps", "episodes")
    whole = [row for row in rows if all(isinstance(row.get(name), (int, float)) for name in needed)]
    return next((whole[place:] for place, row in enumerate(whole) if warmup.ends_with(row)), [])


def _shares(warm: list[dict[str, Any]]) -> dict[str, float]:
    """Shares of the time, over all iterations, the longer ones counting for more; empty if one is not known."""
    lengths = np.diff(column(warm, "seconds"))
    shares = {name: float(np.average(column(warm[1:], name), weights=lengths)) for name in PHASES}
    return {} if any(math.isnan(share) for share in shares.values()) else shares


def _seconds_to(target: float | None, rows: list[dict[str, Any]], window: int) -> float | None:
    """Seconds from the first row until the mean return reached the target; None if it never did."""
    if target is None or not rows:
        return None
    reached = (row["seconds"] - rows[0]["seconds"] for row in rows if reaches(row, target, window))
    return next(reached, None)
