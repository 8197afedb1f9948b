from __future__ import annotations

import gc
import os
import subprocess
from pathlib import Path

import pytest

from fever.envs.local_folder import LOCAL
from fever.sampling import ray_folder
from fever.scratch import Scratch, sweep


def test_what_writes_into_the_folder_ends_with_it() -> None:
    folder = ray_folder.make_folder()
    with open(folder.path / "log", "w") as log, subprocess.Popen(["sleep", "60"], stdout=log) as agent:
        log.close()
        folder.remove()
        assert agent.wait(10) == -9
    assert not folder.path.exists()


def test_a_process_ends_with_the_folder_whatever_its_output_is() -> None:
    """Ray's agents have their output in pipes, and logs of their own. Any child has files that this process has."""
    folder = ray_folder.make_folder()
    with (
        open(folder.path / "driver.log", "w") as driver,
        open(folder.path / "agent.log", "w") as log,
        subprocess.Popen(["sleep", "60"], pass_fds=[driver.fileno()]) as child,
        subprocess.Popen(["sleep", "60"], pass_fds=[log.fileno()]) as agent,
    ):
        log.close()
        folder.remove()
        assert agent.wait(10) == -9
        assert child.poll() is None
        child.kill()
    assert not folder.path.exists()


def test_what_workers_have_started_ends_with_the_folder() -> None:
    """A simulator may outlive its worker, which was killed, and have its output elsewhere."""
    folder = ray_folder.make_folder()
    with (
        subprocess.Popen(["sleep", "60"], env={**os.environ, LOCAL: str(folder.path)}) as simulator,
        subprocess.Popen(["sleep", "60"], env={**os.environ, LOCAL: f"{folder.path}-other"}) as other,
    ):
        folder.remove()
        assert simulator.wait(10) == -9
        assert other.poll() is None
        other.kill()


def test_folders_of_processes_that_were_killed_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fever.scratch.LONGEST_PATH", 200)
    monkeypatch.setattr(ray_folder.tempfile, "gettempdir", lambda: str(tmp_path))
    orphan, foreign = (tmp_path / f"{ray_folder.PREFIX}{name}" for name in ("123456", "notes"))
    mine = Scratch(str(tmp_path), ray_folder.PREFIX)
    for path in (orphan, foreign):
        path.mkdir()
    (orphan / "owner").touch()  # which nobody has locked
    made = ray_folder.make_folder()
    assert (orphan.exists(), mine.path.exists(), foreign.exists()) == (False, True, True)
    assert made.path.stat().st_mode & 0o77 == 0


def test_folder_is_owned_although_nobody_refers_to_it(tmp_path: Path) -> None:
    """The lock of a private Ray must not depend on who keeps the object: without it, another process kills that Ray."""
    path = Scratch(str(tmp_path), "made-").path
    gc.collect()
    sweep(path.parent, "made-")
    assert path.exists()
