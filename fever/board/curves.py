"""Metrics, episodes and means over seeds as columns, thinned to as many points as a screen can show."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from fever import layout
from fever.board.values import number, numbers, text
from fever.errors import FeverError
from fever.experiments.scores import AXES, one_per_seed, read_curve
from fever.experiments.scores import grid as common_grid
from fever.runs.run import Run, column
from fever.runs.window import window

COUNTERS = ("iteration", "steps", "episodes", "seconds")  # any of them can be on the x axis
MOST_POINTS = 20_000  # of a curve
MOST_NAMES = 100  # metrics, or scalars of environments, in one answer
SMALL_ARCHIVE = 1 << 20  # bytes, compressed; of a larger one some episodes are read
MOST_RUNS = 200  # of a mean


def series(
    run: Run, names: Sequence[str], x: str, low: float | None, high: float | None, points: int
) -> dict[str, Any]:
    """Metrics over the counters, from `low` to `high` in units of `x`."""
    if x not in COUNTERS:
        raise FeverError(f"x must be one of {', '.join(COUNTERS)}")
    chosen = tuple(names)[:MOST_NAMES]
    wanted = {*COUNTERS, *chosen}.__contains__
    path = run.path / layout.METRICS
    rows, exact = window(path, "iteration", x, low, high, _bounded(points), wanted)
    return {
        "exact": exact, "x": {name: numbers(column(rows, name)) for name in COUNTERS},
        "y": {name: numbers(column(rows, name)) for name in chosen},
    }  # fmt: skip


def episodes(run: Run, names: Sequence[str], low: float | None, high: float | None, points: int) -> dict[str, Any]:
    """Episodes that ended from `low` to `high` steps, with scalars that their environments reported."""
    wanted = {"episode", "steps", "return", "length", "worker", "info"}.__contains__
    points = _bounded(points)
    rows, exact = window(run.path / layout.EPISODES, "episode", "steps", low, high, points, wanted)
    archive = run.path / layout.OLD_EPISODES
    first = number(rows[0].get("steps")) if rows else None
    if archive.is_file() and (low is None or first is None or first > low):
        small = archive.stat().st_size <= SMALL_ARCHIVE  # it can be read from its beginning only
        older = [row for row in run.episodes(None if small else points, wanted) if _within(row, low, high)]
        rows, exact = (
            older[:: max(1, len(older) // points)] if small else older,
            exact and small and len(older) <= points,
        )
    return {"exact": exact, **columns_of(rows, names)}


def columns_of(rows: list[dict[str, Any]], names: Sequence[str]) -> dict[str, Any]:
    """Rows of episodes as columns."""
    infos = [row["info"] if isinstance(row.get("info"), dict) else {} for row in rows]
    found = {name: numbers(column(rows, name)) for name in ("episode", "steps", "return", "length", "worker")}
    return {**found, "info": {text(name, 200): numbers(column(infos, name)) for name in names[:MOST_NAMES]}}


def _within(row: dict[str, Any], low: float | None, high: float | None) -> bool:
    steps = number(row.get("steps"))
    return steps is not None and (low is None or steps >= low) and (high is None or steps <= high)


def group(runs: Sequence[Run], metric: str, x: str) -> dict[str, Any]:
    """The mean of some runs at common places, and its 95 % interval by bootstrap. Runs that repeat a seed of the same
    experiment count once, as in `fever compare`."""
    from fever.experiments import statistics  # SciPy takes half a second to import

    axis = {seconds: name for name, seconds in AXES.items()}.get(x, x)
    if axis not in AXES:
        raise FeverError(f"x must be one of {', '.join(AXES.values())}")
    found = [read_curve(run, metric, axis) for run in runs[:MOST_RUNS]]
    curves = one_per_seed([curve for curve in found if curve is not None], [])
    if not curves:
        return {"x": [], "mean": [], "low": None, "high": None, "runs": 0}
    places = common_grid(curves)
    values = np.stack([curve.at(places) for curve in curves])
    interval = statistics.band(values)
    low, high = (None, None) if interval is None else map(numbers, interval)
    return {"x": numbers(places), "mean": numbers(values.mean(0)), "low": low, "high": high, "runs": len(curves)}


def _bounded(points: int) -> int:
    return min(max(points, 2), MOST_POINTS)
