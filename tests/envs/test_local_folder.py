"""`scratch`: folders on the machine's own disk for environments, removed with them."""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest

from fever.envs.local_folder import LOCAL, LOCAL_FOLDERS, PREFIX, LocalFolders
from fever.envs.make import make_envs
from fever.envs.source import EnvContext, EnvSource, make_env
from fever.sampling.ray_start import PRIVATE
from tests.sampling.helpers import make_workers


class ScratchEnv(gym.Env):
    """Writes into its folder, and prints where that is."""

    observation_space = gym.spaces.Box(-1, 1, (2,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def __init__(self, scratch: Any) -> None:
        self.scratch = Path(scratch)
        assert not any(self.scratch.iterdir())
        (self.scratch / "large").write_text("x")
        print(f"scratch {self.scratch}", flush=True)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed)
        return self.np_random.random(2).astype(np.float32), {}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        return np.zeros(2, np.float32), 1.0, False, False, {}


SOURCE = EnvSource(f"{__name__}:ScratchEnv")


def test_every_environment_has_its_own_and_a_new_one_begins_empty(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(LOCAL, str(tmp_path))
    envs = make_envs(SOURCE, 2, EnvContext(worker_index=3))
    first, second = (env.unwrapped.scratch for env in envs.envs)
    again = make_env(SOURCE, EnvContext(worker_index=3), 1)
    assert not second.exists()  # its environment was made anew
    assert {path.name.rpartition("-")[0] for path in (first, again.scratch)} == {"worker-3-env-0", "worker-3-env-1"}
    assert first.is_dir()
    LOCAL_FOLDERS.remove()
    assert not any(tmp_path.iterdir())
    envs.close()


def test_an_argument_of_that_name_is_the_users(tmp_path: Path) -> None:
    env: Any = make_env(EnvSource(SOURCE.target, {"scratch": str(tmp_path)}), EnvContext())
    assert env.scratch == tmp_path


def test_that_of_a_killed_process_is_removed_by_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.delenv(LOCAL, raising=False)
    code = "from fever.envs.local_folder import *; print(LOCAL_FOLDERS.make(0, 'a'), flush=True); input()"
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={"TMPDIR": str(tmp_path)},
    )
    assert process.stdout is not None
    folder = Path(process.stdout.readline().strip())
    assert folder.is_dir()
    process.send_signal(signal.SIGKILL)
    process.communicate()
    folders = LocalFolders()
    own = folders.make(0, "b")
    assert own.is_relative_to(tmp_path)
    assert not folder.parent.exists()
    folders.remove()
    assert not list(tmp_path.glob(f"{PREFIX}*"))


@pytest.mark.ray
def test_those_of_workers_are_in_the_folder_of_their_ray(ray: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    workers, _ = make_workers(SOURCE, 1, envs=2)
    made = [Path(line.split()[1]) for line in caplog.messages if line.startswith("scratch /")]
    assert len(made) == 2
    assert PRIVATE.folder is not None
    assert all(path.is_dir() for path in made)
    assert made[0].parent.parent == PRIVATE.folder.path
    workers.close()
    assert not any(path.exists() for path in made)
