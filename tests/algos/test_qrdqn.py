"""QR-DQN: the quantile loss and its targets by hand, determinism, what acts afterwards."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fever.algos.dqn
from fever.algos.qrdqn import QRDQN, quantile_losses
from fever.training.resume import resume
from tests.algos.test_dqn import draw, learn, part, weights
from tests.algos.test_dqn import make as make_dqn
from tests.algos.test_dqn import train as train_dqn
from tests.helpers import same_arrays


def make(**settings: Any) -> Any:
    return make_dqn(QRDQN, **({"quantiles": 3} | settings))


def train(folder: Path, env: str = "CartPole-v1", **settings: Any) -> Any:
    return train_dqn(folder, env, "qrdqn", **({"quantiles": 3} | settings))


def quantiles_of(algorithm: Any, name: str, observations: np.ndarray) -> np.ndarray:
    """With NumPy, `[B, A, N]`."""
    params = algorithm.flat.unpack(np.asarray(algorithm.learned[name]))
    return algorithm.network.action_quantiles(params, algorithm.network.features(params, observations))


# The loss.


def test_the_loss_of_two_quantiles_by_hand() -> None:
    quantiles, targets = np.array([[0.0], [1.0]], np.float32), np.array([[0.5], [3.0]], np.float32)
    # Quantile 0, level 1/4: differences 0.5 and 3; quantile 1, level 3/4: differences -0.5 and 2.
    huber = (0.25 * 0.125 + 0.25 * 2.5) / 2 + (0.25 * 0.125 + 0.75 * 1.5) / 2
    absolute = (0.25 * 0.5 + 0.25 * 3) / 2 + (0.25 * 0.5 + 0.75 * 2) / 2
    np.testing.assert_allclose(quantile_losses(quantiles, targets), [huber], rtol=1e-6)
    np.testing.assert_allclose(quantile_losses(quantiles, targets, smooth=False), [absolute], rtol=1e-6)


def test_the_least_loss_is_at_the_quantiles_of_the_targets() -> None:
    targets = jnp.asarray(np.random.default_rng(0).permutation(np.arange(101.0) / 10))[:, None]  # 0 to 10, uniform
    quantiles = jnp.zeros((4, 1))
    slope = jax.jit(jax.grad(lambda quantiles: quantile_losses(quantiles, targets, smooth=False).sum()))
    for rate in (1.0, 0.1, 0.01):
        for _ in range(200):
            quantiles = quantiles - rate * slope(quantiles)
    np.testing.assert_allclose(quantiles[:, 0], [1.25, 3.75, 6.25, 8.75], atol=0.1)  # levels 1/8, 3/8, 5/8, 7/8


# A gradient step.


@pytest.mark.parametrize(
    ("double", "dueling", "loss"), [(True, True, "huber"), (False, False, "huber"), (True, False, "absolute")]
)
def test_targets_errors_and_loss_by_hand(double: bool, dueling: bool, loss: str) -> None:
    algorithm, batch = make(double=double, dueling=dueling, loss=loss), draw()
    here = quantiles_of(algorithm, "online", batch.observations)
    online, target = (quantiles_of(algorithm, name, batch.next_observations) for name in ("online", "target"))
    importance = algorithm.inputs(batch)["weights"][0]
    expected_errors, expected_loss = [], 0.0
    for row in range(8):
        best = int(np.argmax((online if double else target)[row].mean(-1)))
        targets = batch.rewards[row] + batch.discounts[row] * target[row, best]
        chosen = here[row, batch.actions[row, 0]]
        expected_errors.append(chosen.mean() - targets.mean())
        for level, quantile in zip((1 / 6, 3 / 6, 5 / 6), chosen, strict=True):
            for one in targets:
                gap = one - quantile
                size = abs(gap) if loss == "absolute" else 0.5 * gap**2 if abs(gap) < 1 else abs(gap) - 0.5
                expected_loss += importance[row] * (level if gap > 0 else 1 - level) * size / 3 / 8
    errors, metrics = learn(algorithm, batch)
    np.testing.assert_allclose(errors, expected_errors, rtol=1e-4, atol=1e-5)
    row = dict(zip(algorithm.metric_names, metrics[0], strict=True))
    assert row["loss"] == pytest.approx(expected_loss, rel=1e-4)
    assert row["td_error"] == pytest.approx(np.abs(expected_errors).mean(), rel=1e-4)
    means = here[np.arange(8), batch.actions[:, 0]].mean()
    assert row["value_mean"] == pytest.approx(means, rel=1e-4)


@pytest.mark.parametrize(("target_updates", "piece"), [(4, 512), (8, 16)], ids=["target first", "in pieces"])
def test_many_gradient_steps_in_one_call_are_those_of_many_calls(
    target_updates: int, piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fever.algos.dqn, "PIECE", piece)
    together, alone = make(updates=4, target_updates=target_updates), make(target_updates=target_updates)
    batch = draw(4)
    errors, _ = learn(together, batch)
    singles = [learn(alone, part(batch, index))[0] for index in range(4)]
    np.testing.assert_allclose(errors, np.concatenate(singles), rtol=1e-3, atol=1e-4)
    np.testing.assert_allclose(together.learned["target"], alone.learned["target"], rtol=1e-3, atol=1e-4)


def test_a_restored_algorithm_learns_on_as_if_nothing_had_happened() -> None:
    original, restored = make(seed=1), make(seed=2)
    for seed in range(3):
        learn(original, draw(seed=seed))
    restored.restore(original.state(), original.weights())
    for seed in range(3, 6):
        for here, there in zip(learn(original, draw(seed=seed)), learn(restored, draw(seed=seed)), strict=True):
            np.testing.assert_array_equal(here, there)


# Training, and acting with the policy alone.


def test_one_seed_gives_one_training_which_can_be_resumed(tmp_path: Path) -> None:
    runs = [train(tmp_path, seed=seed).run for seed in (1, 1, 2)]
    assert same_arrays(weights(runs[0]), weights(runs[1]))
    assert not same_arrays(weights(runs[0]), weights(runs[2]))
    stop = runs[0].config.stop.model_copy(update={"steps": 600})
    resume(runs[0], runs[0].config.model_copy(update={"stop": stop}))
    assert runs[0].checkpoint().manifest["steps"] >= 600


def test_a_policy_acts_by_the_mean_of_its_quantiles(tmp_path: Path) -> None:
    policy = train(tmp_path, seed=1).run.checkpoint().policy()
    assert policy.network.quantiles == 3
    observations = np.random.default_rng(0).normal(0, 1, (50, 4)).astype(np.float32)
    best = policy.network.action_quantiles(policy.params, observations).mean(-1).argmax(-1)
    np.testing.assert_array_equal(policy.act_batch(observations), best)


def test_masked_actions_are_learned_from(tmp_path: Path) -> None:
    result = train(tmp_path, "tests.environments:MaskedEnv")
    assert np.isfinite([row["loss"] for row in result.run.metrics() if "loss" in row]).all()
    assert abs(result.run.metrics()[-1]["value_mean"]) < 100  # a forbidden action's -1e9 would show


def test_bad_settings_are_one_sentence(fever: Callable[..., Any]) -> None:
    for word, reason in (("quantiles=0", "must be greater than 0"), ("loss=squared", "must be huber or absolute")):
        done = fever("train", "CartPole-v1", "--algo", "qrdqn", word)
        assert (done.returncode, done.stdout) == (2, "")
        assert reason in done.stderr
