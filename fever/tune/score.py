"""How good a trial is: the one number that a search maximises.

    score = mean return over the budget of the stop rule

that is, the area under `return_mean` over environment steps, divided by the steps. Steps before the end of the first
episode count with its return. A run that reached its goal (`stop.reward`) and stopped counts with that goal for the
rest of its budget. So of two settings that reach the same return, the one that gets there sooner has the higher score.

The budget is `stop.steps`, `stop.seconds` or `stop.iterations`, whichever is used up first. With several seeds, the
score is the mean over all their budgets.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from fever.config import Stop

BUDGET = 900  # of one seed, in units of Ray Tune's time; ASHA compares trials after a ninth and a third of it


@dataclass
class LearningCurve:
    """The learning curve of one run, reduced to its score so far."""

    stop: Stop
    area: float = 0.0
    steps: int = 0  # environment steps that the area covers
    share: float = 0.0  # of the budget that is used
    row: dict[str, Any] = field(default_factory=dict)  # the latest row of metrics

    def add(self, row: dict[str, Any]) -> None:
        """Add one row of metrics."""
        self.row = row
        value = row.get("return_mean")
        if value is not None:
            self.area += value * (row["steps"] - self.steps)
            self.steps = row["steps"]
        self.share = min(1.0, used(self.stop, row))

    @property
    def mean(self) -> float | None:
        """Mean return so far; None before the first episode ended."""
        return self.area / self.steps if self.steps else None

    def end(self, reason: str) -> float | None:
        """The score of the run, which has stopped for this reason."""
        if self.mean is None or reason != "reward" or self.stop.reward is None:
            return self.mean
        return self.mean * self.share + self.stop.reward * (1 - self.share)


def used(stop: Stop, row: dict[str, Any]) -> float:
    """The share of the budget that a run has used up at this row."""
    limits = ((stop.steps, row["steps"]), (stop.seconds, row["seconds"]), (stop.iterations, row["iteration"]))
    return max((done / limit for limit, done in limits if limit is not None), default=0.0)


def mean_score(ended: list[float], curve: LearningCurve | None) -> float | None:
    """The score of a trial: the mean over its ended seeds and the running one, which is weighted by its share."""
    total, weight = sum(ended), float(len(ended))
    if curve is not None and curve.mean is not None:
        share = max(curve.share, 1e-9)
        total, weight = total + curve.mean * share, weight + share
    return total / weight if weight else None
