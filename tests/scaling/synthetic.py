"""Measurements as runs would give them, made of a known law, and run directories with known rows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from fever.config import RunConfig
from fever.runs.run import to_yaml
from fever.scaling.figures import Figures, collect
from fever.scaling.measure import Measurement, Plan
from fever.scaling.model import Setting


def plan(*counts: int, **changes: Any) -> Plan:
    fields: dict[str, Any] = {"config": RunConfig(env="CartPole-v1"), "kind": "workers", "rounds": 3, "seconds": 10.0}
    fields |= {"target": None, "longest": 600.0, **changes}
    return Plan(counts=counts, **fields)


def waits_for_learner(
    workers: int, env: float = 5e-3, inference: float = 1e-4, learner: float = 2e-5, transfer: float = 1e-4,
    cores: float = 2, computing: float = 0.0,
) -> tuple[float, dict[str, float]]:  # fmt: skip
    """Samples per second and shares of the time of a run whose workers wait for the learner; seconds per sample of one
    worker, the learner's per sample."""
    size = max(1, workers)
    over = max(1.0, size * (env * computing + inference) / (env + inference) / cores)
    parts = {"time_env": env * over, "time_inference": inference * over}
    parts |= {"time_transfer": transfer * size if workers else 0.0, "time_learn": learner * size}
    span = sum(parts.values())
    return size / span, {name: seconds / span for name, seconds in parts.items()}


def figures(
    rates: dict[int, tuple[float, dict[str, float]]],
    noise: float = 0.01,
    setting: Setting | None = None,
    rounds: int = 3,
    **changes: Any,
) -> Figures:
    """Every count in all rounds, whose speed differs by `noise` from round to round."""
    found = [
        Measurement(
            count, number, f"workers-{count}-round-{number}", workers=count, seconds=10.0,
            samples_per_second=rate * (1 + noise * (number - 2)), updates_per_second=rate / 25,
            samples_per_iteration=1024.0 * max(1, count), shares=shares,
        )
        for number in range(1, rounds + 1)
        for count, (rate, shares) in rates.items()
    ]  # fmt: skip
    return collect(plan(*rates, rounds=rounds, **changes), setting or Setting(False, 2.0, 0.0), found)


def write_run(path: Path, rows: list[dict[str, Any]], **summary: Any) -> Path:
    """A run directory with these rows of metrics."""
    path.mkdir(parents=True)
    (path / "config.yaml").write_text(to_yaml(RunConfig(env="CartPole-v1")))
    (path / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    (path / "summary.json").write_text(json.dumps({"stop_reason": "measured", "seconds": 20.0, **summary}))
    return path


def row(iteration: int, seconds: float, **more: Any) -> dict[str, Any]:
    """A row in which 1,000 steps were taken."""
    shares = {"time_env": 0.5, "time_inference": 0.2, "time_transfer": 0.1, "time_learn": 0.2}
    counters = {"iteration": iteration, "steps": 1000 * iteration, "episodes": 10 * iteration, "seconds": seconds}
    return {**counters, "updates": 40.0, "return_mean": 20.0 * iteration, **shares, **more}
