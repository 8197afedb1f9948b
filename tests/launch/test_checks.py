"""What `fever doctor --on` says of a job's machines; with real ones in test_mpi.py and test_slurm.py."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from fever.launch.checks import report

HEALTHY: dict[str, Any] = {
    "cpus": [0, 1], "versions": {"Python": "3.11.7", "ray": "2.60.0"}, "limits": {"files": 4096, "processes": -1},
    "traps": [], "scratch": True, "shm": 2**31, "clock": 0.0,
}  # fmt: skip


def lines(*ranks: dict[str, Any], views: list[dict[str, Any]] | None = None, **offsets: float) -> dict[str, str]:
    """The report on these ranks, by topic."""
    facts = {number: {**HEALTHY, "host": f"node{number}", **rank} for number, rank in enumerate(ranks)}
    clocks = {number: offsets.get(f"node{number}", 0.0) for number in facts}
    found = report(facts, views or [], clocks, Path("/runs/.doctor"))
    return {finding.topic: f"{finding.mark} {finding.text}" for finding in found}


def test_nothing_is_wrong_with_healthy_machines() -> None:
    found = lines({}, {})
    assert {line.split()[0] for line in found.values()} == {"ok"}
    assert found["ranks"] == "ok 2 on node0, node1; all see /runs"
    assert found["cores"] == "ok node0 2, node1 2"


def test_every_fault_names_its_host() -> None:
    faulty = {
        "versions": {"Python": "3.11.7", "ray": "2.59.0"}, "limits": {"files": 256, "processes": 100}, "scratch": False,
        "traps": ["LD_PRELOAD"], "shm": 64 * 2**20,
    }  # fmt: skip
    views = [
        {"host": "node0", "nameless": ["node1"], "silent": []},
        {"host": "node1", "nameless": [], "silent": ["node0"]},
    ]
    found = lines({}, faulty, views=views, node1=7.0)
    assert found["Python"] == "ok 3.11.7"
    assert found["ray"] == "problem node1: 2.59.0 differs from node0's 2.60.0"
    assert found["names"] == "problem node1 from node0 is unknown"
    assert found["ports"] == "problem node0 from node1 does not answer"
    assert found["clock"] == "note node1 is off by +7.0 s"
    assert found["open files"].startswith("problem node1: 256 allowed")
    assert found["processes"].startswith("note node1: 100 allowed")
    assert found["scratch"] == "problem node1 cannot be used or is full"
    assert found["variables"].startswith("note node1 has LD_PRELOAD")
    assert found["/dev/shm"].startswith("note node1 is under 1 GiB")


def test_machines_of_the_allocation_without_a_rank_are_named(tmp_path: Path, monkeypatch: Any) -> None:
    for name in [name for name in os.environ if name.startswith("SLURM_JOB_NODELIST")]:
        monkeypatch.delenv(name)
    (tmp_path / "nodes").write_text("node0\nnode7.cluster\n")
    monkeypatch.setenv("PBS_NODEFILE", str(tmp_path / "nodes"))
    assert lines({})["hosts"] == "note node7 of the allocation have no rank"
