"""The examples of docs/callbacks.md, run as they are printed."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from fever.config import RunConfig
from fever.runs.run import Run
from fever.training import trainer
from fever.training.callbacks import HOOKS
from tests.environments import TimeLimitEnv
from tests.helpers import ROOT

PAGE = (ROOT / "docs/callbacks.md").read_text()
SETTINGS = {"steps": 32, "minibatch": 64, "epochs": 1}


class Sized(TimeLimitEnv):
    """Its episodes have `size` steps, with reward 1 each."""

    def __init__(self, size: int = 3) -> None:
        super().__init__(size)


@pytest.fixture
def examples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the page's examples as modules."""
    blocks = re.findall(r"```python\n# (\w+\.py)\n(.*?)```", PAGE, re.DOTALL)
    assert [name for name, _ in blocks] == ["plateau.py", "curriculum.py", "rows.py"]
    for name, code in blocks:
        (tmp_path / name).write_text(code)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def train(callback: str, iterations: int) -> Run:
    values: Any = {"settings": SETTINGS, "envs": 2, "stop": {"iterations": iterations}, "name": "a"}
    return trainer.train(RunConfig(env=f"{__name__}:Sized", callbacks=(callback,), **values)).run


def test_the_plateau_example_stops(examples: Path) -> None:
    run = train('plateau:StopOnPlateau={"patience": 3}', 20)
    assert run.status == "plateau"
    assert [row["plateau/best"] for row in run.metrics()] == [3] * 4


def test_the_curriculum_example_grows(examples: Path) -> None:
    run = train('curriculum:Grow={"goal": 3, "most": 5}', 8)
    lengths = [row["length"] for row in run.episodes()]
    assert set(lengths) == {3, 4, 5}
    assert lengths[0] == 3
    assert run.metrics()[-1]["env/size"] == 5


def test_the_logger_example_writes(examples: Path) -> None:
    train("rows:Csv", 2)
    assert (examples / "rows.csv").read_text().splitlines() == ["a,64,3.0", "a,128,3.0"]


def test_the_page_names_all_methods() -> None:
    assert re.findall(r"^\| `(on_\w+)\(", PAGE, re.MULTILINE) == list(HOOKS)
