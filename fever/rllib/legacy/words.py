"""Options that tutorials of RLlib taught: what they mean to fever, with a hint for each."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

from fever.errors import FeverError
from fever.rllib.legacy.old_names import OWN, RLLIB, RLLIB_WINDOW
from fever.rllib.legacy.reader import Reader, numbers, read_stop_rules, understanding
from fever.rllib.legacy.translate import Translation, present_algorithm, present_env, translate


def understand_words(words: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Options that tutorials of RLlib taught, as values of RunConfig, and one sentence for each.

    `config` and `stop` are objects, or JSON texts of such.
    """
    with understanding("the command line"):
        return _understand({name: value for name, value in words.items() if value is not None})


def _understand(words: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    config, rules = _object(words, "config"), _object(words, "stop")
    values: dict[str, Any] = {}
    hints: list[str] = []
    if "run" in words:
        values["algo"], hint = _run_word(str(words["run"]), config is not None)
        hints.append(hint)
    for name in ("name_env", "env"):
        if name in words:
            values["env"], arguments, notes = present_env(str(words[name]), {})
            values |= {"env_kwargs": arguments} if arguments else {}
            spelt = f"--{name.replace('_', '-')} {words[name]}"
            hints += [f"{spelt}: the environment is the first word: fever train {values['env']}", *notes]
    for name, (own, text) in WORDS.items():
        if name in words:
            values |= {own: words[name]} if own and own not in values else {}
            hints.append(f"--{name.replace('_', '-')} {words[name]}: {text.format(words[name])}")
    if config is not None:
        translation = _config_word(config, words)
        values = {**values, **translation.values}
        hints += [note for note in translation.notes if note not in hints]
    if rules is not None:
        reader = Reader("")
        values["stop"] = read_stop_rules(numbers(rules), RLLIB_WINDOW, reader)
        options = [f"--stop-{OPTIONS.get(name, name)} {value}" for name, value in values["stop"].items()]
        hints += [f"--stop: taken as {' '.join(options)}"] * bool(options) + reader.notes()
    return values, hints


OPTIONS = {"seconds": "time"}
WORDS = {  # -> the value of a run that it gives, what to say
    "num_workers": ("workers", "taken as --workers {0}"),
    "num_cpus": ("workers", "taken as --workers {0}"),
    "num_gpus": (None, "the learner uses a GPU if there is one"),
    "ray_num_cpus": (None, "not needed; --workers says how many processes sample"),
    "ray_num_gpus": (None, "not needed; the learner uses a GPU if there is one"),
    "framework": (None, "not needed: fever's algorithms use JAX, those of RLlib PyTorch"),
    "experiment_name": ("name", "taken as --name {0}"),
    "local_dir": ("runs", "taken as --runs {0}"),
    "checkpoint_freq": (None, "not needed: checkpoints are saved all the time"),
    "checkpoint_at_end": (None, "not needed: the last checkpoint is saved at the end"),
}


def _run_word(name: str, with_config: bool) -> tuple[str, str]:
    """What `--run NAME` means: fever's own algorithm of that name, or RLlib's if it has settings of RLlib's."""
    if name.lower() in OWN and not with_config:
        other = next((one for one in RLLIB if one.lower() == name.lower()), None)
        hint = f", fever's own; RLlib's is --algo rllib:{other}" if other else ", fever's own"
        return name.lower(), f"--run {name}: taken as --algo {name.lower()}{hint}"
    algo = present_algorithm(name, "--run")
    return algo, f"--run {name}: taken as --algo {algo}"


def _config_word(config: dict[str, Any], words: dict[str, Any]) -> Translation:
    if "run" not in words:
        raise FeverError("--config has settings of one of RLlib's algorithms; say which, for example --run PPO")
    env = words.get("env") or words.get("name_env") or config.get("env")
    found = translate({"run": words["run"], "config": config}, "--config", env=env or "unknown")
    without = {"stop"} if env else {"stop", "env"}  # a name that is not known here
    return replace(found, values={name: value for name, value in found.values.items() if name not in without})


def _object(words: dict[str, Any], name: str) -> dict[str, Any] | None:
    value = words.get(name)
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except json.JSONDecodeError as error:
            raise FeverError(f"--{name} is not JSON: {error}") from error
    if value is not None and not isinstance(value, dict):
        raise FeverError(f"--{name} must be a JSON object, not {value!r}")
    return value
