"""A disk that is full for a while: the run goes on, and nothing is lost."""

from __future__ import annotations

import errno
import logging
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fever.config import RunConfig
from fever.errors import FeverError, TrainingError
from fever.replay.saved import load_shards, save_shards
from fever.runs.disk import Appender, Disk
from fever.runs.run import Run
from fever.training.callbacks import Callback, TrainingInfo
from fever.training.display import Display
from fever.training.resume import resume
from fever.training.trainer import train
from tests.helpers import run_fever

SMALL = {"steps": 16, "minibatch": 32, "epochs": 1, "hidden": [4]}
FULL = "the disk of {} is full: nothing is saved until there is room"


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MB."""
    path = tmp_path / "disk"
    path.mkdir()
    try:
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "none", path], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("file systems cannot be mounted here")
    try:
        yield path
    finally:
        subprocess.run(["umount", "-l", path], check=True)


def fill(disk: Path, leave: int = 0) -> None:
    """Take all the room except for a few bytes."""
    with open(disk / "filler", "wb", buffering=0) as file:
        with suppress(OSError):
            while file.write(bytes(4096)):
                pass
        file.truncate(max(0, file.tell() - leave))


class Messages(Display):
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def message(self, text: str) -> None:
        self.said.append(text)


class Acting(Callback):
    """Does something in given iterations; counts the checkpoints."""

    def __init__(self, **acts: Callable[[], Any]) -> None:
        self.acts, self.saved = acts, []  # type: ignore[var-annotated]

    def on_iteration(self, info: TrainingInfo) -> None:
        self.acts.get(f"at_{info.iteration}", lambda: None)()

    def on_checkpoint(self, info: TrainingInfo, path: Path) -> None:
        self.saved.append(info.iteration)


def config(disk: Path, iterations: int) -> RunConfig:
    """A checkpoint after every iteration."""
    where: dict[str, Any] = {"runs": str(disk), "name": "a", "checkpoint_seconds": 1e-6}
    return RunConfig(env="CartPole-v1", envs=2, stop={"iterations": iterations}, settings=SMALL, **where)


def test_a_run_goes_on_while_its_disk_is_full(small_disk: Path, monkeypatch: Any, capfd: Any) -> None:
    monkeypatch.setattr("fever.runs.disk.RETRY_SECONDS", 0.0)
    path, display = small_disk / "a", Messages()

    def empty() -> None:
        assert [one.iteration for one in Run(path).checkpoints()] == [8, 9, 10]
        assert not list(path.glob("checkpoints/.*"))  # no partial one is left
        os.unlink(small_disk / "filler")

    acting = Acting(at_11=lambda: fill(small_disk), at_30=empty)
    result = train(config(small_disk, 40), display=display, callbacks=[acting])
    assert acting.saved[-1] == 40
    assert not set(acting.saved) & set(range(12, 30))
    assert display.said == [FULL.format(path), f"the disk of {path} takes files again: everything is saved"]
    run = result.run
    assert [row["iteration"] for row in run.metrics()] == list(range(1, 41))
    assert len(run.episodes()) == result.summary["episodes"]
    assert len((path / "metrics.jsonl").read_text().splitlines()) == 40  # no line is cut
    assert run.checkpoint().iteration == 40
    assert run.status == "iterations"
    log = (path / "log.txt").read_text()
    assert "is full" in log
    assert "Traceback" not in log
    assert capfd.readouterr() == ("", "")


def test_a_disk_that_stays_full_is_said_at_the_end(small_disk: Path, capfd: Any) -> None:
    path, display = small_disk / "a", Messages()
    acting = Acting(at_6=lambda: fill(small_disk))
    with pytest.raises(TrainingError) as raised:
        train(config(small_disk, 20), display=display, callbacks=[acting])
    sentence = str(raised.value)
    assert sentence.startswith(f"the disk of {path} is full; not saved: ")
    for part in ("the last checkpoint", "metrics.jsonl (1"):
        assert part in sentence
    assert display.said == [FULL.format(path)]
    assert capfd.readouterr() == ("", "")
    run = Run(path)
    assert run.checkpoint().iteration == 5
    os.unlink(small_disk / "filler")
    resume(run, config(small_disk, 8))
    assert [row["iteration"] for row in run.metrics()] == list(range(1, 9))


def test_a_directory_that_goes_away_and_comes_back_has_everything(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr("fever.runs.disk.RETRY_SECONDS", 0.0)
    path, away, display = tmp_path / "a", tmp_path / "away", Messages()
    acting = Acting(at_5=lambda: path.rename(away), at_9=lambda: away.rename(path))
    run = train(config(tmp_path, 12), display=display, callbacks=[acting]).run
    said = f"the disk of {path} is gone: nothing is saved until it works again"
    assert display.said == [said, f"the disk of {path} takes files again: everything is saved"]
    assert [row["iteration"] for row in run.metrics()] == list(range(1, 13))
    assert run.checkpoint().iteration == 12


def test_a_directory_that_was_deleted_is_said_and_not_made_again(tmp_path: Path) -> None:
    path, display = tmp_path / "a", Messages()
    with pytest.raises(TrainingError, match=r"the disk of .* is gone; not saved: .*metrics\.jsonl \(\d+ lines\)"):
        train(config(tmp_path, 8), display=display, callbacks=[Acting(at_5=lambda: shutil.rmtree(path))])
    assert len(display.said) == 1
    assert not path.exists()


def test_a_stale_file_is_opened_again_and_its_cut_line_is_ended_once(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr("fever.runs.disk.RETRY_SECONDS", 0.0)
    file = Appender(tmp_path / "rows", Disk(tmp_path))
    file.write(b"first\n")
    assert file.file is not None
    write = file.file.write

    class Stale:
        """Takes three bytes, and then nothing any more."""

        calls = 0
        fileno, close = file.file.fileno, file.file.close

        def write(self, data: bytearray) -> int:
            Stale.calls += 1
            if Stale.calls > 1:
                raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
            return write(data[:3])

    file.file = Stale()  # type: ignore[assignment]
    file.write(b"second\n")
    assert file.disk.problem == "is gone (stale file handle)"
    file.write(b"third\n")
    assert (tmp_path / "rows").read_text() == "first\nsecond\nthird\n"
    (tmp_path / "rows").unlink()
    file.write(b"fourth\n")
    file.close()
    assert (tmp_path / "rows").read_text() == "fourth\n"
    file.disk.require_saved()


def test_saving_is_not_tried_every_iteration(small_disk: Path, monkeypatch: Any) -> None:
    tried: list[int] = []
    save = Run.save_checkpoint

    def counted(self: Run, arrays: Any, manifest: Any, *more: Any) -> Path:
        tried.append(manifest["iteration"])
        return save(self, arrays, manifest, *more)

    monkeypatch.setattr(Run, "save_checkpoint", counted)
    with pytest.raises(TrainingError):
        train(config(small_disk, 20), callbacks=[Acting(at_6=lambda: fill(small_disk))])
    assert tried == [1, 2, 3, 4, 5, 6, 20]


def test_a_replay_buffer_that_does_not_fit_leaves_the_old_one(small_disk: Path) -> None:
    disk, folder = Disk(small_disk), small_disk / "replay"
    save_shards(folder, [{"a": np.ones(10_000)}] * 2, 2, 60, 32)
    fill(small_disk, leave=100_000)  # room for one of the two shards
    with disk.writing("the replay buffer"):
        save_shards(folder, [{"a": np.zeros(10_000)}] * 2, 2, 90, 64)
    assert list(disk.unsaved) == ["the replay buffer"]
    assert load_shards(folder, 2)[1:] == (60, 32)
    assert len(list(folder.iterdir())) == 3
    os.unlink(small_disk / "filler")
    with disk.writing("the replay buffer"):
        save_shards(folder, [{"a": np.zeros(10_000)}] * 2, 2, 90, 64)
    assert (disk.unsaved, load_shards(folder, 2)[1:]) == ({}, (90, 64))


def test_a_run_cannot_begin_on_a_full_disk(small_disk: Path, tmp_path: Path) -> None:
    fill(small_disk)
    shown = run_fever("train", "CartPole-v1", "--runs", str(small_disk), "--name", "a", cwd=tmp_path)
    assert (shown.returncode, len(shown.stderr.splitlines())) == (2, 1), shown.stderr
    assert "cannot be created: No space left on device" in shown.stderr
    assert not (small_disk / "a").exists()


def test_a_run_on_a_read_only_disk_is_not_resumed(small_disk: Path) -> None:
    run = train(config(small_disk, 2), display=Messages()).run
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
    with pytest.raises(FeverError, match=r"a cannot be written: Read-only file system$"):
        resume(run, config(small_disk, 4))
    assert run.status == "iterations"


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS, errno.EACCES, errno.ESTALE])
def test_every_refusal_is_said_once_and_other_errors_are_raised(number: int, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr("fever.runs.disk.RETRY_SECONDS", 0.0)
    disk = Disk(tmp_path)
    said: list[str] = []
    disk.say = said.append
    for _ in range(3):
        with disk.writing("summary.json"):
            raise OSError(number, os.strerror(number))
    assert len(said) == 1
    with pytest.raises(TrainingError, match=r"not saved: summary\.json$"):
        disk.require_saved()
    with disk.writing("summary.json"):
        pass
    assert len(said) == 2
    disk.require_saved()
    with pytest.raises(FileNotFoundError), disk.writing("summary.json"):  # the run directory itself is there
        raise FileNotFoundError(errno.ENOENT, "a mistake")


def test_rows_in_memory_are_bounded_and_those_lost_are_counted(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr("fever.runs.disk.WAITING_BYTES", 10)
    disk = Disk(tmp_path)
    file = Appender(tmp_path / "rows", disk)
    with disk.writing("a checkpoint"):
        raise OSError(errno.ENOSPC, "full")
    for number in range(8):
        file.write(f"{number}\n".encode())
    disk.try_now()
    file.close()
    assert (tmp_path / "rows").read_text() == "0\n1\n2\n3\n4\n"
    with pytest.raises(TrainingError, match=r"a checkpoint, rows \(3 lines\)"):
        disk.require_saved()


def test_a_full_disk_ends_a_command_with_one_sentence(small_disk: Path, tmp_path: Path) -> None:
    (tmp_path / "filling.py").write_text(
        "from pathlib import Path\n"
        "from fever.training.callbacks import Callback\n"
        "class Fill(Callback):\n"
        "    def on_iteration(self, info):\n"
        "        if info.iteration == 3:\n"
        "            with open(info.run.path.parent / 'filler', 'wb', buffering=0) as file:\n"
        "                try:\n"
        "                    while file.write(bytes(4096)) == 4096: pass\n"
        "                except OSError: pass\n"
    )
    words = ("train", "CartPole-v1", "--runs", str(small_disk), "--name", "a", "--stop-iterations", "9")
    shown = run_fever(*words, "--callback", "filling:Fill", cwd=tmp_path, PYTHONPATH=f"{tmp_path}:{Path.cwd()}")
    assert shown.returncode == 1, shown.stderr
    assert "Traceback" not in shown.stdout + shown.stderr
    assert FULL.format(small_disk / "a") in shown.stdout + shown.stderr
    assert shown.stderr.splitlines()[-1].startswith(f"fever: the disk of {small_disk / 'a'} is full; not saved: ")


def test_without_a_log_a_refusal_is_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """What is logged as a warning is printed while no run has a log, as at the end of a run."""
    disk = Disk(tmp_path)
    said: list[str] = []
    disk.say = said.append
    with disk.writing("a"):
        raise OSError(errno.ENOSPC, "No space left on device")
    assert said == [FULL.format(tmp_path)]
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
