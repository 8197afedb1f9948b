"""Evaluation during training: what is written, which checkpoint is the best, signals, resuming, what it costs."""

from __future__ import annotations

import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fever
from fever.algos.off_policy import OffPolicyAlgorithm
from fever.config import RunConfig
from fever.envs.source import EnvSource
from fever.errors import FeverError
from fever.runs.player import Player
from fever.runs.run import Run
from fever.training.callbacks import Callback, TrainingInfo
from fever.training.evaluation import BEST_SHARE, Best, Evaluation
from fever.training.resume import resume
from tests.environments import ScenarioEnv

SMALL = {"envs": 2, "steps": 16, "minibatch": 32, "epochs": 1}
EVERY = {"eval_every": 64, "eval_episodes": 3}  # every second iteration


def give(monkeypatch: Any, means: list[float]) -> None:
    """Have evaluations find these mean returns, one after the other."""
    run, left = Evaluation.run, list(means)

    def found(self: Evaluation, weights: Any) -> dict[str, Any]:
        return {**run(self, weights), "return_mean": left.pop(0)}

    monkeypatch.setattr(Evaluation, "run", found)


class Rows(Callback):
    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []

    def on_evaluation(self, info: TrainingInfo, row: dict[str, Any]) -> None:
        assert info.metrics["eval/return_mean"] == row["return_mean"]
        self.rows.append(row)


def test_evaluations_have_rows_metrics_and_a_time_of_their_own(tmp_path: Path) -> None:
    listener = Rows()
    result = fever.train(
        ScenarioEnv, runs=tmp_path, stop={"iterations": 5}, eval_every="0.064k", eval_episodes=3,
        eval_env_kwargs={"length": 4}, callbacks=[listener], **SMALL,
    )  # fmt: skip
    rows = result.run.evaluations()
    assert [(row["iteration"], row["steps"]) for row in rows] == [(2, 64), (4, 128)]
    assert listener.rows == [{**row, "return_interval": tuple(row["return_interval"])} for row in rows]
    first, second = rows
    assert first["returns"] == second["returns"]  # the same episodes again, whatever was learned
    assert len(set(first["returns"])) == first["distinct_starts"] == 3
    assert first["lengths"] == [4, 4, 4]
    low, high = first["return_interval"]
    assert first["return_mean"] == pytest.approx((low + high) / 2)
    metrics = result.run.metrics()
    assert [("eval/return_mean" in row) for row in metrics] == [False, True, False, True, False]
    assert metrics[1]["eval/return_std"] == pytest.approx(np.std(first["returns"]))
    assert metrics[1]["eval/length_mean"] == 4
    summary = result.summary
    assert summary["evaluation"] == {"steps": 128, "return_mean": second["return_mean"]}
    assert 0 < summary["breakdown"]["evaluation"] < summary["seconds"]
    assert min(summary["breakdown"].values()) >= 0  # what is in two parts would be missing in `other`
    sampled = summary["steps"] / (summary["seconds"] - summary["breakdown"]["evaluation"])
    assert summary["steps_per_second"] == pytest.approx(sampled, rel=0.02)
    assert result.run.config.eval_env_kwargs == {"length": 4}


def test_episodes_of_evaluation_are_not_those_of_training(tmp_path: Path) -> None:
    result = fever.train(ScenarioEnv, runs=tmp_path, stop={"iterations": 4}, **EVERY, **SMALL)
    trained = {round(row["return"], 3) for row in result.run.episodes()}
    assert not trained & {round(value, 3) for value in result.run.evaluations()[0]["returns"]}


def test_the_best_checkpoint_is_the_best_evaluation_and_is_kept(tmp_path: Path, monkeypatch: Any) -> None:
    give(monkeypatch, [1.0, 5.0, 2.0, 3.0, 4.0, 0.0])
    result = fever.train(ScenarioEnv, runs=tmp_path, stop={"iterations": 13}, **EVERY, **SMALL)
    best = result.run.checkpoint("best")
    assert (best.iteration, best.score, best.score_of) == (4, 5.0, "evaluation")
    assert result.run.checkpoint("last").iteration == 13
    assert result.run.checkpoint("last").score is None  # it was not evaluated
    assert [one.iteration for one in result.run.checkpoints()] == [2, 4, 13]


def test_a_resumed_run_keeps_the_best_and_evaluates_at_the_same_steps(tmp_path: Path, monkeypatch: Any) -> None:
    give(monkeypatch, [1.0, 5.0, 3.0, 5.0])
    result = fever.train(ScenarioEnv, runs=tmp_path, name="a", stop={"iterations": 5}, **EVERY, **SMALL)
    stop = result.run.config.stop.model_copy(update={"iterations": 7})
    again = resume(result.run, result.run.config.model_copy(update={"stop": stop}))
    assert [row["iteration"] for row in again.run.evaluations()] == [2, 4, 6]
    assert again.run.checkpoint("best").iteration == 4
    assert [one.iteration for one in again.run.checkpoints()] == [4, 5, 7]  # the evaluation after 6 was not the best
    stop = stop.model_copy(update={"iterations": 8})
    again = resume(again.run, again.run.config.model_copy(update={"stop": stop}))
    assert again.run.checkpoint("best").iteration == 8  # as good, and it has learned for longer


def test_the_goal_is_reached_when_an_evaluation_reaches_it(tmp_path: Path, monkeypatch: Any) -> None:
    give(monkeypatch, [1.0, 2000.0])
    stop = {"iterations": 9, "reward": 1000.0, "window": 1}
    result = fever.train(ScenarioEnv, runs=tmp_path, name="a", stop=stop, **EVERY, **SMALL)
    assert (result.stop_reason, result.summary["iterations"]) == ("reward", 4)
    best = result.run.checkpoint("best")
    assert (best.iteration, best.score) == (4, 2000.0)
    assert best.met(result.run.config.stop) == "reward"
    with pytest.raises(FeverError, match=r"has met its stop rule \(reward\) already"):
        resume(result.run, result.run.config)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_an_evaluation_at_once_and_the_run_is_saved(tmp_path: Path, number: signal.Signals) -> None:
    late: list[int] = []

    class Endless(ScenarioEnv):
        """Its episodes of evaluation never end; a signal comes after a while."""

        def step(self, action: Any) -> Any:
            if self.length == 0 and self.count == 100:
                signal.raise_signal(number)
                late.append(self.count)  # not reached: it is raised in the very step
            return super().step(action)

    more = {"eval_env_kwargs": {"length": 0}}
    result = fever.train(Endless, runs=tmp_path, name="a", stop={"iterations": 50}, **more, **EVERY, **SMALL)
    assert not late
    assert (result.stop_reason, result.summary["iterations"]) == ("interrupted", 2)
    run = Run.open("a", tmp_path)
    assert (run.checkpoint().iteration, len(run.metrics()), run.evaluations()) == (2, 2, [])
    stop = run.config.stop.model_copy(update={"iterations": 3})
    config = run.config.model_copy(update={"stop": stop, "eval_env_kwargs": {}})
    again = resume(run, config, source=EnvSource(ScenarioEnv))
    assert [row["iteration"] for row in again.run.evaluations()] == [3]  # it is still due


def test_other_spaces_are_refused_before_anything_is_made(tmp_path: Path) -> None:
    with pytest.raises(FeverError, match=r"another observation space: its shape is \[\d+\] there and"):
        fever.train(
            "tests.environments:ScenarioEnv", runs=tmp_path / "runs", stop={"iterations": 2},
            eval_env_kwargs={"width": 2}, **EVERY, **SMALL,
        )  # fmt: skip
    assert list(tmp_path.iterdir()) == []


def test_rllib_is_told_to_use_its_own_evaluation(tmp_path: Path) -> None:
    with pytest.raises(FeverError, match=r"rllib:PPO has its own evaluation; .* evaluation_interval"):
        fever.train("CartPole-v1", "rllib:PPO", runs=tmp_path, eval_every=100)
    assert list(tmp_path.iterdir()) == []


def test_environments_of_evaluation_are_made_once_and_closed(tmp_path: Path, monkeypatch: Any) -> None:
    made, closed = [], []
    make, close = Player._make, Player.close
    monkeypatch.setattr(Player, "_make", lambda self, first: (made.append(1), make(self, first))[1])
    monkeypatch.setattr(Player, "close", lambda self: (closed.append(1), close(self))[1])
    fever.train(ScenarioEnv, runs=tmp_path, stop={"iterations": 6}, **EVERY, **SMALL)
    assert (len(made), len(closed)) == (1, 1)


def test_environments_that_begin_alike_play_the_same_episodes_in_every_evaluation(tmp_path: Path) -> None:
    kwargs = {"drawn": "stream"}
    result = fever.train(ScenarioEnv, env_kwargs=kwargs, runs=tmp_path, stop={"iterations": 4}, **EVERY, **SMALL)
    first, second = result.run.evaluations()
    assert first["distinct_starts"] == 3
    assert first["returns"] == second["returns"]


def test_saving_the_best_of_training_takes_little_of_the_time() -> None:
    best = Best(RunConfig(env="X-v0"))
    assert best.is_beaten(1.0)
    assert not best.is_beaten(None)
    best.saved(1.0, 0.01)
    assert not best.is_beaten(2.0)  # too soon
    time.sleep(0.01 / BEST_SHARE)
    assert best.is_beaten(2.0)
    assert not best.is_beaten(1.0)


def test_the_best_of_training_is_saved_when_it_happens(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr("fever.training.evaluation.BEST_SHARE", 1e9)  # an iteration takes less time than saving

    class Falling(ScenarioEnv):
        """Ever better until the 200th episode, then ever worse."""

        episodes = 0

        def reset(self, **arguments: Any) -> Any:
            Falling.episodes += 1
            return super().reset(**arguments)

        def step(self, action: Any) -> Any:
            observation, _, ended, cut, info = super().step(action)
            return observation, -float(abs(Falling.episodes - 200)), ended, cut, info

    result = fever.train(Falling, runs=tmp_path, stop={"iterations": 60}, **SMALL)
    best = result.run.checkpoint("best")
    assert best.score_of == "training"
    assert best.score is not None
    assert 10 <= best.iteration <= 40  # about 11 episodes end in an iteration; the last checkpoints are far worse
    assert result.run.checkpoint("last").score < best.score - 100


def test_a_policy_that_learned_on_does_not_replace_the_evaluated_one(tmp_path: Path, monkeypatch: Any) -> None:
    """An iteration of replay that a signal cuts has learned: it gets a checkpoint of its own, without the score."""
    give(monkeypatch, [5.0] * 9)
    checkpoints: list[Any] = []
    real = OffPolicyAlgorithm.finish

    def finish(self: Any, *arguments: Any) -> Any:
        found = real(self, *arguments)
        if (tmp_path / "a/checkpoints/00000001").is_dir() and self.steps > 300:
            checkpoints.append(Run(tmp_path / "a").checkpoint("1").arrays("policy/"))
            signal.raise_signal(signal.SIGINT)
        return found

    monkeypatch.setattr(OffPolicyAlgorithm, "finish", finish)
    small = {"warmup": 20, "batch": 8, "updates": 2, "report_steps": 200, "envs": 2, "hidden": (8,)}
    result = fever.train("CartPole-v1", "dqn", runs=tmp_path, name="a", stop={"steps": 5000}, eval_every=1, **small)
    assert result.stop_reason == "interrupted"
    best, last = result.run.checkpoint("best"), result.run.checkpoint("last")
    assert (best.iteration, best.score, last.iteration, last.score) == (1, 5.0, 2, None)
    for name, value in best.arrays("policy/").items():
        np.testing.assert_array_equal(value, checkpoints[0][name])


def test_scores_with_other_arguments_of_evaluation_are_others(tmp_path: Path, monkeypatch: Any) -> None:
    give(monkeypatch, [9.0, 1.0, 2.0])
    result = fever.train(ScenarioEnv, runs=tmp_path, stop={"iterations": 2}, **EVERY, **SMALL)
    config = result.run.config
    stop = config.stop.model_copy(update={"iterations": 4})
    again = resume(result.run, config.model_copy(update={"stop": stop, "eval_env_kwargs": {"length": 5}}))
    assert again.run.checkpoint("best").iteration == 4  # not the 9 of an easier task


def test_the_live_panel_ends_with_an_evaluation(tmp_path: Path) -> None:
    words = ("train", "CartPole-v1", "--stop-steps", "3k", "--eval-every", "1k", "--eval-episodes", "2", "--name", "a")
    command = shlex.join([sys.executable, "-m", "fever", *words])
    done = subprocess.run(
        ["script", "-qec", command, "/dev/null"], cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stdout
    assert "evaluation" in done.stdout
    assert Run(tmp_path / "runs/a").status == "steps"
