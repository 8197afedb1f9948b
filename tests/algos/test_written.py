"""The algorithm of docs/algorithms.md, as a reader saves it."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

import fever
from tests.helpers import ROOT


def test_the_algorithm_of_the_page_learns_cartpole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "algorithms.md").read_text(), re.DOTALL)
    [text] = [block for block in blocks if "class PolicyGradient(" in block]
    (tmp_path / "policy_gradient.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "policy_gradient", raising=False)
    stop = {"reward": 150, "window": 20, "steps": 150_000}
    result = fever.train("CartPole-v1", "policy_gradient:PolicyGradient", stop=stop, runs=tmp_path / "runs")
    assert result.stop_reason == "reward"
    assert result.run.path.name.startswith("cartpole-v1-policygradient-")
    assert {"policy_loss", "value_loss", "entropy"} <= {*result.curves}
