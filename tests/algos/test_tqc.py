"""TQC: which quantiles are left out, the quantile Huber loss, the mathematics of a gradient step, bad settings."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fever
from fever.algos.tqc import TQC, keep_smallest, quantile_huber_loss
from tests.algos.actor_critics import critic_outputs, draw, learn, make_algorithm, vectors

SETTINGS: dict[str, Any] = {"critics": 3, "quantiles": 4, "drop_quantiles": 1, "temperature": 0.3}


def make(seed: int = 0, **settings: Any) -> TQC:
    return make_algorithm(TQC, seed, **{**SETTINGS, **settings})


def pairwise_loss(quantiles: Any, targets: Any, levels: Any, xp: Any = np) -> Any:
    """The definition: the mean over all pairs of quantiles `[C, B, M]` and targets `[B, K]`."""
    errors = targets[:, None, :] - quantiles[..., None]
    huber = xp.where(xp.abs(errors) < 1, 0.5 * errors**2, xp.abs(errors) - 0.5)
    return (xp.abs(levels[:, None] - (errors < 0)) * huber).mean()


# Truncation and loss.


def test_the_largest_values_of_each_column_are_left_out() -> None:
    values = jnp.array([[3.0, 1.0, 2.0, 5.0], [-1.0, -1.0, -1.0, -2.0], [0.0, 0.0, 0.0, 0.0]]).T
    kept = np.asarray(keep_smallest(values, 2)).T
    np.testing.assert_array_equal(kept[0], [0, 1, 1, 0])
    assert kept[1, 3] == 1
    assert kept.sum(1).tolist() == [2, 2, 2]  # also among equal values
    np.testing.assert_array_equal(keep_smallest(values, 0), np.ones((4, 3)))


def test_the_loss_of_one_quantile_by_hand() -> None:
    """Targets 0.5 above and 3 below: 0.25 * 0.125 and 0.75 * 2.5."""
    quantiles, levels = jnp.full((1, 1, 1), 1.0), np.array([0.25], np.float32)
    loss, slope = quantile_huber_loss(quantiles, jnp.array([[1.5], [-2.0]]), jnp.ones((2, 1)), levels)
    assert float(loss) == pytest.approx((0.25 * 0.125 + 0.75 * 2.5) / 2)
    assert float(slope[0, 0, 0]) == pytest.approx((-0.25 * 0.5 + 0.75 * 1) / 2)


def test_the_loss_and_its_slopes_are_those_of_all_pairs_that_are_kept() -> None:
    rng = np.random.default_rng(0)
    quantiles, pooled = rng.normal(0, 2, (3, 5, 4)).astype(np.float32), rng.normal(0, 2, (5, 12)).astype(np.float32)
    levels, kept = (np.arange(4, dtype=np.float32) + 0.5) / 4, keep_smallest(pooled.T, 3)
    smallest = np.sort(pooled, axis=1)[:, :9]
    loss, slopes = quantile_huber_loss(jnp.asarray(quantiles), pooled.T, kept, levels)
    expected, gradient = jax.value_and_grad(lambda q: pairwise_loss(q, smallest, levels, jnp))(jnp.asarray(quantiles))
    assert float(loss) == pytest.approx(float(expected), rel=1e-5)
    np.testing.assert_allclose(slopes, gradient, rtol=1e-4, atol=1e-7)


def test_minimising_the_loss_finds_the_quantiles_of_the_targets() -> None:
    targets = jnp.asarray(np.random.default_rng(0).exponential(20, (200, 1)).astype(np.float32))
    levels, quantiles = np.array([0.1, 0.5, 0.9], np.float32), jnp.zeros((1, 1, 3))
    step = jax.jit(lambda q: q - 30 * quantile_huber_loss(q, targets, jnp.ones_like(targets), levels)[1])
    for _ in range(300):
        quantiles = step(quantiles)
    np.testing.assert_allclose(quantiles[0, 0], np.quantile(targets, levels), atol=1)


# A gradient step.


def test_the_critics_errors_by_hand() -> None:
    tqc, batch = make(), draw()
    assert tqc.levels.tolist() == [0.125, 0.375, 0.625, 0.875]
    state = tqc.rng.bit_generator.state
    noise = tqc.inputs(batch)["noise"][0]
    tqc.rng.bit_generator.state = state
    outputs = tqc.network.policy(tqc.weights(), batch.next_observations)
    following, log_prob = tqc.distribution.sample_and_log_prob(outputs, noise[0])
    pooled = critic_outputs(tqc, "target", batch.next_observations, following).transpose(1, 0, 2).reshape(8, 12)
    smallest = np.sort(pooled, axis=1)[:, :9] - 0.3 * log_prob[:, None]
    targets = batch.rewards[:, None] + batch.discounts[:, None] * smallest
    quantiles = critic_outputs(tqc, "critics", batch.observations, batch.actions)
    expected = quantiles.mean((0, 2)) - targets.mean(1)
    errors, metrics = learn(tqc, batch)
    np.testing.assert_allclose(errors, expected, rtol=1e-3, atol=1e-4)
    assert metrics["loss"] == pytest.approx(pairwise_loss(quantiles, targets, tqc.levels), rel=1e-3)
    assert metrics["value_mean"] == pytest.approx(targets.mean(), rel=1e-3)


def test_a_gradient_step_moves_everything_in_its_direction() -> None:
    tqc, batch = make(learning_rate=1e-3, polyak=0.25), draw()
    state = tqc.rng.bit_generator.state
    noise = tqc.inputs(batch)["noise"][0, 1]
    tqc.rng.bit_generator.state = state

    def objective() -> float:
        """What the actor maximises: the mean of all quantiles, none left out, and its entropy."""
        outputs = tqc.network.policy(tqc.weights(), batch.observations)
        actions, log_prob = tqc.distribution.sample_and_log_prob(outputs, noise)
        return float((critic_outputs(tqc, "critics", batch.observations, actions).mean((0, 2)) - 0.3 * log_prob).mean())

    before = vectors(tqc)
    learn(tqc, batch)
    after = vectors(tqc)
    expected = before["target"] + 0.25 * (after["critics"] - before["target"])
    np.testing.assert_allclose(after["target"], expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(after["temperature"], before["temperature"])
    higher = objective()
    tqc.learned["actor"] = before["actor"]
    assert higher > objective()


def test_the_temperature_is_learned_as_in_sac() -> None:
    tqc = make(temperature=None, target_entropy=50.0)
    seen = [learn(tqc, draw(seed=seed))[1]["temperature"] for seed in range(3)]
    assert seen[0] == 1
    assert (np.diff(seen) > 0).all()


def test_a_restored_algorithm_learns_on_as_if_nothing_had_happened() -> None:
    original, restored = make(seed=1), make(seed=2)
    learn(original, draw(seed=1))
    state = original.state()
    state = state._replace(facts=json.loads(json.dumps(state.facts)))
    restored.restore(state, original.weights())
    here, there = learn(original, draw(seed=2)), learn(restored, draw(seed=2))
    np.testing.assert_array_equal(here[0], there[0])
    assert here[1] == there[1]
    for name, array in vectors(original).items():
        np.testing.assert_array_equal(array, vectors(restored)[name], err_msg=name)


# Settings, and a short training.


def test_dropping_all_quantiles_is_refused(fever: Callable[..., Any], tmp_path: Path) -> None:
    done = fever("train", "Pendulum-v1", "--algo", "tqc", "quantiles=5", "drop_quantiles=5")
    sentence = "fever: tqc: drop_quantiles=5 cannot be used: must be less than quantiles=5\n"
    assert (done.returncode, done.stderr, done.stdout) == (2, sentence, "")
    assert list(tmp_path.iterdir()) == []


def test_one_seed_gives_one_training(tmp_path: Path) -> None:
    settings: dict[str, Any] = {
        "envs": 2, "hidden": (8,), "batch": 16, "updates": 4, "replay_ratio": 8.0, "warmup": 50, "buffer": 500,
        "report_steps": 100, "stop": {"steps": 300},
    }  # fmt: skip
    here, there = (fever.train("Pendulum-v1", "tqc", runs=tmp_path, **settings) for _ in range(2))
    arrays = there.run.checkpoint().arrays()
    for name, array in here.run.checkpoint().arrays().items():
        np.testing.assert_array_equal(array, arrays[name], err_msg=name)
    assert np.abs(here.policy.act(np.array([1.0, 0.0, 8.0], np.float32))) <= 2
