"""TRPO against plain formulas: the natural step, the trust region, the line search, the values' fit, its books."""

from __future__ import annotations

import logging
from typing import Any
from unittest.mock import Mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fever.algos.trpo import conjugate_gradients
from fever.envs.source import EnvSource
from fever.errors import TrainingError
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
from tests.environments import CounterEnv, IdentityEnv, ImageEnv, MaskedEnv, NextStepCounters
from tests.helpers import changed

PLAIN = {"normalize_rewards": False}
RAW = {"normalize_advantages": False, "gamma": 0.5, "gae_lambda": 0.3}
FAR = {"max_kl": 2.0, "cg_damping": 0.01, "line_search_shrink": 0.7}
CONTINUOUS = EnvSource(IdentityEnv, {"action_space": "box"})
REFUSED = "no step within the trust region improves the policy, which stays as it was"


# Conjugate gradients.


@pytest.mark.parametrize("size", [1, 2, 7, 30])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_conjugate_gradients_solve(size: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    root = rng.normal(size=(size, size))
    matrix = (root @ root.T / size + 0.1 * np.eye(size)).astype(np.float32)
    goal = rng.normal(size=size).astype(np.float32)
    solution, image = conjugate_gradients(lambda x: matrix @ x, jnp.asarray(goal), 3 * size)
    np.testing.assert_allclose(solution, np.linalg.solve(matrix.astype(np.float64), goal), rtol=2e-3, atol=2e-3)
    np.testing.assert_allclose(image, matrix @ solution, rtol=1e-3, atol=1e-4)


def test_every_step_of_conjugate_gradients_comes_nearer() -> None:
    rng = np.random.default_rng(0)
    root = rng.normal(size=(20, 20))
    matrix, goal = (root @ root.T / 20 + 0.1 * np.eye(20)).astype(np.float32), rng.normal(size=20).astype(np.float32)
    exact = np.linalg.solve(matrix.astype(np.float64), goal)
    errors = []
    for iterations in range(12):
        error = np.asarray(conjugate_gradients(lambda x: matrix @ x, jnp.asarray(goal), iterations)[0]) - exact
        errors.append(error @ matrix @ error)
    assert errors == sorted(errors, reverse=True)
    assert errors[0] > 3 * errors[3] > 9 * errors[11]


@pytest.mark.parametrize(("scales", "needed"), [([3.0] * 6, 1), ([1.0, 1.0, 4.0, 4.0, 4.0, 4.0], 2)])
def test_conjugate_gradients_stop_at_an_exact_solution(scales: list[float], needed: int) -> None:
    """One step for each different eigenvalue; further ones would divide by zero."""
    calls = []
    goal = jnp.asarray([1.0, 2.0, -1.0, 0.5, 2.0, 1.0])

    def product(x: Any) -> Any:
        jax.debug.callback(lambda: calls.append(1))
        return jnp.asarray(scales) * x

    solution, _ = conjugate_gradients(product, goal, 50)
    jax.effects_barrier()
    np.testing.assert_allclose(solution, goal / jnp.asarray(scales), rtol=1e-5)
    assert len(calls) == needed


def test_conjugate_gradients_of_nothing_are_nothing() -> None:
    np.testing.assert_array_equal(conjugate_gradients(lambda x: 0 * x, jnp.zeros(5), 10), np.zeros((2, 5)))


# The policy's step.


CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "categorical": (CounterEnv, {}),
    "gaussian": (CONTINUOUS, {}),
    "phantoms": (NextStepCounters, {}),
    "masks": (EnvSource(MaskedEnv, {"action_space": "multidiscrete"}), {}),
    "raw advantages": (CONTINUOUS, RAW),
    "large region": (CONTINUOUS, FAR),
}


@pytest.mark.parametrize("case", CASES)
def test_the_step_is_that_of_the_explicit_fisher_matrix(case: str) -> None:
    target, settings = CASES[case]
    trpo = make(target, **PLAIN, **settings)
    enlarge(trpo)
    fragment = collect(trpo, target)
    assert fragment.arrays["valid"].all() == (case != "phantoms")
    batch, config = Batch(trpo, fragment), trpo.config
    gradient, step = batch.natural_step()
    start = np.asarray(policy_of(trpo), np.float64)
    metrics = trpo.learn([fragment])
    taken = np.asarray(policy_of(trpo), np.float64) - start
    np.testing.assert_allclose(taken, metrics["step_fraction"] * step, rtol=0.03, atol=0.01 * np.abs(taken).max())
    assert np.abs(taken).max() > 1e-4
    assert metrics["gradient_norm"] == pytest.approx(np.linalg.norm(gradient), rel=1e-3)
    before = batch.surrogate(start)
    accepted = []
    for tried in range(config.line_search_steps):  # the line search by hand
        fraction = config.line_search_shrink**tried
        policy = start + fraction * step
        gain, wanted = batch.surrogate(policy) - before, config.accept_ratio * fraction * (gradient @ step)
        if gain > 0 and gain >= wanted and batch.kl(policy) <= config.max_kl:
            accepted.append(fraction)
    assert metrics["step_fraction"] == pytest.approx(accepted[0])
    assert (accepted[0] < 1) == (case == "large region")
    assert metrics["kl"] == pytest.approx(batch.kl(policy_of(trpo)), rel=1e-2, abs=1e-6)
    assert metrics["surrogate"] == pytest.approx(batch.surrogate(policy_of(trpo)), rel=1e-3, abs=1e-5)
    assert metrics["surrogate_before"] == pytest.approx(before, rel=1e-3, abs=1e-5)


def test_fewer_conjugate_gradients_make_another_step_within_the_region() -> None:
    whole, short = make(CONTINUOUS, **PLAIN), make(CONTINUOUS, cg_iterations=1, **PLAIN)
    enlarge(whole)
    enlarge(short)
    fragment = collect(whole, CONTINUOUS)
    batch = Batch(short, fragment)
    whole.learn([fragment])
    metrics = short.learn([fragment])
    assert not np.allclose(policy_of(whole), policy_of(short), atol=1e-4)
    assert 0 < batch.kl(policy_of(short)) <= 0.01
    assert metrics["surrogate"] > metrics["surrogate_before"]


@pytest.mark.parametrize(
    ("target", "settings"),
    [("CartPole-v1", {}), ("Pendulum-v1", {"gamma": 0.9}), (CONTINUOUS, FAR)],
    ids=["cartpole", "pendulum", "far"],
)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_no_step_leaves_the_trust_region(target: Any, settings: dict[str, Any], seed: int) -> None:
    trpo = make(target, seed=seed, **PLAIN, **settings)
    sampling, fractions = sampler(trpo, target, seed), []
    for _ in range(20):
        fragment = sampling.sample(trpo.weights())
        batch, start = Batch(trpo, fragment), policy_of(trpo)
        metrics = trpo.learn([fragment])
        fractions.append(metrics["step_fraction"])
        assert batch.kl(policy_of(trpo)) <= trpo.config.max_kl * 1.001  # rounding
        if metrics["step_fraction"]:
            assert batch.surrogate(policy_of(trpo)) > batch.surrogate(start)
            assert batch.kl(policy_of(trpo)) > 0.1 * trpo.config.max_kl * metrics["step_fraction"] ** 2
        assert metrics["kl_before"] == pytest.approx(0, abs=1e-6)
    assert np.count_nonzero(fractions) >= 18


def test_a_line_search_that_fails_keeps_the_policy_and_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    trpo, other = make(accept_ratio=1e9), make()
    start, value = np.asarray(policy_of(trpo)), np.asarray(value_of(trpo))
    for count in (1, 2):
        caplog.clear()
        metrics = trpo.learn([collect(trpo, seed=count)])
        assert [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING] == [REFUSED]
        assert (metrics["step_fraction"], metrics["steps_refused"]) == (0, count)
        assert metrics["kl"] == pytest.approx(0, abs=1e-7)
        assert metrics["surrogate"] == metrics["surrogate_before"]
    np.testing.assert_array_equal(policy_of(trpo), start)
    assert np.abs(np.asarray(value_of(trpo)) - value).max() > 1e-4  # values are fitted all the same
    assert trpo.steps == 128
    other.restore(trpo.state(), trpo.weights())
    caplog.clear()
    metrics = other.learn([collect(other, seed=3)])
    assert metrics["step_fraction"] > 0
    assert metrics["steps_refused"] == 2
    assert not caplog.records
    assert np.abs(np.asarray(policy_of(other)) - start).max() > 1e-4


def test_without_any_advantage_the_policy_stays(caplog: pytest.LogCaptureFixture) -> None:
    """Reward 0 for everything, values of 0: the gradient is nothing, and so is the direction."""
    trpo = make(**PLAIN)
    set_weights(trpo, {name: 0 * array for name, array in trpo.weights().items() if name.startswith("value")})
    fragment = collect(trpo)
    start = np.asarray(policy_of(trpo))
    metrics = trpo.learn([changed(fragment, rewards=0 * fragment.arrays["rewards"])])
    assert (metrics["step_fraction"], metrics["gradient_norm"]) == (0, 0)
    np.testing.assert_array_equal(policy_of(trpo), start)
    assert np.isfinite(value_of(trpo)).all()


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("scale", [1e4, 1e10, 1e15, 1e25, 1e38, np.inf, np.nan])
@pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")
def test_rewards_out_of_all_proportion_never_spoil_the_weights(scale: float, normalize: bool) -> None:
    trpo = make(CONTINUOUS, **PLAIN, **({} if normalize else RAW))
    fragment, before = collect(trpo, CONTINUOUS), trpo.weights()
    batch = Batch(trpo, fragment)
    rewards = fragment.arrays["rewards"] * np.float32(scale)
    update = changed(fragment, rewards=rewards)
    if scale > 1e18 or np.isnan(scale):  # its square is infinite
        with pytest.raises(TrainingError, match=r"^the loss became NaN or infinite"):
            trpo.learn([update])
        for name, value in trpo.weights().items():
            np.testing.assert_array_equal(value, before[name])
        assert trpo.steps == 0
    else:
        metrics = trpo.learn([update])
        assert all(np.isfinite(value).all() for value in trpo.weights().values())
        assert 0 < batch.kl(policy_of(trpo)) <= 0.01001
        assert metrics["step_fraction"] > 0


def test_the_step_does_not_depend_on_the_scale_of_advantages() -> None:
    steps = []
    for scale in (1, 1e4, 1e-6):
        trpo = make(CONTINUOUS, **RAW, **PLAIN)
        set_weights(trpo, {name: 0 * array for name, array in trpo.weights().items() if name.startswith("value")})
        fragment, start = collect(trpo, CONTINUOUS), np.asarray(policy_of(trpo))
        bootstrap = np.where(np.isnan(fragment.arrays["bootstrap"]), np.nan, np.float32(0))
        trpo.learn([changed(fragment, rewards=fragment.arrays["rewards"] * np.float32(scale), bootstrap=bootstrap)])
        steps.append(np.asarray(policy_of(trpo)) - start)
    for step in steps[1:]:
        np.testing.assert_allclose(step, steps[0], rtol=0.02, atol=1e-3 * np.abs(steps[0]).max())


def test_images_are_learned_from_within_the_region() -> None:
    trpo = make(ImageEnv, convolutions=((4, 4, 2),), convolution_features=8, normalize_rewards=False)
    fragment = collect(trpo, ImageEnv)
    batch, start = Batch(trpo, changed(fragment)), trpo.weights()
    metrics = trpo.learn([fragment])
    assert metrics["step_fraction"] > 0
    assert 0 < batch.kl(policy_of(trpo)) <= 0.01001
    for name, value in trpo.weights().items():  # the features are the policy's
        assert np.abs(value - start[name]).max() > 0, name


# The values' fit.


def test_the_values_take_plain_gradient_steps_on_squared_errors() -> None:
    trpo = make(NextStepCounters, value_epochs=3, value_minibatch=10**6, value_learning_rate=0.01, **PLAIN)
    trpo.optimizer = Mock(step=lambda params, state, gradient, rate: (params - rate * gradient, state))
    trpo._jitted_update = jax.jit(trpo._update)
    fragment = collect(trpo, NextStepCounters)
    batch, value = Batch(trpo, fragment), value_of(trpo)

    def loss(value: Any) -> Any:
        predicted = trpo.network.value(trpo.value_flat.unpack(value), jnp.asarray(batch.rows), jnp)
        return ((predicted - batch.returns.astype("f4")) ** 2).mean()

    losses = [float(loss(value))]
    for _ in range(3):
        value = value - 0.01 * jax.grad(loss)(value)
        losses.append(float(loss(value)))
    metrics = trpo.learn([fragment])
    np.testing.assert_allclose(value_of(trpo), value, rtol=1e-3, atol=1e-4)
    assert metrics["value_loss_before"] == pytest.approx(losses[0], rel=1e-4)
    assert metrics["value_loss"] == pytest.approx(losses[-1], rel=1e-3)
    assert losses == sorted(losses, reverse=True)
    assert metrics["updates"] == 3


@pytest.mark.parametrize(("size", "epochs", "shape"), [(16, 2, (8, 16)), (40, 3, (3, 40)), (1000, 2, (2, 64))])
def test_every_epoch_is_a_permutation_of_the_batch(size: int, epochs: int, shape: tuple[int, int]) -> None:
    trpo = make(value_minibatch=size, value_epochs=epochs)
    orders = trpo._orders({"rewards": np.zeros((16, 4))})
    assert (orders.shape, orders.dtype) == (shape, np.int32)
    for epoch in orders.reshape(epochs, -1):
        assert len(set(epoch.tolist())) == len(epoch)
        assert set(epoch.tolist()) <= set(range(64))
    assert not np.array_equal(orders[0], orders[-1])


def test_phantom_steps_never_change_the_update() -> None:
    here, there = make(NextStepCounters), make(NextStepCounters)
    fragment = collect(here, NextStepCounters)
    arrays, valid, rng = fragment.arrays, fragment.arrays["valid"], np.random.default_rng(5)
    other = changed(
        fragment,
        rewards=np.where(valid, arrays["rewards"], rng.normal(0, 100, valid.shape).astype(np.float32)),
        log_probs=np.where(valid, arrays["log_probs"], rng.normal(-5, 3, valid.shape).astype(np.float32)),
        actions=np.where(valid[..., None], arrays["actions"], 1 - arrays["actions"]),
    )
    assert not valid.all()
    assert here.learn([fragment]) == there.learn([other])
    assert_same(here, there)
    assert here.steps == fragment.steps == valid.sum()
