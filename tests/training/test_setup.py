"""What is decided before a run starts: on how many threads the learner computes."""

from __future__ import annotations

from typing import Any
from unittest.mock import Mock

import pytest

from fever.config import RunConfig
from fever.envs.source import EnvSource
from fever.training import setup

ZOO_DQN = {"hidden": [256, 256], "batch": 64}
LSTM = {"recurrent": "lstm", "recurrent_size": 512, "minibatch": 128}


@pytest.mark.parametrize(
    ("env", "algo", "settings", "one"),
    [
        ("CartPole-v1", "ppo", {}, True),
        ("CartPole-v1", "ppo", {"minibatch": 128}, True),
        ("CartPole-v1", "ppo", LSTM, False),
        ("CartPole-v1", "dqn", ZOO_DQN, True),
        ("CartPole-v1", "dqn", {**ZOO_DQN, "batch": 256}, False),
        ("Pendulum-v1", "sac", {}, False),
        ("Pendulum-v1", "td3", {"hidden": [64, 64]}, True),
        ("CartPole-v1", "trpo", {"steps": 128}, True),
        ("CartPole-v1", "trpo", {"steps": 640}, False),  # natural gradients of 5,120 steps at once
        ("CartPole-v1", "impala", {"hidden": [256, 256], "steps": 64, "minibatches": 4}, True),
        ("CartPole-v1", "impala", {"hidden": [256, 256], "steps": 64, "minibatches": 1}, False),
    ],
)
def test_the_work_in_a_gradient_step_decides_on_threads(
    monkeypatch: pytest.MonkeyPatch, env: str, algo: str, settings: dict[str, Any], one: bool
) -> None:
    limit = Mock()
    monkeypatch.setattr(setup, "limit_learner_threads", limit)
    setup.prepare(RunConfig(env=env, algo=algo, settings=settings), EnvSource(env), print)
    limit.assert_called_once_with(one)
