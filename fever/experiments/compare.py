"""Comparisons of groups of runs: final scores and learning curves at the same number of steps, with intervals.

Groups are compared environment by environment, each one with the first. Over several environments, what has no unit is
averaged: the probability of improvement and the rank; scores are only if the user says on which scale.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from fever.errors import FeverError
from fever.experiments import statistics
from fever.experiments.scores import Curve, common_metric, horizon, one_per_seed, read_curves
from fever.experiments.select import Group, differences, refuse_shared
from fever.experiments.statistics import FEWEST, Interval
from fever.runs.groups import experiment_of
from fever.runs.run import Run
from fever.text import format_count

MEASURES = {"final": "final score", "area": "mean until then"}
UNEQUAL = 1.05  # ratio of the longest run's steps to the compared ones, above which it is said
Scale = Mapping[str, tuple[float, float]]  # environment -> the scores that count as 0 and as 1


@dataclass(frozen=True)
class Scores:
    """One measure of one group of runs in one environment, or on a scale over several."""

    values: list[float]  # of each run
    mean: float
    interval: Interval | None
    iqm: float
    iqm_interval: Interval | None


@dataclass(frozen=True)
class Comparison:
    """One measure of a group, compared with the first group's."""

    name: str
    against: str
    measure: str
    difference: float
    interval: Interval | None  # of the difference
    probability: float  # that a run of the group scores higher
    probability_interval: Interval | None
    verdict: str  # better, worse, same, unknown
    seeds_needed: int | None  # on each side, if the verdict is unknown


@dataclass
class InEnvironment:
    """All groups in one environment."""

    env: str
    metric: str
    steps: float  # at which they are compared
    runs: dict[str, list[str]]  # group -> its runs
    scores: dict[str, dict[str, Scores]]  # group -> measure -> scores
    comparisons: list[Comparison]


@dataclass
class Overall:
    """All groups over several environments. `scores` and `comparisons` are on the scale that was given, if one was."""

    envs: list[str]
    probability: dict[str, dict[str, tuple[float, Interval | None]]]  # group -> measure -> P(it > the first)
    ranks: dict[str, dict[str, float]]  # group -> measure -> mean rank, 1 is best
    scores: dict[str, dict[str, Scores]] = field(default_factory=dict)


@dataclass
class Report:
    """What `fever compare` prints."""

    groups: dict[str, list[str]]
    environments: list[InEnvironment]
    overall: Overall | None
    differences: dict[str, list[str]]
    notes: list[str]

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def compare(groups: Sequence[Group], scale: Scale | None = None) -> Report:
    """Compare two groups of runs or more. Raises `FeverError` if there are fewer, if they share a run, or have no
    environment in common."""
    if len(groups) < 2:
        raise FeverError(f"name two experiments to compare; all that was named is {groups[0].name}")
    refuse_shared(groups)
    by_env = [_by_env(group) for group in groups]
    notes = [note for group in groups for note in group.notes]
    common = [env for env in by_env[0] if all(env in envs for envs in by_env)]
    everywhere = list(dict.fromkeys(env for envs in by_env for env in envs))
    if not common:
        raise FeverError(f"these runs have no environment in common: {', '.join(everywhere)}")
    if others := [env for env in everywhere if env not in common]:
        notes.append(f"not all have runs in {', '.join(others)}: left out")
    if unknown := [env for env in scale or {} if env not in common]:
        raise FeverError(f"--scale {unknown[0]}: it is not among the environments: {', '.join(common)}")
    names = [group.name for group in groups]
    found = [
        _in_environment(env, dict(zip(names, (envs[env] for envs in by_env), strict=True)), notes) for env in common
    ]
    overall = _overall(found, names, scale or {}, notes) if len(common) > 1 else None
    if len(groups) > 2:
        notes.append(
            f"each of the {len(groups) - 1} comparisons is on its own: the more there are, the likelier one misleads"
        )
    return Report(
        {group.name: group.paths for group in groups}, found, overall, differences(groups), list(dict.fromkeys(notes))
    )


def score(values: np.ndarray | Sequence[np.ndarray]) -> Scores:
    """Mean and interquartile mean of scores, those of one environment or one array per environment."""
    strata = [values] if isinstance(values, np.ndarray) else values
    return Scores(
        [float(value) for value in np.concatenate(strata)],
        float(statistics.mean(strata)),
        statistics.bootstrap(strata, statistics.mean),
        float(statistics.interquartile_mean(strata)),
        statistics.bootstrap(strata, statistics.interquartile_mean),
    )


def measures(curves: Sequence[Curve], end: float) -> dict[str, np.ndarray]:
    """Measure -> its value for each run: the score at `end`, and the mean of the curve until then."""
    final = [curve.at(np.array([end]))[0] for curve in curves]
    return {"final": np.array(final), "area": np.array([curve.mean_until(end) for curve in curves])}


def _by_env(group: Group) -> dict[str, list[Run]]:
    """Environment -> the group's runs in it. Notes if they are of several experiments."""
    envs: dict[str, list[Run]] = {}
    for run in group.runs:
        envs.setdefault(run.config.env, []).append(run)
    for env, runs in envs.items():
        if (count := len({experiment_of(run.config) for run in runs})) > 1:
            group.notes.append(
                f"{group.name} has runs of {count} experiments in {env}, which count as if only their seeds differed"
            )
    return envs


def _in_environment(env: str, groups: dict[str, list[Run]], notes: list[str]) -> InEnvironment:
    metric = common_metric([run for runs in groups.values() for run in runs])
    curves = {name: one_per_seed(read_curves(runs, metric, notes), notes) for name, runs in groups.items()}
    for name, some in curves.items():
        if not some:
            raise FeverError(f"no run of {name} has a score in {env}; {notes[-1]}")
    everyone = [curve for some in curves.values() for curve in some]
    end = horizon(everyone)
    _note_ends(everyone, end, notes)
    values = {name: measures(some, end) for name, some in curves.items()}
    scores = {name: {measure: score(some) for measure, some in found.items()} for name, found in values.items()}
    first, *others = values
    comparisons = [
        _compare(name, first, measure, values[name][measure], values[first][measure])
        for name in others
        for measure in MEASURES
    ]
    paths = {name: [str(curve.run.path) for curve in some] for name, some in curves.items()}
    return InEnvironment(env, metric, end, paths, scores, comparisons)


def _note_ends(curves: Sequence[Curve], end: float, notes: list[str]) -> None:
    """Say so if runs are of different lengths, or stopped at their goal."""
    limited = [curve for curve in curves if not curve.complete]
    longest = max(limited or curves, key=lambda curve: curve.end)
    if limited and longest.end > UNEQUAL * end:
        shortest = min(limited, key=lambda curve: curve.end)
        notes.append(
            f"compared at {format_count(end)} steps, where {shortest.run.path} ends; {longest.run.path} has "
            f"{format_count(longest.end)}"
        )
    if complete := len(curves) - len(limited):
        notes.append(
            f"{complete} of {len(curves)} runs stopped at their goal, and count with their last score from there on"
        )


def _compare(name: str, against: str, measure: str, ours: np.ndarray, theirs: np.ndarray) -> Comparison:
    interval = statistics.difference_interval(ours, theirs)
    verdict = _verdict(interval, min(len(ours), len(theirs)))
    return Comparison(
        name,
        against,
        measure,
        float(ours.mean() - theirs.mean()),
        interval,
        statistics.improvement([ours], [theirs]),
        statistics.improvement_interval([ours], [theirs]),
        verdict,
        statistics.seeds_needed(ours, theirs) if verdict == "unknown" else None,
    )


def _verdict(interval: Interval | None, fewest: int) -> str:
    if interval is None or fewest < FEWEST:
        return "unknown"
    low, high = interval
    if low == high == 0:
        return "same"
    return "better" if low > 0 else "worse" if high < 0 else "unknown"


def _overall(found: list[InEnvironment], names: list[str], scale: Scale, notes: list[str]) -> Overall:
    envs = [one.env for one in found]

    def strata(name: str, measure: str) -> list[np.ndarray]:
        return [np.array(one.scores[name][measure].values) for one in found]

    first = names[0]
    probability: dict[str, dict[str, tuple[float, Interval | None]]] = {name: {} for name in names[1:]}
    ranks: dict[str, dict[str, float]] = {name: {} for name in names}
    for measure in MEASURES:
        values = {name: strata(name, measure) for name in names}
        for name in names:
            lost = [statistics.improvement(values[other], values[name]) for other in names if other != name]
            ranks[name][measure] = 1 + sum(lost)
            if name != first:
                interval = statistics.improvement_interval(values[name], values[first])
                probability[name][measure] = (statistics.improvement(values[name], values[first]), interval)
    overall = Overall(envs, probability, ranks)
    if missing := [env for env in envs if env not in scale]:
        notes.append(
            "scores of different environments have different units and are not averaged; say which scores count as 0 "
            f"and 1, for example: --scale {missing[0]}=0,500"
        )
        return overall
    for name in names:
        overall.scores[name] = {measure: score(_scaled(strata(name, measure), envs, scale)) for measure in MEASURES}
    return overall


def _scaled(strata: list[np.ndarray], envs: list[str], scale: Scale) -> list[np.ndarray]:
    """Scores by which 0 is an environment's lower anchor and 1 its upper one."""
    anchors = [scale[env] for env in envs]
    return [(values - low) / (high - low) for values, (low, high) in zip(strata, anchors, strict=True)]


def parse_scale(words: Sequence[str]) -> dict[str, tuple[float, float]]:
    """`["CartPole-v1=0,500"]` as environment -> (score that counts as 0, as 1)."""
    scale = {}
    for word in words:
        env, equals, text = word.rpartition("=")
        try:
            low, high = (float(part) for part in text.split(","))
        except ValueError:
            low = high = 0.0
        if not (equals and env and abs(low) < 1e100 and abs(high) < 1e100 and low != high):
            raise FeverError(f"--scale {word}: write ENV=LOW,HIGH, two different numbers, such as CartPole-v1=0,500")
        scale[env] = (low, high)
    return scale
