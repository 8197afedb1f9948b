"""Workers on a real Ray of several machines: where they are put, and where those go whose machine dies."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fever.envs.source import EnvSource
from fever.errors import FeverError
from fever.sampling import launched
from fever.sampling.ray_cluster import connect
from fever.sampling.ray_machines import cores_in_reach
from fever.system import usable_cores
from tests.sampling.helpers import make_workers

pytestmark = pytest.mark.ray


@pytest.fixture
def machines() -> Iterator[Any]:
    """Two machines with 2 cores and one with 1 core; a GPU on the first, as far as Ray knows."""
    import ray
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "num_gpus": 1})
    cluster.add_node(num_cpus=2)
    cluster.add_node(num_cpus=1)
    ray.init(cluster.address, log_to_driver=False)
    yield cluster
    ray.shutdown()
    cluster.shutdown()


def places(workers: Any) -> Counter[str]:
    return Counter(facts["node"] for facts in workers.get([actor.facts.remote() for actor in workers.actors]))


def test_workers_are_spread_by_cores_and_move_when_a_machine_dies(machines: Any) -> None:
    assert sorted(machine.cores for machine in connect(0).machines()) == [1, 2, 2]
    workers, algorithm = make_workers(EnvSource("CartPole-v1"), 10)
    try:
        cores = {machine.node: machine.cores for machine in workers.cluster.machines()}
        assert places(workers) == {node: 2 * count for node, count in cores.items()}
        dying = machines.list_all_nodes()[1]
        machines.remove_node(dying, allow_graceful=False)
        workers.broadcast(algorithm.weights())
        for _ in range(3):
            assert len(workers.collect(10)) == 10
        assert workers.restarts >= 4
        assert dying.node_id not in places(workers)
        assert sum(places(workers).values()) == 10
    finally:
        workers.close()


def test_shares_of_gpus_are_passed_to_ray(machines: Any) -> None:
    workers, _ = make_workers(EnvSource("CartPole-v1"), 2, gpus=0.25)
    try:
        facts = workers.get([actor.facts.remote() for actor in workers.actors])
        assert [fact["resources"]["GPU"] for fact in facts] == [0.25, 0.25]
    finally:
        workers.close()
    with pytest.raises(FeverError, match="want 2 GPUs together, but there are 1"):
        make_workers(EnvSource("CartPole-v1"), 2, gpus=1.0)


def test_cores_are_those_that_affinity_and_control_groups_allow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda process: set(range(8)))
    assert usable_cores(tmp_path) == 8
    groups = tmp_path / "sys/fs/cgroup"
    files = {
        "a/b/cpu.max": "max 100000", "a/cpu.max": "450000 100000", "other/cpu.max": "100000 100000",
        "cpu/c/cpu.cfs_quota_us": "-1", "cpu/c/cpu.cfs_period_us": "100000",
    }  # fmt: skip
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("4:cpu,cpuacct:/c\n3:memory:/other\n0::/a/b\n")
    for name, text in files.items():
        (groups / name).parent.mkdir(parents=True, exist_ok=True)
        (groups / name).write_text(f"{text}\n")
    assert usable_cores(tmp_path) == 5
    (groups / "cpu/c/cpu.cfs_quota_us").write_text("20000\n")
    assert usable_cores(tmp_path) == 1


def test_cores_in_reach_are_usable_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fever.sampling.ray_machines.usable_cores", lambda: 3)
    assert cores_in_reach() == 3


@pytest.mark.parametrize("joins", [True, False])
def test_a_run_begins_when_the_launched_machines_are_there(
    joins: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Or after a while without those that did not come."""

    class Launching:
        looks = 0

        def machines(self) -> list[str]:
            self.looks += 1
            return ["head", *["worker"] * min(self.looks // 2, 2 if joins else 1)]

    monkeypatch.setattr(launched, "LOOK_SECONDS", 0.01)
    monkeypatch.setattr(launched, "LAUNCH_SECONDS", 60.0 if joins else 0.3)
    cluster: Any = Launching()
    launched.await_launched(cluster, 2)
    first, last = capsys.readouterr().err.splitlines()
    assert first.startswith("2 of 2 machines are being launched; the run begins when they are there")
    assert last.startswith("all 2 machines are there after" if joins else "only 1 of 2 machines are there; workers are")
    launched.await_launched(cluster, 1)
    assert capsys.readouterr().err == ""  # nothing to wait for
