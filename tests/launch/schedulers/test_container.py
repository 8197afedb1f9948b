"""Ranks in containers: Python of the image, folders that both sides see; scripts are in tests/launch/golden."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from fever.config import RunConfig
from fever.errors import FeverError
from fever.launch import jobs
from fever.launch.schedulers.container import Container
from fever.launch.schedulers.slurm import Slurm
from tests.helpers import ROOT


def test_ranks_are_started_with_the_images_python(tmp_path: Path) -> None:
    run, said = tmp_path / "runs" / "one", tmp_path / "said"
    target = Slurm(container=Container(image="fever.sif", python="/opt/python"))
    jobs.prepare(RunConfig(env="CartPole-v1"), target, run, [])
    launcher = [sys.executable, "-c", f"import json, sys; json.dump(sys.argv[1:], open({str(said)!r}, 'w'))", "image"]
    command = [sys.executable, "-m", "fever.launch.schedulers.supervisor", str(run / "job"), *launcher]
    subprocess.run(command, cwd=ROOT, timeout=60, capture_output=True)
    rank = ["/opt/python", "-m", "fever.launch.rendezvous.rank", str(run / "job")]
    assert json.loads(said.read_text()) == ["image", *rank]


def test_a_folder_that_cannot_be_mounted_is_refused() -> None:
    for runtime in ("apptainer", "podman-hpc"):
        with pytest.raises(FeverError, match="cannot be mounted into a container"):
            Container(image="fever.sif", runtime=runtime).command(Path("/home"), Path("/home/a:b"))


def test_recipes_name_what_is_there() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for name in ("Dockerfile", "fever.def"):
        recipe = (ROOT / "examples" / "containers" / name).read_text()
        assert "--constraint /opt/fever/fever/constraints.txt" in recipe
        [installed] = {word for word in recipe.split() if word.startswith('"/opt/fever[')}
        assert set(installed.split("[")[1].rstrip(']"').split(",")) <= set(extras)
        for path in ("pyproject.toml", "README.md", "LICENSE", "fever/constraints.txt"):  # what hatchling and pip read
            assert (ROOT / path).is_file()
            assert path.split("/")[0] in recipe
