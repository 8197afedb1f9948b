"""Translates options of the removed `rllib train` to fever's, with a hint for each."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

from fever.algos.registry import ALGORITHMS
from fever.errors import FeverError
from fever.rllib.legacy.old_names import RLLIB_ALGORITHMS, RLLIB_WINDOW
from fever.rllib.legacy.reader import Reader, numbers, read_stop_rules, report_bad_input
from fever.rllib.legacy.translate import Translation, current_algorithm, current_env, translate


def translate_options(given: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Options of `rllib train`, as fields of RunConfig, and a hint for each that says what to write instead.

    `config` and `stop` are mappings, or JSON text of mappings.
    """
    with report_bad_input("the command line"):
        return _translate({name: value for name, value in given.items() if value is not None})


def _translate(given: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    config, rules = _object(given, "config"), _object(given, "stop")
    values: dict[str, Any] = {}
    hints: list[str] = []
    if "run" in given:
        values["algo"], hint = _translate_run(str(given["run"]), config is not None)
        hints.append(hint)
    for name in ("name_env", "env"):
        if name in given:
            values["env"], arguments, notes = current_env(str(given[name]), {})
            values |= {"env_kwargs": arguments} if arguments else {}
            spelt = f"--{name.replace('_', '-')} {given[name]}"
            hints += [f"{spelt}: the environment is the first argument: fever train {values['env']}", *notes]
    for name, (own, text) in OLD_OPTIONS.items():
        if name in given:
            values |= {own: given[name]} if own and own not in values else {}
            hints.append(f"--{name.replace('_', '-')} {given[name]}: {text.format(given[name])}")
    if config is not None:
        translation = _translate_config(config, given)
        values = {**values, **translation.values}
        hints += [note for note in translation.notes if note not in hints]
    if rules is not None:
        reader = Reader("")
        values["stop"] = read_stop_rules(numbers(rules), RLLIB_WINDOW, reader)
        options = [f"--stop-{STOP_OPTIONS.get(name, name)} {value}" for name, value in values["stop"].items()]
        hints += [f"--stop: taken as {' '.join(options)}"] * bool(options) + reader.notes()
    return values, hints


STOP_OPTIONS = {"seconds": "time"}  # field of Stop -> end of its option, where they differ
OLD_OPTIONS = {  # option -> the field of RunConfig that it sets, and the hint
    "num_workers": ("workers", "taken as --workers {0}"),
    "num_cpus": ("workers", "taken as --workers {0}"),
    "num_gpus": (None, "the learner uses a GPU if there is one; --on slurm asks for as many: --gpus"),
    "ray_num_cpus": (None, "not needed; --workers sets the number of sampler processes"),
    "ray_num_gpus": (None, "not needed; the learner uses a GPU if there is one"),
    "framework": (None, "not needed: fever's algorithms use JAX, those of RLlib PyTorch"),
    "experiment_name": ("name", "taken as --name {0}"),
    "local_dir": ("runs", "taken as --runs {0}"),
    "checkpoint_freq": (None, "not needed: checkpoints are saved regularly"),
    "checkpoint_at_end": (None, "not needed: the last checkpoint is saved at the end"),
}


def _translate_run(name: str, with_config: bool) -> tuple[str, str]:
    """The algorithm for `--run NAME`: fever's own if it has one, unless `--config` has settings of RLlib's."""
    if name.lower() in ALGORITHMS and not with_config:
        other = next((one for one in RLLIB_ALGORITHMS if one.lower() == name.lower()), None)
        hint = f", fever's own; RLlib's is --algo rllib:{other}" if other else ", fever's own"
        return name.lower(), f"--run {name}: taken as --algo {name.lower()}{hint}"
    algo = current_algorithm(name, "--run")
    return algo, f"--run {name}: taken as --algo {algo}"


def _translate_config(config: dict[str, Any], given: dict[str, Any]) -> Translation:
    if "run" not in given:
        raise FeverError("--config has settings of an RLlib algorithm; name it, for example --run PPO")
    env = given.get("env") or given.get("name_env") or config.get("env")
    found = translate({"run": given["run"], "config": config}, "--config", env=env or "unknown")
    without = {"stop"} if env else {"stop", "env"}  # "unknown" stands for an environment that is named elsewhere
    return replace(found, values={name: value for name, value in found.values.items() if name not in without})


def _object(given: dict[str, Any], name: str) -> dict[str, Any] | None:
    value = given.get(name)
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except json.JSONDecodeError as error:
            raise FeverError(f"--{name} is not JSON: {error}") from error
    if value is not None and not isinstance(value, dict):
        raise FeverError(f"--{name} must be a JSON object, not {value!r}")
    return value
