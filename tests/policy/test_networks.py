from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fever.algos.on_policy import unroll
from fever.policy.networks import FORBIDDEN, Network, convolve, orthogonal, sigmoid
from tests.factories import random_weights

VECTOR = {"input_shape": (5,), "input_dtype": "float32", "outputs": 4, "hidden": (8, 6)}
IMAGE = {"input_shape": (10, 12, 3), "input_dtype": "uint8", "outputs": 4, "hidden": ()}
NETWORKS = {
    "mlp": Network(**VECTOR),
    "mlp, relu": Network(**VECTOR, activation="relu"),
    "mlp, continuous": Network(**VECTOR, log_std=-0.5),
    "mlp, bytes": Network(**{**VECTOR, "input_dtype": "uint8"}),
    "cnn": Network(**IMAGE, convolutions=((6, 4, 2), (5, 3, 1)), convolution_features=16),
    "lstm": Network(**VECTOR, recurrent="lstm", recurrent_size=7),
    "gru": Network(**VECTOR, recurrent="gru", recurrent_size=7),
    "cnn and lstm": Network(
        **IMAGE, convolutions=((6, 4, 4),), convolution_features=16, recurrent="lstm", recurrent_size=7
    ),
}
every_network = pytest.mark.parametrize("network", NETWORKS.values(), ids=NETWORKS)
memories = pytest.mark.parametrize("name", ["lstm", "gru", "cnn and lstm"])


def observations(network: Network, *leading: int) -> np.ndarray:
    rng = np.random.default_rng(1)
    shape = (*leading, *network.input_shape)
    if network.input_dtype == "uint8":
        return rng.integers(0, 256, shape, np.uint8)
    return rng.normal(size=shape).astype(np.float32)


def state_of(network: Network, count: int) -> np.ndarray:
    return np.random.default_rng(2).normal(0, 0.5, (count, network.state_size)).astype(np.float32)


@every_network
def test_jax_agrees_with_numpy(network: Network) -> None:
    params, seen, state = random_weights(network), observations(network, 3), state_of(network, 3)
    outputs, state_after = network.act(params, seen, state)
    values = network.values(params, seen, state)
    features, jax_state = network.step(
        params, network.features(params, jnp.asarray(seen), jnp), jnp.asarray(state), jnp
    )
    np.testing.assert_allclose(network.policy(params, features, jnp), outputs, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(network.value(params, features, jnp), values, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(jax_state, state_after, rtol=1e-4, atol=1e-5)


@every_network
def test_numpy_outputs_are_single_precision_of_the_right_shapes(network: Network) -> None:
    outputs, state = network.act(network.init(np.random.default_rng(0)), observations(network, 3), state_of(network, 3))
    assert (outputs.shape, state.shape) == ((3, 4), (3, network.state_size))
    assert outputs.dtype == state.dtype == network.initial_state(3).dtype == np.float32


@every_network
def test_every_environment_of_a_batch_is_on_its_own(network: Network) -> None:
    params, seen, state = random_weights(network), observations(network, 3), state_of(network, 3)
    together = network.act(params, seen, state)[0]
    alone = [network.act(params, seen[i : i + 1], state[i : i + 1])[0][0] for i in range(3)]
    np.testing.assert_allclose(together, alone, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("recurrent", "expected"), [("none", 0), ("gru", 128), ("lstm", 256)])
def test_the_state_is_as_wide_as_the_core_needs(recurrent: str, expected: int) -> None:
    network = Network(**VECTOR, recurrent=recurrent)
    assert network.state_size == expected
    np.testing.assert_array_equal(network.initial_state(2), np.zeros((2, expected)))


def test_a_perceptron_by_hand() -> None:
    # Policy: relu(1 * 2 + 3 * -1 + 0.5) = 0 and relu(1 * 1 + 3 * 1 + 0) = 4, so 0 * 5 + 4 * 2 + 1 = 9.
    # Value: relu(1 * 1 + 3 * 0) = 1 and relu(1 * 0 + 3 * 1 - 1) = 2, so 1 * 10 + 2 * 100 - 3 = 207.
    network = Network((2,), "float32", 1, (2,), "relu")
    params = {
        "policy0/w": np.array([[2.0, 1.0], [-1.0, 1.0]]),
        "policy0/b": np.array([0.5, 0.0]),
        "policy/w": np.array([[5.0], [2.0]]),
        "policy/b": np.array([1.0]),
        "value0/w": np.array([[1.0, 0.0], [0.0, 1.0]]),
        "value0/b": np.array([0.0, -1.0]),
        "value/w": np.array([[10.0], [100.0]]),
        "value/b": np.array([-3.0]),
    }
    seen = np.array([[1.0, 3.0]])
    np.testing.assert_allclose(network.act(params, seen, network.initial_state(1))[0], [[9.0]])
    np.testing.assert_allclose(network.values(params, seen, network.initial_state(1)), [207.0])


def test_the_default_activation_is_the_hyperbolic_tangent() -> None:
    network = Network((1,), "float32", 1, (1,))
    one, zero = np.ones((1, 1)), np.zeros(1)
    params = {"policy0/w": one, "policy0/b": zero, "policy/w": one, "policy/b": zero}
    assert network.policy(params, np.array([[0.5]]))[0, 0] == pytest.approx(math.tanh(0.5))


def test_log_deviations_follow_the_means_and_do_not_depend_on_the_observation() -> None:
    network = NETWORKS["mlp, continuous"]
    params = network.init(np.random.default_rng(0))
    np.testing.assert_array_equal(params["policy/log_std"], [-0.5, -0.5])
    params["policy/log_std"] = np.array([0.25, 0.75], np.float32)
    outputs = network.act(params, observations(network, 3), network.initial_state(3))[0]
    np.testing.assert_array_equal(outputs[:, 2:], [[0.25, 0.75]] * 3)
    assert len({*outputs[:, 0].tolist()}) == 3


def test_bytes_are_scaled_to_one() -> None:
    seen = np.array([[0, 51, 255]], np.uint8)
    features = Network((3,), "uint8", 2, ()).features({}, seen)
    np.testing.assert_allclose(features, [[0.0, 0.2, 1.0]], rtol=1e-6)


@pytest.mark.parametrize("xp", [np, jnp], ids=["numpy", "jax"])
def test_observations_are_normalised_and_clipped_at_ten_deviations(xp: object) -> None:
    # (3 - 1) / 2 = 1, (-7 - 1) / 2 = -4, (100 - 1) / 2 = 49.5 and (-100 - 1) / 2 = -50.5, beyond ten.
    params = {"observation/mean": np.full(4, 1, np.float32), "observation/std": np.full(4, 2, np.float32)}
    seen = np.array([[3, -7, 100, -100]], np.float32)
    features = Network((4,), "float32", 2, ()).features(params, seen, xp)
    np.testing.assert_allclose(features, [[1, -4, 10, -10]])


@pytest.mark.parametrize(
    ("kernel", "stride", "height", "width"),
    [(3, 1, 7, 9), (4, 2, 10, 12), (4, 2, 11, 9), (8, 4, 36, 41), (6, 2, 13, 8), (2, 2, 5, 6), (1, 1, 3, 3)],
)
@pytest.mark.parametrize("xp", [np, jnp], ids=["numpy", "jax"])
def test_convolve_is_the_library_convolution(xp: object, kernel: int, stride: int, height: int, width: int) -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(2, height, width, 3)).astype(np.float32)
    matrix = rng.normal(size=(kernel * kernel * 3, 5)).astype(np.float32)
    bias = rng.normal(size=5).astype(np.float32)
    # Rows of the matrix: block row, block column, row in block, column in block, channel.
    blocks = matrix.reshape(kernel // stride, kernel // stride, stride, stride, 3, 5)
    kernels = blocks.transpose(0, 2, 1, 3, 4, 5).reshape(kernel, kernel, 3, 5)
    expected = bias + jax.lax.conv_general_dilated(
        x, kernels, (stride, stride), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC"), precision="highest"
    )
    np.testing.assert_allclose(convolve(x, matrix, bias, kernel, stride, xp), expected, rtol=1e-3, atol=1e-4)


def logistic(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def test_the_logistic_function_never_overflows() -> None:
    x = np.array([-1e4, -2.0, 0.0, 3.0, 1e4])
    np.testing.assert_allclose(sigmoid(x, np), [0, logistic(-2), 0.5, logistic(3), 1], rtol=1e-12)


def gate(params: dict[str, np.ndarray], which: int, x: np.ndarray, hidden: np.ndarray, size: int) -> tuple:
    """Input part (with bias) and recurrent part of one gate of one environment, by loops."""
    column = slice(which * size, (which + 1) * size)
    wx, wh, b = params["core/x"][:, column], params["core/h"][:, column], params["core/b"][column]
    from_input = [sum(x[i] * wx[i, j] for i in range(len(x))) + b[j] for j in range(size)]
    from_state = [sum(hidden[i] * wh[i, j] for i in range(size)) for j in range(size)]
    return from_input, from_state


def test_the_lstm_cell_is_that_of_the_books() -> None:
    """Hochreiter & Schmidhuber 1997 with a forget gate; columns: input, forget, output gates, candidate."""
    network, size = NETWORKS["lstm"], 7
    params, state, seen = random_weights(network), state_of(network, 2), observations(network, 2)
    _, found = network.act(params, seen, state)
    for row in range(2):
        hidden, cell = state[row, :size], state[row, size:]
        parts = [gate(params, which, seen[row], hidden, size) for which in range(4)]
        sums = [[a + b for a, b in zip(*part, strict=True)] for part in parts]
        for j in range(size):
            i, f, o = (logistic(sums[which][j]) for which in range(3))
            c = f * cell[j] + i * math.tanh(sums[3][j])
            assert found[row, size + j] == pytest.approx(c, rel=1e-4, abs=1e-5)
            assert found[row, j] == pytest.approx(o * math.tanh(c), rel=1e-4, abs=1e-5)


def test_the_gru_cell_is_that_of_the_books() -> None:
    """Cho et al. 2014 with the reset gate behind the matrix, as in cuDNN; columns: reset, update gates, candidate."""
    network, size = NETWORKS["gru"], 7
    params, state, seen = random_weights(network), state_of(network, 2), observations(network, 2)
    _, found = network.act(params, seen, state)
    for row in range(2):
        hidden = state[row]
        (rx, rh), (zx, zh), (nx, nh) = (gate(params, which, seen[row], hidden, size) for which in range(3))
        for j in range(size):
            r, z = logistic(rx[j] + rh[j]), logistic(zx[j] + zh[j])
            n = math.tanh(nx[j] + r * nh[j])
            assert found[row, j] == pytest.approx((1 - z) * n + z * hidden[j], rel=1e-4, abs=1e-5)


@memories
def test_unrolling_is_stepping_with_the_state_reset_where_episodes_begin(name: str) -> None:
    network = NETWORKS[name]
    time, count = 6, 3
    params, seen, state = random_weights(network), observations(network, time, count), state_of(network, count)
    first = np.zeros((time, count), bool)
    first[2, 0] = first[4, 0] = first[0, 1] = True  # environment 2 carries its state all the way
    unrolled = unroll(network, params, jnp.asarray(seen), jnp.asarray(state), jnp.asarray(first))
    for t in range(time):
        state = np.where(first[t][:, None], np.float32(0), state)
        outputs, after = network.act(params, seen[t], state)
        values = network.values(params, seen[t], state)
        np.testing.assert_allclose(network.policy(params, unrolled[t], jnp), outputs, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(network.value(params, unrolled[t], jnp), values, rtol=1e-4, atol=1e-5)
        state = after


@memories
def test_nothing_from_before_an_episode_reaches_into_it(name: str) -> None:
    network = NETWORKS[name]
    params, seen = random_weights(network), observations(network, 4, 1)
    first = jnp.asarray([[False], [False], [True], [False]])
    other = seen.copy()
    other[:2] = seen[2:]
    here, there = (
        unroll(network, params, jnp.asarray(given), jnp.asarray(state_of(network, 1)), first) for given in (seen, other)
    )
    np.testing.assert_array_equal(here[2:], there[2:])
    assert not np.allclose(here[1], there[1])


def test_unrolling_without_memory_gives_the_features_row_by_row() -> None:
    network = NETWORKS["cnn"]
    params, seen = random_weights(network), observations(network, 2, 3)
    unrolled = unroll(network, params, jnp.asarray(seen), jnp.zeros((3, 0)), jnp.zeros((2, 3), bool))
    expected = [network.features(params, row) for row in seen]
    np.testing.assert_allclose(unrolled, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("inputs", "outputs"), [(8, 3), (3, 8), (5, 5)])
def test_initial_matrices_are_orthogonal(inputs: int, outputs: int) -> None:
    matrix = orthogonal(np.random.default_rng(0), inputs, outputs, 2.0)
    assert (matrix.shape, matrix.dtype) == ((inputs, outputs), np.float32)
    product = matrix.T @ matrix if inputs >= outputs else matrix @ matrix.T
    np.testing.assert_allclose(product, 4 * np.eye(min(inputs, outputs)), atol=1e-5)  # the gain squared


def gain(matrix: np.ndarray) -> float:
    """The one singular value that an orthogonal matrix has."""
    values = np.linalg.svd(matrix, compute_uv=False)
    np.testing.assert_allclose(values, values[0], rtol=1e-4)
    return float(values[0])


@every_network
def test_weights_begin_with_the_usual_gains_and_biases_at_zero(network: Network) -> None:
    params = network.init(np.random.default_rng(0))
    for name, value in params.items():
        if name in ("core/x", "core/h"):
            for block in np.split(value, value.shape[1] // network.recurrent_size, axis=1):
                assert gain(block) == pytest.approx(1.0, rel=1e-4)
        elif name.endswith("/w"):
            expected = {"policy/w": 0.01, "value/w": 1.0}.get(name, math.sqrt(2))
            assert gain(value) == pytest.approx(expected, rel=1e-4)
        elif name != "policy/log_std":
            np.testing.assert_array_equal(value, 0)
        assert value.dtype == np.float32


def test_one_seed_gives_one_set_of_weights() -> None:
    network = NETWORKS["lstm"]
    first, second, other = (network.init(np.random.default_rng(seed)) for seed in (3, 3, 4))
    for name, value in first.items():
        np.testing.assert_array_equal(value, second[name])
    assert not np.array_equal(first["core/x"], other["core/x"])


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"activation": "relu", "hidden": ()},
        {"log_std": -0.5, "outputs": 4},
        {"dueling": True, "action_values": True},
        {"dueling": True, "action_values": True, "mask": 3, "quantiles": 5},
        {"recurrent": "gru", "recurrent_size": 3},
        {"mask": 3},
        {"input_dtype": "uint8"},
    ],
)
@pytest.mark.parametrize("normalised", [False, True])
def test_what_is_prepared_for_many_steps_acts_as_a_single_one(fields: dict[str, Any], normalised: bool) -> None:
    network = Network(**{"input_shape": (7,), "input_dtype": "float32", "outputs": 3, "hidden": (5, 4), **fields})
    rng = np.random.default_rng(0)
    params = {name: rng.normal(0, 0.5, value.shape).astype(np.float32) for name, value in network.init(rng).items()}
    if normalised:
        params |= {"observation/mean": np.ones(7, np.float32), "observation/std": np.full(7, 0.1, np.float32)}
    observations = rng.integers(0, 3, (6, 7)).astype(network.input_dtype)
    state = rng.normal(size=(6, network.state_size)).astype(np.float32)
    for expected, got in zip(
        network.act(params, observations, state), network.actor(params)(observations, state), strict=True
    ):
        np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("dueling", [False, True])
def test_values_of_quantiles_are_their_means_prepared_or_not(dueling: bool) -> None:
    network = Network((7,), "float32", 3, (5,), action_values=True, value_head=dueling, dueling=dueling, quantiles=4)
    rng = np.random.default_rng(0)
    params = {name: rng.normal(0, 0.5, value.shape).astype(np.float32) for name, value in network.init(rng).items()}
    assert params["policy/w"].shape == (5, 12)
    observations = rng.normal(size=(6, 7)).astype(np.float32)
    quantiles = network.action_quantiles(params, observations)
    hidden = np.tanh(observations @ params["policy0/w"] + params["policy0/b"])
    expected = (hidden @ params["policy/w"] + params["policy/b"]).reshape(6, 3, 4)  # quantiles of one action together
    if dueling:
        hidden = np.tanh(observations @ params["value0/w"] + params["value0/b"])
        expected = (
            expected - expected.mean(1, keepdims=True) + (hidden @ params["value/w"] + params["value/b"])[:, None]
        )
    np.testing.assert_allclose(quantiles, expected, rtol=1e-4, atol=1e-5)
    for values, _ in (network.act(params, observations, np.zeros((6, 0))), network.actor(params)(observations, None)):
        np.testing.assert_allclose(values, expected.mean(2), rtol=1e-4, atol=1e-5)


def test_quantiles_of_forbidden_actions_are_lowest() -> None:
    network = Network((5,), "float32", 2, (4,), action_values=True, value_head=False, mask=2, quantiles=3)
    params = network.init(np.random.default_rng(0))
    rows = np.array([[1, 2, 3, 1, 0], [1, 2, 3, 0, 1]], np.float32)
    quantiles = network.action_quantiles(params, network.features(params, rows))
    assert (quantiles == FORBIDDEN).tolist() == [[[False] * 3, [True] * 3], [[True] * 3, [False] * 3]]
    values = network.policy(params, network.features(params, rows))
    assert (values == FORBIDDEN).tolist() == [[False, True], [True, False]]
