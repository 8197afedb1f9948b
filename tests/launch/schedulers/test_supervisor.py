"""The last line of a job's script: what it hands to the ranks of one attempt."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from fever.config import RunConfig
from fever.job import STOP, JobFolder
from fever.launch import jobs
from fever.launch.rendezvous.mpi import Mpi
from tests.helpers import ROOT


@pytest.mark.parametrize(("reason", "kept"), [("cancelled", True), ("limit", False), ("terminated", False)])
def test_ranks_are_told_to_stop_by_the_user_only(tmp_path: Path, reason: str, kept: bool) -> None:
    """A user may stop a job before it begins; what ended an earlier attempt does not end this one."""
    jobs.prepare(RunConfig(env="CartPole-v1"), Mpi(), tmp_path / "run", [])
    folder = JobFolder.of(tmp_path / "run")
    folder.write_text(STOP, reason)
    look = f"test -e {folder.path / STOP} && touch {tmp_path / 'seen'}; exit 3"
    # The launcher of this attempt; the command of the ranks is appended to it, as arguments that it does not use.
    words = ["-m", "fever.launch.schedulers.supervisor", str(folder.path), "sh", "-c", look]
    assert subprocess.run([sys.executable, *words], cwd=ROOT).returncode == 3
    assert (tmp_path / "seen").exists() == kept
