"""Files of rows: what stays of them, what a kill leaves, and how much of a large one is read."""

from __future__ import annotations

import gzip
import json
import logging
import os
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from fever.config import RunConfig
from fever.errors import DamagedError, FeverError
from fever.files import LONGEST_LINE, last_line, newest
from fever.runs import rows
from fever.runs.plot import draw
from fever.runs.rows import ArchivingWriter, Follower, RowWriter, sample, sample_archive, stored_rows, stride, thin
from fever.runs.run import Run
from fever.training import callbacks, logs
from fever.training.callbacks import TensorBoard, TrainingInfo

KEEP = 100


def numbers(path: Path) -> list[int]:
    return [row["iteration"] for row in stored_rows(path)]


def expected(last: int, keep: int) -> list[int]:
    """The rule in words: the newest `keep` rows, then every 2nd of `keep`, every 4th of 2 `keep`, and so on."""
    found, older, step, band = [], last, 1, keep
    while older > 0:
        found += [number for number in range(older, max(0, older - band), -1) if number % step == 0]
        older, band, step = older - band, band * (1 if step == 1 else 2), step * 2
    return sorted({1, *found})


def test_the_rule_is_what_it_says() -> None:
    assert [stride(age, 100) for age in (0, 99, 100, 199, 200, 399, 400, 799, 800)] == [1, 1, 2, 2, 4, 4, 8, 8, 16]
    assert len(expected(1_000_000, 100)) < 100 * (1 + 0.5 * 14) + 2


def test_rows_are_thinned_by_the_rule(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    writer, most = RowWriter(path, "iteration", KEEP), 0
    for number in range(1, 5001):
        writer.write([{"iteration": number, "steps": 7 * number}])
        most = max(most, path.stat().st_size)
    writer.close()
    assert numbers(path) == expected(5000, KEEP), "the last row was the 50th time"
    assert all(row["steps"] == 7 * row["iteration"] for row in stored_rows(path))
    assert most < 40 * KEEP * 5
    assert [one.name for one in tmp_path.iterdir()] == ["rows.jsonl"]


def test_a_resumed_run_goes_on_with_a_thinned_file(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    for begin, end in ((1, 351), (320, 700), (650, 1001)):  # the second and third repeat rows
        writer = RowWriter(path, "iteration", KEEP)
        for number in range(begin, end):
            writer.write([{"iteration": number, "by": begin}])
        writer.close()
    found = newest(stored_rows(path), "iteration")
    assert {row["iteration"] for row in found} >= {*expected(1000, KEEP)}
    assert all(row["by"] == (1 if row["iteration"] < 320 else 320 if row["iteration"] < 650 else 650) for row in found)
    thin(path, "iteration", KEEP)
    assert numbers(path) == expected(1000, KEEP)


def test_lines_that_are_no_rows_do_not_survive(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    lines = [json.dumps({"iteration": number}) for number in range(1, 301)]
    path.write_bytes("\n".join([*lines[:150], '{"iteration": 9', "\0" * 50, *lines[150:], ""]).encode())
    thin(path, "iteration", KEEP)
    assert numbers(path) == expected(300, KEEP)
    assert all(json.loads(line) for line in path.read_text().splitlines())


@pytest.mark.parametrize("step", ["open", "replace", "fsync"])
def test_a_failure_while_thinning_loses_no_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str, caplog: Any
) -> None:
    path = tmp_path / "rows.jsonl"
    writer = RowWriter(path, "iteration", KEEP)
    writer.write([{"iteration": number} for number in range(1, 3 * KEEP)])  # thinned
    before = numbers(path)

    def fail(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        if step == "replace":
            patch.setattr(Path, "replace", fail)
        elif step == "fsync":
            patch.setattr(os, "fsync", fail)
        else:
            patch.setattr(rows, "replacing", fail)
        writer.write([{"iteration": number} for number in range(3 * KEEP, 4 * KEEP)])
    assert "could not be shortened" in caplog.text
    assert numbers(path) == [*before, *range(3 * KEEP, 4 * KEEP)]
    assert len([*tmp_path.iterdir()]) == 1
    writer.write([{"iteration": number} for number in range(4 * KEEP, 5 * KEEP + 1)])
    writer.close()
    assert numbers(path) == expected(5 * KEEP, KEEP), "it is thinned another time"


def test_what_a_kill_left_is_removed(tmp_path: Path) -> None:
    for name in (".rows.jsonl.0badcafe", ".old.jsonl.gz.0badcafe"):
        (tmp_path / name).write_text("half")
    ArchivingWriter(tmp_path / "rows.jsonl", tmp_path / "old.jsonl.gz", "iteration", KEEP).close()
    assert [*tmp_path.iterdir()] == []


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run.create(RunConfig(env="X-v0", runs=str(tmp_path), name="a"), {})


def log_episodes(run: Run, begin: int, end: int) -> None:
    for number in range(begin, end, 10):
        run.log_episodes([{"episode": k, "steps": k, "return": 1.0} for k in range(number, number + 10)])


def test_episodes_move_to_a_thinned_archive(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "RECENT_BYTES", 4000)
    log_episodes(run, 1, 2001)
    assert (run.path / "episodes.jsonl").stat().st_size < 4500
    assert [row["episode"] for row in run.episodes()] == [*range(1, 2001)], "nothing is left out of a small archive"
    monkeypatch.setattr(rows, "ARCHIVE_BYTES", 1000)
    monkeypatch.setattr("fever.runs.run.KEEP_EPISODES", KEEP)
    run.close()
    log_episodes(run, 2001, 20_041)
    found = [row["episode"] for row in run.episodes()]
    recent = [json.loads(line)["episode"] for line in (run.path / "episodes.jsonl").read_text().splitlines()]
    assert found == [*expected(recent[0] - 1, KEEP), *recent]
    with gzip.open(run.path / "episodes-old.jsonl.gz") as file:
        assert len(file.readlines()) == len(found) - len(recent)
    run.close()


def test_a_kill_between_archive_and_recent_episodes_shows_none_twice(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "RECENT_BYTES", 4000)
    real, replaced = rows.replacing, []

    def killed_at_second(path: Path) -> Any:
        replaced.append(path)
        if len(replaced) == 2:
            raise KeyboardInterrupt
        return real(path)

    monkeypatch.setattr(rows, "replacing", killed_at_second)
    with pytest.raises(KeyboardInterrupt):
        log_episodes(run, 1, 2001)
    run.close()
    kept = len(run.episodes())
    assert [row["episode"] for row in run.episodes()] == [*range(1, kept + 1)]
    log_episodes(run, kept + 1, 2 * kept)
    assert [row["episode"] for row in run.episodes()] == [*range(1, run.episodes()[-1]["episode"] + 1)]


def test_a_damaged_archive_is_read_up_to_the_damage(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "RECENT_BYTES", 20_000)
    log_episodes(run, 1, 3001)
    run.close()
    archive = run.path / "episodes-old.jsonl.gz"
    archive.write_bytes(archive.read_bytes()[:-100])
    found = [row["episode"] for row in run.episodes()]
    assert found[:500] == [*range(1, 501)]
    assert found[-1] == 3000
    archive.write_bytes(b"no gzip file")
    assert [row["episode"] for row in run.episodes()][-1] == 3000


# reading


class CountingReads:
    """Counts the bytes that `json.loads` gets."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count, self.bytes, loads = 0, 0, json.loads

        def counted(text: Any) -> Any:
            self.count, self.bytes = self.count + 1, self.bytes + len(text)
            return loads(text)

        monkeypatch.setattr("fever.files.json.loads", counted)


def test_a_million_rows_are_plotted_without_reading_them(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    row = {"steps": 5, "return": 1.0, "return_mean": 1.0, "steps_per_second": 9.0, "entropy": 0.5, "pad": "x" * 300}
    with open(run.path / "metrics.jsonl", "wb") as file:
        for number in range(1, 1001):  # each a thousand times: the newest counts
            file.write((json.dumps({"iteration": number, "episode": number, **row}) + "\n").encode() * 1000)
    size = (run.path / "metrics.jsonl").stat().st_size
    os.link(run.path / "metrics.jsonl", run.path / "episodes.jsonl")
    reads = CountingReads(monkeypatch)
    tracemalloc.start()
    curves = run.curves(2000)
    run.episodes(2000)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert size > 300_000_000
    assert reads.count < 4100
    assert reads.bytes < 3_000_000
    assert peak < 50_000_000
    assert 900 < len(curves["iteration"]) <= 1000
    assert (curves["iteration"][1:] > curves["iteration"][:-1]).all()
    assert curves["iteration"][0] == 1
    assert curves["iteration"][-1] == 1000
    assert len(draw([run]).axes) >= 2
    before = reads.count
    assert run.last_row()["iteration"] == 1000
    assert reads.count - before <= 2


def test_a_sample_of_a_small_file_is_the_file(run: Run) -> None:
    for number in (1, 2, 3, 2, 3, 4):
        run.log({"iteration": number, "steps": number})
    assert run.metrics(2) == run.metrics()
    assert run.curves(1)["iteration"].tolist() == [1, 2, 3, 4]
    run.close()


def test_repeated_rows_are_replaced_in_a_sample(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "SMALL", 1000)
    path = tmp_path / "rows.jsonl"
    parts = ((1, 5001, "old"), (4001, 6001, "new"))
    path.write_text("".join(json.dumps({"iteration": k, "by": by}) + "\n" for a, b, by in parts for k in range(a, b)))
    found = newest(sample(path, 100), "iteration")
    assert 70 < len(found) <= 101
    assert found[0]["iteration"] == 1
    assert found[-1]["iteration"] == 6000
    assert not [row for row in found if row["by"] == "old" and row["iteration"] > 4100], (
        "but for one step of the sample"
    )


DAMAGED = {
    "zeros": bytes(50_000_000),
    "no newline": b"x" * 50_000_000,
    "lines": b"garbage\n" * 6_000_000,
    "empty lines": b"\n" * 50_000_000,
    "brackets": (b"[" * 900_000 + b"\n") * 50,
}


@pytest.mark.parametrize("kind", DAMAGED)
def test_little_of_a_damaged_file_is_read(kind: str, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    path = run.path / "metrics.jsonl"
    path.write_bytes(json.dumps({"iteration": 1, "steps": 1}).encode() + b"\n" + DAMAGED[kind])
    reads = CountingReads(monkeypatch)
    assert last_line(path) == {}
    assert reads.count <= 2002
    assert reads.bytes <= 3 * LONGEST_LINE
    found = sample(path, 500)
    assert [row["iteration"] for row in found] == [1]


# others that are bounded, or follow


def test_a_follower_sees_every_row_once_though_the_file_is_thinned(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    follower, seen = Follower(path, "iteration"), []
    assert follower.rows() == []
    writer = RowWriter(path, "iteration", KEEP)
    for number in range(1, 2001):
        writer.write([{"iteration": number}])
        if number % 37 == 0:
            seen += [row["iteration"] for row in follower.rows()]
    assert seen == [*range(1, 37 * 54 + 1)]
    with open(path, "a") as file:
        file.write('{"iteration": 2001')  # being written
    assert [row["iteration"] for row in follower.rows()] == [1999, 2000]
    writer.close()


def test_a_log_keeps_its_beginning_and_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "LOG_BYTES", 8000)
    monkeypatch.setattr(logs, "HEAD_BYTES", 1000)
    monkeypatch.setattr(logs, "TAIL_BYTES", 4000)
    path, most = tmp_path / "log.txt", 0
    with logs.log_to_file(path):
        for number in range(2000):
            logging.info("record %d", number)
            most = max(most, path.stat().st_size)
    lines = path.read_text().splitlines()
    assert most < 8200
    assert lines[0].endswith("record 0")
    assert lines[-1].endswith("record 1999")
    (gap,) = [place for place, line in enumerate(lines) if "left out here" in line]
    kept = [int(line.rpartition(" ")[2]) for line in lines if "left out" not in line]
    assert kept[:gap] == [*range(gap)]
    assert kept[gap:] == [*range(kept[gap], 2000)]


def test_tensorboard_gets_fewer_and_fewer_rows_and_the_last(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[int] = []
    monkeypatch.setattr(callbacks, "ALL_EVENTS", KEEP)
    monkeypatch.setattr("fever.runs.events.EventWriter.write", lambda self, step, values: written.append(step))
    board, info = TensorBoard(), TrainingInfo(RunConfig(env="X-v0"), run)
    for number in range(1, 1000):
        info.metrics = {"iteration": number, "steps": number} | ({"eval/return_mean": 1.0} if number == 777 else {})
        board.on_iteration(info)
    board.on_stop(info)
    by_rule = [number for number in range(1, 1000) if number % stride(number, KEEP) == 0]
    assert written == sorted({*by_rule, 777, 999})
    assert len(by_rule) < KEEP * 3


# a damaged archive


def flip(path: Path, place: float) -> None:
    content = bytearray(path.read_bytes())
    content[int(place * len(content))] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("reopened", [False, True])
def test_nothing_is_appended_to_a_damaged_archive(
    run: Run, reopened: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(rows, "RECENT_BYTES", 20_000)
    log_episodes(run, 1, 3001)
    if reopened:
        run.close()
    archive = run.path / "episodes-old.jsonl.gz"
    flip(archive, 0.5)
    damaged = archive.read_bytes()
    readable = len([*stored_rows(archive)])
    with caplog.at_level(logging.WARNING):
        log_episodes(run, 3001, 6001)
    run.close()
    assert "episodes-old.jsonl.gz is damaged, and is kept as episodes-old.jsonl.gz.damaged" in caplog.text
    assert (run.path / "episodes-old.jsonl.gz.damaged").read_bytes() == damaged
    found = [row["episode"] for row in run.episodes()]
    assert found[-3000:] == [*range(3001, 6001)], "all later episodes are read"
    assert found[: readable // 2] == [*range(1, readable // 2 + 1)], "and so are those before the damage"
    flip(archive, 0.9)
    log_episodes(run, 6001, 9001)
    run.close()
    assert (run.path / "episodes-old.jsonl.gz.damaged").read_bytes() == damaged
    assert (run.path / "episodes-old.jsonl.gz.damaged-2").is_file()


def test_a_damaged_archive_is_not_replaced_by_a_thinned_one(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl.gz"
    with gzip.open(path, "wb") as file:
        file.writelines(f'{{"iteration": {number}}}\n'.encode() for number in range(5000))
    flip(path, 0.9)
    before = path.read_bytes()
    with pytest.raises(DamagedError, match="is damaged"):
        thin(path, "iteration", KEEP)
    assert path.read_bytes() == before
    assert [*tmp_path.iterdir()] == [path]


def test_an_archive_is_unpacked_once_by_the_process_that_writes_it(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "RECENT_BYTES", 4000)
    log_episodes(run, 1, 1001)
    run.close()
    opened: list[Path] = []
    real = rows._open
    monkeypatch.setattr(rows, "_open", lambda path: opened.append(path) or real(path))  # type: ignore[func-returns-value]
    log_episodes(run, 1001, 3001)
    run.close()
    assert opened == [run.path / "episodes-old.jsonl.gz"]


# files that somebody else has made


def test_an_archive_that_unpacks_to_very_much_takes_little_memory(tmp_path: Path) -> None:
    path, line = tmp_path / "old.jsonl.gz", b'{"episode": 1, "x": "' + b"a" * 12_000 + b'"}\n'
    with gzip.open(path, "wb", 1) as file:
        for _ in range(8):
            file.write(line * 1000)
    tracemalloc.start()
    found = sample_archive(path, 100, "episode".__eq__)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert 50 <= len(found) <= 200
    assert peak < 10e6
    assert found[0] == {"episode": 1}


def test_a_file_that_fever_would_not_have_written_is_not_read_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open(tmp_path / "evaluations.jsonl", "wb") as file:
        file.truncate(50 << 30)
    with pytest.raises(FeverError, match=r"evaluations\.jsonl is damaged: it is larger than 1 GB"):
        Run(tmp_path).evaluations()
    with pytest.raises(FeverError, match="larger than 1 GB"):
        sample(tmp_path / "evaluations.jsonl", 100)
    with pytest.raises(FeverError, match="larger than 1 GB"):
        RowWriter(tmp_path / "evaluations.jsonl", "iteration", KEEP)
    monkeypatch.setattr(rows, "UNPACKED_BYTES", 100_000)
    with gzip.open(tmp_path / "old.jsonl.gz", "wb") as packed:
        packed.write(b'{"episode": 1}\n' * 10_000)
    with pytest.raises(FeverError, match=r"old\.jsonl\.gz is damaged: it holds more than"):
        [*stored_rows(tmp_path / "old.jsonl.gz")]
