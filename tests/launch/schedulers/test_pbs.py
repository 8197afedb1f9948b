"""PBS: what is asked for, and contradictions that are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fever.errors import FeverError
from fever.launch.schedulers.pbs import Pbs, count_machines
from fever.launch.targets import load_target, restore_target


def asked(**settings: Any) -> list[str]:
    """The words after -l in the script."""
    target = restore_target({"kind": "pbs", **settings})
    assert isinstance(target, Pbs)
    return [line[8:] for line in target.directives("one", Path("/job")) if line.startswith("#PBS -l ")]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"nodes": 2}, ["select=2", "place=scatter:excl"]),
        ({"nodes": 2, "cpus_per_node": 4}, ["select=2:ncpus=4", "place=scatter"]),
        ({"nodes": 3, "select": "{nodes}:system=crux"}, ["select=3:system=crux", "place=scatter"]),
        ({"nodes": 3, "select": "select={nodes}:ncpus=8"}, ["select=3:ncpus=8", "place=scatter"]),
        ({"nodes": 3, "select": "1:ngpus=4+2:ncpus=8"}, ["select=1:ngpus=4+2:ncpus=8", "place=scatter"]),
        ({"nodes": 2, "select": "2:ncpus=8,place=scatter:excl"}, ["select=2:ncpus=8,place=scatter:excl"]),
        ({"nodes": 2, "place": "scatter:group=tier0"}, ["select=2", "place=scatter:group=tier0"]),
        ({"nodes": 2, "place": None}, ["select=2"]),
        ({"nodes": 2, "place": "pack", "select": "4:ncpus=8"}, ["select=4:ncpus=8", "place=pack"]),
        ({"nodes": 2, "select": "nodes={nodes}:ppn=8"}, ["nodes=2:ppn=8"]),  # Torque
        ({"nodes": 2, "select": "procs=24"}, ["procs=24"]),
        ({"filesystems": "home:eagle"}, ["select=1", "place=scatter:excl", "filesystems=home:eagle"]),
    ],
)
def test_resources(settings: dict[str, Any], words: list[str]) -> None:
    assert asked(**settings) == words


def test_without_nodes_select_says_how_many() -> None:
    target = restore_target({"kind": "pbs", "select": "1:ngpus=4+3:ncpus=8"})
    assert isinstance(target, Pbs)
    assert target.nodes == 4
    assert "-n 4" in target.launcher_command()


def test_nodes_and_select_that_contradict_each_other_are_refused(tmp_path: Path) -> None:
    site = tmp_path / "site.yaml"
    site.write_text("kind: pbs\nselect: 4:system=polaris\n")
    with pytest.raises(FeverError, match=r"asks for 4 machines, but nodes is 3; write \{nodes\} for that number"):
        load_target(str(site), {"nodes": 3})
    for select in ("{nodes}:ngpus=4+1:ncpus=8", "select=2", "nodes=2:ppn=8"):
        with pytest.raises(FeverError, match="but nodes is 3"):
            restore_target({"kind": "pbs", "nodes": 3, "select": select})


def test_counting_machines() -> None:
    assert count_machines("2:ncpus=4+ncpus=8", "scatter") == 3
    for select in (None, "", "ncpus=4", "{nodes}:a=b", "procs=24"):
        assert count_machines(select, "scatter") is None
    assert count_machines("2", "pack") is None
