"""`fever scale` over three machines: nodes of the real Slurm, hosts that ssh reaches."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers import WAREHOUSE
from tests.lab.machines import Lab, require_lab
from tests.lab.site import Site
from tests.launch.clusters.test_ssh import Laptop, nothing_left

pytestmark = [
    pytest.mark.lab,
    pytest.mark.slow,
    pytest.mark.flaky_under_load("several Ray nodes on two cores: a starved node is taken for a lost one"),
]
BATCH = ("steps=64", "minibatch=64")  # divides the batch of six workers, as the default does not
MEASURED = ("--rounds", "2", "--seconds", "6", "--predict", "4", "--json")


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    require_lab("slurmctld", "slurmd", "munged", "sbatch")
    with Lab(tmp_path / "lab") as lab:
        lab.start_slurm()
        yield Site(lab, tmp_path)


@pytest.fixture
def laptop(tmp_path: Path) -> Iterator[Laptop]:
    require_lab("sshd", "ssh", "ssh-keygen", "curl")
    with Lab(tmp_path / "lab", private=("/tmp/ray", "/opt/own")) as lab:
        lab.give_homes("/opt/own/home")
        lab.start_ssh()
        laptop = Laptop(lab, tmp_path / "laptop")
        laptop.up()
        yield laptop
        laptop.down()
        nothing_left(lab)


def assert_scales(report: dict, runs: Path) -> None:
    """An environment that waits: with three machines of two cores each, three times as fast as with one."""
    assert [(one["count"], one["workers"]) for one in report["counts"]] == [(1, 2), (2, 4), (3, 6)]
    assert report["answer"].startswith("yes: 3 ")
    assert report["counts"][2]["speedup"] == pytest.approx(3, rel=0.25)
    for one in report["counts"]:
        for run in one["runs"]:
            summary = json.loads((runs / run["run"] / "summary.json").read_text())
            assert len(summary["hosts"]) == one["count"]
    (predicted,) = report["predicted"]
    assert (predicted["count"], predicted["workers"]) == (4, 8)
    assert predicted["speedup"] == pytest.approx(4, rel=0.25)


def test_nodes_of_a_scheduler(site: Site) -> None:
    env = ("tests.environments.timing:SleepEnv", "--env-kwargs", '{"milliseconds": 5}')
    words = ("--envs", "1", "--scale-batch", *BATCH, "--nodes", "1,2,3", "--on", "slurm", "--name", "nodes", *MEASURED)
    done = site.fever("scale", *env, *words, timeout=1200)
    assert done.returncode == 0, done.stderr
    assert_scales(json.loads(done.stdout.splitlines()[-1]), site.run("nodes"))


def test_hosts_of_a_cluster(laptop: Laptop) -> None:
    module = laptop.folder / "my_envs" / "__init__.py"
    module.write_text((WAREHOUSE % ((),)).replace("0.002", "0.01"))  # what machines add to a step is small beside 10 ms
    words = (
        "--envs",
        "1",
        "--scale-batch",
        *BATCH,
        "--hosts",
        "1,2,3",
        "--on",
        "lab.yaml",
        "--name",
        "hosts",
        *MEASURED,
    )
    done = laptop.fever("scale", "my_envs:Warehouse", *words, timeout=1200)
    assert done.returncode == 0, done.stderr
    assert_scales(json.loads(done.stdout.splitlines()[-1]), laptop.run("hosts"))
