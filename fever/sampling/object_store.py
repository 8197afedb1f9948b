"""How this process keeps out of Ray's object store: after the raylet's death, every use of it ends the process.

That includes freeing an array that is a view into it.
"""

from __future__ import annotations

import copy
from typing import Any

import numpy as np

from fever.sampling.ray_settings import INLINE_BYTES

RESULT_BYTES = INLINE_BYTES * 0.9  # of arrays; the rest of a result has bytes, too


def outside_store(value: Any) -> Any:
    """A result with memory of its own. Arrays of large results are views into Ray's object store, and this process ends
    if they are freed after Ray has died."""
    return copy.deepcopy(value) if array_bytes(value) > RESULT_BYTES else value


def array_bytes(value: Any) -> int:
    """Bytes of all arrays in a result."""
    if isinstance(value, np.ndarray):
        return value.nbytes
    if isinstance(value, dict):
        return sum(map(array_bytes, value.values()))
    if isinstance(value, list | tuple):
        return sum(map(array_bytes, value))
    return array_bytes(vars(value)) if hasattr(value, "__dict__") else 0
