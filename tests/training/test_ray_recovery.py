"""A run whose own Ray dies, on a real Ray."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from fever.errors import RayLost, TrainingError
from fever.sampling.pool import Pool
from fever.training.ray_recovery import ITERATIONS, LOSSES, RayRecovery
from tests.helpers import ROOT, child, processes_with, wait_for, without_ray

pytestmark = pytest.mark.ray

SMALL = {
    "ppo": ["hidden=[8]", "steps=64", "minibatch=64", "epochs=1"],
    "dqn": ["hidden=[8]", "batch=64", "warmup=200", "replay_ratio=8", "report_steps=300"],
    "apex": ["hidden=[8]", "batch=64", "warmup=200", "replay_ratio=8", "report_steps=300", "replay_shards=2"],
    "impala": ["hidden=[8]", "steps=64"],
}
FAULTS = [
    ("ppo", "raylet"),
    *(pytest.param(*pair, marks=pytest.mark.slow) for pair in [("ppo", "gcs_server"), ("dqn", "raylet")]),
    *(pytest.param(*pair, marks=pytest.mark.slow) for pair in [("apex", "gcs_server"), ("impala", "raylet")]),
]


def rows(run: Path) -> list[dict[str, Any]]:
    file = run / "metrics.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.is_file() else []


@pytest.mark.parametrize(("algo", "victim"), FAULTS)
def test_a_run_goes_on_after_its_ray_has_died(algo: str, victim: str, tmp_path: Path) -> None:
    words = ["train", "CartPole-v1", "--algo", algo, "--workers", "2", "--envs", "4", "--name", "a", *SMALL[algo]]
    mark = {"FEVER_TEST_MARK": str(tmp_path)}
    process = subprocess.Popen(
        [sys.executable, "-m", "fever", *words, "--stop-time", "10m"],
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT), **mark},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    run = tmp_path / "runs/a"
    try:
        wait_for(lambda: process.poll() is not None or len(rows(run)) >= 3, "rows")
        os.kill(child(process.pid, victim), signal.SIGKILL)
        before, began = len(rows(run)), time.monotonic()
        wait_for(lambda: process.poll() is not None or len(rows(run)) > before + 2, "rows after the death", 100)
        assert process.poll() is None, process.communicate()[0]
        seconds = time.monotonic() - began
        process.send_signal(signal.SIGTERM)
        output, _ = process.communicate(timeout=100)
    finally:
        process.kill()
    assert process.returncode == 130, output
    assert "died (killed by SIGKILL): Ray and the workers are started anew" in output
    assert "Traceback" not in output
    assert "(raylet)" not in without_ray(output)
    after = rows(run)
    assert [row["iteration"] for row in after] == list(range(1, len(after) + 1))
    assert all(one["steps"] < other["steps"] for one, other in pairwise(after))
    assert after[-1]["worker_restarts"] == 2
    assert seconds < 60  # 20 on a machine that has nothing else to do
    wait_for(lambda: not processes_with(f"FEVER_TEST_MARK={tmp_path}"), "end of all processes")


class Losing:
    """A training that loses Ray at the given iterations, and ends at the last of them but one."""

    def __init__(self, *iterations: int, can_restart: bool = True) -> None:
        self.iterations, self.saved, self.said = [*iterations], 0, list[str]()
        self.pool = Pool()
        self.pool.can_restart = can_restart
        self.now = 0

    def train(self, pool: Pool) -> str:
        if not self.iterations:
            return "steps"
        self.now = self.iterations.pop(0)
        raise RayLost("Ray's raylet died")

    def save(self) -> None:
        self.saved += 1

    def run(self) -> str:
        recovery = RayRecovery(self.train, self.save, Pool, lambda: self.now, self.said.append)
        return recovery.run(self.pool)


def test_losses_that_are_far_apart_are_all_survived() -> None:
    losing = Losing(*range(0, ITERATIONS * 8, ITERATIONS))
    assert losing.run() == "steps"
    assert losing.saved == 7  # there was nothing to save at the first loss
    assert len(losing.said) == 8


def test_a_ray_that_dies_again_and_again_ends_the_run() -> None:
    losing = Losing(*[5] * (LOSSES + 1))
    with pytest.raises(TrainingError, match="Ray's raylet died, 4 times within a few iterations") as error:
        losing.run()
    assert not isinstance(error.value, RayLost)
    assert losing.saved == LOSSES + 1


def test_a_ray_of_somebody_else_ends_the_run_with_everything_saved() -> None:
    losing = Losing(5, can_restart=False)
    with pytest.raises(TrainingError, match=r"^Ray's raylet died; the workers are lost with it$"):
        losing.run()
    assert losing.saved == 1
