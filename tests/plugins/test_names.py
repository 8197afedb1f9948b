"""`module:Name`: what is never imported, whoever has named it."""

from __future__ import annotations

import functools
import sys
from pathlib import Path

import pytest

from fever.algos.registry import find_algorithm
from fever.config import RunConfig
from fever.envs.source import EnvSource
from fever.errors import FeverError
from fever.plugins.names import import_name
from fever.training.named import make_callbacks

MODULE = """
import functools, os, subprocess
from os import system
from functools import partial, lru_cache
class Env:
    def __init__(self, size=3): ...
    class Inner: ...
    @classmethod
    def small(cls): ...
factory = functools.partial(Env, size=5)
run = functools.partial(os.system, "true")
bound = [].append
@lru_cache
def cached(): ...
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "some_parts.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "some_parts", raising=False)
    return "some_parts"


@pytest.mark.parametrize(
    "name", ["os:system", "subprocess:run", "builtins:exec", "posix:system", "os.path:join", "pip:main", "this:d"]
)
def test_modules_of_python_are_refused(name: str) -> None:
    before = set(sys.modules)
    for find in (import_name, find_algorithm, lambda name: EnvSource(name).resolve()):
        with pytest.raises(FeverError, match="is part of Python or of its package installers, which have no env"):
            find(name)
    with pytest.raises(FeverError, match="is part of Python"):
        make_callbacks(RunConfig(env="CartPole-v1", callbacks=(name,)))
    with pytest.raises(FeverError, match="is part of Python"):
        EnvSource(f"{name.partition(':')[0]}:Some-v0").resolve()
    assert not {"this", "pip"} & (set(sys.modules) - before)


@pytest.mark.parametrize("name", ["system", "os.system", "subprocess.run", "partial", "run", "bound", "Env.__class__"])
def test_what_a_module_imports_from_python_is_refused(module: str, name: str) -> None:
    with pytest.raises(FeverError, match=r"is part of Python|a dotted name is one within a class"):
        import_name(f"{module}:{name}")


@pytest.mark.parametrize("name", ["Env", "Env.Inner", "Env.small", "factory", "cached"])
def test_parts_of_the_users_are_found(module: str, name: str) -> None:
    found = import_name(f"{module}:{name}")
    assert callable(found)
    if name == "factory":
        assert isinstance(found, functools.partial)
