"""`fever scale`: is there a real speedup with more workers, nodes or hosts?"""

from __future__ import annotations

import json
import math
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fever.cli.jobs import PLACE, PLACE_PANEL, Json
from fever.cli.options import EVALUATION, RUN, STOP, configuration, gathers
from fever.errors import FeverError
from fever.text import brief, parse_duration, say

if TYPE_CHECKING:
    from fever.config import RunConfig

MOST = 10_000  # of a count
COUNTED = ("workers", "nodes", "hosts")
LEFT_OUT = {"workers", *EVALUATION, *(name for name in STOP if name != "stop_window")}
TRAINED = {name: option for name, option in RUN.items() if name not in LEFT_OUT}
PLACES = {name: PLACE[name] for name in PLACE if name not in ("nodes", "hosts", "requeue", "dry_run", "detach")}
commands = typer.Typer()


def _numbers(help: str, panel: str | None = None) -> Any:
    return typer.Option(metavar="N,N,...", help=help, rich_help_panel=panel)


Workers = Annotated[str | None, _numbers("Numbers of workers to compare; 0: one process.")]
Nodes = Annotated[str | None, _numbers("Numbers of machines to compare.", PLACE_PANEL)]
Hosts = Annotated[str | None, _numbers("Numbers of a cluster's hosts to compare.", PLACE_PANEL)]
Predict = Annotated[str | None, _numbers("Numbers to predict.  \\[default: the next powers of two]")]


@commands.command()
@gathers("place", PLACES)
@gathers("options", TRAINED)
def scale(
    options: dict[str, Any],
    place: dict[str, Any],
    workers: Workers = None,
    nodes: Nodes = None,
    hosts: Hosts = None,
    rounds: Annotated[int, typer.Option(min=1, max=100, help="Measurements of every number, in turns.")] = 3,
    seconds: Annotated[str, typer.Option(help="Time of a measurement, after its warm-up: 10s, 1m.")] = "10s",
    target: Annotated[float | None, typer.Option(help="Measure the time until this mean return, too.")] = None,
    longest: Annotated[str, typer.Option(help="Time limit of one run, warm-up included.")] = "10m",
    predict: Predict = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print the report only.")] = False,
    as_json: Json = False,
) -> None:
    """Measure how much faster a training gets with more workers, nodes or hosts, say why, and predict more."""
    given = {name: text for name, text in zip(COUNTED, (workers, nodes, hosts), strict=True) if text is not None}
    kind, counts = _what_is_counted(given, place)
    _check_place(place, kind, counts)
    config = configuration(options, "train", quiet, elsewhere="on" in place)
    ahead = None if predict is None else list(_read_counts("predict", predict, 1))
    times = _duration("--seconds", seconds), _duration("--longest", longest)
    if target is not None and not math.isfinite(target):
        raise FeverError(f"--target {target}: must be a return that can be reached, a finite number")
    if times[1] <= times[0]:
        raise FeverError(f"--longest {longest} must be more than --seconds {seconds}: the warm-up is part of it")
    study = _measure(_resolved(config, kind), kind, counts, rounds, times, target, place, ahead, quiet)
    _print(study, as_json)
    if not study.facts["complete"]:
        raise typer.Exit(130)


def _what_is_counted(given: dict[str, str], place: dict[str, Any]) -> tuple[str, tuple[int, ...]]:
    """What is counted, and the counts in order; a single number of nodes or hosts, beside counts of workers, goes to
    `place`."""
    for name in ("nodes", "hosts"):
        if "workers" in given and name in given:
            (place[name],) = _read_counts(name, given.pop(name), 1, most=1)
    elsewhere = [*place, *(name for name in ("nodes", "hosts") if name in given)]
    if elsewhere and "on" not in place:
        raise FeverError(f"--{elsewhere[0].replace('_', '-')} has no effect without --on; add --on TARGET")
    if place.get("on") == "mpi":
        raise FeverError("--on mpi: the ranks of one launcher are one number of machines; submit with --on slurm")
    if len(given) != 1:
        raise FeverError("say what to compare: --workers 0,1,2,4, or with --on TARGET --nodes 1,2,3 or --hosts 1,2,3")
    ((kind, text),) = given.items()
    counts = _read_counts(kind, text, 0 if kind == "workers" else 1)
    if len(counts) < 2:
        raise FeverError(f"--{kind} {text}: a comparison takes two numbers or more, for example --{kind} 1,2,4")
    return kind, counts


def _check_place(place: dict[str, Any], kind: str, counts: tuple[int, ...]) -> None:
    """Refuse a target that does not exist, and options that it does not have."""
    if "on" in place:
        from fever.launch.targets import load_target

        more = {} if kind == "workers" else {kind: counts[0]}
        load_target(place["on"], {name: value for name, value in place.items() if name != "on"} | more)


def _read_counts(name: str, text: str, least: int, most: int | None = None) -> tuple[int, ...]:
    """The numbers in `1,2,4`, the smallest first. Raises FeverError if one is none, too small or too large, or comes
    twice, or if there are too many."""
    words = [word.strip() for word in text.split(",")]
    if not all(word.isascii() and word.isdigit() and len(word) < 6 and least <= int(word) <= MOST for word in words):
        raise FeverError(f"--{name} {text}: must be whole numbers from {least} to {MOST:,}, such as --{name} 1,2,4")
    counts = tuple(sorted(map(int, words)))
    if len(set(counts)) < len(counts):
        raise FeverError(f"--{name} {text}: a number comes twice; --rounds says how often each is measured")
    if most is not None and len(counts) > most:
        raise FeverError(f"--{name} {text}: compare either {name} or workers, with one number of the other")
    return counts


def _duration(option: str, text: str) -> float:
    try:
        value = parse_duration(text)
    except ValueError as error:
        raise FeverError(f"{option}: {error}") from None
    if not 0 < value < 1e9:
        raise FeverError(f"{option} {brief(text)}: must be more than 0 s")
    return value


def _resolved(config: RunConfig, kind: str) -> RunConfig:
    """A configuration that can be run: no search, with the weights to begin with found."""
    if config.search is not None:
        raise FeverError("fever scale compares runs; the file describes a search")
    if kind != "workers" and config.workers not in (None, "all"):
        raise FeverError(f"workers: {config.workers} in the file: with --{kind} every core gets a worker; remove it")
    if config.start_from is None:
        return config
    from fever.training.start_from import resolve

    return resolve(config)


def _measure(
    config: RunConfig,
    kind: str,
    counts: tuple[int, ...],
    rounds: int,
    times: tuple[float, float],
    target: float | None,
    place: dict[str, Any],
    ahead: list[int] | None,
    quiet: bool,
) -> Any:
    from fever.scaling.measure import Plan
    from fever.scaling.study import run_study

    def tell(sentence: str) -> None:
        if not quiet:
            say(f"fever: {' '.join(sentence.split())}", sys.stderr)

    from fever.envs.source import EnvSource
    from fever.zoo.preset import find_preset, line

    source = EnvSource(config.env, config.env_kwargs)
    if told := line(config, find_preset(config, source.name, source.kwargs), source.name):
        tell(told)
    plan = Plan(config, kind, counts, rounds, times[0], target, times[1], place)
    return run_study(plan, ahead, tell)


def _print(study: Any, as_json: bool) -> None:
    from fever.scaling.report import lines

    if as_json:
        say(json.dumps(study.facts))
        return
    say("\n".join(lines(study.figures, study.predicted, study.load)))
    say(f"{study.folder}: report.md, report.json, speedup.png, speedup.svg")
