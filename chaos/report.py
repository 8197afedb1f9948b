"""The table of a chaos, and the bars that it must meet."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

from chaos.case import Outcome, Result
from chaos.training import STEP_TIMEOUT
from fever.sampling.ray_pool import LOOK_SECONDS, STOPPED_SECONDS

SAMPLER_SECONDS = 3.0  # that a killed, stopped or hanging sampler may cost, beyond its timeout
RAY_SECONDS = 20.0  # without a row, that the loss of our own Ray may cost
TIMEOUTS = {"stop_sampler": STOPPED_SECONDS + LOOK_SECONDS, "hang": STEP_TIMEOUT}
SAMPLERS, RAYS = ("kill_sampler", "stop_sampler", "hang"), ("kill_raylet", "stop_raylet", "kill_gcs", "stop_gcs")


def bars(results: Sequence[Result], wanted: int) -> list[tuple[str, bool]]:
    """What must hold, and whether it does; `wanted` is the number of faults that were asked for. What could not be
    tried here counts nowhere."""
    outcomes = [outcome for result in results for outcome in result.outcomes]
    caused = [outcome for outcome in outcomes if not outcome.skipped]
    survived, wanted = sum(not one.reason for one in caused), wanted - len(outcomes) + len(caused)
    results = [result for result in results if not result.skipped]
    lost, twice = sum(one.rows_lost for one in results), sum(one.twice for one in results)
    left = sum(len(one.leftovers) for one in results)
    return [
        (f"{survived} of {wanted} faults survived", survived == wanted),
        _every("runs finished", [one.finished for one in results]),
        _every("runs reached their target", [one.reached for one in results]),
        (f"{lost} rows lost", lost == 0),
        (f"{twice} transitions twice", twice == 0),
        (f"{left} leftovers", left == 0),
        *_cost_bars(caused),
    ]


def _cost_bars(caused: Sequence[Outcome]) -> Iterator[tuple[str, bool]]:
    """The bars of the faults that were caused, if there were any of their kinds that was survived."""
    over = [one for one in caused if not one.reason]
    costs = [one.lost - TIMEOUTS.get(one.kind, 0) for one in over if one.kind in SAMPLERS and one.lost is not None]
    if costs:
        middle = statistics.median(costs)
        what = f"a sampler costs {middle:.1f} s beyond its timeout (median; worst {max(costs):.1f})"
        yield what, middle < SAMPLER_SECONDS
    pauses = [one.pause for one in over if one.kind in RAYS and one.pause is not None]
    if pauses:
        yield f"without Ray at most {max(pauses):.1f} s", max(pauses) <= RAY_SECONDS
    kills = [one for one in caused if one.kind == "kill_driver"]
    if kills:
        resumed = [not one.reason and one.beyond is not None and one.beyond <= 1 for one in kills]
        yield _every("driver kills resumed, at most one iteration lost beyond the checkpoint interval", resumed)


def _every(what: str, values: Sequence[bool]) -> tuple[str, bool]:
    return f"{sum(values)} of {len(values)} {what}", all(values)


def table(rows: Sequence[Sequence[str]]) -> str:
    """A table in Markdown; the first row is its head."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |" for row in rows
    ]
    lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return "\n".join(lines)


def fault_table(results: Sequence[Result]) -> str:
    """One row for each kind of fault."""
    outcomes = [outcome for result in results for outcome in result.outcomes]
    rows = [("fault", "times", "survived", "seconds lost, median", "worst", "longest pause")]
    for kind in dict.fromkeys(sorted(outcome.kind for outcome in outcomes)):
        these = [outcome for outcome in outcomes if outcome.kind == kind]
        lost = [outcome.lost for outcome in these if outcome.lost is not None]
        pauses = [outcome.pause for outcome in these if outcome.pause is not None]
        survived = sum(not outcome.reason for outcome in these)
        middle, worst = (f"{statistics.median(lost):.1f}", f"{max(lost):.1f}") if lost else ("", "")
        rows.append((kind, str(len(these)), str(survived), middle, worst, f"{max(pauses):.1f}" if pauses else ""))
    return table(rows)


def run_table(results: Sequence[Result]) -> str:
    """One row for each training."""
    rows = [("training", "faults", "finished", "return", "rows lost", "twice", "leftovers", "seconds")]
    for one in results:
        end = "skipped" if one.skipped else "yes" if one.finished else "no"
        counts = (str(one.rows_lost), str(one.twice), str(len(one.leftovers)), f"{one.seconds:.0f}")
        rows.append((one.case, str(len(one.outcomes)), end, f"{one.score:.1f}", *counts))
    return table(rows)


def troubles(results: Sequence[Result]) -> list[str]:
    """One line for everything that went wrong, or could not be tried here."""
    lines = []
    for one in results:
        lines += [f"{one.case}: {outcome.kind}: {outcome.reason}" for outcome in one.outcomes if outcome.reason]
        lines += [f"{one.case}: not finished: {one.reason}"] if one.reason and not one.skipped else []
        lines += [f"{one.case}: left: {left}" for left in one.leftovers]
    return lines


def text(results: Sequence[Result], wanted: int, seed: int, seconds: float) -> str:
    """All of it in Markdown."""
    marks = [f"- {'met' if met else 'MISSED'}: {what}" for what, met in bars(results, wanted)]
    parts = [f"Chaos with seed {seed}: {seconds / 60:.1f} minutes", fault_table(results), run_table(results)]
    parts += ["\n".join(f"- {line}" for line in troubles(results))] if troubles(results) else []
    return "\n\n".join([*parts, "\n".join(marks)])


def write(folder: Path, results: Sequence[Result], wanted: int, seed: int, seconds: float) -> None:
    """report.md and report.json."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "report.md").write_text(text(results, wanted, seed, seconds) + "\n")
    found = {"seed": seed, "seconds": seconds, "bars": bars(results, wanted), "runs": [asdict(one) for one in results]}
    (folder / "report.json").write_text(json.dumps(found, indent=2) + "\n")
