"""Rows of a part of a file: found by bisection, thinned if there are many, exact otherwise."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as some

from fever.runs import window as module
from fever.runs.window import window


def write(path: Path, count: int, damage: str = "") -> Path:
    """Rows 1 to `count`, at 10 steps each; every seventh line is damaged."""
    with path.open("w") as file:
        for k in range(1, count + 1):
            file.write(json.dumps({"iteration": k, "steps": 10 * k, "value": k / 2}) + "\n")
            if damage and k % 7 == 0:
                file.write(damage + "\n")
    return path


@given(low=some.integers(-5, 1200), high=some.integers(-5, 1200), damaged=some.booleans())
def test_all_rows_of_a_part_are_found(
    tmp_path_factory: pytest.TempPathFactory, low: int, high: int, damaged: bool
) -> None:
    path = write(tmp_path_factory.mktemp("rows") / "metrics.jsonl", 100, "\0{broken" if damaged else "")
    rows, exact = window(path, "iteration", "steps", low, high, 1000)
    assert exact
    assert [row["steps"] for row in rows] == [10 * k for k in range(1, 101) if low <= 10 * k <= high]


def test_a_large_part_is_thinned_and_a_small_one_exact(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SMALL", 20_000)
    path = write(tmp_path / "metrics.jsonl", 20_000)
    rows, exact = window(path, "iteration", "steps", None, None, 500)
    assert not exact
    assert 450 <= len(rows) <= 500
    steps = [row["steps"] for row in rows]
    assert steps == sorted(set(steps))
    assert steps[0] == 10
    assert steps[-1] > 199_000
    part, exact = window(path, "iteration", "steps", 100_000, 102_000, 500)
    assert exact
    assert [row["iteration"] for row in part] == list(range(10_000, 10_201))


def test_the_first_and_the_last_row_stay(tmp_path: Path) -> None:
    path = write(tmp_path / "metrics.jsonl", 1001)
    rows, exact = window(path, "iteration", "steps", None, None, 100)
    assert not exact
    assert (rows[0]["iteration"], rows[-1]["iteration"]) == (1, 1001)


def test_rows_that_a_resumed_run_repeated_are_the_newer_ones(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    rows = [{"iteration": k, "steps": k, "value": "old"} for k in (1, 2, 3)]
    rows += [{"iteration": k, "steps": k, "value": "new"} for k in (2, 3, 4)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    found, _ = window(path, "iteration", "steps", None, None, 100, {"value"}.__contains__)
    assert [row["value"] for row in found] == ["old", "new", "new", "new"]


def test_a_file_that_is_missing_or_empty_has_no_rows(tmp_path: Path) -> None:
    assert window(tmp_path / "none", "iteration", "steps", None, None, 10) == ([], True)
    (tmp_path / "empty").touch()
    assert window(tmp_path / "empty", "iteration", "steps", 3, 5, 10) == ([], True)
    (tmp_path / "one line").write_text("x" * 200_000)
    assert window(tmp_path / "one line", "iteration", "steps", 3, 5, 10) == ([], True)


def test_a_million_rows_are_not_read(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    rest = json.dumps({f"metric_{k}": 0.123456 for k in range(10)})[1:-1]
    with path.open("w") as file:
        for begin in range(0, 1_000_000, 10_000):
            file.write(
                "".join(f'{{"iteration": {k}, "steps": {10 * k}, {rest}}}\n' for k in range(begin, begin + 10_000))
            )
    began = time.process_time()
    rows, _ = window(path, "iteration", "steps", None, None, 1000)
    exact = window(path, "iteration", "steps", 5_000_000, 5_009_990, 1000)
    assert time.process_time() - began < 2  # reading all takes more than ten times as long
    assert len(rows) > 900
    assert exact[1]
    assert [row["iteration"] for row in exact[0]] == list(range(500_000, 501_000))
