"""The report as an object, tables and files: report.json, report.md."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from fever.files import write_atomically
from fever.scaling import words
from fever.scaling.figures import Count, Figures, interval, ratios, verdict
from fever.scaling.measure import WORKERS
from fever.scaling.model import METRICS
from fever.text import one_line

REPORT, PAGE, PICTURE = "report.json", "report.md", "speedup"  # names of the files; a picture has two endings
FORMAT = 1


def describe(
    figures: Figures, predicted: list[int], folder: Path, complete: bool, load: float | None
) -> dict[str, Any]:
    """The report as JSON: what `--json` prints and report.json holds."""
    plan, model = figures.plan, figures.model
    return {
        "format": FORMAT, "report": str(folder), "env": plan.config.env, "algo": plan.config.algo, "kind": plan.kind,
        "on": plan.place.get("on"), "rounds": plan.rounds, "seconds": plan.seconds, "target": plan.target,
        "complete": complete, "cores": figures.setting.cores, "load": load,
        "answer": words.answer(figures), "bottleneck": words.bottleneck(figures), "notes": words.notes(figures, load),
        "counts": [_count(figures, one) for one in figures.counts],
        "failed": [{"count": one.count, "round": one.round, "problem": one.problem} for one in figures.failed],
        "predicted": [_prediction(figures, count) for count in predicted], "predictions": model_words(figures),
        "model": None if model is None else {**model.describe(), "held_out_error": figures.held_out},
    }  # fmt: skip


def _count(figures: Figures, one: Count) -> dict[str, Any]:
    speedup = figures.measured_speedup(one)
    first = one is figures.base
    return {
        "count": one.count, "workers": one.workers, "samples_per_second": one.rate,
        "updates_per_second": one.mean("updates_per_second"),
        "samples_per_iteration": one.mean("samples_per_iteration"),
        "speedup": speedup, "speedup_interval": None if first else interval(ratios(one, figures.base)),
        "verdict": None if first else verdict(one, figures.base), "efficiency": speedup / figures.ideal(one.count),
        "target_seconds": one.mean("target_seconds"), "time": one.shares, "predicted": figures.predict(one.count),
        "error": figures.error(one), "runs": [asdict(found) for found in one.rounds],
    }  # fmt: skip


def _prediction(figures: Figures, count: int) -> dict[str, Any]:
    rate, model = figures.predict(count), figures.model
    assert rate is not None
    assert model is not None
    speedup = figures.speedup(rate)
    return {
        "count": count, "workers": figures.workers_of(count), "samples_per_second": rate, "speedup": speedup,
        "efficiency": speedup / figures.ideal(count),
        "bottleneck": words.named(model.bottleneck(figures.workers_of(count)), figures) if model.explains else None,
    }  # fmt: skip


Table = list[list[str]]  # rows of cells; the first one is the heading


def speed_table(figures: Figures, predicted: list[int]) -> Table:
    """A row for every count, those that are predicted last."""
    plan = figures.plan
    timed = [f"seconds to {plan.target:g}"] if plan.target is not None else []
    table = [[plan.kind, "samples/s", "updates/s", *timed, "speedup", "efficiency", "model"]]
    for one in figures.counts:
        updates, error, reached = one.mean("updates_per_second"), figures.error(one), one.mean("target_seconds")
        efficiency = figures.measured_speedup(one) / figures.ideal(one.count)
        table.append([
            str(one.count), f"{one.rate:,.0f}", "-" if updates is None else f"{updates:,.1f}",
            *(["-" if reached is None else f"{reached:,.1f}"] if timed else []), words.speedup_words(figures, one),
            f"{efficiency:.0%}", "-" if error is None else f"{error:+.1%}",
        ])  # fmt: skip
    for row in (_prediction(figures, count) for count in predicted):
        numbers = [f"{row['samples_per_second']:,.0f}", "-", *("-" for _ in timed), f"{row['speedup']:.2f}"]
        table.append([str(row["count"]), *numbers, f"{row['efficiency']:.0%}", "predicted"])
    return table


def time_table(figures: Figures) -> Table | None:
    """Where the time went, a row for every count; None if the algorithm does not say."""
    if figures.model is None or not figures.model.explains:
        return None
    parts = list(METRICS.values())
    table = [[figures.plan.kind, *(words.named(part, figures) for part in parts)]]
    return table + [[str(one.count), *(f"{one.shares[part]:.0%}" for part in parts)] for one in figures.counts]


def model_words(figures: Figures) -> str:
    """How good the predictions are."""
    errors = [abs(error) for one in figures.counts if (error := figures.error(one)) is not None]
    if not errors:
        return "no model: it takes two counts that worked"
    text = f"the model is at most {max(errors):.1%} off for the counts that were run"
    fitted = sum(bool(point.workers) for point in figures.points)
    if fitted < 2:
        text += f"; with one number of {figures.plan.kind} to fit it to, predictions are guesses"
    elif fitted == 2:  # as many as it has parameters
        text += f"; two numbers of {figures.plan.kind} always fit: a third one shows how good predictions are"
    if figures.held_out is not None:
        last = figures.counts[-1].count
        text += f"; fitted without {last}, it is {abs(figures.held_out):.1%} off for {last}"
    if figures.plan.kind == WORKERS and figures.setting.cores is not None:
        text += f"; a step of the environment computes for {figures.setting.computing:.0%} of its time"
    return text


def aligned(table: Table) -> list[str]:
    """A table as lines of text, cells to the right."""
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in table]


def lines(figures: Figures, predicted: list[int], load: float | None) -> list[str]:
    """The report for a terminal."""
    where = time_table(figures)
    shares = ["", "where the time went", *aligned(where)] if where else []
    if where and figures.setting.overlaps:
        shares.append("workers do not wait for the learner: the first two and the last two are of the same time")
    return [
        *aligned(speed_table(figures, predicted)), *shares, "", f"speedup: {words.answer(figures)}",
        f"bottleneck: {words.bottleneck(figures)}", f"predictions: {model_words(figures)}",
        *(f"note: {one_line(note)}" for note in words.notes(figures, load)),
    ]  # fmt: skip


def page(figures: Figures, predicted: list[int], load: float | None) -> str:
    """The report as Markdown."""
    plan = figures.plan
    on = f" on {plan.place['on']}" if plan.elsewhere else ""
    title = f"# {plan.config.env}, {plan.config.algo}: speed by number of {plan.kind}{on}"
    where = time_table(figures)
    return "\n\n".join([
        _escape(title), f"**{_escape(words.answer(figures))}**", f"Bottleneck: {_escape(words.bottleneck(figures))}",
        _markdown(speed_table(figures, predicted)), f"![speedup]({PICTURE}.svg)",
        *(["Where the time went:", _markdown(where)] if where else []),
        f"Predictions: {_escape(model_words(figures))}.",
        f"{plan.rounds} rounds of {plan.seconds:g} s after the warm-up; intervals are 95 %, over the rounds.",
        *(f"- {_escape(note)}" for note in words.notes(figures, load)),
    ]) + "\n"  # fmt: skip


def _markdown(table: Table) -> str:
    heading, *rows = (f"| {' | '.join(_escape(cell) for cell in row)} |" for row in table)
    return "\n".join([heading, f"|{'---:|' * len(table[0])}", *rows])


def _escape(text: str) -> str:
    """Text that may be anybody's, as a line of Markdown that shows it."""
    text = one_line(text)
    for mark in "\\`*_[]<>|$&~":
        text = text.replace(mark, f"\\{mark}")
    return text


def write(figures: Figures, predicted: list[int], folder: Path, complete: bool, load: float | None) -> dict[str, Any]:
    """Write both files; returns the object."""
    found = describe(figures, predicted, folder, complete, load)
    write_atomically(folder / REPORT, json.dumps(found, indent=2) + "\n")
    write_atomically(folder / PAGE, page(figures, predicted, load))
    return found
