"""Large launches, by simulation: what ranks ask of the shared file system does not depend on how many they are."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.helpers import ROOT


def launch(*ranks: int, latency: float) -> list[dict[str, float]]:
    """The rows of benchmarks/rendezvous.py, one for each number of ranks. In a process of its own, whose every access
    to files is counted."""
    command = [sys.executable, str(ROOT / "benchmarks" / "rendezvous.py"), *map(str, ranks), "--latency", str(latency)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=600, cwd=ROOT)
    names, _, *rows = ([cell.strip() for cell in line.strip("| ").split("|")] for line in done.stdout.splitlines())
    return [dict(zip(names, map(float, row), strict=True)) for row in rows]


def test_what_a_rank_asks_for_does_not_grow_with_the_number_of_ranks() -> None:
    few, many = launch(64, 256, latency=1.0)
    assert many["files opened"] < 15
    assert many["kB read"] < 1.5 * few["kB read"]
    assert many["entries listed"] < 2 * few["entries listed"]  # four times the ranks
    assert many["operations per rank"] < 2 * few["operations per rank"]


@pytest.mark.slow
def test_512_ranks_meet_in_half_a_minute() -> None:
    (row,) = launch(512, latency=5.0)
    assert row["met (s)"] < 30
