"""SAC: the squashed Gaussian, the mathematics of a gradient step, what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import integrate, stats

import fever
from fever.algos.optimizer import named_arrays
from fever.algos.sac import SAC
from fever.algos.td3 import TD3
from fever.algos.tqc import TQC
from fever.envs.source import EnvSource
from fever.errors import FeverError
from fever.policy import SquashedGaussian, distribution_for
from fever.replay.buffer import Batch
from tests.algos.actor_critics import critic_outputs, draw, learn, make_algorithm
from tests.environments import ImageEnv
from tests.factories import make_task

BOX = SquashedGaussian((-2.0, 0.0), (2.0, 5.0), (2,))


def make(seed: int = 0, **settings: Any) -> SAC:
    return make_algorithm(SAC, seed, **settings)


# The distribution.


def parameters(mean: Any, log_std: Any) -> np.ndarray:
    return np.concatenate([np.atleast_1d(mean), np.atleast_1d(log_std)]).astype(np.float64)


def test_log_probabilities_are_those_of_a_change_of_variables() -> None:
    """The density of tanh(u) is that of u by the slope of tanh there, here as a difference."""
    rng = np.random.default_rng(0)
    for _ in range(50):
        mean, log_std, drawn = rng.normal(0, 0.8, 2), rng.uniform(-1.5, 0.5, 2), rng.normal(0, 1, 2)
        slope = (np.tanh(drawn + 1e-6) - np.tanh(drawn - 1e-6)) / 2e-6
        expected = (stats.norm.logpdf(drawn, mean, np.exp(log_std)) - np.log(slope)).sum()
        assert BOX.log_prob(parameters(mean, log_std), np.tanh(drawn)) == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize(("mean", "log_std"), [(0.0, -0.5), (0.7, -1.0), (-1.2, 0.2)])
def test_probabilities_add_up_to_one(mean: float, log_std: float) -> None:
    one = SquashedGaussian((-1.0,), (1.0,), (1,))
    given = parameters(mean, log_std)
    total, _ = integrate.quad(lambda a: float(np.exp(one.log_prob(given, np.array([a])))), -1, 1, limit=200)
    assert total == pytest.approx(1, abs=1e-3)


@pytest.mark.parametrize("xp", [np, jnp], ids=["numpy", "jax"])
def test_a_sample_and_its_log_probability_agree(xp: Any) -> None:
    rng = np.random.default_rng(0)
    given = rng.normal(0, 0.5, (200, 4)).astype(np.float32)
    noise = BOX.noise(rng, (200,))
    actions, log_prob = BOX.sample_and_log_prob(given, noise, xp)
    np.testing.assert_allclose(actions, BOX.sample(given, noise), rtol=1e-5, atol=1e-6)
    inside = np.abs(np.asarray(actions)).max(1) < 0.99
    assert inside.sum() > 100
    expected = BOX.log_prob(given.astype(np.float64), np.asarray(actions, np.float64))
    np.testing.assert_allclose(np.asarray(log_prob)[inside], expected[inside], rtol=1e-3, atol=1e-3)


def test_log_probabilities_are_exact_at_the_bounds() -> None:
    """tanh(20) is 1 in any precision here; log(1 - tanh^2) is 2 log 2 - 40 all the same."""
    one = SquashedGaussian((-1.0,), (1.0,), (1,))
    for drawn in (20.0, -20.0, 300.0):
        action, log_prob = one.sample_and_log_prob(np.array([drawn, 0.0], np.float32), np.zeros(1, np.float32))
        assert abs(action[0]) == 1
        stretch = 2 * np.log(2) - 2 * abs(drawn)
        assert log_prob == pytest.approx(-0.5 * np.log(2 * np.pi) - stretch, rel=1e-5)
    gradient = jax.grad(lambda given: one.sample_and_log_prob(given, jnp.ones(1), jnp)[1])(jnp.array([20.0, 0.0]))
    assert np.isfinite(gradient).all()


def test_deviations_are_kept_within_limits() -> None:
    noise = np.full((1, 2), 0.5, np.float32)
    for log_std, limit in ((100.0, 2.0), (-100.0, -20.0)):
        far, near = (parameters([0, 0], [value, value])[None] for value in (log_std, limit))
        for here, there in zip(BOX.sample_and_log_prob(far, noise), BOX.sample_and_log_prob(near, noise), strict=True):
            np.testing.assert_allclose(here, there)


def test_actions_are_within_the_bounds_and_scaled_to_them() -> None:
    rng = np.random.default_rng(0)
    actions = BOX.sample(rng.normal(0, 3, (1000, 4)).astype(np.float32), BOX.noise(rng, (1000,)))
    assert (actions.dtype, np.abs(actions).max() <= 1) == (np.float32, True)
    given = BOX.to_env(actions)
    assert (given >= [-2, 0]).all()
    assert (given <= [2, 5]).all()
    scaled = BOX.to_env(np.array([[0, 0], [-1, 1], [1, -1], [0.5, -0.5]], np.float32))
    np.testing.assert_allclose(scaled, [[0, 2.5], [-2, 5], [2, 0], [1, 1.25]])
    np.testing.assert_allclose(BOX.mode(parameters([0.3, -4], [1, 1])), np.tanh([0.3, -4]))
    uniform = BOX.uniform(rng, (1000,))
    assert (uniform.shape, uniform.dtype) == ((1000, 2), np.float32)
    assert -1 <= uniform.min() < -0.9 < 0.9 < uniform.max() <= 1


def test_only_squashed_networks_get_it() -> None:
    box = {"type": "box", "low": [-1.0], "high": [1.0], "shape": [1], "dtype": "float32"}
    assert isinstance(distribution_for(box, squashed=True), SquashedGaussian)
    assert not isinstance(distribution_for(box), SquashedGaussian)


# A gradient step.


def critics(sac: SAC, name: str, observations: np.ndarray, actions: np.ndarray) -> np.ndarray:
    """Both critics with NumPy, `[2, B]`."""
    return critic_outputs(sac, name, observations, actions)[..., 0]


def act(sac: SAC, observations: np.ndarray, noise: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    params = sac.weights()
    return sac.distribution.sample_and_log_prob(sac.network.policy(params, observations), noise)


def next_noise(sac: SAC) -> np.ndarray:
    """What the next batch will get: for its next observations, then for its own."""
    state = sac.rng.bit_generator.state
    noise = sac.inputs(draw())["noise"][0]
    sac.rng.bit_generator.state = state
    return noise


def test_the_critics_errors_by_hand() -> None:
    sac, batch = make(temperature=0.3), draw()
    noise = next_noise(sac)
    following, log_prob = act(sac, batch.next_observations, noise[0])
    lower = critics(sac, "target", batch.next_observations, following).min(0)
    td_targets = batch.rewards + batch.discounts * (lower - 0.3 * log_prob)
    expected = critics(sac, "critics", batch.observations, batch.actions) - td_targets
    entropy = -act(sac, batch.observations, noise[1])[1].mean()
    errors, metrics = learn(sac, batch)
    np.testing.assert_allclose(errors, expected.mean(0), rtol=1e-3, atol=1e-4)
    assert metrics["loss"] == pytest.approx(0.5 * (expected**2).mean(1).sum(), rel=1e-3)
    assert metrics["td_error"] == pytest.approx(np.abs(expected.mean(0)).mean(), rel=1e-3)
    assert [value for name, value in metrics.items() if "entropy" in name] == [pytest.approx(entropy, rel=1e-3)]


def test_a_gradient_step_moves_everything_in_its_direction() -> None:
    sac, batch = make(temperature=0.3, learning_rate=1e-3, polyak=0.25), draw()
    noise = next_noise(sac)

    def actor_objective() -> float:
        """What the actor maximises, with the critics before the step and after it."""
        actions, log_prob = act(sac, batch.observations, noise[1])
        return float((critics(sac, "critics", batch.observations, actions).min(0) - 0.3 * log_prob).mean())

    following, log_prob = act(sac, batch.next_observations, noise[0])
    lower = critics(sac, "target", batch.next_observations, following).min(0)
    td_targets = batch.rewards + batch.discounts * (lower - 0.3 * log_prob)

    def critic_loss() -> float:
        return float(((critics(sac, "critics", batch.observations, batch.actions) - td_targets) ** 2).mean())

    before = {name: np.asarray(sac.learned[name]) for name in ("actor", "critics", "target", "temperature")}
    loss = critic_loss()
    learn(sac, batch)
    assert critic_loss() < loss
    after = {name: np.asarray(sac.learned[name]) for name in ("actor", "critics", "target", "temperature")}
    expected = before["target"] + 0.25 * (after["critics"] - before["target"])
    np.testing.assert_allclose(after["target"], expected, rtol=1e-5, atol=1e-6)
    sac.learned |= {"actor": before["actor"]}
    old = actor_objective()
    sac.learned |= {"actor": after["actor"]}
    assert actor_objective() > old
    np.testing.assert_array_equal(after["temperature"], before["temperature"])
    # The first step of Adam moves every weight that matters by the learning rate.
    assert np.median(np.abs(after["actor"] - before["actor"])) == pytest.approx(1e-3, rel=0.01)


@pytest.mark.parametrize(("target_entropy", "direction"), [(50.0, 1), (-50.0, -1)])
def test_the_temperature_rises_where_entropy_is_too_low_and_falls_where_it_is_too_high(
    target_entropy: float, direction: int
) -> None:
    sac = make(target_entropy=target_entropy, updates=4)
    assert np.exp(sac.learned["temperature"][0]) == 1
    seen = []
    for seed in range(3):
        seen.append(learn(sac, draw(4, seed))[1]["temperature"])
    assert (np.diff([1.0, *seen]) * direction > 0).all()


def test_a_temperature_that_is_set_stays() -> None:
    sac = make(temperature=0.3, updates=4)
    for seed in range(3):
        assert learn(sac, draw(4, seed))[1]["temperature"] == pytest.approx(0.3)
    assert np.exp(sac.learned["temperature"][0]) == pytest.approx(0.3)


def test_the_target_entropy_is_minus_the_size_of_the_action_unless_it_is_set() -> None:
    assert (make().target_entropy, make(target_entropy=-0.5).target_entropy) == (-2, -0.5)
    assert make(target_entropy=0.0).target_entropy == 0


def test_many_gradient_steps_in_one_call_are_those_of_many_calls() -> None:
    together, alone = make(temperature=0.3, updates=4), make(temperature=0.3)
    batch = draw(4)
    noise = together.inputs(batch)["noise"]
    together.rng.bit_generator.state = alone.rng.bit_generator.state
    together.facts = lambda batch: {"noise": noise}  # type: ignore[method-assign]
    learn(together, batch)
    for index in range(4):
        alone.facts = lambda batch, index=index: {"noise": noise[index : index + 1]}  # type: ignore[method-assign]
        one = Batch(**{name: array[index * 8 : index * 8 + 8] for name, array in vars(batch).items()})
        learn(alone, one)
    found = named_arrays("learned", alone.learned)
    for name, array in named_arrays("learned", together.learned).items():
        np.testing.assert_allclose(array, found[name], rtol=1e-3, atol=1e-4, err_msg=name)


def test_a_restored_algorithm_learns_on_as_if_nothing_had_happened() -> None:
    original, restored = make(seed=1, temperature=0.3), make(seed=2, temperature=0.3)
    learn(original, draw(seed=1))
    state = original.state()
    facts = json.loads(json.dumps(state.facts))
    state = state._replace(facts=facts, arrays={name: array.copy() for name, array in state.arrays.items()})
    restored.restore(state, original.weights())
    for seed in (2, 3):
        here, there = learn(original, draw(seed=seed)), learn(restored, draw(seed=seed))
        np.testing.assert_array_equal(here[0], there[0])
        assert here[1] == there[1]
    for name, array in original.state().arrays.items():
        np.testing.assert_array_equal(array, restored.state().arrays[name], err_msg=name)


def test_the_warm_up_is_random_and_nothing_else_is() -> None:
    sac = make(warmup=100)
    assert sac.epsilons().tolist() == [1.0, 1.0]
    sac.steps = 100
    assert sac.epsilons().tolist() == [0.0, 0.0]
    assert (sac.greedy, sac.prioritized) == (False, False)


# What is refused, and a short training.


def test_discrete_actions_are_refused_on_the_command_line(fever: Callable[..., Any], tmp_path: Path) -> None:
    done = fever("train", "CartPole-v1", "--algo", "sac")
    sentence = "fever: CartPole-v1 has no Box action space, which SAC needs; use dqn for a Discrete one\n"
    assert (done.returncode, done.stderr, done.stdout) == (2, sentence, "")
    assert list(tmp_path.iterdir()) == []


def test_actions_without_bounds_are_refused_in_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(FeverError, match="the action space has no bounds"):
        fever.train("tests.environments:UnboundedEnv", "sac", runs=tmp_path / "runs")
    assert list(tmp_path.iterdir()) == []


def test_one_seed_gives_one_training_and_the_policy_acts_within_bounds(tmp_path: Path) -> None:
    settings: dict[str, Any] = {
        "envs": 2, "hidden": (8,), "batch": 16, "updates": 4, "replay_ratio": 8.0, "warmup": 50, "buffer": 500,
        "report_steps": 100, "stop": {"steps": 300},
    }  # fmt: skip
    here, there = (fever.train("Pendulum-v1", "sac", runs=tmp_path, **settings) for _ in range(2))
    arrays = there.run.checkpoint().arrays()
    for name, array in here.run.checkpoint().arrays().items():
        np.testing.assert_array_equal(array, arrays[name], err_msg=name)
    row = here.run.metrics()[-1]
    assert (row["epsilon"], row["updates"] > 0, row["temperature"] < 1) == (0.0, True, True)
    assert row["replay_ratio"] == pytest.approx(8, rel=0.2)
    assert np.abs(here.policy.act(np.array([1.0, 0.0, 8.0], np.float32))) <= 2


# Images: everything before the heads is the network's own matter.


@pytest.mark.parametrize("kind", [SAC, TD3, TQC])
def test_actor_and_critics_learn_features_of_their_own(kind: Any) -> None:
    settings: dict[str, Any] = {"convolutions": ((4, 2, 2),), "convolution_features": 8, "batch": 4, "updates": 2}
    task = make_task(EnvSource(ImageEnv, {"continuous": True, "height": 6, "width": 6}))
    made = kind(kind.Config(**settings), task)
    assert made.network.hidden == (256, 256)  # without hidden layers, critics would be linear in the action
    assert made.critics.shapes["conv0/w"] == made.flat.shapes["conv0/w"] == (12, 4)
    assert made.critics.shapes["critic0/q0/w"] == (8 + 1, 256)
    rng = np.random.default_rng(0)
    images = [rng.integers(0, 256, (8, 6, 6, 3), np.uint8) for _ in range(2)]
    numbers = [rng.normal(0, 1, 8).astype(np.float32) for _ in range(2)]
    batch = Batch(*images, rng.uniform(-1, 1, (8, 1)).astype(np.float32), *numbers, np.arange(8), np.ones(8))
    made._update = jax.jit(made.update)
    before = [made.weights(), made.critics.unpack(np.asarray(made.learned["critics"]))]
    learn(made, batch)
    after = [made.weights(), made.critics.unpack(np.asarray(made.learned["critics"]))]
    assert not np.array_equal(before[0]["conv0/w"], before[1]["conv0/w"])
    for old, new in zip(before, after, strict=True):
        assert (old["conv0/w"] != new["conv0/w"]).any()
        assert (old["features/w"] != new["features/w"]).any()
