"""Does it learn? Whole trainings to thresholds, each a few seconds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fever
from fever.runs.evaluate import evaluate, source_of
from fever.training.result import Result
from tests.helpers import SEEDS


def train(env: str, runs: Path, **options: Any) -> Result:
    """With plain defaults below the options, whatever the zoo has."""
    target = f"tests.environments:{env}" if env.isidentifier() else env
    return fever.train(target, runs=runs, preset=False, **options)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_cartpole_is_solved_by_default(tmp_path: Path, seed: int) -> None:
    result = train("CartPole-v1", tmp_path, seed=seed)
    assert result.stop_reason == "reward"
    assert result.return_mean is not None
    assert result.return_mean >= 475


@pytest.mark.parametrize("seed", SEEDS)
def test_cartpole_is_solved_by_a2c(tmp_path: Path, seed: int) -> None:
    result = train("CartPole-v1", tmp_path, algo="a2c", seed=seed, stop={"reward": 475, "steps": 150_000})
    assert result.stop_reason == "reward"


@pytest.mark.parametrize("seed", SEEDS)
def test_cartpole_is_solved_by_dqn(tmp_path: Path, seed: int) -> None:
    result = train("CartPole-v1", tmp_path, algo="dqn", seed=seed, stop={"reward": 475, "steps": 120_000})
    assert result.stop_reason == "reward"
    assert evaluate(result.run.checkpoint("last"), source_of(result.run), episodes=10).returns.mean() > 400


@pytest.mark.parametrize("seed", SEEDS)
def test_cartpole_is_solved_by_qrdqn(tmp_path: Path, seed: int) -> None:
    result = train("CartPole-v1", tmp_path, algo="qrdqn", seed=seed, stop={"reward": 475, "steps": 120_000})
    assert result.stop_reason == "reward"
    assert evaluate(result.run.checkpoint("last"), source_of(result.run), episodes=10).returns.mean() > 400


@pytest.mark.parametrize("algo", ["apex", "dqn", "impala"])
def test_cartpole_is_solved_within_100_000_steps_by_the_defaults(tmp_path: Path, algo: str) -> None:
    result = train("CartPole-v1", tmp_path, algo=algo, seed=2, stop={"reward": 475, "steps": 100_000})
    assert result.stop_reason == "reward"


@pytest.mark.slow
def test_cartpole_is_balanced_by_apex_with_workers(tmp_path: Path) -> None:
    stop = {"reward": 300, "time": "4m"}  # time instead of steps: how much is learned meanwhile depends on the machine
    result = train("CartPole-v1", tmp_path, algo="apex", workers=2, replay_shards=2, stop=stop)
    assert result.stop_reason == "reward"


def test_acrobot_is_swung_up_by_plain_dqn(tmp_path: Path) -> None:
    plain = {"double": False, "dueling": False, "n_step": 1, "prioritized": False}
    result = train("Acrobot-v1", tmp_path, algo="dqn", stop={"reward": -110, "steps": 120_000}, **plain)
    assert result.stop_reason == "reward"


def test_acrobot_is_swung_up_by_dqn(tmp_path: Path) -> None:
    assert train("Acrobot-v1", tmp_path, algo="dqn", stop={"reward": -105, "steps": 60_000}).stop_reason == "reward"


@pytest.mark.slow
def test_pong_improves_from_its_memory(tmp_path: Path) -> None:
    result = train(
        "ALE/Pong-v5", tmp_path, algo="dqn", env_kwargs={"obs_type": "ram"}, hidden=[256, 256], learning_rate=3e-4,
        replay_ratio=8, updates=8, buffer=300_000, warmup=10_000, epsilon_steps=100_000, epsilon_end=0.02, n_step=3,
        stop={"reward": -17.5, "steps": 250_000},
    )  # fmt: skip
    assert result.stop_reason == "reward"  # it begins near -20.5


def test_pendulum_swings_up_by_sac(tmp_path: Path) -> None:
    result = train(
        "Pendulum-v1", tmp_path, algo="sac", hidden=[64, 64], stop={"reward": -250, "steps": 20_000, "window": 10}
    )
    assert result.stop_reason == "reward"


@pytest.mark.slow
@pytest.mark.parametrize("algo", ["td3", "tqc"])
def test_pendulum_swings_up_by_the_other_actor_critics(tmp_path: Path, algo: str) -> None:
    stop = {"reward": -300, "steps": 20_000, "window": 10}
    result = train("Pendulum-v1", tmp_path, algo=algo, hidden=[64, 64], replay_ratio=128, stop=stop)
    assert result.stop_reason == "reward"
    assert evaluate(result.run.checkpoint("last"), source_of(result.run), episodes=10).returns.mean() > -400


@pytest.mark.parametrize("algo", ["sac", "td3", "tqc"])
def test_small_images_are_told_apart_by_actor_critics(tmp_path: Path, algo: str) -> None:
    result = train(
        "ImageEnv", tmp_path, algo=algo, env_kwargs={"continuous": True, "height": 6, "width": 6}, gamma=0.0,
        convolutions=[[8, 2, 2]], convolution_features=32, hidden=[32], batch=32, replay_ratio=16, warmup=200,
        report_steps=200, stop={"reward": 6, "steps": 8000, "window": 20},
    )  # fmt: skip
    assert result.stop_reason == "reward"
    assert evaluate(result.run.checkpoint(), source_of(result.run), episodes=10).returns.mean() > 6


def test_pendulum_swings_up(tmp_path: Path) -> None:
    result = train(
        "Pendulum-v1", tmp_path, gamma=0.9, learning_rate=1e-3, steps=256, stop={"reward": -250, "steps": 300_000}
    )
    assert result.stop_reason == "reward"
    scores = evaluate(result.run.checkpoint("last"), source_of(result.run), episodes=10)
    assert scores.returns.mean() > -400


MEMORY = {
    "env_kwargs": {"length": 6}, "envs": 16, "steps": 24, "minibatch": 192, "learning_rate": 3e-3,
}  # fmt: skip


@pytest.mark.parametrize("recurrent", ["lstm", "gru"])
def test_memory_is_learned_by_a_recurrent_policy(tmp_path: Path, recurrent: str) -> None:
    stop = {"reward": 0.95, "steps": 60_000, "window": 100}
    result = train("MemoryEnv", tmp_path, recurrent=recurrent, recurrent_size=32, stop=stop, **MEMORY)
    assert result.stop_reason == "reward"
    scores = evaluate(result.run.checkpoint(), source_of(result.run), episodes=40)
    assert scores.returns.mean() > 0.9  # the state is carried and reset at evaluation too


def test_memory_is_not_learned_without_recurrence(tmp_path: Path) -> None:
    result = train("MemoryEnv", tmp_path, stop={"steps": 30_000, "window": 200}, **MEMORY)
    assert result.return_mean is not None
    assert result.return_mean < 0.7


@pytest.mark.slow
@pytest.mark.parametrize("order", ["hwc", "chw"])
def test_small_images_are_told_apart(tmp_path: Path, order: str) -> None:
    result = train(
        "ImageEnv", tmp_path, env_kwargs={"order": order}, steps=32, minibatch=64, epochs=4, learning_rate=1e-3,
        convolution_features=64, stop={"reward": 7.8, "steps": 20_000, "window": 50},
    )  # fmt: skip
    assert result.stop_reason == "reward"


@pytest.mark.parametrize(
    ("action", "goal"),
    [("discrete", 7.5), ("discrete_start", 7.5), ("multidiscrete", 6.5), ("multibinary", 6.5), ("box", -10.0)],
)
def test_every_action_space_is_learned_from_its_own_observation(tmp_path: Path, action: str, goal: float) -> None:
    stop = {"reward": goal, "steps": 80_000, "window": 50}
    result = train(
        "IdentityEnv", tmp_path, env_kwargs={"action_space": action}, gamma=0.0, learning_rate=3e-3, steps=64,
        minibatch=128, stop=stop,
    )  # fmt: skip
    assert result.stop_reason == "reward", result.return_mean


@pytest.mark.parametrize("env", ["DictEnv", "TupleEnv"])
def test_compound_observations_are_learned_from(tmp_path: Path, env: str) -> None:
    stop = {"reward": 7.5, "steps": 40_000, "window": 50}
    result = train(env, tmp_path, gamma=0.0, learning_rate=3e-3, steps=64, minibatch=128, stop=stop)
    assert result.stop_reason == "reward", result.return_mean


def test_time_limits_bootstrap(tmp_path: Path) -> None:
    """Reward 1 a step for ever, cut every 5 steps: the value must approach 1 / (1 - gamma) = 10, not the 5 in sight."""
    values = {}
    for env in ("TimeLimitEnv", "TerminatingEnv"):
        result = train(
            env, tmp_path, gamma=0.9, gae_lambda=0.9, learning_rate=3e-3, steps=32, minibatch=256,
            max_gradient_norm=100, normalize_rewards=False, normalize_observations=False, stop={"steps": 60_000},
        )  # fmt: skip
        policy = result.policy
        start = np.zeros((1, 1), np.float32)
        values[env] = float(policy.network.values(policy.params, start, policy.network.initial_state(1))[0])
    assert values["TimeLimitEnv"] == pytest.approx(10, abs=0.7)
    assert values["TerminatingEnv"] == pytest.approx((1 - 0.9**5) / 0.1, abs=0.4)  # 4.095
