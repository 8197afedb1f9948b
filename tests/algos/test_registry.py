"""Algorithms by name: fever's own, and those of providers, which are imported only when they are needed."""

from __future__ import annotations

import subprocess
import sys

import pytest

from fever.algos import registry
from fever.algos.registry import check_settings, find_algorithm, find_provider, needs_trust
from fever.errors import FeverError
from fever.rllib.provider import RllibProvider
from tests.helpers import ROOT


def test_a_prefix_chooses_the_provider() -> None:
    assert isinstance(find_provider("rllib:PPO"), RllibProvider)
    assert isinstance(find_provider("rllib:my_package.algos:Mine"), RllibProvider)
    for name in ("ppo", "rllib", "my_package.algos:Mine", ""):
        assert find_provider(name) is None
    assert registry.without_prefix("rllib:my_package.algos:Mine") == "my_package.algos:Mine"
    assert registry.without_prefix("my_package.algos:Mine") == "my_package.algos:Mine"
    assert (needs_trust("rllib:PPO"), needs_trust("ppo")) == (True, False)


def test_names_and_settings_are_checked() -> None:
    check_settings("ppo", {"learning_rate": 1e-3})
    with pytest.raises(FeverError, match="ppo has no setting learning_rat; did you mean learning_rate"):
        check_settings("ppo", {"learning_rat": 1e-3})
    for name in ("pppo", "rlib:PPO"):
        with pytest.raises(FeverError, match=f"{name} is not a known algorithm; .*rllib:PPO"):
            find_algorithm(name)


def test_a_library_that_is_not_installed_is_listed_with_what_to_do() -> None:
    """In a process of its own: RLlib, once it is imported without PyTorch, stays without it."""
    code = "import sys; sys.modules['torch'] = None\nfrom fever.algos.registry import list_algorithms\n"
    code += "print(*list_algorithms(), sep='\\n')"
    lines = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT).stdout.splitlines()
    assert lines[:2] == ["ppo", "a2c"]
    assert lines[-1].startswith("rllib:NAME (")
    assert 'pip install "fever[rllib]"' in lines[-1]


def test_asking_for_a_provider_imports_no_library() -> None:
    program = (
        "import sys; from fever.algos.registry import needs_trust; assert not {'numpy', 'gymnasium'} & {*sys.modules};"
        "assert needs_trust('rllib:PPO'); assert not {'ray', 'torch', 'jax'} & {*sys.modules}"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
