from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from fever.algos.flat_params import FlatParams

PARAMS = {"w": np.arange(6, dtype=np.float32).reshape(2, 3), "b": np.array([7, 8], np.float32), "s": np.float32(9)}


def test_arrays_lie_side_by_side_and_come_back() -> None:
    flat = FlatParams(PARAMS)
    vector = flat.pack(PARAMS)
    assert vector.tolist() == [0, 1, 2, 3, 4, 5, 7, 8, 9]
    assert flat.size == 9
    for name, array in flat.unpack(vector).items():
        np.testing.assert_array_equal(array, PARAMS[name])
        assert array.shape == np.shape(PARAMS[name])


def test_it_works_inside_a_jitted_function() -> None:
    flat = FlatParams(PARAMS)
    double = jax.jit(lambda vector: flat.pack({n: 2 * x for n, x in flat.unpack(vector).items()}, jnp))
    np.testing.assert_array_equal(double(flat.pack(PARAMS)), 2 * flat.pack(PARAMS))
