"""`--hosts N`: a job on a cluster that is up uses N of its hosts."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fever.errors import FeverError
from fever.launch.clusters.ssh_cluster import Ssh
from fever.launch.targets import load_target
from fever.sampling.ray_cluster import Cluster

ID = {name: name.encode().hex().ljust(56, "0") for name in ("alpha", "beta", "gamma", "delta")}  # as Ray's nodes have


def cluster(elastic: bool = True) -> Any:
    """A cluster of four hosts, connected to from the third; Ray lists them in any order."""
    names = ("delta", "alpha", "gamma", "beta")
    nodes = [{"NodeID": ID[n], "NodeManagerHostname": n, "Resources": {"CPU": 2.0}, "Alive": True} for n in names]
    found = Cluster.__new__(Cluster)
    found.elastic, found.here, found.seen, found.asked = elastic, ID["gamma"], [], -math.inf
    found.ray = SimpleNamespace(nodes=lambda: nodes)
    found.ask = lambda question: question()  # type: ignore[method-assign]
    return found


def test_the_learners_host_and_the_first_by_name_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(cluster().machines()) == 4
    monkeypatch.setenv("FEVER_HOSTS", "2")
    assert [machine.host for machine in cluster().machines()] == ["gamma", "alpha"]
    assert cluster().cores == 4
    assert {cluster().spread(index).node_id for index in range(4)} == {
        ID["gamma"],
        ID["alpha"],
    }  # shards of a replay buffer
    assert len(cluster(elastic=False).machines()) == 4  # of an allocation, all


def test_the_option_is_a_number_and_the_files_hosts_are_names(tmp_path: Path) -> None:
    file = tmp_path / "lab.yaml"
    file.write_text("kind: ssh\nhosts: [alpha, beta]\n")
    target = load_target(str(file), {"hosts": 1})
    assert isinstance(target, Ssh)
    assert (target.max_hosts, target.hosts) == (1, ("alpha", "beta"))
    assert load_target(str(file), {}).max_hosts is None  # type: ignore[attr-defined]
    with pytest.raises(FeverError, match="--hosts does not go with --on slurm"):
        load_target("slurm", {"hosts": 1})
    with pytest.raises(FeverError, match=r"^--hosts 0: must be greater than 0$"):
        load_target(str(file), {"hosts": 0})
