"""How good a trial is: the one number that a search maximises.

    score = mean return over the budget of the stop rule

that is, the area under `return_mean` over environment steps, divided by the steps. Steps before the first episode ended
count with its return. A run that reached its goal (`stop.reward`) and stopped counts as having that goal for the rest
of its budget. So of two settings that reach the same return, the one that gets there sooner has the higher score.

The budget is `stop.steps`, or `stop.seconds` or `stop.iterations`, whichever is used up first. With several seeds, one
run follows the other, and the score is that of all their budgets laid end to end.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from fever.config import Stop

BUDGET = 900  # of one seed, in Tune's time: nine parts, so that ASHA looks after a ninth and after a third


@dataclass
class Course:
    """The score of one run, while it goes on and when it has ended."""

    stop: Stop
    area: float = 0.0
    steps: int = 0  # that the area is over
    share: float = 0.0  # of the budget that is used
    row: dict[str, Any] = field(default_factory=dict)  # the last one

    def add(self, row: dict[str, Any]) -> None:
        """Take in one row of metrics."""
        self.row = row
        value = row.get("return_mean")
        if value is not None:
            self.area += value * (row["steps"] - self.steps)
            self.steps = row["steps"]
        self.share = min(1.0, used(self.stop, row))

    @property
    def mean(self) -> float | None:
        """Mean return so far, or None before any episode ended."""
        return self.area / self.steps if self.steps else None

    def end(self, reason: str) -> float | None:
        """The score of the run that stopped for this reason."""
        if self.mean is None or reason != "reward" or self.stop.reward is None:
            return self.mean
        return self.mean * self.share + self.stop.reward * (1 - self.share)


def used(stop: Stop, row: dict[str, Any]) -> float:
    """The share of the budget that a run has used up at this row."""
    limits = ((stop.steps, row["steps"]), (stop.seconds, row["seconds"]), (stop.iterations, row["iteration"]))
    return max((done / limit for limit, done in limits if limit is not None), default=0.0)


def mean_score(ended: list[float], course: Course | None) -> float | None:
    """The score of a trial: of the seeds that have ended and of the one that goes on, each by its share."""
    total, weight = sum(ended), float(len(ended))
    if course is not None and course.mean is not None:
        share = max(course.share, 1e-9)
        total, weight = total + course.mean * share, weight + share
    return total / weight if weight else None
