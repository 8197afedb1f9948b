"""The picture of a search: scores by trial, and scores by the value of each setting."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from fever.errors import FeverError
from fever.runs.plot import COLOURS, GREY, drawing, entitle, headline
from fever.tune.records import FAILED, STOPPED, Record
from fever.tune.space import Dimension, Space
from fever.tune.table import plain


def draw(records: list[Record], space: Space, title: str, path: Path) -> Path:
    """Draw scores over trials, and one panel for every setting that was searched; returns `path`."""
    with drawing():
        return _draw(records, space, title, path)


def _draw(records: list[Record], space: Space, title: str, path: Path) -> Path:
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    panels = 1 + len(space.dimensions)
    columns = 2 if panels == 4 else min(3, panels)
    rows = math.ceil(panels / columns)
    size = (3.7 * columns + 0.5, 3.1 * rows + 0.4)
    figure, axes = pyplot.subplots(rows, columns, figsize=size, layout="constrained", squeeze=False)
    _draw_course(axes.flat[0], records)
    for axis, (name, dimension) in zip(axes.flat[1:], space.dimensions.items(), strict=False):
        _draw_setting(axis, records, name, dimension)
    for axis in axes.flat[:panels]:
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
    for axis in axes.flat[panels:]:
        axis.set_visible(False)
    headline(figure, title)
    try:
        figure.savefig(path, dpi=120)
    except OSError as error:
        raise FeverError(f"{path} cannot be written: {error}") from error
    finally:
        pyplot.close(figure)
    return path


def _groups(records: list[Record]) -> list[tuple[str, str, list[Record]]]:
    """(label, colour, trials) of trials that have a score, by how they ended."""
    scored = [one for one in records if one.score is not None and one.state != FAILED]
    early = [one for one in scored if one.state == STOPPED]
    return [
        ("finished", COLOURS[0], [one for one in scored if one.state != STOPPED]),
        ("stopped early", GREY, early),
    ]


def _draw_course(axis: Any, records: list[Record]) -> None:
    """Every trial's score, and the best so far."""
    for label, colour, group in _groups(records):
        if group:
            points = [(one.number, one.score) for one in group]
            axis.scatter(*zip(*points, strict=True), s=16, color=colour, label=label)
    best: list[tuple[int, float]] = []
    for record in sorted(records, key=lambda one: one.number):
        if record.score is not None and record.state != FAILED:
            best.append((record.number, max(record.score, best[-1][1] if best else record.score)))
    if best:
        axis.step(*zip(*best, strict=True), where="post", color=COLOURS[1], linewidth=1.5, label="best so far")
    _mark_failed(axis, [one.number for one in records if one.state == FAILED])
    axis.set_title("score by trial", loc="left", fontsize=11)
    axis.set_xlabel("trial")
    axis.xaxis.get_major_locator().set_params(integer=True)
    if axis.get_legend_handles_labels()[0]:
        axis.legend(fontsize=8, framealpha=0.85, edgecolor="none")


def _draw_setting(axis: Any, records: list[Record], name: str, dimension: Dimension) -> None:
    """Scores over the values of one setting."""
    places = {plain(value): place for place, value in enumerate(dimension.values)}

    def place(record: Record) -> float:
        value = record.settings[name]
        return places.get(plain(value), -1) if places else float(value)

    for _, colour, group in _groups(records):
        if group:
            points = [(place(one), one.score) for one in group]
            axis.scatter(*zip(*points, strict=True), s=16, color=colour)
    _mark_failed(axis, [place(one) for one in records if one.state == FAILED])
    if places:
        axis.set_xticks(list(places.values()), list(places), fontsize=8, parse_math=False)
        axis.set_xlim(-0.5, len(places) - 0.5)
    elif dimension.logarithmic:
        axis.set_xscale("log")
        axis.set_xlim(dimension.low, dimension.high)
    entitle(axis, name)


def _mark_failed(axis: Any, places: list[float]) -> None:
    """Draw crosses at the bottom of the panel, whatever the range of scores."""
    if places:
        bottom = axis.get_xaxis_transform()
        axis.scatter(places, [0.03] * len(places), transform=bottom, marker="x", s=24, color=COLOURS[4], label="failed")
