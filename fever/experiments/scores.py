"""What runs are compared by: their learning curves, the score at a number of steps, and the mean until then.

A curve is made of straight lines between the rows of a metric. Before its first row it has the value of that row. A run
that stopped because it reached its goal (`stop.reward`) keeps its last value from there on, as in the score of a search
(`fever.tune.score`); curves of other runs end with their last row.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

from fever.errors import FeverError
from fever.runs.groups import experiment_of
from fever.runs.run import Run, column

POINTS = 4000  # rows of a run that are read; a long run has more
GRID = 200  # points at which curves are averaged
TRAINING, EVALUATION = "return_mean", "eval/return_mean"  # metrics that are scores
AXES = {"steps": "steps", "time": "seconds", "episodes": "episodes"}  # what is on the x axis -> its metric
MISSING = {TRAINING: "finished episode", EVALUATION: "evaluation"}  # what a run without the metric does not have
PREFIX = "eval/"
LARGEST = 1e60  # number that is used, whose fourth power is a number too; a damaged row may have any


@dataclass(frozen=True)
class Curve:
    """A metric of one run over steps, seconds or episodes."""

    run: Run
    x: np.ndarray  # [n], increasing
    y: np.ndarray  # [n], finite
    complete: bool  # it stopped at its goal, and keeps its last value

    @property
    def end(self) -> float:
        return float(self.x[-1])

    def at(self, places: np.ndarray) -> np.ndarray:
        """Its values at these places, [m] -> [m]."""
        return np.interp(places, self.x, self.y)

    def mean_until(self, end: float) -> float:
        """The area under it from 0 to `end`, divided by `end`."""
        inside = self.x[(self.x > 0) & (self.x < end)]
        places = np.concatenate([[0.0], inside, [end]])
        return float(np.trapezoid(self.at(places), places) / end) if end > 0 else float(self.y[0])


def read_curve(run: Run, metric: str, axis: str = "steps") -> Curve | None:
    """The curve of a run; None if it has no value of the metric yet. Rows that cannot be used are left out."""
    field = AXES[axis]
    if metric.startswith(PREFIX) and axis == "steps":  # also those whose rows of metrics are left out by now
        rows = run.evaluations({field, metric.removeprefix(PREFIX)}.__contains__)
        x, y = column(rows, field), column(rows, metric.removeprefix(PREFIX))
    else:
        rows = run.metrics(POINTS, {field, metric}.__contains__)
        x, y = column(rows, field), column(rows, metric)
    usable = (np.abs(x) < LARGEST) & (np.abs(y) < LARGEST)  # not NaN either
    x, y = x[usable], y[usable]
    rising = np.diff(np.maximum.accumulate(x), prepend=-1.0) > 0 if len(x) else usable[usable]
    if not rising.any():
        return None
    summary = run.summary or {}
    complete = summary.get("stop_reason") == "reward" and metric in (TRAINING, EVALUATION)
    return Curve(run, x[rising], y[rising], complete)


def read_curves(runs: Sequence[Run], metric: str, notes: list[str], axis: str = "steps") -> list[Curve]:
    """The curves of some runs; those without one, and damaged ones, are left out with a note."""
    curves = []
    for run in runs:
        try:
            curve = read_curve(run, metric, axis)
        except FeverError as error:
            notes.append(f"left out: {error}")
            continue
        if curve is None:
            notes.append(f"left out: {run.path} has no {MISSING.get(metric, metric)} yet")
        else:
            curves.append(curve)
    return curves


def one_per_seed(curves: Sequence[Curve], notes: list[str]) -> list[Curve]:
    """The curves in their order, without those of runs that repeat another one: runs of one experiment with one seed
    are a single sample, however many they are. The longest of them stays; notes say what is left out."""
    kept: dict[tuple[str, int], Curve] = {}
    for curve in sorted(curves, key=lambda curve: (curve.complete, curve.end), reverse=True):
        key = experiment_of(curve.run.config), curve.run.config.seed
        if kept.setdefault(key, curve) is not curve:
            notes.append(f"left out: {curve.run.path} has the same seed as {kept[key].run.path}, and the same settings")
    stay = {id(curve) for curve in kept.values()}
    return [curve for curve in curves if id(curve) in stay]


def metric_names(runs: Collection[Run]) -> list[str]:
    """The metrics that the last rows of some runs have."""
    return list(dict.fromkeys(name for run in runs for name in run.last_row()))


def common_metric(runs: Sequence[Run]) -> str:
    """The score that all runs have: the evaluations' if all were evaluated, or else that of training's episodes."""
    return EVALUATION if runs and all(run.config.eval_every is not None for run in runs) else TRAINING


def horizon(curves: Collection[Curve]) -> float:
    """How far all curves reach. Those that are complete reach any distance; if all are, to the end of the longest."""
    limited = [curve.end for curve in curves if not curve.complete]
    if not curves:
        raise FeverError("there is no curve")
    return min(limited) if limited else max(curve.end for curve in curves)


def grid(curves: Collection[Curve]) -> np.ndarray:
    """Places at which curves are averaged: from where all have begun to where the first one ends, [m]."""
    begin, end = max(float(curve.x[0]) for curve in curves), horizon(curves)
    return np.linspace(begin, end, GRID) if begin < end else np.array([end])
