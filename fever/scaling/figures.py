"""What the measurements of all rounds say together: means, 95 % intervals, speedups, and which differences are real."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from fever.scaling.measure import Measurement, Plan
from fever.scaling.model import METRICS, Model, Point, Setting

CONFIDENCE = 0.95
FASTER, SLOWER, NOISE, UNKNOWN = "faster", "slower", "within the noise", "one round"
Interval = tuple[float, float]


@dataclass(frozen=True)
class Count:
    """All measurements of one count."""

    count: int
    rounds: tuple[Measurement, ...]  # those that worked

    def mean(self, name: str) -> float | None:
        """The mean of a figure over the rounds; None if a round lacks it."""
        values = [getattr(one, name) for one in self.rounds]
        return None if any(value is None for value in values) else float(np.mean(values))

    @cached_property
    def rate(self) -> float:
        """Samples per second: the geometric mean over the rounds, as speedups are ratios."""
        return float(np.exp(np.mean([math.log(one.samples_per_second) for one in self.rounds])))

    @property
    def workers(self) -> int:
        return self.rounds[0].workers

    @property
    def shares(self) -> dict[str, float]:
        """Part -> share of the time."""
        if not all(one.shares for one in self.rounds):
            return {}
        return {part: float(np.mean([one.shares[name] for one in self.rounds])) for name, part in METRICS.items()}


def interval(ratios: Sequence[float]) -> Interval | None:
    """The 95 % interval of the mean ratio, by Student's t of their logarithms; None for fewer than two."""
    count = len(ratios)
    if count < 2:
        return None
    from scipy.special import stdtrit  # imported here: takes 0.2 s

    logs = np.log(ratios)
    width = float(stdtrit(count - 1, (1 + CONFIDENCE) / 2)) * float(logs.std(ddof=1)) / math.sqrt(count)
    return math.exp(logs.mean() - width), math.exp(logs.mean() + width)


def ratios(one: Count, base: Count) -> list[float]:
    """How many times as fast one count was as another, in each round that has both: what slows the machine for a while
    slows both."""
    theirs = {found.round: found.samples_per_second for found in base.rounds}
    return [found.samples_per_second / theirs[found.round] for found in one.rounds if found.round in theirs]


def verdict(one: Count, base: Count) -> str:
    """FASTER or SLOWER if the interval says so, NOISE if it does not, UNKNOWN if there is none."""
    found = interval(ratios(one, base))
    if found is None:
        return UNKNOWN
    return FASTER if found[0] > 1 else SLOWER if found[1] < 1 else NOISE


@dataclass(frozen=True)
class Figures:
    """Everything that was measured, by count, and the model of it."""

    plan: Plan
    setting: Setting
    counts: tuple[Count, ...]  # that worked, the smallest first
    failed: tuple[Measurement, ...]

    @property
    def base(self) -> Count:
        return self.counts[0]

    def rounds_of(self, count: int) -> tuple[Measurement, ...]:
        """The measurements of a count that worked."""
        return next((one.rounds for one in self.counts if one.count == count), ())

    def speedup(self, rate: float) -> float:
        """That of a rate which was predicted."""
        return rate / self.base.rate

    def measured_speedup(self, one: Count) -> float:
        """The geometric mean over the rounds that have both counts, which is the middle of its interval; without such
        a round, that of the mean rates."""
        both = ratios(one, self.base)
        return float(np.exp(np.mean(np.log(both)))) if both else self.speedup(one.rate)

    def ideal(self, count: int) -> float:
        """Linear speedup. No worker means that the learner's process samples, as one worker would."""
        return max(1, count) / max(1, self.base.count)

    @cached_property
    def model(self) -> Model | None:
        """None if fewer than two counts worked."""
        return Model(self.points, self.setting) if len(self.points) > 1 else None

    @property
    def points(self) -> list[Point]:
        return [Point(one.count, one.workers, one.rate, one.shares) for one in self.counts]

    @property
    def workers_per_count(self) -> float:
        """Workers for each node or host; 1 if workers are counted."""
        return self.counts[-1].workers / max(1, self.counts[-1].count) if self.plan.kind != "workers" else 1.0

    def workers_of(self, count: int) -> int:
        """Workers of a count that was run, or is predicted."""
        run = {one.count: one.workers for one in self.counts}
        return run.get(count, round(count * self.workers_per_count))

    def predict(self, count: int) -> float | None:
        """Samples per second of a count; None without a model, and of no worker, which the model is not about."""
        if self.model is None or not (workers := self.workers_of(count)):
            return None
        return self.model.rate(workers)

    def error(self, one: Count) -> float | None:
        """By how much the model is off for a count that was run, as a share of what was measured."""
        predicted = self.predict(one.count)
        return None if predicted is None else predicted / one.rate - 1

    @cached_property
    def held_out(self) -> float | None:
        """The error for the largest count of a model that was fitted to the others; None for fewer than three."""
        points = [point for point in self.points if point.workers]
        if len(points) < 3:
            return None
        return Model(points[:-1], self.setting).rate(points[-1].workers) / points[-1].rate - 1

    def enough(self) -> Count:
        """The smallest count beyond which nothing is certainly faster."""
        for place, one in enumerate(self.counts):
            if not any(verdict(larger, one) == FASTER for larger in self.counts[place + 1 :]):
                return one
        return self.counts[-1]

    @property
    def fastest(self) -> Count:
        return max(self.counts, key=lambda one: one.rate)


def collect(plan: Plan, setting: Setting, found: Sequence[Measurement]) -> Figures:
    """Measurements by count. What worked in some rounds and failed in another counts by those that worked."""
    counts = []
    for count in plan.counts:
        rounds = tuple(one for one in found if one.count == count and one.problem is None)
        if rounds:
            counts.append(Count(count, rounds))
    return Figures(plan, setting, tuple(counts), tuple(one for one in found if one.problem is not None))
