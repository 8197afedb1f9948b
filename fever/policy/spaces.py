"""Spaces as plain JSON, and observations as the arrays that networks take.

A *description* is a small dictionary that stands for a Gymnasium space. It is stored in every checkpoint, so a policy
encodes observations and decodes actions without Gymnasium and without the environment.

| space | description | encoded observation |
|---|---|---|
| Box, float or int | `{"type": "box", "shape", "dtype", "low", "high"}` | float32 `[N, size]` |
| Box, uint8, one axis | the same | uint8 `[N, size]`, scaled to 0..1 in the network |
| Box, uint8, two or three axes | `{"type": "image", "shape": [H, W, C], "order"}` | uint8 `[N, H, W, C]`, likewise |
| Discrete, MultiDiscrete | `{"type": "discrete", "sizes", "starts", "shape"}` | float32 one-hots `[N, sum(sizes)]` |
| MultiBinary | `{"type": "binary", "shape"}` | float32 `[N, size]` |
| Dict, Tuple | `{"type": "dict"/"tuple", "spaces"}` | float32, the parts side by side |
"""

from __future__ import annotations

from typing import Any

import numpy as np

Description = dict[str, Any]


def describe(space: Any) -> Description:
    """Describe a Gymnasium space; raises ValueError for a kind that no network here can take."""
    from gymnasium import spaces

    if isinstance(space, spaces.Box):
        if space.dtype == np.uint8 and len(space.shape) in (2, 3):
            return _describe_image(space.shape)
        return {
            "type": "box",
            "shape": list(space.shape),
            "dtype": str(space.dtype),
            "low": _bounds(space.low),
            "high": _bounds(space.high),
        }
    if isinstance(space, spaces.Discrete):
        return {"type": "discrete", "sizes": [int(space.n)], "starts": [int(space.start)], "shape": []}
    if isinstance(space, spaces.MultiDiscrete):
        return {
            "type": "discrete",
            "sizes": [int(n) for n in space.nvec.ravel()],
            "starts": [int(n) for n in space.start.ravel()],
            "shape": list(space.shape),
        }
    if isinstance(space, spaces.MultiBinary):
        return {"type": "binary", "shape": list(space.shape)}
    if isinstance(space, spaces.Dict):
        return {"type": "dict", "spaces": {key: describe(part) for key, part in space.spaces.items()}}
    if isinstance(space, spaces.Tuple):
        return {"type": "tuple", "spaces": [describe(part) for part in space.spaces]}
    raise ValueError(
        f"a {type(space).__name__} space is not supported; supported are Box, Discrete, MultiDiscrete, MultiBinary, "
        "Dict and Tuple"
    )


def _bounds(values: np.ndarray) -> list[float | None]:
    """Bounds as JSON numbers; infinite ones are null, which JSON has and infinity it has not."""
    return [float(value) if np.isfinite(value) else None for value in values.ravel()]


def _describe_image(shape: tuple[int, ...]) -> Description:
    """Tell the channel order: the channel axis is the smallest of the outer two, last on a tie."""
    if len(shape) == 2:
        return {"type": "image", "shape": [*shape, 1], "order": "hw"}
    if shape[0] < shape[2]:
        return {"type": "image", "shape": [shape[1], shape[2], shape[0]], "order": "chw"}
    return {"type": "image", "shape": list(shape), "order": "hwc"}


def encoded_shape(description: Description) -> tuple[tuple[int, ...], np.dtype]:
    """Shape (without the leading N) and dtype of what `encode` returns."""
    if description["type"] == "image":
        return tuple(description["shape"]), np.dtype(np.uint8)
    if description["type"] == "box" and description["dtype"] == "uint8":
        return (_size(description),), np.dtype(np.uint8)
    return (_size(description),), np.dtype(np.float32)


def _size(description: Description) -> int:
    kind = description["type"]
    if kind == "discrete":
        return sum(description["sizes"])
    if kind == "dict":
        return sum(_size(part) for part in description["spaces"].values())
    if kind == "tuple":
        return sum(_size(part) for part in description["spaces"])
    return int(np.prod(description["shape"], dtype=np.int64))


def native_shape(description: Description) -> tuple[int, ...]:
    """The shape of one observation as the environment gives it (not for Dict and Tuple)."""
    if description["type"] == "image":
        height, width, channels = description["shape"]
        return {"hw": (height, width), "hwc": (height, width, channels), "chw": (channels, height, width)}[
            description["order"]
        ]
    return tuple(description["shape"])


def encode(description: Description, observations: Any) -> np.ndarray:
    """Encode a batch of observations; the leading axis of every leaf is the batch.

    Raises ValueError with a sentence about the observation when its shape, type or values do not fit the space.
    """
    kind = description["type"]
    if kind == "dict" or kind == "tuple":
        parts = description["spaces"]
        pairs = parts.items() if kind == "dict" else enumerate(parts)
        columns = []
        for key, part in pairs:
            try:
                column = encode(part, observations[key])
            except (KeyError, IndexError, TypeError) as error:
                raise ValueError(f"the observation has no part {key!r}") from error
            except ValueError as error:
                raise ValueError(f"in part {key!r}, {error}") from error
            column = column.reshape(len(column), -1)
            columns.append(column.astype(np.float32) / 255 if column.dtype == np.uint8 else column)
        return np.concatenate(columns, axis=1)
    array = np.asarray(observations)
    if array.shape[1:] != native_shape(description):
        raise ValueError(f"the observation has shape {array.shape[1:]} and its space says {native_shape(description)}")
    if kind == "image":
        _require_bytes(array)
        if description["order"] == "chw":
            return array.transpose(0, 2, 3, 1)
        return array[..., None] if description["order"] == "hw" else array
    if kind == "discrete":
        _require_kind(array, "iub", "whole numbers")
        index = array.reshape(len(array), -1).astype(np.int64) - np.asarray(description["starts"])
        sizes = np.asarray(description["sizes"])
        if (index < 0).any() or (index >= sizes).any():
            raise ValueError("the observation has a value outside its discrete space")
        hot = np.zeros((len(array), sizes.sum()), np.float32)
        np.put_along_axis(hot, index + np.cumsum(sizes) - sizes, 1.0, axis=1)
        return hot
    if kind == "box" and description["dtype"] == "uint8":
        _require_bytes(array)
        return array.reshape(len(array), -1)
    _require_kind(array, "fiub", "numbers")
    return array.reshape(len(array), -1).astype(np.float32, copy=False)


def _require_kind(array: np.ndarray, kinds: str, wanted: str) -> None:
    if array.dtype.kind not in kinds:
        raise ValueError(f"the observation has dtype {array.dtype} and its space says {wanted}")


def _require_bytes(array: np.ndarray) -> None:
    if array.dtype != np.uint8:
        raise ValueError(f"the observation has dtype {array.dtype} and its space says uint8")
