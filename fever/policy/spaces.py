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
| all but images, masked | `{"type": "masked", "observation", "sizes", "key"}` | float32, the mask behind the rest |

A mask says which actions are allowed, 1 or 0 for each; it comes in an observation's part `key`, or else in the info.
"""

from __future__ import annotations

from typing import Any

import numpy as np

Description = dict[str, Any]


def with_mask(observation: Description, action: Description, key: str | None) -> Description:
    """Describe observations with an action mask; raises ValueError if these spaces do not support one."""
    if action["type"] not in ("discrete", "binary"):
        raise ValueError("an action mask needs a Discrete, MultiDiscrete or MultiBinary action space")
    if observation["type"] == "image":
        raise ValueError("an action mask beside an image is not supported; flatten the image, or give it as floats")
    if key is not None:
        parts = {name: part for name, part in observation["spaces"].items() if name != key}
        if not parts:
            raise ValueError("its observation is an action mask and nothing else")
        observation = {"type": "dict", "spaces": parts}
    sizes = action["sizes"] if action["type"] == "discrete" else [2] * _size(action)
    return {"type": "masked", "observation": observation, "sizes": sizes, "key": key}


def mask_width(description: Description) -> int:
    """Width of the mask at the end of an encoded observation; 0 without one."""
    return len(description["sizes"]) * max(description["sizes"]) if description["type"] == "masked" else 0


def encoded_shape(description: Description) -> tuple[tuple[int, ...], np.dtype]:
    """Shape (without the leading N) and dtype of what `encode` returns."""
    if description["type"] == "image":
        return tuple(description["shape"]), np.dtype(np.uint8)
    if description["type"] == "box" and description["dtype"] == "uint8":
        return (_size(description),), np.dtype(np.uint8)
    return (_size(description),), np.dtype(np.float32)


def _size(description: Description) -> int:
    kind = description["type"]
    if kind == "masked":
        return _size(description["observation"]) + mask_width(description)
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


def encode(description: Description, observations: Any, masks: Any = None) -> np.ndarray:
    """Encode a batch of observations; the leading axis of every leaf is the batch.

    `masks` has one mask for each row of a masked space; None: those in the observations, otherwise all actions are
    allowed. Raises ValueError if shape, type or values of an observation do not fit the space.
    """
    kind = description["type"]
    if kind == "masked":
        rows = _as_floats(encode(description["observation"], observations))
        if masks is None and description["key"] is not None:
            masks = observations[description["key"]]
        return np.concatenate([rows, _encode_masks(description["sizes"], masks, len(rows))], axis=1)
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
            columns.append(_as_floats(column))
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


def unflatten(description: Description, x: Any) -> Any:
    """Encoded observations `[N, ...]` in the structure of their space: a dict or tuple of parts, or one array.

    A part is float32 `[N, *shape]`: bytes are scaled to 0..1, an image is `[N, H, W, C]`, a discrete value one-hot. An
    action mask is left out. For NumPy and JAX alike.
    """
    kind = description["type"]
    if kind == "masked":
        return unflatten(description["observation"], x)
    if kind in ("dict", "tuple"):
        parts = description["spaces"]
        pairs = list(parts.items() if kind == "dict" else enumerate(parts))
        found, start = {}, 0
        for key, part in pairs:
            end = start + _size(part)
            found[key] = unflatten(part, x[:, start:end])
            start = end
        return found if kind == "dict" else tuple(found.values())
    if x.dtype == np.uint8:
        x = x.astype(np.float32) * np.float32(1 / 255)
    return x if kind == "discrete" else x.reshape(len(x), *description["shape"])


def _as_floats(column: np.ndarray) -> np.ndarray:
    column = column.reshape(len(column), -1)
    return column.astype(np.float32) / 255 if column.dtype == np.uint8 else column


def _encode_masks(sizes: list[int], masks: Any, count: int) -> np.ndarray:
    """Masks of all choices, each a flat array or one array per choice, to float32 `[N, K * max(sizes)]`."""
    allowed = np.zeros((count, len(sizes), max(sizes)), np.float32)
    if masks is None:
        masks = np.ones((count, sum(sizes)))
    elif not isinstance(masks, np.ndarray):
        masks = np.array([np.hstack(mask) if isinstance(mask, tuple) else np.ravel(mask) for mask in masks])
    flat = masks.reshape(count, -1)
    if flat.shape[1] != sum(sizes):
        raise ValueError(f"the action mask has {flat.shape[1]} entries for {sum(sizes)} actions")
    place = 0
    for choice, size in enumerate(sizes):
        allowed[:, choice, :size] = flat[:, place : place + size] > 0
        place += size
    if not allowed.any(2).all():
        raise ValueError("the action mask allows no action")
    return allowed.reshape(count, -1)


def last_mask(description: Description, mask: Any) -> Any:
    """The mask of an episode's last observation; all actions, if it is missing or allows none."""
    try:
        _encode_masks(description["sizes"], [mask], 1)
    except (ValueError, TypeError):
        return np.ones(sum(description["sizes"]))
    return mask


def _require_kind(array: np.ndarray, kinds: str, wanted: str) -> None:
    if array.dtype.kind not in kinds:
        raise ValueError(f"the observation has dtype {array.dtype} and its space says {wanted}")


def _require_bytes(array: np.ndarray) -> None:
    if array.dtype != np.uint8:
        raise ValueError(f"the observation has dtype {array.dtype} and its space says uint8")


def difference(there: Any, here: Any, bounds: bool = True) -> str:
    """Where two descriptions differ, in words; empty if they do not. `bounds`: whether those of boxes count. Other
    libraries describe spaces by a text."""
    if not isinstance(there, dict) or not isinstance(here, dict):
        return "" if there == here else f"it is {there} there and {here} here"
    if there.get("type") != here.get("type"):
        return f"it is {there.get('type')} there and {here.get('type')} here"
    for field in dict.fromkeys([*there, *here]):
        old, new = there.get(field), here.get(field)
        if field not in ("spaces", "observation") and old == new:  # these may be equal in another order
            continue
        if field in ("low", "high") and not bounds:
            continue
        if field in ("low", "high"):
            return "its bounds differ"
        if field == "observation":  # beside an action mask
            if inner := difference(old or {}, new or {}, bounds):
                return inner
        elif field == "spaces":
            if inner := _different_part(old, new, bounds):
                return inner
        else:
            return f"its {field} is {old} there and {new} here"
    return ""


def mismatch(made_for: tuple[Any, Any], has: tuple[Any, Any]) -> str:
    """How an environment's observation and action space differ from those that a network was made for, in words; empty
    if it fits. Bounds of observations do not count: no network depends on them."""
    for which, there, here in zip(("observation", "action"), made_for, has, strict=True):
        if found := difference(there, here, bounds=which == "action"):
            return f"another {which} space: {found}"
    return ""


def _different_part(there: Any, here: Any, bounds: bool) -> str:
    """The first of the parts of two Dict or Tuple spaces that differs, in words."""
    old, new = (dict(one) if isinstance(one, dict) else dict(enumerate(one)) for one in (there, here))
    for key in dict.fromkeys([*old, *new]):
        if key not in old or key not in new:
            return f"part {key!r} is only {'there' if key in old else 'here'}"
        if inner := difference(old[key], new[key], bounds):
            return f"in part {key!r}, {inner}"
    return "" if [*old] == [*new] else f"its parts are in the order {[*old]} there and {[*new]} here"
