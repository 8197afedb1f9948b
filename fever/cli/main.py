"""The command line. Nothing heavy is imported before a command needs it, so that `--help` answers at once."""

from __future__ import annotations

import gc
import json
import logging
import os
import re
import signal
import sys
import traceback
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from fever import __version__
from fever.cli.completion import algorithms, mend_scripts
from fever.cli.jobs import PLACE, Json, On, commands, leave_for
from fever.cli.machines import commands as cluster_commands
from fever.cli.options import (
    CHECKPOINTS,
    EVALUATION,
    FIELDS,
    OLD,
    RUN,
    SEARCH,
    STOP,
    WATCHING,
    as_typed,
    configuration,
    evaluation,
    gathers,
    stop_rules,
)
from fever.cli.options import workers as parse_workers
from fever.cli.runs import RunName, Runs, plain
from fever.cli.runs import commands as run_commands
from fever.errors import FeverError, TrainingError
from fever.job import CONTINUED, current_job


class Interrupted(Exception):
    """Ctrl-C. Typer would turn a KeyboardInterrupt into its own exception and lose the message."""


class Commands(TyperGroup):
    """The group of all commands; hands on Ctrl-C as Interrupted."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt as error:
            raise Interrupted(str(error)) from error


app = typer.Typer(
    cls=Commands,
    help="Train deep-reinforcement-learning agents with one command, on one machine or many.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)
app.add_typer(run_commands)
app.add_typer(commands)
app.add_typer(cluster_commands)
mend_scripts()

Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print nothing but errors.")]
Trust = Annotated[
    bool, typer.Option("--trust", help="Read the run's pickles, which can execute any code: only if you trust the run.")
]
ENDINGS = {"interrupted": 130, "limit": CONTINUED}  # stop reasons that are no success -> exit codes


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"fever {__version__}")
        raise typer.Exit


@app.callback()
def options_of_all(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Train deep-reinforcement-learning agents with one command, on one machine or many."""


@app.command()
@gathers("place", PLACE)
@gathers("old", OLD)
@gathers("options", RUN)
def train(
    options: dict[str, Any], old: dict[str, Any], place: dict[str, Any], quiet: Quiet = False, as_json: Json = False
) -> None:
    """Train an agent until a stop rule is met. Ctrl-C saves and prints how to continue."""
    _begin("train", {**options, **old}, place, quiet, as_json)


@app.command()
@gathers("place", PLACE)
@gathers("search", SEARCH)
@gathers("options", RUN)
def tune(
    options: dict[str, Any], search: dict[str, Any], place: dict[str, Any], quiet: Quiet = False, as_json: Json = False
) -> None:
    """Search for the best settings with many runs, for example over learning_rate=loguniform(1e-5,1e-2)."""
    _begin("tune", {**options, **search}, place, quiet, as_json)


def _begin(command: str, options: dict[str, Any], place: dict[str, Any], quiet: bool, as_json: bool) -> None:
    """Start a new run or search, on this machine or on the target of `--on`."""
    config = configuration(options, command, quiet, elsewhere="on" in place)
    if config.start_from is not None:
        from fever.training.start_from import resolve

        config = resolve(config)
    leave_for(config, place, quiet, as_json)
    if config.search is not None:
        _search(config, quiet, as_json)
        return
    from fever.training import trainer

    _finish(trainer.train(config, display=_display(quiet, as_json)).summary, as_json)


def _search(config: Any, quiet: bool, as_json: bool, **resumed: Any) -> None:
    """Run a search, a new one or one that is resumed."""
    from fever.tune import search
    from fever.tune.table import make_table

    table = make_table("quiet" if quiet else "auto", to_stderr=as_json)
    _finish(search(config, display=table, **resumed), as_json)


@app.command()
@gathers("place", PLACE)
@gathers("evaluating", EVALUATION)
@gathers("saving", {**CHECKPOINTS, **WATCHING})
@gathers("stop", STOP)
def resume(
    run: RunName,
    stop: dict[str, Any],
    saving: dict[str, Any],
    evaluating: dict[str, Any],
    place: dict[str, Any],
    workers: Annotated[
        str | None, typer.Option(help="Sampler processes.  \\[default: as before; with --on and none before: all]")
    ] = None,
    runs: Runs = "runs",
    checkpoint: Annotated[str, typer.Option(help="last, best, or the number of an iteration.")] = "last",
    trust: Trust = False,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Resume a run from its checkpoint. Stop rules given here replace the old ones."""
    from fever.launch.dispatch import open_to_resume
    from fever.training.resume import resumed_config

    found = open_to_resume(run, runs, here="on" not in place)
    before = found.config
    changes = {FIELDS.get(name, name): value for name, value in saving.items()}
    changes |= evaluation(evaluating, before.model_dump(mode="json"))
    searching = before.search is not None
    if workers is not None:
        changes["workers"] = parse_workers(workers)
    elif "on" in place and before.workers == 0 and not searching:
        changes["workers"] = "all"  # it was trained in one process so far, and has machines now
    typed = as_typed({**stop, **saving, **evaluating, "workers": workers})
    config, dropped = resumed_config(found, stop_rules(stop), changes, checkpoint, "fever resume", typed)
    if dropped and not quiet:
        print(f"fever: the stop rule that ended the run ({', '.join(dropped)}) is dropped", file=sys.stderr)
    if "on" in place and checkpoint != "last":
        raise FeverError(f"--checkpoint {checkpoint}: with --on, a run is resumed from its last checkpoint")
    if "on" in place:  # in the job itself the run counts as trusted
        _require_trust(found, searching, trust)
    leave_for(config, place, quiet, as_json, found)
    if searching:
        _search(config, quiet, as_json, run=found, trust=trust)
        return
    from fever.training import trainer

    result = trainer.resume(found, config, checkpoint, display=_display(quiet, as_json), trust=trust)
    _finish(result.summary, as_json)


def _require_trust(run: Any, searching: bool, trust: bool) -> None:
    """Refuse to resume a run with pickles elsewhere, unless it is trusted."""
    if searching:
        from fever.tune.study import may_resume

        may_resume(run, trust)
    elif run.checkpoints():
        run.checkpoint().require(trust)


@app.command()
def config(
    algo: Annotated[
        str | None, typer.Argument(help="Algorithm; without it, list all.", autocompletion=algorithms)
    ] = None,
) -> None:
    """Print every setting of an algorithm: default, meaning, and the source of the default."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    from fever.algos.registry import config_of, find_provider, list_algorithms

    if algo is None:
        print("\n".join(list_algorithms()))
        return
    provider = find_provider(algo)
    if provider is not None:
        rows = provider.describe_settings(algo)
    else:
        fields = config_of(algo).model_fields
        rows = [(name, plain(field.default), field.description or "", _source(field)) for name, field in fields.items()]
    table = Table(box=None, header_style="bold", title=f"settings of {algo}", title_justify="left")
    for column in ("setting", "default", "meaning", "source"):
        table.add_column(column, no_wrap=column in ("setting", "default"))
    for name, default, meaning, source in rows:
        table.add_row(name, default, escape(meaning), source)
    Console(width=None if sys.stdout.isatty() else 160).print(table)


def _source(field: Any) -> str:
    extra = field.json_schema_extra
    return str(extra["source"]) if isinstance(extra, dict) else ""


@app.command()
def doctor(on: On = None, runs: Runs = "runs") -> None:
    """Check this machine, or with --on the machines of a job: versions, host names, ports, clocks, folders, traps."""
    from fever.launch.doctor import examine

    if on is None:
        findings = examine()
    else:
        from fever.launch.checks import examine_target

        findings = examine_target(on, Path(runs).expanduser().resolve())
    for finding in findings:
        print(f"{finding.mark:7} {finding.topic:14} {finding.text}")
    if any(finding.mark == "problem" for finding in findings):
        raise typer.Exit(1)


def _display(quiet: bool, as_json: bool) -> Any:
    from fever.training.display import make_display

    return make_display("quiet" if quiet else "auto", to_stderr=as_json)


def _finish(summary: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print(json.dumps(summary))
    if summary["stop_reason"] in ENDINGS:
        raise typer.Exit(ENDINGS[summary["stop_reason"]])


def main() -> None:
    """Run a command; every mistake in the input ends as one sentence and exit code 2."""
    if current_job() is not None:  # the scheduler may announce the time limit before the trainer handles the signal
        signal.signal(signal.SIGUSR1, signal.default_int_handler)
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # policies have small matrices, which threads slow down
    gc.set_threshold(100_000)  # imports allocate many objects that stay; collecting among them takes time
    sys.unraisablehook = lambda what: logging.info("ignored in %s: %r", what.object, what.exc_value)  # other libraries
    if "" not in sys.path:
        sys.path.insert(0, "")  # modules in the folder where fever is started can be imported
    code = _run()
    if current_job() is not None:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)  # an ordinary exit would wait for a Ray that is gone
    sys.exit(code)


def _run() -> int:
    """Run the command; returns the exit code."""
    try:
        return app(standalone_mode=False) or 0
    except SystemExit as end:  # of Typer's, or of the user's code
        if end.code is None or isinstance(end.code, int):
            return end.code or 0
        return _fail(end.code, 1)
    except FeverError as error:
        return _fail(error, 2)
    except TrainingError as error:
        return _fail(error, 1)
    except Interrupted as error:
        return _fail(f"interrupted {error}", 130)
    except BrokenPipeError:  # `fever runs | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception as error:  # noqa: BLE001 - a mistake of ours, or in the user's code
        if hasattr(error, "format_message"):  # a usage error of Typer's; it is empty if help was printed instead
            sentence = re.sub(r"^Invalid value for '(.*?)': Input should be ", r"\1: must be ", error.format_message())
            return _fail(sentence.partition(", unable to parse")[0], 2) if sentence else 2
        traceback.print_exc()
        return 1


def _fail(error: object, code: int) -> int:
    print(f"fever: {' '.join(str(error).split())}", file=sys.stderr)
    return code


if __name__ == "__main__":
    main()
