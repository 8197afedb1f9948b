"""`fever eval`: seeds of episodes, scenarios that are alike, cut-off episodes, the interval, greedy and sampled."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

import fever
from fever.config import RunConfig
from fever.envs.contract import describe_spaces
from fever.envs.source import EnvContext, EnvSource
from fever.errors import FeverError
from fever.policy import Policy
from fever.policy.policy import network_for
from fever.runs.checkpoint import best_of
from fever.runs.evaluate import compare_sampled, evaluate, source_of
from fever.runs.player import Player, Scores, alike_sentence, episode_seeds
from fever.runs.run import Run
from fever.training.result import Result
from tests.environments import CounterEnv, NextStepCounters, SameStepCounters, ScenarioEnv
from tests.factories import random_weights
from tests.helpers import run_fever
from tests.training.test_trainer import Messages

SMALL = {"envs": 2, "steps": 16, "minibatch": 32, "epochs": 1}


@pytest.fixture(scope="module")
def scenario(tmp_path_factory: pytest.TempPathFactory) -> Result:
    """A run of one iteration on `ScenarioEnv`."""
    runs = tmp_path_factory.mktemp("runs")
    return fever.train("tests.environments:ScenarioEnv", runs=runs, name="a", stop={"iterations": 1}, **SMALL)


class Still:
    """A policy that always takes action 0, and notes how many rows it is asked for."""

    def __init__(self) -> None:
        self.rows: list[int] = []

    def reset(self) -> None: ...
    def keep(self, rows: np.ndarray) -> None: ...

    def act_encoded(self, observations: np.ndarray, first: Any, deterministic: bool) -> np.ndarray:
        self.rows.append(len(observations))
        return np.zeros(len(observations), np.int64)


def play(target: Any, episodes: int, policy: Any = None, **more: Any) -> Scores:
    kwargs = more.pop("kwargs", {})
    player = Player(EnvSource(target, kwargs), episodes, 5, EnvContext(), **more)
    try:
        return player.play(policy or Still())
    finally:
        player.close()


def test_every_episode_has_a_seed_of_its_own() -> None:
    scores = play(ScenarioEnv, 25)
    wanted = np.random.SeedSequence(5).generate_state(25)
    assert scores.seeds == episode_seeds(5, 25) == [int(seed) for seed in wanted]
    returns = [
        100 * np.random.Generator(np.random.PCG64(np.random.SeedSequence(seed))).random() for seed in scores.seeds
    ]
    np.testing.assert_allclose(scores.returns, returns, rtol=1e-6)
    assert (scores.distinct, scores.alike) == (25, False)
    assert play(ScenarioEnv, 12).seeds == scores.seeds[:12]
    np.testing.assert_array_equal(play(ScenarioEnv, 12).returns, scores.returns[:12])  # and is the same episode


def test_an_environment_that_ignores_seeds_is_told_of() -> None:
    scores = play(ScenarioEnv, 20, kwargs={"drawn": "never"})
    assert (scores.distinct, scores.alike) == (1, True)
    sentence = alike_sentence("my:Maze", 3, "20 episodes")
    assert sentence.startswith(
        "20 episodes of my:Maze with different seeds began with only 3 different observations: it "
    )


def test_scenarios_of_the_constructor_differ_in_all_episodes() -> None:
    wanted = [100 * np.random.default_rng(index).random() for index in range(25)]
    scores = play(ScenarioEnv, 25, kwargs={"drawn": "index"}, anew=True)  # waves of 9, 9 and 7
    np.testing.assert_allclose(scores.returns, wanted, rtol=1e-6)
    kept = play(ScenarioEnv, 25, kwargs={"drawn": "index"})
    assert kept.distinct == 9


@pytest.mark.parametrize("target", [CounterEnv, NextStepCounters, SameStepCounters])
def test_the_first_episode_of_each_environment_counts(target: Any) -> None:
    scores = play(target, 4)
    assert scores.lengths.tolist() == [3, 4, 5, 6]
    assert scores.returns.tolist() == [(index + 1) * sum(range(1, 4 + index)) for index in range(4)]
    assert scores.ends == ["terminated"] * 4
    cut = play(target, 4, max_steps=4)
    assert cut.lengths.tolist() == [3, 4, 4, 4]
    assert cut.ends == ["terminated", "terminated", "max_steps", "max_steps"]
    assert cut.returns.tolist() == [6, 20, 30, 40]


def test_environments_whose_episodes_have_ended_are_not_stepped() -> None:
    policy = Still()
    assert play(CounterEnv, 4, policy).lengths.sum() == sum(policy.rows)
    assert policy.rows == [4, 4, 4, 3, 2, 1]


def test_the_state_of_a_recurrent_policy_stays_with_its_episode() -> None:
    observation, action = describe_spaces("a test", spaces.Box(-1, 1, (3,)), spaces.Discrete(2))
    network = network_for(observation, action, hidden=(), recurrent="lstm", recurrent_size=4)
    params = random_weights(network)
    alone, policy = (Policy(observation, action, network, params) for _ in range(2))
    rows = np.random.default_rng(0).normal(size=(3, 4, 3)).astype(np.float32)
    for t in range(3):
        alone.act_encoded(rows[t, 2:], None, True)
    policy.act_encoded(rows[0], None, True)
    policy.keep(np.array([False, True, True, True]))
    policy.act_encoded(rows[1, 1:], None, True)
    policy.keep(np.array([False, True, True]))
    policy.act_encoded(rows[2, 2:], None, True)
    np.testing.assert_allclose(policy._state, alone._state, rtol=1e-5)


def made(returns: list[float]) -> Scores:
    return Scores(np.array(returns), np.ones(len(returns), np.int64), [0] * len(returns), [], None, 0.0)


def test_the_interval_is_students() -> None:
    low, high = made([1.0, 2.0, 3.0, 4.0]).interval  # type: ignore[misc]
    width = 3.182446 * math.sqrt(5 / 3 / 4)  # t for three degrees of freedom, from a table
    assert (low, high) == (pytest.approx(2.5 - width), pytest.approx(2.5 + width))
    assert made([1.0]).interval is None


def test_greedy_is_worse_only_by_more_than_chance() -> None:
    noise = [-1.0, 1.0] * 5
    assert made([12 + one for one in noise]).is_below(made([187 + one for one in noise]))
    assert not made([187 + one for one in noise]).is_below(made([12 + one for one in noise]))
    assert not made([12 + 50 * one for one in noise]).is_below(made([30 + 50 * one for one in noise]))
    assert not made([500.0] * 10).is_below(made([501.0] * 10))


def test_sampled_actions_are_compared_where_there_are_any(tmp_path: Path, scenario: Result) -> None:
    checkpoint, source = scenario.run.checkpoint(), source_of(scenario.run)
    greedy = evaluate(checkpoint, source, 14)
    sampled = compare_sampled(checkpoint, source, greedy)
    assert sampled is not None
    assert len(sampled.returns) == 7
    assert compare_sampled(checkpoint, source, greedy, wanted=False) is None
    values = {"warmup": 10, "updates": 1, "batch": 4}
    dqn = fever.train("tests.environments:ScenarioEnv", "dqn", runs=tmp_path, stop={"iterations": 1}, **values).run
    assert compare_sampled(dqn.checkpoint(), source, greedy, wanted=True) is None


def test_eval_says_what_it_found(scenario: Result) -> None:
    folder = scenario.run.path.parent
    words = ("eval", "a", "--runs", ".", "--episodes", "12")
    done = run_fever(*words, "--env-kwargs", '{"drawn": "never"}', "--json", cwd=folder)
    found = json.loads(done.stdout)
    assert (found["distinct_starts"], len(found["per_episode"]), found["return_mean"]) == (1, 12, 50)
    assert found["per_episode"][3] == {
        "episode": 3, "seed": episode_seeds(1_000_000, 4)[3], "return": 50.0, "length": 3, "end": "terminated",
    }  # fmt: skip
    assert "ignores reset(seed)" in found["notes"][0]
    done = run_fever(*words, "--max-steps", "2", "--table", "--no-compare", cwd=folder)
    assert done.stdout.count("max steps") == 12
    assert "95 % interval  0.0 to 0.0" in done.stdout
    assert "no checkpoint of a has a score (fewer than 20 episodes ended): the last one was used" in done.stderr
    done = run_fever(*words, "--env-kwargs", '{"width": 2}', cwd=folder)
    assert done.returncode == 2
    assert done.stderr.strip().endswith(
        "ScenarioEnv, which has another observation space: its shape is [1] there and [2] here"
    )


def test_another_environment_has_its_own_arguments(scenario: Result) -> None:
    assert source_of(scenario.run, None, {"length": 4}).kwargs == {"length": 4}
    assert source_of(scenario.run, "my:Maze").kwargs == {}
    run = Run(scenario.run.path)
    config = run.config.model_copy(update={"env_kwargs": {"drawn": "never", "length": 3}})
    run.write_config(config)
    try:
        assert source_of(run, run.config.env, {"length": 4}).kwargs == {"drawn": "never", "length": 4}
        assert source_of(run, "my:Maze", {"size": 1}) == EnvSource("my:Maze", {"size": 1})
    finally:
        run.write_config(config.model_copy(update={"env_kwargs": {}}))


def test_training_says_once_that_environments_start_alike(tmp_path: Path) -> None:
    from fever.training.trainer import train

    said = {}
    for drawn in ("never", "index", "reset"):
        settings = {name: value for name, value in SMALL.items() if name != "envs"}
        config = RunConfig(
            env="tests.environments:ScenarioEnv", env_kwargs={"drawn": drawn}, envs=2, settings=settings,
            stop={"iterations": 1}, runs=str(tmp_path), name=drawn,
        )  # fmt: skip
        display = Messages()
        train(config, display=display)
        said[drawn] = [text for text in display.said if "ignores reset(seed)" in text]
    assert [len(texts) for texts in said.values()] == [1, 0, 0]


def test_scores_of_evaluations_and_of_training_are_not_compared(tmp_path: Path) -> None:
    run = Run.create(RunConfig(env="X-v0", runs=str(tmp_path), name="a"), {})
    for iteration, (score, kind) in enumerate([(9.0, "training"), (1.0, "evaluation"), (2.0, "evaluation")], start=1):
        manifest = {"iteration": iteration, "score": score, "score_of": kind}
        run.save_checkpoint({"x": np.ones(1)}, manifest, keep=5)
    found = run.checkpoints()
    assert [best_of(found[:count]).iteration for count in (1, 2, 3)] == [1, 2, 3]  # type: ignore[union-attr]


def test_a_broken_environment_is_named(scenario: Result) -> None:
    with pytest.raises(FeverError, match="has no argument size"):
        evaluate(scenario.run.checkpoint(), source_of(scenario.run, None, {"size": 1}))


def test_few_episodes_say_nothing_of_convergence() -> None:
    def scores(*returns: float) -> Scores:
        return Scores(np.array(returns), np.ones(len(returns)), [0] * len(returns), [], None, 0.0)

    assert not scores(1.0).is_below(scores(9.0))
    assert scores(1.0, 1.1, 1.2, 0.9, 1.0).is_below(scores(9.0, 9.1, 9.2, 8.9, 9.0))


def test_episodes_differ_where_seeds_are_ignored_but_resets_draw(tmp_path: Path) -> None:
    settings = {"envs": 2, "steps": 16, "minibatch": 32, "epochs": 1}
    result = fever.train(ScenarioEnv, env_kwargs={"drawn": "stream"}, runs=tmp_path, stop={"iterations": 1}, **settings)
    found = [fever.evaluate(result, episodes=12) for _ in range(2)]
    assert found[0].distinct == 12
    assert found[0].returns.tolist() == found[1].returns.tolist()
    expected = 100 * np.random.default_rng(7).random(12)
    np.testing.assert_allclose(found[0].returns, expected, rtol=1e-5)


def test_an_environment_that_fails_in_an_evaluation_is_a_line_without_a_traceback(tmp_path: Path) -> None:
    words = ["tests.environments:UnreliableEnv", "--env-kwargs", '{"chance": 0.0}']
    assert run_fever("train", *words, "--stop-iterations", "1", "--name", "a", cwd=tmp_path).returncode == 0
    failing = '{"chance": 0.02, "close": "raise"}'
    done = run_fever("eval", "a", "--episodes", "10", "--env-kwargs", failing, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    lines = done.stderr.splitlines()
    assert all(line.startswith("fever: ") for line in lines), done.stderr
    assert any("played again: tests.environments:UnreliableEnv's step() raised ValueError" in line for line in lines)
