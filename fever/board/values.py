"""From what run directories hold, which may be anybody's, to JSON that every browser reads."""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from fever.text import clean, shorten

LONGEST = 2000  # characters of a text
LARGEST = 1e300  # number; later arithmetic in the page stays finite


def number(value: Any) -> float | int | None:
    """A number that JSON has; None for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return value if abs(value) < LARGEST else None  # not NaN either, nor a whole number that no float can hold


def text(value: Any, longest: int = LONGEST) -> str:
    """A value as text of bounded length without control characters."""
    return shorten(clean(value if isinstance(value, str) else json.dumps(value)), longest)


def numbers(values: np.ndarray) -> list[float | None]:
    """An array [n] as a list, with None for what is no number."""
    usable = np.isfinite(values) & (np.abs(values) < LARGEST)
    return [value if good else None for value, good in zip(values.tolist(), usable.tolist(), strict=True)]


def plain(value: Any) -> Any:
    """A nested value with numbers and texts as above."""
    if isinstance(value, dict):
        return {text(str(name), 200): plain(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [plain(part) for part in value]
    if value is None or isinstance(value, bool):
        return value
    return text(value) if isinstance(value, str) else number(value)
