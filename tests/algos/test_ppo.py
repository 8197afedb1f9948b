from __future__ import annotations

import json
from typing import Any
from unittest.mock import Mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fever.algos.ppo
from fever.algos.normalize import Moments
from fever.algos.on_policy import values_of
from fever.algos.ppo import PPO, PPOConfig
from fever.algos.returns import gae
from fever.envs.source import EnvSource
from fever.errors import FeverError, TrainingError
from fever.sampling.spec import Fragment, SamplerSpec
from fever.sampling.workers import LocalWorkers
from tests.environments import CounterEnv, IdentityEnv, ImageEnv, NextStepCounters, SameStepCounters
from tests.factories import make_sampler, make_task, share_compiled
from tests.helpers import changed, split, with_other_phantoms

OUTSIDE = {  # settings that the compiled update gets as arguments, as shapes, or not at all
    "learning_rate", "learning_rate_schedule", "clip", "clip_schedule",
    "steps", "minibatch", "epochs", "normalize_rewards",
}  # fmt: skip
PLAIN = {"normalize_advantages": False, "normalize_observations": False, "normalize_rewards": False}
recurrent = pytest.mark.parametrize("core", ["none", "lstm"])


def make(
    target: Any = CounterEnv,
    envs: int = 4,
    workers: int = 0,
    total_steps: int | None = None,
    seed: int = 0,
    **settings: Any,
) -> PPO:
    """PPO with batches of 8 steps of 4 environments, unless the settings say otherwise."""
    settings = {"steps": 8, "minibatch": 16, "epochs": 2, "hidden": (8,), "recurrent_size": 6, **settings}
    return share_compiled(PPO(PPOConfig(**settings), make_task(target, envs, workers, seed, total_steps)), OUTSIDE)


def collect(ppo: PPO, target: Any = CounterEnv, seed: int = 0, skip: int = 1) -> Fragment:
    """A fragment of all the environments of a batch; not the very first, so that recurrent states are not zero."""
    sampler = make_sampler(ppo, target, ppo.task.total_envs, seed=seed)
    return [sampler.sample(ppo.weights()) for _ in range(skip + 1)][-1]


def assert_same_weights(here: PPO, there: PPO, **tolerance: float) -> None:
    assert here.weights().keys() == there.weights().keys()
    for name, value in here.weights().items():
        np.testing.assert_allclose(value, there.weights()[name], err_msg=name, **{"rtol": 0, **tolerance})


def differ(here: PPO, there: PPO) -> bool:
    return any(not np.allclose(value, there.weights()[name], atol=1e-6) for name, value in here.weights().items())


def without_optimizer(ppo: PPO) -> None:
    """Plain gradient steps: Adam would blow tiny differences up."""
    ppo.optimizer = Mock(step=lambda params, state, gradient, rate: (params - rate * gradient, state))
    ppo._jitted_update = jax.jit(ppo._update)


# The batch and its order.


def test_a_minibatch_larger_than_the_batch_is_all_of_it() -> None:
    assert make(minibatch=64, epochs=3)._orders().shape == (3, 32)


@pytest.mark.parametrize(
    ("target", "trace", "entropy"),
    [(EnvSource("CartPole-v1"), 0.98, 0.01), (EnvSource("Pendulum-v1"), 0.95, 0.0), (ImageEnv, 0.95, 0.01)],
)
def test_trace_and_entropy_bonus_depend_on_the_spaces_unless_they_are_set(
    target: Any, trace: float, entropy: float
) -> None:
    task = make_task(target, 2)

    def found(**settings: float) -> tuple[float | None, float | None]:
        config = PPO(PPOConfig(hidden=(4,), **settings), task).config  # type: ignore[arg-type]
        return config.gae_lambda, config.entropy_coefficient

    assert found() == (trace, entropy)
    assert found(entropy_coefficient=0.0) == (trace, 0.0)
    assert found(gae_lambda=0.0) == (0.0, entropy)


@pytest.mark.parametrize(
    ("core", "minibatch", "columns", "width"),
    [("none", 16, 32, 16), ("none", 32, 32, 32), ("none", 1, 32, 1), ("lstm", 16, 4, 2), ("gru", 8, 4, 1)],
)
def test_every_epoch_is_a_permutation_of_the_batch(core: str, minibatch: int, columns: int, width: int) -> None:
    # 8 steps of 4 environments: 32 columns of one step, or 4 of whole sequences with a memory.
    orders = make(recurrent=core, minibatch=minibatch, epochs=3)._orders()
    assert (orders.shape, orders.dtype) == ((3 * columns // width, width), np.int32)
    epochs = orders.reshape(3, columns)
    np.testing.assert_array_equal(np.sort(epochs, axis=1), [np.arange(columns)] * 3)
    assert len({tuple(epoch) for epoch in epochs.tolist()}) > 1


@recurrent
def test_it_does_not_matter_in_how_many_fragments_a_batch_comes(core: str) -> None:
    one, two = make(recurrent=core), make(workers=2, recurrent=core)
    whole = collect(one)
    before = one.weights()
    metrics = one.learn([whole])
    assert metrics == pytest.approx(two.learn(split(whole, 2)), rel=1e-5, abs=1e-6)
    assert_same_weights(one, two, rtol=1e-5, atol=1e-6)
    assert one.steps == two.steps == 32
    assert metrics["updates"] == 4  # two epochs of two minibatches
    assert not np.allclose(before["policy/w"], one.weights()["policy/w"])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"minibatch": 15},
            "minibatch=15 does not divide the batch of 4 environments x 8 steps = 32; minibatch=8 does",
        ),
        ({"minibatch": 10, "workers": 3}, "batch of 4 environments x 8 steps = 32; minibatch=8 does"),
        (
            {"recurrent": "lstm", "minibatch": 4},
            "whole sequences: minibatch=4 must be steps=8 times a divisor of the 4",
        ),
        ({"recurrent": "gru", "minibatch": 24}, "minibatch=24 must be steps=8 times a divisor of the 4 environments"),
        ({"recurrent": "gru", "minibatch": 12}, "minibatch=12 must be steps=8 times a divisor of the 4 environments"),
        ({"learning_rate_schedule": "linear"}, "a linear schedule needs an end; give --stop-steps"),
        ({"clip_schedule": "linear"}, "a linear schedule needs an end; give --stop-steps"),
    ],
)
def test_sizes_that_do_not_fit_are_refused_with_a_suggestion(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(FeverError, match=message):
        make(**settings)


# The update.


@pytest.mark.parametrize("target", [CounterEnv, SameStepCounters, NextStepCounters])
def test_losses_of_the_first_gradient_step_by_hand(target: Any) -> None:
    """With lambda 0, the whole batch at once and nothing normalised, the losses are moments of the one-step errors.

    The value after a truncation is that of the true last observation (environment, episode, 4); after a termination
    it is 0.
    """
    ppo = make(target, steps=16, minibatch=64, epochs=1, gamma=0.5, gae_lambda=0.0, **PLAIN)
    network, params, fragment = ppo.network, ppo.weights(), collect(ppo, target, skip=0)
    arrays = fragment.arrays
    state = network.initial_state(1)
    errors = []
    for t, index in zip(*np.nonzero(arrays["valid"]), strict=True):
        observation = arrays["observations"][t, index]
        last = observation + np.float32([0, 0, 1])  # the counters: one more step in the same episode
        value = network.values(params, observation[None], state)[0]
        following = 0.0 if arrays["terminated"][t, index] else network.values(params, last[None], state)[0]
        errors.append(arrays["rewards"][t, index] + 0.5 * following - value)
    assert arrays["terminated"].any()
    assert arrays["truncated"].any()
    metrics = ppo.learn([fragment])
    assert metrics["value_loss"] == pytest.approx(np.mean(np.square(errors)), rel=1e-4)
    assert metrics["policy_loss"] == pytest.approx(-np.mean(errors), rel=1e-4)
    assert metrics["kl"] == pytest.approx(0, abs=1e-6)
    assert (metrics["clip_fraction"], metrics["updates"]) == (0, 1)
    assert ppo.steps == len(errors)


def objective(params: Any, ppo: PPO, batch: dict[str, Any], advantages: Any, values: Any) -> jax.Array:
    """The loss of Schulman et al. 2017, equation 9, with clipped values, over the whole batch."""
    config, network, distribution = ppo.config, ppo.network, ppo.distribution
    features = network.features(params, batch["observations"][:-1].reshape(32, -1), jnp)
    outputs, predictions = network.policy(params, features, jnp), network.value(params, features, jnp)
    log_probs = distribution.log_prob(outputs, batch["actions"].reshape(32, -1), jnp)
    ratio = jnp.exp(log_probs - batch["log_probs"].reshape(32))
    normal = (advantages - advantages.mean()) / advantages.std()
    policy = jnp.minimum(ratio * normal, jnp.clip(ratio, 1 - config.clip, 1 + config.clip) * normal).mean()
    returns, near = advantages + values, jnp.clip(predictions, values - config.value_clip, values + config.value_clip)
    value = jnp.maximum((predictions - returns) ** 2, (near - returns) ** 2).mean()
    entropy = distribution.entropy(outputs, jnp).mean()
    return -policy + config.value_coefficient * value - config.entropy_coefficient * entropy


def test_two_gradient_steps_are_those_of_the_plain_formula() -> None:
    ppo = make(
        minibatch=32, epochs=2, learning_rate=0.1, gamma=0.9, gae_lambda=0.7, value_clip=0.05, value_coefficient=0.3,
        entropy_coefficient=0.2, normalize_observations=False, normalize_rewards=False,
    )  # fmt: skip
    without_optimizer(ppo)
    fragment, before = collect(ppo), ppo.weights()
    noise = np.random.default_rng(0).normal(0, 0.3, (8, 4)).astype(np.float32)  # so that some ratios are clipped
    batch = changed(fragment, log_probs=fragment.arrays["log_probs"] + noise).arrays
    observations = batch["observations"]
    values = ppo.network.value(before, observations.reshape(36, -1)).reshape(9, 4)
    following = np.where(np.isnan(batch["bootstrap"]), values[1:], batch["bootstrap"])
    ends = batch["terminated"], batch["truncated"]
    advantages = gae(batch["rewards"], values[:-1], following, *ends, 0.9, 0.7).reshape(32)
    gradient = jax.jit(jax.grad(lambda params: objective(params, ppo, batch, advantages, values[:-1].reshape(32))))
    expected = before
    for _ in range(2):
        gradients = gradient(expected)
        expected = {name: expected[name] - 0.1 * gradients[name] for name in expected}
    metrics = ppo.learn([changed(fragment, log_probs=batch["log_probs"])])
    assert 0.1 < metrics["clip_fraction"] < 0.9
    for name, value in expected.items():
        change = np.asarray(value) - before[name]
        assert np.abs(change).max() > 1e-5, name
        np.testing.assert_allclose(
            ppo.weights()[name] - before[name], change, rtol=0.01, atol=np.abs(change).max() / 1000, err_msg=name
        )


def test_every_sequence_of_a_minibatch_begins_with_its_own_state() -> None:
    # Without a change of weights the acting and the learning policy agree, but only from the same recurrent states.
    ppo = make(recurrent="lstm", learning_rate=1e-12)
    larger = {name: value * (100 if name == "policy/w" else 1) for name, value in ppo.weights().items()}
    ppo.params = jax.numpy.asarray(ppo.flat.pack(larger))
    fragment = collect(ppo)
    metrics = ppo.learn([fragment])
    assert metrics["clip_fraction"] == 0
    assert metrics["kl"] == pytest.approx(0, abs=1e-6)


def test_the_bootstrap_of_a_truncation_changes_the_update_and_others_are_not_looked_at() -> None:
    fragment = collect(make())
    bootstrap = fragment.arrays["bootstrap"].copy()
    truncated, terminated = fragment.arrays["truncated"], fragment.arrays["terminated"]
    assert truncated.any()
    assert terminated.any()
    plain, more, irrelevant = make(), make(), make()
    plain.learn([fragment])
    more.learn([changed(fragment, bootstrap=np.where(truncated, bootstrap + 5, bootstrap))])
    irrelevant.learn([changed(fragment, bootstrap=np.where(terminated, np.float32(5), bootstrap))])
    assert differ(plain, more)
    assert_same_weights(plain, irrelevant)


@pytest.mark.parametrize(
    "settings", [{}, {"recurrent": "lstm"}, {"target_kl": 0.001, "value_clip": 0.2}], ids=["plain", "lstm", "limits"]
)
def test_phantom_steps_never_change_the_update(settings: dict[str, Any]) -> None:
    here, there = (make(NextStepCounters, **settings) for _ in range(2))
    fragment = collect(here, NextStepCounters)
    assert 0 < (~fragment.arrays["valid"]).sum() < 16
    metrics = here.learn([fragment]), there.learn([with_other_phantoms(fragment)])
    assert metrics[0] == metrics[1]
    assert_same_weights(here, there)
    assert here.steps == fragment.steps


def test_phantom_steps_do_not_count_in_the_deviation_of_returns() -> None:
    ppo = make(NextStepCounters)
    fragment = collect(ppo, NextStepCounters)
    ppo.learn([fragment])
    expected = Moments.of(fragment.arrays["discounted"][fragment.arrays["valid"]])
    assert ppo.normalizer.returns.var == pytest.approx(expected.var)


def test_rewards_are_divided_by_the_deviation_of_returns_and_clipped() -> None:
    scaled, plain = make(), make(normalize_rewards=False)
    fragment = collect(scaled)
    rewards = fragment.arrays["rewards"].copy()
    rewards[0, 0] = 1e4
    fragment = changed(fragment, rewards=rewards.copy())
    metrics = scaled.learn([fragment])
    np.testing.assert_array_equal(fragment.arrays["rewards"], rewards)  # fragments are not written to
    deviation = np.float32(fragment.arrays["discounted"].std())
    by_hand = np.clip(rewards / deviation, -10, 10)
    assert by_hand[0, 0] == 10
    assert metrics == pytest.approx(plain.learn([changed(fragment, rewards=by_hand)]), rel=1e-3, abs=1e-5)
    assert plain.normalizer.returns.count == 0


def test_observations_are_normalised_by_what_was_seen_before_this_batch() -> None:
    ppo = make()
    fragment = collect(ppo)
    np.testing.assert_array_equal(ppo.weights()["observation/mean"], np.zeros(3))
    np.testing.assert_allclose(ppo.weights()["observation/std"], np.ones(3))
    metrics = ppo.learn([fragment])
    seen = fragment.arrays["observations"][:-1].reshape(-1, 3)
    np.testing.assert_allclose(ppo.weights()["observation/mean"], seen.mean(0), rtol=1e-5)
    np.testing.assert_allclose(ppo.weights()["observation/std"], seen.std(0), rtol=1e-4)
    assert metrics["kl"] < 0.1  # the acting and the learning policy saw the same numbers
    assert {"observation/mean", "observation/std"}.isdisjoint(make(normalize_observations=False).weights())


def test_updates_stop_where_the_policy_has_moved_too_far() -> None:
    # The first step finds a divergence of 0 and is taken; it leads too far, so that the other three are not.
    settings = {"minibatch": 32, "learning_rate": 0.05, **PLAIN}
    stopped, once = make(**settings, epochs=4, target_kl=1e-3), make(**settings, epochs=1)
    fragment = collect(stopped)
    metrics = stopped.learn([fragment])
    once.learn([fragment])
    assert metrics["updates"] == 1
    assert metrics["kl"] > 1.5e-3
    assert_same_weights(stopped, once, atol=1e-5)
    steps_of_adam = [int(leaf) for leaf in jax.tree.leaves(stopped.optimizer_state) if leaf.shape == ()]
    assert steps_of_adam == [1]


def test_schedules_fall_to_nothing_at_the_last_step_and_stay_there() -> None:
    ppo = make(total_steps=64, learning_rate=0.01, learning_rate_schedule="linear", clip=0.3, clip_schedule="linear")
    fragment = collect(ppo)  # of 32 steps
    history, weights = [], []
    for _ in range(4):
        metrics = ppo.learn([fragment])
        history.append((metrics["learning_rate"], metrics["clip"]))
        weights.append(ppo.weights()["policy/w"])
    assert history == [pytest.approx(pair) for pair in ((0.01, 0.3), (0.005, 0.15), (0.0, 0.0), (0.0, 0.0))]
    assert not np.allclose(weights[0], weights[1], atol=1e-6)
    np.testing.assert_array_equal(weights[1], weights[2])


def test_without_a_schedule_nothing_falls() -> None:
    ppo = make(total_steps=64, learning_rate=0.01)
    fragment = collect(ppo)
    assert [ppo.learn([fragment])["learning_rate"] for _ in range(3)] == [0.01] * 3


def test_a_loss_that_is_no_number_is_refused_and_the_weights_stay() -> None:
    ppo = make()
    before, fragment = ppo.weights(), collect(ppo)
    log_probs = fragment.arrays["log_probs"].copy()
    log_probs[3, 1] = np.nan
    with pytest.raises(TrainingError, match="a smaller learning_rate usually helps"):
        ppo.learn([changed(fragment, log_probs=log_probs)])
    np.testing.assert_array_equal(ppo.weights()["policy/w"], before["policy/w"])


def test_the_loop_compiles_once_and_keeps_its_books(caplog: pytest.LogCaptureFixture) -> None:
    ppo = make(IdentityEnv)
    spec = SamplerSpec(EnvSource(IdentityEnv), ppo.network, 4, 8, 0.99, 0)
    workers = LocalWorkers(spec, ppo.task.observation, ppo.task.action)
    sizes = []
    with jax.log_compiles():
        for number, iteration in zip(range(1, 4), ppo.train(workers), strict=False):
            assert [fragment.version for fragment in iteration.reports] == [number]
            assert iteration.seconds.keys() == {"transfer", "sample", "learn"}
            assert ppo.steps == 32 * number
            sizes.append(ppo._jitted_update._cache_size())
    assert [record.getMessage().startswith("Compiling jit(_update)") for record in caplog.records].count(True) == 1
    assert sizes[1] == sizes[2] <= 2  # the first weights are NumPy arrays: one more way in, to the same program


@recurrent
def test_a_restored_algorithm_learns_on_as_if_nothing_had_happened(core: str) -> None:
    original, restored = make(recurrent=core, seed=1), make(recurrent=core, seed=2)
    first, second = collect(original, seed=1), collect(original, seed=2)
    original.learn([first])
    state = original.state()
    facts = json.loads(json.dumps(state.facts))
    state = state._replace(facts=facts, arrays={name: value.copy() for name, value in state.arrays.items()})
    restored.restore(state, original.weights())
    assert_same_weights(original, restored)
    assert original.learn([second]) == restored.learn([second])
    assert_same_weights(original, restored)
    assert (
        (original.steps, original.normalizer.returns.count)
        == (restored.steps, restored.normalizer.returns.count)
        == (64, 64)
    )


def test_one_seed_gives_one_training_and_another_seed_another() -> None:
    here, there, other = make(seed=3), make(seed=3), make(seed=4)
    fragment = collect(here)
    here.learn([fragment])
    there.learn([fragment])
    assert_same_weights(here, there)
    assert differ(here, other)


def test_gradients_of_images_in_chunks_add_up_to_those_of_the_minibatch(monkeypatch: pytest.MonkeyPatch) -> None:
    learned = []
    for chunk in (4, 10**6):
        monkeypatch.setattr(fever.algos.ppo, "IMAGE_CHUNK", chunk)
        ppo = make(ImageEnv, convolutions=((4, 4, 2),), convolution_features=8, epochs=1, entropy_coefficient=0.1)
        without_optimizer(ppo)
        fragment = collect(ppo, ImageEnv)
        observations = fragment.arrays["observations"]
        values = ppo.network.values(ppo.weights(), observations.reshape(36, 10, 12, 3), np.zeros((36, 0))).reshape(9, 4)
        np.testing.assert_allclose(values_of(ppo.network, ppo.weights(), fragment.arrays), values, rtol=1e-4, atol=1e-5)
        learned.append((ppo, ppo.learn([fragment])))
    (chunked, chunked_metrics), (whole, whole_metrics) = learned
    assert chunked_metrics == pytest.approx(whole_metrics, rel=1e-3, abs=1e-5)
    start = make(ImageEnv, convolutions=((4, 4, 2),), convolution_features=8)
    for name, value in start.weights().items():
        there = whole.weights()[name] - value
        assert np.abs(there).max() > 0
        np.testing.assert_allclose(chunked.weights()[name] - value, there, rtol=0.01, atol=np.abs(there).max() / 1000)


# Sampling while learning.


class Pool:
    """Stands for workers: remembers which weights each fragment was sampled with."""

    def __init__(self, ppo: PPO) -> None:
        self.sampler = make_sampler(ppo, CounterEnv, ppo.task.total_envs)
        self.used: list[Any] = []

    def broadcast(self, weights: Any) -> None:
        self.weights = weights

    def collect(self, fragments: int) -> list[Fragment]:
        self.used.append(self.weights)
        return [self.sampler.sample(self.weights)]


def same(here: Any, there: Any) -> bool:
    return all(np.array_equal(here[name], there[name]) for name in here)


def test_with_overlap_weights_of_samples_are_one_update_older() -> None:
    ppo = make(overlap=True)
    pool, after = Pool(ppo), [ppo.weights()]  # weights after so many updates
    iterations = ppo.train(pool)
    for number in range(1, 5):
        assert len(next(iterations).reports) == 1
        assert ppo.steps == number * 32
        after.append(ppo.weights())
    assert [[number for number, one in enumerate(after) if same(one, used)] for used in pool.used] == [
        [0], [0], [1], [2], [3]
    ]  # fmt: skip


def test_overlap_learns_the_same_from_the_same_batches() -> None:
    overlapped, plain = make(overlap=True), make()
    iterations = overlapped.train(Pool(overlapped))
    for _ in range(3):
        plain.learn(next(iterations).reports)  # type: ignore[arg-type]
    assert same(overlapped.weights(), plain.weights())


def test_an_update_that_sampling_interrupts_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    ppo = make(overlap=True)
    pool = Pool(ppo)
    iterations = ppo.train(pool)
    next(iterations)
    before, steps = ppo.weights(), ppo.steps
    monkeypatch.setattr(pool, "collect", Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        next(iterations)
    assert ppo.steps == steps
    assert same(ppo.weights(), before)
