from __future__ import annotations

import json
import math
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from gymnasium import spaces
from scipy import special, stats

from fever.envs.contract import describe_space
from fever.policy.distributions import Categorical, Gaussian, distribution_for

BOX = spaces.Box(np.array([-2.0, 0.0, 1.0], np.float32), np.array([2.0, 5.0, 1.5], np.float32))
ACTION_SPACES = {
    "discrete": spaces.Discrete(5),
    "multidiscrete": spaces.MultiDiscrete([2, 5, 3]),
    "multibinary": spaces.MultiBinary(4),
    "box": BOX,
}
every_space = pytest.mark.parametrize("space", ACTION_SPACES.values(), ids=ACTION_SPACES)
choices = pytest.mark.parametrize("sizes", [(5,), (2, 5, 3), (2, 2, 2, 2)], ids=["single", "multi", "binary"])


def of(space: spaces.Space) -> Categorical | Gaussian:
    """The distribution over a space, by way of JSON as in a checkpoint."""
    return distribution_for(json.loads(json.dumps(describe_space(space))))


def parameters(distribution: Categorical | Gaussian, leading: tuple[int, ...] = (50,), seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(*leading, distribution.outputs)).astype(np.float32)


def probabilities(outputs: np.ndarray, sizes: tuple[int, ...]) -> list[list[np.ndarray]]:
    """For every row a list of each choice's probabilities, by a plain loop over the used logits."""
    rows = outputs.astype(np.float64).reshape(len(outputs), len(sizes), max(sizes))
    return [[special.softmax(row[choice, :size]) for choice, size in enumerate(sizes)] for row in rows]


def categorical(sizes: tuple[int, ...]) -> Categorical:
    return Categorical(sizes, (0,) * len(sizes), (len(sizes),))


@choices
def test_categorical_log_probabilities_are_those_of_scipy(sizes: tuple[int, ...]) -> None:
    distribution = categorical(sizes)
    outputs = parameters(distribution)
    actions = np.random.default_rng(1).integers(0, sizes, (50, len(sizes))).astype(np.int32)
    expected = [
        sum(stats.rv_discrete(values=(range(len(p)), p)).logpmf(a) for p, a in zip(row, chosen, strict=True))
        for row, chosen in zip(probabilities(outputs, sizes), actions, strict=True)
    ]
    np.testing.assert_allclose(distribution.log_prob(outputs, actions), expected, rtol=1e-5)


@choices
def test_categorical_entropy_is_that_of_scipy(sizes: tuple[int, ...]) -> None:
    distribution = categorical(sizes)
    outputs = parameters(distribution)
    expected = [sum(stats.entropy(p) for p in row) for row in probabilities(outputs, sizes)]
    np.testing.assert_allclose(distribution.entropy(outputs), expected, rtol=1e-5)


@choices
def test_categorical_divergence_is_that_of_scipy(sizes: tuple[int, ...]) -> None:
    distribution = categorical(sizes)
    old, new = parameters(distribution, seed=0), parameters(distribution, seed=1)
    pairs = zip(probabilities(old, sizes), probabilities(new, sizes), strict=True)
    expected = [sum(stats.entropy(p, q) for p, q in zip(*rows, strict=True)) for rows in pairs]
    np.testing.assert_allclose(distribution.kl(old, new), expected, rtol=1e-4, atol=1e-6)


def test_categorical_numbers_by_hand() -> None:
    # Logits 0 and log 3 are probabilities 1/4 and 3/4; three equal logits are 1/3 each.
    distribution = categorical((2, 3))
    outputs = np.array([[0, math.log(3), 77, 1, 1, 1]], np.float32)  # the 77 is outside the first choice
    assert distribution.log_prob(outputs, np.array([[1, 2]]))[0] == pytest.approx(math.log(0.75) + math.log(1 / 3))
    assert distribution.entropy(outputs)[0] == pytest.approx(
        0.25 * math.log(4) + 0.75 * math.log(4 / 3) + math.log(3), rel=1e-5
    )
    np.testing.assert_array_equal(distribution.mode(outputs), [[1, 0]])


def gaussian() -> Gaussian:
    return Gaussian((-1.0,) * 3, (1.0,) * 3, (3,))


def split(outputs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Mean and standard deviation."""
    return outputs[:, :3].astype(np.float64), np.exp(outputs[:, 3:].astype(np.float64))


def test_gaussian_log_probability_and_entropy_are_those_of_scipy() -> None:
    outputs = parameters(gaussian())
    actions = np.random.default_rng(1).normal(size=(50, 3)).astype(np.float32)
    normal = stats.norm(*split(outputs))
    np.testing.assert_allclose(
        gaussian().log_prob(outputs, actions), normal.logpdf(actions).sum(-1), rtol=1e-4, atol=1e-4
    )
    np.testing.assert_allclose(gaussian().entropy(outputs), normal.entropy().sum(-1), rtol=1e-5, atol=1e-5)


def test_gaussian_divergence_is_the_integral() -> None:
    old, new = parameters(gaussian(), (4,), 0), parameters(gaussian(), (4,), 1)
    (mean_old, std_old), (mean_new, std_new) = split(old), split(new)
    offsets = np.linspace(-12, 12, 20001)[:, None, None]
    x = mean_old + std_old * offsets  # [points, rows, dimensions]
    p, q = stats.norm(mean_old, std_old), stats.norm(mean_new, std_new)
    integrand = p.pdf(x) * (p.logpdf(x) - q.logpdf(x)) * std_old
    expected = np.trapezoid(integrand, offsets, axis=0).sum(-1)
    np.testing.assert_allclose(gaussian().kl(old, new), expected, rtol=1e-4)


@every_space
def test_a_distribution_does_not_diverge_from_itself(space: spaces.Space) -> None:
    outputs = parameters(of(space))
    np.testing.assert_allclose(of(space).kl(outputs, outputs), 0, atol=1e-5)


@choices
def test_gumbel_samples_have_the_frequencies_of_the_softmax(sizes: tuple[int, ...]) -> None:
    distribution = categorical(sizes)
    outputs = parameters(distribution, (1,))
    draws = 100_000
    samples = distribution.sample(outputs, distribution.noise(np.random.default_rng(0), (draws,)))
    for choice, expected in enumerate(probabilities(outputs, sizes)[0]):
        counts = np.bincount(samples[:, choice], minlength=len(expected))
        assert len(counts) == len(expected)  # nothing outside a choice's own size
        assert stats.chisquare(counts, draws * expected).pvalue > 1e-3


def test_gaussian_samples_have_the_mean_and_the_deviation() -> None:
    outputs = np.array([[0.5, -2.0, 0.0, math.log(2.0), math.log(0.1), 0.0]], np.float32)
    samples = gaussian().sample(outputs, gaussian().noise(np.random.default_rng(0), (100_000,)))
    for column, (mean, std) in enumerate([(0.5, 2.0), (-2.0, 0.1), (0.0, 1.0)]):
        assert stats.kstest(samples[:, column], stats.norm(mean, std).cdf).pvalue > 1e-3


@every_space
def test_samples_of_any_leading_shape_have_the_stored_shape_and_dtype(space: spaces.Space) -> None:
    distribution = of(space)
    outputs = parameters(distribution, (3, 4))
    actions = distribution.sample(outputs, distribution.noise(np.random.default_rng(0), (3, 4)))
    assert actions.shape == (3, 4, *distribution.action_shape)
    assert actions.dtype == distribution.action_dtype
    assert distribution.mode(outputs).shape == actions.shape
    assert distribution.log_prob(outputs, actions).shape == distribution.entropy(outputs).shape == (3, 4)


@every_space
def test_jax_agrees_with_numpy(space: spaces.Space) -> None:
    distribution = of(space)
    old, new = parameters(distribution, (3, 4), 0), parameters(distribution, (3, 4), 1)
    noise = distribution.noise(np.random.default_rng(0), (3, 4))
    actions = distribution.sample(old, noise)

    def everything(xp: Any, old: Any, new: Any, noise: Any, actions: Any) -> tuple:
        return (
            distribution.sample(old, noise, xp),
            distribution.mode(old, xp),
            distribution.log_prob(new, actions, xp),
            distribution.entropy(old, xp),
            distribution.kl(old, new, xp),
        )

    given = (old, new, noise, actions)
    for expected, found in zip(everything(np, *given), everything(jnp, *map(jnp.asarray, given)), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "space",
    [
        spaces.Discrete(3),
        spaces.Discrete(3, start=7),
        spaces.MultiDiscrete([2, 4, 3]),
        spaces.MultiDiscrete([[2, 4], [3, 5]], start=[[1, -1], [0, 10]]),
        spaces.MultiBinary(3),
        spaces.MultiBinary((2, 2)),
        BOX,
        spaces.Box(-1, 1, (2, 2), np.float64),
        spaces.Box(-1, 1, (2,), np.float16),
        spaces.Box(-1, 1, ()),
    ],
    ids=str,
)
def test_every_action_is_in_the_space_that_it_was_made_for(space: spaces.Space) -> None:
    distribution = of(space)
    outputs = 3 * parameters(distribution, (200,))
    actions = distribution.to_env(distribution.sample(outputs, distribution.noise(np.random.default_rng(0), (200,))))
    assert actions.shape == (200, *space.shape)
    assert actions.dtype == space.dtype
    assert all(space.contains(np.asarray(action)) for action in actions)


def test_gaussian_actions_are_scaled_to_the_bounds_and_clipped_there() -> None:
    # -1 is low, 1 is high, 0 the middle: (-2 + 2) / 2 = 0, (0 + 5) / 2 = 2.5, (1 + 1.5) / 2 = 1.25.
    stored = np.array([[-1, -1, -1], [0, 0, 0], [1, 1, 1], [-9, 0.5, 9]], np.float32)
    expected = [[-2, 0, 1], [0, 2.5, 1.25], [2, 5, 1.5], [-2, 3.75, 1.5]]
    np.testing.assert_allclose(of(BOX).to_env(stored), expected, rtol=1e-6)


def test_discrete_actions_are_counted_from_the_start() -> None:
    np.testing.assert_array_equal(of(spaces.Discrete(3, start=-1)).to_env(np.array([[0], [2]])), [-1, 1])


# In float32, -0.3 + (0.9 - -0.3) is one unit above 0.9, and 0.1 is above the double 0.1.
@pytest.mark.parametrize(
    "space", [spaces.Box(-0.3, 0.9, (1,)), spaces.Box(-1.5, 0.7, (1,)), spaces.Box(0, 0.1, (1,), np.float64)], ids=str
)
def test_the_extreme_actions_are_within_the_bounds_in_spite_of_rounding(space: spaces.Space) -> None:
    assert all(space.contains(action) for action in of(space).to_env(np.array([[-1], [1]], np.float32)))


@pytest.mark.parametrize(
    ("space", "message"),
    [
        (spaces.Box(-np.inf, np.inf, (2,)), "the action space has no bounds; give its Box finite low and high"),
        (spaces.Box(0, np.inf, (2,)), "the action space has no bounds"),
        (spaces.Box(-1, 1, (2,), np.int64), "use Discrete, MultiDiscrete, MultiBinary or a bounded Box"),
        (spaces.Box(0, 255, (4, 4, 3), np.uint8), "this action space is not supported"),
        (spaces.Dict({"x": spaces.Discrete(2)}), "this action space is not supported"),
        (spaces.Tuple((spaces.Discrete(2),)), "this action space is not supported"),
    ],
)
def test_an_action_space_without_a_distribution_is_refused(space: spaces.Space, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        of(space)
