"""Commands that look at runs: scores, videos, tables, curves, exported policies."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from fever import layout
from fever.cli import completion
from fever.cli.jobs import Json
from fever.cli.options import json_object
from fever.errors import FeverError
from fever.files import user_path
from fever.text import STATUS, format_count, format_number, one_line, say, shorten

EVAL_SEED = 1_000_000  # that episodes' seeds are derived from
FEW = 10  # episodes, up to which `eval` prints each
SHOWN = ("return_mean", "return_std", "return_min", "return_max", "length_mean")
LARGEST = 1e300  # number that is shown; a damaged row may have any
COLUMNS = ("run", "env", "algo", "status", "workers", "steps", "return", "steps/s")  # of the table of runs
LONGEST_NAME, LONGEST_VALUE = 100, 1000  # characters in a line of `show`; a run may come from anyone
WIDE = 100  # terminal width from which the table of runs shows all its columns
commands = typer.Typer()
Runs = Annotated[str, typer.Option(envvar="FEVER_RUNS", help="Folder of run directories.")]
RunName = Annotated[
    str,
    typer.Argument(
        metavar="RUN", help="Path of a run, its name in the folder of runs, or: last.", autocompletion=completion.runs
    ),
]
Which = Annotated[str, typer.Option("--checkpoint", help="best, last, or the number of an iteration.")]


Env = Annotated[str | None, typer.Option(help="Another environment with the same spaces.  \\[default: the run's]")]
EnvKwargs = Annotated[
    str | None, typer.Option(help="The environment's keyword arguments that differ from the run's, as a JSON object.")
]
Trust = Annotated[
    bool,
    typer.Option(
        "--trust", help="Import what the run names, and read its pickles: only if you know who wrote it (SECURITY.md)."
    ),
]
Scales = Annotated[
    list[str] | None,
    typer.Option(help="ENV=LOW,HIGH: the scores that count as 0 and 1, to average environments; repeatable."),
]
Stochastic = Annotated[bool, typer.Option("--stochastic", help="Sample actions instead of taking the most likely.")]


@commands.command(name="eval")
def evaluate(
    run: RunName,
    episodes: Annotated[int, typer.Option(min=1, help="Number of episodes.")] = 20,
    max_steps: Annotated[int | None, typer.Option(min=1, help="Cut off episodes after this many steps.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed that those of the episodes are derived from.")] = EVAL_SEED,
    env: Env = None,
    env_kwargs: EnvKwargs = None,
    stochastic: Stochastic = False,
    compare: Annotated[
        bool | None, typer.Option(help="Play sampled actions as well.  \\[default: if it is a matter of seconds]")
    ] = None,
    table: Annotated[bool | None, typer.Option(help="Print every episode.  \\[default: of up to 10 episodes]")] = None,
    checkpoint: Which = "best",
    trust: Trust = False,
    runs: Runs = "runs",
    as_json: Json = False,
) -> None:
    """Evaluate a run's policy: play episodes and print their returns and lengths."""
    from fever.runs.evaluate import compare_sampled, evaluate

    found, chosen, source = _open(run, runs, checkpoint, env, env_kwargs, trust)
    told = EpisodeCounter(episodes)
    scores = evaluate(chosen, source, episodes, seed, not stochastic, max_steps, told)
    sampled = None if stochastic else compare_sampled(chosen, source, scores, seed, max_steps, compare)
    told.end()
    notes = evaluation_notes(source.name, scores, sampled)
    _note_missing_score(found, chosen, checkpoint)
    if as_json:
        described = {"run": str(found.path), "checkpoint": chosen.iteration, "env": source.name}
        more = {"distinct_starts": scores.distinct, "sampled": sampled and sampled.summary(), "notes": notes}
        say(json.dumps({**described, **scores.summary(), **more, "per_episode": scores.rows()}))
        return
    if table or (table is None and episodes <= FEW):
        print_episodes(scores.rows())
    low, high = scores.interval or (None, None)
    interval = "-" if low is None else f"{format_number(low)} to {format_number(high)}"
    rows = [(key.replace("_", " "), format_number(value)) for key, value in scores.summary().items() if key in SHOWN]
    rows.insert(1, ("95 % interval", interval))
    if sampled is not None:
        rows.append(("sampled actions", f"return mean {format_number(float(sampled.returns.mean()))}"))
    _table(rows, f"{source.name}, checkpoint {chosen.iteration}, {episodes} episodes")
    for note in notes:
        say(f"fever: {note}", sys.stderr)


@commands.command()
def watch(
    run: RunName,
    to: Annotated[
        Path | None, typer.Option("--out", "--to", help="File to write, .mp4 or .gif.  \\[default: in RUN/videos]")
    ] = None,
    episodes: Annotated[int, typer.Option(min=1, help="Number of episodes, one after the other.")] = 1,
    steps: Annotated[int, typer.Option(min=1, help="Greatest number of steps of an episode.")] = 1000,
    seed: Annotated[int, typer.Option(min=0, help="Seed that those of the episodes are derived from.")] = EVAL_SEED,
    env: Env = None,
    env_kwargs: EnvKwargs = None,
    stochastic: Stochastic = False,
    checkpoint: Annotated[
        str, typer.Option(help="best, last, or the number of an iteration; several with commas make a video each.")
    ] = "best",
    trust: Trust = False,
    runs: Runs = "runs",
) -> None:
    """Record a video of a run's policy; the episodes are the first ones that eval plays."""
    from fever.runs.film import film, path_of
    from fever.signals import signals_interrupt

    words = [word.strip() for word in checkpoint.split(",")]
    opened = {word: _open(run, runs, word, env, env_kwargs, trust) for word in words}
    filmed: dict[int, str] = {}
    for word, (found, chosen, source) in opened.items():
        if chosen.iteration in filmed:
            say(f"fever: the {word} checkpoint is the same as {filmed[chosen.iteration]}: {chosen.name}", sys.stderr)
            continue
        filmed[chosen.iteration] = word
        told, place = EpisodeCounter(episodes), path_of(to, word, len(words) > 1)
        try:
            with signals_interrupt():
                path, rows = film(found, chosen, source, place, steps, seed, not stochastic, episodes, told)
        finally:
            told.end()
        mean = format_number(sum(row["return"] for row in rows) / episodes)
        what = f"one episode, return {mean}" if episodes == 1 else f"{episodes} episodes, return mean {mean}"
        say(f"{path}: {what} (checkpoint {chosen.name})")
        print_episodes(rows)
        _note_missing_score(found, chosen, word)


def _open(
    run: str, runs: str, which: str, env: str | None, env_kwargs: str | None, trust: bool
) -> tuple[Any, Any, Any]:
    """A run, its checkpoint, and the environment to play in."""
    from fever.runs.evaluate import source_of
    from fever.runs.run import Run
    from fever.runs.trust import accept

    found = Run.open(run, runs, trust)
    arguments = json_object(env_kwargs, "--env-kwargs") if env_kwargs is not None else {}
    chosen = _choose(found, which)
    source = source_of(found, env, arguments, chosen)
    if trust:
        accept(found.path, found.config)
    return found, chosen, source


def _choose(run: Any, which: str) -> Any:
    """A checkpoint; says so if another one than the one meant is taken, because that is damaged."""
    chosen = run.checkpoint(which)
    if chosen.note:
        say(f"fever: {chosen.note}; using {chosen.name}", sys.stderr)
    return chosen


def _note_missing_score(found: Any, chosen: Any, which: str) -> None:
    """Say so if the best checkpoint is only the last one, because none has a score."""
    if which == "best" and chosen.score is None:
        evaluated = found.config.eval_every is not None
        why = "it was not evaluated yet" if evaluated else "fewer than 20 episodes ended"
        say(f"fever: no checkpoint of {found.path} has a score ({why}): the last one was used", sys.stderr)


@commands.command(name="runs")
def list_all(runs: Runs = "runs", as_json: Json = False) -> None:
    """List the runs in a folder."""
    from fever.runs.run import list_runs

    rows = [_run_row(run) for run in list_runs(user_path(runs))]
    if as_json:
        say(json.dumps(rows))
        return
    if not rows:
        say(f"there is no run in {runs}; start one with: fever train CartPole-v1")
    if whole := [row for row in rows if row["problem"] is None]:
        _print_runs(whole)
    for row in rows:
        if row["problem"] is not None:
            say(one_line(f"{row['run']}  damaged: {row['problem']}"))


def _print_runs(rows: list[dict[str, Any]]) -> None:
    """A table that fits 80 columns, and with room for them has environments and algorithms too."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(width=None if sys.stdout.isatty() else 200)
    columns = [name for name in COLUMNS if console.width >= WIDE or name not in ("env", "algo")]
    table = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 1, 0, 0))
    for name in columns:
        side: Any = "left" if name in ("run", "env", "algo", "status") else "right"
        table.add_column(name, justify=side, no_wrap=name != "run", overflow="fold")  # a long name takes two lines
    for row in rows:
        cells = row | {
            "status": STATUS.get(row["status"], row["status"]),
            "steps": format_count(row["steps"]),
            "return": format_number(row["return"]),
            "steps/s": "-" if row["steps/s"] is None else format_count(row["steps/s"]),
        }
        texts = ("-" if cells[name] is None else one_line(str(cells[name])) for name in columns)
        table.add_row(*(Text(text) for text in texts))
    console.print(table, highlight=False)


def _run_row(run: Any) -> dict[str, Any]:
    row = {
        "run": run.path.name, "env": None, "algo": None, "status": "damaged", "workers": None, "steps": 0,
        "return": None, "steps/s": None, "problem": None,
    }  # fmt: skip
    try:
        config, summary = run.config, run.summary or {}
        last = run.last_row() or summary  # a search has no metrics of its own
        return row | {
            "env": config.env,
            "algo": f"tune {config.algo}" if config.search else config.algo,
            "status": run.status,
            "workers": "search" if config.search else config.workers,
            "steps": _number(last.get("steps")) or 0,
            "return": _number(last.get("return_mean")),
            "steps/s": _number((summary or last).get("steps_per_second")),
        }
    except Exception as error:  # noqa: BLE001 - one run does not hide the others, whatever is in its files
        problem = str(error) if isinstance(error, FeverError | OSError) else repr(error)
        return row | {"problem": shorten(problem.replace(f"{run.path}/", ""), 1000)}


def _number(value: Any) -> float | None:
    """A number from a row that may be damaged; None if it is none."""
    return value if isinstance(value, (int, float)) and abs(value) < LARGEST else None


@commands.command()
def show(run: RunName, runs: Runs = "runs", as_json: Json = False) -> None:
    """Show one run: status, settings, last metrics, checkpoints."""
    from fever.runs.run import Run

    found = Run.open(run, runs)
    config, facts, last = found.config, found.facts, found.last_row()
    checkpoints = [
        {"iteration": one.iteration, "score": one.score, "score_of": one.score_of} for one in found.checkpoints()
    ]
    if as_json:
        described = {"run": str(found.path), "status": found.status, "config": config.model_dump(mode="json")}
        say(json.dumps({**described, "facts": facts, "last": last, "checkpoints": checkpoints}))
        return
    status, error = STATUS.get(found.status, found.status), (found.summary or {}).get("error")
    started = [(label, plain(facts.get(name, "-"))) for label, name in (("started", "time"), ("fever", "fever"))]
    failure = [] if error is None else [("error", plain(error))]
    _table([("status", status), *failure, *started], str(found.path))
    skipped = ("settings", "runs", "name")
    rows = [(key, plain(value)) for key, value in config.model_dump(mode="json").items() if key not in skipped]
    _table(rows + [(key, plain(value)) for key, value in config.settings.items()], "settings")
    _table(
        [(key, f"{value:,.4g}" if isinstance(value, float) else plain(value)) for key, value in last.items()],
        "last metrics",
    )
    _table([(str(one["iteration"]), _score_text(one)) for one in checkpoints], "checkpoints")


@commands.command()
def plot(
    names: Annotated[
        list[str],
        typer.Argument(
            metavar="RUN...",
            help="One run or several, in one figure; with --by and its like also patterns such as 'runs/*'.",
            autocompletion=completion.runs,
        ),
    ],
    to: Annotated[
        Path | None,
        typer.Option("--out", "--to", help="File to write: .png, .svg or .pdf.  \\[default: in the first RUN]"),
    ] = None,
    by: Annotated[
        str | None,
        typer.Option(help="One mean curve with its band over seeds for each: algo, env, seed, workers, any setting."),
    ] = None,
    rows: Annotated[
        str | None, typer.Option(help="One row of panels for each value of this: nodes, any setting.")
    ] = None,
    columns: Annotated[str | None, typer.Option(help="One column of panels for each value of this.")] = None,
    metric: Annotated[str | None, typer.Option(help="What is drawn.  \\[default: return_mean]")] = None,
    x: Annotated[str | None, typer.Option("--x", help="Over steps, time or episodes.  \\[default: steps]")] = None,
    scale: Scales = None,
    runs: Runs = "runs",
) -> None:
    """Plot the learning curves of one or more runs, or means over seeds."""
    with _without_matplotlibrc():
        from fever.runs.plot import check_picture, plot

    if to is not None:
        check_picture(to)
    look = {"by": by, "rows": rows, "columns": columns, "metric": metric, "x": x, "scale": scale}
    if given := {name: value for name, value in look.items() if value is not None and value != []}:
        say(str(_plot_groups(names, to, given, runs)))
        return
    from fever.experiments.select import find_runs

    found, notes = find_runs(names, runs)
    _say_notes(notes)
    say(str(plot(found, to or found[0].to_write(layout.CURVES if len(found) == 1 else layout.COMPARED))))


@contextmanager
def _without_matplotlibrc() -> Iterator[None]:
    """A block that imports Matplotlib, which reads a file matplotlibrc in the working folder first. Somebody else may
    have filled that folder (SECURITY.md), and a pipe of that name never ends."""
    here = os.getcwd() if os.path.lexists("matplotlibrc") else None
    try:
        if here is not None:
            os.chdir("/")
        yield
    finally:
        if here is not None:
            os.chdir(here)


def _say_notes(notes: list[str]) -> None:
    for note in notes:
        say(one_line(f"fever: {note}"), sys.stderr)


def _plot_groups(names: list[str], to: Path | None, look: dict[str, Any], runs: str) -> Path:
    """Draw means over seeds, of all runs of the experiments that are named; returns the path of the picture."""
    from fever.experiments.compare import parse_scale
    from fever.experiments.figure import Look, draw
    from fever.experiments.select import find_groups
    from fever.runs.plot import save

    groups = find_groups(names, runs)
    _say_notes([note for group in groups for note in group.notes])
    found = {str(run.path): run for group in groups for run in group.runs}
    figure, notes = draw([*found.values()], Look(**{**look, "scale": parse_scale(look.get("scale", ()))}))
    _say_notes(notes)
    path = to or next(iter(found.values())).to_write(layout.COMPARED)
    save(figure, path)
    return path


@commands.command()
def export(
    run: RunName,
    to: Annotated[
        Path | None, typer.Option(help="Folder to write.  \\[default: RUN/exported_policy or RUN/exported_onnx]")
    ] = None,
    onnx: Annotated[
        bool, typer.Option("--onnx", help="Write an ONNX graph instead, for programs without Python.")
    ] = False,
    checkpoint: Which = "best",
    runs: Runs = "runs",
) -> None:
    """Export a run's policy as a Python package that needs NumPy only, or as ONNX."""
    from fever.runs.export import export
    from fever.runs.run import Run

    found = Run.open(run, runs)
    chosen = _choose(found, checkpoint)
    if onnx:
        from fever.runs.onnx import DESCRIPTION, MODEL, export_onnx

        folder = export_onnx(chosen, to or found.to_write(layout.EXPORTED_ONNX))
        say(f"{folder / MODEL}: its inputs and outputs are described in {folder / DESCRIPTION}")
        _note_missing_score(found, chosen, checkpoint)
        return
    path = export(chosen, to or found.to_write(layout.EXPORTED))
    say(f"{path}: import it from {path.parent}, or copy it anywhere:")
    say(f"    from {path.name} import load; load().act(observation)")
    _note_missing_score(found, chosen, checkpoint)


def _score_text(checkpoint: dict[str, Any]) -> str:
    score = checkpoint["score"]
    return f"score {format_number(score)} ({checkpoint['score_of']})" if score is not None else "no score"


def plain(value: Any) -> str:
    return json.dumps(value) if not isinstance(value, str) else value


class EpisodeCounter:
    """Shows on a terminal how many episodes have been played, if it takes a while."""

    def __init__(self, episodes: int) -> None:
        self.episodes, self.shown = episodes, time.monotonic() + 1
        self.visible = False

    def __call__(self, done: int) -> None:
        if sys.stderr.isatty() and time.monotonic() > self.shown:
            sys.stderr.write(f"\r{done} of {self.episodes} episodes")
            sys.stderr.flush()
            self.shown, self.visible = time.monotonic() + 0.2, True

    def end(self) -> None:
        """Remove the line."""
        if self.visible:
            sys.stderr.write("\r\033[K")
            sys.stderr.flush()


def evaluation_notes(name: str, scores: Any, sampled: Any) -> list[str]:
    """What a reader of the scores should know: that episodes were alike, that sampled actions are better."""
    from fever.runs.player import alike_sentence

    notes = [alike_sentence(name, scores.distinct, f"{len(scores.returns)} episodes")] if scores.alike else []
    if sampled is not None and scores.is_below(sampled):
        greedy, other = (format_number(float(one.returns.mean())) for one in (scores, sampled))
        notes.append(f"greedy {greedy}, sampled {other}: the policy has not converged; use --stochastic")
    return notes


def print_episodes(rows: list[dict[str, Any]]) -> None:
    """One line for each episode."""
    for row in rows:
        end = (row["end"] or "").replace("_", " ")
        numbers = f"{format_number(row['return']):>12}  {row['length']:>7,} steps"
        say(f"{row['episode']:>5}  seed {row['seed']:<10}  return {numbers}  {end}".rstrip())


def _table(rows: list[tuple[str, str]], title: str) -> None:
    rows = [(shorten(key, LONGEST_NAME), shorten(value, LONGEST_VALUE)) for key, value in rows]
    width = max((len(key) for key, _ in rows), default=0)
    say(one_line(title))
    for key, value in rows:
        say(one_line(f"  {key:{width}}  {value}"))
