"""Learning curves over seeds for a paper: a mean with its band for each value of a setting, in one panel or a grid."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from fever.errors import FeverError
from fever.experiments import statistics
from fever.experiments.compare import Scale
from fever.experiments.scores import AXES, EVALUATION, TRAINING, Curve, grid, metric_names, one_per_seed, read_curves
from fever.experiments.values import Values
from fever.runs.plot import COLOURS, GREY, Curves, drawing, entitle, explain, headline
from fever.runs.run import Run
from fever.text import clean, shorten

STYLES = ("-", "--", "-.", ":")  # of the next seven groups, and so on
MOST_GROUPS = len(COLOURS) * len(STYLES)  # that can be told apart
MOST_PANELS = 100
LONGEST_TITLE = 100  # characters
FAINT = 12  # runs, up to which those of a single group are drawn one by one behind their mean
SPEED = "steps_per_second"
LABELS = {
    TRAINING: "return per episode",
    EVALUATION: "return in evaluations",
    SPEED: "steps per second",
    "length_mean": "steps per episode",
}
TIME_UNITS = ((7200.0, 3600.0, "h"), (300.0, 60.0, "min"), (0.0, 1.0, "s"))  # from so many seconds on: seconds, unit
Cell = tuple[str, str]  # the values of row and column


@dataclass(frozen=True)
class Look:
    """What a picture shows of its runs, by names of settings."""

    by: str = "experiment"  # one curve for each value
    rows: str | None = None  # one row of panels for each value
    columns: str | None = None
    metric: str = TRAINING
    x: str = "steps"
    scale: Scale = field(default_factory=dict)  # by which environments share a curve; empty: they do not


def draw(runs: Sequence[Run], look: Look) -> tuple[Curves, list[str]]:
    """Draw runs; returns the figure, and notes on runs that were left out. Raises `FeverError` if there is nothing."""
    notes: list[str] = []
    curves = _scaled(_read(runs, look, notes), look)
    look = _with_environments(curves, look)
    panels = {
        cell: {group: one_per_seed(some, notes) for group, some in panel.items()}
        for cell, panel in _panels(curves, look).items()
    }
    notes += _notes_on_gaps(panels, look)
    with drawing():
        return _draw(panels, look), notes


def _read(runs: Sequence[Run], look: Look, notes: list[str]) -> list[Curve]:
    if look.x not in AXES:
        raise FeverError(f"--x {look.x}: must be {', '.join(AXES)}")
    curves = read_curves(runs, look.metric, notes, look.x)
    if not curves:
        known = ", ".join(name for name in metric_names(runs) if name not in AXES.values())
        has = f"; the metrics are: {shorten(known, 600)}" if known else ""
        raise FeverError(f"no run has the metric {shorten(look.metric)} over {look.x}{has}")
    return curves


def _scaled(curves: list[Curve], look: Look) -> list[Curve]:
    """The curves on the scale of their environments, if there is one: its 0 and 1 are the scores that were given."""
    if not look.scale:
        return curves
    if look.metric not in (TRAINING, EVALUATION):
        raise FeverError(f"--scale is for returns; leave it out, or --metric {shorten(look.metric)}")
    envs = dict.fromkeys(curve.run.config.env for curve in curves)
    if unknown := [env for env in look.scale if env not in envs]:
        raise FeverError(f"--scale {unknown[0]}: it is not among the environments: {', '.join(envs)}")
    if missing := [env for env in envs if env not in look.scale]:
        raise FeverError(f"say which returns count as 0 and 1 in {missing[0]} as well: --scale {missing[0]}=0,500")
    ends = [look.scale[curve.run.config.env] for curve in curves]
    return [replace(curve, y=(curve.y - low) / (high - low)) for curve, (low, high) in zip(curves, ends, strict=True)]


def _with_environments(curves: Sequence[Curve], look: Look) -> Look:
    """The look with a column or row for each environment, if there are several: their returns have different units."""
    envs = dict.fromkeys(curve.run.config.env for curve in curves)
    if len(envs) == 1 or look.scale or "env" in (look.by, look.rows, look.columns):
        return look
    if look.columns is None:
        return replace(look, columns="env")
    if look.rows is None:
        return replace(look, rows="env")
    raise FeverError(f"these are runs in {', '.join(envs)}, whose scores have different units; draw one at a time")


def _panels(curves: Sequence[Curve], look: Look) -> dict[Cell, dict[str, list[Curve]]]:
    """(row, column) -> group -> its curves, all in order."""
    found: dict[Cell, dict[str, list[Curve]]] = {}
    values = Values([curve.run for curve in curves])
    named = {"--rows": look.rows, "--columns": look.columns, "--by": look.by}
    for option, name in named.items():
        if name is not None:
            values.require(name, option)
    keys = {
        id(curve): tuple(values.of(curve.run, name) if name is not None else "" for name in named.values())
        for curve in curves
    }
    for curve in sorted(curves, key=lambda curve: [in_order(value) for value in keys[id(curve)]]):
        row, column, group = keys[id(curve)]
        found.setdefault((row, column), {}).setdefault(group, []).append(curve)
    groups = {group for panel in found.values() for group in panel}
    if len(groups) > MOST_GROUPS:
        raise FeverError(f"{look.by} has {len(groups)} values, more than the {MOST_GROUPS} that can be told apart")
    if len({row for row, _ in found}) * len({column for _, column in found}) > MOST_PANELS:
        raise FeverError(f"that would be more than {MOST_PANELS} panels")
    return found


def _notes_on_gaps(panels: dict[Cell, dict[str, list[Curve]]], look: Look) -> list[str]:
    """Sentences on groups whose runs have nothing of the x axis in common, of which a point is drawn."""
    groups = ((group, curves) for panel in panels.values() for group, curves in panel.items())
    apart = [group for group, curves in groups if len(curves) > 1 and len(grid(curves)) == 1]
    return [f"{group}: one of its runs ends before all have begun over {look.x}: a point is drawn" for group in apart]


def in_order(value: str) -> tuple[int, float, str]:
    """A key that sorts numbers by their size, and before other values."""
    try:
        number = float(value)
    except ValueError:
        return 1, 0.0, value
    return (0, number, value) if number == number else (1, 0.0, value)


def _draw(panels: dict[Cell, dict[str, list[Curve]]], look: Look) -> Curves:
    rows = sorted({row for row, _ in panels}, key=in_order)
    columns = sorted({column for _, column in panels}, key=in_order)
    groups = sorted({group for panel in panels.values() for group in panel}, key=in_order)
    styles = {group: _style(place) for place, group in enumerate(groups)}
    alone = len(rows) == len(columns) == 1
    size = (5.6, 3.6) if alone else (2.7 * len(columns) + 0.8, 2.1 * len(rows) + 1.0)
    figure = Curves(figsize=size, layout="constrained")
    units: Any = "row" if look.rows == "env" else "col" if look.columns == "env" else True  # that panels share
    axes = figure.subplots(len(rows), len(columns), squeeze=False, sharex=units, sharey=units)
    unit = _unit(panels, look)
    for (row, column), panel in panels.items():
        axis = axes[rows.index(row), columns.index(column)]
        for group, curves in panel.items():
            _draw_group(axis, curves, styles[group], unit[0], look, faint=len(groups) == 1)
    _finish(axes, rows, columns, look, unit[1])
    for axis, cell in zip(axes.flat, ((row, column) for row in rows for column in columns), strict=True):
        if cell not in panels:
            axis.spines[:].set_visible(False)  # labels and numbers stay: they are those of its row and column
            axis.grid(False)
            axis.tick_params(color="none")
            axis.text(0.5, 0.5, "no run", transform=axis.transAxes, ha="center", color=GREY)
    _draw_legend(figure, axes[0, 0] if alone else None, panels, styles, look)
    headline(figure, _title(panels, look))
    return figure


def _style(place: int) -> dict[str, Any]:
    return {"color": COLOURS[place % len(COLOURS)], "linestyle": STYLES[place // len(COLOURS)]}


def _mean(curves: list[Curve], places: np.ndarray, look: Look) -> tuple[np.ndarray, np.ndarray | None]:
    """The mean of some curves, [m], and its 95 % interval, [2, m]; on a scale, the interquartile mean over all
    environments."""
    envs: dict[str, list[np.ndarray]] = {}
    for curve in curves:
        envs.setdefault(curve.run.config.env if look.scale else "", []).append(curve.at(places))
    strata = [np.stack(values) for values in envs.values()]
    if look.scale:
        return statistics.interquartile_mean([values.T for values in strata]), statistics.interquartile_band(strata)
    return strata[0].mean(0), statistics.band(strata[0])


def _draw_group(axis: Any, curves: list[Curve], style: dict[str, Any], unit: float, look: Look, faint: bool) -> None:
    """The mean of some curves, and the 95 % interval of that mean."""
    places = grid(curves)
    mean, interval = _mean(curves, places, look)
    if faint and 1 < len(curves) <= FAINT:
        for curve in curves:
            axis.plot(curve.x / unit, curve.y, color=style["color"], alpha=0.3, linewidth=0.7)
    if interval is not None:
        axis.fill_between(places / unit, *interval, color=style["color"], alpha=0.2, linewidth=0)
    marker = {"marker": "o", "markersize": 3} if len(places) == 1 else {}
    axis.plot(places / unit, mean, linewidth=1.6, **style, **marker)


def _unit(panels: dict[Cell, dict[str, list[Curve]]], look: Look) -> tuple[float, str]:
    """What values of the x axis are divided by, and its label."""
    if look.x != "time":
        return 1.0, {"steps": "environment steps", "episodes": "episodes"}[look.x]
    longest = max(curve.end for panel in panels.values() for curves in panel.values() for curve in curves)
    seconds, name = next((seconds, name) for least, seconds, name in TIME_UNITS if longest >= least)
    return seconds, f"training time in {name}"


def _finish(axes: Any, rows: list[str], columns: list[str], look: Look, label: str) -> None:
    from matplotlib.ticker import EngFormatter

    for axis in axes.flat:
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
        if look.x != "time":
            axis.xaxis.set_major_formatter(EngFormatter(sep=""))
        if look.metric == SPEED:
            axis.yaxis.set_major_formatter(EngFormatter(sep=""))
        axis.xaxis.get_major_locator().set_params(nbins=5)
        axis.tick_params(labelsize=9)
    for axis, value in zip(axes[0], columns, strict=True):
        if look.columns:
            entitle(axis, value if look.columns == "env" else f"{look.columns} {value}")
    for axis in axes[-1]:
        axis.set_xlabel(label, fontsize=10)
    for axis, value in zip(axes[:, 0], rows, strict=True):
        what = ("scaled " if look.scale else "") + LABELS.get(look.metric, clean(look.metric).replace("_", " "))
        text = clean(f"{value if look.rows == 'env' else f'{look.rows} {value}'}\n{what}") if look.rows else what
        axis.set_ylabel(text, fontsize=10, parse_math=False)


def _draw_legend(
    figure: Curves, axis: Any, panels: dict[Cell, dict[str, list[Curve]]], styles: dict[str, dict[str, Any]], look: Look
) -> None:
    """Groups with their numbers of runs; inside a single panel, or below a grid."""
    from matplotlib.lines import Line2D

    handles = []
    for group, style in styles.items():
        counts = sorted({len(panel[group]) for panel in panels.values() if group in panel})
        count = f"{counts[0]} to {counts[-1]}" if len(counts) > 1 else str(counts[0])
        name = group if look.by in ("experiment", "run", "env", "algo") else f"{look.by} {group}"
        label = f"{shorten(name, 60)} ({count} run{'s' if count != '1' else ''})"
        handles.append(Line2D([], [], linewidth=1.6, label=label, **style))
    banded = any(len(curves) > 1 for panel in panels.values() for curves in panel.values())
    title = f"{'interquartile mean' if look.scale else 'mean'} and 95 % interval" if banded else None
    legend: dict[str, Any] = {"handles": handles, "frameon": False, "fontsize": 9, "title": title, "title_fontsize": 9}
    if axis is not None and len(handles) <= len(COLOURS):
        explain(axis, **legend)
    else:
        explain(figure, **legend, loc="outside lower center", ncols=min(4, len(handles)))


def _title(panels: dict[Cell, dict[str, list[Curve]]], look: Look) -> str:
    configs = [curve.run.config for panel in panels.values() for curves in panel.values() for curve in curves]
    envs, algos = (dict.fromkeys(getattr(config, name) for config in configs) for name in ("env", "algo"))
    parts = [] if "env" in (look.by, look.rows, look.columns) else [", ".join(envs)]
    if "algo" not in (look.by, look.rows, look.columns) and len(algos) == 1:
        parts.append(next(iter(algos)))
    return shorten(" · ".join(parts), LONGEST_TITLE)
