"""The picture of a report: speedup against linear, and where the time went."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from fever.runs.plot import BLUE, GREEN, GREY, ORANGE, SKY, VERMILION, drawing, entitle, explain, headline, save
from fever.scaling.figures import Figures, interval, ratios
from fever.scaling.measure import counted
from fever.scaling.model import METRICS
from fever.scaling.words import named

MEASURED, MODEL, LINEAR = BLUE, VERMILION, GREY  # lines differ in style and marker as well
PARTS = (BLUE, SKY, ORANGE, GREEN)
HATCHES = ("", "//", "..", "xx")
NO_WORKER = -1.0  # place of the count 0 on the axis, which is logarithmic


def draw(figures: Figures, predicted: list[int], path: Path) -> None:
    """Draw the figures into path.png and path.svg."""
    from matplotlib.figure import Figure

    with drawing():
        known = figures.model is not None and figures.model.explains
        figure = Figure(figsize=(10.5 if known else 6.2, 4.4), layout="constrained")
        axes = figure.subplots(1, 2 if known else 1, squeeze=False)[0]
        _draw_speedup(axes[0], figures, predicted)
        if known:
            _draw_time(axes[1], figures)
        plan = figures.plan
        headline(figure, f"{plan.config.env} · {plan.config.algo}")
    for ending in (".png", ".svg"):
        save(figure, path.with_suffix(ending))


def _place(count: int) -> float:
    return math.log2(count) if count else NO_WORKER


def _draw_speedup(axis: Any, figures: Figures, predicted: list[int]) -> None:
    counts = sorted({*(one.count for one in figures.counts), *predicted})
    linear = [count for count in counts if count]
    axis.plot([_place(c) for c in linear], [figures.ideal(c) for c in linear], ":", color=LINEAR, label="linear")
    modelled = [(count, rate) for count in counts if (rate := figures.predict(count)) is not None]
    places, speedups = ([_place(c) for c, _ in modelled], [figures.speedup(rate) for _, rate in modelled])
    axis.plot(places, speedups, "--", color=MODEL, linewidth=1.4, label="model")
    ahead = [(p, s) for (count, _), p, s in zip(modelled, places, speedups, strict=True) if count in predicted]
    axis.plot(*(zip(*ahead, strict=True) if ahead else ([], [])), "D", color=MODEL, mfc="white", label="predicted")
    _draw_measured(axis, figures)
    axis.set_xticks([_place(count) for count in counts], [str(count) for count in counts])
    axis.set_yscale("log", base=2)
    shown = [figures.measured_speedup(one) for one in figures.counts] + speedups + [figures.ideal(c) for c in linear]
    axis.set_ylim(min(shown) / 2, max(shown) * 2)  # an interval may be longer
    axis.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axis.set_xlabel(f"number of {figures.plan.kind}{' (0: one process)' if 0 in counts else ''}")
    axis.set_ylabel(f"samples/s over those of {counted(figures.plan.kind, figures.base.count)} (times)")
    axis.grid(alpha=0.25)
    axis.spines[["top", "right"]].set_visible(False)
    entitle(axis, "speedup")
    explain(axis, fontsize=9, frameon=False, loc="upper left")


def _draw_measured(axis: Any, figures: Figures) -> None:
    """Every count with its 95 % interval."""
    below, above, speedups = [], [], []
    for one in figures.counts:
        speedup = figures.measured_speedup(one)
        found = interval(ratios(one, figures.base)) if one is not figures.base else None
        low, high = found or (speedup, speedup)
        speedups.append(speedup)
        below.append(max(0.0, speedup - low))
        above.append(max(0.0, high - speedup))
    places = [_place(one.count) for one in figures.counts]
    style: Any = {"color": MEASURED, "marker": "o", "capsize": 3, "linewidth": 1.8}
    axis.errorbar(places, speedups, yerr=(below, above), label="measured, 95 % interval", **style)


def _draw_time(axis: Any, figures: Figures) -> None:
    """Shares of the time by count, stacked; side by side where workers and learner work at the same time."""
    names = [str(one.count) for one in figures.counts]
    pairs = figures.setting.overlaps
    bottoms = {side: [0.0] * len(names) for side in (-1, 1)}
    for index, (part, colour, hatch) in enumerate(zip(METRICS.values(), PARTS, HATCHES, strict=True)):
        shares = [100 * one.shares[part] for one in figures.counts]
        side = 1 if pairs and index >= len(PARTS) // 2 else -1
        places = [place + (0.2 * side if pairs else 0) for place in range(len(names))]
        style: Any = {"color": colour, "hatch": hatch, "edgecolor": "white", "label": named(part, figures)}
        axis.bar(places, shares, 0.36 if pairs else 0.6, bottom=bottoms[side], **style)
        bottoms[side] = [below + share for below, share in zip(bottoms[side], shares, strict=True)]
    axis.set_xticks(range(len(names)), names)
    axis.set_ylim(0, 130)  # with room for the legend
    axis.set_yticks(range(0, 101, 20))
    axis.set_xlabel(f"number of {figures.plan.kind}")
    axis.set_ylabel("share of the time (%)")
    axis.spines[["top", "right"]].set_visible(False)
    entitle(axis, "where the time went" + (": workers, learner" if pairs else ""))
    explain(axis, fontsize=9, frameon=False, loc="upper center", ncols=2)
