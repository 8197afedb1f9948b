from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import matplotlib.image
import numpy as np
import pytest
from matplotlib.figure import Figure

from fever import layout
from fever.errors import FeverError
from fever.runs.plot import _draw_phases, _drawn_metrics, _panels, plot, save, smooth
from fever.runs.run import Run
from tests.helpers import ROOT, run_fever

COMMON = ("steps", "steps_per_second", "return_mean", "time_env", "time_learn", "entropy", "explained_variance")


def curves(*names: str) -> dict[str, np.ndarray]:
    return {name: np.full(3, 0.75) for name in names}


def test_panels_are_what_the_runs_have() -> None:
    alone = _panels([curves(*COMMON, "info/score", "info/success")])
    assert list(alone) == ["return", "steps_per_second", "entropy", "time", "info/score", "info/success"]
    assert alone["info/success"] == "success"
    compared = _panels([curves(*COMMON), curves("steps", *(f"info/{number}" for number in range(20)))])
    assert list(compared)[:5] == ["return", "steps_per_second", "entropy", "explained_variance", "info/0"]
    assert len(compared) == 12


def test_shares_of_the_same_time_are_not_stacked() -> None:
    class Axis:
        def __init__(self) -> None:
            self.called: list[str] = []

        def __getattr__(self, name: str) -> Any:
            return lambda *_, **__: self.called.append(name) or MagicMock()

    both, turns = Axis(), Axis()
    _draw_phases(both, curves("steps", "time_env", "time_learn"))
    _draw_phases(turns, {name: values / 2 for name, values in curves("steps", "time_env", "time_learn").items()})
    assert both.called.count("plot") == 2
    assert "stackplot" in turns.called


def test_missing_values_are_left_out_of_a_smooth_curve() -> None:
    curve = smooth(np.array([np.nan, np.nan, np.nan, 4.0, 4.0, np.nan]), points=2)
    assert curve[1:].tolist() == pytest.approx([np.nan, 4, 4, 4, 4], nan_ok=True)


EVIL = "\x1b]0;title\x07" + "$" + r"\sqrt{" * 2000 + "x" + "}" * 2000 + "$ \ud800 \u4e2d"


def crafted(folder: Path, rows: list[dict[str, Any]], env: str = "CartPole-v1") -> Run:
    folder.mkdir()
    (folder / layout.CONFIG).write_text(json.dumps({"env": env}))
    (folder / layout.METRICS).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return Run(folder)


def test_what_a_run_names_is_drawn_as_text(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    rows = [{"iteration": n, "steps": n, "return_mean": 1.0, f"info/{EVIL}": 1.0} for n in (1, 2)]
    runs = [crafted(tmp_path / name, rows, "\x1b[2Jx") for name in ("$a^$", "b\x1b[31m")]
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        plot(runs, tmp_path / "out.png")
    assert capfd.readouterr() == ("", "")


def test_numbers_that_cannot_be_drawn_are_one_sentence(tmp_path: Path) -> None:
    run = crafted(tmp_path / "a", [{"iteration": n, "steps": n * 1e308, "return_mean": -n * 1e308} for n in (-1, 0, 1)])
    with suppress(FeverError):
        plot([run], tmp_path / "out.png")


def test_a_matplotlibrc_in_the_working_folder_is_not_used(tmp_path: Path) -> None:
    run = crafted(tmp_path / "a", [{"iteration": n, "steps": n, "return_mean": 1.0} for n in (1, 2)])
    command = [sys.executable, "-c", "import sys; from fever.cli.main import main; main()", "plot", str(run.path)]
    outcomes = []
    for content in (b"text.usetex: True\nfigure.facecolor: red\n", b"\xff\xfe\n"):
        (tmp_path / "matplotlibrc").write_bytes(content)
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        done = subprocess.run(
            [*command, "--to", "a.png"], cwd=tmp_path, env=environment, capture_output=True, text=True
        )
        assert "Traceback" not in done.stderr
        outcomes.append(done.returncode)
    assert outcomes[0] == 0, done.stderr
    assert matplotlib.image.imread(tmp_path / "a.png")[0, 0, :3].tolist() == [1, 1, 1]


def test_a_matplotlibrc_in_the_working_folder_is_not_read(tmp_path: Path) -> None:
    """One that is a pipe would be waited for, for ever."""
    run = crafted(tmp_path / "a", [{"iteration": n, "steps": n, "return_mean": 1.0} for n in (1, 2)])
    os.mkfifo(tmp_path / "matplotlibrc")
    done = run_fever("plot", run.path.name, "--runs", ".", "--to", "b.png", cwd=tmp_path, timeout=60)
    assert (done.returncode, done.stdout.strip()) == (0, "b.png"), done.stderr
    assert (tmp_path / "b.png").is_file()


@pytest.mark.parametrize("name", ["curves", "curves.txt", ".png", "/"])
def test_other_kinds_of_files_are_refused(name: str, tmp_path: Path) -> None:
    """matplotlib would write curves.png, .png.png, or /.png."""
    with pytest.raises(FeverError, match=r": a picture is written as \.png, \.svg or \.pdf"):
        save(Figure(), tmp_path / name)
    assert list(tmp_path.iterdir()) == []


def test_only_what_is_drawn_is_kept(tmp_path: Path) -> None:
    many = {f"info/{number}": 1.0 for number in range(2000)}
    rows = [{"iteration": n, "steps": n, "other": 1.0, "return_mean": 1.0, **many} for n in range(1, 400)]
    run = crafted(tmp_path / "a", rows)
    kept = run.curves(4000, _drawn_metrics())
    assert {*kept} == {"iteration", "steps", "return_mean", *(f"info/{number}" for number in range(8))}
    assert {*run.curves()} == {*rows[0]}
