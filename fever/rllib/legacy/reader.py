"""Reads settings by any name that RLlib has had for them, and collects them by their current names.

Nested names become dotted (`model.fcnet_hiddens`), a table gives the current name (`model_config.fcnet_hiddens`), and
dotted names become nested again. A setting without a current name is dropped, and a note says why.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from fever.errors import FeverError
from fever.rllib.legacy import old_names


class Reader:
    """Collects the settings of one of RLlib's algorithms, or of its former Ape-X, by their current names.

    Settings named in `own` are kept as they are. Input that cannot be read raises one of BAD_INPUT, which
    `report_bad_input` turns into a FeverError.
    """

    def __init__(self, algorithm: str, env: str = "", own: frozenset[str] = frozenset()) -> None:
        self.algorithm, self.env, self.own = algorithm, env, own
        self.settings: dict[str, Any] = {}  # by current name, dotted
        self.env_kwargs: dict[str, Any] = {}
        self.sources: dict[str, str] = {}  # current name -> the name in the input
        self.dropped: dict[str, list[str]] = {}  # reason -> names
        self.unneeded: list[str] = []
        self.remarks: list[str] = []

    def read(self, config: dict[str, Any]) -> None:
        """Read settings; a schedule wins over the constant of the same setting."""
        given = _offline(dict(flat(numbers(config))))
        kept = {full: given.pop(full) for full in list(given) if full.partition(".")[0] in self.own}
        for full, value in kept.items():
            self.put(full, full, value)
        removed = old_names.REMOVED | old_names.REMOVED_FOR.get(self.algorithm, {})
        renamed = old_names.RENAMED | old_names.RENAMED_FOR.get(self.algorithm, {})
        for full in sorted(given, key=lambda one: not one.endswith("_schedule")):
            value, name = given[full], full.removeprefix(old_names.BUFFER)
            if name in SPECIAL:
                SPECIAL[name](self, value)
            elif name in old_names.OLD_EXPLORATION or name.startswith("exploration_config"):
                continue  # read together, below
            elif name in old_names.UNNEEDED:
                self.unneeded.append(full)
            elif name in removed and name not in old_names.RENAMED_FOR.get(self.algorithm, {}):
                self.drop(full, value, removed[name])
            elif name.startswith(old_names.MODEL_PREFIXES):
                self._model(name, value)
            elif not (name.endswith("_schedule") and value is None):
                _, dot, part = name.rpartition("evaluation_config.")
                self.put(full, f"{dot}{renamed.get(part, part)}" if dot else renamed.get(name, full), value)
        self._explore(given)
        self._buffer()
        if self.algorithm == "CQL":
            self.settings["lr"] = None  # RLlib's own default is one that it refuses
        self.settings |= kept

    def put(self, old: str, new: str, value: Any) -> None:
        """Set `new` to a value that was given as `old`. The first value wins if two names give different ones."""
        if self.settings.get(new, value) != value:
            self.drop(old, True, f"{self.sources[new]} sets the same setting")
            return
        self.settings[new], self.sources[new] = value, old

    def drop(self, name: str, value: Any, reason: str) -> None:
        """Note that a setting is dropped, unless its value switches it off anyway."""
        if value not in old_names.OFF and value != old_names.NEUTRAL.get(name, ...):
            self.dropped.setdefault(reason, []).append(name)

    def notes(self) -> list[str]:
        """Sentences for the user: what was dropped, renamed and ignored."""
        notes = [f"not translated: {', '.join(names)}: {reason}" for reason, names in self.dropped.items()]
        pairs = [_without_common_end(old, new) for new, old in self.sources.items() if old not in (new, "")]
        renamed = dict.fromkeys(f"{old} is {new}" for old, new in pairs)
        return [
            *notes,
            *self.remarks,
            *([f"other names now: {', '.join(renamed)}"] if renamed else []),
            *([f"not needed: {', '.join(self.unneeded)}"] if self.unneeded else []),
        ]

    def _model(self, name: str, value: Any) -> None:
        part = name.partition(".")[2]
        image = {"dim": ("img_height", "img_width"), "grayscale": ("grayscale",), "framestack": ("stack_num",)}
        if part in old_names.MODEL_NAMES:
            self.put(name, f"model_config.{old_names.MODEL_NAMES[part]}", value)
        elif part == "lstm_use_prev_action_reward":
            self.put(name, "model_config.lstm_use_prev_action", value)
            self.put(name, "model_config.lstm_use_prev_reward", value)
        elif part in image and self.env.startswith("ALE/"):
            self.env_kwargs |= dict.fromkeys(image[part], value if part != "framestack" else 4 if value else 1)
        elif part.startswith("custom_"):
            self.drop(name, value, "custom models are RLModules now")
        else:
            self.drop(name, value, "RLlib's models no longer have this setting")

    def _explore(self, flat: dict[str, Any]) -> None:
        """Set DQN's `epsilon` from the settings of its schedule; RLlib no longer has other kinds of exploration."""
        prefix = "exploration_config."
        given = {name.removeprefix(prefix): flat[name] for name in flat if name.startswith(prefix)}
        given |= {new: flat[old] for old, new in old_names.OLD_EXPLORATION.items() if old in flat}
        kind = str(given.get("type", "EpsilonGreedy")).rpartition(".")[2]
        if self.algorithm in ("DQN", "APEX") and kind.endswith("EpsilonGreedy") and given.keys() - {"type"}:
            total = as_number("schedule_max_timesteps", given.get("steps", 100_000))
            steps = total * as_number("exploration_fraction", given.get("fraction", 0.1))
            last = as_number(f"{prefix}epsilon_timesteps", given.get("epsilon_timesteps", steps))
            end = [int(last), given.get("final_epsilon", 0.02)]
            source = "exploration_config" if any(name.startswith(prefix) for name in flat) else "exploration_final_eps"
            self.put(source, "epsilon", [[0, given.get("initial_epsilon", 1.0)], end])
        elif given and kind not in ("StochasticSampling", "EpsilonGreedy", "PerWorkerEpsilonGreedy"):
            self.drop(f"{prefix}type: {kind}", True, "RLlib no longer has this kind of exploration")

    def _buffer(self) -> None:
        """Give a buffer of another type its size: it replaces RLlib's default buffer with all its settings."""
        fixed = self.algorithm == "APEX" or old_names.BUFFER.removesuffix(".") in self.own
        if not fixed and self.settings.get(f"{old_names.BUFFER}type") == "EpisodeReplayBuffer":
            self.settings.setdefault(f"{old_names.BUFFER}capacity", 50_000 if self.algorithm == "DQN" else 1_000_000)
            for name in (f"{old_names.BUFFER}alpha", f"{old_names.BUFFER}beta"):
                self.settings.pop(name, None)
                self.sources.pop(name, None)


def _offline(given: dict[str, Any]) -> dict[str, Any]:
    """The settings with the present form of the former `input`: `sampler` was the environment, and `dataset` had its
    path and format in `input_config`. What RLlib wrote as JSON were its batches of that time."""
    source = as_mapping("input_config", given.get("input_config"))
    name = "input_" if "input_" in given else "input"
    if given.get(name) == "dataset":
        if not source.get("paths"):
            raise ValueError("input: dataset needs its path: input_config: {paths: FOLDER, format: json}")
        given = {**given, name: source["paths"]}
        given.pop("input_config")
    if given.get(name) == "sampler":
        return {key: value for key, value in given.items() if key != name}
    paths = given["input"] if isinstance(given.get("input"), list) else [given.get("input", "")]
    if source.get("format") == "json" or all(str(path).endswith(".json") for path in paths):
        given = {"input_read_method": "read_json", "input_read_sample_batches": True, **given}
    return given


def _gpus(reader: Reader, value: Any) -> None:
    learners = int(value) if isinstance(value, (int, float)) and value > 1 else 0
    if learners:
        reader.put("num_gpus", "num_learners", learners)
    if value:
        reader.put("num_gpus", "num_gpus_per_learner", 1 if learners else value)


def _framework(reader: Reader, value: Any) -> None:
    reader.drop(f"framework: {value}", value not in ("torch", None), "PyTorch is used")


def _buffer_type(reader: Reader, value: Any) -> None:
    """Buffers of transitions are buffers of episodes now; other classes stay as they are."""
    kind = str(value).rpartition(".")[2]
    known = kind in old_names.OLD_BUFFERS or "Episode" in kind
    prioritized = "Prioritized" in kind
    name = kind if "Episode" in kind else f"{'Prioritized' if prioritized else ''}EpisodeReplayBuffer"
    reader.settings["replay_buffer_config.type"] = name if known else value


def _prioritized(reader: Reader, value: Any) -> None:
    reader.settings["replay_buffer_config.type"] = f"{'Prioritized' if value else ''}EpisodeReplayBuffer"


def _vtrace(reader: Reader, value: Any) -> None:
    reader.drop("vtrace", not value, "V-trace is always used")


def _remote(reader: Reader, value: Any) -> None:
    if value:
        reader.put("remote_worker_envs", "gym_env_vectorize_mode", "async")


def _policies(reader: Reader, value: Any) -> None:
    if not isinstance(value, (dict, list)):
        raise ValueError(f"multiagent.policies must be a mapping or a list of names, not {value!r}")
    reader.put("multiagent.policies", "policies", list(value))
    if isinstance(value, dict) and any(any(one or ()) for one in value.values()):
        reader.drop("multiagent.policies", True, "only the names are used; each policy has the environment's spaces")


def _callbacks(reader: Reader, value: Any) -> None:
    if isinstance(value, str) and "." in value:
        reader.put("callbacks", "callbacks_class", ":".join(value.rsplit(".", 1)))
    else:
        reader.drop("callbacks", value, "it is a class, written as module:Name")


SPECIAL: dict[str, Callable[[Reader, Any], None]] = {
    "num_gpus": _gpus,
    "gpu": lambda reader, value: _gpus(reader, int(bool(value))),  # of 2018
    "framework": _framework,
    "use_pytorch": lambda reader, value: _framework(reader, "torch" if value else "tf"),
    "type": _buffer_type,
    "prioritized_replay": _prioritized,
    "vtrace": _vtrace,
    "remote_worker_envs": _remote,
    "multiagent.policies": _policies,
    "callbacks": _callbacks,
}


def rename(settings: dict[str, Any], algo: str, own: frozenset[str] = frozenset()) -> tuple[dict[str, Any], list[str]]:
    """Settings of `rllib:NAME` by their current names, and notes for the user.

    Settings in `own`, which the algorithm's own configuration declares, are kept as they are.
    """
    with report_bad_input(f"a setting of {algo}"):
        reader = Reader(algo.rpartition(":")[2], own=own)
        reader.read(settings)
        return nested(reader.settings), reader.notes()


BAD_INPUT = (
    ValueError,
    TypeError,
    LookupError,
    AttributeError,
    ArithmeticError,
)  # from input of an unexpected shape


@contextmanager
def report_bad_input(where: str) -> Iterator[None]:
    """Turn an error from input of an unexpected shape into a FeverError that says `where` the input is."""
    try:
        yield
    except BAD_INPUT as error:
        raise FeverError(f"{where} cannot be understood: {error}") from error


def as_number(name: str, value: Any) -> float:
    """A number that may be written as text; an int if it is whole. Raises ValueError."""
    try:
        number = float("nan" if isinstance(value, bool) else value)
    except (TypeError, ValueError):
        number = float("nan")
    if number != number:
        raise ValueError(f"{name} must be a number, not {value!r}")
    return int(number) if number.is_integer() else number


def as_list(name: str, value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise ValueError(f"{name} must be a list, not {value!r}")
    return value


def as_mapping(name: str, value: Any) -> dict[str, Any]:
    """A mapping, empty for None. Raises ValueError."""
    if value is not None and not isinstance(value, dict):
        raise ValueError(f"{name} must be a mapping of names to values, not {value!r}")
    return value or {}


def read_stop_rules(rules: dict[str, Any], window: int, reader: Reader) -> dict[str, Any]:
    """fever's stop rules from RLlib's, by the last part of the metric: `sampler_results/episode_reward_mean`."""
    stop: dict[str, Any] = {}
    for name, value in leaves(rules):
        parts = re.split(r"[./]", name)
        rule = old_names.STOP.get(parts[-1])
        only = rule == "reward" and reader.algorithm in old_names.OFFLINE  # they have returns from evaluation only
        if parts[0] == "evaluation" and not only:
            reader.drop(f"stop.{name}", True, "fever's stop rules use training returns, not evaluation")
        elif rule is None:
            reader.drop(f"stop.{name}", value, "fever's stop rules are reward, steps, time and iterations")
        else:
            number = as_number(f"stop.{name}", value)
            stop[rule] = int(number) if rule in ("steps", "iterations") else number
    return stop | ({"window": window} if "reward" in stop else {})


def flat(config: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Settings with dotted names where RLlib nests them, one level deep."""
    for name, value in config.items():
        if name in old_names.NESTED and isinstance(value, dict):
            yield from ((f"{name}.{part}", one) for part, one in value.items())
        else:
            yield name, value


def nested(settings: dict[str, Any]) -> dict[str, Any]:
    """The opposite of `flat`."""
    result: dict[str, Any] = {}
    for name, value in settings.items():
        group, dot, part = name.partition(".")
        if dot:
            result.setdefault(group, {})[part] = value
        else:
            result[name] = value
    return result


def leaves(values: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, dict):
            yield from ((f"{name}.{part}", one) for part, one in leaves(value))
        else:
            yield name, value


def numbers(value: Any) -> Any:
    """A copy with numbers where YAML reads text, such as 1e-4."""
    if isinstance(value, dict):
        return {name: numbers(one) for name, one in value.items()}
    if isinstance(value, list):
        return [numbers(one) for one in value]
    if isinstance(value, str) and old_names.TEXT_NUMBER.fullmatch(value):
        number = float(value)
        return int(number) if number.is_integer() and abs(number) >= 1 else number
    return value


def _without_common_end(old: str, new: str) -> tuple[str, str]:
    """`model.use_lstm`, `model_config.use_lstm` to `model`, `model_config`: one note is enough for the whole group."""
    group, dot, part = old.partition(".")
    return (group, new.partition(".")[0]) if dot and new.endswith(f".{part}") else (old, new)
