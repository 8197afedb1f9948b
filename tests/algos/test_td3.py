"""TD3: the deterministic action, the noise of explorers and targets, the mathematics of a gradient step, delays."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import fever
from fever.algos.td3 import TD3
from fever.policy import Deterministic, Policy, distribution_for
from fever.policy.policy import network_for
from tests.algos.actor_critics import critic_outputs, draw, learn, make_algorithm, vectors
from tests.environments import IdentityEnv
from tests.replay.helpers import make_explorer, transitions

BOX = {"type": "box", "low": [-2.0, 0.0], "high": [2.0, 5.0], "shape": [2], "dtype": "float32"}


def make(seed: int = 0, **settings: Any) -> TD3:
    return make_algorithm(TD3, seed, **settings)


def act(td3: TD3, name: str, observations: np.ndarray) -> np.ndarray:
    params = td3.flat.unpack(np.asarray(td3.learned[name]))
    return np.tanh(td3.network.policy(params, observations))


def next_noise(td3: TD3) -> np.ndarray:
    """What the next batch will get, `[B, D]`."""
    state = td3.rng.bit_generator.state
    noise = td3.inputs(draw())["noise"][0]
    td3.rng.bit_generator.state = state
    return noise


# The action.


@pytest.mark.parametrize("xp", [np, jnp], ids=["numpy", "jax"])
def test_the_action_is_the_tanh_of_the_head_and_nothing_is_drawn(xp: Any) -> None:
    distribution = distribution_for(BOX, "deterministic")
    assert isinstance(distribution, Deterministic)
    assert (distribution.outputs, distribution.action_shape) == (2, (2,))
    given, rng = np.array([[0.3, -4.0], [0.0, 20.0]], np.float32), np.random.default_rng(0)
    state = rng.bit_generator.state
    drawn = distribution.sample(given, distribution.noise(rng, (2,)), xp)
    assert rng.bit_generator.state == state
    for action in (drawn, distribution.mode(given, xp)):
        np.testing.assert_allclose(action, np.tanh(given), rtol=1e-6)
    np.testing.assert_allclose(distribution.to_env(np.array([[0, 0], [-1, 1]], np.float32)), [[0, 2.5], [-2, 5]])


def test_a_deterministic_action_has_no_density() -> None:
    with pytest.raises(TypeError, match="density"):
        distribution_for(BOX, "deterministic").log_prob(np.zeros((1, 2)), np.zeros((1, 2)))


def test_a_policy_is_the_same_after_it_was_described_as_json() -> None:
    network = network_for(BOX, BOX, hidden=(3,), value_head=False, squashed="deterministic")
    params = network.init(np.random.default_rng(0))
    assert params["policy/w"].shape == (3, 2)
    policy = Policy(BOX, BOX, network, params)
    again = Policy.from_description(json.loads(json.dumps(policy.describe())), params)
    observation = np.array([0.5, 2.0], np.float32)
    np.testing.assert_array_equal(again.act(observation), policy.act(observation))
    np.testing.assert_array_equal(again.act(observation, deterministic=False), policy.act(observation))


def test_explorers_add_noise_to_the_policys_action() -> None:
    box: dict[str, Any] = {"kwargs": {"action_space": "box"}, "squashed": "deterministic", "prioritized": False}
    exact, noisy = (
        transitions(make_explorer(IdentityEnv, 1, steps=500, noise=noise, **box), [500]) for noise in (0.0, 0.1)
    )
    actions = np.array([row.action for row in noisy])
    by_observation = {tuple(row.observation): row.action for row in exact}
    shift = np.array([row.action - by_observation[tuple(row.observation)] for row in noisy])
    inside = np.abs(actions).max(1) < 1
    assert actions.dtype == np.float32
    assert np.abs(actions).max() <= 1
    assert inside.sum() > 400
    assert shift[inside].std() == pytest.approx(0.1, rel=0.1)
    assert shift[inside].mean() == pytest.approx(0, abs=0.02)


def test_the_setting_reaches_the_explorers() -> None:
    td3 = make(exploration_noise=0.37, warmup=10)
    assert (td3.noise, td3.greedy) == (0.37, True)
    assert td3.epsilons().tolist() == [1.0, 1.0]
    td3.steps = 10
    assert td3.epsilons().tolist() == [0.0, 0.0]


# A gradient step.


def test_the_noise_on_next_actions_is_clipped() -> None:
    noise = make(target_noise=0.3, target_noise_clip=0.4, updates=4, batch=4096).inputs(draw())["noise"]
    assert (noise.shape, noise.dtype) == ((4, 4096, 2), np.float32)
    assert np.abs(noise).max() == pytest.approx(0.4)
    assert (np.abs(noise) == np.abs(noise).max()).mean() == pytest.approx(0.1824, abs=0.01)  # beyond 4/3 deviations
    assert noise[np.abs(noise) < 0.39].std() == pytest.approx(0.198, abs=0.01)
    assert (make(target_noise=0.0).inputs(draw())["noise"] == 0).all()


def test_the_critics_errors_by_hand() -> None:
    td3, batch = make(target_noise=0.5, target_noise_clip=0.8), draw()
    following = act(td3, "target_actor", batch.next_observations) + next_noise(td3)
    assert (np.abs(following) > 1).any()
    lower = critic_outputs(td3, "target", batch.next_observations, following.clip(-1, 1))[..., 0].min(0)
    td_targets = batch.rewards + batch.discounts * lower
    expected = critic_outputs(td3, "critics", batch.observations, batch.actions)[..., 0] - td_targets
    errors, metrics = learn(td3, batch)
    np.testing.assert_allclose(errors, expected.mean(0), rtol=1e-3, atol=1e-4)
    assert metrics["loss"] == pytest.approx((expected**2).mean(1).sum(), rel=1e-3)
    assert metrics["value_mean"] == pytest.approx(td_targets.mean(), rel=1e-3)
    assert metrics["td_error"] == pytest.approx(np.abs(expected.mean(0)).mean(), rel=1e-3)


def test_a_gradient_step_moves_everything_in_its_direction() -> None:
    td3, batch = make(policy_delay=1, polyak=0.25), draw()

    def value() -> np.ndarray:
        """What both critics, as they are after the step, say of the actor's actions."""
        actions = act(td3, "actor", batch.observations)
        return critic_outputs(td3, "critics", batch.observations, actions)[..., 0].mean(1)

    before = vectors(td3)
    learn(td3, batch)
    after = vectors(td3)
    for target, name in (("target", "critics"), ("target_actor", "actor")):
        expected = before[target] + 0.25 * (after[name] - before[target])
        np.testing.assert_allclose(after[target], expected, rtol=1e-5, atol=1e-6)
    higher = value()
    td3.learned["actor"] = before["actor"]
    assert higher[0] > value()[0]


def test_the_actor_follows_the_first_critic_alone() -> None:
    """The second critic has no influence on the actor's step."""
    actors = []
    for scale in (1.0, -3.0):
        td3 = make(policy_delay=1, learning_rate=1e-3)
        half = len(td3.learned["critics"]) // 2
        td3.learned["critics"] = td3.learned["critics"].at[half:].multiply(scale)
        learn(td3, draw())
        actors.append(np.asarray(td3.learned["actor"]))
    np.testing.assert_allclose(*actors, rtol=1e-5, atol=1e-7)


def test_actor_and_targets_move_in_every_third_step_only() -> None:
    td3 = make(policy_delay=3)
    for step in range(1, 8):
        before = vectors(td3)
        learn(td3, draw(seed=step))
        moved = [name for name, array in vectors(td3).items() if (array != before[name]).any()]
        assert sorted(moved) == (["actor", "critics", "target", "target_actor"] if step % 3 == 0 else ["critics"])


def test_delays_are_counted_over_calls_of_many_steps() -> None:
    """Three calls of four gradient steps, with a delay of three: the same as twelve calls."""
    together, alone = make(updates=4, policy_delay=3, target_noise=0.0), make(policy_delay=3, target_noise=0.0)
    for seed in range(3):
        batch = draw(4, seed)
        learn(together, batch)
        for index in range(4):
            rows = {name: array[index * 8 : index * 8 + 8] for name, array in vars(batch).items()}
            learn(alone, type(batch)(**rows))
    for name, array in vectors(together).items():
        np.testing.assert_allclose(array, vectors(alone)[name], rtol=1e-3, atol=1e-4, err_msg=name)


def test_a_restored_algorithm_learns_on_as_if_nothing_had_happened() -> None:
    original, restored = make(seed=1), make(seed=2)
    learn(original, draw(seed=1))  # the next step is one of the actor's
    state = original.state()
    state = state._replace(facts=json.loads(json.dumps(state.facts)))
    restored.restore(state, original.weights())
    for seed in (2, 3):
        here, there = learn(original, draw(seed=seed)), learn(restored, draw(seed=seed))
        np.testing.assert_array_equal(here[0], there[0])
        assert here[1] == there[1]
    for name, array in vectors(original).items():
        np.testing.assert_array_equal(array, vectors(restored)[name], err_msg=name)


# A short training.


def test_one_seed_gives_one_training_and_the_policy_is_deterministic(tmp_path: Path) -> None:
    settings: dict[str, Any] = {
        "envs": 2, "hidden": (8,), "batch": 16, "updates": 4, "replay_ratio": 8.0, "warmup": 50, "buffer": 500,
        "report_steps": 100, "stop": {"steps": 300},
    }  # fmt: skip
    here, there = (fever.train("Pendulum-v1", "td3", runs=tmp_path, **settings) for _ in range(2))
    arrays = there.run.checkpoint().arrays()
    for name, array in here.run.checkpoint().arrays().items():
        np.testing.assert_array_equal(array, arrays[name], err_msg=name)
    observation = np.array([1.0, 0.0, 8.0], np.float32)
    actions = [here.policy.act(observation, deterministic=flag) for flag in (True, False, False)]
    assert np.ptp(actions) == 0
    assert np.abs(actions[0]) <= 2
