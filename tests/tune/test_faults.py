"""Searches whose Ray dies, or whose environments hang, on a real Ray."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fever.runs.run import Run
from fever.tune import search
from tests.helpers import ROOT, child, processes_with, run_fever, wait_for
from tests.tune.helpers import configure

pytestmark = pytest.mark.ray


@pytest.mark.slow
def test_a_trial_whose_environment_hangs_fails_and_the_search_continues(ray: Any, tmp_path: Path) -> None:
    kwargs = {"folder": str(tmp_path), "how": "python", "at": 100}
    config = configure(
        tmp_path, "tests.environments:StuckEnv", env_kwargs=kwargs, trials=2, parallel=1, name="hung", step_timeout=1
    )
    summary = search(config)
    rows = [json.loads(line) for line in (tmp_path / "hung" / "trials.jsonl").read_text().splitlines()]
    assert [row["state"] for row in rows] == ["failed", "finished"]
    assert "StuckEnv's step() (environment" in rows[0]["error"]
    assert "took longer than 1 s" in rows[0]["error"]
    assert (summary["failed"], summary["best"]["trial"]) == (1, 2)


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["gcs_server", "raylet"])
def test_a_search_whose_ray_dies_ends_and_can_be_resumed(victim: str, tmp_path: Path) -> None:
    words = ["tune", "CartPole-v1", "learning_rate=loguniform(1e-4,1e-2)", "--trials", "4", "--name", "a", "--json"]
    words += ["--stop-steps", "30000", "--parallel", "1", "hidden=[8]"]
    process = subprocess.Popen(
        [sys.executable, "-m", "fever", *words],
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT), "FEVER_TEST_MARK": str(tmp_path)},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    first = tmp_path / "runs/a/trials/0001"
    try:
        wait_for(lambda: process.poll() is not None or Run(first).checkpoints(), "the first trial's checkpoint")
        os.kill(child(process.pid, victim), signal.SIGKILL)
        said = process.communicate(timeout=90)[1]
    finally:
        process.kill()
    assert process.returncode == 1, said
    assert "died (killed by SIGKILL)" in said
    assert "Traceback" not in said
    assert Run(tmp_path / "runs/a").status == "failed"
    wait_for(lambda: not processes_with(f"FEVER_TEST_MARK={tmp_path}"), "end of all processes", 100)
    done = run_fever("resume", "a", "--trust", "--json", cwd=tmp_path, timeout=300)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["trials"] == 4
