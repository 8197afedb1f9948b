"""CrossQ: its normalisation against values worked out by hand, its gradient steps, and a task that it learns."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import fever
import jax.numpy as jnp
import numpy as np
import pytest
from fever.algos.base import Task
from fever.algos.off_policy import METRICS

from fever_crossq.crossq import CrossQ, CrossQConfig
from fever_crossq.renorm import EPSILON, normalise

BATCH = np.array([[0.0], [4.0]])  # mean 2, variance 4


def crossq(**settings: Any) -> CrossQ:
    box = {"type": "box", "shape": [2], "dtype": "float32", "low": [-1.0, -1.0], "high": [1.0, 1.0]}
    small: dict[str, Any] = {"hidden": [8], "critic_hidden": [8], "batch": 4, "updates": 3}
    return CrossQ(CrossQConfig(**{**small, **settings}), Task("Test", box, box, 1, 0, 0, 1000, total_envs=1))


def learn(algorithm: CrossQ) -> dict[str, Any]:
    """What one draw of random transitions makes of `learned`."""
    rng, shape = np.random.default_rng(0), (algorithm.config.updates, algorithm.config.batch)
    batches = {name: rng.normal(size=(*shape, 2)) for name in ("observations", "next_observations", "actions")}
    batches |= {"rewards": rng.normal(size=shape), "discounts": np.full(shape, 0.9)}
    learned, errors, metrics = algorithm.update(algorithm.learned, batches, algorithm.inputs(None), 1e-3)  # type: ignore[arg-type]
    assert errors.shape == shape
    assert metrics.shape == (shape[0], len(METRICS) + 2)
    assert np.isfinite(metrics).all()
    return learned


def test_batches_are_normalised_by_their_own_statistics_and_corrected_after_the_warm_up() -> None:
    running = jnp.array([1.0]), jnp.array([9.0])
    plain, (mean, variance) = normalise(BATCH, running, False)
    np.testing.assert_allclose(plain, (BATCH - 2) / np.sqrt(4 + EPSILON), rtol=1e-5)
    np.testing.assert_allclose((mean[0], variance[0]), (1.01, 8.95), rtol=1e-6)
    corrected, _ = normalise(BATCH, running, True)  # within the limits this is normalising by the running ones
    used, same = normalise(BATCH, running, None)
    np.testing.assert_allclose(corrected, used, rtol=1e-5)
    np.testing.assert_allclose(used, (BATCH - 1) / np.sqrt(9 + EPSILON), rtol=1e-5)
    assert same is running
    far, _ = normalise(BATCH, (jnp.array([-1000.0]), jnp.array([1e-4])), True)
    np.testing.assert_allclose(far, (BATCH - 2) / np.sqrt(4 + EPSILON) * 3 + 5, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("delay", [3, 4])
def test_the_actor_learns_every_few_steps_of_the_critics(delay: int) -> None:
    algorithm = crossq(policy_delay=delay)
    before, learned = algorithm.learned, learn(algorithm)
    assert not np.array_equal(learned["critics"], before["critics"])
    assert np.array_equal(learned["actor"], before["actor"]) == (delay == 4)  # there are three steps
    assert np.array_equal(learned["temperature"], before["temperature"]) == (delay == 4)
    assert not np.array_equal(learned["statistics"]["critic_b1"][0], before["statistics"]["critic_b1"][0])


def test_state_and_weights_restore_everything() -> None:
    algorithm, other = crossq(), crossq()
    algorithm.learned, algorithm.updates = learn(algorithm), 3
    other.restore(algorithm.state(), algorithm.weights())
    assert other.updates == 3
    first, second = learn(algorithm), learn(other)
    np.testing.assert_array_equal(first["critics"], second["critics"])
    np.testing.assert_array_equal(first["statistics"]["critic_a0"][1], second["statistics"]["critic_a0"][1])


@pytest.mark.slow
def test_crossq_learns_the_pendulum(tmp_path: Path) -> None:
    result = fever.train(
        "Pendulum-v1", "fever_crossq:CrossQ", envs=1, stop={"reward": -300, "window": 10, "steps": 12_000},
        runs=tmp_path, critic_hidden=[256, 256],
    )  # fmt: skip
    assert result.stop_reason == "reward"
