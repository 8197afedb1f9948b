"""IMPALA and APPO: what they learn, and how a run of them goes on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fever
from fever.algos.impala import STEP_METRICS
from fever.runs.evaluate import evaluate, source_of
from fever.training.resume import resume
from tests.environments import ImageEnv, MaskedEnv, NextStepMasked
from tests.helpers import SEEDS


def train(env: Any, algo: str, runs: Path, **options: Any) -> Any:
    return fever.train(f"tests.environments:{env}" if str(env).isidentifier() else env, algo, runs=runs, **options)


def test_one_seed_is_one_training_and_it_can_be_resumed(tmp_path: Path) -> None:
    tiny = {"envs": 4, "steps": 8, "hidden": [8], "stop": {"iterations": 5}}
    here, there = (train("CartPole-v1", "appo", tmp_path, seed=3, **tiny) for _ in range(2))
    rows = [
        [{name: value for name, value in row.items() if "second" not in name and "time" not in name} for row in metrics]
        for metrics in (here.run.metrics(), there.run.metrics())
    ]
    assert rows[0] == rows[1]
    assert {"policy_lag", "policy_lag_max", "queue", "fragments_dropped", *STEP_METRICS} <= rows[0][0].keys()
    for name, value in here.policy.params.items():
        np.testing.assert_array_equal(value, there.policy.params[name], err_msg=name)
    config = here.run.config
    longer = config.model_copy(update={"stop": config.stop.model_copy(update={"iterations": 7})})
    more = resume(here.run, longer)
    assert more.summary["iterations"] == 7
    assert here.summary["steps"] < more.summary["steps"] <= 7 * 32  # less phantom steps


@pytest.mark.parametrize(
    ("algo", "target", "more"),
    [
        ("impala", MaskedEnv, {"env_kwargs": {"action_space": "multidiscrete"}}),
        ("appo", NextStepMasked, {"recurrent": "lstm", "recurrent_size": 6}),
    ],
)
def test_masks_are_kept_to(algo: str, target: Any, more: dict[str, Any], tmp_path: Path) -> None:
    """The environment raises when it gets a forbidden action."""
    result = train(target, algo, tmp_path, envs=4, steps=25, hidden=[8], stop={"iterations": 6}, **more)
    assert all(np.isfinite(value).all() for value in result.policy.params.values())
    assert max(abs(row["kl"]) for row in result.run.metrics()) < 0.1
    assert len(evaluate(result.run.checkpoint(), source_of(result.run), 5, deterministic=False).returns) == 5


@pytest.mark.parametrize("seed", SEEDS)
def test_cartpole_is_solved_by_impala(tmp_path: Path, seed: int) -> None:
    stop = {"reward": 475, "steps": 200_000}
    assert train("CartPole-v1", "impala", tmp_path, seed=seed, stop=stop).stop_reason == "reward"


def test_cartpole_is_solved_by_appo(tmp_path: Path) -> None:
    result = train("CartPole-v1", "appo", tmp_path, stop={"reward": 475, "steps": 100_000})
    assert result.stop_reason == "reward"
    assert evaluate(result.run.checkpoint("last"), source_of(result.run), episodes=10).returns.mean() > 400


@pytest.mark.slow
def test_cartpole_is_learned_by_impala_with_workers(tmp_path: Path) -> None:
    stop = {"reward": 300, "steps": 500_000}  # how old experience is depends on how busy the machine is
    result = train("CartPole-v1", "impala", tmp_path, workers=2, stop=stop)
    assert result.stop_reason == "reward"
    rows = result.run.metrics()
    assert 0 < max(row["policy_lag_max"] for row in rows) <= 64
    assert rows[-1]["worker_restarts"] == 0
    assert {row["worker"] for row in result.run.episodes()} == {0, 1}


def test_continuous_actions_are_learned(tmp_path: Path) -> None:
    stop = {"reward": -10.0, "steps": 80_000, "window": 50}
    result = train(
        "IdentityEnv", "appo", tmp_path, env_kwargs={"action_space": "box"}, gamma=0.0, learning_rate=3e-3, stop=stop
    )
    assert result.stop_reason == "reward", result.return_mean  # it begins near -19


def test_memory_is_learned_by_a_recurrent_policy(tmp_path: Path) -> None:
    result = train(
        "MemoryEnv", "impala", tmp_path, env_kwargs={"length": 6}, envs=16, steps=24, recurrent="lstm",
        recurrent_size=32, learning_rate=3e-3, stop={"reward": 0.95, "steps": 60_000, "window": 100},
    )  # fmt: skip
    assert result.stop_reason == "reward"


@pytest.mark.slow
def test_images_are_told_apart(tmp_path: Path) -> None:
    result = train(
        ImageEnv, "impala", tmp_path, steps=16, convolution_features=64,
        stop={"reward": 7.8, "steps": 20_000, "window": 50},
    )  # fmt: skip
    assert result.stop_reason == "reward"
