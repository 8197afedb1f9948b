"""Networks as pure functions of a flat dictionary of weights, for NumPy and JAX alike (`xp`).

    observation -> [normalise] -> [convolutions] -> [LSTM or GRU] -> policy head
                                                                 \\-> value head

Without images and recurrence the two heads are separate multilayer perceptrons that share nothing. A network of action
values has them in its policy head: the greedy action is then the distribution's mode. Masks of allowed actions are the
last columns of observations and go past all layers to the policy head's output. Shapes: N is the number of
environments, T of time steps, F of features, S of recurrent state (0 for a policy without memory).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np

Params = dict[str, Any]

GATES = {"gru": 3, "lstm": 4}  # of a recurrent layer
FORBIDDEN = -1e9  # logit or value of an action that the mask forbids: its probability is exactly zero
NORMALISED_LIMIT = 10.0  # normalised observations are clipped to this many standard deviations, as in VecNormalize


@dataclass(frozen=True)
class Network:
    """The shape of a policy and value network; holds no weights."""

    input_shape: tuple[int, ...]  # of one encoded observation: [size] or [H, W, C]
    input_dtype: str  # "float32", or "uint8", which is scaled by 1/255
    outputs: int  # width of the action distribution's parameters
    hidden: tuple[int, ...]  # layers of each head
    activation: str = "tanh"  # of the heads: "tanh" or "relu"
    log_std: float | None = None  # initial log standard deviation; None for categorical actions
    convolutions: tuple[tuple[int, int, int], ...] = ()  # (filters, kernel, stride), kernel a multiple of stride
    convolution_features: int = 512  # width of the dense layer after the convolutions
    recurrent: str = "none"  # "none", "lstm" or "gru"
    recurrent_size: int = 128
    value_head: bool = True
    action_values: bool = False  # the policy head gives action values instead of logits: act greedily
    dueling: bool = False  # the value head's output is added to the policy head's, which is centred (Wang et al. 2016)
    mask: int = 0  # width of the action mask at the end of an observation: 0, or as many columns as outputs
    squashed: bool | str = False  # tanh of a Gaussian, whose log standard deviation the policy head gives as well;
    # "deterministic": tanh of what the policy head gives
    quantiles: int = 0  # heads give this many quantiles of an action's return, whose mean is its value; 0: the value

    @property
    def normalizable(self) -> bool:
        """Whether observations may be normalised before they reach the network; bytes are scaled instead."""
        return self.input_dtype != "uint8"

    @property
    def state_size(self) -> int:
        """S, the width of the recurrent state of one environment."""
        return {"none": 0, "gru": 1, "lstm": 2}[self.recurrent] * self.recurrent_size

    def init(self, rng: np.random.Generator) -> Params:
        """Draw weights: orthogonal, gain sqrt(2), 0.01 for the policy's and 1 for the value's last layer."""
        params, width = self.init_features(rng)
        means = self.outputs if self.log_std is None else self.outputs // 2
        each = max(1, self.quantiles)
        heads = (("policy", means * each, 0.01), ("value", each, 1.0))
        for head, outputs, gain in heads if self.value_head else heads[:1]:
            params |= init_perceptron(rng, head, [width, *self.hidden, outputs], gain)
        if self.log_std is not None:
            params["policy/log_std"] = np.full(means, self.log_std, np.float32)
        return params

    def init_features(self, rng: np.random.Generator) -> tuple[Params, int]:
        """Draw the weights of everything before the heads, and the width F of the features, action mask left out."""
        params, width = self._init_encoder(rng)
        if self.recurrent in GATES:
            gates = GATES[self.recurrent]
            for name, inputs in (("x", width), ("h", self.recurrent_size)):
                blocks = [orthogonal(rng, inputs, self.recurrent_size, 1.0) for _ in range(gates)]
                params[f"core/{name}"] = np.concatenate(blocks, axis=1)
            params["core/b"] = np.zeros(gates * self.recurrent_size, np.float32)
            width = self.recurrent_size
        return params, width

    def _init_encoder(self, rng: np.random.Generator) -> tuple[Params, int]:
        """Draw the weights of the convolutions, if there are any, and the width of what comes out of them."""
        params: Params = {}
        width = self.input_shape[-1] - self.mask
        if not self.convolutions:
            return params, width
        height, length = self.input_shape[:2]
        for index, (filters, kernel, stride) in enumerate(self.convolutions):
            params |= init_dense(rng, f"conv{index}", kernel * kernel * width, filters, math.sqrt(2))
            height, length, width = (height - kernel) // stride + 1, (length - kernel) // stride + 1, filters
        params |= init_dense(rng, "features", height * length * width, self.convolution_features, math.sqrt(2))
        return params, self.convolution_features

    def initial_state(self, count: int) -> np.ndarray:
        """Zeros `[N, S]`."""
        return np.zeros((count, self.state_size), np.float32)

    def act(self, params: Params, observations: np.ndarray, state: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """One step with NumPy: `[N, ...]` and `[N, S]` to distribution parameters `[N, outputs]` and the next state."""
        features, state = self.step(params, self.features(params, observations), state)
        return self.policy(params, features), state

    def actor(self, params: Params) -> Callable[[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]:
        """`act` with these weights, prepared for many calls: perceptrons on vectors take a short path."""
        if self.input_dtype == "uint8" or self.convolutions or self.recurrent != "none" or self.mask:
            return partial(self.act, params)
        mean, std = params.get("observation/mean"), params.get("observation/std")
        low, high = np.float32(-NORMALISED_LIMIT), np.float32(NORMALISED_LIMIT)
        policy, value = self._prepared(params, "policy"), self._prepared(params, "value") if self.dueling else None
        log_std = None if self.log_std is None else params["policy/log_std"]

        def act(x: np.ndarray, state: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
            if mean is not None:
                x = np.minimum(np.maximum((x - mean) / std, low), high)
            outputs = policy(x)
            if value is not None:
                outputs = outputs - outputs.mean(-1, keepdims=True) + value(x)
            elif log_std is not None:
                outputs = np.concatenate([outputs, np.broadcast_to(log_std, outputs.shape)], axis=-1)
            return outputs, state

        return act

    def _prepared(self, params: Params, name: str) -> Callable[[np.ndarray], np.ndarray]:
        """A head of the network as a function of features `[N, F]`."""
        names = [*(f"{name}{index}" for index in range(len(self.hidden))), name]
        *layers, (last, bias) = [(params[f"{layer}/w"], params[f"{layer}/b"]) for layer in names]
        if self.quantiles:  # the mean of the last layer's quantiles is a smaller layer
            last, bias = (array.reshape(*array.shape[:-1], -1, self.quantiles).mean(-1) for array in (last, bias))
        tanh = self.activation == "tanh"

        def head(x: np.ndarray) -> np.ndarray:
            for weights, offset in layers:
                x = x @ weights + offset
                x = np.tanh(x) if tanh else np.maximum(x, 0)
            return x @ last + bias

        return head

    def values(self, params: Params, observations: np.ndarray, state: np.ndarray) -> np.ndarray:
        """Values `[N]` with NumPy, of observations reached with this recurrent state."""
        features, _ = self.step(params, self.features(params, observations), state)
        return self.value(params, features)

    def features(self, params: Params, x: Any, xp: Any = np) -> Any:
        """Everything before the recurrent core, `[N, ...]` to `[N, F]`; an action mask follows the features."""
        if self.mask:
            features = self._features(params, x[..., : -self.mask], xp)
            return xp.concatenate([features, x[..., -self.mask :]], axis=-1)
        return self._features(params, x, xp)

    def _features(self, params: Params, x: Any, xp: Any) -> Any:
        if self.input_dtype == "uint8" and not self.convolutions:
            x = scale_bytes(x)
        x = normalise(params, x)
        if self.convolutions:
            for index, (_, kernel, stride) in enumerate(self.convolutions):
                x = convolve(x, params[f"conv{index}/w"], params[f"conv{index}/b"], kernel, stride, xp)
                x = xp.maximum(x, 0)
            x = xp.maximum(x.reshape(len(x), -1) @ params["features/w"] + params["features/b"], 0)
        return x

    def step(self, params: Params, features: Any, state: Any, xp: Any = np) -> tuple[Any, Any]:
        """The recurrent core for one time step, `[N, F]` and `[N, S]`; the identity without recurrence."""
        if self.recurrent == "none":
            return features, state
        if self.mask:
            features, mask = features[:, : -self.mask], features[:, -self.mask :]
            features, state = self._core(params, features, state, xp)
            return xp.concatenate([features, mask], axis=1), state
        return self._core(params, features, state, xp)

    def _core(self, params: Params, features: Any, state: Any, xp: Any) -> tuple[Any, Any]:
        size = self.recurrent_size
        hidden = state[:, :size]
        x = features @ params["core/x"] + params["core/b"]
        h = hidden @ params["core/h"]
        if self.recurrent == "gru":
            gates = sigmoid(x[:, : 2 * size] + h[:, : 2 * size], xp)
            candidate = xp.tanh(x[:, 2 * size :] + gates[:, :size] * h[:, 2 * size :])
            hidden = candidate + gates[:, size:] * (hidden - candidate)
            return hidden, hidden
        x = x + h
        gates = sigmoid(x[:, : 3 * size], xp)  # input, forget, output
        cell = gates[:, size : 2 * size] * state[:, size:] + gates[:, :size] * xp.tanh(x[:, 3 * size :])
        hidden = gates[:, 2 * size :] * xp.tanh(cell)
        return hidden, xp.concatenate([hidden, cell], axis=1)

    def policy(self, params: Params, features: Any, xp: Any = np) -> Any:
        """Distribution parameters or action values `[..., outputs]`."""
        if self.mask:
            outputs = self._policy(params, features[..., : -self.mask], xp)
            return xp.where(features[..., -self.mask :] > 0, outputs, np.float32(FORBIDDEN))
        return self._policy(params, features, xp)

    def action_quantiles(self, params: Params, features: Any, xp: Any = np) -> Any:
        """Quantiles of the return of every action `[..., outputs, quantiles]`; their means are what `policy` gives."""
        if self.mask:
            quantiles = self._quantiles(params, features[..., : -self.mask], xp)
            return xp.where(features[..., -self.mask :, None] > 0, quantiles, np.float32(FORBIDDEN))
        return self._quantiles(params, features, xp)

    def _quantiles(self, params: Params, features: Any, xp: Any) -> Any:
        outputs = self._head(params, "policy", features, xp)
        outputs = outputs.reshape(*outputs.shape[:-1], self.outputs, self.quantiles)
        if self.dueling:
            value = self._head(params, "value", features, xp)[..., None, :]
            return outputs - outputs.mean(-2, keepdims=True) + value
        return outputs

    def _policy(self, params: Params, features: Any, xp: Any) -> Any:
        if self.quantiles:
            return self._quantiles(params, features, xp).mean(-1)
        outputs = self._head(params, "policy", features, xp)
        if self.dueling:
            return outputs - outputs.mean(-1, keepdims=True) + self._head(params, "value", features, xp)
        if self.log_std is None:
            return outputs
        return xp.concatenate([outputs, xp.zeros_like(outputs) + params["policy/log_std"]], axis=-1)

    def value(self, params: Params, features: Any, xp: Any = np) -> Any:
        """Values `[...]`."""
        features = features[..., : -self.mask] if self.mask else features
        return self._head(params, "value", features, xp)[..., 0]

    def _head(self, params: Params, name: str, x: Any, xp: Any) -> Any:
        return perceptron(params, name, len(self.hidden), self.activation, x, xp)


def perceptron(params: Params, name: str, layers: int, activation: str, x: Any, xp: Any = np) -> Any:
    """A multilayer perceptron on `[..., F]`: hidden layers `name0`, `name1`, ..., and the linear last one, `name`."""
    leading = x.shape[:-1]
    x = x.reshape(-1, x.shape[-1])  # plain matrices: XLA multiplies them a fifth faster than with a leading axis
    for index in range(layers):
        x = x @ params[f"{name}{index}/w"] + params[f"{name}{index}/b"]
        x = xp.tanh(x) if activation == "tanh" else xp.maximum(x, 0)
    x = x @ params[f"{name}/w"] + params[f"{name}/b"]
    return x.reshape(*leading, x.shape[-1])


def init_perceptron(rng: np.random.Generator, name: str, sizes: list[int], gain: float) -> Params:
    """Weights for `perceptron`: orthogonal, gain sqrt(2), another one for the last layer; biases are zero."""
    params: Params = {}
    for index, (inputs, outputs) in enumerate(pairwise(sizes)):
        last = index == len(sizes) - 2
        layer = name if last else f"{name}{index}"
        params |= init_dense(rng, layer, inputs, outputs, gain if last else math.sqrt(2))
    return params


def init_dense(rng: np.random.Generator, name: str, inputs: int, outputs: int, gain: float) -> Params:
    """Weights of one layer: orthogonal with this gain; the biases are zero."""
    return {f"{name}/w": orthogonal(rng, inputs, outputs, gain), f"{name}/b": np.zeros(outputs, np.float32)}


OWN_LAYERS = ("policy", "value", "conv", "features")  # how names of dense layers and convolutions begin


def draw_uniform(rng: np.random.Generator, params: Params) -> Params:
    """The same dense layers and convolutions with weights and biases between -1 / sqrt(inputs) and 1 / sqrt(inputs), as
    PyTorch draws them. What is in a network of the user's stays."""
    found = dict(params)
    for name in params:
        layer = name.removesuffix("/w")
        if layer != name and layer.startswith(OWN_LAYERS):
            bound = 1 / math.sqrt(len(params[name]))
            for part in (name, f"{layer}/b"):
                found[part] = rng.uniform(-bound, bound, params[part].shape).astype(np.float32)
    return found


def convolve(x: Any, weights: Any, bias: Any, kernel: int, stride: int, xp: Any = np) -> Any:
    """A convolution without padding as a sum of matrix products, `[N, H, W, C]` to `[N, H', W', filters]`.

    Blocks of stride x stride pixels become channels first (as uint8 for images, a quarter of the bytes), so that a
    strided layer is a sum over 2 x 2 shifts; with stride 1, the shifts along a row are laid side by side. On a CPU, XLA
    trains this several times as fast as its own convolution, and NumPy has none. `weights` is
    `[kernel * kernel * C, filters]`, in the order of shifts, pixels of a block, channels.
    """
    count, height, width, channels = x.shape
    rows, columns, reach = (height - kernel) // stride + 1, (width - kernel) // stride + 1, kernel // stride
    if stride > 1:
        down, across = rows + reach - 1, columns + reach - 1
        x = x[:, : down * stride, : across * stride].reshape(count, down, stride, across, stride, channels)
        x = x.transpose(0, 1, 3, 2, 4, 5).reshape(count, down, across, stride * stride * channels)
    if x.dtype == np.uint8:
        x = scale_bytes(x)
    shifts = [(i, j) for i in range(reach) for j in range(reach)]
    if stride == 1:
        x = xp.concatenate([x[:, :, j : j + columns] for j in range(reach)], axis=-1)
        shifts = [(i, 0) for i in range(reach)]
    parts = weights.reshape(len(shifts), x.shape[-1], -1)
    total = bias
    for (i, j), part in zip(shifts, parts, strict=True):
        window = x[:, i : i + rows, j : j + columns].reshape(count * rows * columns, -1)
        total = total + window @ part
    return total.reshape(count, rows, columns, -1)


def scale_bytes(x: Any) -> Any:
    """uint8 to float32 between 0 and 1."""
    return x.astype(np.float32) * np.float32(1 / 255)


def normalise(params: Params, x: Any) -> Any:
    """Observations `[..., F]` by the mean and deviation among the weights; as they are, if there are none."""
    if "observation/mean" not in params:
        return x
    width = x.shape[-1]  # the statistics include the columns of the mask
    x = (x - params["observation/mean"][..., :width]) / params["observation/std"][..., :width]
    return x.clip(-NORMALISED_LIMIT, NORMALISED_LIMIT)


def sigmoid(x: Any, xp: Any) -> Any:
    """The logistic function, written so that it never overflows."""
    return 0.5 * (xp.tanh(0.5 * x) + 1)


def orthogonal(rng: np.random.Generator, inputs: int, outputs: int, gain: float) -> np.ndarray:
    """A float32 `[inputs, outputs]` matrix with orthogonal rows or columns (Saxe et al. 2014)."""
    matrix = rng.standard_normal((max(inputs, outputs), min(inputs, outputs)))
    q, r = np.linalg.qr(matrix)
    q = q * np.sign(np.diag(r))
    return np.ascontiguousarray(gain * (q if inputs >= outputs else q.T), np.float32)
