"""Displays of several seeds: a live table on a terminal, plain lines elsewhere, or nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from fever.config import RunConfig
from fever.experiments.member import DONE, FAILED, INTERRUPTED, RUNNING, WAITING, Member
from fever.experiments.report import SCORES, with_interval
from fever.experiments.select import common_name
from fever.text import format_count, format_duration, format_number, one_line
from fever.training.display import for_audience, progress
from fever.training.many_runs import Lines, LivePanel

if TYPE_CHECKING:
    from rich.console import RenderableType

STYLES = {RUNNING: "cyan", FAILED: "red", INTERRUPTED: "yellow", WAITING: "dim", DONE: ""}


class SeedsDisplay:
    """Shows the runs of an experiment to a person; this one shows nothing. Every method returns at once."""

    def message(self, text: str) -> None:
        """Show one sentence."""

    def start(self, config: RunConfig, members: Sequence[Member], parallel: int) -> None:
        """The first run begins; so many go side by side."""

    def update(self, members: Sequence[Member]) -> None:
        """Show how all runs stand; called several times a second."""

    def ended(self, member: Member) -> None:
        """A run has ended."""

    def stop(self) -> None:
        """Give the terminal back: nothing is redrawn from now on."""

    def finish(self, summary: dict[str, Any]) -> None:
        """Show how it ended."""


class PlainSeeds(Lines, SeedsDisplay):
    """A line for every run that has ended, and one about all of them every few seconds."""

    def start(self, config: RunConfig, members: Sequence[Member], parallel: int) -> None:
        self.begin(opening_line(config, members, parallel))

    def update(self, members: Sequence[Member]) -> None:
        self.now_and_then(lambda seconds: header(members, seconds))

    def ended(self, member: Member) -> None:
        self.message(one_line(ended_line(member)))

    def finish(self, summary: dict[str, Any]) -> None:
        self.print_all(closing_lines(summary))


class LiveSeeds(LivePanel, SeedsDisplay):
    """A table that is redrawn in place, with a line for each seed."""

    def start(self, config: RunConfig, members: Sequence[Member], parallel: int) -> None:
        self.config = config
        self.begin()

    def update(self, members: Sequence[Member]) -> None:
        self.redraw(lambda seconds: self._panel(members, seconds))

    def ended(self, member: Member) -> None:
        self.drawn = 0.0
        if member.error is not None:
            self.message(one_line(ended_line(member)))

    def finish(self, summary: dict[str, Any]) -> None:
        self.print_all(closing_lines(summary))

    def _panel(self, members: Sequence[Member], seconds: float) -> RenderableType:
        from rich.console import Group
        from rich.panel import Panel
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        table = Table(box=None, header_style="bold", pad_edge=False)
        table.add_column("seed", justify="right")
        table.add_column("state")
        table.add_column("done")
        for name in ("steps", "return", "steps/s"):
            table.add_column(name, justify="right")
        room = max(3, self.console.height - 8)
        for member in shown(members, room):
            done = 1.0 if member.state == DONE else progress(member.config, member.row)[0] if member.row else 0.0
            cells = [Text(text) for text in cells_of(member)]
            table.add_row(
                *cells[:2], ProgressBar(total=1.0, completed=done, width=16), *cells[2:], style=STYLES[member.state]
            )
        parts: list[RenderableType] = [Text(header(members, seconds)), Text(), table]
        if len(members) > room:
            parts.append(Text(f"and {len(members) - room} more", style="dim"))
        title = Text(one_line(f"{self.config.env} · {self.config.algo} · {len(members)} seeds"))
        place = Text(one_line(str(members[0].run.path.parent / common_name([member.run for member in members]))))
        return Panel(Group(*parts), title=title, subtitle=place, width=min(78, self.console.width))


def shown(members: Sequence[Member], room: int) -> list[Member]:
    """The runs that a table of so many lines shows, in their order: those that run first."""
    rank = {RUNNING: 0, FAILED: 1, INTERRUPTED: 1, WAITING: 2, DONE: 3}
    chosen = sorted(members, key=lambda member: rank[member.state])[:room]
    return [member for member in members if member in chosen]


def cells_of(member: Member) -> list[str]:
    """A run as cells: seed, state, steps, return, steps per second."""
    row = member.row
    rate = format_count(member.rate.steps_per_second) if row and member.state == RUNNING else "-"
    state = "starting" if member.state == RUNNING and not row else member.state
    return [str(member.seed), state, f"{row.get('steps', 0):,}", format_number(row.get("return_mean")), rate]


def header(members: Sequence[Member], seconds: float) -> str:
    """How the experiment stands, in one line."""
    states = Counter(member.state for member in members)
    steps = sum(member.row.get("steps", 0) for member in members)
    parts = [format_duration(seconds), f"{states[DONE]} of {len(members)} seeds done"]
    parts += [f"{states[state]} {state}" for state in (RUNNING, INTERRUPTED, FAILED) if states[state]]
    return ", ".join([*parts, f"{format_count(steps)} steps"])


def opening_line(config: RunConfig, members: Sequence[Member], parallel: int) -> str:
    first, last = members[0], members[-1]
    seeds = f"seeds {first.seed} to {last.seed}" if len(members) > 1 else f"seed {first.seed}"
    return one_line(
        f"training {config.env} with {config.algo}, {seeds}, {parallel} at a time, in {first.run.path}"
        + (f" to {last.run.path.name}" if len(members) > 1 else "")
    )


def ended_line(member: Member) -> str:
    """How a run has ended, in one line."""
    start = f"seed {member.seed} {member.state}"
    if member.error is not None:
        return f"{start}: {member.error}"
    steps, score = member.row.get("steps", 0), format_number(member.row.get("return_mean"))
    return f"{start}: return {score} after {steps:,} steps  ({member.run.path})"


def closing_lines(summary: dict[str, Any]) -> list[str]:
    """How it ended, and the next commands."""
    runs, failed = summary["runs"], summary["failed"]
    done = sum(run["state"] == DONE for run in runs)
    lines = [
        f"{summary['stop_reason']}: {done} of {len(runs)} seeds are done, in {format_duration(summary['seconds'])}"
    ]
    if failed:
        lines.append(f"{failed} failed: {errors_text(runs)}")
    score = summary["score"]
    if score is not None:
        final = with_interval(score["final"]["mean"], score["final"]["interval"])
        middle = with_interval(score["final"]["iqm"], score["final"]["iqm_interval"])
        several = score["seeds"] > 1
        where = f"score of {score['seeds']} seed{'s' if several else ''} at {format_count(score['steps'])} steps"
        lines.append(f"{where}: {final}{f', interquartile mean {middle}' if several else ''}")
        what = SCORES[score["metric"]]
        lines.append(f"  ({what}{'; 95 % intervals over seeds' if several else ''})")
    lines += [f"note: {note}" for note in summary["notes"]]
    if summary["picture"] is not None:
        lines.append(f"picture: {summary['picture']}")
    lines += [f"next: {command}" for command in summary["next"]]
    if score is not None:
        lines.append(f"next: fever compare {next(run['run'] for run in runs if run['state'] == DONE)} OTHER-RUN")
    return [one_line(line) for line in lines]


def errors_text(runs: Sequence[dict[str, Any]]) -> str:
    """The errors of some runs, each once, with the seeds that had it."""
    seeds: dict[str, list[str]] = {}
    for run in runs:
        if run["error"] is not None:
            seeds.setdefault(run["error"], []).append(str(run["seed"]))
    return "; ".join(
        f"seed{'s' if len(found) > 1 else ''} {', '.join(found)}: {error}" for error, found in seeds.items()
    )


def make_table(kind: str, to_stderr: bool = False) -> SeedsDisplay:
    """`auto` (live on a terminal, lines elsewhere), or `quiet`."""
    return for_audience(kind, to_stderr, SeedsDisplay, PlainSeeds, LiveSeeds)
