"""Algorithms that are not part of fever, given as `module:Class`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from fever.algos.registry import PROVIDERS, check_settings, config_of, find_algorithm
from fever.cli.completion import setting_names
from fever.config import LIBRARIES, RunConfig
from fever.errors import FeverError
from tests.helpers import ROOT

CROSSQ = ROOT / "examples" / "crossq"
MISTAKES = """
from fever.algos.off_policy import OffPolicyAlgorithm, OffPolicySettings
from fever.config import NetworkSettings


class Empty:
    Config = dict


class NoUpdate(OffPolicyAlgorithm):
    Config = OffPolicySettings


class NoNetwork:
    Config = NetworkSettings
    overlaps = False
    steps = 0

    def __init__(self, config, task): ...

    start = train = weights = state = restore = lambda self: None


def function(): ...
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder from which modules are imported, as the one where a command is started."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "mistakes.py").write_text(MISTAKES)
    (tmp_path / "raises_on_import.py").write_text("\nraise RuntimeError('no licence')\n")
    (tmp_path / "exits_on_import.py").write_text("import sys\nsys.exit(3)\n")
    (tmp_path / "is_not_python.py").write_text("def f(:\n")
    return tmp_path


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        (
            "mistakes:Empty",
            r"lacks Config \(a .*NetworkSettings\), start\(\), train\(\), weights\(\), state\(\), restore",
        ),
        ("mistakes:Empty", r"restore\(\), overlaps \(True or False\); docs/algorithms.md"),
        ("mistakes:NoUpdate", r"it lacks update\(\); docs"),
        ("mistakes:function", "mistakes:function is not a class"),
        ("mistakes:Emtpy", "module mistakes has no Emtpy; did you mean Empty?"),
        ("raises_on_import:X", "RuntimeError: no licence .raises_on_import.py:2"),
        ("exits_on_import:X", "exits_on_import cannot be imported: SystemExit: 3 .exits_on_import.py:2"),
        ("is_not_python:X", "invalid syntax .is_not_python.py:1"),
        ("no_such_module:X", "there is no module no_such_module here"),
        ("../mistakes:Empty", "'../mistakes' is not the name of a module"),
    ],
)
def test_what_is_no_algorithm_is_refused(folder: Path, name: str, sentence: str) -> None:
    with pytest.raises(FeverError, match=sentence):
        find_algorithm(name)


def test_an_object_without_network_is_refused_before_anything_is_written(folder: Path) -> None:
    command = [sys.executable, "-m", "fever", "train", "CartPole-v1", "--algo", "mistakes:NoNetwork"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (2, "")
    assert "mistakes:NoNetwork is not an algorithm: its __init__ sets no network" in done.stderr
    assert not (folder / "runs").exists()


def test_settings_are_checked_and_completed_like_those_of_own_algorithms(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(CROSSQ)
    with pytest.raises(FeverError, match="has no setting policy_dely; did you mean policy_delay"):
        check_settings("fever_crossq:CrossQ", {"policy_dely": 2})
    with pytest.raises(FeverError, match="sgd has no argument b1"):
        check_settings("fever_crossq:CrossQ", {"optimizer": "sgd"})
    fields = {name: field.description for name, field in config_of("fever_crossq:CrossQ").model_fields.items()}
    for name in ("fever_crossq:CrossQ", "fever_crossq.crossq:CrossQ"):
        assert setting_names(name) == fields
    for name in ("fever_crossq:Missing", "no_such_module:X", ":X", "x:"):
        assert setting_names(name) == {}


def test_run_directories_are_named_by_the_class() -> None:
    names = {"my_package.algos:CrossQ": "crossq", "rllib:PPO": "rllib-ppo", "rllib:mine.algos:Own": "rllib-own"}
    for algo, name in {**names, "ppo": "ppo", "rllib": "rllib"}.items():
        assert RunConfig(env="CartPole-v1", algo=algo).stem == f"cartpole-v1-{name}"
    assert set(LIBRARIES) == set(PROVIDERS)
