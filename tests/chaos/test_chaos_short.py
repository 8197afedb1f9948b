"""The short form of `make chaos`, with a fixed seed: real trainings, really broken."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from chaos.schedule import IN_LAB, KINDS
from tests.helpers import ROOT

pytestmark = pytest.mark.ray


def chaos(folder: Path, *words: str, timeout: float, but: str = "nothing") -> dict[str, Any]:
    """The report of `python -m chaos`, which must have met its bars, except one that has these words."""
    command = [sys.executable, "-m", "chaos", "--out", str(folder), "--seed", "1", *words]
    variables = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True, timeout=timeout)
    missed = [line for line in done.stdout.splitlines() if line.startswith("- MISSED") and but not in line]
    assert done.returncode in (0, 1), done.stdout[-4000:] + done.stderr[-2000:]
    assert not missed, done.stdout[-4000:] + done.stderr[-2000:]
    return json.loads((folder / "report.json").read_text())


def test_a_training_survives_a_few_faults(tmp_path: Path) -> None:
    words = ("--algos", "ppo", "--kinds", "kill_sampler", "exit", "kill_driver", "--faults", "4")
    found = chaos(tmp_path, *words, timeout=600)
    assert sum(len(run["outcomes"]) for run in found["runs"]) == 4


@pytest.mark.slow
@pytest.mark.flaky_under_load("its bars are seconds of throughput")
def test_trainings_survive_faults_of_every_kind(tmp_path: Path) -> None:
    kinds = [kind for kind in KINDS if kind not in IN_LAB]  # other tests lose machines and links
    # A fault may find no victim, while Ray is being started anew: then it was not caused, and not survived.
    found = chaos(tmp_path, "--faults", "24", "--minutes", "20", "--kinds", *kinds, timeout=1500, but="faults survived")
    assert sum(len(run["outcomes"]) for run in found["runs"]) == 24
