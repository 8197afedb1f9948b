"""The table of workers that a run keeps for whoever watches it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import fever
from fever import layout
from fever.sampling.spec import Report
from fever.training.worker_table import WorkerTable


def report(worker: int, steps: int, version: int, host: str = "a") -> Report:
    seconds = {"env": 1.0, "inference": 0.5, "total": 2.0}
    return Report(steps, [], worker, version, seconds, host)


def test_speeds_shares_and_lag(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = 100.0
    monkeypatch.setattr("fever.training.worker_table.time.time", lambda: clock)
    table = WorkerTable()
    table.add(report(0, 50, 3))
    table.add(report(0, 50, 4))
    table.add(report(1, 30, 1, "b"))
    clock = 110.0
    first, second = table.describe(lambda index: 7 * index)["workers"]
    assert (first["steps"], first["steps_per_second"], first["weights_behind"]) == (100, 10.0, 0)
    assert (second["host"], second["steps_per_second"], second["weights_behind"]) == ("b", 3.0, 3)
    assert (second["restarts"], second["time_env"], second["time_inference"]) == (7, 0.5, 0.25)
    newer = table.describe(lambda _: 0, newest=9, over=True)["workers"]  # sent out, and nobody has used it yet
    assert [one["weights_behind"] for one in newer] == [5, 8]
    clock = 120.0
    assert [one["steps_per_second"] for one in table.describe(lambda _: 0)["workers"]] == [5.0, 1.5]  # they slow down
    clock = 200.0
    assert [one["steps_per_second"] for one in table.describe(lambda _: 0, over=True)["workers"]] == [5.0, 1.5]


@pytest.mark.ray
def test_a_replaced_worker_is_counted(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"steps": 8, "minibatch": 16, "epochs": 1}
    crash = {"marker": str(tmp_path / "crashed")}
    result = fever.train(
        "tests.environments:CrashEnv",
        env_kwargs=crash,
        workers=2,
        envs=2,
        runs=tmp_path,
        stop={"iterations": 20},
        **settings,
    )
    table = json.loads((result.run.path / layout.WORKERS).read_text())
    assert {row["worker"] for row in table["workers"]} == {0, 1}
    restarts = [row["restarts"] for row in table["workers"]]
    assert sum(restarts) == result.run.last_row()["worker_restarts"] >= 1
