"""What a private Ray inherits from the shell, where it listens, and what it says if it cannot start."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fever.errors import TrainingError
from fever.sampling.ray_cluster import connect
from fever.sampling.ray_settings import mpi_settings
from tests.helpers import ROOT

pytestmark = pytest.mark.ray

PROGRAM = """
import json, os, time
from pathlib import Path
from fever.sampling.ray_cluster import connect
from fever.sampling.ray_settings import mpi_settings

cluster = connect(1)
here = cluster.ray.remote(lambda: os.environ["RAY_AUTH_MODE"])
modes = [os.environ["RAY_AUTH_MODE"], cluster.ray.get(here.remote(), timeout=100)]
time.sleep(3)  # until Ray's agents listen, too
token, sockets, commands = os.environ["RAY_AUTH_TOKEN"].encode(), {}, []
for folder in Path("/proc").glob("[0-9]*"):
    try:
        if int(folder.name) == os.getpid() or token in (folder / "environ").read_bytes():
            commands.append((folder / "cmdline").read_bytes().decode())
            names = [os.readlink(link) for link in (folder / "fd").iterdir()]
            sockets |= {name[8:-1]: (folder / "comm").read_text() for name in names if name.startswith("socket:")}
    except OSError:
        pass
rows = [line.split() for file in ("tcp", "tcp6") for line in Path("/proc/net", file).read_text().splitlines()[1:]]
listening = {(row[1].split(":")[0], sockets[row[9]]) for row in rows if row[3] == "0A" and row[9] in sockets}
from ray._private.state import state

tasks = len(state._get_all_task_events())  # that the GCS remembers
found = {"modes": modes, "token": token.decode(), "listening": sorted(listening)}
print(json.dumps({**found, "tasks": tasks, "commands": commands}))
cluster.leave()
"""
LOOPBACK = {"0100007F", "0000000000000000FFFF00000100007F", "00000000000000000000000001000000"}


def listening(program: str, folder: Path, shell: dict[str, str]) -> Any:
    """What a program that starts a private Ray prints about it."""
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=folder, env={**os.environ, "PYTHONPATH": str(ROOT), **shell},
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert len(found["listening"]) >= 3  # GCS, raylet, this process
    assert {address for address, _ in found["listening"]} <= LOOPBACK, found["listening"]
    return found


def test_a_private_ray_has_its_own_token_and_listens_on_loopback_only(tmp_path: Path) -> None:
    shell = {"RAY_AUTH_MODE": "disabled", "RAY_AUTH_TOKEN": "known", "RAY_ADDRESS": "192.0.2.1:6379"}
    found = listening(PROGRAM, tmp_path, {**shell, "RAY_AUTH_TOKEN_PATH": "/nowhere"})
    assert found["modes"] == ["token", "token"]
    assert len(found["token"]) == 64
    assert found["tasks"] == 0  # kilobytes of each, in a run that makes millions
    assert any("/raylet/raylet" in command for command in found["commands"])
    unused = ("_private/monitor.py", "dashboard/dashboard.py")  # a start would wait for them
    assert not [command for command in found["commands"] if any(name in command for name in unused)]


def test_a_private_ray_listens_on_loopback_only_if_ray_was_imported_before(tmp_path: Path) -> None:
    shell = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "0123456789abcdef" * 4}
    assert listening(f"import ray\n{PROGRAM}", tmp_path, shell)["token"] == shell["RAY_AUTH_TOKEN"]


def test_a_ray_that_does_not_start_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    import ray

    folders: list[Path] = []

    def fail(_temp_dir: str, **options: object) -> None:
        folders.append(Path(_temp_dir).parent)
        assert folders[-1].is_dir()
        raise RuntimeError("\nThe GCS did not answer in time.\nmore")

    monkeypatch.setattr(ray, "init", fail)
    with pytest.raises(TrainingError, match=r"^Ray did not start: The GCS did not answer in time\.; is the machine"):
        connect(1)
    assert len(set(folders)) == 2
    assert not any(folder.exists() for folder in folders)


def test_settings_of_mpi_leave_what_somebody_has_chosen() -> None:
    chosen = mpi_settings({"HYDRA_LAUNCHER": "ssh"})
    assert "HYDRA_LAUNCHER" not in chosen
    assert chosen["OMPI_MCA_hwloc_base_binding_policy"] == "none"
