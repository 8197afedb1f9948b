"""`fever train --seeds --on slurm` against the real Slurm: one job for each seed, which are compared afterwards."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.lab.machines import Lab, require_lab
from tests.lab.site import Site, summary

pytestmark = [
    pytest.mark.lab,
    pytest.mark.slow,
    pytest.mark.flaky_under_load("several Ray nodes on two cores: a starved node is taken for a lost one"),
]


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    require_lab("slurmctld", "slurmd", "munged", "sbatch")
    with Lab(tmp_path / "lab", 2) as lab:
        lab.start_slurm()
        yield Site(lab, tmp_path)


def test_every_seed_is_a_job(site: Site) -> None:
    place = ("--on", "slurm", "--nodes", "1", "--time", "10m")
    words = ("train", "CartPole-v1", "--stop-steps", "3000", "--workers", "1", "--seeds", "2", "--name", "a", *place)
    shown = site.fever(*words, "--dry-run")
    assert (shown.returncode, shown.stdout.count("#!/bin/bash")) == (0, 1), shown.stderr
    assert not site.run("a-seed-0").exists()
    done = site.fever(*words, "--json")
    assert done.returncode == 0, done.stderr
    jobs = json.loads(done.stdout)["jobs"]
    assert [job["run"] for job in jobs] == [str(site.run(f"a-seed-{seed}")) for seed in (0, 1)]
    again = site.fever(*words)
    assert (again.returncode, again.stderr.count("\n")) == (2, 1)
    assert f"{site.run('a-seed-0').name} exists already" in again.stderr
    for seed, job in enumerate(jobs):
        site.wait_for_end(job["job"].removeprefix("slurm-"))
        assert (summary(site.run(f"a-seed-{seed}"))["stop_reason"], seed) == ("steps", seed)
        site.assert_nothing_left(f"a-seed-{seed}")
    drawn = site.fever("plot", "a-seed-1", "--by", "nodes", "--out", "a.svg")
    assert (drawn.returncode, drawn.stdout) == (0, "a.svg\n"), drawn.stderr
    assert "nodes 1 (2 runs)" in (site.folder / "a.svg").read_text()
