"""IMPALA and APPO against plain formulas, their books, and whole trainings. Streams on Ray are in test_stream.py."""

from __future__ import annotations

import json
from typing import Any
from unittest.mock import Mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fever.algos.base import SamplingContext
from fever.algos.impala import APPO, STEP_METRICS, APPOConfig, Impala, ImpalaConfig
from fever.envs.source import EnvSource
from fever.errors import TrainingError
from fever.policy import Params
from fever.sampling.spec import Fragment
from fever.sampling.stream import Stream
from tests.environments import CounterEnv, MaskedEnv, NextStepCounters
from tests.factories import make_sampler, make_task, share_compiled
from tests.helpers import changed, split, with_other_phantoms

OUTSIDE = {"steps", "minibatches", "epochs", "fragments", "queue", "max_lag", "normalize_rewards"}
BOX = EnvSource("tests.environments:IdentityEnv", {"action_space": "box"})
CLIPPED = {"clip": 0.2}
both = pytest.mark.parametrize("algo", [Impala, APPO])


def make(
    target: Any = CounterEnv, algo: type[Impala] = Impala, envs: int = 4, workers: int = 0, seed: int = 0, **more: Any
) -> Impala:
    """Batches of 8 steps of 4 environments in one minibatch, unless the settings say otherwise."""
    settings = {"steps": 8, "minibatches": 1, "hidden": (4,), "recurrent_size": 3, "epochs": 1, **more}
    return share_compiled(algo(algo.Config(**settings), make_task(target, envs, workers, seed)), OUTSIDE)


def collect(impala: Impala, target: Any = CounterEnv, seed: int = 0, skip: int = 1, noise: float = 0) -> Fragment:
    """A fragment of all the environments of a batch; not the very first, so that recurrent states are not zero.

    With noise, another policy seems to have acted.
    """
    sampler = make_sampler(impala, target, impala.envs, seed=seed)
    fragment = [sampler.sample(impala.weights()) for _ in range(skip + 1)][-1]
    log_probs = fragment.arrays["log_probs"]
    log_probs = log_probs + noise * np.random.default_rng(seed).normal(size=log_probs.shape).astype(np.float32)
    return changed(fragment, log_probs=log_probs)


def enlarge(impala: Impala, factor: float = 30) -> None:
    """A policy that is far from even."""
    weights = {name: value * (factor if name == "policy/w" else 1) for name, value in impala.weights().items()}
    impala.params = jnp.asarray(impala.flat.pack(weights))


def assert_same(here: Impala, there: Impala) -> None:
    assert here.weights().keys() == there.weights().keys()
    for name, value in here.weights().items():
        np.testing.assert_array_equal(value, there.weights()[name], err_msg=name)


def differ(here: Impala, there: Impala) -> bool:
    return not np.allclose(here.params, there.params, atol=1e-6)


# The gradient.


class ByHand:
    """The objective of a batch in NumPy and float64, one row of time after the other."""

    def __init__(self, impala: Impala, fragment: Fragment) -> None:
        self.impala, self.arrays, self.statistics = impala, fragment.arrays, impala.normalizer.statistics()
        self.start = np.asarray(impala.params, np.float64)
        config, arrays = impala.config, fragment.arrays
        outputs, values = self.forward(self.start)
        self.log_ratio = self.log_probs(outputs) - arrays["log_probs"]
        ratio, self.values = np.exp(self.log_ratio), values[:-1]
        self.rho = np.minimum(ratio, config.delta_limit)
        traces = config.trace_decay * np.minimum(ratio, config.trace_limit)
        following = np.where(np.isnan(arrays["bootstrap"]), values[1:], arrays["bootstrap"]) * ~arrays["terminated"]
        ended = arrays["terminated"] | arrays["truncated"]
        self.value_targets, self.advantages = np.zeros_like(self.values), np.zeros_like(self.values)
        for t in reversed(range(config.steps)):  # remark 1 of Espeholt et al. 2018
            over = ended[t] | (t == config.steps - 1)
            value_target = (
                following[t] if t == config.steps - 1 else np.where(over, following[t], self.value_targets[t + 1])
            )
            delta = self.rho[t] * (arrays["rewards"][t] + config.gamma * following[t] - self.values[t])
            self.value_targets[t] = self.values[t] + delta + config.gamma * traces[t] * (value_target - following[t])
            self.advantages[t] = arrays["rewards"][t] + config.gamma * value_target - self.values[t]
        if config.normalize_advantages:
            rows = self.advantages[arrays["valid"]]
            self.advantages = (self.advantages - rows.mean()) / rows.std()

    def forward(self, vector: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Outputs of the policy `[T, B, ...]` and values `[T+1, B]`."""
        network, arrays = self.impala.network, self.arrays
        params = {**self.impala.flat.unpack(vector), **self.statistics}
        state, outputs, values = arrays["state"].astype(np.float64), [], []
        for row, first in zip(arrays["observations"].astype(np.float64), arrays["first"], strict=True):
            state = np.where(first[:, None], 0, state)
            values.append(network.values(params, row, state))
            output, state = network.act(params, row, state)
            outputs.append(output)
        return np.stack(outputs[:-1]), np.stack(values)

    def log_probs(self, outputs: np.ndarray) -> np.ndarray:
        return self.impala.distribution.log_prob(outputs, self.arrays["actions"])

    def mean(self, rows: np.ndarray) -> float:
        return float(rows[self.arrays["valid"]].mean())

    def terms(self, vector: np.ndarray) -> tuple[float, float, float]:
        """Losses of the policy and of the values, and the entropy: value_targets, advantages and weights stay."""
        outputs, values = self.forward(vector)
        log_probs, clip = self.log_probs(outputs), self.impala.config.clip
        if clip is None:
            gain = log_probs * self.rho * self.advantages
        else:
            ratio = np.exp(log_probs - self.arrays["log_probs"])
            gain = np.minimum(ratio * self.advantages, np.clip(ratio, 1 - clip, 1 + clip) * self.advantages)
        errors = (self.value_targets - values[:-1]) ** 2
        return -self.mean(gain), self.mean(errors), self.mean(self.impala.distribution.entropy(outputs))

    def loss(self, vector: np.ndarray) -> float:
        policy, value, entropy = self.terms(vector)
        return policy + self.impala.config.value_coefficient * value - self.impala.config.entropy_coefficient * entropy

    def gradient(self, width: float = 1e-5) -> np.ndarray:
        """By central differences."""
        steps = width * np.eye(len(self.start))
        return np.array([self.loss(self.start + step) - self.loss(self.start - step) for step in steps]) / (2 * width)

    def metrics(self) -> dict[str, float]:
        config, ratio, valid = self.impala.config, np.exp(self.log_ratio), self.arrays["valid"]
        outside = ratio > config.delta_limit if config.clip is None else np.abs(ratio - 1) > config.clip
        unexplained = (self.value_targets - self.values)[valid].var() / self.value_targets[valid].var()
        return {
            **dict(zip(STEP_METRICS[:3], self.terms(self.start), strict=True)),
            "kl": self.mean(ratio - 1 - self.log_ratio), "clip_fraction": self.mean(outside),
            "explained_variance": 1 - float(unexplained), "gradient_norm": float(np.linalg.norm(self.gradient())),
            "updates": 1.0,
        }  # fmt: skip


ODD = {"gamma": 0.8, "trace_decay": 0.7, "delta_limit": 1.3, "trace_limit": 0.9, "value_coefficient": 0.3}
CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "plain": (CounterEnv, {}),
    "clipped": (CounterEnv, {**CLIPPED, "entropy_coefficient": 0.2}),
    "raw": (CounterEnv, {**ODD, "normalize_advantages": False, "entropy_coefficient": 0.2}),
    "phantoms": (NextStepCounters, {"entropy_coefficient": 0.2}),
    "gaussian, clipped": (BOX, {**CLIPPED, "log_std": -0.7, "entropy_coefficient": 0.1}),
    "masks": (EnvSource(MaskedEnv, {"action_space": "multidiscrete"}), {"entropy_coefficient": 0.2}),
    "lstm": (CounterEnv, {"recurrent": "lstm"}),
    "gru, clipped, phantoms": (NextStepCounters, {**CLIPPED, "recurrent": "gru"}),
}


@pytest.mark.parametrize("case", CASES)
def test_a_gradient_step_is_that_of_the_plain_formula(case: str) -> None:
    target, settings = CASES[case]
    impala = make(target, **{"normalize_rewards": False, "learning_rate": 1.0, **settings})
    enlarge(impala)
    impala.normalizer.add(collect(impala, target, seed=1).arrays)
    impala.optimizer = Mock(
        step=lambda params, state, gradient, rate: (params - rate * gradient, state)
    )  # plain gradient steps
    impala._jitted_update = jax.jit(impala._update)
    fragment = collect(impala, target, noise=0.3)
    assert fragment.arrays["valid"].all() == ("phantoms" not in case)
    assert (fragment.arrays["terminated"] | fragment.arrays["truncated"]).any()
    by_hand = ByHand(impala, fragment)
    expected, gradient = by_hand.metrics(), by_hand.gradient()
    metrics = impala.learn([fragment])
    assert metrics == pytest.approx(expected, rel=2e-3, abs=1e-5)
    assert 0.1 < metrics["clip_fraction"] < 0.9
    taken = by_hand.start - np.asarray(impala.params)
    np.testing.assert_allclose(taken, gradient, rtol=0.01, atol=np.abs(gradient).max() / 1000)


@pytest.mark.parametrize(
    ("algo", "target", "core"),
    [(Impala, CounterEnv, "none"), (Impala, CounterEnv, "lstm"), (Impala, BOX, "none"), (APPO, BOX, "none")],
)
def test_ones_own_fresh_experience_is_not_clipped(algo: type[Impala], target: Any, core: str) -> None:
    impala = make(target, algo, recurrent=core)
    enlarge(impala)  # so that a recurrent policy agrees with itself only from the fragment's state
    for seed in range(3):
        metrics = impala.learn([collect(impala, target, seed)])
        assert metrics["kl"] == pytest.approx(0, abs=1e-6)
        assert metrics["clip_fraction"] == 0


def test_the_state_of_a_fragment_goes_with_its_environment() -> None:
    # Without a change of weights the acting and the learning policy agree, but only from the same recurrent states.
    impala = make(recurrent="lstm", minibatches=4, epochs=3, learning_rate=1e-12)
    enlarge(impala)
    fragment = collect(impala)
    states = fragment.arrays["state"]
    assert impala.learn([fragment])["kl"] == pytest.approx(0, abs=1e-6)
    other = make(recurrent="lstm")
    impala.restore(other.state(), other.weights())
    enlarge(impala)
    assert impala.learn([changed(fragment, state=states[::-1])])["kl"] > 1e-5


@pytest.mark.parametrize("settings", [{}, CLIPPED], ids=["plain", "clipped"])
def test_phantom_steps_never_change_the_update(settings: dict[str, Any]) -> None:
    here, there = (make(NextStepCounters, epochs=2, **settings) for _ in range(2))
    fragment = collect(here, NextStepCounters, noise=0.3)
    assert 0 < (~fragment.arrays["valid"]).sum() < 16
    metrics = here.learn([fragment]), there.learn([with_other_phantoms(fragment)])
    assert metrics[0] == metrics[1]
    assert_same(here, there)
    assert here.steps == fragment.steps == fragment.arrays["valid"].sum()


@both
def test_a_minibatch_of_nothing_but_phantom_steps_has_no_gradient(algo: type[Impala]) -> None:
    impala = make(NextStepCounters, algo, steps=1, minibatches=4)
    fragment = changed(collect(impala, NextStepCounters), valid=np.array([[True, False, True, False]]))
    orders = np.array([[1], [0], [3], [2]], np.int32)  # a phantom before anything gave Adam momentum, and after
    batch, statistics = fragment.arrays, impala.normalizer.statistics()
    _, _, history = impala._jitted_update(impala.params, impala.optimizer_state, batch, statistics, orders, 1e-3)
    assert [bool(norm > 0) for norm in history[:, -1]] == [False, True, False, True]
    assert not np.any(history[0::2, : STEP_METRICS.index("explained_variance")])
    before = impala.weights()
    impala.learn([fragment])
    assert impala.steps == 2
    assert not np.array_equal(before["policy/w"], impala.weights()["policy/w"])


def test_a_batch_of_nothing_but_phantom_steps_changes_nothing() -> None:
    impala = make(NextStepCounters, envs=1, steps=1)
    fragment = collect(impala, NextStepCounters)
    impala.learn([changed(fragment, valid=np.ones((1, 1), bool))])
    before, statistics = impala.weights(), impala.normalizer.arrays()
    impala.optimizer_state = impala.optimizer.init(impala.params)  # without the momentum of what was learned
    impala.learn([changed(fragment, valid=np.zeros((1, 1), bool))])
    for name, value in before.items():
        np.testing.assert_array_equal(value, impala.weights()[name], err_msg=name)
    for name, value in statistics.items():
        np.testing.assert_array_equal(value, impala.normalizer.arrays()[name], err_msg=name)
    assert impala.steps == 1


def test_rewards_are_divided_by_the_deviation_of_returns_and_fragments_stay() -> None:
    scaled, plain = make(), make(normalize_rewards=False)
    fragment = collect(scaled)
    rewards = fragment.arrays["rewards"].copy()
    by_hand = np.clip(rewards / np.float32(fragment.arrays["discounted"].std()), -10, 10)
    metrics = scaled.learn([fragment])
    np.testing.assert_array_equal(fragment.arrays["rewards"], rewards)
    assert metrics == pytest.approx(plain.learn([changed(fragment, rewards=by_hand)]), rel=1e-3, abs=1e-5)


# Batches and their order.


@pytest.mark.parametrize(("minibatches", "width"), [(1, 4), (2, 2), (4, 1), (99, 1)])
def test_every_epoch_is_a_permutation_of_the_environments(minibatches: int, width: int) -> None:
    impala = make(minibatches=minibatches, epochs=3)
    update = Mock(side_effect=lambda params, state, *_: (params, state, np.zeros((1, len(STEP_METRICS)))))
    impala._jitted_update = update
    metrics = impala.learn([collect(impala)])
    orders = update.call_args.args[4]
    assert orders.shape == (3 * 4 // width, width)
    assert metrics["updates"] == len(orders)
    np.testing.assert_array_equal(np.sort(orders.reshape(3, 4), axis=1), [np.arange(4)] * 3)
    assert len({tuple(epoch) for epoch in orders.reshape(3, 4).tolist()}) > 1


def test_it_does_not_matter_in_how_many_fragments_a_batch_comes() -> None:
    settings = {"recurrent": "lstm", "minibatches": 2}
    one, two = make(**settings), make(workers=2, **settings)
    four = make(envs=2, workers=2, fragments=4, **settings)
    whole = collect(one)
    metrics = one.learn([whole])
    for other, parts in ((two, 2), (four, 4)):
        assert (other.fragments, other.envs) == (parts, 4)
        assert metrics == pytest.approx(other.learn(split(whole, parts)), rel=1e-5, abs=1e-6)
        np.testing.assert_allclose(one.params, other.params, rtol=1e-5, atol=1e-6)
        assert (other.steps, other.version) == (32, 1)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"minibatches": 3}, 2),
        ({"minibatches": 4, "envs": 6, "workers": 3}, 3),
        ({"minibatches": 4, "envs": 3, "workers": 3, "fragments": 5}, 1),
    ],
)
def test_there_are_as_many_minibatches_as_divide_a_batch(settings: dict[str, Any], expected: int) -> None:
    assert make(**settings).minibatches == expected


# Its books.


class Canned(Stream):
    """Gives out fragments whose versions are so much behind."""

    waiting, dropped = 5, 7

    def __init__(self, fragment: Fragment, lags: list[list[int]]) -> None:
        self.fragment, self.lags = fragment, lags
        self.published: list[tuple[int, Params]] = []

    def publish(self, params: Params, version: int) -> None:
        self.published.append((version, params))

    def next(self, fragments: int) -> list[Fragment]:
        lags = self.lags.pop(0)
        parts = split(self.fragment, fragments)
        for part, lag in zip(parts, lags, strict=True):
            part.version = self.published[-1][0] - lag
        return parts


def test_the_loop_publishes_every_version_and_says_how_old_its_experience_is() -> None:
    impala = make(workers=2)
    impala.version = 10  # of a run that was resumed
    canned = Canned(collect(impala), [[0, 0], [1, 4], [3, 2]])
    rows = []
    for _, iteration in zip(range(3), impala.train(canned), strict=False):
        rows.append(iteration.metrics)
        assert iteration.seconds.keys() == {"transfer", "wait", "learn"}
        assert [type(report) for report in iteration.reports] == [Fragment] * 2
        np.testing.assert_allclose(canned.published[0][1]["value/w"], make().weights()["value/w"])
        assert (impala.version, impala.steps) == (10 + len(rows), 32 * len(rows))
    assert [row["policy_lag"] for row in rows] == [0, 2.5, 2.5]
    assert [row["policy_lag_max"] for row in rows] == [0, 4, 3]
    assert {(row["queue"], row["fragments_dropped"]) for row in rows} == {(5, 7)}
    assert [version for version, _ in canned.published] == [10, 11, 12]
    assert not np.array_equal(canned.published[0][1]["value/w"], canned.published[1][1]["value/w"])


def test_in_one_process_all_experience_is_fresh() -> None:
    impala = make(fragments=2)
    stream = impala.start(SamplingContext(EnvSource(CounterEnv), None, 0))
    for number, iteration in zip(range(1, 4), impala.train(stream), strict=False):
        assert iteration.seconds.keys() == {"transfer", "sample", "learn"}
        assert iteration.metrics["policy_lag_max"] == 0
        assert [report.version for report in iteration.reports] == [number - 1] * 2
        assert impala.steps == 64 * number
    stream.close()


def test_a_restored_algorithm_learns_on_as_if_nothing_had_happened() -> None:
    settings = {"minibatches": 2, "epochs": 2}
    original, restored = make(seed=1, **settings), make(seed=2, **settings)
    first, second = collect(original, seed=1), collect(original, seed=2)
    original.learn([first])
    state = original.state()
    facts = json.loads(json.dumps(state.facts))
    state = state._replace(facts=facts, arrays={name: value.copy() for name, value in state.arrays.items()})
    restored.restore(state, original.weights())
    assert_same(original, restored)
    assert original.learn([second]) == restored.learn([second])
    assert_same(original, restored)
    assert (original.steps, original.version) == (restored.steps, restored.version) == (64, 2)


def test_a_loss_that_is_no_number_is_refused_and_the_weights_stay() -> None:
    impala = make()
    before, fragment = impala.weights(), collect(impala)
    log_probs = fragment.arrays["log_probs"].copy()
    log_probs[3, 1] = np.nan
    with pytest.raises(TrainingError, match="a smaller learning_rate usually helps"):
        impala.learn([changed(fragment, log_probs=log_probs)])
    np.testing.assert_array_equal(impala.weights()["policy/w"], before["policy/w"])
    assert (impala.steps, impala.version) == (0, 0)


def test_appo_is_impala_with_a_clip_and_several_passes() -> None:
    here, there = ImpalaConfig().model_dump(), APPOConfig().model_dump()
    assert {name: (value, there[name]) for name, value in here.items() if value != there[name]} == {
        "clip": (None, 0.2), "epochs": (1, 4),
    }  # fmt: skip
