"""From words to runs: a run stands for all runs of its experiment, a pattern for those that it matches."""

from __future__ import annotations

import glob
import itertools
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from fever import layout
from fever.config import RunConfig
from fever.errors import FeverError
from fever.files import user_path
from fever.runs.groups import experiment_of
from fever.runs.run import Run, list_runs
from fever.text import shorten

PATTERN = frozenset("*?[")  # characters that make a word a pattern
SEED = "-seed-"  # in the names that `fever train --seeds` gives
SHORTEST = 2  # characters that names have in common, for them to name a group


@dataclass
class Group:
    """Runs that count as one side of a comparison, in the order of their seeds."""

    name: str
    runs: list[Run]
    notes: list[str] = field(default_factory=list)  # what was left out, and why

    @property
    def paths(self) -> list[str]:
        return [str(run.path) for run in self.runs]


class Finder:
    """Finds groups of runs; reads the configurations of a folder once."""

    def __init__(self, runs: str | Path = "runs") -> None:
        self.folder = user_path(runs)
        self.known: dict[Path, dict[str, list[Run]]] = {}  # folder -> experiment -> its runs

    def group(self, word: str | Path) -> Group:
        """The runs that a word means: all runs of an experiment, in the folder of the one named, or all that a pattern
        matches. Raises `FeverError` if there is none."""
        if self.is_pattern(word):
            return self.matching(str(word))
        run = Run.open(word, self.folder)
        _refuse_search(run)
        folder = run.path.resolve().parent
        key = experiment_of(run.config)
        if folder not in self.known:
            self.known[folder] = _experiments(folder)
        runs = self.known[folder].get(key, [])
        if run.path.resolve() not in [other.path.resolve() for other in runs]:  # its folder is a link elsewhere
            runs = [run, *runs]
        return Group(common_name(runs), [_shown_as(one, run) for one in runs])

    def is_pattern(self, word: str | Path) -> bool:
        """Whether a word is a pattern, and not the name of a run that looks like one."""
        return bool(PATTERN & set(str(word))) and not any(map(os.path.lexists, (word, self.folder / word)))

    def matching(self, pattern: str) -> Group:
        """The runs that a pattern matches, those of all experiments."""
        places = (Path(os.path.expanduser(pattern)), self.folder / pattern)
        found = next(filter(None, (sorted(glob.glob(str(place))) for place in places)), [])
        paths = [Path(path) for path in found if os.path.lexists(os.path.join(path, layout.CONFIG))]
        runs, notes = [], []
        for path in paths:
            try:
                config = Run(path).config
            except FeverError as error:
                notes.append(f"left out: {error}")
                continue
            if config.search is None:
                runs.append((config.seed, Run(path)))
        if not runs:
            raise FeverError(f"no run matches {shorten(pattern)}" + (f"; {notes[0]}" if notes else ""))
        return Group(pattern, in_order(runs), notes)


def find_runs(words: Sequence[str | Path], runs: str | Path = "runs") -> tuple[list[Run], list[str]]:
    """The runs that words name, each once, and of patterns those that match; and notes on what was left out."""
    finder = Finder(runs)
    groups = [
        finder.matching(str(word)) if finder.is_pattern(word) else Group("", [Run.open(word, runs)]) for word in words
    ]
    found = {os.path.realpath(run.path): run for group in groups for run in group.runs}
    return [*found.values()], [note for group in groups for note in group.notes]


def find_groups(words: Sequence[str | Path], runs: str | Path = "runs") -> list[Group]:
    """The groups that words mean, each once: several words may stand for the same experiment, such as those that a
    shell makes of `runs/*`."""
    finder = Finder(runs)
    groups: dict[tuple[str, ...], Group] = {}
    for word in words:
        group = finder.group(word)
        groups.setdefault(tuple(os.path.realpath(path) for path in group.paths), group)
    return named_apart(list(groups.values()))


def named_apart(groups: list[Group]) -> list[Group]:
    """The same groups with different names: those of one name get the name of their first run."""
    names = [group.name for group in groups]
    for group in groups:
        if names.count(group.name) > 1:
            group.name = group.runs[0].path.name
    return groups


def common_name(runs: Sequence[Run]) -> str:
    """What the names of some runs begin with, without `-seed-`; if that is little, the first one's name."""
    names = [run.path.name for run in runs]
    if len(names) == 1:
        return names[0]
    columns = itertools.takewhile(lambda column: len(set(column)) == 1, zip(*names, strict=False))
    common = "".join(column[0] for column in columns).rstrip("0123456789")
    if common.endswith(SEED):
        return common.removesuffix(SEED)
    common = common.rstrip("-_.+")
    return common if len(common) >= SHORTEST else f"{names[0]} and {len(names) - 1} more"


def differences(groups: Sequence[Group]) -> dict[str, list[str]]:
    """Field -> its value in each group, of fields in which any two runs differ. Of several algorithms, settings that
    only some have are left out: the algorithm says it."""
    flat = [[_flat(run.config) for run in group.runs] for group in groups]
    everyone = [values for group in flat for values in group]
    names = dict.fromkeys(name for values in everyone for name in values)
    if len({values["algo"] for values in everyone}) > 1:
        names = dict.fromkeys(name for name in names if all(name in values for values in everyone))
    different = [name for name in names if len({values.get(name) for values in everyone}) > 1]
    return {
        name: [", ".join(dict.fromkeys(values.get(name, "default") for values in group)) for group in flat]
        for name in different
    }


def refuse_shared(groups: Sequence[Group]) -> None:
    """Raise `FeverError` if a run is in two groups."""
    owner: dict[str, str] = {}
    for group in groups:
        for path in group.paths:
            if (other := owner.setdefault(os.path.realpath(path), group.name)) != group.name:
                raise FeverError(f"{path} is in both {other} and {group.name}; a run can be on one side only")


def _flat(config: RunConfig) -> dict[str, str]:
    """The fields of a configuration that make its experiment, and its settings by their names, as texts."""
    values = config.model_dump(mode="json", exclude={"seed", "name", "runs", "search", "settings", "stop", "preset"})
    stop = {f"stop.{name}": value for name, value in config.stop.model_dump(mode="json").items()}
    return {name: shorten(str(value), 60) for name, value in {**values, **stop, **config.settings}.items()}


def _experiments(folder: Path) -> dict[str, list[Run]]:
    """Experiment -> its runs in a folder, by their seeds. Damaged runs belong to none."""
    groups: dict[str, list[tuple[int, Run]]] = {}
    for run in list_runs(folder):
        try:
            config = run.config
        except FeverError:
            continue
        groups.setdefault(experiment_of(config), []).append((config.seed, run))
    return {key: in_order(group) for key, group in groups.items()}


def in_order(runs: Iterable[tuple[int, Run]]) -> list[Run]:
    """Runs that come with their seeds, in the order of these, and then of their names."""
    return [run for _, run in sorted(runs, key=lambda pair: (pair[0], pair[1].path.name))]


def _shown_as(run: Run, named: Run) -> Run:
    """The run with its path written like that of the one that was named."""
    return Run(named.path.parent / run.path.name, named.trusted)


def _refuse_search(run: Run) -> None:
    if run.config.search is not None:
        raise FeverError(f"{run.path} is a search; its runs are {run.path / layout.TRIALS}/*")
