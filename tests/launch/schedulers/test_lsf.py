"""LSF: what its commands are told and what they answer; jobs on a stand-in for it are in test_mpi.py."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from fever.config import RunConfig
from fever.errors import FeverError
from fever.job import ENDED, QUEUED, RUNNING
from fever.launch import jobs
from fever.launch.schedulers.lsf import Lsf
from fever.launch.targets import allocated_hosts

CONFIG = RunConfig(env="CartPole-v1")


class Commands:
    """A folder of commands, first on the path, that answer as they are told."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def answer(self, name: str, script: str) -> None:
        (self.folder / name).write_text(f"#!/bin/sh\n{script}\n")
        (self.folder / name).chmod(0o755)


@pytest.fixture
def commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Commands:
    monkeypatch.setenv("FEVER_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    return Commands(tmp_path)


def test_the_script_is_bsubs_input_and_its_answer_has_the_number(commands: Commands, tmp_path: Path) -> None:
    commands.answer("bsub", f"cat > {tmp_path}/got; echo 'Job <17> is submitted to queue <normal>.'")
    job = Lsf(nodes=2).submit(CONFIG, tmp_path / "run", [])
    assert (job.name, job.facts["id"]) == ("lsf-17", "17")
    assert (tmp_path / "got").read_text() == (job.folder.path / "script.sh").read_text()


@pytest.mark.parametrize(
    ("script", "sentence"),
    [
        ("echo 'no such queue' >&2; exit 255", "bsub refused the job: no such queue"),
        ("echo hello", "bsub did not say the job's number: hello"),
    ],
)
def test_a_refused_job_leaves_nothing(commands: Commands, tmp_path: Path, script: str, sentence: str) -> None:
    commands.answer("bsub", script)
    with pytest.raises(FeverError, match=sentence):
        Lsf().submit(CONFIG, tmp_path / "run", [])
    assert not (tmp_path / "run").exists()


def test_states(commands: Commands, tmp_path: Path) -> None:
    commands.answer("bsub", "echo 'Job <17> is submitted to queue <normal>.'")
    job = Lsf().submit(CONFIG, tmp_path / "run", [])
    for script, state in (
        ("echo 'no answer' >&2; exit 255", (RUNNING, "bjobs does not answer")),
        ("echo PEND", (QUEUED, "")),
        ("echo PSUSP", (QUEUED, "suspended")),
        ("echo RUN", (RUNNING, "")),
        ("echo USUSP", (RUNNING, "suspended")),
        ("echo DONE", (ENDED, "was cancelled before it began")),
        ("echo EXIT", (ENDED, "was cancelled before it began")),
        ("echo 'Job <17> is not found' >&2; exit 255", (ENDED, "was cancelled before it began")),
    ):
        commands.answer("bjobs", f'test "$*" = "-noheader -o stat 17" || exit 2\n{script}')
        assert job.state() == state, script


def test_a_queued_job_is_killed(commands: Commands, tmp_path: Path) -> None:
    commands.answer("bsub", "echo 'Job <17> is submitted to queue <normal>.'")
    commands.answer("bjobs", "echo PEND")
    job = Lsf().submit(CONFIG, tmp_path / "run", [])
    with pytest.raises(FeverError, match="bkill cannot be run: No such file or directory"):
        jobs.stop(job)
    commands.answer("bkill", f"echo $* > {tmp_path}/killed")
    assert jobs.stop(job) == "lsf-17 is cancelled"
    assert (tmp_path / "killed").read_text() == "17\n"


def test_hosts_of_an_allocation(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SLURM_JOB_NODELIST", "PBS_NODEFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("LSB_MCPU_HOSTS", "alpha.site.org 1 beta 16")
    assert allocated_hosts() == ["alpha", "beta"]
