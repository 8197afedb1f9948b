"""Optimisers against the steps of their papers, written out with NumPy; schedules; what checkpoints keep."""

from __future__ import annotations

import re
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fever.algos.base import Task
from fever.algos.optimizer import (
    Optimizer,
    OptimizerName,
    OptimizerSettings,
    Schedule,
    from_named_arrays,
    named_arrays,
    scheduled,
)
from fever.algos.ppo import PPO, PPOConfig
from fever.config import validate
from fever.errors import FeverError

RATE = 0.01


@pytest.mark.parametrize("max_norm", [None, 0.5, 100.0])
def test_adam_takes_the_steps_of_its_paper(max_norm: float | None) -> None:
    optimizer = Optimizer(OptimizerSettings(), max_norm, adam_epsilon=1e-3)
    params = expected = np.zeros(3)
    state = optimizer.init(jnp.zeros(3))
    mean = square = np.zeros(3)
    for step, gradient in enumerate(np.random.default_rng(0).normal(size=(5, 3)), 1):
        params, state = optimizer.step(jnp.asarray(params), state, jnp.asarray(gradient), RATE)
        norm = np.sqrt((gradient**2).sum())
        if max_norm is not None and norm > max_norm:
            gradient = gradient / norm * max_norm
        mean, square = 0.9 * mean + 0.1 * gradient, 0.999 * square + 0.001 * gradient**2
        direction = mean / (1 - 0.9**step) / (np.sqrt(square / (1 - 0.999**step)) + 1e-3)
        expected = expected - RATE * direction
        np.testing.assert_allclose(params, expected, rtol=1e-4)


@pytest.mark.parametrize("name", get_args(OptimizerName))
def test_every_optimizer_goes_downhill_and_survives_a_checkpoint(name: Any) -> None:
    optimizer = Optimizer(OptimizerSettings(optimizer=name), max_norm=1.0)
    step = jax.jit(lambda params, state, rate: optimizer.step(params, state, 2 * params, rate))
    params = jnp.asarray([1.0, -2.0, 3.0])
    state = optimizer.init(params)
    for _ in range(5):
        before = float((params**2).sum())
        params, state = step(params, state, RATE)
        assert float((params**2).sum()) < before
    arrays = named_arrays("optimizer", state)
    assert all(isinstance(array, np.ndarray) and key.startswith("optimizer/") for key, array in arrays.items())
    restored = from_named_arrays("optimizer", optimizer.init(params), arrays)
    for here, there in zip(step(params, state, RATE), step(params, restored, RATE), strict=True):
        jax.tree.map(np.testing.assert_array_equal, here, there)


def test_the_learning_rate_of_each_step_is_the_one_that_is_given() -> None:
    optimizer = Optimizer(OptimizerSettings(optimizer="sgd"))
    params, state = optimizer.step(jnp.ones(2), optimizer.init(jnp.ones(2)), jnp.ones(2), 0.25)
    params, state = optimizer.step(params, state, jnp.ones(2), 0.5)
    np.testing.assert_allclose(params, 0.25)


def test_arguments_of_an_optimizer() -> None:
    settings = OptimizerSettings(optimizer="sgd", optimizer_kwargs={"momentum": 0.5})
    optimizer, params = Optimizer(settings), jnp.zeros(1)
    state = optimizer.init(params)
    for expected in (-0.01, -0.025):  # the second step is 1 + 0.5 gradients long
        params, state = optimizer.step(params, state, jnp.ones(1), RATE)
        np.testing.assert_allclose(params, expected, rtol=1e-6)
    assert Optimizer(OptimizerSettings(), adam_epsilon=1e-5).kwargs == {"eps": 1e-5}
    assert Optimizer(OptimizerSettings(optimizer_kwargs={"eps": 1e-3}), adam_epsilon=1e-5).kwargs == {"eps": 1e-3}
    assert Optimizer(OptimizerSettings(optimizer="adamw"), adam_epsilon=1e-5).kwargs == {}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"optimizer": "adm"}, "ppo: optimizer='adm' cannot be used: must be .* adam, .* sgd,"),
        (
            {"optimizer_kwargs": {"momentum": 0.9}},
            "ppo: optimizer_kwargs=.* adam has no argument momentum; it has b1, b2",
        ),
        ({"learning_rate_schedule": "square"}, "must be constant, linear, cosine or exponential"),
    ],
)
def test_what_does_not_exist_is_refused_in_one_sentence(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(FeverError, match=message):
        validate(PPOConfig, settings, "ppo")


@pytest.mark.parametrize(
    ("schedule", "values"),
    [
        ("constant", [2, 2, 2]),
        ("linear", [2, 1, 0]),
        ("cosine", [2, 1, 0]),
        ("exponential", [2, 0.2, 0.02]),
    ],
)
def test_schedules(schedule: Schedule, values: list[float]) -> None:
    assert [scheduled(2.0, schedule, progress) for progress in (0.0, 0.5, 1.0)] == pytest.approx(values)


def test_progress_is_the_share_of_steps() -> None:
    task = Task("a test", {}, {}, envs=1, total_envs=1, workers=0, seed=0, total_steps=200)
    assert [task.progress(steps) for steps in (0, 50, 200, 300)] == [0, 0.25, 1, 1]
    endless = Task("a test", {}, {}, envs=1, total_envs=1, workers=0, seed=0, total_steps=None)
    assert endless.progress(50) == 0


def test_a_checkpoint_of_another_optimizer_is_refused() -> None:
    observation, action = (
        {"type": "box", "shape": [2], "dtype": "float32"},
        {"type": "discrete", "sizes": [2], "starts": [0], "shape": []},
    )
    task = Task("a test", observation, action, envs=1, total_envs=1, workers=0, seed=0, total_steps=None)
    ppo, start = PPO(PPOConfig(steps=2, hidden=(4,)), task), PPO(PPOConfig(steps=2, hidden=(4,)), task).weights()
    state, size = ppo.state(), ppo.flat.size
    old = {
        "count": np.zeros((), np.int32),
        "mean": np.zeros(size),
        "square": np.zeros(size),
    }  # names of earlier versions
    arrays = {name: array for name, array in state.arrays.items() if not name.startswith("optimizer/")}
    arrays |= {f"optimizer/{name}": array for name, array in old.items()}
    sentence = "the checkpoint has no array optimizer/.* written by another version of fever or with another optimizer"
    with pytest.raises(FeverError, match=sentence):
        ppo.restore(state._replace(arrays=arrays), {name: array + 1 for name, array in start.items()})
    short = {name: array[:1] if array.ndim else array for name, array in state.arrays.items()}
    with pytest.raises(FeverError, match=re.escape("of the right shape")):
        ppo.restore(state._replace(arrays=short), start)
    np.testing.assert_array_equal(ppo.flat.pack(ppo.weights()), ppo.flat.pack(start))  # nothing was taken over
