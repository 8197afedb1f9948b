"""Plots of runs, drawn from their directories alone, also while a run trains."""

from __future__ import annotations

import io
import math
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter

from fever import layout
from fever.errors import FeverError
from fever.runs.run import Run
from fever.text import INFO_PREFIX, PHASES

MOST_REPORTED = 8  # panels of metrics that environments report
COLOURS = ("#0b6e99", "#d9480f", "#2b8a3e", "#862e9c", "#c92a2a", "#5c940d", "#1864ab", "#495057")


class Curves(Figure):
    """A figure that a notebook shows as the value of a cell, without pyplot, which would keep it and show it twice."""

    def _repr_png_(self) -> bytes:
        file = io.BytesIO()
        self.savefig(file, format="png", dpi=80)
        return file.getvalue()


def plot(runs: list[Run], path: Path) -> Path:
    """Draw runs into a file (.png, .svg, .pdf) and return its path."""
    save(draw(runs), path)
    return path


def save(figure: Figure, path: Path) -> None:
    """Write a figure; raises `FeverError` if that is not possible."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=120)
    except (ValueError, OSError) as error:
        raise FeverError(f"{path} cannot be written: {error}") from error


def draw(runs: list[Run]) -> Curves:
    """Draw return, speed, learning curves and what environments report, of one or more runs over environment steps."""
    if not runs:
        raise FeverError("name at least one run to plot")
    curves = [run.curves() for run in runs]
    for run, curve in zip(runs, curves, strict=True):
        if not curve and (run.path / layout.TRIALS).is_dir():
            raise FeverError(
                f"{run.path} is a search: its picture is {layout.PICTURE} in it, its runs are in {layout.TRIALS}/"
            )
        if not curve:
            raise FeverError(f"{run.path} has no metrics yet")
    panels = _panels(curves)
    rows = math.ceil(len(panels) / 2)
    figure = Curves(figsize=(11, 3.25 * rows), layout="constrained")
    grid = figure.subplots(rows, 2, squeeze=False)
    axes = dict(zip(panels, grid.flat, strict=False))
    for place, (run, curve) in enumerate(zip(runs, curves, strict=True)):
        colour = COLOURS[place % len(COLOURS)]
        _draw_returns(axes["return"], run, curve, colour, alone=len(runs) == 1)
        for name in panels.keys() & curve.keys():
            axes[name].plot(curve["steps"], smooth(curve[name]), color=colour)
    if "time" in panels:
        _draw_phases(axes["time"], curves[0])
    for name, axis in axes.items():
        axis.set_title(panels[name], loc="left", fontsize=11)
        axis.set_xlabel("environment steps")
        axis.xaxis.set_major_formatter(EngFormatter())
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
    for axis in grid.flat[len(panels) :]:
        axis.set_visible(False)
    axes["steps_per_second"].set_ylim(bottom=0)
    axes["steps_per_second"].yaxis.set_major_formatter(EngFormatter())
    axes["return"].legend(frameon=False, fontsize=9)
    figure.suptitle(_title(runs), x=0.01, ha="left", fontsize=13, fontweight="bold")
    return figure


def _panels(curves: list[dict[str, np.ndarray]]) -> dict[str, str]:
    """Metric, or "return" and "time" -> title, of what these runs have."""
    names = dict.fromkeys(name for curve in curves for name in curve)
    panels = {"return": "return per episode", "steps_per_second": "steps per second"}
    if "entropy" in names:
        panels["entropy"] = "policy entropy"
    if len(curves) > 1 and "explained_variance" in names:
        panels["explained_variance"] = "explained variance of the value"
    elif len(curves) == 1 and PHASES.keys() & names:  # not every algorithm measures them
        panels["time"] = "where the time goes"
    reported = [name for name in names if name.startswith(INFO_PREFIX)]
    return panels | {name: name.removeprefix(INFO_PREFIX) for name in reported[:MOST_REPORTED]}


def _title(runs: list[Run]) -> str:
    configs = [run.config for run in runs]
    names = " and ".join(dict.fromkeys(config.env for config in configs))
    return f"{names} · {', '.join(dict.fromkeys(config.algo for config in configs))}"


def _draw_returns(axis: Any, run: Run, curve: dict[str, np.ndarray], colour: str, alone: bool) -> None:
    episodes = run.episodes()
    if alone and episodes:
        points = np.array([(row["steps"], row["return"]) for row in episodes])
        picks = np.linspace(0, len(points) - 1, min(len(points), 4000)).astype(int)
        axis.scatter(*points[picks].T, s=3, color=colour, alpha=0.25, linewidths=0, label="one episode")
    if "return_mean" in curve:
        label = f"mean of the last {run.config.stop.window}" if alone else run.path.name
        axis.plot(curve["steps"], curve["return_mean"], color=colour, linewidth=1.8, label=label)
    _draw_evaluations(axis, run, colour, alone)
    goal = run.config.stop.reward
    if alone and goal is not None:
        axis.axhline(goal, color="#868e96", linestyle="--", linewidth=1, label=f"goal {goal:g}")


def _draw_evaluations(axis: Any, run: Run, colour: str, alone: bool) -> None:
    """The mean of every evaluation; for a single run with the 95 % interval."""
    rows = run.evaluations()
    if not rows:
        return
    steps, means = ([row[name] for row in rows] for name in ("steps", "return_mean"))
    label = f"evaluation, {len(rows[-1]['returns'])} episodes" if alone else f"{run.path.name}, evaluation"
    own = COLOURS[1] if alone else colour
    axis.plot(steps, means, color=own, linewidth=1.4, linestyle="--", marker="o", markersize=3, label=label)
    if alone:
        bounds = [row["return_interval"] or (row["return_mean"],) * 2 for row in rows]
        axis.fill_between(steps, *zip(*bounds, strict=True), color=own, alpha=0.15, linewidth=0)


def _draw_phases(axis: Any, curve: dict[str, np.ndarray]) -> None:
    names = [name for name in PHASES if name in curve]
    shares = np.stack([smooth(curve[name]) for name in names])
    if np.nanmax(shares.sum(0)) > 1.02:  # workers and learner were busy at the same time
        for name, share, colour in zip(names, shares, COLOURS, strict=False):
            axis.plot(curve["steps"], share, color=colour, label=PHASES[name])
    else:
        axis.stackplot(curve["steps"], shares, labels=[PHASES[name] for name in names], colors=COLOURS, alpha=0.8)
    axis.set_ylim(0, 1)
    axis.legend(fontsize=9, loc="lower right", framealpha=0.85, edgecolor="none")


def smooth(values: np.ndarray, points: int = 60) -> np.ndarray:
    """A moving mean [n] of a curve [n] over windows of n/`points` values. Missing values and places beyond the
    ends are left out of a window; NaN where it has no value."""
    kernel, known = np.ones(max(1, len(values) // points)), np.isfinite(values)
    total, count = (np.convolve(part, kernel, "same") for part in (np.where(known, values, 0.0), known.astype(float)))
    return np.divide(total, count, out=np.full(len(values), np.nan), where=count > 0)
