"""A network's weights as one vector, and back. Works on NumPy and JAX arrays alike.

Learners keep their weights this way: an optimiser step, a norm or a conjugate gradient is then a handful of operations
instead of a handful for each array, which halves XLA's compilation time and speeds up small networks.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from fever.policy import Params


class Vectorizer:
    """Remembers names and shapes; `pack` and `unpack` are each other's inverse."""

    def __init__(self, params: Params) -> None:
        self.shapes = {name: tuple(value.shape) for name, value in params.items()}
        self.size = sum(math.prod(shape) for shape in self.shapes.values())

    def pack(self, params: Params, xp: Any = np) -> Any:
        """All arrays side by side, `[size]`."""
        return xp.concatenate([params[name].reshape(-1) for name in self.shapes])

    def unpack(self, vector: Any) -> Params:
        """The arrays by name, as views of the vector."""
        params, place = {}, 0
        for name, shape in self.shapes.items():
            end = place + math.prod(shape)
            params[name] = vector[place:end].reshape(shape)
            place = end
        return params
