from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent


def run_fever(*words: str, cwd: Path, timeout: float = 300, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run the command line in a subprocess, as a user would, with the tests' environments importable."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "120", **variables}
    command = [sys.executable, "-m", "fever", *words]
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=timeout)


@pytest.fixture
def fever(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """The command line, started in a folder of its own."""

    def call(*words: str, **options: Any) -> subprocess.CompletedProcess[str]:
        return run_fever(*words, cwd=tmp_path, **options)

    return call


@pytest.fixture(scope="module")
def ray() -> Iterator[Any]:
    """One Ray for all tests of a module that need it."""
    from fever.sampling.ray_cluster import connect

    assert connect(4).owned
    import ray

    yield ray
    ray.shutdown()


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """CartPole-v1 trained once by the bare command; what `--json` printed, and the folder it ran in."""
    folder = tmp_path_factory.mktemp("trained")
    done = run_fever("train", "CartPole-v1", "--name", "first", "--json", cwd=folder)
    assert done.returncode == 0, done.stderr
    return {"folder": folder, "stderr": done.stderr, "stdout": done.stdout, **json.loads(done.stdout.splitlines()[-1])}
