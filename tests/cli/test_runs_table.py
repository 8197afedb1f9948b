from __future__ import annotations

import io
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from fever import layout
from fever.cli.runs import _print_runs, show
from tests.experiments.made import make_run


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("columns", [80, 120])
def test_the_table_of_runs_fits_the_terminal(monkeypatch: pytest.MonkeyPatch, columns: int) -> None:
    row: dict[str, Any] = {
        "env": "LunarLander-v3",
        "algo": "ppo",
        "status": "reward",
        "workers": 12,
        "steps": 12_345_678,
        "return": -1234.5678,
        "steps/s": 123456.7,
    }
    names = ["lunarlander-v3-ppo-20260102-030405", "lunarlander-v3-appo-20260102-03040"]
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("TERM", "xterm")
    _print_runs([{"run": name, **row} for name in names])
    lines = re.sub(r"\x1b\[[\d;]*m", "", terminal.getvalue()).splitlines()
    assert max(map(len, lines)) <= columns
    assert len(lines) == 3
    for line, name in zip(lines[1:], names, strict=True):
        assert line.split()[0] == name
        assert line.rstrip().endswith("goal reached      12 12.3M -1,234.6  123.5k")
    assert ("LunarLander-v3" in lines[1]) == (columns == 120)


def test_a_run_that_failed_is_shown_with_its_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(tmp_path, "a", [1.0])
    (run.path / layout.SUMMARY).write_text(json.dumps({"stop_reason": "failed", "error": "the valve is stuck"}))
    (run.path / layout.FACTS).write_text("{}")
    show("a", str(tmp_path))
    assert "error    the valve is stuck" in capsys.readouterr().out
