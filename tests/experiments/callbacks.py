"""Callbacks for trainings of several seeds."""

from __future__ import annotations

from typing import Any

from fever.training.callbacks import Callback


class FailWith(Callback):
    """Raises in the first iteration of the run with this seed."""

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def on_iteration(self, info: Any) -> None:
        if info.config.seed == self.seed:
            raise ValueError("this seed brings bad luck")
