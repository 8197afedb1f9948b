"""A2C: its settings make PPO's update the gradient step of actor-critic."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fever.algos.a2c import A2C, A2CConfig
from fever.algos.on_policy import advantages_of, values_of
from fever.algos.optimizer import Optimizer
from fever.config import validate
from fever.envs.source import EnvSource
from fever.errors import FeverError
from tests.factories import make_sampler, make_task

CARTPOLE = EnvSource("CartPole-v1")


def make(envs: int = 4, **settings: Any) -> A2C:
    return A2C(A2CConfig(**settings), make_task(CARTPOLE, envs))


def test_an_update_is_one_step_along_the_gradient_of_actor_critic() -> None:
    plain = {"normalize_observations": False, "normalize_rewards": False, "max_gradient_norm": 1e9}
    a2c = make(hidden=(8,), entropy_coefficient=0.01, optimizer="sgd", learning_rate=0.1, **plain)
    sampler = make_sampler(a2c, CARTPOLE, 4)
    fragment = [sampler.sample(a2c.weights()) for _ in range(4)][-1]
    batch, before = fragment.arrays, np.asarray(a2c.params)
    values = values_of(a2c.network, a2c.weights(), batch)
    advantages = advantages_of(values, batch, 0.99, 1.0)
    returns = advantages + values[:-1]

    def objective(vector: Any) -> Any:
        params = a2c.flat.unpack(vector)
        observations = batch["observations"][:-1]
        outputs, value = a2c.network.policy(params, observations, jnp), a2c.network.value(params, observations, jnp)
        log_prob = a2c.distribution.log_prob(outputs, batch["actions"], jnp)
        entropy = a2c.distribution.entropy(outputs, jnp)
        return (-advantages * log_prob + 0.5 * (value - returns) ** 2 - 0.01 * entropy).mean()

    metrics = a2c.learn([fragment])
    expected = before - 0.1 * np.asarray(jax.grad(objective)(before))
    np.testing.assert_allclose(a2c.params, expected, rtol=1e-4, atol=1e-5)
    assert (metrics["updates"], metrics["clip_fraction"]) == (1, 0)
    assert metrics["kl"] == pytest.approx(0, abs=1e-5)


@pytest.mark.parametrize(("envs", "steps"), [(1, 5), (7, 3), (16, 5)])
def test_the_minibatch_is_the_batch(envs: int, steps: int) -> None:
    assert make(envs, steps=steps)._orders().shape == (1, envs * steps)


def test_arguments_of_rmsprop_are_for_rmsprop_alone() -> None:
    assert Optimizer(A2CConfig()).kwargs == {"decay": 0.99, "eps": 1e-5}
    assert Optimizer(A2CConfig(optimizer="adam"), adam_epsilon=1e-5).kwargs == {"eps": 1e-5}
    assert Optimizer(A2CConfig(optimizer="rmsprop", optimizer_kwargs={"decay": 0.9})).kwargs == {"decay": 0.9}
    with pytest.raises(FeverError, match="adam has no argument decay"):
        validate(A2CConfig, {"optimizer": "adam", "optimizer_kwargs": {"decay": 0.9}}, "a2c")
