"""Measured results: what is stored, the page made of it, and the program that measures."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from fever.zoo import results
from fever.zoo.results import FOLDER, Result, read_result
from fever.zoo.rows import all_rows
from tests.helpers import ROOT

PROGRAM = ROOT / "benchmarks" / "zoo.py"
STORED = {
    "row": "a", "steps": 1000, "seeds": [0, 1], "scores": [90.0, 110.0], "episodes": 20, "mean": 100.0,
    "interval": [90.0, 110.0], "seconds": 9.0, "cores": 2, "fever": "0", "date": "2026-01-01", "command": "fever train",
    "curve": {"steps": [500, 1000], "mean": [50, 100], "low": [40, 90], "high": [60, 110]},
}  # fmt: skip


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(PROGRAM.parent))
    spec = importlib.util.spec_from_file_location("zoo_program", PROGRAM)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_stored_results_are_whole_and_small() -> None:
    rows = {name: row for name, _, _, row in all_rows()}
    for path in FOLDER.glob("*.json"):
        found = read_result(path.stem)
        assert found is not None
        assert found.row == path.stem
        assert found.steps == rows[path.stem].steps
        assert found.mean == pytest.approx(np.mean(found.scores), rel=1e-3)
        assert len(found.curve.steps) == len(found.curve.mean) <= 60
        assert path.stat().st_size <= 4000
    assert read_result("nothing") is None


def test_the_page_is_that_of_the_files(program: ModuleType) -> None:
    page = sys.modules["zoo_page"]
    assert page.PAGE.read_text() == page.page(), "run: python benchmarks/zoo.py --page"
    pictures = {path.stem for path in page.PICTURES.glob("*.svg")}
    assert pictures == {path.stem for path in FOLDER.glob("*.json")}


def test_a_measured_row_is_shown(program: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(results, "FOLDER", tmp_path)
    (tmp_path / "lunarlander-ppo.json").write_text(json.dumps({**STORED, "row": "lunarlander-ppo"}))
    from tests.helpers import call_fever

    assert "100.0 (90.0 to 110.0)" in call_fever("zoo").stdout
    page = sys.modules["zoo_page"]
    text = page.page()
    assert "| lunarlander-ppo | LunarLander-v3 | ppo | 1.0M | 100.0 (90.0 to 110.0), 2 seeds | 242.1 ± 31.8" in text
    assert "![learning curve](images/zoo/lunarlander-ppo.svg)" in text
    assert "each seed: 90.0, 110.0" in text
    row = {name: row for name, _, _, row in all_rows()}["lunarlander-ppo"]
    found = read_result("lunarlander-ppo")
    page.draw(found, row, "title", tmp_path / "one.svg")
    page.draw(found, row, "title", tmp_path / "two.svg")
    assert (tmp_path / "one.svg").read_text() == (tmp_path / "two.svg").read_text()
    assert (tmp_path / "one.svg").stat().st_size < 20_000


def test_a_check_allows_some_distance(program: ModuleType) -> None:
    stored = Result.model_validate(STORED)
    assert program.allowed(stored) == pytest.approx((90 - 14.142, 110 + 14.142), abs=0.001)
    narrow = stored.model_copy(update={"scores": (100.0, 100.0), "interval": (100.0, 100.0)})
    assert program.allowed(narrow) == pytest.approx((90.0, 110.0))
    assert program.allowed(stored.model_copy(update={"interval": None, "scores": (100.0,)})) == (90.0, 110.0)


def run(*words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(PROGRAM), *words]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=300)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_row_is_repeated_and_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    words = ("acrobot-ppo", "--steps", "5000", "--seeds", "2", "--to", "results")
    done = run(*words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    stored: dict[str, Any] = json.loads((tmp_path / "results" / "acrobot-ppo.json").read_text())
    found = Result.model_validate(stored)
    assert (found.steps, found.seeds, found.episodes) == (5000, (0, 1), 20)
    assert found.command == "fever train Acrobot-v1 --algo ppo --seed 0 --stop-steps 5000"
    assert found.mean == pytest.approx(np.mean(found.scores), rel=1e-3)
    runs = tmp_path / "runs" / "zoo"
    assert sorted(path.name for path in runs.iterdir()) == ["acrobot-ppo-0", "acrobot-ppo-1"]
    summary = json.loads((runs / "acrobot-ppo-0" / "summary.json").read_text())
    assert (summary["preset"], summary["stop_reason"]) == (False, "steps")
    before = (runs / "acrobot-ppo-0" / "config.yaml").stat().st_mtime_ns
    assert run(*words, cwd=tmp_path).returncode == 0
    assert (runs / "acrobot-ppo-0" / "config.yaml").stat().st_mtime_ns == before  # it was not trained again
    (runs / "acrobot-ppo-0" / "summary.json").unlink()  # as after a kill
    text = (runs / "acrobot-ppo-0" / "config.yaml").read_text()
    (runs / "acrobot-ppo-0" / "config.yaml").write_text(text.replace("gamma: 0.99", "gamma: 0.9"))
    done = run(*words, cwd=tmp_path)
    assert done.returncode == 1
    assert "acrobot-ppo-0 was trained with other settings or another budget; remove it" in done.stderr


def test_rows_are_listed_and_unknown_ones_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    assert "lunarlander-ppo               1,000,000 steps" in run(cwd=tmp_path).stdout
    done = run("lunarlander", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (1, "")
    assert "there is no row lunarlander; there are: acrobot-ppo" in done.stderr
