"""Links, pipes and devices in a run directory: none is written through, and none makes a command wait for ever."""

from __future__ import annotations

import os
import queue
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from fever import files
from fever.config import RunConfig
from fever.errors import DamagedError, FeverError
from fever.files import last_line, open_unbuffered, read_json, read_lines, read_sealed, sha256
from fever.runs.lock import is_locked
from fever.runs.rows import Follower, sample, sample_archive, stored_rows
from fever.runs.run import Run
from fever.training.loggers.base import Logger
from tests.helpers import run_fever

LINKS = (
    "videos/00000003.mp4 job/log.txt job/nodes job/nodes/a.log job/ranks job/ranks/0.json job/connected trials/0001 "
    "tune/tuner.pkl tune/1 tune/1/checkpoint_000001 work/worker-0-env-0 work/evaluation work/evaluation/worker-1-env-0"
)
PIPES = "lock metrics.jsonl summary.json episodes-old.jsonl.gz job/log.txt videos/00000003.mp4"
READERS: dict[str, Callable[[Path], Any]] = {
    "last_line": last_line,
    "read_lines": lambda path: [*read_lines(path)],
    "sample": lambda path: sample(path, 10),
    "stored_rows": lambda path: [*stored_rows(path)],
    "stored_rows.gz": lambda path: [*stored_rows(path)],
    "sample_archive.gz": lambda path: sample_archive(path, 10),
    "follower": lambda path: Follower(path, "iteration").rows(),
    "read_json": read_json,
    "read_sealed": read_sealed,
}


@pytest.fixture(autouse=True)
def impatient() -> Iterator[None]:
    """What waits for ever fails."""

    def fail(*_: Any) -> None:
        raise TimeoutError("it waits")

    before = signal.signal(signal.SIGALRM, fail)
    signal.setitimer(signal.ITIMER_REAL, 60)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return make(tmp_path, "a")


def make(runs: Path, name: str) -> Run:
    run = Run.create(RunConfig(env="X-v0", runs=str(runs), name=name), {})
    run.log({"iteration": 1, "steps": 5})
    run.close()
    return run


def special(path: Path, kind: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    os.mkfifo(path) if kind == "pipe" else path.symlink_to("/dev/zero")


# writing


@pytest.mark.parametrize("name", LINKS.split())
def test_links_below_the_top_are_refused(run: Run, name: str, tmp_path: Path) -> None:
    path = run.path / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.symlink_to(tmp_path / "outside")
    for write in (run.lock, lambda: run.to_write("videos")):
        with pytest.raises(FeverError, match=rf"{name} is a symbolic link, which fever does not follow; remove it"):
            write()


def test_links_that_an_environment_makes_are_its_own(run: Run) -> None:
    folder = run.path / "work" / "worker-0-env-0"
    folder.mkdir(parents=True)
    (folder / "latest.log").symlink_to("1.log")
    os.mkfifo(folder / "commands")
    run.lock()
    run.close()


@pytest.mark.parametrize("name", PIPES.split())
def test_a_pipe_is_not_written(run: Run, name: str) -> None:
    special(run.path / name, "pipe")
    with pytest.raises(FeverError, match=f"{name} is neither a file nor a folder; remove it first"):
        run.lock()


def test_nothing_is_appended_to_a_pipe(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "events")
    with pytest.raises(OSError, match="Not a regular file"):
        open_unbuffered(tmp_path / "events", lines=False)


def test_a_tracker_gets_no_file_through_a_link(run: Run, tmp_path: Path) -> None:
    (tmp_path / "secret").touch()
    (run.path / "videos").mkdir()
    (run.path / "videos" / "1.mp4").touch()
    (run.path / "videos" / "2.mp4").symlink_to(tmp_path / "secret")
    logger, sent = Logger(), queue.SimpleQueue[Any]()
    logger.rows, logger.ending, logger.begun = sent, threading.Event(), False
    logger.thread = threading.Thread(target=lambda: None)
    logger.thread.start()
    info: Any = SimpleNamespace(run=run, summary={})
    logger.on_stop(info)
    assert [path.name for path in sent.get().videos] == ["1.mp4"]


# reading


@pytest.mark.parametrize("kind", ["pipe", "device"])
@pytest.mark.parametrize("reader", READERS)
def test_pipes_and_devices_are_not_read(reader: str, kind: str, tmp_path: Path) -> None:
    path = tmp_path / f"file{'.gz' if reader.endswith('.gz') else ''}"
    special(path, kind)
    with pytest.raises(FeverError, match=r"is missing or damaged|cannot be read"):
        READERS[reader](path)


def test_a_pipe_in_a_checkpoint_is_damage(run: Run) -> None:
    folder = run.save_checkpoint({"x": np.zeros(1)}, {"iteration": 1, "score": None}, 1)
    special(folder / "arrays.safetensors", "pipe")
    with pytest.raises(OSError, match="Not a regular file"):
        sha256(folder / "arrays.safetensors")
    with pytest.raises(DamagedError, match=r"arrays\.safetensors"):
        run.checkpoint()


def test_a_json_file_that_is_too_large_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "facts.json"
    path.write_text('{"a": 1}')
    assert read_json(path) == {"a": 1}
    monkeypatch.setattr(files, "JSON_BYTES", 7)
    for read in (read_json, read_sealed):
        with pytest.raises(FeverError):
            read(path)


@pytest.mark.parametrize("kind", ["pipe", "device"])
def test_a_lock_that_is_no_file_is_not_held(run: Run, kind: str) -> None:
    special(run.path / "lock", kind)
    assert not is_locked(run.path)
    assert not is_locked(run.path), "the directory is not left locked"


def test_a_run_with_special_files_is_one_line(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    make(runs, "good")
    names = [f"{kind}-{name}" for kind in ("pipe", "device") for name in ("lock", "metrics.jsonl", "summary.json")]
    for name in names:
        kind, _, file = name.partition("-")
        special(make(runs, name).path / file, kind)
    shown = run_fever("runs", cwd=tmp_path, timeout=50)
    assert (shown.returncode, shown.stderr) == (0, "")
    lines = {line.split()[0]: line for line in shown.stdout.splitlines()}
    assert lines.keys() == {"run", "good", *names}
    for name in names:
        assert ("damaged: " in lines[name]) is not name.endswith("lock")
