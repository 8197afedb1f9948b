"""Reads settings by the names that RLlib has had for them, and collects what they mean now.

Nested names become dotted (`model.fcnet_hiddens`), a table gives each its present one (`model_config.fcnet_hiddens`),
and dots become nested again. What has no present name is lost, and a note says why.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from fever.errors import FeverError
from fever.rllib.legacy.old_names import (
    BUFFER,
    ILLEGIBLE,
    MODEL_NAMES,
    MODEL_PREFIXES,
    NESTED,
    NEUTRAL,
    OFF,
    OFFLINE,
    OLD_BUFFERS,
    OLD_EXPLORATION,
    REMOVED,
    REMOVED_FOR,
    RENAMED,
    RENAMED_FOR,
    STOP,
    UNNEEDED,
)


class Reader:
    """Reads settings of one of RLlib's algorithms, or of its former Ape-X, and collects what they mean now.

    Those that are the algorithm's `own` are left alone. What cannot be read raises one of ODD, see `understanding`.
    """

    def __init__(self, algorithm: str, env: str = "", own: frozenset[str] = frozenset()) -> None:
        self.algorithm, self.env, self.own = algorithm, env, own
        self.settings: dict[str, Any] = {}  # by present name, dotted
        self.env_kwargs: dict[str, Any] = {}
        self.sources: dict[str, str] = {}  # present name -> the name that was read
        self.lost: dict[str, list[str]] = {}  # reason -> names
        self.unneeded: list[str] = []
        self.remarks: list[str] = []

    def read(self, config: dict[str, Any]) -> None:
        """Take settings in, a schedule before the plain value that it replaces."""
        given = dict(flat(numbers(config)))
        kept = {full: given.pop(full) for full in list(given) if full.partition(".")[0] in self.own}
        for full, value in kept.items():
            self.put(full, full, value)
        removed = REMOVED | REMOVED_FOR.get(self.algorithm, {})
        renamed = RENAMED | RENAMED_FOR.get(self.algorithm, {})
        for full in sorted(given, key=lambda one: not one.endswith("_schedule")):
            value, name = given[full], full.removeprefix(BUFFER)
            if name in SPECIAL:
                SPECIAL[name](self, value)
            elif name in OLD_EXPLORATION or name.startswith("exploration_config"):
                continue  # read together, below
            elif name in UNNEEDED:
                self.unneeded.append(full)
            elif name in removed and name not in RENAMED_FOR.get(self.algorithm, {}):
                self.lose(full, value, removed[name])
            elif name.startswith(MODEL_PREFIXES):
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
        """A setting has this value, unless another name said so already."""
        if self.settings.get(new, value) != value:
            self.lose(old, True, f"{self.sources[new]} says it")
            return
        self.settings[new], self.sources[new] = value, old

    def lose(self, name: str, value: Any, reason: str) -> None:
        """There is no such setting any more; nothing is lost if it was off."""
        if value not in OFF and value != NEUTRAL.get(name, ...):
            self.lost.setdefault(reason, []).append(name)

    def notes(self) -> list[str]:
        """What the user should know."""
        notes = [f"not translated: {', '.join(names)}: {reason}" for reason, names in self.lost.items()]
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
        if part in MODEL_NAMES:
            self.put(name, f"model_config.{MODEL_NAMES[part]}", value)
        elif part == "lstm_use_prev_action_reward":
            self.put(name, "model_config.lstm_use_prev_action", value)
            self.put(name, "model_config.lstm_use_prev_reward", value)
        elif part in image and self.env.startswith("ALE/"):
            self.env_kwargs |= dict.fromkeys(image[part], value if part != "framestack" else 4 if value else 1)
        elif part.startswith("custom_"):
            self.lose(name, value, "models of one's own are RLModules now")
        else:
            self.lose(name, value, "RLlib's models have no such setting now")

    def _explore(self, flat: dict[str, Any]) -> None:
        """`epsilon` of DQN from what described its schedule; other ways to explore are gone."""
        prefix = "exploration_config."
        given = {name.removeprefix(prefix): flat[name] for name in flat if name.startswith(prefix)}
        given |= {new: flat[old] for old, new in OLD_EXPLORATION.items() if old in flat}
        kind = str(given.get("type", "EpsilonGreedy")).rpartition(".")[2]
        if self.algorithm in ("DQN", "APEX") and kind.endswith("EpsilonGreedy") and given.keys() - {"type"}:
            total = as_number("schedule_max_timesteps", given.get("steps", 100_000))
            steps = total * as_number("exploration_fraction", given.get("fraction", 0.1))
            last = as_number(f"{prefix}epsilon_timesteps", given.get("epsilon_timesteps", steps))
            end = [int(last), given.get("final_epsilon", 0.02)]
            source = "exploration_config" if any(name.startswith(prefix) for name in flat) else "exploration_final_eps"
            self.put(source, "epsilon", [[0, given.get("initial_epsilon", 1.0)], end])
        elif given and kind not in ("StochasticSampling", "EpsilonGreedy", "PerWorkerEpsilonGreedy"):
            self.lose(f"{prefix}type: {kind}", True, "RLlib has no such exploration any more")

    def _buffer(self) -> None:
        """A buffer of another type replaces RLlib's default as a whole, so it needs its size."""
        fixed = self.algorithm == "APEX" or BUFFER.removesuffix(".") in self.own
        if not fixed and self.settings.get(f"{BUFFER}type") == "EpisodeReplayBuffer":
            self.settings.setdefault(f"{BUFFER}capacity", 50_000 if self.algorithm == "DQN" else 1_000_000)
            for name in (f"{BUFFER}alpha", f"{BUFFER}beta"):
                self.settings.pop(name, None)
                self.sources.pop(name, None)


def _gpus(reader: Reader, value: Any) -> None:
    learners = int(value) if isinstance(value, (int, float)) and value > 1 else 0
    if learners:
        reader.put("num_gpus", "num_learners", learners)
    if value:
        reader.put("num_gpus", "num_gpus_per_learner", 1 if learners else value)


def _framework(reader: Reader, value: Any) -> None:
    reader.lose(f"framework: {value}", value not in ("torch", None), "PyTorch is used")


def _buffer_type(reader: Reader, value: Any) -> None:
    """Old buffers of transitions are buffers of episodes now; any other class stays."""
    kind = str(value).rpartition(".")[2]
    known = kind in OLD_BUFFERS or "Episode" in kind
    prioritized = "Prioritized" in kind
    name = kind if "Episode" in kind else f"{'Prioritized' if prioritized else ''}EpisodeReplayBuffer"
    reader.settings["replay_buffer_config.type"] = name if known else value


def _prioritized(reader: Reader, value: Any) -> None:
    reader.settings["replay_buffer_config.type"] = f"{'Prioritized' if value else ''}EpisodeReplayBuffer"


def _vtrace(reader: Reader, value: Any) -> None:
    reader.lose("vtrace", not value, "V-trace is always used")


def _remote(reader: Reader, value: Any) -> None:
    if value:
        reader.put("remote_worker_envs", "gym_env_vectorize_mode", "async")


def _policies(reader: Reader, value: Any) -> None:
    if not isinstance(value, (dict, list)):
        raise ValueError(f"multiagent.policies must be a mapping or a list of names, not {value!r}")
    reader.put("multiagent.policies", "policies", list(value))
    if isinstance(value, dict) and any(any(one or ()) for one in value.values()):
        reader.lose("multiagent.policies", True, "only their names: each has the environment's spaces")


def _callbacks(reader: Reader, value: Any) -> None:
    if isinstance(value, str) and "." in value:
        reader.put("callbacks", "callbacks_class", ":".join(value.rsplit(".", 1)))
    else:
        reader.lose("callbacks", value, "it is a class, written as module:Name")


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
    """Settings of `rllib:NAME` by their present names, and what there is to say about it. Present ones stay.

    `own` are names that the algorithm's own configuration declares. They keep their values, mappings as a whole.
    """
    with understanding(f"a setting of {algo}"):
        reader = Reader(algo.rpartition(":")[2], own=own)
        reader.read(settings)
        return nested(reader.settings), reader.notes()


ODD = (ValueError, TypeError, LookupError, AttributeError, ArithmeticError)  # what input of an odd shape raises


@contextmanager
def understanding(where: str) -> Iterator[None]:
    """Input of an odd shape, inside, is a FeverError that says `where` it is."""
    try:
        yield
    except ODD as error:
        raise FeverError(f"{where} cannot be understood: {error}") from error


def as_number(name: str, value: Any) -> float:
    """A number, which may be written as a text. Whole ones are int."""
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
    """A mapping; an empty one if nothing is said."""
    if value is not None and not isinstance(value, dict):
        raise ValueError(f"{name} must be a mapping of names to values, not {value!r}")
    return value or {}


def read_stop_rules(rules: dict[str, Any], window: int, reader: Reader) -> dict[str, Any]:
    """Stop rules by the last part of a metric's name: `sampler_results/episode_reward_mean`."""
    stop: dict[str, Any] = {}
    for name, value in leaves(rules):
        parts = re.split(r"[./]", name)
        rule = STOP.get(parts[-1])
        only = rule == "reward" and reader.algorithm in OFFLINE  # their returns are those of evaluation
        if parts[0] == "evaluation" and not only:
            reader.lose(f"stop.{name}", True, "fever stops by training, not by evaluation")
        elif rule is None:
            reader.lose(f"stop.{name}", value, "fever stops by reward, steps, time or iterations")
        else:
            number = as_number(f"stop.{name}", value)
            stop[rule] = int(number) if rule in ("steps", "iterations") else number
    return stop | ({"window": window} if "reward" in stop else {})


def flat(config: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Settings with dotted names where RLlib nests them, one level deep."""
    for name, value in config.items():
        if name in NESTED and isinstance(value, dict):
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
    """A copy with numbers where YAML read words: 1e-4."""
    if isinstance(value, dict):
        return {name: numbers(one) for name, one in value.items()}
    if isinstance(value, list):
        return [numbers(one) for one in value]
    if isinstance(value, str) and ILLEGIBLE.fullmatch(value):
        number = float(value)
        return int(number) if number.is_integer() and abs(number) >= 1 else number
    return value


def _without_common_end(old: str, new: str) -> tuple[str, str]:
    """`model.use_lstm`, `model_config.use_lstm` to `model`, `model_config`: what is said once for all of them."""
    group, dot, part = old.partition(".")
    return (group, new.partition(".")[0]) if dot and new.endswith(f".{part}") else (old, new)
