"""Statistics over seeds, against hand-computed values, SciPy, and the promises that intervals make."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from fever.experiments import statistics
from fever.experiments.statistics import (
    band,
    bootstrap,
    difference_interval,
    improvement,
    improvement_interval,
    interquartile_band,
    interquartile_mean,
    mean,
    seeds_needed,
)


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(3)


@pytest.mark.parametrize("runs", [1, 3, 4, 5, 10])
def test_the_interquartile_mean_is_that_of_rliable(runs: int, rng: np.random.Generator) -> None:
    scores = rng.normal(size=(runs, 3))  # its matrix of runs and tasks
    assert interquartile_mean([*scores.T]) == pytest.approx(stats.trim_mean(scores, 0.25, axis=None))
    assert mean([*scores.T]) == pytest.approx(scores.mean(0).mean())


def test_the_figures_are_those_that_rliable_gives() -> None:
    """Computed with rliable 1.2.0, its intervals with 50,000 and 20,000 repetitions."""
    ours = [[14, 5, 19, 10, 1, 15], [21, 19, 17, 15, 13, 11], [5, 10, 15, 20, 2, 7]]
    theirs = [[10, 15, 1, 6, 11], [1, 11, 2, 12, 3], [11, 7, 3, 18, 14]]
    strata, others = ([np.array(scores, float) for scores in side] for side in (ours, theirs))
    assert interquartile_mean(strata) == pytest.approx(12.7)
    assert bootstrap(strata, interquartile_mean) == pytest.approx((9.5, 15.8), abs=0.15)
    assert mean(strata) == pytest.approx(12.16666667)
    assert bootstrap(strata, mean) == pytest.approx((9.722, 14.667), abs=0.15)
    assert improvement(strata, others) == pytest.approx(0.66111111)
    assert improvement_interval(strata, others) == pytest.approx((0.489, 0.828), abs=0.01)


def test_the_interquartile_mean_by_hand() -> None:
    assert interquartile_mean([np.array([100.0, 1, 2, 3, -50, 4, 5, 6])]) == pytest.approx((2 + 3 + 4 + 5) / 4)
    assert interquartile_mean([np.array([1.0, 2, 9])]) == pytest.approx(4)  # of three none is left out


def test_the_bootstrap_is_that_of_scipy(rng: np.random.Generator) -> None:
    scores = rng.normal(10, 3, 8)
    ours = bootstrap([scores], mean, repetitions=40_000)
    theirs = stats.bootstrap((scores,), np.mean, n_resamples=40_000, method="percentile", rng=0).confidence_interval
    assert ours == pytest.approx(tuple(theirs))
    assert ours == bootstrap([scores], mean, repetitions=40_000)  # the same each time


def test_runs_are_drawn_within_their_environment() -> None:
    low, high = np.zeros(5), np.full(5, 100.0)
    assert bootstrap([low, high], mean) == (50, 50)
    pooled = bootstrap([np.concatenate([low, high])], mean)
    assert pooled is not None
    assert pooled[0] < 50 < pooled[1]


def test_one_run_has_no_interval() -> None:
    one, two = np.array([1.0]), np.array([1.0, 2.0])
    assert bootstrap([one, one], mean) is None
    assert bootstrap([one, two], mean) is not None
    assert band(one[None]) is None
    assert difference_interval(one, two) is None
    assert improvement_interval([one], [one]) is None
    assert seeds_needed(one, two) is None


def test_a_band_is_the_interval_of_every_point(rng: np.random.Generator) -> None:
    curves = rng.normal(size=(6, 4)) + np.arange(4)
    found = band(curves, repetitions=40_000)
    assert found is not None
    assert found.shape == (2, 4)
    for point in range(4):
        assert bootstrap([curves[:, point]], mean, repetitions=40_000) == pytest.approx(found[:, point], abs=0.03)


def test_a_band_over_environments_is_the_interval_of_every_point(rng: np.random.Generator) -> None:
    curves = [rng.normal(size=(4, 3)), rng.normal(size=(3, 3))]
    found = interquartile_band(curves, repetitions=10_000)
    assert found is not None
    for point in range(3):
        assert found[:, point] == pytest.approx(bootstrap([runs[:, point] for runs in curves], interquartile_mean))
    assert interquartile_band([runs[:1] for runs in curves]) is None


def test_the_probability_of_improvement_counts_equal_scores_half() -> None:
    ours, theirs = np.array([1.0, 2, 2]), np.array([0.0, 2])
    assert improvement([ours], [theirs]) == pytest.approx((1 + 0 + 1 + 0.5 + 1 + 0.5) / 6)
    statistic = stats.mannwhitneyu(ours, theirs, alternative="greater").statistic  # by which rliable defines it
    assert improvement([ours], [theirs]) == pytest.approx(statistic / 6)
    assert improvement([ours, ours], [theirs, ours]) == pytest.approx((statistic / 6 + 0.5) / 2)
    assert improvement([theirs], [ours]) == pytest.approx(1 - statistic / 6)


def test_its_interval_is_that_of_drawing_both_sides(rng: np.random.Generator) -> None:
    ours, theirs = rng.normal(0.7, 1, 6), rng.normal(0, 1, 5)
    drawn = [improvement([rng.choice(ours, len(ours))], [rng.choice(theirs, len(theirs))]) for _ in range(4000)]
    found = improvement_interval([ours], [theirs])
    assert found == pytest.approx(tuple(np.percentile(drawn, [2.5, 97.5])), abs=0.035)


def test_the_interval_of_a_difference_is_welchs(rng: np.random.Generator) -> None:
    ours, theirs = rng.normal(3, 1, 5), rng.normal(1, 4, 7)
    expected = stats.ttest_ind(ours, theirs, equal_var=False).confidence_interval(0.95)
    assert difference_interval(ours, theirs) == pytest.approx((expected.low, expected.high))


def test_equal_scores_have_an_interval_of_no_width() -> None:
    assert difference_interval(np.full(3, 500.0), np.full(4, 500.0)) == (0, 0)
    assert difference_interval(np.full(3, 500.0), np.full(4, 9.0)) == (491, 491)
    tenths = np.full(3, 0.1 + 0.2)
    assert difference_interval(tenths, np.full(3, 0.3)) == (0, 0)


@pytest.mark.parametrize("seeds", [3, 5, 10])
def test_equal_algorithms_are_told_apart_in_one_case_of_twenty(seeds: int, rng: np.random.Generator) -> None:
    """Also with three seeds, where a percentile bootstrap errs in one case of five."""
    errors = 0
    for _ in range(1000):
        low, high = difference_interval(rng.normal(size=seeds), rng.normal(size=seeds))  # type: ignore[misc]
        errors += not low <= 0 <= high
    assert 20 <= errors <= 70


def test_as_many_seeds_as_are_needed_find_the_difference(rng: np.random.Generator) -> None:
    ours, theirs = np.array([0.0, 1, 2]) + 1.5, np.array([0.0, 1, 2])
    count = seeds_needed(ours, theirs)
    assert count == 9  # G*Power, and statsmodels' TTestIndPower: 8.06 for d = 1.5 and 80 %
    found = 0
    for _ in range(1000):
        low, _ = difference_interval(rng.normal(1.5, 1, count), rng.normal(0, 1, count))  # type: ignore[misc]
        found += low > 0
    assert 760 <= found <= 880


def test_a_difference_that_is_hardly_there_needs_more_than_anyone_has() -> None:
    ours = np.array([0.0, 1, 2])
    assert seeds_needed(ours + 1e-6, ours) is None
    assert seeds_needed(ours, ours) is None
    assert seeds_needed(np.full(3, 1.0), np.full(3, 2.0)) == statistics.FEWEST
