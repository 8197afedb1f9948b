"""The driver: determinism, resuming, stop rules, failures, the Python interface."""

from __future__ import annotations

import functools
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest

import fever
from fever.algos.normalize import Normalizer
from fever.algos.ppo import PPO
from fever.config import RunConfig, Stop
from fever.errors import ContractError, FeverError, TrainingError
from fever.replay.experience import LocalExperience
from fever.runs.run import Run
from fever.sampling.workers import LocalWorkers
from fever.training.display import Display
from fever.training.evaluation import Evaluation
from fever.training.resume import resume
from fever.training.trainer import Trainer
from tests.environments import TimeLimitEnv
from tests.helpers import same_arrays

SMALL = {"envs": 2, "steps": 16, "minibatch": 32, "epochs": 2}


def weights(run: Run) -> dict[str, np.ndarray]:
    return run.checkpoint().arrays("policy/")


def test_same_seed_gives_bit_identical_weights(tmp_path: Path) -> None:
    runs = [
        fever.train("CartPole-v1", seed=seed, runs=tmp_path, stop={"iterations": 5}, **SMALL).run for seed in (1, 1, 2)
    ]
    assert same_arrays(weights(runs[0]), weights(runs[1]))
    assert not same_arrays(weights(runs[0]), weights(runs[2]))


def test_resumed_run_is_the_same_whenever_it_is_resumed(tmp_path: Path) -> None:
    """Two runs stopped at the same place and resumed give the same weights: all of the learner's state is kept."""
    resumed = []
    for name in ("a", "b"):
        run = fever.train("CartPole-v1", runs=tmp_path, name=name, stop={"iterations": 3}, **SMALL).run
        stop = run.config.stop.model_copy(update={"iterations": 6})
        resumed.append(resume(run, run.config.model_copy(update={"stop": stop})))
    assert same_arrays(weights(resumed[0].run), weights(resumed[1].run))
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
    assert same_arrays(weights(whole), weights(half))


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


def test_curves_are_read_when_they_are_asked_for(tmp_path: Path, monkeypatch: Any) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(Run, "metrics", None)
        result = fever.train("CartPole-v1", runs=tmp_path, stop={"iterations": 2}, **SMALL)
    assert result.curves["iteration"].tolist() == [1, 2]


def test_nan_loss_stops_with_the_last_good_checkpoint(tmp_path: Path, monkeypatch: Any) -> None:
    learn = PPO.learn

    def poisoned(self: PPO, fragments: Any) -> Any:
        if self.steps > 90:
            fragments[0].arrays["log_probs"] = fragments[0].arrays["log_probs"] * np.float32("nan")
            fragments[0].arrays["discounted"] = fragments[0].arrays["discounted"] + np.float32(1e30)
        return learn(self, fragments)

    monkeypatch.setattr(PPO, "learn", poisoned)
    with pytest.raises(TrainingError, match="NaN or infinite"):
        fever.train("CartPole-v1", runs=tmp_path, name="a", stop={"iterations": 50}, **SMALL)
    run = Run.open("a", tmp_path)
    assert run.status == "failed"
    assert run.checkpoint().iteration == len(run.metrics()) > 0
    assert all(np.isfinite(array).all() for array in weights(run).values())
    kept = run.checkpoint().arrays()
    assert all(np.isfinite(array).all() for array in kept.values())  # nothing of what could not be learned from
    assert kept["returns/count"] == run.checkpoint().manifest["steps"]
    monkeypatch.setattr(PPO, "learn", learn)
    stop = Stop(iterations=run.checkpoint().iteration + 2)
    assert resume(run, run.config.model_copy(update={"stop": stop})).stop_reason == "iterations"


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


class Messages(Display):
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def message(self, text: str) -> None:
        self.said.append(text)


def prepared(folder: Path, display: Display) -> Trainer:
    settings = {name: value for name, value in SMALL.items() if name != "envs"}
    stop = {"iterations": 5}
    config = RunConfig(env="CartPole-v1", envs=2, settings=settings, stop=stop, runs=str(folder), name="a")
    return Trainer(config, None, display)


def act_in_learning(monkeypatch: Any, call: int, act: Any) -> None:
    """Do something in the middle of the n-th time that something is learned."""
    scale, calls = Normalizer.scale_rewards, [0]

    def scale_rewards(self: Normalizer, batch: Any) -> None:
        scale(self, batch)
        calls[0] += 1
        if calls[0] == call:
            act()

    monkeypatch.setattr(Normalizer, "scale_rewards", scale_rewards)


@pytest.mark.parametrize("algo", ["ppo", "trpo", "impala"])
def test_a_signal_waits_until_a_batch_is_learned_from(tmp_path: Path, monkeypatch: Any, algo: str) -> None:
    act_in_learning(monkeypatch, 2, lambda: signal.raise_signal(signal.SIGINT))
    result = fever.train("CartPole-v1", algo, runs=tmp_path, envs=2, steps=16, stop={"iterations": 5})
    assert (result.stop_reason, result.summary["iterations"]) == ("interrupted", 2)
    checkpoint = result.run.checkpoint()
    assert checkpoint.iteration == 2
    assert checkpoint.arrays()["returns/count"] == checkpoint.manifest["steps"]


@pytest.mark.parametrize("numbers", [[signal.SIGTERM], [signal.SIGINT], [signal.SIGINT] * 2, []])
def test_a_finished_run_stays_finished_whatever_happens_while_it_closes(
    tmp_path: Path, monkeypatch: Any, numbers: list[signal.Signals]
) -> None:
    def close(self: LocalWorkers) -> None:
        for number in numbers:
            signal.raise_signal(number)
        raise RuntimeError("the simulator is gone")

    monkeypatch.setattr(LocalWorkers, "close", close)
    display = Messages()
    result = prepared(tmp_path, display).run()
    assert result.stop_reason == Run.open("a", tmp_path).status == "iterations"
    assert display.said[-1].startswith("not all environments were closed")
    assert ("the simulator is gone" in (result.run.path / "log.txt").read_text()) == (len(numbers) < 2)


@pytest.mark.parametrize("interrupted", [False, True])
def test_what_was_not_saved_is_not_said_to_be(tmp_path: Path, monkeypatch: Any, interrupted: bool) -> None:
    def cut() -> None:
        if not interrupted:
            raise RuntimeError("a fault in the learner")
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)

    act_in_learning(monkeypatch, 1, cut)
    display = Messages()
    trainer = prepared(tmp_path, display)
    trainer.prepared = replace(trainer.prepared, uninterruptible=True)  # as RLlib's: what was cut is not saved
    with pytest.raises(
        KeyboardInterrupt if interrupted else RuntimeError,
        match="^before anything was learned; nothing is left behind$" if interrupted else "a fault",
    ):
        trainer.run()
    assert display.said == []
    assert not (tmp_path / "a").exists()


def test_a_refused_resume_leaves_the_run_as_it_was(tmp_path: Path, monkeypatch: Any) -> None:
    run = fever.train("CartPole-v1", runs=tmp_path, name="a", stop={"iterations": 1}, **SMALL).run
    before = {name: (run.path / name).read_bytes() for name in ("config.yaml", "summary.json")}

    def refuse(self: PPO, place: Any) -> Any:
        raise FeverError("there is no room")

    monkeypatch.setattr(PPO, "start", refuse)
    stop = run.config.stop.model_copy(update={"iterations": 6})
    with pytest.raises(FeverError, match="there is no room"):
        resume(run, run.config.model_copy(update={"stop": stop}))
    assert before == {name: (run.path / name).read_bytes() for name in before}


def test_new_stop_rules_replace_the_one_that_has_ended_a_run(tmp_path: Path) -> None:
    stop = {"reward": 1, "window": 3, "steps": 10_000}
    run = fever.train("CartPole-v1", runs=tmp_path, stop=stop, **SMALL).run
    rules = run.config.stop
    assert run.drop_met(rules, {"steps": 20_000}) == (rules.model_copy(update={"reward": None}), ["reward"])
    for given in ({}, {"window": 3}, {"reward": 1}):
        assert run.drop_met(rules, given) == (rules, [])
    with pytest.raises(FeverError, match=r"its stop rule \(reward\) already; raise it with --stop-reward, or"):
        resume(run, run.config)


def test_a_partial_function_may_hold_anything(tmp_path: Path) -> None:
    make = functools.partial(TimeLimitEnv, limit=np.int64(5))
    result = fever.train(make, runs=tmp_path, stop={"iterations": 1}, **SMALL)
    assert result.summary["length_mean"] == 5
    assert result.run.config.env == "tests.environments:TimeLimitEnv(...)"


def test_arguments_that_cannot_be_written_down_are_refused_before_anything_is_made(tmp_path: Path) -> None:
    with pytest.raises(FeverError, match=r"what JSON can hold: .*numpy\.int64"):
        fever.train(TimeLimitEnv, env_kwargs={"limit": np.int64(5)}, runs=tmp_path / "runs", **SMALL)
    assert list(tmp_path.iterdir()) == []


def test_private_folders_are_in_the_run_directory(tmp_path: Path) -> None:
    result = fever.train("tests.environments:ContextEnv", runs=tmp_path, stop={"iterations": 1}, **SMALL)
    assert len(list(result.run.path.glob("work/worker-0-env-*/context.txt"))) == 2


def test_normalisation_is_saved_with_the_policy_and_frozen(tmp_path: Path) -> None:
    result = fever.train("Pendulum-v1", runs=tmp_path, stop={"iterations": 3}, preset=False, **SMALL)
    params = result.policy.params
    mean = params["observation/mean"].copy()
    assert np.abs(mean).max() > 0
    result.policy.act(np.array([5.0, 5.0, 5.0], np.float32))
    np.testing.assert_array_equal(params["observation/mean"], mean)


def test_unknown_setting_from_python_is_a_fever_error(tmp_path: Path) -> None:
    with pytest.raises(FeverError, match="did you mean gamma"):
        fever.train("CartPole-v1", runs=tmp_path, gama=0.9)


def saved_dqn(tmp_path: Path) -> Run:
    settings = {"warmup": 100, "batch": 8, "report_steps": 200}
    stop = {"steps": 600}
    return fever.train("CartPole-v1", algo="dqn", workers=0, stop=stop, runs=tmp_path, progress=False, **settings).run


def test_a_pool_that_was_not_filled_is_never_saved(tmp_path: Path, monkeypatch: Any) -> None:
    """It would replace the replay buffer that was saved by an empty one."""
    run = saved_dqn(tmp_path)
    trainer = Trainer(run.config.model_copy(update={"stop": Stop(steps=900)}), run=run, checkpoint=run.checkpoint())
    pools: list[Any] = []

    def interrupt(pool: Any, folder: Path) -> None:
        pools.append(pool)
        raise KeyboardInterrupt

    monkeypatch.setattr(LocalExperience, "restore", interrupt)
    with pytest.raises(KeyboardInterrupt):
        trainer._start(run)
    assert pools
    assert trainer.pool is None


def test_an_evaluated_checkpoint_is_not_replaced_by_what_was_learned_since(tmp_path: Path) -> None:
    run = saved_dqn(tmp_path)
    trainer = Trainer(run.config.model_copy(update={"stop": Stop(steps=900)}), run=run, checkpoint=run.checkpoint())
    trainer.evaluation = Evaluation.__new__(Evaluation)  # without environments
    trainer.evaluation.row = {"return_mean": 9.0}
    trainer.evaluation.weights = {name: value + 1 for name, value in trainer.learner.weights().items()}
    trainer.progress.iteration = run.checkpoint().iteration
    trainer.write_checkpoint(run)
    assert trainer.evaluation.row == {}
    assert [one.iteration for one in run.checkpoints()][-1] == trainer.progress.iteration
