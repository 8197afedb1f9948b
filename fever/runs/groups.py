"""Runs that belong together: those of one experiment differ in their seed only."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable

from fever.config import RunConfig
from fever.runs.run import Run

OF_ONE_RUN = (  # fields that may differ between the runs of one experiment; a run has its preset's values among its own
    "seed", "name", "runs", "video_every", "preset"
)  # fmt: skip


def experiment_of(config: RunConfig) -> str:
    """A short key that two configurations have in common if they differ in nothing but the seed, and in where their
    files are. It needs no mark in the configuration, so runs that were started one by one count as well."""
    values = config.model_dump(mode="json", exclude=set(OF_ONE_RUN))
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:12]


def by_experiment(runs: Iterable[Run]) -> dict[str, list[Run]]:
    """Experiment -> its runs, in the order of their seeds; experiments in the order of their first run."""
    groups: dict[str, list[Run]] = {}
    for run in runs:
        groups.setdefault(experiment_of(run.config), []).append(run)
    return {key: sorted(group, key=lambda run: run.config.seed) for key, group in groups.items()}
