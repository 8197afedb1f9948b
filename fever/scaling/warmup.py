"""When a run is warm, and the callback that ends a run once it was measured for long enough."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from fever.training.callbacks import Callback, TrainingInfo

SETTLE_SECONDS = 1.0  # after the first gradient steps, which compile
MEASURED = "measured"  # stop reason of a run that was measured for as long as asked


class WarmUp:
    """Looks at the rows of metrics one by one until the run is warm: its learner has learned, so everything is compiled
    and a replay buffer is filled, and a little later. The rows after that count."""

    def __init__(self) -> None:
        self.learned: float | None = None  # seconds at which the learner had learned

    def ends_with(self, row: Mapping[str, Any]) -> bool:
        """Whether the run is warm at the end of this row's iteration."""
        seconds = float(row["seconds"])
        if self.learned is None:
            if row.get("updates", 1):  # not every algorithm of other libraries counts them
                self.learned = seconds
            return False
        return seconds >= self.learned + SETTLE_SECONDS


def reaches(row: Mapping[str, Any], target: float, window: int) -> bool:
    """Whether the mean return over a whole window of episodes has come up to the target."""
    value = row.get("return_mean")
    return isinstance(value, (int, float)) and row["episodes"] >= window and value >= target


class StopWhenMeasured(Callback):
    """Stops a run that was warm for so many seconds, and has reached the target return if there is one."""

    def __init__(self, seconds: float, target: float | None = None) -> None:
        self.seconds, self.target = seconds, target
        self.warmup = WarmUp()
        self.end = math.inf  # in seconds of training
        self.reached = target is None

    def on_iteration(self, info: TrainingInfo) -> None:
        row = info.metrics
        if math.isinf(self.end) and self.warmup.ends_with(row):
            self.end = row["seconds"] + self.seconds
        self.reached = self.reached or (self.target is not None and reaches(row, self.target, info.config.stop.window))
        if self.reached and row["seconds"] >= self.end:
            info.request_stop(MEASURED)
