"""Pictures of runs, from their directories alone: they work live, after a crash and on a fetched copy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from fever import layout
from fever.errors import FeverError
from fever.runs.run import Run
from fever.text import PHASES

COLOURS = ("#0b6e99", "#d9480f", "#2b8a3e", "#862e9c", "#c92a2a", "#5c940d", "#1864ab", "#495057")


def plot(runs: list[Run], path: Path) -> Path:
    """Draw return, speed and learning curves of one or more runs over environment steps."""
    curves = [run.curves() for run in runs]
    for run, curve in zip(runs, curves, strict=True):
        if not curve and (run.path / layout.TRIALS).is_dir():
            raise FeverError(
                f"{run.path} is a search: its picture is {layout.PICTURE} in it, its runs are in {layout.TRIALS}/"
            )
        if not curve:
            raise FeverError(f"{run.path} has no metrics yet")
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(2, 2, figsize=(11, 6.5), layout="constrained")
    for place, (run, curve) in enumerate(zip(runs, curves, strict=True)):
        colour = COLOURS[place % len(COLOURS)]
        _draw_returns(axes[0, 0], run, curve, colour, alone=len(runs) == 1)
        axes[0, 1].plot(curve["steps"], smooth(curve["steps_per_second"]), color=colour)
        if "entropy" in curve:
            axes[1, 0].plot(curve["steps"], smooth(curve["entropy"]), color=colour, label=run.path.name)
        if len(runs) > 1 and "explained_variance" in curve:
            axes[1, 1].plot(curve["steps"], smooth(curve["explained_variance"]), color=colour)
    titles = ["return per episode", "steps per second", "policy entropy", "explained variance of the value"]
    if len(runs) == 1:
        _draw_phases(axes[1, 1], curves[0])
        titles[3] = "where the time goes"
    for axis, title in zip(axes.flat, titles, strict=True):
        axis.set_title(title, loc="left", fontsize=11)
        axis.set_xlabel("environment steps")
        axis.xaxis.set_major_formatter(matplotlib.ticker.EngFormatter())
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0, 1].set_ylim(bottom=0)
    axes[0, 1].yaxis.set_major_formatter(matplotlib.ticker.EngFormatter())
    axes[0, 0].legend(frameon=False, fontsize=9)
    figure.suptitle(_title(runs), x=0.01, ha="left", fontsize=13, fontweight="bold")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=120)
    except (ValueError, OSError) as error:
        raise FeverError(f"{path} cannot be written: {error}") from error
    finally:
        pyplot.close(figure)
    return path


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
    goal = run.config.stop.reward
    if alone and goal is not None:
        axis.axhline(goal, color="#868e96", linestyle="--", linewidth=1, label=f"goal {goal:g}")


def _draw_phases(axis: Any, curve: dict[str, np.ndarray]) -> None:
    names = [name for name in PHASES if name in curve]
    if not names:  # not every algorithm measures them
        return
    shares = np.stack([smooth(curve[name]) for name in names])
    axis.stackplot(curve["steps"], shares, labels=[PHASES[name] for name in names], colors=COLOURS, alpha=0.8)
    axis.set_ylim(0, 1)
    axis.legend(fontsize=9, loc="lower right", framealpha=0.85, edgecolor="none")


def smooth(values: np.ndarray, points: int = 60) -> np.ndarray:
    """A moving mean over about 1/`points` of the curve, with the same length; edges use what there is, and so do places
    where values are missing. NaN where all are."""
    kernel, known = np.ones(max(1, len(values) // points)), np.isfinite(values)
    total, count = (np.convolve(part, kernel, "same") for part in (np.where(known, values, 0.0), known.astype(float)))
    return np.divide(total, count, out=np.full(len(values), np.nan), where=count > 0)
