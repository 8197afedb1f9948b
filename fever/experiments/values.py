"""The values that runs have of a setting, or of what they ran on, by which pictures group them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from fever import layout
from fever.errors import FeverError
from fever.experiments.select import common_name
from fever.files import read_json
from fever.job import RECORD
from fever.runs.groups import experiment_of
from fever.runs.run import Run
from fever.text import shorten

OF_RUNS = ("experiment", "run", "nodes", "cpus")  # names beside the fields of a configuration
NOT_VALUES = ("settings", "search", "name", "runs")  # fields of a configuration that are none
LONGEST = 60  # characters of a value
MISSING = object()


class Values:
    """What some runs have; reads each run's files once."""

    def __init__(self, runs: Sequence[Run]) -> None:
        self.configs = {run.path: run.config for run in runs}
        self.fields = {path: config.model_dump(mode="json") for path, config in self.configs.items()}
        members: dict[str, list[Run]] = {}
        keys = {run.path: experiment_of(self.configs[run.path]) for run in runs}
        for run in runs:
            members.setdefault(keys[run.path], []).append(run)
        names = {key: common_name(group) for key, group in members.items()}
        several = {key for key, name in names.items() if list(names.values()).count(name) > 1}
        self.experiments = {
            path: members[key][0].path.name if key in several else names[key] for path, key in keys.items()
        }

    def require(self, name: str, option: str) -> None:
        """Raise `FeverError` if no run has anything of this name."""
        fields = [field for field in next(iter(self.fields.values())) if field not in NOT_VALUES]
        settings = dict.fromkeys(setting for values in self.fields.values() for setting in values["settings"])
        if name not in OF_RUNS and name not in settings and not any(_has(one, name) for one in self.fields.values()):
            known = ", ".join((*OF_RUNS, *fields, *settings))
            raise FeverError(f"{option} {shorten(name)}: no run has such a setting; there are: {shorten(known, 1500)}")

    def of(self, run: Run, name: str) -> str:
        """The value of a field such as `algo`, `workers` or `stop.steps`, of a setting such as `learning_rate`, or of
        one of OF_RUNS, as text; `default` for what the run's configuration does not have."""
        if name == "experiment":
            return self.experiments[run.path]
        if name == "run":
            return run.path.name
        if name == "nodes":
            return _text(nodes_of(run))
        if name == "cpus":
            return _text(cpus_of(run))
        values = self.fields[run.path]
        if _has(values, name.partition(".")[0]):
            return _text(_inside(values, name, "default"))
        return _text(values["settings"].get(name, "default"))


def nodes_of(run: Run) -> int:
    """Number of machines: that its job asked for, or those on which it took steps."""
    target = _json(run.job / RECORD).get("target")
    asked = target.get("nodes") if isinstance(target, dict) else None
    hosts = (run.summary or {}).get("hosts")
    return asked if isinstance(asked, int) else max(1, len(hosts) if isinstance(hosts, dict) else 1)


def cpus_of(run: Run) -> Any:
    """Number of cores of each machine: that its job asked for, or those of the machine where it was started."""
    target = _json(run.job / RECORD).get("target")
    asked = target.get("cpus_per_node") if isinstance(target, dict) else None
    return asked if isinstance(asked, int) else _json(run.path / layout.FACTS).get("cores")


def _json(path: Any) -> dict[str, Any]:
    with suppress(FeverError):
        return read_json(path)
    return {}


def _has(values: dict[str, Any], name: str) -> bool:
    """Whether a configuration has a field of this name, or as `stop.steps` one within it."""
    first, _, _ = name.partition(".")
    return first in values and first not in NOT_VALUES and _inside(values, name, MISSING) is not MISSING


def _inside(values: Any, name: str, default: Any) -> Any:
    """The value at `first.second` in objects within each other, or the default."""
    for part in name.split("."):
        if not isinstance(values, dict) or part not in values:
            return default
        values = values[part]
    return values


def _text(value: Any) -> str:
    return shorten(value if isinstance(value, str) else json.dumps(value), LONGEST)
