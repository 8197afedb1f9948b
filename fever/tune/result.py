"""What a search has found, for Python."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from fever import layout
from fever.config import RunConfig, load_yaml, validate
from fever.runs.run import Run
from fever.tune import records
from fever.tune.records import Record


@dataclass(frozen=True)
class SearchResult:
    """A finished or interrupted search."""

    run: Run
    summary: dict[str, Any]  # the object that `--json` prints

    @cached_property
    def trials(self) -> list[Record]:
        """Every trial that has ended, the best first: number, settings, state, score, return_mean, steps, ..."""
        return records.ranked(records.read(self.run.path / layout.TRIALS_TABLE).values())

    @property
    def best(self) -> Record | None:
        """The trial with the highest score; None if none has one."""
        return records.best_of(self.trials)

    @property
    def best_config(self) -> RunConfig | None:
        """The configuration of a run with the best settings, as in best.yaml; None if no trial has a score."""
        path = self.run.path / layout.BEST
        return validate(RunConfig, load_yaml(path), str(path)) if path.is_file() else None

    @property
    def stop_reason(self) -> str:
        return self.summary["stop_reason"]
