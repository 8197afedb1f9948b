"""A network's weights as one vector, and back. Works on NumPy and JAX arrays alike.

Learners keep their weights this way: an optimiser step, a norm or a conjugate gradient is then a handful of operations
instead of a handful for each array. XLA compiles that faster, and small networks learn faster.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from fever.policy import Params


class FlatParams:
    """Names and shapes of a network's arrays. `pack` and `unpack` are each other's inverse."""

    def __init__(self, params: Params) -> None:
        self.shapes = {name: tuple(value.shape) for name, value in params.items()}
        self.size = sum(math.prod(shape) for shape in self.shapes.values())

    def pack(self, params: Params, xp: Any = np) -> Any:
        """All arrays in one vector `[size]`."""
        return xp.concatenate([params[name].reshape(-1) for name in self.shapes])

    def unpack(self, flat: Any) -> Params:
        """The arrays by name, as views of the vector `[size]`."""
        params, start = {}, 0
        for name, shape in self.shapes.items():
            end = start + math.prod(shape)
            params[name] = flat[start:end].reshape(shape)
            start = end
        return params
