from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from fever.algos.flat_params import Vectorizer

PARAMS = {"w": np.arange(6, dtype=np.float32).reshape(2, 3), "b": np.array([7, 8], np.float32), "s": np.float32(9)}


def test_arrays_lie_side_by_side_and_come_back() -> None:
    vectorizer = Vectorizer(PARAMS)
    vector = vectorizer.pack(PARAMS)
    assert vector.tolist() == [0, 1, 2, 3, 4, 5, 7, 8, 9]
    assert vectorizer.size == 9
    for name, array in vectorizer.unpack(vector).items():
        np.testing.assert_array_equal(array, PARAMS[name])
        assert array.shape == np.shape(PARAMS[name])


def test_it_works_inside_a_jitted_function() -> None:
    vectorizer = Vectorizer(PARAMS)
    double = jax.jit(lambda vector: vectorizer.pack({n: 2 * x for n, x in vectorizer.unpack(vector).items()}, jnp))
    np.testing.assert_array_equal(double(vectorizer.pack(PARAMS)), 2 * vectorizer.pack(PARAMS))
