"""Commands that look at runs: scores, videos, tables, curves, exported policies."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from fever import layout
from fever.cli import completion
from fever.cli.jobs import Json
from fever.errors import FeverError
from fever.text import STATUS, format_count, format_number

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


@commands.command(name="eval")
def evaluate(
    run: RunName,
    episodes: Annotated[int, typer.Option(min=1, help="Number of episodes.")] = 20,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the episodes.")] = 1_000_000,
    stochastic: Annotated[
        bool, typer.Option("--stochastic", help="Sample actions instead of taking the most likely.")
    ] = False,
    checkpoint: Which = "best",
    runs: Runs = "runs",
    as_json: Json = False,
) -> None:
    """Evaluate a run's policy: play episodes and print their returns and lengths."""
    from fever.runs.evaluate import evaluate, source_of
    from fever.runs.run import Run

    found = Run.open(run, runs)
    chosen = found.checkpoint(checkpoint)
    scores = evaluate(chosen, source_of(found, chosen), episodes, seed, deterministic=not stochastic).summary()
    if as_json:
        print(json.dumps({"run": str(found.path), "checkpoint": chosen.iteration, **scores}))
        return
    title = f"{found.config.env}, checkpoint {chosen.iteration}, {episodes} episodes"
    _table([(key.replace("_", " "), format_number(value)) for key, value in scores.items() if key != "episodes"], title)


@commands.command()
def watch(
    run: RunName,
    to: Annotated[Path | None, typer.Option(help="File to write, .mp4 or .gif.  \\[default: in RUN/videos]")] = None,
    steps: Annotated[int, typer.Option(min=1, help="Greatest number of steps.")] = 1000,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the episode.")] = 1_000_000,
    checkpoint: Which = "best",
    runs: Runs = "runs",
) -> None:
    """Record a video of one episode with a run's policy."""
    from fever import api

    path, total = api.watch(run, to, steps=steps, seed=seed, checkpoint=checkpoint, runs=runs)
    print(f"{path}: one episode, return {format_number(total)}")


@commands.command(name="runs")
def list_all(runs: Runs = "runs", as_json: Json = False) -> None:
    """List the runs in a folder."""
    from fever.runs.run import list_runs

    rows = [_run_row(run) for run in list_runs(Path(runs).expanduser())]
    if as_json:
        print(json.dumps(rows))
    elif not rows:
        print(f"there is no run in {runs}; start one with: fever train CartPole-v1")
    else:
        _print_runs(rows)


def _print_runs(rows: list[dict[str, Any]]) -> None:
    """A table that fits 80 columns, and with room for them has environments and algorithms too."""
    from rich.console import Console
    from rich.table import Table

    console = Console(width=None if sys.stdout.isatty() else 200)
    columns = [name for name in rows[0] if console.width >= WIDE or name not in ("env", "algo")]
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
        table.add_row(*("-" if cells[name] is None else str(cells[name]) for name in columns))
    console.print(table, highlight=False)


def _run_row(run: Any) -> dict[str, Any]:
    row = {
        "run": run.path.name, "env": None, "algo": None, "status": "damaged", "workers": None, "steps": 0,
        "return": None, "steps/s": None,
    }  # fmt: skip
    try:
        config, summary = run.config, run.summary or {}
        last = run.last_row() or summary  # a search has no metrics of its own
        return row | {
            "env": config.env,
            "algo": f"tune {config.algo}" if config.search else config.algo,
            "status": run.status,
            "workers": "search" if config.search else config.workers,
            "steps": last.get("steps", 0),
            "return": last.get("return_mean"),
            "steps/s": (summary or last).get("steps_per_second"),
        }
    except FeverError:  # one run does not hide the others; `fever show` says what is wrong with it
        return row


@commands.command()
def show(run: RunName, runs: Runs = "runs", as_json: Json = False) -> None:
    """Show one run: status, settings, last metrics, checkpoints."""
    from fever.runs.run import Run

    found = Run.open(run, runs)
    config, facts, last = found.config, found.facts, found.last_row()
    checkpoints = [{"iteration": one.iteration, "score": one.score} for one in found.checkpoints()]
    if as_json:
        described = {"run": str(found.path), "status": found.status, "config": config.model_dump(mode="json")}
        print(json.dumps({**described, "facts": facts, "last": last, "checkpoints": checkpoints}))
        return
    status = STATUS.get(found.status, found.status)
    _table([("status", status), ("started", facts["time"]), ("fever", facts["fever"])], str(found.path))
    skipped = ("settings", "runs", "name")
    rows = [(key, plain(value)) for key, value in config.model_dump(mode="json").items() if key not in skipped]
    _table(rows + [(key, plain(value)) for key, value in config.settings.items()], "settings")
    _table(
        [(key, f"{value:,.4g}" if isinstance(value, float) else plain(value)) for key, value in last.items()],
        "last metrics",
    )
    _table([(str(one["iteration"]), f"score {format_number(one['score'])}") for one in checkpoints], "checkpoints")


@commands.command()
def plot(
    names: Annotated[
        list[str],
        typer.Argument(metavar="RUN...", help="One run or several, in one figure.", autocompletion=completion.runs),
    ],
    to: Annotated[
        Path | None, typer.Option(help="File to write: .png, .svg or .pdf.  \\[default: in the first RUN]")
    ] = None,
    runs: Runs = "runs",
) -> None:
    """Plot the learning curves of one or more runs."""
    from fever.runs.plot import plot
    from fever.runs.run import Run

    found = [Run.open(name, runs) for name in names]
    print(plot(found, to or found[0].path / (layout.CURVES if len(found) == 1 else layout.COMPARED)))


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
    if onnx:
        from fever.runs.onnx import DESCRIPTION, MODEL, export_onnx

        folder = export_onnx(found.checkpoint(checkpoint), to or found.path / layout.EXPORTED_ONNX)
        print(f"{folder / MODEL}: its inputs and outputs are described in {folder / DESCRIPTION}")
        return
    path = export(found.checkpoint(checkpoint), to or found.path / layout.EXPORTED)
    print(f"{path}: import it from {path.parent}, or copy it anywhere:")
    print(f"    from {path.name} import load; load().act(observation)")


def plain(value: Any) -> str:
    return json.dumps(value) if not isinstance(value, str) else value


def _table(rows: list[tuple[str, str]], title: str) -> None:
    width = max((len(key) for key, _ in rows), default=0)
    print(title)
    for key, value in rows:
        print(f"  {key:{width}}  {value}")
