"""What a training returns to Python."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from fever.runs.run import Run


@dataclass(frozen=True)
class Result:
    """A finished or interrupted training."""

    run: Run
    summary: dict[str, Any]  # the object that `--json` prints

    @cached_property
    def curves(self) -> dict[str, np.ndarray]:
        """Metric -> one number per iteration."""
        return self.run.curves()

    @cached_property
    def policy(self) -> Any:
        """The policy of the last checkpoint: `policy.act(observation)`."""
        return self.run.checkpoint().policy()

    @property
    def stop_reason(self) -> str:
        return self.summary["stop_reason"]

    @property
    def return_mean(self) -> float | None:
        return self.summary["return_mean"]
