"""The networks in docs/networks.md work as they stand there."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

import fever

PAGE = Path(__file__).parents[2] / "docs" / "networks.md"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["MLP", "linear", "Perceptron", "Memory"])
def test_a_network_of_the_page_trains(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.S)
    (code,) = [block for block in blocks if re.search(rf"^(class|def) {name}\b", block, re.M)]
    module = ModuleType("page")
    monkeypatch.setitem(sys.modules, "page", module)
    exec(compile(code, str(PAGE), "exec", dont_inherit=True), vars(module))
    settings = {"steps": 16, "minibatch": 16, "epochs": 1}
    result = fever.train(
        "CartPole-v1", network=f"page:{name}", runs=tmp_path, envs=2, stop={"iterations": 2}, **settings
    )
    assert result.summary["iterations"] == 2
