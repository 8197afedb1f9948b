"""Workers whose environments raise or hang: the environment is made anew, or the worker is replaced."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import fever
from fever.errors import TrainingError

pytestmark = pytest.mark.ray

ENV = "tests.environments:UnreliableEnv"
APEX = {"warmup": 100, "updates": 2, "batch": 4, "replay_ratio": 0.5, "explore_steps": 20}


@pytest.mark.parametrize(
    ("algo", "settings"), [("ppo", {"steps": 128}), pytest.param("apex", APEX, marks=pytest.mark.slow)]
)
def test_failures_in_workers_are_counted(tmp_path: Path, algo: str, settings: dict[str, Any]) -> None:
    kwargs = {"chance": 0.02, "after": 10}
    result = fever.train(
        ENV, algo, env_kwargs=kwargs, workers=2, envs=4, runs=tmp_path, stop={"steps": 2000}, **settings
    )
    assert result.stop_reason == "steps"
    assert result.summary["env_failures"] > 3
    assert result.run.metrics()[-1]["worker_restarts"] == 0
    assert {row["return"] for row in result.run.episodes()} == {210.0}
    assert "the robot fell over" in (result.run.path / "log.txt").read_text()


@pytest.mark.slow
def test_a_worker_whose_environment_hangs_is_replaced_and_one_that_always_hangs_ends_the_run(tmp_path: Path) -> None:
    kwargs = {"fault": "hang", "chance": 1.0, "after": 180, "seconds": 1000}
    more: dict[str, Any] = {"workers": 1, "envs": 2, "runs": tmp_path, "steps": 128, "step_timeout": 0.5}
    result = fever.train(ENV, env_kwargs=kwargs, stop={"steps": 700}, **more)
    assert (result.stop_reason, result.run.metrics()[-1]["worker_restarts"]) == ("steps", 2)
    log = (result.run.path / "log.txt").read_text()
    assert "step() (environment 0) took longer than 0.5 s" in log
    assert "time.sleep(self.seconds)" in log  # where it hung
    with pytest.raises(TrainingError, match=r"worker 0 died 6 times in a row; the last reason: .*longer than 0.5 s"):
        fever.train(ENV, env_kwargs=kwargs | {"after": 5}, stop={"steps": 700}, **more)
