"""Sizes of batches: as stated with any number of workers; larger with `--scale-batch`, with what goes with that."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from fever.algos.a2c import A2CConfig
from fever.algos.batch import environments, fragment_steps, fragments_of, note_of, require_scalable, scaled, share
from fever.algos.dqn import DQNConfig
from fever.algos.impala import APPOConfig, Impala, ImpalaConfig
from fever.algos.on_policy import shuffled_minibatches
from fever.algos.ppo import PPO, PPOConfig
from fever.algos.trpo import TRPO, TRPOConfig
from fever.errors import FeverError
from tests.environments import CounterEnv
from tests.factories import make_sampler, make_task

SIZES = [(steps, envs, workers) for steps in (1, 5, 128) for envs in (1, 3, 8, 64) for workers in (0, 1, 2, 3, 7, 100)]


@pytest.mark.parametrize(("steps", "envs", "workers"), SIZES)
def test_a_batch_is_what_is_stated_and_less_than_one_step_more(steps: int, envs: int, workers: int) -> None:
    each, length = share(envs, workers), fragment_steps(steps, envs, workers)
    everywhere = max(1, workers) * each
    assert each >= 1
    assert everywhere >= envs
    assert everywhere - envs < max(1, workers), "no worker has an environment too many"
    assert steps * envs <= length * everywhere < steps * envs + everywhere
    if envs % max(1, workers) == 0:
        assert (length, everywhere) == (steps, envs)


@pytest.mark.parametrize(
    ("envs", "workers", "fragments"), [(8, 0, 1), (8, 1, 1), (8, 2, 2), (8, 3, 3), (8, 5, 4), (8, 8, 8), (8, 100, 8)]
)
def test_an_asynchronous_batch_has_as_many_fragments_as_the_environments_fill(
    envs: int, workers: int, fragments: int
) -> None:
    assert fragments_of(envs, workers) == fragments
    assert abs(fragments * share(envs, workers) - envs) <= share(envs, workers) / 2
    impala = Impala(ImpalaConfig(hidden=(4,), steps=4), make_task(CounterEnv, envs, workers))
    assert (impala.fragments, impala.fragment_steps) == (fragments, 4)


def test_with_scale_batch_every_worker_has_all_that_are_stated() -> None:
    assert environments(8, 0, scale=True) == environments(8, 1, scale=True) == (8, 8)
    assert environments(8, 4, scale=True) == (32, 8)
    assert fragment_steps(128, 32, 4) == 128
    assert environments(8, 4, scale=False) == (8, 2)


@pytest.mark.parametrize("core", ["none", "lstm"])
@pytest.mark.parametrize("workers", [0, 1, 2, 3, 4, 5, 16])
def test_ppo_takes_as_many_gradient_steps_of_the_same_size(workers: int, core: str) -> None:
    config = PPOConfig(steps=24, minibatch=48, epochs=2, hidden=(4,), recurrent=core, recurrent_size=3)
    ppo = PPO(config, make_task(CounterEnv, 4, workers))
    orders, rows = ppo._orders(), ppo.fragment_steps * ppo.fragments * ppo.task.envs
    assert 96 <= rows < 96 + ppo.fragments * ppo.task.envs
    if core == "none":
        assert orders.shape == (4, 48)
        assert orders.max() < rows
    else:  # whole sequences: as many steps as fit
        assert orders.shape[1] == 48 // ppo.fragment_steps
        assert orders.max() < ppo.fragments * ppo.task.envs
    assert all(len(set(order.tolist())) == len(order) for order in orders)


@pytest.mark.parametrize("workers", [0, 2, 3, 16])
def test_a_batch_that_does_not_divide_evenly_is_learned_from(workers: int) -> None:
    """24 steps of 4 environments; three workers have 6 environments, 16 have as many as workers."""
    ppo = PPO(PPOConfig(steps=24, minibatch=48, epochs=1, hidden=(4,)), make_task(CounterEnv, 4, workers))
    trpo = TRPO(TRPOConfig(steps=24, hidden=(4,), value_minibatch=32), make_task(CounterEnv, 4, workers))
    for algorithm, updates in ((ppo, 2), (trpo, 3 * 10)):
        sampler = make_sampler(algorithm, CounterEnv, algorithm.task.envs)
        sampler.spec = dataclasses.replace(sampler.spec, steps=algorithm.fragment_steps)
        parts = [sampler.sample(algorithm.weights()) for _ in range(algorithm.fragments)]
        assert algorithm.learn(parts)["updates"] == updates
        assert algorithm.steps == sum(part.steps for part in parts)
        assert 96 <= algorithm.steps < 96 + algorithm.task.envs * algorithm.fragments


def test_rows_beyond_what_is_stated_make_no_gradient_step_of_their_own() -> None:
    """Five workers of one environment take 20 steps each where 96 are stated."""
    task = make_task(CounterEnv, 4, 5)
    ppo = PPO(PPOConfig(steps=24, minibatch=2, epochs=3, hidden=(4,)), task)
    trpo = TRPO(TRPOConfig(steps=24, value_minibatch=2, value_epochs=3, hidden=(4,)), task)
    assert (ppo.fragment_steps, ppo._orders().shape) == (20, (3 * 48, 2))
    assert trpo._orders({"rewards": np.zeros((20, 5))}).shape == (3 * 48, 2)


def test_minibatches_beyond_the_count_are_left_out() -> None:
    rng = np.random.default_rng(0)
    assert shuffled_minibatches(rng, 100, 10, 3).shape == (30, 10)
    orders = shuffled_minibatches(rng, 119, 10, 3, count=10)
    assert orders.shape == (30, 10)
    assert {len(set(epoch.ravel().tolist())) for epoch in orders.reshape(3, 100)} == {100}
    assert orders.max() > 100, "other rows are left out in every epoch"


@pytest.mark.parametrize(
    ("settings", "workers", "expected"),
    [
        (PPOConfig(), 4, {"minibatch": 1024, "learning_rate": 6e-4}),
        (PPOConfig(minibatch=None), 4, {"minibatch": None, "learning_rate": 6e-4}),
        (PPOConfig(optimizer="sgd", learning_rate=0.1), 4, {"minibatch": 1024, "learning_rate": 0.4}),
        (PPOConfig(optimizer="lion"), 9, {"minibatch": 2304, "learning_rate": 9e-4}),
        (A2CConfig(), 4, {"minibatch": None, "learning_rate": 1.4e-3}),
        (TRPOConfig(), 4, {"value_minibatch": 512, "value_learning_rate": 2e-3, "max_kl": 0.01}),
        (ImpalaConfig(), 4, {"learning_rate": 2e-3, "minibatches": 4, "fragments": None}),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, PPOConfig | TRPOConfig | ImpalaConfig) else None,
)
def test_what_grows_with_a_batch(settings: Any, workers: int, expected: dict[str, Any]) -> None:
    require_scalable("it", settings)
    found, line = scaled(settings, workers)
    assert {name: getattr(found, name) for name in expected} == pytest.approx(expected)
    same = {name: value for name, value in settings if name not in expected}
    assert {name: getattr(found, name) for name in same} == same
    assert line.startswith(f"--scale-batch: {workers} times the batch, so ")
    assert all(f"{name}=" in line for name in expected if getattr(found, name) != getattr(settings, name))
    assert scaled(settings, 1)[0] == scaled(settings, 0)[0] == settings


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (DQNConfig(), "the batches of it do not depend on workers"),
        (None, "the batches of it do not depend on workers"),
        (TRPOConfig(timesteps_per_batch=100), "timesteps_per_batch=100 sets their size"),
        (APPOConfig(fragments=3), "fragments=3 sets their size"),
    ],
)
def test_batches_of_a_size_of_their_own_are_not_scaled(settings: Any, said: str) -> None:
    with pytest.raises(FeverError, match=f"^--scale-batch .*{said}$"):
        require_scalable("it", settings)


def test_short_fragments_are_told() -> None:
    assert note_of(128, 16, 64) is None
    assert note_of(8, 4, 2) is None, "short already as stated"
    assert note_of(128, 10, 100) == (
        "100 workers share a batch: the fragment of each has 10 steps; --scale-batch enlarges the batch"
    )
    assert "has 1 step;" in str(note_of(128, 1, 1024))
    task = make_task(CounterEnv, 8, 100)
    assert "has 11 steps" in str(PPO(PPOConfig(hidden=(4,)), task).batch_note())
    crowd = make_task(CounterEnv, 8, 1000)
    assert "has 3 steps" in str(TRPO(TRPOConfig(hidden=(4,)), crowd).batch_note())
    assert TRPO(TRPOConfig(timesteps_per_batch=100, hidden=(4,)), crowd).batch_note() is None
    assert Impala(ImpalaConfig(hidden=(4,)), task).batch_note() is None
    old = Impala(ImpalaConfig(hidden=(4,), max_lag=20), task).batch_note()
    assert "100 workers make 25 batches at a time, and fragments older than max_lag=20" in str(old)
