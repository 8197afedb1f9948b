"""What a training returns to Python."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from fever.config import RunConfig
from fever.job import CONTINUED
from fever.runs.run import Run
from fever.training.progress import Progress

EXIT_CODES = {"interrupted": 130, "limit": CONTINUED}  # of stop reasons that are no success


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


def summarize(run: Run, config: RunConfig, env: str, progress: Progress, steps: int, preset: bool) -> dict[str, Any]:
    """The summary of a training that has come so far, without how it ended. `preset`: its settings are the zoo's where
    the user has set none."""
    statistics, sampling = progress.statistics(), progress.seconds - progress.evaluation_seconds
    return {
        "run": str(run.path),
        "env": env,
        "algo": config.algo,
        "preset": preset,
        "workers": config.workers,
        "envs": config.envs,
        "seed": config.seed,
        "iterations": progress.iteration,
        "steps": steps,
        "episodes": progress.episodes,
        "seconds": round(progress.seconds, 3),
        "steps_per_second": round(steps / sampling, 1) if sampling > 0 else 0.0,
        "return_mean": statistics.get("return_mean"),
        "length_mean": statistics.get("length_mean"),
        "evaluation": progress.evaluation,
        "hosts": dict(progress.steps_by_host),  # steps by where they were taken, since this process began
    }
