"""docs/python.md: its examples, run as they are written."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

import fever
from fever.errors import FeverError
from tests.helpers import ROOT

PAGE = (ROOT / "docs" / "python.md").read_text()


@pytest.mark.slow
@pytest.mark.ray
def test_the_examples_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    for block in re.findall(r"^```python\n(.*?)^```", PAGE, re.M | re.S):
        exec(block, names)
    assert names["result"].summary["steps"] >= 10_000
    assert names["video"].is_file()
    assert names["short"].summary["length_mean"] <= 100
    assert (tmp_path / "compared.png").is_file()
    found = names["found"]
    assert found.stop_reason == "trials"
    assert sorted(trial.number for trial in found.trials) == [1, 2]
    assert found.best_config.settings.items() >= found.best.settings.items()
    assert names["best"].run.config.settings.items() >= found.best.settings.items()
    with pytest.raises(FeverError, match="is a search; continue it with: fever resume"):
        fever.resume("search")


def test_every_function_has_an_example() -> None:
    for name in set(fever.__all__) - {"__version__"}:
        assert f"fever.{name}(" in PAGE
