from __future__ import annotations

import itertools

import numpy as np
import pytest

from fever.algos.normalize import Moments


def assert_moments_of(moments: Moments, rows: np.ndarray) -> None:
    assert moments.count == len(rows)
    np.testing.assert_allclose(moments.mean, rows.mean(0), rtol=1e-10, atol=1e-12)
    np.testing.assert_allclose(moments.var, rows.var(0), rtol=1e-10, atol=1e-12)


def chunks_of(rows: np.ndarray) -> list[np.ndarray]:
    """Unequal pieces, one of them a single row."""
    return np.split(rows, [1, 8, 20])


def test_moments_by_hand() -> None:
    # The mean of 1, 2 and 6 is 3; the squared distances 4, 1 and 9 make a variance of 14 / 3.
    moments = Moments.of(np.array([1.0, 2.0, 6.0], np.float32))
    assert (moments.count, moments.mean) == (3, 3)
    assert moments.var == pytest.approx(14 / 3)
    assert moments.std == pytest.approx((14 / 3) ** 0.5)


@pytest.mark.parametrize("shape", [(), (3,), (2, 3)])
def test_merging_in_any_order_gives_the_moments_of_the_union(shape: tuple[int, ...]) -> None:
    rows = np.random.default_rng(0).normal(5, 3, (50, *shape))
    for order in itertools.permutations(chunks_of(rows)):
        merged = Moments.start(shape)
        for chunk in order:
            merged = merged.merge(Moments.of(chunk))
        assert_moments_of(merged, rows)


def test_groups_that_were_merged_before_merge_to_the_same() -> None:
    rows = np.random.default_rng(0).normal(5, 3, (50, 2))
    a, b, c, d = map(Moments.of, chunks_of(rows))
    assert_moments_of(a.merge(b).merge(c.merge(d)), rows)


def test_merging_stays_exact_far_from_zero() -> None:
    rows = np.random.default_rng(0).normal(1e6, 1e-2, 1000)
    merged = Moments.start(())
    for chunk in np.split(rows, 10):
        merged = merged.merge(Moments.of(chunk))
    assert merged.var == pytest.approx(rows.var(), rel=1e-4)


def test_single_precision_rows_are_averaged_in_double_precision() -> None:
    rows = np.full(100_000, 16777216.0, np.float32)  # 2^24: from here on float32 cannot count by ones
    rows[::2] += 2
    assert Moments.of(rows).mean == 16777217.0
    assert Moments.of(rows).var == 1.0


def test_nothing_seen_is_the_standard_normal() -> None:
    start = Moments.start((2,))
    np.testing.assert_array_equal(start.mean, [0, 0])
    np.testing.assert_allclose(start.std, [1, 1], rtol=1e-7)
    assert start.merge(Moments.start((2,))) is start


def test_what_never_changes_has_a_deviation_that_can_be_divided_by() -> None:
    assert Moments.of(np.full((10, 1), 3.0)).std[0] == pytest.approx(1e-4)  # the root of 1e-8


def test_arrays_of_a_checkpoint_give_the_same_moments_back() -> None:
    moments = Moments.of(np.random.default_rng(0).normal(size=(7, 2)))
    arrays = moments.arrays("observations")
    assert set(arrays) == {"observations/count", "observations/mean", "observations/var"}
    restored = Moments.from_arrays("observations", arrays)
    assert restored.count == 7
    np.testing.assert_array_equal(restored.mean, moments.mean)
    np.testing.assert_array_equal(restored.var, moments.var)
