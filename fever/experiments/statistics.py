"""Statistics of few runs: interquartile means, intervals, probability of improvement. NumPy and SciPy only.

Scores come as one array per environment ("stratum"), each with one score per run. Definitions are those of Agarwal et
al. 2021, "Deep reinforcement learning at the edge of the statistical precipice" (rliable). The interval of a difference
is Welch's, which keeps its promise with three to ten runs, where the percentile bootstrap is too narrow (Colas et al.
2019, "A hitchhiker's guide to statistical comparisons of reinforcement learning algorithms").
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
from scipy import stats

Interval = tuple[float, float]
Strata = Sequence[np.ndarray]  # scores of every environment's runs
Statistic = Callable[[Strata], np.ndarray]  # strata [..., runs] -> [...]
CONFIDENCE = 0.95
POWER = 0.8  # probability with which a difference that is there is to be found
REPETITIONS = 10_000  # of a bootstrap
FEWEST = 3  # runs on each side, below which a comparison says nothing
MOST_NEEDED = 1000  # runs; more are never asked for


def mean(strata: Strata) -> np.ndarray:
    """The mean over environments of the mean over their runs: [..., runs] each -> [...]."""
    return np.mean([scores.mean(-1) for scores in strata], 0)


def interquartile_mean(strata: Strata) -> np.ndarray:
    """The mean of the middle half of all scores, those of all environments together: [..., runs] each -> [...].

    A quarter of the scores, rounded down, is left out at either end: of three scores none, of four two.
    """
    return np.asarray(stats.trim_mean(np.concatenate(strata, -1), 0.25, axis=-1))


def bootstrap(
    strata: Strata, statistic: Statistic, repetitions: int = REPETITIONS, seed: int = 0
) -> tuple[float, float] | None:
    """The percentile interval of a statistic by stratified bootstrap: runs are drawn with replacement within each
    environment. None if no environment has two runs."""
    if all(len(scores) < 2 for scores in strata):
        return None
    rng = np.random.default_rng(seed)
    drawn = [scores[rng.integers(len(scores), size=(repetitions, len(scores)))] for scores in strata]
    return _percentiles(statistic(drawn))


def band(curves: np.ndarray, repetitions: int = 2000, seed: int = 0) -> np.ndarray | None:
    """The percentile interval of the mean curve over runs at every point: [runs, points] -> [2, points]. Whole curves
    are drawn, so neighbouring points use the same runs. None for fewer than two runs."""
    if len(curves) < 2:
        return None
    rng, runs = np.random.default_rng(seed), len(curves)
    weights = rng.multinomial(runs, np.full(runs, 1 / runs), size=repetitions) / runs
    return np.percentile(weights @ curves, _tails(), axis=0)


def interquartile_band(curves: Strata, repetitions: int = 2000, seed: int = 0) -> np.ndarray | None:
    """The percentile interval of the interquartile mean at every point: [runs, points] for each environment -> [2,
    points]. Whole curves are drawn, within each environment. None if no environment has two runs."""
    if all(len(runs) < 2 for runs in curves):
        return None
    rng = np.random.default_rng(seed)
    drawn = [rng.integers(len(runs), size=(repetitions, len(runs))) for runs in curves]
    points = zip(*(runs.T for runs in curves), strict=True)
    found = ([runs[rows] for runs, rows in zip(point, drawn, strict=True)] for point in points)
    return np.transpose([_percentiles(interquartile_mean(strata)) for strata in found])


def improvement(strata: Strata, others: Strata) -> float:
    """P(X > Y): the probability that a run of `strata` scores higher than one of `others`, equal scores counting half;
    the mean over environments."""
    return float(np.mean([_wins(one, other).mean() for one, other in zip(strata, others, strict=True)]))


def improvement_interval(
    strata: Strata, others: Strata, repetitions: int = REPETITIONS, seed: int = 0
) -> tuple[float, float] | None:
    """The percentile interval of `improvement`, both sides drawn independently; None if neither has two runs."""
    if all(len(scores) < 2 for scores in (*strata, *others)):
        return None
    rng, total = np.random.default_rng(seed), np.zeros(repetitions)
    for one, other in zip(strata, others, strict=True):
        left, right = (
            rng.multinomial(len(scores), np.full(len(scores), 1 / len(scores)), size=repetitions) / len(scores)
            for scores in (one, other)
        )
        total += np.einsum("ri,ij,rj->r", left, _wins(one, other), right, optimize=True)
    return _percentiles(total / len(strata))


def difference_interval(ours: np.ndarray, theirs: np.ndarray) -> tuple[float, float] | None:
    """Welch's confidence interval of mean(ours) - mean(theirs); None if a side has fewer than two runs."""
    if min(len(ours), len(theirs)) < 2:
        return None
    shares = [scores.var(ddof=1) / len(scores) for scores in (ours, theirs)]
    error, difference = math.sqrt(sum(shares)), float(ours.mean() - theirs.mean())
    rounding = 1e-12 * float(max(abs(ours).max(), abs(theirs).max()))
    if error <= rounding:  # every run of a side has the same score
        return (0.0, 0.0) if abs(difference) <= rounding else (difference, difference)
    weights = [share**2 / (len(scores) - 1) for share, scores in zip(shares, (ours, theirs), strict=True)]
    half = float(stats.t.ppf((1 + CONFIDENCE) / 2, sum(shares) ** 2 / sum(weights))) * error
    return difference - half, difference + half


def seeds_needed(ours: np.ndarray, theirs: np.ndarray) -> int | None:
    """Runs on each side with which Welch's test would find a difference as large as the one seen, if the spreads are
    those seen, with probability `POWER`. None if that is unknown, or more than `MOST_NEEDED`.

    The least n with n >= (t(0.975) + t(0.8))² (s² + s'²) / d², both quantiles at 2n - 2 degrees of freedom.
    """
    if min(len(ours), len(theirs)) < 2:
        return None
    difference = float(ours.mean() - theirs.mean())
    spread = float(ours.var(ddof=1) + theirs.var(ddof=1))
    counts = np.arange(FEWEST, MOST_NEEDED + 1)
    quantiles = (stats.t.ppf(share, 2 * counts - 2) for share in ((1 + CONFIDENCE) / 2, POWER))
    enough = counts * difference**2 >= sum(quantiles) ** 2 * spread
    return int(counts[np.argmax(enough)]) if difference and enough.any() else None


def _wins(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """1 where a score of `one` is higher than one of `other`, 0.5 where they are equal: [runs, other runs]."""
    return (np.sign(one[:, None] - other[None, :]) + 1) / 2


def _tails() -> list[float]:
    return [100 * (1 - CONFIDENCE) / 2, 100 * (1 + CONFIDENCE) / 2]


def _percentiles(values: np.ndarray) -> tuple[float, float]:
    low, high = np.percentile(values, _tails())
    return float(low), float(high)
