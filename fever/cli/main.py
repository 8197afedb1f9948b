"""The command line. Nothing heavy is imported before a command needs it, so that `--help` answers at once."""

from __future__ import annotations

import atexit
import gc
import json
import logging
import os
import re
import signal
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from fever import __version__
from fever.cli.board import commands as board_commands
from fever.cli.completion import mend_scripts
from fever.cli.experiments import commands as experiment_commands
from fever.cli.experiments import train_seeds
from fever.cli.jobs import PLACE, Json, On, commands, leave_for, with_gpus
from fever.cli.machines import commands as cluster_commands
from fever.cli.options import (
    CHECKPOINTS,
    EVALUATION,
    FAILING,
    FIELDS,
    OLD,
    RUN,
    SEARCH,
    SEVERAL,
    STOP,
    WATCHING,
    as_typed,
    configuration,
    evaluation,
    gathers,
    stop_rules,
)
from fever.cli.options import workers as parse_workers
from fever.cli.runs import RunName, Runs, Trust
from fever.cli.runs import commands as run_commands
from fever.cli.scale import commands as scale_commands
from fever.cli.zoo import commands as zoo_commands
from fever.errors import FeverError, TrainingError
from fever.files import unbreakable, user_path
from fever.job import current_job
from fever.last_resort import last_resort
from fever.signals import Interrupts, signals_interrupt
from fever.text import clean, say, shorten

LONGEST_SENTENCE = 4000  # characters of an error; it may have what somebody else has written


class Interrupted(Exception):
    """Ctrl-C. Typer would turn a KeyboardInterrupt into its own exception and lose the message."""


class Commands(TyperGroup):
    """The group of all commands; hands on Ctrl-C as Interrupted. Until a command begins, signals end the process at
    once, as while modules are imported: Typer would end it without a word. Then SIGTERM and SIGHUP end it as they end
    any program, also one that is stuck, unless the command has its own way."""

    def invoke(self, ctx: Any) -> Any:
        before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
        try:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            for number in (signal.SIGTERM, signal.SIGHUP):
                if before[number] is not signal.SIG_IGN:
                    signal.signal(number, signal.SIG_DFL)
            return super().invoke(ctx)
        except KeyboardInterrupt as error:
            raise Interrupted(str(error)) from error
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


app = typer.Typer(
    cls=Commands,
    help="Train deep-reinforcement-learning agents with one command, on one machine or many.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)
app.add_typer(scale_commands)
app.add_typer(run_commands)
app.add_typer(experiment_commands)
app.add_typer(zoo_commands)
app.add_typer(board_commands)
app.add_typer(commands)
app.add_typer(cluster_commands)
mend_scripts()

TensorBoard = Annotated[bool, typer.Option("--tensorboard", help="Start TensorBoard on this machine while it trains.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print nothing but errors.")]


def _print_version(wanted: bool) -> None:
    if wanted:
        say(f"fever {__version__}")
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
@gathers("several", SEVERAL)
@gathers("options", RUN)
def train(
    options: dict[str, Any],
    several: dict[str, Any],
    old: dict[str, Any],
    place: dict[str, Any],
    tensorboard: TensorBoard = False,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Train an agent until a stop rule is met. Ctrl-C saves and prints how to continue."""
    _begin("train", {**options, **old}, place, quiet, as_json, several, tensorboard)


@app.command()
@gathers("place", PLACE)
@gathers("search", SEARCH)
@gathers("options", RUN)
def tune(
    options: dict[str, Any], search: dict[str, Any], place: dict[str, Any], quiet: Quiet = False, as_json: Json = False
) -> None:
    """Search for the best settings with many runs, for example over learning_rate=loguniform(1e-5,1e-2)."""
    _begin("tune", {**options, **search}, place, quiet, as_json)


@signals_interrupt()
def _begin(
    command: str,
    options: dict[str, Any],
    place: dict[str, Any],
    quiet: bool,
    as_json: bool,
    several: dict[str, Any] | None = None,
    tensorboard: bool = False,
) -> None:
    """Start a new run or search, or with `several` a run for each seed, on this machine or on the target of `--on`."""
    place = with_gpus(place, options)
    config = configuration(options, command, quiet, elsewhere="on" in place)
    _check_tensorboard(tensorboard, config, place, bool(several))
    if config.start_from is not None:
        from fever.training.start_from import resolve

        config = resolve(config)
    if several:
        train_seeds(config, several, place, quiet, as_json)
        return
    leave_for(config, place, quiet, as_json)
    if config.search is not None:
        _search(config, quiet, as_json)
        return
    with _patient(as_json):
        from fever.training import trainer

        summary = trainer.train(config, **_shown(tensorboard, quiet, as_json)).summary
    _finish(summary, as_json)


@contextmanager
def _patient(as_json: bool) -> Iterator[None]:
    """Signals interrupt the training only where that does no harm, but a process that does not react to them ends."""
    with Interrupts(held=True), last_resort(_give_up) as resort:
        if resort is not None and as_json:
            resort.report = lambda summary: say(json.dumps(summary))
        yield


def _give_up(at_once: bool) -> None:
    """End the process while nothing has been made that must be saved."""
    _fail("interrupted before anything was learned; nothing is left behind", 130)
    os._exit(130)


def _search(config: Any, quiet: bool, as_json: bool, **resumed: Any) -> None:
    """Run a search, a new one or one that is resumed."""
    from fever.tune import search
    from fever.tune.table import make_table

    table = make_table("quiet" if quiet else "auto", to_stderr=as_json)
    with last_resort(_leave_search):
        summary = search(config, display=table, **resumed)
    _finish(summary, as_json)


def _leave_search(at_once: bool) -> None:
    """End the process if the user has asked twice, although trials are still being stopped and saved."""
    if at_once:
        from fever.sampling.ray_cluster import kill_private_ray

        _fail("ended while the search was being saved; fever resume continues it, as after a kill", 130)
        kill_private_ray()
        os._exit(130)


@app.command()
@gathers("place", PLACE)
@gathers("evaluating", EVALUATION)
@gathers("saving", {**CHECKPOINTS, **FAILING, **WATCHING})
@gathers("stop", STOP)
@signals_interrupt()
def resume(
    run: RunName,
    stop: dict[str, Any],
    saving: dict[str, Any],
    evaluating: dict[str, Any],
    place: dict[str, Any],
    workers: Annotated[
        str | None, typer.Option(help="Sampler processes.  \\[default: as before; with --on and none before: all]")
    ] = None,
    cpus_per_worker: Annotated[
        int | None, typer.Option(help="Cores of its own for each worker.  \\[default: as before]")
    ] = None,
    runs: Runs = "runs",
    checkpoint: Annotated[str, typer.Option(help="last, best, or the number of an iteration.")] = "last",
    trust: Trust = False,
    tensorboard: TensorBoard = False,
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
    if cpus_per_worker is not None:
        changes["cpus_per_worker"] = cpus_per_worker
    typed = as_typed({**stop, **saving, **evaluating, "workers": workers, "cpus_per_worker": cpus_per_worker})
    config, dropped = resumed_config(found, stop_rules(stop), changes, checkpoint, "fever resume", typed)
    if dropped and not quiet:
        say(f"fever: the stop rule that ended the run ({', '.join(dropped)}) is dropped", sys.stderr)
    _check_tensorboard(tensorboard, config, place)
    if "on" in place and checkpoint != "last":
        raise FeverError(f"--checkpoint {checkpoint}: with --on, a run is resumed from its last checkpoint")
    if "on" in place:  # in the job itself the run counts as trusted
        _require_trust(found, searching, trust)
    leave_for(config, place, quiet, as_json, found)
    if searching:
        _search(config, quiet, as_json, run=found, trust=trust)
        return
    with _patient(as_json):
        from fever.training.resume import resume

        summary = resume(found, config, checkpoint, **_shown(tensorboard, quiet, as_json), trust=trust).summary
    _finish(summary, as_json)


def _require_trust(run: Any, searching: bool, trust: bool) -> None:
    """Refuse to resume a run elsewhere that holds pickles, or imports code and was not made here, without `trust`."""
    from fever.runs.trust import names_to_train

    run.trusted |= trust
    if searching:
        from fever.tune.study import may_resume

        may_resume(run, trust)
        return
    if run.checkpoints():
        run.checkpoint().require(trust)
    run.require_trust(names_to_train(run.config))


@app.command()
def doctor(on: On = None, runs: Runs = "runs") -> None:
    """Check this machine, or with --on the machines of a job: versions, host names, ports, clocks, folders, traps."""
    from fever.launch.doctor import examine

    if on is None:
        findings = examine()
    else:
        from fever.launch.checks import examine_target

        findings = examine_target(on, user_path(runs).resolve())
    for finding in findings:
        say(f"{finding.mark:7} {finding.topic:14} {finding.text}")
    if any(finding.mark == "problem" for finding in findings):
        raise typer.Exit(1)


def _display(quiet: bool, as_json: bool) -> Any:
    from fever.training.display import make_display

    return make_display("quiet" if quiet else "auto", to_stderr=as_json)


def _shown(tensorboard: bool, quiet: bool, as_json: bool) -> dict[str, Any]:
    """The arguments of a training that show it to a person: the display, and with `--tensorboard` a server."""
    display = _display(quiet, as_json)
    if not tensorboard:
        return {"display": display}
    from fever.training.tensorboard import Server

    return {"display": display, "callbacks": [Server(display.message)]}


def _check_tensorboard(wanted: bool, config: Any, place: dict[str, Any], several: bool = False) -> None:
    if wanted:
        from fever.training.tensorboard import check

        check(config, "on" in place, several)


def _finish(summary: dict[str, Any], as_json: bool) -> None:
    if as_json:
        say(json.dumps(summary))
    from fever.training.result import EXIT_CODES

    if summary["stop_reason"] in EXIT_CODES:
        raise typer.Exit(EXIT_CODES[summary["stop_reason"]])


READING = ("show", "plot", "runs", "export", "compare", "board", "zoo")  # commands that import no code of the user's


def _set_search_path() -> None:
    """Let modules be imported from the folder where fever is started, but by commands that need it only: the others may
    be started in a folder that somebody else has filled."""
    command, *words = sys.argv[1:] or [""]
    if command in READING or (command == "config" and not any(":" in word for word in words)):
        sys.path[:] = [path for path in sys.path if path not in ("", os.getcwd())]
    elif "" not in sys.path:
        sys.path.insert(0, "")


class WithoutLog(logging.Handler):
    """Prints warnings, without their tracebacks, where no run has a log."""

    def emit(self, record: logging.LogRecord) -> None:
        if logging.getLogger().handlers == [self]:
            own = record.name == "root" or record.name.startswith("fever")
            say(f"{'fever: ' if own else ''}{' '.join(record.getMessage().split())}", sys.stderr)


def main() -> None:
    """Run a command; every mistake in the input ends as one sentence and exit code 2."""
    if current_job() is not None:  # the scheduler may announce the time limit before the trainer handles the signal
        signal.signal(signal.SIGUSR1, signal.default_int_handler)
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # policies have small matrices, which threads slow down
    gc.set_threshold(100_000)  # imports allocate many objects that stay; collecting among them takes time
    sys.unraisablehook = lambda what: logging.info("ignored in %s: %r", what.object, what.exc_value)  # other libraries
    _set_search_path()
    logging.getLogger().addHandler(WithoutLog(logging.WARNING))
    sys.stdout, sys.stderr = unbreakable(sys.stdout), unbreakable(sys.stderr)
    code = _run()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # what other libraries do at the end is not to be interrupted
    in_job = current_job() is not None  # an ordinary exit would wait for a Ray that is gone
    if code == 130 and not in_job:
        # Threads of XLA may still compile, for which an ordinary exit does not wait: it aborted one of 260. And if the
        # interrupt came while a library's C code ran a string, Python would end this process without the exit code.
        atexit._run_exitfuncs()
    if code == 130 or in_job:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
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
    except MemoryError as error:  # of a size that the user has chosen
        return _fail(f"this does not fit into memory: {error}", 2)
    except Interrupted as error:
        return _fail(f"interrupted {error}", 130)
    except Exception as error:  # noqa: BLE001 - a mistake of ours, or in the user's code
        if hasattr(error, "format_message"):  # a usage error of Typer's; it is empty if help was printed instead
            sentence = re.sub(r"^Invalid value for '(.*?)': Input should be ", r"\1: must be ", error.format_message())
            return _fail(sentence.partition(", unable to parse")[0], 2) if sentence else 2
        sys.stderr.write(clean(traceback.format_exc()))
        return 1


def _fail(error: object, code: int) -> int:
    say(f"fever: {shorten(' '.join(str(error).split()), LONGEST_SENTENCE)}", sys.stderr)
    return code


if __name__ == "__main__":
    main()
