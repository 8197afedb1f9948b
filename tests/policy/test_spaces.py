from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

from fever.envs.contract import describe_space
from fever.policy.spaces import difference, encode, encoded_shape, native_shape

UNBOUNDED = spaces.Box(np.array([-1.5, -np.inf], np.float32), np.array([2.5, np.inf], np.float32))
NESTED = spaces.Dict(
    {"a": spaces.Discrete(2), "b": spaces.Tuple((spaces.MultiBinary(2), spaces.Dict({"c": spaces.Box(0, 1, (2,))})))}
)
EVERY_KIND = {
    "box of floats": spaces.Box(-1, 1, (2, 3)),
    "box of doubles": spaces.Box(-1, 1, (2,), np.float64),
    "box of one number": spaces.Box(-1, 1, ()),
    "box of integers": spaces.Box(-5, 5, (4,), np.int64),
    "box without bounds": UNBOUNDED,
    "bytes": spaces.Box(0, 255, (5,), np.uint8),
    "image, hwc": spaces.Box(0, 255, (6, 7, 3), np.uint8),
    "image, chw": spaces.Box(0, 255, (3, 6, 7), np.uint8),
    "image, hw": spaces.Box(0, 255, (6, 7), np.uint8),
    "stack of frames": spaces.Box(0, 255, (2, 6, 7, 3), np.uint8),
    "discrete": spaces.Discrete(4),
    "discrete with start": spaces.Discrete(4, start=-2),
    "multidiscrete": spaces.MultiDiscrete([2, 4, 3]),
    "multidiscrete with start": spaces.MultiDiscrete([2, 4], start=[10, -1]),
    "multidiscrete matrix": spaces.MultiDiscrete([[2, 3], [4, 5]]),
    "multibinary": spaces.MultiBinary(3),
    "multibinary matrix": spaces.MultiBinary((2, 3)),
    "dict": spaces.Dict({"x": spaces.Discrete(2), "y": spaces.Box(-1, 1, (2,))}),
    "tuple": spaces.Tuple((spaces.Discrete(2), spaces.Box(0, 255, (2, 2, 3), np.uint8))),
    "nested": NESTED,
}


def batch(space: spaces.Space, count: int) -> Any:
    """Samples of a space with a leading axis on every leaf."""
    space.seed(0)
    samples = [space.sample() for _ in range(count)]

    def stack(part: spaces.Space, items: list[Any]) -> Any:
        if isinstance(part, spaces.Dict):
            return {key: stack(inner, [item[key] for item in items]) for key, inner in part.spaces.items()}
        if isinstance(part, spaces.Tuple):
            return tuple(stack(inner, [item[place] for item in items]) for place, inner in enumerate(part.spaces))
        return np.array(items)

    return stack(space, samples)


every_kind = pytest.mark.parametrize("space", EVERY_KIND.values(), ids=EVERY_KIND)


@every_kind
def test_a_description_survives_json(space: spaces.Space) -> None:
    description = describe_space(space)
    assert json.loads(json.dumps(description, allow_nan=False)) == description


@every_kind
def test_encoded_shape_is_what_encode_returns(space: spaces.Space) -> None:
    description = describe_space(space)
    encoded = encode(json.loads(json.dumps(description)), batch(space, 5))
    assert ((encoded.shape[1:], encoded.dtype), len(encoded)) == (encoded_shape(description), 5)


@pytest.mark.parametrize(
    ("space", "expected"),
    [
        (
            UNBOUNDED,
            {"type": "box", "shape": [2], "dtype": "float32", "low": [-1.5, None], "high": [2.5, None]},
        ),
        (
            spaces.Box(-5, 5, (1, 2), np.int64),
            {"type": "box", "shape": [1, 2], "dtype": "int64", "low": [-5.0, -5.0], "high": [5.0, 5.0]},
        ),
        (spaces.Discrete(4, start=-2), {"type": "discrete", "sizes": [4], "starts": [-2], "shape": []}),
        (
            spaces.MultiDiscrete([[2, 3]], start=[[1, 0]]),
            {"type": "discrete", "sizes": [2, 3], "starts": [1, 0], "shape": [1, 2]},
        ),
        (spaces.MultiBinary((2, 3)), {"type": "binary", "shape": [2, 3]}),
        (
            spaces.Dict({"flags": spaces.MultiBinary(2), "both": spaces.Tuple((spaces.Discrete(2),))}),
            {
                "type": "dict",
                "spaces": {
                    "both": {
                        "type": "tuple",
                        "spaces": [{"type": "discrete", "sizes": [2], "starts": [0], "shape": []}],
                    },
                    "flags": {"type": "binary", "shape": [2]},
                },
            },
        ),
    ],
)
def test_a_space_is_described_in_full(space: spaces.Space, expected: Any) -> None:
    assert describe_space(space) == expected


@pytest.mark.parametrize(
    ("shape", "order", "described"),
    [
        ((84, 96, 4), "hwc", [84, 96, 4]),
        ((4, 84, 96), "chw", [84, 96, 4]),
        ((84, 96), "hw", [84, 96, 1]),
        ((8, 9, 8), "hwc", [8, 9, 8]),  # a tie of the outer axes: channels last
        ((3, 2, 4), "chw", [2, 4, 3]),  # only the outer two axes are compared
    ],
)
def test_the_channel_order_is_told_by_the_smaller_outer_axis(
    shape: tuple[int, ...], order: str, described: list[int]
) -> None:
    description = describe_space(spaces.Box(0, 255, shape, np.uint8))
    assert (description["order"], description["shape"]) == (order, described)
    assert native_shape(description) == shape


@pytest.mark.parametrize("order", ["hwc", "chw", "hw"])
def test_every_channel_order_is_encoded_as_the_same_image(order: str) -> None:
    images = np.random.default_rng(0).integers(0, 256, (2, 6, 7, 1 if order == "hw" else 3), np.uint8)
    given = {"hwc": images, "chw": images.transpose(0, 3, 1, 2), "hw": images[..., 0]}[order]
    encoded = encode(describe_space(spaces.Box(0, 255, given.shape[1:], np.uint8)), given)
    assert encoded.dtype == np.uint8
    np.testing.assert_array_equal(encoded, images)


@pytest.mark.parametrize(
    ("space", "observations", "expected"),
    [
        (spaces.Discrete(3), np.array([0, 2]), [[1, 0, 0], [0, 0, 1]]),
        (spaces.Discrete(3, start=-1), np.array([-1, 1]), [[1, 0, 0], [0, 0, 1]]),
        (spaces.MultiDiscrete([2, 3]), np.array([[1, 0], [0, 2]]), [[0, 1, 1, 0, 0], [1, 0, 0, 0, 1]]),
        (spaces.MultiDiscrete([2, 3], start=[4, 1]), np.array([[5, 1]]), [[0, 1, 1, 0, 0]]),
        (spaces.MultiDiscrete([[2], [2]]), np.array([[[0], [1]]]), [[1, 0, 0, 1]]),
        (spaces.MultiBinary((1, 2)), np.array([[[1, 0]], [[1, 1]]], np.int8), [[1, 0], [1, 1]]),
        (spaces.Box(-1, 1, (1, 2)), np.array([[[0.25, -0.5]]], np.float32), [[0.25, -0.5]]),
        (spaces.Box(-9, 9, (2,), np.int64), np.array([[-9, 3]]), [[-9, 3]]),
        (spaces.Box(-1, 1, ()), np.array([0.5, -0.5], np.float32), [[0.5], [-0.5]]),
        (
            spaces.Dict({"z": spaces.Box(-1, 1, (1,)), "a": spaces.Discrete(2)}),  # Gymnasium sorts the keys
            {"z": np.array([[0.5]], np.float32), "a": np.array([1])},
            [[0, 1, 0.5]],
        ),
        (
            spaces.Tuple((spaces.Box(-1, 1, (1,)), spaces.Discrete(2))),
            (np.array([[0.5]], np.float32), np.array([1])),
            [[0.5, 0, 1]],
        ),
        (
            NESTED,
            {"a": np.array([0]), "b": (np.array([[1, 0]], np.int8), {"c": np.array([[0.5, 0.25]], np.float32)})},
            [[1, 0, 1, 0, 0.5, 0.25]],
        ),
        (  # an image beside other things is flattened and scaled: 51 / 255 = 0.2, 102 / 255 = 0.4
            spaces.Dict({"image": spaces.Box(0, 255, (1, 2), np.uint8), "x": spaces.Discrete(2)}),
            {"image": np.array([[[51, 102]]], np.uint8), "x": np.array([1])},
            [[0.2, 0.4, 0, 1]],
        ),
    ],
)
def test_values_are_encoded_by_hand(space: spaces.Space, observations: Any, expected: Any) -> None:
    encoded = encode(describe_space(space), observations)
    assert encoded.dtype == np.float32
    np.testing.assert_allclose(encoded, expected, rtol=1e-6)


def test_bytes_stay_bytes() -> None:
    encoded = encode(describe_space(spaces.Box(0, 255, (3,), np.uint8)), np.array([[1, 2, 255]], np.uint8))
    assert encoded.dtype == np.uint8
    np.testing.assert_array_equal(encoded, [[1, 2, 255]])


@pytest.mark.parametrize("space", [spaces.Text(5), spaces.Sequence(spaces.Discrete(2))])
def test_a_space_of_another_kind_is_refused_by_name(space: spaces.Space) -> None:
    with pytest.raises(ValueError, match=rf"{type(space).__name__} is not supported; use Box, .*"):
        describe_space(space)


def test_a_part_of_another_kind_is_refused_too() -> None:
    with pytest.raises(ValueError, match="Text is not supported"):
        describe_space(spaces.Dict({"x": spaces.Tuple((spaces.Text(5),))}))


IMAGE = spaces.Box(0, 255, (4, 5, 3), np.uint8)


@pytest.mark.parametrize(
    ("space", "observations", "message"),
    [
        (spaces.Box(-1, 1, (3,)), np.zeros((2, 4)), r"has shape \(4,\) and its space says \(3,\)"),
        (spaces.Box(-1, 1, (3,)), np.zeros(2), r"has shape \(\) and its space says \(3,\)"),
        (spaces.Box(-1, 1, (1,)), np.array([["a"]]), "has dtype <U1 and its space says numbers"),
        (spaces.Box(-1, 1, (1,)), np.array([[1j]]), "has dtype complex128 and its space says numbers"),
        (spaces.Box(-1, 1, (1,)), np.array([[None]]), "has dtype object and its space says numbers"),
        (IMAGE, np.zeros((2, 3, 4, 5), np.uint8), r"has shape \(3, 4, 5\) and its space says \(4, 5, 3\)"),
        (IMAGE, np.zeros((2, 4, 5, 3)), "has dtype float64 and its space says uint8"),
        (spaces.Box(0, 255, (2,), np.uint8), np.zeros((1, 2), np.int64), "its space says uint8"),
        (spaces.Discrete(3), np.array([1.0]), "has dtype float64 and its space says whole numbers"),
        (spaces.Discrete(3), np.array([3]), "outside its discrete space"),
        (spaces.Discrete(3, start=1), np.array([0]), "outside its discrete space"),
        (spaces.MultiDiscrete([2, 3]), np.array([[0, 0], [2, 0]]), "outside its discrete space"),
        (spaces.Dict({"x": spaces.Discrete(2)}), {"y": np.array([0])}, "has no part 'x'"),
        (spaces.Dict({"x": spaces.Discrete(2)}), None, "has no part 'x'"),
        (spaces.Tuple((spaces.Discrete(2),) * 2), (np.array([0]),), "has no part 1"),
        (NESTED["b"], (np.zeros((1, 2), np.int8), {"c": np.zeros((1, 9))}), r"in part 1, in part 'c', .* shape \(9,\)"),
    ],
)
def test_an_observation_that_does_not_fit_is_refused_with_the_reason(
    space: spaces.Space, observations: Any, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        encode(describe_space(space), observations)


def test_unsigned_discrete_observations_are_encoded() -> None:
    np.testing.assert_array_equal(encode(describe_space(spaces.Discrete(3)), np.array([1], np.uint64)), [[0, 1, 0]])


def test_an_image_of_wider_numbers_is_refused() -> None:
    with pytest.raises(ValueError, match="its space says uint8"):
        encode(describe_space(IMAGE), np.zeros((1, 4, 5, 3), np.uint16))


def test_parts_in_another_order_are_another_space() -> None:
    box = {"type": "box", "shape": [1], "dtype": "float32"}
    there, here = ({"type": "dict", "spaces": dict.fromkeys(names, box)} for names in ("ab", "ba"))
    assert difference(there, here) == "its parts are in the order ['a', 'b'] there and ['b', 'a'] here"
