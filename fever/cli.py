"""The command line. Nothing heavy is imported before a command needs it, so that `--help` answers at once."""

from __future__ import annotations

import gc
import json
import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from fever.errors import FeverError, TrainingError

app = typer.Typer(
    help="Train deep-reinforcement-learning agents with one command, on one machine or many.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)

Runs = Annotated[str, typer.Option(envvar="FEVER_RUNS", help="Folder of run directories.")]
RunName = Annotated[
    str, typer.Argument(metavar="RUN", help="A run: its path, its name in the folder of runs, or: last.")
]
Which = Annotated[str, typer.Option("--checkpoint", help="best, last, or an iteration's number.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print nothing but errors.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object as the last line of stdout.")]
StopReward = Annotated[float | None, typer.Option(help="Stop at this mean return over the last episodes.")]
StopSteps = Annotated[int | None, typer.Option(help="Stop after this many environment steps.")]
StopTime = Annotated[str | None, typer.Option(help="Stop after this time: 90s, 10m, 2h.")]
StopIterations = Annotated[int | None, typer.Option(help="Stop after this many training iterations.")]
StopWindow = Annotated[int | None, typer.Option(help="Episodes that the mean return is taken over.  [default: 20]")]


@app.command()
def train(
    env: Annotated[
        str | None, typer.Argument(help="Gymnasium id, module:Id-v0, or module:Name of a class or factory.")
    ] = None,
    settings: Annotated[
        list[str] | None, typer.Argument(metavar="[NAME=VALUE]...", help="Settings; see: fever config ALGO.")
    ] = None,
    algo: Annotated[str | None, typer.Option(help="Algorithm.  [default: ppo]")] = None,
    workers: Annotated[
        str | None, typer.Option(help="Sampler processes; 0: this process, auto: measure and decide.  [default: 0]")
    ] = None,
    envs: Annotated[int | None, typer.Option(help="Environments per worker.  [default: 8]")] = None,
    seed: Annotated[int | None, typer.Option(help="The one seed that all others come from.  [default: 0]")] = None,
    env_kwargs: Annotated[str | None, typer.Option(help="The environment's arguments, as a JSON object.")] = None,
    stop_reward: StopReward = None,
    stop_steps: StopSteps = None,
    stop_time: StopTime = None,
    stop_iterations: StopIterations = None,
    stop_window: StopWindow = None,
    runs: Annotated[
        str | None, typer.Option(envvar="FEVER_RUNS", help="Folder of run directories.  [default: runs]")
    ] = None,
    name: Annotated[str | None, typer.Option(help="Name of the run directory.")] = None,
    device: Annotated[str | None, typer.Option(help="Where the learner runs: auto, cpu or gpu.")] = None,
    file: Annotated[Path | None, typer.Option("-f", "--file", help="YAML file with any of these; options win.")] = None,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Train an agent until a stop rule is met; Ctrl-C saves and says how to go on."""
    from fever.config import RunConfig, load_yaml, parse_assignments, validate

    assignments = list(settings or [])
    if env is not None and "=" in env:  # the environment is in the file and the first word is a setting
        assignments.insert(0, env)
        env = None
    values = load_yaml(file) if file else {}
    given = {
        "env": env, "algo": algo, "workers": _workers(workers), "envs": envs, "seed": seed, "runs": runs, "name": name,
        "device": device, "env_kwargs": _json_object(env_kwargs, "--env-kwargs"),
    }  # fmt: skip
    values |= {key: value for key, value in given.items() if value is not None}
    assigned = parse_assignments(assignments)
    if "iterations" in assigned and stop_iterations is None:  # no algorithm has it: how long a run is, is a stop rule
        stop_iterations = assigned.pop("iterations")
    values["settings"] = {**(values.get("settings") or {}), **assigned}
    stop = _stop_rules(stop_reward, stop_steps, stop_time, stop_iterations, stop_window)
    values["stop"] = {**(values.get("stop") or {}), **stop}
    if "env" not in values:
        raise FeverError("say what to train on, for example: fever train CartPole-v1")
    config = validate(RunConfig, values, str(file) if file else "fever train")
    from fever import trainer

    result = trainer.train(config, display=_display(quiet, as_json))
    _finish(result.summary, as_json)


@app.command()
def resume(
    run: RunName,
    stop_reward: StopReward = None,
    stop_steps: StopSteps = None,
    stop_time: StopTime = None,
    stop_iterations: StopIterations = None,
    stop_window: StopWindow = None,
    runs: Runs = "runs",
    checkpoint: Annotated[str, typer.Option(help="last, best, or an iteration's number.")] = "last",
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Go on with a run from its checkpoint; new stop rules replace the old ones of the same kind."""
    from fever.config import RunConfig, validate
    from fever.run import Run

    found = Run.open(run, runs)
    values = found.config.model_dump(mode="json")
    stop = _stop_rules(stop_reward, stop_steps, stop_time, stop_iterations, stop_window)
    if "time" in stop:
        values["stop"].pop("seconds")
    values["stop"] |= stop
    config = validate(RunConfig, values, "fever resume")
    from fever import trainer

    result = trainer.resume(found, config, checkpoint, display=_display(quiet, as_json))
    _finish(result.summary, as_json)


@app.command(name="eval")
def evaluate(
    run: RunName,
    episodes: Annotated[int, typer.Option(min=1, help="Episodes to play.")] = 20,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the episodes.")] = 1_000_000,
    stochastic: Annotated[bool, typer.Option("--stochastic", help="Draw actions instead of the likeliest.")] = False,
    checkpoint: Which = "best",
    runs: Runs = "runs",
    as_json: Json = False,
) -> None:
    """Play episodes with a run's policy and print the scores."""
    from fever.evaluate import evaluate, source_of
    from fever.run import Run

    found = Run.open(run, runs)
    chosen = found.checkpoint(checkpoint)
    scores = evaluate(chosen, source_of(found), episodes, seed, deterministic=not stochastic).summary()
    if as_json:
        print(json.dumps({"run": str(found.path), "checkpoint": chosen.iteration, **scores}))
        return
    title = f"{found.config.env}, checkpoint {chosen.iteration}, {episodes} episodes"
    _table([(key.replace("_", " "), f"{value:,.2f}") for key, value in scores.items() if key != "episodes"], title)


@app.command()
def watch(
    run: RunName,
    to: Annotated[Path | None, typer.Option(help="The file, .mp4 or .gif.  [default: RUN/videos/]")] = None,
    steps: Annotated[int, typer.Option(min=1, help="Steps to film at most.")] = 1000,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the episode.")] = 1_000_000,
    checkpoint: Which = "best",
    runs: Runs = "runs",
) -> None:
    """Film one episode of a run's policy."""
    for name, value in {
        "PYGAME_HIDE_SUPPORT_PROMPT": "1",
        "SDL_VIDEODRIVER": "dummy",
        "SDL_AUDIODRIVER": "dummy",
    }.items():
        os.environ.setdefault(name, value)
    from fever.evaluate import can_write_mp4, record, source_of
    from fever.run import Run

    found = Run.open(run, runs)
    chosen = found.checkpoint(checkpoint)
    path = to or found.path / "videos" / f"{chosen.path.name}.{'mp4' if can_write_mp4() else 'gif'}"
    total = record(chosen, source_of(found), path, steps, seed)
    print(f"{path}: one episode, return {total:,.1f}")


@app.command(name="runs")
def list_all(runs: Runs = "runs", as_json: Json = False) -> None:
    """List the runs in a folder."""
    from fever.run import list_runs

    rows = [_run_row(run) for run in list_runs(Path(runs).expanduser())]
    if as_json:
        print(json.dumps(rows))
    elif not rows:
        print(f"there is no run in {runs}; start one with: fever train CartPole-v1")
    else:
        from rich.console import Console
        from rich.table import Table

        table = Table(box=None, header_style="bold")
        for column in rows[0]:
            table.add_column(column, justify="right" if column in ("steps", "return", "steps/s") else "left")
        for row in rows:
            table.add_row(*(f"{cell:,.1f}" if isinstance(cell, float) else f"{cell}" for cell in row.values()))
        Console(width=None if sys.stdout.isatty() else 200).print(table)


def _run_row(run: Any) -> dict[str, Any]:
    config, last = run.config, (run.metrics() or [{}])[-1]
    return {
        "run": run.path.name,
        "env": config.env,
        "algo": config.algo,
        "status": run.status,
        "steps": last.get("steps", 0),
        "return": last.get("return_mean", "-"),
        "steps/s": (run.summary or last).get("steps_per_second", "-"),
    }


@app.command()
def show(run: RunName, runs: Runs = "runs", as_json: Json = False) -> None:
    """Show one run: how it stands, its settings, its checkpoints."""
    from fever.run import Run

    found = Run.open(run, runs)
    config, facts, last = found.config, found.facts, (found.metrics() or [{}])[-1]
    checkpoints = [{"iteration": one.iteration, "score": one.score} for one in found.checkpoints()]
    if as_json:
        described = {"run": str(found.path), "status": found.status, "config": config.model_dump(mode="json")}
        print(json.dumps({**described, "facts": facts, "last": last, "checkpoints": checkpoints}))
        return
    _table([("status", found.status), ("started", facts["time"]), ("fever", facts["fever"])], str(found.path))
    skipped = ("settings", "runs", "name")
    rows = [(key, _plain(value)) for key, value in config.model_dump(mode="json").items() if key not in skipped]
    _table(rows + [(key, _plain(value)) for key, value in config.settings.items()], "settings")
    _table(
        [(key, f"{value:,.4g}" if isinstance(value, float) else _plain(value)) for key, value in last.items()],
        "last metrics",
    )
    _table([(str(one["iteration"]), f"score {_plain(one['score'])}") for one in checkpoints], "checkpoints")


@app.command()
def plot(
    names: Annotated[list[str], typer.Argument(metavar="RUN...", help="One run or several, for one picture.")],
    to: Annotated[
        Path | None, typer.Option(help="The picture: .png, .svg or .pdf.  [default: in the first RUN]")
    ] = None,
    runs: Runs = "runs",
) -> None:
    """Draw the curves of one or more runs."""
    from fever.report import plot
    from fever.run import Run

    found = [Run.open(name, runs) for name in names]
    print(plot(found, to or found[0].path / ("curves.png" if len(found) == 1 else "compared.png")))


@app.command()
def config(algo: Annotated[str | None, typer.Argument(help="An algorithm; none: list them.")] = None) -> None:
    """Every setting of an algorithm: default, meaning and where the default comes from."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    from fever.algos import ALGORITHMS, config_of

    if algo is None:
        print("\n".join(ALGORITHMS))
        return
    table = Table(box=None, header_style="bold", title=f"settings of {algo}", title_justify="left")
    for column in ("setting", "default", "meaning", "source"):
        table.add_column(column, no_wrap=column in ("setting", "default"))
    for name, field in config_of(algo).model_fields.items():
        extra = field.json_schema_extra
        source = str(extra["source"]) if isinstance(extra, dict) else ""
        table.add_row(name, _plain(field.default), escape(field.description or ""), source)
    Console(width=None if sys.stdout.isatty() else 160).print(table)


@app.command()
def export(
    run: RunName,
    to: Annotated[Path | None, typer.Option(help="The folder to make.  [default: RUN/exported_policy]")] = None,
    checkpoint: Which = "best",
    runs: Runs = "runs",
) -> None:
    """Write a run's policy as a folder that acts with NumPy alone."""
    from fever.export import export
    from fever.run import Run

    found = Run.open(run, runs)
    path = export(found.checkpoint(checkpoint), to or found.path / "exported_policy")
    print(f"{path}: import it from {path.parent}, or copy it anywhere:")
    print(f"    from {path.name} import load; load().act(observation)")


@app.command()
def doctor() -> None:
    """Check this machine: versions, cores, memory, accelerators, optional parts and known traps."""
    from fever.doctor import examine

    findings = examine()
    for finding in findings:
        print(f"{finding.mark:7} {finding.topic:14} {finding.text}")
    if any(finding.mark == "problem" for finding in findings):
        raise typer.Exit(1)


def _workers(text: str | None) -> int | str | None:
    if text is None or text == "auto":
        return text
    try:
        return int(text)
    except ValueError:
        raise FeverError(f"--workers takes a number or auto, not {text!r}") from None


def _json_object(text: str | None, option: str) -> dict[str, Any] | None:
    if text is None:
        return None
    try:
        value = json.loads(text)
    except ValueError as error:
        raise FeverError(f"{option} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise FeverError(f'{option} takes a JSON object such as {{"size": 5}}')
    return value


def _stop_rules(
    reward: float | None, steps: int | None, time: str | None, iterations: int | None, window: int | None
) -> dict[str, Any]:
    rules = {"reward": reward, "steps": steps, "time": time, "iterations": iterations, "window": window}
    return {name: value for name, value in rules.items() if value is not None}


def _display(quiet: bool, as_json: bool) -> Any:
    from fever.display import make_display

    return make_display("quiet" if quiet else "auto", to_stderr=as_json)


def _finish(summary: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print(json.dumps(summary))
    if summary["stop_reason"] == "interrupted":
        raise typer.Exit(130)


def _plain(value: Any) -> str:
    return json.dumps(value) if not isinstance(value, str) else value


def _table(rows: list[tuple[str, str]], title: str) -> None:
    width = max((len(key) for key, _ in rows), default=0)
    print(title)
    for key, value in rows:
        print(f"  {key:{width}}  {value}")


def main() -> None:
    """Run a command; every mistake in the input ends as one sentence and exit code 2."""
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # NumPy's; acting has small matrices, which threads slow down
    gc.set_threshold(100_000)  # imports allocate much that stays for good; looking for garbage there takes time
    if "" not in sys.path:
        sys.path.insert(0, "")  # modules in the folder where fever is started can be imported
    try:
        sys.exit(app(standalone_mode=False) or 0)
    except FeverError as error:
        _fail(error, 2)
    except TrainingError as error:
        _fail(error, 1)
    except KeyboardInterrupt as error:
        _fail(f"interrupted {error}", 130)
    except BrokenPipeError:  # `fever runs | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)
    except Exception as error:
        sentence = getattr(error, "format_message", None)  # what Typer's usage errors have
        if sentence is None:
            raise
        _fail(sentence(), 2)


def _fail(error: object, code: int) -> None:
    text = " ".join(str(error).split())
    print(f"fever: {text}", file=sys.stderr)
    sys.exit(code)


if __name__ == "__main__":
    main()
