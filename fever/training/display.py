"""Displays of a training: a live panel on a terminal or in a notebook, plain lines elsewhere, or nothing."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from fever.algos.registry import needs_trust
from fever.config import RunConfig
from fever.job import current_job
from fever.text import PHASES, clean, format_duration, format_number, one_line, say, sparkline
from fever.training.callbacks import Callback, TrainingInfo
from fever.training.notebook import WIDTH, NotebookLive, in_notebook

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

REFRESH_SECONDS = 0.15  # between two drawings of the live panel
LINE_SECONDS = 5.0  # between plain lines
REASONS = {
    "reward": "the return reached its goal",
    "steps": "the step limit was reached",
    "iterations": "the iteration limit was reached",
    "time": "the time limit was reached",
    "interrupted": "interrupted",
    "limit": "the job's time limit is near",
}


class Display(Callback):
    """Shows a training to a person; this one shows nothing. Every method returns at once.

    The trainer uses it as a callback, and calls `message` and `stop` as well. `fever attach`, which follows a run
    on other machines, calls `start`, `update` and `finish` with what is in the run directory.
    """

    silent = True

    def message(self, text: str) -> None:
        """Show one sentence, before, during or after training."""

    def start(self, config: RunConfig, path: Path) -> None:
        """Training begins in this run directory."""

    def update(self, row: dict[str, Any]) -> None:
        """Show a row of metrics."""

    def stop(self) -> None:
        """Give the terminal back: nothing is redrawn from now on."""

    def finish(self, summary: dict[str, Any]) -> None:
        """Show how the run ended."""

    def on_start(self, info: TrainingInfo) -> None:
        self.start(info.config, info.run.path)

    def on_iteration(self, info: TrainingInfo) -> None:
        self.update(info.metrics)

    def on_stop(self, info: TrainingInfo) -> None:
        if info.summary is not None and info.summary["stop_reason"] != "failed":
            self.finish(info.summary)


class PlainDisplay(Display):
    """One line every few seconds, for log files and pipes."""

    silent = False

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream
        self.printed = 0.0
        self.rate = Rate()
        self.evaluated: dict[str, Any] = {}

    def message(self, text: str) -> None:
        self._print(text)

    def start(self, config: RunConfig, path: Path) -> None:
        self._print(f"training {config.env} with {config.algo} in {path}")
        self.printed = time.monotonic()

    def update(self, row: dict[str, Any]) -> None:
        self.rate.add(row)
        self.evaluated = evaluation_of(row) or self.evaluated
        if time.monotonic() - self.printed >= LINE_SECONDS:
            self.printed = time.monotonic()
            self._print(progress_line({**self.evaluated, **row}, self.rate.steps_per_second))

    def finish(self, summary: dict[str, Any]) -> None:
        for line in closing_lines(summary):
            self._print(line)

    def _print(self, text: str) -> None:
        say(text, self.stream)


class LiveDisplay(Display):
    """A panel that is redrawn in place: progress towards the stop rule, return, speed, and where the time goes."""

    silent = False

    def __init__(self, console: Console) -> None:
        self.console = console
        self.live = make_live(console)
        self.drawn = 0.0
        self.row: dict[str, Any] | None = None  # that is not drawn yet
        self.history: list[float] = []
        self.evaluated: dict[str, Any] = {}
        self.rate = Rate()

    def message(self, text: str) -> None:
        self.console.print(clean(text), highlight=False, markup=False, style="dim")

    def start(self, config: RunConfig, path: Path) -> None:
        self.config, self.path = config, path
        self.live.start()
        self._draw({"iteration": 0, "steps": 0, "seconds": 0.0, "episodes": 0})

    def update(self, row: dict[str, Any]) -> None:
        self.rate.add(row)
        if "return_mean" in row:
            self.history.append(row["return_mean"])
        self.row = row
        self.evaluated = evaluation_of(row) or self.evaluated
        if time.monotonic() - self.drawn >= REFRESH_SECONDS:
            self._draw({**self.evaluated, **row})

    def stop(self) -> None:
        if self.row is not None:  # a notebook keeps the last drawing
            self._draw({**self.evaluated, **self.row})
        self.live.stop()

    def finish(self, summary: dict[str, Any]) -> None:
        for line in closing_lines(summary):
            self.console.print(clean(line), highlight=False, markup=False, soft_wrap=True)

    def _draw(self, row: dict[str, Any]) -> None:
        self.drawn, self.row = time.monotonic(), None
        self.live.update(self._panel(row), refresh=True)

    def _panel(self, row: dict[str, Any]) -> RenderableType:
        from rich.console import Group
        from rich.panel import Panel
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        done, rule = progress(self.config, row)
        left = remaining_seconds(self.config, row, self.rate.steps_per_second)
        bar = Table.grid(padding=(0, 1))
        eta = f", {'' if self.config.stop.reward is None else 'at most '}{format_duration(left)} left" if left else ""
        bar.add_row(ProgressBar(total=1.0, completed=done, width=30), f"{done:.0%} of {rule}{eta}")
        facts = Table.grid(padding=(0, 3))
        facts.add_row("return", format_number(row.get("return_mean")), Text(sparkline(self.history), style="cyan"))
        if "eval/return_mean" in row:
            spread = f"± {format_number(row['eval/return_std'])} at {row['eval/steps']:,} steps"
            facts.add_row("evaluation", format_number(row["eval/return_mean"]), spread)
        facts.add_row("steps", f"{row['steps']:,}", f"{self.rate.steps_per_second:,.0f} steps/s")
        facts.add_row("episodes", f"{row['episodes']:,}", f"length {format_number(row.get('length_mean'))}")
        facts.add_row("iteration", f"{row['iteration']:,}", format_duration(row["seconds"]))
        for line in algorithm_facts(row):
            facts.add_row(*line)
        if row.get("worker_restarts"):
            facts.add_row("workers", f"{row['worker_restarts']} replaced", "")
        if row.get("env_failures"):
            facts.add_row("environments", f"{row['env_failures']} failed", "and were made anew")
        parts: list[RenderableType] = [bar, Text(), facts]
        shares = {label: row[name] for name, label in PHASES.items() if name in row}
        if shares:
            phases = Table.grid(padding=(0, 1))
            for label, share in shares.items():
                phases.add_row(label, ProgressBar(total=1.0, completed=share, width=20), f"{share:.0%}")
            parts += [Text(), phases]
        title = Text(one_line(f"{self.config.env} · {self.config.algo}"))
        place = Text(one_line(str(self.path)))
        return Panel(Group(*parts), title=title, subtitle=place, width=min(78, self.console.width))


class Rate:
    """Environment steps per second over the last `window` seconds; for the first row, the row's own value."""

    def __init__(self, window: float = 3.0) -> None:
        self.window = window
        self.points: list[tuple[float, int]] = []
        self.first = 0.0
        self.evaluating = 0.0  # seconds of evaluation so far, which are not of sampling

    def add(self, row: dict[str, Any]) -> None:
        self.first = self.first or row["steps_per_second"]
        self.points.append((row["seconds"] - self.evaluating, row["steps"]))
        self.evaluating += row.get("eval/seconds", 0.0)  # `seconds` is from before the evaluation
        while len(self.points) > 2 and self.points[-1][0] - self.points[0][0] > self.window:
            self.points.pop(0)

    @property
    def steps_per_second(self) -> float:
        if len(self.points) < 2:
            return self.first
        (early, before), (late, after) = self.points[0], self.points[-1]
        return (after - before) / max(late - early, 1e-9)


def progress(config: RunConfig, row: dict[str, Any]) -> tuple[float, str]:
    """The stop rule that the run is nearest to: the share that is done, from 0 to 1, and what it is a share of."""
    stop = config.stop
    rules: list[tuple[float, str]] = []
    reached = row.get("return_mean" if config.eval_every is None else "eval/return_mean")
    if stop.reward is not None and stop.reward > 0 and reached is not None:
        rules.append((max(0.0, reached / stop.reward), f"return {format_number(stop.reward)}"))
    if stop.steps is not None:
        rules.append((row["steps"] / stop.steps, f"{stop.steps:,} steps"))
    if stop.iterations is not None:
        rules.append((row["iteration"] / stop.iterations, f"{stop.iterations:,} iterations"))
    if stop.seconds is not None:
        rules.append((row["seconds"] / stop.seconds, format_duration(stop.seconds)))
    done, rule = max(rules, default=(0.0, "no stop rule"))
    return min(1.0, done), rule


def remaining_seconds(config: RunConfig, row: dict[str, Any], rate: float) -> float | None:
    """Seconds until the first stop rule is met, at the present speed; None if only the return can end the run."""
    stop, guesses = config.stop, []
    if stop.steps is not None and rate > 0:
        guesses.append((stop.steps - row["steps"]) / rate)
    if stop.seconds is not None:
        guesses.append(stop.seconds - row["seconds"])
    if stop.iterations is not None and row["iteration"]:
        guesses.append((stop.iterations - row["iteration"]) * row["seconds"] / row["iteration"])
    return max(0.0, min(guesses)) if guesses else None


def evaluation_of(row: dict[str, Any]) -> dict[str, Any]:
    """What a row of metrics says of an evaluation, to show it until the next; empty if it has none."""
    found = {name: value for name, value in row.items() if name.startswith("eval/")}
    return {**found, "eval/steps": row["steps"]} if found else {}


def progress_line(row: dict[str, Any], rate: float) -> str:
    """A row of metrics as one line for a log; `rate` in steps per second."""
    shares = " ".join(f"{label} {row[name]:.0%}" for name, label in PHASES.items() if name in row)
    if "updates_per_second" in row:
        shares = f"{row['updates_per_second']:,.0f} updates/s  ratio {row['replay_ratio']:.2f}  {shares}"
    if "policy_lag" in row:
        shares = f"lag {row['policy_lag']:.1f}  {shares}"
    if row.get("step_fraction") == 0:
        shares = f"step refused  {shares}"
    mean = format_number(row.get("return_mean"))
    if "eval/return_mean" in row:
        mean += f"  evaluation {format_number(row['eval/return_mean'])}"
    counters = f"{format_duration(row['seconds']):>8}  {row['steps']:>11,} steps"
    return f"{counters}  return {mean}  {rate:,.0f} steps/s  {shares}"


def algorithm_facts(row: dict[str, Any]) -> list[tuple[str, str, str]]:
    """Rows of the panel that depend on the algorithm: (name, fact, fact)."""
    if "step_fraction" in row:
        step = f"step {row['step_fraction']:.2f}" if row["step_fraction"] else "step refused"
        return [("trust region", f"KL {row['kl']:.4f}", f"{step}, {row['steps_refused']:.0f} refused so far")]
    if "policy_lag" in row:
        age = f"{row['policy_lag']:.1f} batches old, {row['policy_lag_max']:.0f} at most"
        return [("weights", age, f"{row['queue']:.0f} fragments wait, {row['fragments_dropped']:,.0f} dropped")]
    return replay_facts(row) if "updates_per_second" in row else []


def replay_facts(row: dict[str, Any]) -> list[tuple[str, str, str]]:
    """Rows of the panel for algorithms with a replay buffer."""
    epsilons = " ".join(f"{epsilon:.2g}" for epsilon in row["epsilons"][:8]) + (
        " …" if len(row["epsilons"]) > 8 else ""
    )
    return [
        ("transitions", f"{row['transitions_per_second']:,.0f}/s in", f"buffer {row['buffer_fill']:.0%} full"),
        ("updates", f"{row['updates_per_second']:,.0f}/s", f"{row['samples_per_second']:,.0f} samples/s"),
        ("ratio", f"{row['replay_ratio']:.2f}", f"mean priority {row['priority_mean']:.3g}"),
        ("epsilon", epsilons, f"weights {row['weights_age']:,.0f} updates old"),
    ]


def closing_lines(summary: dict[str, Any]) -> list[str]:
    """How the run ended, and the next command."""
    run, reason = summary["run"], summary["stop_reason"]
    interrupted = reason in ("interrupted", "limit")
    trust = " --trust  (it reads pickles)" if interrupted and needs_trust(summary["algo"]) else ""
    score = f"return {format_number(summary['return_mean'])}"
    if last := summary.get("evaluation"):
        score += f" ({format_number(last['return_mean'])} in the evaluation at {last['steps']:,} steps)"
    why = REASONS.get(reason, f"a callback stopped it ({reason})")
    return [
        f"{why}: {score} after {summary['steps']:,} steps, "
        f"{summary['episodes']:,} episodes, {format_duration(summary['seconds'])} "
        f"({summary['steps_per_second']:,.0f} steps/s)",
        f"run directory: {run}",
        f"next: fever {'resume' if interrupted else 'eval'} {run}{trust}",
    ]


def make_display(kind: str, to_stderr: bool = False) -> Display:
    """`auto` (live on a terminal and in a notebook, lines elsewhere), or `quiet`."""
    return for_audience(kind, to_stderr, Display, PlainDisplay, LiveDisplay)


def make_live(console: Console) -> Any:
    """What redraws in place: on a terminal rich's `Live`, which leaves nothing behind."""
    if in_notebook():
        return NotebookLive()
    from rich.live import Live

    return Live(console=console, auto_refresh=False, transient=True)


def for_audience(
    kind: str, to_stderr: bool, quiet: Callable[[], Any], plain: Callable[[TextIO], Any], live: Callable[[Console], Any]
) -> Any:
    """One of three displays: for `quiet`, for a stream that is not a terminal, or for a terminal or a notebook."""
    if kind == "quiet":
        return quiet()
    stream = sys.stderr if to_stderr else sys.stdout
    if in_notebook():
        from rich.console import Console

        return live(Console(file=stream, force_jupyter=False, width=WIDTH))
    if not stream.isatty() or current_job() is not None:  # some launchers give ranks a terminal that nobody sees
        return plain(stream)
    from rich.console import Console

    return live(Console(stderr=to_stderr))
