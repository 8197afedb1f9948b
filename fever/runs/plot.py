"""Plots of runs, drawn from their directories alone, also while a run trains."""

from __future__ import annotations

import io
import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from fever import layout
from fever.errors import FeverError
from fever.runs.run import Run, column
from fever.text import INFO_PREFIX, PHASES, clean, one_line

try:
    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.ticker import EngFormatter
except (ValueError, OSError) as error:  # it reads a file matplotlibrc in the working folder
    raise FeverError(f"matplotlib cannot be imported: {one_line(str(error))}; is there a bad matplotlibrc?") from error

POINTS = 4000  # of a curve, and of the cloud of episodes; a long run has more rows
MOST_REPORTED = 8  # panels of metrics that environments report
RESOLUTION = 200  # pixels per inch; 320 in a column of a paper, 3.5 inches wide
ENDINGS = (".png", ".svg", ".pdf")  # kinds of files that are written
UNDATED = {".svg": {"Date": None}, ".pdf": {"CreationDate": None}}  # the same runs make the same file
FILES: Any = {"svg.fonttype": "none", "svg.hashsalt": "fever", "pdf.fonttype": 42}  # text stays text
# Okabe & Ito 2008, "Color universal design": told apart by everyone. Yellow, which white paper swallows, is left out.
BLUE, VERMILION, GREEN, PURPLE, ORANGE, SKY = "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9"
COLOURS = (BLUE, VERMILION, GREEN, PURPLE, ORANGE, SKY, "#000000")
GREY = "#868e96"


class Curves(Figure):
    """A figure that a notebook shows as the value of a cell, without pyplot, which would keep it and show it twice."""

    def _repr_png_(self) -> bytes:
        file = io.BytesIO()
        with drawing():
            self.savefig(file, format="png", dpi=80)
        return file.getvalue()


def plot(runs: list[Run], path: Path) -> Path:
    """Draw runs into a file (.png, .svg, .pdf) and return its path."""
    save(draw(runs), path)
    return path


def check_picture(path: Path) -> None:
    """Refuse a kind of file that is not written; matplotlib would choose another name."""
    if path.suffix.lower() not in ENDINGS:
        raise FeverError(f"{path}: a picture is written as .png, .svg or .pdf")


def save(figure: Figure, path: Path) -> None:
    """Write a figure; raises `FeverError` if that is not possible."""
    check_picture(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with drawing():
            figure.savefig(path, dpi=RESOLUTION, metadata=UNDATED.get(path.suffix.lower()))
    except (ValueError, OSError) as error:
        why = getattr(error, "strerror", None) or one_line(str(error))
        raise FeverError(f"{path} cannot be written: {why}") from error


@contextmanager
def drawing() -> Iterator[None]:
    """A block that draws with Matplotlib's defaults, whatever a matplotlibrc in the working folder says, and without
    its warnings, which quote the text that is drawn. Numbers that no picture can show are a `FeverError`."""
    with matplotlib.rc_context(), warnings.catch_warnings():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(FILES)
        warnings.simplefilter("ignore")
        try:
            yield
        except (ArithmeticError, RecursionError, MemoryError) as error:
            what = f"{type(error).__name__}: {one_line(str(error))}"
            raise FeverError(f"this cannot be drawn ({what}): a file of the run is damaged") from error


def entitle(axis: Any, title: str) -> None:
    """Give a panel its title. It may be anybody's: a title is no formula."""
    axis.set_title(clean(title), loc="left", fontsize=11, parse_math=False)


def explain(axis: Any, **style: Any) -> None:
    """Give a panel the legend of its labels, which may be anybody's and are no formulas."""
    legend = axis.legend(**style)
    for text in legend.get_texts():
        text.set_parse_math(False)
        text.set_text(clean(text.get_text()))


def headline(figure: Figure, title: str) -> None:
    """Give a figure its title, which is no formula."""
    figure.suptitle(clean(title), x=0.01, ha="left", fontsize=13, fontweight="bold", parse_math=False)


def draw(runs: list[Run]) -> Curves:
    """Draw return, speed, learning curves and what environments report, of one or more runs over environment steps."""
    if not runs:
        raise FeverError("name at least one run to plot")
    wanted = _drawn_metrics()
    curves = [run.curves(POINTS, wanted) for run in runs]
    for run, curve in zip(runs, curves, strict=True):
        if not curve and (run.path / layout.TRIALS).is_dir():
            raise FeverError(
                f"{run.path} is a search: its picture is {layout.PICTURE} in it, its runs are in {layout.TRIALS}/"
            )
        if not curve:
            raise FeverError(f"{run.path} has no metrics yet")
        if "steps" not in curve:
            raise FeverError(f"{run.path / layout.METRICS} is damaged: its rows have no steps")
    with drawing():
        return _draw(runs, curves)


def _drawn_metrics() -> Callable[[str], bool]:
    """Whether a metric is drawn: of those that environments report, the first ones that are asked for."""
    fixed = {"steps", "return_mean", "steps_per_second", "entropy", "explained_variance", *PHASES}
    reported: set[str] = set()

    def wanted(name: str) -> bool:
        if name.startswith(INFO_PREFIX) and len(reported) < MOST_REPORTED:
            reported.add(name)
        return name in fixed or name in reported

    return wanted


def _draw(runs: list[Run], curves: list[dict[str, np.ndarray]]) -> Curves:
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
        entitle(axis, panels[name])
        axis.set_xlabel("environment steps")
        axis.xaxis.set_major_formatter(EngFormatter(sep=""))
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
    for axis in grid.flat[len(panels) :]:
        axis.set_visible(False)
    axes["steps_per_second"].set_ylim(bottom=0)
    axes["steps_per_second"].yaxis.set_major_formatter(EngFormatter(sep=""))
    explain(axes["return"], frameon=False, fontsize=9)
    headline(figure, _title(runs))
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
    episodes = run.episodes(POINTS, {"steps", "return"}.__contains__) if alone else []
    if episodes:
        points = np.stack([column(episodes, name) for name in ("steps", "return")], 1)
        picks = np.linspace(0, len(points) - 1, min(len(points), POINTS)).astype(int)
        axis.scatter(*points[picks].T, s=3, color=colour, alpha=0.25, linewidths=0, label="one episode")
    if "return_mean" in curve:
        label = f"mean of the last {run.config.stop.window}" if alone else run.path.name
        axis.plot(curve["steps"], curve["return_mean"], color=colour, linewidth=1.8, label=label)
    _draw_evaluations(axis, run, colour, alone)
    goal = run.config.stop.reward
    if alone and goal is not None:
        axis.axhline(goal, color=GREY, linestyle="--", linewidth=1, label=f"goal {goal:g}")


def _draw_evaluations(axis: Any, run: Run, colour: str, alone: bool) -> None:
    """The mean of every evaluation; for a single run with the 95 % interval."""
    rows = run.evaluations({"steps", "return_mean", "return_interval"}.__contains__)
    if not rows:
        return
    steps, means = column(rows, "steps"), column(rows, "return_mean")
    label = f"evaluation, {run.config.eval_episodes} episodes" if alone else f"{run.path.name}, evaluation"
    own = COLOURS[1] if alone else colour
    axis.plot(steps, means, color=own, linewidth=1.4, linestyle="--", marker="o", markersize=3, label=label)
    if alone:
        pairs = [row.get("return_interval") for row in rows]
        known = [dict(zip(("low", "high"), pair, strict=False)) if isinstance(pair, list) else {} for pair in pairs]
        axis.fill_between(steps, column(known, "low"), column(known, "high"), color=own, alpha=0.15, linewidth=0)


def _draw_phases(axis: Any, curve: dict[str, np.ndarray]) -> None:
    names = [name for name in PHASES if name in curve]
    shares = np.stack([smooth(curve[name]) for name in names])
    if np.nanmax(shares.sum(0)) > 1.02:  # workers and learner were busy at the same time
        for name, share, colour in zip(names, shares, COLOURS, strict=False):
            axis.plot(curve["steps"], share, color=colour, label=PHASES[name])
    else:
        axis.stackplot(curve["steps"], shares, labels=[PHASES[name] for name in names], colors=COLOURS, alpha=0.8)
    axis.set_ylim(0, 1)
    axis.set_ylabel("share of the time")
    explain(axis, fontsize=9, loc="lower right", framealpha=0.85, edgecolor="none")


def smooth(values: np.ndarray, points: int = 60) -> np.ndarray:
    """A moving mean [n] of a curve [n] over windows of n/`points` values. Missing values and places beyond the
    ends are left out of a window; NaN where it has no value."""
    kernel, known = np.ones(max(1, len(values) // points)), np.isfinite(values)
    total, count = (np.convolve(part, kernel, "same") for part in (np.where(known, values, 0.0), known.astype(float)))
    return np.divide(total, count, out=np.full(len(values), np.nan), where=count > 0)
