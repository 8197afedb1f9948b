"""Run directories as a training leaves them, without one."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from fever import layout
from fever.runs.run import Run


def make_run(
    folder: Path,
    name: str,
    returns: Iterable[float],
    *,
    seed: int = 0,
    every: int = 100,
    reason: str = "steps",
    evaluations: Iterable[float] = (),
    **config: Any,
) -> Run:
    """A run whose row k, from 1, is at k · `every` steps and has the k-th return; likewise its evaluations."""
    path = folder / name
    path.mkdir(parents=True)
    values = {"env": "CartPole-v1", "seed": seed, "runs": str(folder), "workers": 0, **config}
    (path / layout.CONFIG).write_text(json.dumps(values))
    rows = [
        {"iteration": k, "steps": k * every, "seconds": k / 2, "episodes": 3 * k, "return_mean": value}
        for k, value in enumerate(returns, 1)
    ]
    write_rows(path / layout.METRICS, rows)
    scores = [{"iteration": k, "steps": k * every, "return_mean": value} for k, value in enumerate(evaluations, 1)]
    write_rows(path / layout.EVALUATIONS, scores)
    (path / layout.SUMMARY).write_text(json.dumps({"stop_reason": reason, "hosts": {"a": 1}}))
    return Run(path)


def write_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    if rows:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def make_experiment(folder: Path, name: str, curves: Iterable[Iterable[float]], **more: Any) -> list[Run]:
    """Runs with the seeds 0, 1, … and these returns."""
    return [make_run(folder, f"{name}-seed-{seed}", curve, seed=seed, **more) for seed, curve in enumerate(curves)]
