"""TRPO: batches of whole episodes, its state, and what it learns."""

from __future__ import annotations

import copy
import json
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import fever
from fever.algos.base import SamplingContext
from fever.algos.trpo import METRICS, TRPO, episode_statistics
from fever.envs.source import EnvSource
from fever.errors import FeverError
from fever.runs.evaluate import evaluate, source_of
from fever.sampling.rollouts import LocalRollouts
from fever.sampling.spec import Episode, Fragment
from fever.training.resume import resume
from tests.algos.trpo_reference import (
    Batch,
    assert_same,
    collect,
    enlarge,
    make,
    policy_of,
    sampler,
    set_weights,
    value_of,
)
from tests.environments import CounterEnv, DrawnEnv, MaskedEnv
from tests.helpers import SEEDS


def episodes(target: Any = DrawnEnv, wanted: int = 240, **settings: Any) -> tuple[TRPO, LocalRollouts]:
    """240 steps and a last episode of at most 60 fit into 300 rows."""
    trpo = make(target, timesteps_per_batch=wanted, **settings)
    pool = trpo.start(SamplingContext(EnvSource(target), Path("unused"), 0))
    assert isinstance(pool, LocalRollouts)
    return trpo, pool


def test_episodes_of_any_length_are_one_compilation_and_more_rows_one_more() -> None:
    trpo, pool = episodes()
    trpo._jitted_update = jax.jit(trpo._update)
    asked, collect = [], pool.collect
    pool.collect = lambda first, steps: asked.append((first, steps)) or collect(first, steps)  # type: ignore
    taken, made = [], [0]
    for number, iteration in zip(range(6), trpo.train(pool), strict=False):
        taken.append(sum(part.steps for part in iteration.reports))
        made.append(len(iteration.reports))
        assert asked[-1] == (sum(made[:-1]), 240)
        assert (trpo.steps, trpo.rollouts, trpo.rows) == (sum(taken), sum(made), 300)
        assert [part.version for part in iteration.reports] == [number + 1] * made[-1]
        assert iteration.metrics["batch_episodes"] == made[-1]
        assert trpo._jitted_update._cache_size() == 1
    assert len(set(taken)) > 3
    pool.broadcast(trpo.weights())
    more = pool.collect(trpo.rollouts, 400)
    metrics = trpo.learn(more)
    steps = sum(part.steps for part in more)
    assert np.isfinite(list(metrics.values())).all()
    assert (trpo.rows, trpo.steps) == (int(steps * 1.5), sum(taken) + steps)
    for _ in zip(range(2), trpo.train(pool), strict=False):
        assert trpo._jitted_update._cache_size() == 2


def test_statistics_of_a_batch_of_counters() -> None:
    """Their episodes have by turns 3 steps and a return of 6, and 4 steps and a return of 10."""
    trpo, pool = episodes(CounterEnv, wanted=14, normalize_rewards=False, value_minibatch=10**6)
    enlarge(trpo)
    start, weights = policy_of(trpo), trpo.weights()
    iteration = next(trpo.train(pool))
    metrics = iteration.metrics
    assert [part.steps for part in iteration.reports] == [3, 4, 3, 4]
    expected = {
        "batch_episodes": 4, "batch_return_mean": 8, "batch_return_sem": 1, "batch_return_max": 10,
        "batch_length_mean": 3.5, "batch_length_max": 4,
    }  # fmt: skip
    assert {name: metrics[name] for name in expected} == expected
    assert metrics["rollout_seconds"] == iteration.seconds["sample"] > 0
    assert metrics["optimization_seconds"] == iteration.seconds["learn"] > 0
    assert set(METRICS) | {"steps_refused", "updates"} <= metrics.keys()
    # The same in float64, of the four episodes as one column: their ends cut it.
    joined = copy.copy(iteration.reports[0])
    names = iteration.reports[0].arrays.keys() - {"state", "observations"}
    joined.arrays = {name: np.concatenate([part.arrays[name] for part in iteration.reports]) for name in names}
    parts = [part.arrays["observations"][:-1] for part in iteration.reports]
    joined.arrays["observations"] = np.concatenate([*parts, iteration.reports[-1].arrays["observations"][-1:]])
    new, fitted = policy_of(trpo), trpo.value_flat.unpack(np.asarray(value_of(trpo)))
    set_weights(trpo, weights)
    trpo.weights = lambda: weights  # type: ignore[method-assign]
    batch = Batch(trpo, joined)
    after = batch.values(fitted, batch.rows)
    assert len(batch.returns) == 14
    by_hand = {
        "explained_variance": batch.explained(batch.old_values),
        "explained_variance_after": batch.explained(after),
        "entropy_before": batch.entropy(start),
        "entropy": batch.entropy(new),
        "value_loss_before": np.square(batch.returns - batch.old_values).mean(),
        "value_loss": np.square(batch.returns - after).mean(),
        "kl_before": 0.0,
        "kl": batch.kl(new),
        "surrogate_before": batch.surrogate(start),
        "surrogate": batch.surrogate(new),
    }
    assert {name: metrics[name] for name in by_hand} == pytest.approx(by_hand, rel=2e-3, abs=2e-6)
    assert metrics["entropy_before"] != pytest.approx(metrics["entropy"], rel=1e-4)


def test_statistics_of_a_batch_without_an_end_and_with_one() -> None:
    fragment = Fragment(8, [], 0, 1, {}, "", {})
    assert episode_statistics([fragment, fragment]) == {"batch_episodes": 0}
    row = episode_statistics([fragment, replace(fragment, episodes=[Episode(5.0, 3, 0, {})])])
    assert row["batch_episodes"] == 1
    assert (row["batch_return_mean"], row["batch_return_sem"], row["batch_return_max"]) == (5, 0, 5)
    assert (row["batch_length_mean"], row["batch_length_max"]) == (3, 3)


def test_a_limit_of_steps_without_whole_episodes_is_refused() -> None:
    with pytest.raises(
        FeverError, match=r"^timestep_limit goes with timesteps_per_batch; .*--env-kwargs .*max_episode"
    ):
        make(timestep_limit=10)


def test_a_limit_of_steps_cuts_episodes() -> None:
    trpo, pool = episodes(timestep_limit=4)
    pool.broadcast(trpo.weights())
    parts = trpo.collect(pool)
    assert {part.steps for part in parts} == {1, 2, 4}
    assert 240 <= sum(part.steps for part in parts) < 244


# State.


@pytest.mark.parametrize("whole", [False, True], ids=["fragments", "episodes"])
def test_a_restored_algorithm_learns_on_as_if_nothing_had_happened(whole: bool) -> None:
    settings: dict[str, Any] = {"timesteps_per_batch": 240} if whole else {}
    target = DrawnEnv if whole else CounterEnv
    original, restored = (make(target, seed=seed, **settings) for seed in (1, 2))

    def parts() -> Iterator[list[Fragment]]:
        if not whole:
            sampling = sampler(original)
            while True:
                yield [sampling.sample(original.weights())]
        pool = original.start(SamplingContext(EnvSource(target), Path("unused"), 0))
        while True:
            pool.broadcast(original.weights())
            yield original.collect(pool)

    batches = parts()
    original.learn(next(batches))
    state = original.state()
    facts = json.loads(json.dumps(state.facts))
    state = state._replace(facts=facts, arrays={name: value.copy() for name, value in state.arrays.items()})
    restored.restore(state, original.weights())
    assert_same(original, restored)
    for _ in range(2):
        batch = next(batches)
        assert original.learn(batch) == restored.learn(batch)
        assert_same(original, restored)
    for name in ("steps", "rollouts", "refused", "rows"):
        assert getattr(original, name) == getattr(restored, name)
    assert original.normalizer.returns.count == restored.normalizer.returns.count == original.steps


def test_a_run_of_whole_episodes_is_the_same_when_it_was_interrupted(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"algo": "trpo", "runs": tmp_path, "hidden": [8], "timesteps_per_batch": 150}
    whole = fever.train("CartPole-v1", stop={"iterations": 5}, **settings).run
    run = fever.train("CartPole-v1", stop={"iterations": 2}, **settings).run
    stop = run.config.stop.model_copy(update={"iterations": 5})
    resume(run, run.config.model_copy(update={"stop": stop}))
    found = run.checkpoint().arrays("policy/")
    for name, array in whole.checkpoint().arrays("policy/").items():
        np.testing.assert_array_equal(array, found[name], err_msg=name)
    before, after = whole.metrics(), run.metrics()
    for name in METRICS:
        assert [row[name] for row in before] == [row[name] for row in after], name
    assert [row["return"] for row in whole.episodes()] == [row["return"] for row in run.episodes()]


def test_a_run_is_the_same_when_it_was_interrupted_in_the_middle_of_learning(tmp_path: Path, monkeypatch: Any) -> None:
    settings: dict[str, Any] = {"algo": "trpo", "runs": tmp_path, "hidden": [8], "timesteps_per_batch": 150}
    whole = fever.train("CartPole-v1", stop={"iterations": 4}, **settings).run
    orders, calls = TRPO._orders, []

    def interrupt(self: TRPO, batch: Any) -> Any:
        calls.append(orders(self, batch))
        if len(calls) == 2:
            signal.raise_signal(signal.SIGINT)
        return calls[-1]

    monkeypatch.setattr(TRPO, "_orders", interrupt)
    run = fever.train("CartPole-v1", stop={"iterations": 4}, **settings).run
    assert run.status == "interrupted"
    resume(run, run.config)
    found = run.checkpoint().arrays()
    for name, array in whole.checkpoint().arrays().items():
        np.testing.assert_array_equal(array, found[name], err_msg=name)


def test_one_seed_gives_one_training_and_another_seed_another() -> None:
    here, there, other = make(seed=3), make(seed=3), make(seed=4)
    fragment = collect(here)
    for trpo in (here, there, other):
        trpo.learn([fragment])
    assert_same(here, there)
    assert not np.allclose(policy_of(here), policy_of(other), atol=1e-4)


# Whole trainings.


@pytest.mark.parametrize(
    ("whole", "kwargs"),
    [({}, {}), ({"timesteps_per_batch": 100}, {"action_space": "multidiscrete", "parts": True})],
    ids=["fragments", "episodes"],
)
def test_masks_are_kept_to(whole: dict[str, Any], kwargs: dict[str, Any], tmp_path: Path) -> None:
    """The environment raises when it gets a forbidden action."""
    result = fever.train(
        MaskedEnv,
        "trpo",
        env_kwargs=kwargs,
        envs=4,
        steps=25,
        hidden=[8],
        runs=tmp_path,
        stop={"iterations": 4},
        **whole,
    )
    assert all(np.isfinite(value).all() for value in result.policy.params.values())
    rows = result.run.metrics()
    assert all(0 < row["kl"] <= 0.01001 for row in rows)
    assert all(abs(row["kl_before"]) < 1e-6 for row in rows)
    assert len(evaluate(result.run.checkpoint(), source_of(result.run), 5, deterministic=False).returns) == 5


@pytest.mark.parametrize("seed", SEEDS)
def test_cartpole_is_solved(tmp_path: Path, seed: int) -> None:
    result = fever.train("CartPole-v1", "trpo", seed=seed, runs=tmp_path, stop={"reward": 475, "steps": 200_000})
    assert result.stop_reason == "reward"
    assert max(row["kl"] for row in result.run.metrics()) <= 0.01001


def test_cartpole_is_solved_with_whole_episodes(tmp_path: Path) -> None:
    stop = {"reward": 475, "steps": 200_000}
    result = fever.train("CartPole-v1", "trpo", timesteps_per_batch=2048, runs=tmp_path, stop=stop)
    assert result.stop_reason == "reward"


def test_pendulum_swings_up(tmp_path: Path) -> None:
    result = fever.train("Pendulum-v1", "trpo", gamma=0.9, runs=tmp_path, stop={"reward": -250, "steps": 200_000})
    assert result.stop_reason == "reward"
