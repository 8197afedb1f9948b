"""Python environments on a host: who uses them, what stays, and what is removed; in a home folder of the test's."""

from __future__ import annotations

import os
import socket
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from fever import system
from fever.launch.on_host import environments
from fever.launch.on_host.environments import Use, list_environments, purge, remains

DAY = 86400.0


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


def make(name: str, days: float = 0.0) -> Path:
    """An environment that was last used so many days ago."""
    folder = environments.environments() / f"{name}-3.11-x86_64"
    (folder / "bin").mkdir(parents=True)
    (folder / "bin" / "python").write_bytes(bytes(1000))
    (folder / ".ready").touch()
    os.utime(folder / ".ready", (time.time() - days * DAY,) * 2)
    return folder


def remove(*names: str, **more: Any) -> dict[str, Any]:
    return purge({"environments": names, "days": 30, "jobs": [], "name": "lab", "runs": "~/runs", **more})


def test_what_is_named_or_long_unused_is_removed() -> None:
    mine, other, old = make("aa"), make("bb", 29), make("cc", 45)
    assert [(row["name"], round(row["days"]), row["bytes"]) for row in list_environments()] == [
        (mine.name, 0, 1000), (other.name, 29, 1000), (old.name, 45, 1000),
    ]  # fmt: skip
    assert [row["what"] for row in remove("aa")["removed"]] == [f"environment {mine.name}", f"environment {old.name}"]
    assert [path.name for path in environments.environments().iterdir()] == [other.name]  # no locks either


def test_an_environment_in_use_stays() -> None:
    """By a node on this host, as its process shows; or on another one, which has touched its file lately."""
    mine, shared, gone = make("aa", 45), make("bb", 45), make("cc", 45)
    use = Use(str(mine / "bin" / "python"))
    for folder, minutes in ((shared, 1), (gone, 20)):
        (folder / ".users").mkdir()
        (folder / ".users" / "other-host-17-123").touch()
        os.utime(folder / ".users" / "other-host-17-123", (time.time() - minutes * 60,) * 2)
    (gone / ".users" / f"{socket.gethostname()}-{os.getpid()}-1").touch()  # another process had this pid
    found = remove("aa", "bb", "cc")
    assert found["kept"] == [
        f"environment {mine.name}, used by {socket.gethostname()}",
        f"environment {shared.name}, used by other-host",
    ]
    assert not gone.exists()
    use.end()
    (row,) = [row for row in list_environments() if row["name"] == mine.name]
    assert (row["users"], round(row["days"])) == ([], 0)
    assert "aa-3.11-x86_64" in str(remove("aa"))
    assert not mine.exists()
    Use("/usr/bin/python3").end()
    assert not Path("/usr/.users").exists()


def test_a_node_that_runs_for_long_is_seen_to_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environments, "TOUCH_SECONDS", 0.0)
    folder = make("aa")
    use = Use(str(folder / "bin" / "python"))
    (file,) = (folder / ".users").iterdir()
    assert file.name == f"{socket.gethostname()}-{os.getpid()}-{system.began(os.getpid())}"
    os.utime(file, (0, 0))
    use.touch()
    assert time.time() - file.stat().st_mtime < 60


def test_whoever_waits_for_a_lock_that_is_removed_takes_the_new_one() -> None:
    folder, order = make("aa"), []

    def set_up() -> None:
        with environments._locked(folder):
            order.append(Path(f"{folder}.lock").exists())

    with environments._locked(folder):
        waiting = threading.Thread(target=set_up)
        waiting.start()
        time.sleep(0.2)
        assert order == []
        Path(f"{folder}.lock").unlink()
    waiting.join(30)
    assert order == [True]


def test_copies_of_this_clusters_runs_and_nothing_else(home: Path) -> None:
    runs = home / "runs"
    for name in ("lab-1-0a1b", "lab-2-0a1b", "lab-x", "lab2-1-0a1b", "notes"):
        (runs / name / "run").mkdir(parents=True)
        (runs / name / "run" / "metrics.jsonl").write_bytes(bytes(500))
    (runs / "lab-3-0a1b").symlink_to(home)
    shown = remains({"name": "lab", "runs": str(runs)})
    assert (shown["runs"], shown["environments"]) == ({"count": 2, "bytes": 1000}, [])
    found = remove(jobs=["lab-1-0a1b", "lab-3-0a1b", "notes", "..", ""])
    assert found == {"removed": [{"what": str(runs / "lab-1-0a1b"), "bytes": 500}], "kept": []}
    assert sorted(path.name for path in runs.iterdir()) == ["lab-2-0a1b", "lab-3-0a1b", "lab-x", "lab2-1-0a1b", "notes"]
