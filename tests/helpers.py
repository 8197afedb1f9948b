"""What several tests use."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from fever.sampler import Fragment


def split(fragment: Fragment, count: int) -> list[Fragment]:
    """The same experience as several fragments of fewer environments."""
    parts = [copy.copy(fragment) for _ in range(count)]
    for index, part in enumerate(parts):
        part.arrays = {
            name: np.split(array, count, 0 if name == "state" else 1)[index] for name, array in fragment.arrays.items()
        }
    return parts


def changed(fragment: Fragment, **arrays: np.ndarray) -> Fragment:
    other = copy.copy(fragment)
    other.arrays = {**fragment.arrays, **arrays}
    return other


def wait_for(condition: Callable[[], Any], what: str, seconds: float = 30) -> Any:
    """Wait until a condition holds, but not for ever."""
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline, f"no {what} within {seconds} s"
        time.sleep(0.02)
    return found
