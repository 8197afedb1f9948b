"""Translates experiments of the removed `rllib train -f` to configurations of fever. Needs neither Ray nor PyTorch."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from fever.envs.old_ids import find_current
from fever.errors import FeverError
from fever.rllib.legacy import old_names
from fever.rllib.legacy.reader import (
    Reader,
    as_list,
    as_mapping,
    as_number,
    leaves,
    nested,
    numbers,
    read_stop_rules,
    report_bad_input,
)
from fever.text import brief

Keys = tuple[str, ...]  # names that lead to a nested setting
NONDETERMINISTIC = (
    "nondeterministic is left out: it described an environment and changed nothing; "
    "repeat_action_probability sets sticky actions"
)
TUNE = re.compile(r"(?:ray\.)?tune\.(uniform|loguniform|randint|choice|grid_search)\((.*)\)", re.DOTALL)


class Alternatives(NamedTuple):
    """The values, at least one, that a search tries for a setting."""

    values: list[Any]
    text: str = ""  # the expression, if the values are the bounds of a range
    grid: bool = False  # whether they come from grid_search


@dataclass(frozen=True)
class Translation:
    """An experiment of an old file as a configuration of fever."""

    values: dict[str, Any]  # fields of RunConfig
    notes: tuple[str, ...]  # for the user, the important ones first
    space: dict[str, str] = field(default_factory=dict)  # as in config.Search
    trials: int | None = None
    grid: bool = False  # whether all of `space` was grid_search, which tries every combination


def translate(values: dict[str, Any], where: str, experiment: str | None = None, env: str | None = None) -> Translation:
    """Translate one experiment of an old file. `where` names the file; `env`, if given, replaces its environment."""
    with report_bad_input(where):
        return _translate(_choose(values, where, experiment), where, env)


def current_algorithm(name: Any, where: str) -> str:
    """The algorithm for the name in `run:`: one of RLlib's, or fever's own Ape-X."""
    if not isinstance(name, str) or not name.strip():
        raise FeverError(f"{where}: run={brief(name)} cannot be used: it is the name of one algorithm, such as PPO")
    known = {one.lower(): f"rllib:{one}" for one in old_names.RLLIB_ALGORITHMS}
    known |= {one.lower(): "apex" for one in old_names.APEX}
    if name.lower() in known:
        return known[name.lower()]
    refuse_removed(name, where)
    return f"rllib:{name}"  # a newer algorithm, or a mistake that is reported when RLlib is asked for it


def refuse_removed(name: str, where: str) -> None:
    """Raise FeverError for an algorithm that RLlib had once. Needs no RLlib: also for jobs that others run."""
    closest = old_names.REPLACEMENTS.get(name.upper().replace("_", "").replace("-", ""))
    if closest is not None:
        raise FeverError(f"{where}: RLlib has no algorithm {name}; the closest is {closest}")


def current_env(name: str, config: dict[str, Any]) -> tuple[str, dict[str, Any], list[str]]:
    """The current id and arguments for an old id and its `env_config`, and notes for the user."""
    name = name.removeprefix("ale_py:")
    if "nondeterministic" in config and ":" not in name:  # of gym's registration, not of the environment
        rest = {key: value for key, value in config.items() if key != "nondeterministic"}
        id, arguments, notes = current_env(name, rest)
        return id, arguments, [*notes, NONDETERMINISTIC]
    if (current := find_current(name)) is not None:
        return current.id, {**current.arguments, **config}, [current.note]
    if name.startswith("ALE/") and config.get("frameskip") == 1 and "obs_type" not in config:
        rest = {key: value for key, value in config.items() if key != "frameskip"}
        return name, rest, ["frameskip: 1 is left out: RLlib skipped frames itself, fever leaves it to the environment"]
    if re.fullmatch(r"[a-z_]\w*(\.\w+)+", name):
        moved = name.replace("ray.rllib.examples.env.", "ray.rllib.examples.envs.classes.")
        module, _, attribute = moved.rpartition(".")
        arguments = config if not config or "config" in config else {"config": config}
        return f"{module}:{attribute}", arguments, [f"{name} is written as {module}:{attribute}"]
    return name, config, []


def _translate(chosen: dict[str, Any], where: str, env: str | None) -> Translation:
    """Translate an experiment whose settings may have several values to search."""
    config = dict(as_mapping("config", chosen.get("config")))
    name = env or chosen.get("env") or config.get("env")
    if isinstance(name, dict):
        names = ", ".join(map(str, name.get("grid_search", name)))
        raise FeverError(f"{where} has several environments: {names}; choose one: fever train ENV -f {where}")
    if not isinstance(name, str):
        raise FeverError(f"{where} names no environment; name one: fever train ENV -f {where}")
    config.pop("env", None)
    algo = current_algorithm(chosen.get("run"), where)
    searched = dict(_searched(config))
    plain = _replaced(config, {path: options.values[0] for path, options in searched.items()})

    def read(config: dict[str, Any]) -> Translation:
        return _read_experiment({**chosen, "config": config}, algo, name)

    result, samples = read(plain), chosen.get("num_samples")
    trials = None if samples is None else int(as_number("num_samples", samples))
    space, grid, notes = _space(searched, lambda path, value: read(_replaced(plain, {path: value})).values["settings"])
    if space:
        notes.insert(0, f"{', '.join(space)}: the first of several values is used; fever tune -f {where} searches them")
    elif (trials or 1) > 1:
        notes.append(f"num_samples: {trials}: fever train makes one run; change --seed for another")
    return replace(result, notes=(*notes, *result.notes), space=space, trials=trials, grid=grid)


def _read_experiment(chosen: dict[str, Any], algo: str, name: str) -> Translation:
    """Translate an experiment in which every setting has one value."""
    config = numbers(chosen["config"])
    env, env_kwargs, env_notes = current_env(name, as_mapping("env_config", config.pop("env_config", None)))
    reader = Reader(algo.removeprefix("rllib:") if algo != "apex" else "APEX", env)
    if config.get("horizon") and algo != "apex" and ":" not in env:
        env_kwargs = {**env_kwargs, "max_episode_steps": config.pop("horizon")}
    reader.read(config)
    settings = reader.settings
    values: dict[str, Any] = {"env": env, "algo": algo}
    for current, own in old_names.RUN_FIELDS.items():
        if settings.get(current) is not None:
            values[own] = settings[current]
            if own == "envs":  # the file has those of each runner
                runners = values.get("workers", old_names.RUNNERS.get(reader.algorithm, 0))
                values[own] = as_number(current, values[own]) * max(1, as_number("num_env_runners", runners))
            reader.sources[f"--{own.replace('_', '-')}"] = reader.sources[current]
        settings.pop(current, None)
        reader.sources.pop(current, None)
    reader.sources.pop("--seed", None)
    window = settings.get("metrics_num_episodes_for_smoothing", old_names.RLLIB_WINDOW)
    values["stop"] = read_stop_rules(numbers(as_mapping("stop", chosen.get("stop"))), window, reader)
    values |= _other_fields(chosen, reader)
    if algo == "apex":
        values["settings"] = _as_apex(reader)
    else:
        _adjust(reader)
        values["settings"] = nested(settings)
    if kwargs := {**env_kwargs, **reader.env_kwargs}:
        values["env_kwargs"] = kwargs
    return Translation(values, (*env_notes, *reader.notes()))


def _adjust(reader: Reader) -> None:
    """Adjust settings of old files that RLlib now refuses in combination, or that have another unit."""
    if reader.algorithm == "PPO" and reader.settings.pop("rollout_fragment_length", None) is not None:
        reader.sources.pop("rollout_fragment_length")
        reader.remarks.append("RLlib chooses rollout_fragment_length to fit the batch and the workers")
    if reader.algorithm in old_names.OFFLINE:
        reader.settings.setdefault("dataset_num_iters_per_learner", 1)
    learners = as_number("num_learners", reader.settings.get("num_learners") or 1)
    if "num_gpus_per_learner" in reader.settings:
        then = "one learner learns from the batches of all" if learners > 1 else "num_gpus_per_learner is ignored"
        reader.remarks.append(f"without a GPU, {then}")
    for name, old in (("train_batch_size_per_learner", "train_batch_size"), ("minibatch_size", "sgd_minibatch_size")):
        if reader.sources.get(name) == old:  # the old name meant all GPUs together
            reader.settings[name] = as_number(old, reader.settings[name]) // learners


def _as_apex(reader: Reader) -> dict[str, Any]:
    """Settings of fever's Ape-X for those of RLlib's, with RLlib's defaults where the file gives none."""
    missing = {name: value for name, value in old_names.APEX_DEFAULTS.items() if name not in reader.settings}
    reader.settings |= missing
    given, read = reader.settings, dict(reader.sources)
    result: dict[str, Any] = {**old_names.APEX_FIXED}
    reader.sources = {name: old for name, old in read.items() if name.startswith("--")}

    def put(current: str, own: str, value: Any) -> None:
        result[own], reader.sources[own] = value, read.get(current, "")

    parts = ("model_config.fcnet_hiddens", "model_config.head_fcnet_hiddens")
    layers = [width for part in parts for width in as_list(read.get(part, part), given.pop(part, []))]
    if layers and reader.env.startswith("ALE/"):
        put("model_config.head_fcnet_hiddens", "convolution_features", layers[0])
        layers = layers[1:]
    if layers:
        put("model_config.head_fcnet_hiddens", "hidden", layers)
    for name, value in given.items():
        if name in old_names.APEX_NAMES:
            put(name, old_names.APEX_NAMES[name], bool(value) if name == "clip_rewards" else value)
        elif name == "target_network_update_freq":  # counted in transitions learned from
            batch = as_number("train_batch_size", given["train_batch_size_per_learner"])
            calls = int(-(-as_number(name, value) // (batch * old_names.APEX_FIXED["updates"])))
            result["target"] = "hard"
            put(name, "target_updates", calls * old_names.APEX_FIXED["updates"])
        elif name == "model_config.conv_filters" and value is not None:
            result["convolutions"] = [_convolution(one) for one in as_list("model.conv_filters", value)]
        elif name == "replay_buffer_config.type":
            result["prioritized"] = "Prioritized" in str(value)
        elif name == "num_gpus_per_learner":
            reader.remarks.append("the learner uses a GPU if there is one")
        elif name.startswith("evaluation_"):
            reader.drop(name, value, "fever eval evaluates a run")
        elif name in old_names.APEX_NEEDS_NO:
            reader.unneeded.append(name)
        else:
            reader.drop(
                read.get(name, name), value, old_names.APEX_LOST.get(name, "fever's Ape-X does not have this setting")
            )
    names = (old_names.APEX_NAMES.get(name, "target_updates") for name in missing)
    defaults = ", ".join(f"{name}={result[name]}" for name in names)
    reader.remarks.append("RLlib no longer has Ape-X: this is fever's own")
    if defaults:
        reader.remarks.append(f"not in the file, RLlib's defaults for Ape-X are used: {defaults}")
    return result


def _other_fields(chosen: dict[str, Any], reader: Reader) -> dict[str, Any]:
    """Fields of RunConfig from what an experiment has beside `config`."""
    own = {"local_dir": "runs", "storage_path": "runs", "keep_checkpoints_num": "checkpoint_keep"}
    values = {}
    for name, value in chosen.items():
        if name in own:
            values[own[name]] = value
        elif name in old_names.UNNEEDED:
            reader.unneeded.append(name)
        elif name not in ("env", "run", "stop", "config", "num_samples"):
            reader.drop(name, value, "fever does not have this setting")
    return values


def _choose(values: dict[str, Any], where: str, name: str | None) -> dict[str, Any]:
    """The experiment of this name, or the only one."""
    if "run" in values:
        experiments = {name or "": values}
    else:
        experiments = {key: one for key, one in values.items() if isinstance(one, dict) and "run" in one}
    if name is not None and name not in experiments:
        raise FeverError(f"{where} has no experiment {name}; it has: {', '.join(experiments)}")
    if name is None and len(experiments) > 1:
        raise FeverError(f"{where} has several experiments: {', '.join(experiments)}; choose one with -f {where}:NAME")
    return experiments[name] if name is not None else next(iter(experiments.values()))


def _searched(config: dict[str, Any], path: Keys = ()) -> Iterator[tuple[Keys, Alternatives]]:
    """The settings of a configuration that are searched: the path and the values of each."""
    for name, value in config.items():
        text = value.get("eval") if isinstance(value, dict) else value
        if isinstance(value, dict) and "grid_search" in value:
            yield (*path, name), _listed(f"{name}: grid_search", value["grid_search"], grid=True)
        elif isinstance(text, str) and (match := TUNE.fullmatch(text.strip())):
            yield (*path, name), _expression(match[1], match[2])
        elif isinstance(value, dict) and isinstance(text, str):
            raise FeverError(f"{name}: {text} is Python, which fever does not run; write it as grid_search: [...]")
        elif isinstance(value, dict):
            yield from _searched(value, (*path, name))


def _space(
    searched: dict[Keys, Alternatives], settings: Callable[[Keys, Any], dict[str, Any]]
) -> tuple[dict[str, str], bool, list[str]]:
    """The search space by current names, whether all of it was grid_search, and notes on what is not searched.

    Every value is translated with `settings(path, value)`; the setting that differs between them is the one to search.
    """
    space, grids, notes = {}, [], []
    for path, (options, text, grid) in searched.items():
        found = [dict(leaves(settings(path, one))) for one in options]
        differing = [leaf for leaf in found[0] if any(one.get(leaf) != found[0][leaf] for one in found)]
        if len(differing) == 1:
            values = ",".join(_text(one.get(differing[0])) for one in found)
            space[differing[0]] = text or f"choice({values})"
            grids.append(grid)
        elif len(options) > 1:
            notes.append(f"not searched: {'.'.join(path)}: it no longer is one setting; {_text(options[0])} is used")
    return space, bool(space) and all(grids), notes


def _expression(kind: str, arguments: str) -> Alternatives:
    try:
        values = list(ast.literal_eval(f"({arguments},)"))
    except (SyntaxError, ValueError) as error:
        raise FeverError(f"tune.{kind}({arguments}) cannot be read; write it as grid_search: [...]") from error
    if kind in ("choice", "grid_search"):
        return _listed(f"tune.{kind}", values[0], grid=kind == "grid_search")
    return Alternatives(values, f"{kind}({','.join(map(_text, values))})")


def _listed(name: str, values: Any, grid: bool) -> Alternatives:
    if not isinstance(values, (list, tuple)) or not values:
        raise ValueError(f"{name} must have a list of values, not {values!r}")
    return Alternatives(list(values), grid=grid)


def _replaced(config: dict[str, Any], changes: dict[Keys, Any]) -> dict[str, Any]:
    """A copy with other values at the given paths."""
    changed = dict(config)
    for (name, *rest), value in changes.items():
        changed[name] = _replaced(changed[name], {tuple(rest): value}) if rest else value
    return changed


def _convolution(layer: Any) -> list[Any]:
    """A convolution as fever's Ape-X has it: [filters, kernel, stride], square."""
    if not isinstance(layer, list) or len(layer) != 3:
        raise ValueError(f"model.conv_filters must have lists of filters, kernel and stride, not {layer!r}")
    filters, kernel, stride = layer
    return [filters, _first(kernel), _first(stride)]


def _first(value: Any) -> Any:
    return value[0] if isinstance(value, list) else value


def _text(value: Any) -> str:
    return value if isinstance(value, str) and value.isidentifier() else json.dumps(value)
