from __future__ import annotations

import pytest

import fever
from fever.training.result import Result

SMALL = {"envs": 2, "steps": 16, "minibatch": 32, "epochs": 2}


@pytest.fixture(scope="session")
def result(tmp_path_factory: pytest.TempPathFactory) -> Result:
    """A short training of InfoEnv."""
    runs = tmp_path_factory.mktemp("runs")
    return fever.train("tests.environments:InfoEnv", runs=runs, name="a", stop={"iterations": 6}, **SMALL)
