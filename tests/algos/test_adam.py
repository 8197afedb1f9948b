"""Adam against the steps of its paper, written out with NumPy."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from fever.algos.adam import Adam, AdamState


@pytest.mark.parametrize("max_norm", [None, 0.5, 100.0])
def test_directions_are_those_of_the_paper(max_norm: float | None) -> None:
    optimizer = Adam(epsilon=1e-3, max_norm=max_norm)
    state = optimizer.init(jnp.zeros(3))
    mean = square = np.zeros(3)
    for step, gradient in enumerate(np.random.default_rng(0).normal(size=(5, 3)), 1):
        direction, state = optimizer.update(jnp.asarray(gradient), state)
        norm = np.sqrt((gradient**2).sum())
        if max_norm is not None and norm > max_norm:
            gradient = gradient / norm * max_norm
        mean, square = 0.9 * mean + 0.1 * gradient, 0.999 * square + 0.001 * gradient**2
        expected = mean / (1 - 0.9**step) / (np.sqrt(square / (1 - 0.999**step)) + 1e-3)
        np.testing.assert_allclose(direction, expected, rtol=1e-4)


def test_state_survives_a_checkpoint() -> None:
    optimizer = Adam()
    _, state = optimizer.update(jnp.ones(3), optimizer.init(jnp.zeros(3)))
    again = AdamState.from_arrays("adam", state.arrays("adam"))
    for here, there in zip(state, again, strict=True):
        np.testing.assert_array_equal(here, there)
