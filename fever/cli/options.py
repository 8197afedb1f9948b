"""The options of `train` and `tune`, and the configuration that they describe together."""

from __future__ import annotations

import functools
import inspect
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fever.cli import completion
from fever.errors import FeverError
from fever.text import say, shorten

if TYPE_CHECKING:
    from fever.config import RunConfig


def _option(kind: Any, help: str, *names: str, **more: Any) -> Any:
    return Annotated[kind | None, typer.Option(*names, help=help, **more)]


STOP = {  # when a run ends
    "stop_reward": _option(float, "Stop at this mean return over the last episodes."),
    "stop_steps": _option(str, "Stop after this many environment steps: 50000, 200k, 1M."),
    "stop_time": _option(str, "Stop after this time: 90s, 10m, 2h."),
    "stop_iterations": _option(int, "Stop after this many training iterations."),
    "stop_window": _option(int, "Number of episodes that the mean return is taken over.  \\[default: 20]"),
}
CHECKPOINTS = {
    "checkpoint_every": _option(str, "Time between checkpoints: 30s, 10m.  \\[default: 10s]"),
    "checkpoint_keep": _option(int, "Number of latest checkpoints to keep, besides the best.  \\[default: 3]"),
}
FAILING = {  # what is done about environments that fail
    "step_timeout": _option(str, "Time limit for one step of an environment: 30s. One that hangs is made anew."),
    "reset_timeout": _option(str, "Time limit for one reset of an environment: 2m. One that hangs is made anew."),
    "max_env_failures": _option(
        int, "Failed environments are made anew; more failures in an hour end the run.  \\[default: 100]"
    ),
}
WATCHING = {  # what else is called while a run trains
    "callback": _option(
        list[str], 'Callback of your own: module:Name, or module:Name={"size": 3}; repeatable.', "--callback"
    ),
    "video_every": _option(str, "Film an episode after every so many environment steps: 100k, 1M."),
    "log": _option(list[str], "Experiment tracker: wandb or mlflow; repeatable.", "--log"),
}
EVALUATION = {  # of the policy, while it trains
    "eval_every": _option(str, "Evaluate after every so many environment steps: 20k, 1M."),
    "eval_episodes": _option(int, "Episodes of an evaluation.  \\[default: 10]"),
    "eval_env_kwargs": _option(str, "Arguments of evaluation's environments that differ, as a JSON object."),
}
RUN = {  # what is trained
    "env": Annotated[
        str | None,
        typer.Argument(
            help="Gymnasium id, module:Id-v0, or module:Name of a class or factory.",
            autocompletion=completion.settings_beside_file,
        ),
    ],
    "settings": Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[NAME=VALUE]...",
            help="Settings of the algorithm; see: fever config ALGO.",
            autocompletion=completion.settings,
        ),
    ],
    "algo": _option(
        str,
        "Algorithm, one of RLlib's such as rllib:SAC, or module:Class of your own.  \\[default: ppo]",
        autocompletion=completion.algorithms,
    ),
    "start_from": _option(
        str,
        "Begin with the weights of another run: RUN or RUN:CHECKPOINT (last, best, or a number).",
        "--from",
        autocompletion=completion.runs,
    ),
    "workers": _option(
        str,
        "Sampler processes; 0: this process, auto: measure, all: one per core, ranks: one per rank.  "
        "\\[default: 0; with --on or --cpus-per-worker: all]",
    ),
    "envs": _option(int, "Environments of the whole run, which workers share.  \\[default: 8]"),
    "scale_batch": _option(
        bool, "Give every worker that many environments; batch and learning rate grow.", "--scale-batch"
    ),
    "preset": _option(
        bool,
        "Take the zoo's settings for this environment and algorithm: fever zoo.  \\[default: preset]",
        "--preset/--no-preset",
    ),
    "starts_at_once": _option(int, "Workers that make their environments at the same time.  \\[default: 64]"),
    "seed": _option(int, "Seed that all random streams are derived from.  \\[default: 0]"),
    "env_kwargs": _option(str, "The environment's keyword arguments, as a JSON object."),
    **STOP,
    **CHECKPOINTS,
    **FAILING,
    **WATCHING,
    **EVALUATION,
    "runs": _option(str, "Folder of run directories.  \\[default: runs]", envvar="FEVER_RUNS"),
    "name": _option(str, "Name of the run directory."),
    "device": _option(str, "Where the learner runs: auto, cpu or gpu.  \\[default: auto]"),
    "cpus_per_worker": _option(
        int, "Cores of its own for each worker, its threads and child processes.  \\[default: 1, shared]"
    ),
    "gpus_per_worker": _option(float, "Share of a GPU for each worker's environments.  \\[default: 0]"),
    "file": _option(str, "YAML file with any of these, or a file of the former `rllib train`.", "-f", "--file"),
}
OPTIONS = {"method": "search", "start_from": "from"}  # name of an option here -> on the command line
FIELDS = {  # option -> field, if called differently
    "stop_time": "seconds",
    "checkpoint_every": "checkpoint_seconds",
    "callback": "callbacks",
    "log": "loggers",
}


def _hidden(kind: Any, *names: str) -> Any:
    return Annotated[kind | None, typer.Option(*names, hidden=True)]


OLD = {  # options of the former `rllib train`, which tutorials still teach: understood, with a hint
    "run": _hidden(str),
    "old_env": _hidden(str, "--env"),
    "name_env": _hidden(str),
    "num_workers": _hidden(int),
    "num_cpus": _hidden(int),
    "num_gpus": _hidden(float),
    "config": _hidden(str),
    "stop": _hidden(str),
    "framework": _hidden(str),
    "experiment_name": _hidden(str),
    "local_dir": _hidden(str),
    "checkpoint_freq": _hidden(int),
    "checkpoint_at_end": _hidden(bool, "--checkpoint-at-end"),
    "ray_num_cpus": _hidden(int),
    "ray_num_gpus": _hidden(int),
}
SEARCH = {  # further options of `tune`
    "trials": _option(int, "Number of trials.  \\[default: 20]"),
    "method": _option(str, "How values are proposed: random, grid, optuna.  \\[default: random]", "--search"),
    "scheduler": _option(str, "none; asha: end bad trials early; pbt: continue from good ones.  \\[default: none]"),
    "seeds": _option(int, "Runs of every trial, with consecutive seeds.  \\[default: 1]"),
    "parallel": _option(int, "Trials at the same time.  \\[default: one for each core]"),
}
SEVERAL = {  # further options of `train`, for runs that differ in their seed only
    "seeds": _option(int, "Train with this many consecutive seeds, side by side, and draw one curve with its band."),
    "parallel": _option(int, "With --seeds: runs at the same time.  \\[default: as many as the cores allow]", min=1),
}


def gathers(argument: str, options: dict[str, Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command these options. Those that were typed arrive in one dictionary, the argument of this name."""

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(command)
        def gathered(**arguments: Any) -> None:
            values = {name: arguments.pop(name) for name in options}
            command(**{argument: {name: value for name, value in values.items() if value is not None}}, **arguments)

        own = inspect.signature(command, eval_str=True).parameters
        kind = inspect.Parameter.KEYWORD_ONLY
        parameters = [inspect.Parameter(name, kind, default=None, annotation=hint) for name, hint in options.items()]
        parameters += [parameter.replace(kind=kind) for name, parameter in own.items() if name != argument]
        gathered.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        gathered.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return gathered

    return decorate


def read_options(
    options: dict[str, Any], command: str, hint: Callable[[str], None]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Values of a configuration and of its search, from a file and from the options, which override the file."""
    words = {name.removeprefix("old_"): options[name] for name in OLD if name in options}
    values: dict[str, Any] = {}
    understood: dict[str, Any] = {}
    search: dict[str, Any] = {}
    assignments = list(options.get("settings", ()))
    env = options.get("env")
    if env is not None and "=" in env:  # the file names the environment; the first word is a setting
        assignments.insert(0, env)
        env = None
    if "file" in options:
        values, search, env = _read_file(options["file"], env, hint)
    if words:
        from fever.rllib.legacy.options import translate_options

        understood, hints = translate_options(words)
        values |= understood
        for sentence in hints:
            hint(sentence)
    skipped = ("env", "settings", "file", *STOP)
    given = {FIELDS.get(name, name): options[name] for name in RUN if name in options and name not in skipped}
    given |= {"env": env} if env is not None else {}
    given |= {"workers": workers(given["workers"])} if "workers" in given else {}
    if "env_kwargs" in given:
        given["env_kwargs"] = {**understood.get("env_kwargs", {}), **json_object(given["env_kwargs"], "--env-kwargs")}
    given |= evaluation({name: given[name] for name in EVALUATION if name in given}, values)
    values |= given
    _name_currently(values, hint)
    space, assigned = _divide(assignments, command)
    search["space"] = {**search.get("space", {}), **space}
    stop = stop_rules(options)
    if "iterations" in assigned:  # a stop rule: no algorithm has such a setting
        stop = {"iterations": assigned.pop("iterations"), **stop}
    where = options.get("file", f"fever {command}")
    values["settings"] = {**_mapping(values, "settings", where), **assigned}
    values["stop"] = {**_mapping(values, "stop", where), **stop}
    if "env" not in values:
        raise FeverError(f"name an environment to train on, for example: fever {command} CartPole-v1")
    return values, search


def _name_currently(values: dict[str, Any], hint: Callable[[str], None]) -> None:
    """Give an old id its current name and arguments, and refuse an algorithm that RLlib no longer has."""
    from fever.envs.old_ids import find_current

    env, algo = values.get("env"), values.get("algo")
    if isinstance(env, str) and (current := find_current(env)) is not None:
        arguments = {**current.arguments, **_mapping(values, "env_kwargs", env)}
        values |= {"env": current.id} | ({"env_kwargs": arguments} if arguments else {})
        hint(current.note)
    if isinstance(algo, str) and algo.startswith("rllib:"):
        from fever.rllib.legacy.translate import refuse_removed

        refuse_removed(algo.removeprefix("rllib:"), f"--algo {algo}")


def configuration(options: dict[str, Any], command: str, quiet: bool, elsewhere: bool) -> RunConfig:
    """The configuration that the options of `train` or `tune` describe."""
    from fever.config import RunConfig, validate

    def hint(sentence: str) -> None:
        if not quiet:
            say(f"fever: {sentence}", sys.stderr)

    values, found = read_options(options, command, hint)
    where = options.get("file", f"fever {command}")
    if command == "tune":
        asked = {name: options[name] for name in SEARCH if name in options}
        kept = _mapping(values, "search", where)
        space = {**_mapping(kept, "space", f"{where}: search"), **found["space"]}
        values["search"] = {**kept, **found, **asked, "space": space}
    elif elsewhere and "workers" not in values and not values.get("search") and not _says_workers(values):
        values["workers"] = "all"
    typed = as_typed(options)
    if command == "tune":
        typed["search.space"] = "nothing to search"  # a mapping by now, and refused if it is empty
    return validate(RunConfig, values, where, typed)


def as_typed(options: dict[str, Any]) -> dict[str, str]:
    """Field of the configuration -> the words that set it, for messages: `{"stop.seconds": "--stop-time 1m"}`."""
    words = {}
    for name, value in options.items():
        part = "stop." if name in STOP else "search." if name in SEARCH else ""
        field = FIELDS.get(name, name.removeprefix("stop_") if part == "stop." else name)
        option = f"--{OPTIONS.get(name, name.replace('_', '-'))}"
        words[part + field] = " ".join(f"{option} {one}" for one in (value if isinstance(value, list) else [value]))
    for word in options.get("settings", ()):
        if word.startswith("iterations="):
            words["stop.iterations"] = word
    return words


def _mapping(values: dict[str, Any], name: str, where: str) -> dict[str, Any]:
    """The mapping of this name among some values, empty if there is none."""
    found = values.get(name)
    if not isinstance(found, dict | None):
        raise FeverError(f"{where}: {name}={found!r} cannot be used: must be a mapping such as {name}: {{name: value}}")
    return found or {}


def _read_file(
    name: str, env: str | None, hint: Callable[[str], None]
) -> tuple[dict[str, Any], dict[str, Any], str | None]:
    """The values in a YAML file, its search if it is RLlib's, and the environment that overrides the file's.

    The file is fever's, or one of the former `rllib train -f`, in which `FILE:EXPERIMENT` chooses an experiment.
    """
    from fever.config import load_yaml
    from fever.rllib.legacy.files import is_old_yaml, read_experiment

    path, _, experiment = name.rpartition(":") if not os.path.exists(name) and ":" in name else (name, "", None)
    values = load_yaml(Path(path))
    if not is_old_yaml(values):
        return values, {}, env
    values, search, notes = read_experiment(values, path, experiment, env)
    for note in notes:
        hint(note)
    return {"preset": False, **values}, search, None  # what it leaves out is RLlib's default, not the zoo's


def _says_workers(values: dict[str, Any]) -> bool:
    """Whether the settings set the number of workers, under a name of the library that the algorithm is from."""
    from fever.algos.registry import find_provider

    provider = find_provider(str(values.get("algo")))
    return provider is not None and any(provider.run_field(name) == "workers" for name in values["settings"])


def _divide(assignments: list[str], command: str) -> tuple[dict[str, str], dict[str, Any]]:
    """Settings to search, with their ranges, and settings with a value."""
    from fever.config import parse_assignments
    from fever.tune.space import is_space_expression

    space: dict[str, str] = {}
    rest = []
    for word in assignments:
        name, equals, text = word.partition("=")
        if equals and is_space_expression(text):
            if command != "tune":
                raise FeverError(f"{word} is a range of values, which only a search takes: fever tune")
            space[name.strip()] = text.strip()
        else:
            rest.append(word)
    return space, parse_assignments(rest)


def stop_rules(options: dict[str, Any]) -> dict[str, Any]:
    """The stop rules among some options, under the names of the options."""
    return {name.removeprefix("stop_"): options[name] for name in STOP if name in options}


def evaluation(given: dict[str, Any], values: dict[str, Any]) -> dict[str, Any]:
    """The options of evaluation among those given, as values of a configuration that has these values already."""
    others = [name for name in given if name != "eval_every"]
    if others and "eval_every" not in given and values.get("eval_every") is None:
        raise FeverError(f"--{others[0].replace('_', '-')} needs --eval-every, for example: --eval-every 20k")
    if "eval_env_kwargs" not in given:
        return given
    return given | {"eval_env_kwargs": json_object(given["eval_env_kwargs"], "--eval-env-kwargs")}


def workers(text: str) -> int | str:
    """The value of `--workers`."""
    if text in ("auto", "all", "ranks"):
        return text
    try:
        return int(text)
    except ValueError:
        raise FeverError(f"--workers {text}: must be a whole number, auto, all or ranks") from None


def json_object(text: str, option: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise FeverError(f"{option} {shorten(text, 1000)}: not JSON: {error}") from None
    if not isinstance(value, dict):
        raise FeverError(f'{option} {text}: must be a JSON object such as {{"size": 5}}')
    return value
