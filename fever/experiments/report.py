"""A comparison as lines of text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from fever.experiments.compare import MEASURES, Comparison, InEnvironment, Overall, Report, Scores
from fever.experiments.scores import EVALUATION, TRAINING
from fever.experiments.statistics import FEWEST, MOST_NEEDED, Interval
from fever.text import format_count, format_number, one_line

MOST_DIFFERENCES = 8  # that are listed
SCORES = {EVALUATION: "mean return of evaluations", TRAINING: "mean return of training's episodes"}


def lines(report: Report) -> Iterator[str]:
    """The lines that `fever compare` prints."""
    for found in report.environments:
        yield from _environment(found)
    if report.overall is not None:
        yield from _overall(report.overall)
    yield from _differences(report)
    yield from (one_line(f"note: {note}") for note in report.notes)


def _environment(found: InEnvironment) -> Iterator[str]:
    metric = SCORES[found.metric]
    yield one_line(f"{found.env}: {metric}, at {format_count(found.steps)} steps (95 % intervals)")
    yield from table(_rows(found.scores, [len(paths) for paths in found.runs.values()]))
    for comparison in found.comparisons:
        yield one_line(sentence(comparison, [len(found.runs[comparison.name]), len(found.runs[comparison.against])]))
    yield ""


def _rows(scores: dict[str, dict[str, Scores]], counts: Sequence[int]) -> list[list[str]]:
    rows = [["", "seeds", "final score", "interquartile mean", "mean until then"]]
    for (name, found), count in zip(scores.items(), counts, strict=True):
        final, area = found["final"], found["area"]
        pairs = ((final.mean, final.interval), (final.iqm, final.iqm_interval), (area.mean, area.interval))
        rows.append([name, str(count), *(with_interval(*pair) for pair in pairs)])
    return rows


def table(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Rows of cells as lines with columns of equal width."""
    cells = [[one_line(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for row in cells:
        yield "  " + "  ".join(f"{cell:{width}}" for cell, width in zip(row, widths, strict=True)).rstrip()


def with_interval(value: float, interval: Interval | None) -> str:
    """`54.6 (40.1 to 60.2)`."""
    return format_number(value) + (f" ({between(interval)})" if interval is not None else "")


def between(interval: Interval) -> str:
    return f"{format_number(interval[0])} to {format_number(interval[1])}"


def sentence(comparison: Comparison, counts: Sequence[int]) -> str:
    """A comparison in words. `counts`: seeds of both sides."""
    one = comparison
    sign = "+" if one.difference > 0 else ""
    chance = format_number(round(one.probability, 3))
    facts = f"{MEASURES[one.measure]} {sign}{format_number(one.difference)}"
    if one.interval is not None:
        facts += f" ({between(one.interval)})"
    facts += f", probability of improvement {chance}"
    if one.probability_interval is not None:
        facts += f" ({between(one.probability_interval)})"
    return f"{one.name} against {one.against}: {facts}: {verdict(one, counts)}"


def verdict(comparison: Comparison, counts: Sequence[int]) -> str:
    """What the comparison says, or why it says nothing."""
    if comparison.verdict == "same":
        return "no difference: every run has the same score"
    if comparison.verdict != "unknown":
        return f"{comparison.name} is {comparison.verdict}"
    few = f"not enough seeds to tell ({counts[0]} and {counts[1]})"
    if min(counts) < 2:
        return f"{few}; at least {FEWEST} on each side are needed"
    if comparison.seeds_needed is None:
        return f"{few}; a difference as small as this one needs more than {MOST_NEEDED:,} on each side"
    return f"{few}; a difference of this size needs about {comparison.seeds_needed:,} on each side"


def _overall(overall: Overall) -> Iterator[str]:
    yield one_line(f"all {len(overall.envs)} environments: {', '.join(overall.envs)}")
    rows = [["", "mean rank", "probability of improvement"]]
    for name, ranks in overall.ranks.items():
        chance = overall.probability.get(name, {}).get("final")
        rows.append([name, format_number(round(ranks["final"], 3)), with_interval(*chance) if chance else "-"])
    if overall.scores:
        rows[0] += ["interquartile mean on the scale", "mean on the scale"]
        for row, found in zip(rows[1:], overall.scores.values(), strict=True):
            final = found["final"]
            row += [with_interval(final.iqm, final.iqm_interval), with_interval(final.mean, final.interval)]
    yield from table(rows)
    yield ""


def _differences(report: Report) -> Iterator[str]:
    found = report.differences
    if not found:
        return
    names = list(found)[:MOST_DIFFERENCES]
    what = "one setting" if len(found) == 1 else f"{len(found)} settings"
    yield f"they differ in {what}:"
    yield from table([["", *report.groups], *([name, *found[name]] for name in names)])
    if len(found) > len(names):
        yield f"  and {len(found) - len(names)} more, which --json lists"
