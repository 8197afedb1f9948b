"""What goes with a job."""

from __future__ import annotations

import io
import os
import zipfile
from pathlib import Path
from typing import Any

import pytest

from fever.algos.registry import without_prefix
from fever.config import RunConfig
from fever.errors import FeverError
from fever.launch.clusters import package as packing
from fever.launch.clusters.host_packages import describe_environment
from fever.launch.clusters.package import pack, project_files


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's project, in which fever is started."""
    for name in ("my_envs/__init__.py", "my_envs/map.txt", "data/big.npy", "data/keep.npy", "notes/x.log", "a.pyc"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x")
    (tmp_path / ".gitignore").write_text("data/*\n!data/keep.npy\n*.log\n")
    (tmp_path / "notes/.gitignore").write_text("!x.log\n")
    for name in (".git", "__pycache__", "runs"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "inside").write_text("x")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


WANTED = [".gitignore", "data/keep.npy", "my_envs/__init__.py", "my_envs/map.txt", "notes/.gitignore", "notes/x.log"]


def names(content: bytes) -> list[str]:
    return zipfile.ZipFile(io.BytesIO(content)).namelist()


def test_gitignore_is_honoured(project: Path) -> None:
    assert list(project_files(project, skip=project / "runs")) == WANTED


def test_runs_that_were_fetched_are_left_out_wherever_they_are(project: Path) -> None:
    whole = ("config.yaml", "facts.json", "metrics.jsonl", "checkpoints/00000001/arrays.safetensors")
    for name in (*(f"results/deep/first/{name}" for name in whole), "results/killed/job/job.json"):
        (project / name).parent.mkdir(parents=True, exist_ok=True)
        (project / name).write_text("x")
    (project / "results/killed/job/run.yaml").write_text("x")
    mine = ["conf/config.yaml", "results/table.csv"]  # a project's own configuration is no run
    for name in mine:
        (project / name).parent.mkdir(parents=True, exist_ok=True)
        (project / name).write_text("x")
    assert sorted(project_files(project, skip=project / "runs")) == sorted([*WANTED, *mine])


def test_rules_of_folders_above_count_up_to_the_repository(project: Path) -> None:
    below = project / "sub"
    below.mkdir()
    (below / "a.log").write_text("x")
    (below / "a.py").write_text("x")
    assert list(project_files(below)) == ["a.py"]


def test_the_project_goes_with_the_job_and_fever_too(project: Path) -> None:
    package = pack("my_envs:Warehouse", skip=project / "runs")
    found = names(package.content)
    assert [name for name in found if not name.startswith("fever/")] == WANTED
    assert {"fever/cli/main.py", "fever/launch/on_host/agent.py", "fever/constraints.txt"} <= set(found)
    assert f"{project}, 6 files" in package.what
    assert pack("my_envs:Warehouse", skip=project / "runs").uri == package.uri
    (project / "my_envs/map.txt").write_text("y")
    assert pack("my_envs:Warehouse", skip=project / "runs").uri != package.uri


def test_a_package_from_elsewhere_goes_alone(project: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    here = tmp_path_factory.mktemp("elsewhere")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(here)
        found = names(pack("my_envs:Warehouse").content)
    assert [name for name in found if not name.startswith("fever/")] == ["my_envs/__init__.py", "my_envs/map.txt"]


@pytest.mark.parametrize("env", ["CartPole-v1", "ALE/Pong-v5", "gymnasium:CartPole-v1", "nowhere:Env"])
def test_what_is_installed_stays(project: Path, env: str) -> None:
    assert all(name.startswith("fever/") for name in names(pack(env).content))


def test_too_much_is_refused_with_what_was_largest(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "MOST", 10_000)
    (project / "video.mp4").write_bytes(bytes(20_000))
    with pytest.raises(FeverError, match=r"the largest are video.mp4 \(20 kB\), .*\.gitignore"):
        pack("my_envs:Warehouse", skip=project / "runs")


def test_a_folder_that_cannot_be_read_is_one_sentence(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def scan(folder: Path) -> Any:
        if Path(folder).name == "data":
            raise PermissionError(13, "Permission denied", str(folder))
        return original(folder)

    original = os.scandir
    monkeypatch.setattr(packing.os, "scandir", scan)
    with pytest.raises(FeverError, match=r"/data cannot be sent: Permission denied$"):
        pack("my_envs:Warehouse", skip=project / "runs")


def test_environments_are_named_by_their_content() -> None:
    first = describe_environment()
    assert not any("torch" in line for line in describe_environment(extras=("atari",)).requirements)
    assert any("torch" in line for line in describe_environment(extras=("rllib",)).requirements)
    with pytest.raises(FeverError, match="rlib is unknown; the extras are: render"):
        describe_environment(extras=("rlib",))
    assert first.name == describe_environment().name != describe_environment(("sionna==1.0",)).name
    assert "ray[default]" in first.requirements
    assert any(requirement.startswith("ale-py") for requirement in first.requirements)  # it is installed here
    assert not any("pytest" in requirement or "moto" in requirement for requirement in first.requirements)
    assert "jax==" in first.constraints


def test_an_algorithm_of_ones_own_goes_too(project: Path) -> None:
    config = RunConfig(env="CartPole-v1", algo="rllib:my_envs:Algo", settings={"callbacks_class": "my_envs:Calls"})
    package = pack(without_prefix(config.algo), *config.names(), skip=project / "runs")
    assert [name for name in names(package.content) if not name.startswith("fever/")] == WANTED
