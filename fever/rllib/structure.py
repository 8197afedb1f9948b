"""Writes nested Python values as JSON and arrays, and reads them: the states of connectors, without pickles."""

from __future__ import annotations

from typing import Any

import numpy as np


def pack(value: Any, arrays: dict[str, np.ndarray], prefix: str) -> Any:
    """A nested value as JSON; its arrays are added to `arrays` under names that begin with `prefix`.

    Raises TypeError for anything but dicts, lists, tuples, numbers, strings, None and arrays.
    """
    if isinstance(value, np.ndarray):
        name = f"{prefix}{sum(one.startswith(prefix) for one in arrays)}"
        arrays[name] = value
        return {"array": name}
    if isinstance(value, np.generic):
        return pack(value.item(), arrays, prefix)
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, dict):
        return {"dict": [[pack(key, arrays, prefix), pack(one, arrays, prefix)] for key, one in value.items()]}
    if isinstance(value, (list, tuple)):
        return {type(value).__name__ if type(value) is tuple else "list": [pack(one, arrays, prefix) for one in value]}
    raise TypeError(f"a {type(value).__name__} cannot be written as JSON")


def unpack(value: Any, arrays: dict[str, np.ndarray]) -> Any:
    """The inverse of `pack`."""
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    if kind == "array":
        return arrays[content]
    if kind == "dict":
        return {unpack(key, arrays): unpack(one, arrays) for key, one in content}
    return (tuple if kind == "tuple" else list)(unpack(one, arrays) for one in content)
