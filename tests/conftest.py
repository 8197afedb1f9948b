"""Fixtures that the tests of several rooms use."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.helpers import run_fever


@pytest.fixture
def fever(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """A function that runs the command line in a temporary folder."""

    def call(*words: str, **options: Any) -> subprocess.CompletedProcess[str]:
        return run_fever(*words, cwd=tmp_path, **options)

    return call


@pytest.fixture(scope="module")
def ray() -> Iterator[Any]:
    """One private Ray of four cores for all tests of a module."""
    from fever.sampling.ray_cluster import connect

    cluster = connect(4)
    assert cluster.owned
    yield cluster.ray
    cluster.leave()


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """CartPole-v1 trained once by the bare command: the fields that `--json` printed, the output, and the folder."""
    folder = tmp_path_factory.mktemp("trained")
    done = run_fever("train", "CartPole-v1", "--name", "first", "--json", cwd=folder)
    assert done.returncode == 0, done.stderr
    return {"folder": folder, "stderr": done.stderr, "stdout": done.stdout, **json.loads(done.stdout.splitlines()[-1])}
