"""Displays of a search: a live table on a terminal, plain lines elsewhere, or nothing."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fever import layout
from fever.config import RunConfig
from fever.text import format_duration, format_number, one_line
from fever.training.display import for_audience
from fever.training.many_runs import Lines, LivePanel
from fever.tune.records import FAILED, FINISHED, RUNNING, STOPPED, WAITING, Record, best_of, ranked

if TYPE_CHECKING:
    from rich.console import RenderableType

STYLES = {RUNNING: "cyan", FAILED: "red", STOPPED: "dim", WAITING: "dim", FINISHED: ""}


class SearchDisplay:
    """Shows a search to a person; this one shows nothing. Every method returns at once."""

    def message(self, text: str) -> None:
        """Show one sentence."""

    def start(self, config: RunConfig, path: Path, trials: int, cores: float) -> None:
        """The search begins in this run directory."""

    def update(self, records: list[Record]) -> None:
        """Show how all trials stand; called many times a second."""

    def ended(self, record: Record) -> None:
        """A trial has ended."""

    def stop(self) -> None:
        """Give the terminal back: nothing is redrawn from now on."""

    def finish(self, summary: dict[str, Any]) -> None:
        """Show how the search ended."""


class PlainTable(Lines, SearchDisplay):
    """A line for every trial that has ended, and one about all of them every few seconds."""

    def start(self, config: RunConfig, path: Path, trials: int, cores: float) -> None:
        self.trials, self.cores = trials, cores
        self.begin(f"searching settings of {config.algo} on {config.env} in {path}")

    def update(self, records: list[Record]) -> None:
        self.now_and_then(lambda seconds: header(records, self.trials, seconds, self.cores))

    def ended(self, record: Record) -> None:
        numbers = f"score {format_number(record.score)}, return {format_number(record.return_mean)}"
        what = record.error or numbers
        self.message(f"trial {record.number} {record.state}: {what}  ({settings_text(record.settings)})")

    def finish(self, summary: dict[str, Any]) -> None:
        self.print_all(closing_lines(summary))


class LiveTable(LivePanel, SearchDisplay):
    """A table that is redrawn in place, the best trials first."""

    def start(self, config: RunConfig, path: Path, trials: int, cores: float) -> None:
        self.config, self.path, self.trials, self.cores = config, path, trials, cores
        self.begin()

    def update(self, records: list[Record]) -> None:
        self.redraw(lambda seconds: self._panel(records, seconds))

    def ended(self, record: Record) -> None:
        self.drawn = 0.0

    def finish(self, summary: dict[str, Any]) -> None:
        self.print_all(closing_lines(summary))

    def _panel(self, records: list[Record], seconds: float) -> RenderableType:
        from rich.console import Group
        from rich.panel import Panel
        from rich.table import Table
        from rich.text import Text

        assert self.config.search is not None
        names = list(self.config.search.space)
        table = Table(box=None, header_style="bold", pad_edge=False)
        table.add_column("trial", justify="right")
        for name in names:
            table.add_column(Text(one_line(name)))
        table.add_column("state")
        for name in ("steps", "return", "score"):
            table.add_column(name, justify="right")
        room = max(3, self.console.height - 8)
        for record in ranked(records)[:room]:
            values = [plain(record.settings.get(name)) for name in names]
            figures = (f"{record.steps:,}", format_number(record.return_mean), format_number(record.score))
            row = [Text(one_line(text)) for text in (str(record.number), *values, record.state, *figures)]
            table.add_row(*row, style=STYLES[record.state])
        parts: list[RenderableType] = [
            Text(header(records, self.trials, seconds, self.cores)), Text(), table
        ]  # fmt: skip
        if len(records) > room:
            parts.append(Text(f"and {len(records) - room} more", style="dim"))
        title = Text(one_line(f"{self.config.env} · {self.config.algo}"))
        return Panel(Group(*parts), title=title, subtitle=Text(one_line(str(self.path))))


def header(records: list[Record], trials: int, seconds: float, cores: float) -> str:
    """How the search stands, in one line."""
    states = Counter(record.state for record in records)
    over = states[FINISHED] + states[STOPPED] + states[FAILED]
    parts = [f"{format_duration(seconds)}", f"{over} of {trials} trials done", f"{states[RUNNING]} running"]
    parts += [f"{states[state]} {state}" for state in (STOPPED, FAILED) if states[state]]
    best = best_of(records)
    if best is not None:
        parts.append(f"best score {format_number(best.score)} (trial {best.number})")
    return ", ".join([*parts, f"{cores:g} cores"])


def closing_lines(summary: dict[str, Any]) -> list[str]:
    """How the search ended, and the next command."""
    run, best = summary["run"], summary["best"]
    counts = f"{summary['trials']} trials ({summary['stopped_early']} stopped early, {summary['failed']} failed)"
    complete = summary["stop_reason"] == "trials"
    lines = [f"{'done' if complete else 'interrupted'}: {counts} in {format_duration(summary['seconds'])}"]
    if best is not None:
        lines.append(
            f"best: trial {best['trial']}, score {format_number(best['score'])}: {settings_text(best['settings'])}"
        )
        lines.append(
            f"picture: {summary['picture']}   table: {run}/{layout.TRIALS_TABLE}   settings: {summary['best_file']}"
        )
    if not complete:
        lines.append(f"next: fever resume {run} --trust  (it reads Ray Tune's pickles)")
    elif best is not None:
        lines.append(f"next: fever train -f {summary['best_file']}")
    return lines


def settings_text(settings: dict[str, Any]) -> str:
    return " ".join(f"{name}={plain(value)}" for name, value in settings.items())


def plain(value: Any) -> str:
    """A setting's value as short as it can be read."""
    if isinstance(value, float):
        return f"{value:.4g}"
    return value if isinstance(value, str) else json.dumps(value)


def make_table(kind: str, to_stderr: bool = False) -> SearchDisplay:
    """`auto` (live on a terminal, lines elsewhere), or `quiet`."""
    return for_audience(kind, to_stderr, SearchDisplay, PlainTable, LiveTable)
