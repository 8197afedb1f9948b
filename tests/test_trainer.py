"""The driver: determinism, resuming, stop rules, failures, the Python interface."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest

import fever
from fever.algos.ppo import PPO
from fever.errors import ContractError, FeverError, TrainingError
from fever.run import Run
from fever.trainer import resume

SMALL = {"envs": 2, "steps": 16, "minibatch": 32, "epochs": 2}


def weights(run: Run) -> dict[str, np.ndarray]:
    return run.checkpoint().arrays("policy/")


def same(first: dict[str, np.ndarray], second: dict[str, np.ndarray]) -> bool:
    return first.keys() == second.keys() and all(np.array_equal(first[name], second[name]) for name in first)


def test_same_seed_gives_bit_identical_weights(tmp_path: Path) -> None:
    runs = [
        fever.train("CartPole-v1", seed=seed, runs=tmp_path, stop={"iterations": 5}, **SMALL).run for seed in (1, 1, 2)
    ]
    assert same(weights(runs[0]), weights(runs[1]))
    assert not same(weights(runs[0]), weights(runs[2]))


def test_resumed_run_is_the_same_whenever_it_is_resumed(tmp_path: Path) -> None:
    """Two runs stopped at the same place and resumed give the same weights: all of the learner's state is kept."""
    resumed = []
    for name in ("a", "b"):
        run = fever.train("CartPole-v1", runs=tmp_path, name=name, stop={"iterations": 3}, **SMALL).run
        stop = run.config.stop.model_copy(update={"iterations": 6})
        resumed.append(resume(run, run.config.model_copy(update={"stop": stop})))
    assert same(weights(resumed[0].run), weights(resumed[1].run))
    assert resumed[0].summary["iterations"] == 6


def test_restored_learner_makes_the_same_next_update(tmp_path: Path, monkeypatch: Any) -> None:
    """Given the same fragments, a restored learner and the one that went on agree bit by bit."""
    seen: list[Any] = []
    learn = PPO.learn
    monkeypatch.setattr(PPO, "learn", lambda self, fragments: (seen.append(fragments), learn(self, fragments))[1])
    whole = fever.train("CartPole-v1", runs=tmp_path, name="a", stop={"iterations": 6}, **SMALL).run
    fragments = iter(seen[3:6])
    half = fever.train("CartPole-v1", runs=tmp_path, name="b", stop={"iterations": 3}, **SMALL).run
    monkeypatch.setattr(PPO, "learn", lambda self, _: learn(self, next(fragments)))
    stop = half.config.stop.model_copy(update={"iterations": 6})
    resume(half, half.config.model_copy(update={"stop": stop}))
    assert same(weights(whole), weights(half))


@pytest.mark.parametrize(
    ("stop", "reason"),
    [
        ({"steps": 100}, "steps"),
        ({"iterations": 2}, "iterations"),
        ({"time": "0.5s"}, "time"),
        ({"reward": 1}, "reward"),
    ],
)
def test_first_stop_rule_that_is_met_ends_the_run(tmp_path: Path, stop: dict[str, Any], reason: str) -> None:
    result = fever.train("CartPole-v1", runs=tmp_path, stop=stop, **SMALL)
    assert result.stop_reason == reason
    if reason == "steps":
        assert 100 <= result.summary["steps"] < 100 + 32
    if reason == "time":
        assert result.summary["seconds"] >= 0.5


def test_return_rule_waits_for_a_full_window(tmp_path: Path) -> None:
    result = fever.train("CartPole-v1", runs=tmp_path, stop={"reward": 1, "window": 30}, **SMALL)
    assert result.summary["episodes"] >= 30


def test_result_has_run_policy_and_curves(tmp_path: Path) -> None:
    result = fever.train(gym.envs.classic_control.CartPoleEnv, runs=tmp_path, stop={"iterations": 2}, **SMALL)
    observation = np.zeros(4, np.float32)
    assert result.policy.act(observation) in (0, 1)
    assert fever.load(result.run.path).act(observation) == result.policy.act(observation)
    assert fever.load(result.run.path.name, runs=tmp_path).act(observation) in (0, 1)
    assert len(result.curves["policy_loss"]) == 2
    assert result.run.config.env == "gymnasium.envs.classic_control.cartpole:CartPoleEnv"


def test_nan_loss_stops_with_the_last_good_checkpoint(tmp_path: Path, monkeypatch: Any) -> None:
    learn = PPO.learn

    def poisoned(self: PPO, fragments: Any) -> Any:
        if self.steps > 90:
            fragments[0].arrays["log_probs"] = fragments[0].arrays["log_probs"] * np.float32("nan")
        return learn(self, fragments)

    monkeypatch.setattr(PPO, "learn", poisoned)
    with pytest.raises(TrainingError, match="not a number"):
        fever.train("CartPole-v1", runs=tmp_path, name="a", stop={"iterations": 50}, **SMALL)
    run = Run.open("a", tmp_path)
    assert run.status == "failed"
    assert run.checkpoint().iteration == len(run.metrics()) > 0
    assert all(np.isfinite(array).all() for array in weights(run).values())


def test_contract_broken_later_keeps_what_was_learned(tmp_path: Path) -> None:
    arguments = {"fault": "nan_observation", "at": 40}
    with pytest.raises(ContractError, match="at step 40 of environment 0"):
        fever.train("tests.environments:BrokenEnv", env_kwargs=arguments, runs=tmp_path, name="a", **SMALL)
    run = Run.open("a", tmp_path)
    assert (run.status, run.checkpoint().iteration) == ("failed", 2)


def test_failure_before_the_first_iteration_leaves_nothing(tmp_path: Path) -> None:
    arguments = {"fault": "nan_observation", "at": 4}
    with pytest.raises(ContractError):
        fever.train("tests.environments:BrokenEnv", env_kwargs=arguments, runs=tmp_path / "runs", **SMALL)
    assert list(tmp_path.iterdir()) == []


def test_environments_are_closed_when_training_fails(tmp_path: Path, monkeypatch: Any) -> None:
    def fail(self: PPO, fragments: Any) -> Any:
        raise RuntimeError("a fault in the learner")

    monkeypatch.setattr(PPO, "learn", fail)
    folder = tmp_path / "closed"
    folder.mkdir()
    with pytest.raises(RuntimeError, match="a fault in the learner"):
        fever.train("tests.environments:ClosingEnv", env_kwargs={"folder": str(folder)}, runs=tmp_path, **SMALL)
    assert len(list(folder.iterdir())) == 2


def test_private_folders_are_in_the_run_directory(tmp_path: Path) -> None:
    result = fever.train("tests.environments:ContextEnv", runs=tmp_path, stop={"iterations": 1}, **SMALL)
    assert len(list(result.run.path.glob("work/worker-0-env-*/context.txt"))) == 2


def test_normalisation_is_saved_with_the_policy_and_frozen(tmp_path: Path) -> None:
    result = fever.train("Pendulum-v1", runs=tmp_path, stop={"iterations": 3}, **SMALL)
    params = result.policy.params
    mean = params["observation/mean"].copy()
    assert np.abs(mean).max() > 0
    result.policy.act(np.array([5.0, 5.0, 5.0], np.float32))
    np.testing.assert_array_equal(params["observation/mean"], mean)


def test_unknown_setting_from_python_is_a_fever_error(tmp_path: Path) -> None:
    with pytest.raises(FeverError, match="did you mean gamma"):
        fever.train("CartPole-v1", runs=tmp_path, gama=0.9)
