"""`fever export --onnx`: a policy as an ONNX graph, for programs without Python.

The graph computes what `Network` and its distribution compute, built node by node from the weights: encoded
observations in; the distribution's parameters and the deterministic action, as the environment takes it, out. The
batch axis N has no fixed size. A recurrent policy has its state as a further input and output.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from fever.errors import FeverError
from fever.policy import Categorical, Deterministic, Gaussian, Network, Policy, SquashedGaussian
from fever.policy.networks import FORBIDDEN, NORMALISED_LIMIT
from fever.policy.spaces import Description
from fever.runs.checkpoint import Checkpoint

OPSET = 17  # of the operators; every runtime since 2022 has it
IR_VERSION = 8  # of the file, which belongs to that opset
MODEL, DESCRIPTION = "policy.onnx", "policy.json"


class Graph:
    """Nodes and constants of a graph. Its methods add a node and return the name of its output."""

    def __init__(self) -> None:
        import onnx

        self.onnx = onnx
        self.nodes: list[Any] = []
        self.constants: list[Any] = []

    def node(self, kind: str, *inputs: str | np.ndarray | np.generic, **attributes: Any) -> str:
        """Add an operator; an array among its inputs becomes a constant."""
        names = [one if isinstance(one, str) else self.constant(one) for one in inputs]
        output = f"{kind}_{len(self.nodes)}"
        self.nodes.append(self.onnx.helper.make_node(kind, names, [output], **attributes))
        return output

    def constant(self, array: np.ndarray | np.generic) -> str:
        name = f"constant_{len(self.constants)}"
        self.constants.append(self.onnx.numpy_helper.from_array(np.asarray(array, order="C"), name))
        return name

    def dense(self, x: str, weights: np.ndarray, bias: np.ndarray) -> str:
        return self.node("Add", self.node("MatMul", x, weights), bias)

    def columns(self, x: str, start: int, end: int) -> str:
        """The columns from `start` up to `end` of `[N, width]`."""
        return self.node("Slice", x, *(np.array([one], np.int64) for one in (start, end, 1)))

    def type_of(self, dtype: Any) -> int:
        """ONNX's number of a NumPy type."""
        return self.onnx.helper.np_dtype_to_tensor_dtype(np.dtype(dtype))

    def reshape(self, x: str, *shape: int) -> str:
        """`[N, ...]` to `[N, *shape]`."""
        return self.node("Reshape", x, np.array([0, *shape], np.int64))  # 0: as it was


def build(policy: Policy) -> Any:
    """The ONNX model of a policy. Raises `FeverError` for networks that cannot be written as one."""
    network, params = policy.network, policy.params
    if type(network) is not Network:
        raise FeverError(
            f"a network of one's own ({type(network).__name__}) cannot be written as ONNX; leave out --onnx"
        )
    try:
        graph = Graph()
    except ModuleNotFoundError as error:
        raise FeverError('ONNX is not installed; install it with: pip install "fever[onnx]"') from error
    features, mask = _features(graph, network, params)
    features, state = _core(graph, network, params, features)
    parameters = graph.node("Identity", _policy_head(graph, network, params, features, mask))
    action = _action(graph, policy, parameters)
    model = _model(graph, policy, {"parameters": parameters, "action": action, "next_state": state})
    _compare(model, policy)
    return model


def _features(graph: Graph, network: Network, params: Any) -> tuple[str, str]:
    """Everything before the recurrent core, and the name of the mask, empty without one."""
    x, mask = "observation", ""
    width = network.input_shape[-1] - network.mask
    if network.mask:
        x, mask = graph.columns("observation", 0, width), graph.columns("observation", width, width + network.mask)
    normalised = "observation/mean" in params
    if network.input_dtype == "uint8":
        x = graph.node("Cast", x, to=graph.onnx.TensorProto.FLOAT)
    if network.input_dtype == "uint8" and not (normalised and network.convolutions):
        x = graph.node("Mul", x, np.float32(1 / 255))
    if normalised:
        mean, std = params["observation/mean"][..., :width], params["observation/std"][..., :width]
        limit = np.float32(NORMALISED_LIMIT)
        x = graph.node("Clip", graph.node("Div", graph.node("Sub", x, mean), std), -limit, limit)
    if network.convolutions:
        x = graph.node("Transpose", x, perm=[0, 3, 1, 2])  # ONNX has channels first
        for index, (_, kernel, stride) in enumerate(network.convolutions):
            weights = kernel_of(params[f"conv{index}/w"], kernel, stride)
            x = graph.node("Relu", graph.node("Conv", x, weights, params[f"conv{index}/b"], strides=[stride, stride]))
        x = graph.node("Flatten", graph.node("Transpose", x, perm=[0, 2, 3, 1]))
        x = graph.node("Relu", graph.dense(x, params["features/w"], params["features/b"]))
    return x, mask


def kernel_of(weights: np.ndarray, kernel: int, stride: int) -> np.ndarray:
    """The weights of `networks.convolve`, `[kernel * kernel * C, filters]`, as ONNX has them: `[filters, C, kernel,
    kernel]`.

    Their rows are ordered by shift, then pixel of a block, then channel. With shift (i, j) and pixel (p, q), the place
    in the kernel is (i * stride + p, j * stride + q).
    """
    reach = kernel // stride
    parts = weights.reshape(reach, reach, stride, stride, -1, weights.shape[-1])  # i, j, p, q, channel, filter
    rows = parts.transpose(0, 2, 1, 3, 4, 5).reshape(kernel, kernel, -1, weights.shape[-1])
    return rows.transpose(3, 2, 0, 1)


def _core(graph: Graph, network: Network, params: Any, x: str) -> tuple[str, str]:
    """The recurrent core: its output and the next state; the state is empty without recurrence."""
    if network.recurrent == "none":
        return x, ""
    size = network.recurrent_size
    hidden = graph.columns("state", 0, size)
    x = graph.dense(x, params["core/x"], params["core/b"])
    h = graph.node("MatMul", hidden, params["core/h"])
    if network.recurrent == "gru":
        reset, keep = (
            graph.node("Sigmoid", graph.node("Add", graph.columns(x, *at), graph.columns(h, *at)))
            for at in ((0, size), (size, 2 * size))
        )
        drawn = graph.node("Mul", reset, graph.columns(h, 2 * size, 3 * size))
        candidate = graph.node("Tanh", graph.node("Add", graph.columns(x, 2 * size, 3 * size), drawn))
        change = graph.node("Mul", keep, graph.node("Sub", hidden, candidate))
        hidden = graph.node("Add", candidate, change)
        return hidden, graph.node("Identity", hidden)
    x = graph.node("Add", x, h)
    take, keep, show = (graph.node("Sigmoid", graph.columns(x, one * size, (one + 1) * size)) for one in range(3))
    new = graph.node("Mul", take, graph.node("Tanh", graph.columns(x, 3 * size, 4 * size)))
    cell = graph.node("Add", graph.node("Mul", keep, graph.columns("state", size, 2 * size)), new)
    hidden = graph.node("Mul", show, graph.node("Tanh", cell))
    return hidden, graph.node("Concat", hidden, cell, axis=1)


def _policy_head(graph: Graph, network: Network, params: Any, x: str, mask: str) -> str:
    outputs = _perceptron(graph, network, params, "policy", x)
    if network.dueling:
        centred = graph.node("Sub", outputs, graph.node("ReduceMean", outputs, axes=[-1]))
        outputs = graph.node("Add", centred, _perceptron(graph, network, params, "value", x))
    elif network.log_std is not None:
        log_std = graph.node("Add", graph.node("Mul", outputs, np.float32(0)), params["policy/log_std"])
        outputs = graph.node("Concat", outputs, log_std, axis=1)
    if mask:
        outputs = graph.node("Where", graph.node("Greater", mask, np.float32(0)), outputs, np.float32(FORBIDDEN))
    return outputs


def _perceptron(graph: Graph, network: Network, params: Any, name: str, x: str) -> str:
    for index in range(len(network.hidden)):
        x = graph.dense(x, params[f"{name}{index}/w"], params[f"{name}{index}/b"])
        x = graph.node("Tanh" if network.activation == "tanh" else "Relu", x)
    last, bias = params[f"{name}/w"], params[f"{name}/b"]
    if network.quantiles:  # their mean is a smaller layer
        last, bias = (array.reshape(*array.shape[:-1], -1, network.quantiles).mean(-1) for array in (last, bias))
    return graph.dense(x, last, bias)


def _action(graph: Graph, policy: Policy, parameters: str) -> str:
    """The mode of the distribution, as the environment takes it."""
    distribution = policy.distribution
    kind = np.dtype(distribution.env_dtype)
    if type(distribution) is Categorical:
        choices, most = len(distribution.sizes), max(distribution.sizes)
        logits = graph.reshape(parameters, choices, most)
        outside = np.arange(most) >= np.asarray(distribution.sizes)[:, None]
        logits = graph.node("Sub", logits, np.float32(-FORBIDDEN) * outside.astype(np.float32))
        best = graph.node("ArgMax", logits, axis=-1, keepdims=0)
        best = graph.node("Add", best, np.asarray(distribution.starts, np.int64))
    elif isinstance(distribution, Gaussian) and type(distribution) in (Gaussian, SquashedGaussian, Deterministic):
        wide = np.promote_types(np.float32, kind)
        low, high = (np.asarray(bound, wide) for bound in (distribution.low, distribution.high))
        best = graph.node("Cast", graph.columns(parameters, 0, len(low)), to=graph.type_of(wide))
        if type(distribution) is not Gaussian:
            best = graph.node("Tanh", best)
        best = graph.node("Add", graph.node("Mul", best, (high - low) / 2), (low + high) / 2)
        best = graph.node("Min", graph.node("Max", best, low), high)
    else:
        raise FeverError(f"actions of {type(distribution).__name__} cannot be written as ONNX; leave out --onnx")
    return graph.reshape(graph.node("Cast", best, to=graph.type_of(kind)), *distribution.env_shape)


def _model(graph: Graph, policy: Policy, made: dict[str, str]) -> Any:
    """Close the graph: inputs, and outputs under their public names."""
    onnx, shapes = graph.onnx, interface(policy)
    infos = {
        side: [
            onnx.helper.make_tensor_value_info(name, graph.type_of(one["dtype"]), one["shape"])
            for name, one in shapes[side].items()
        ]
        for side in ("inputs", "outputs")
    }
    nodes = [*graph.nodes, *(onnx.helper.make_node("Identity", [made[name]], [name]) for name in shapes["outputs"])]
    body = onnx.helper.make_graph(nodes, "policy", infos["inputs"], infos["outputs"], graph.constants)
    opset = [onnx.helper.make_opsetid("", OPSET)]
    model = onnx.helper.make_model(body, opset_imports=opset, producer_name="fever", ir_version=IR_VERSION)
    onnx.checker.check_model(model, full_check=True)
    return model


def _compare(model: Any, policy: Policy) -> None:
    """Raise `FeverError` if the graph does not compute what the policy does, on one random observation."""
    from onnx.reference import ReferenceEvaluator

    network, rng = policy.network, np.random.default_rng(0)
    observation = rng.integers(0, 2, (1, *network.input_shape)).astype(network.input_dtype)
    observation[..., network.input_shape[-1] - network.mask :] = 1
    state = rng.standard_normal((1, network.state_size), np.float32)
    inputs = {"observation": observation} | ({"state": state} if network.state_size else {})
    [found] = ReferenceEvaluator(model).run(["parameters"], inputs)
    wanted, _ = network.act(policy.params, observation, state)
    if not np.allclose(found, wanted, rtol=1e-3, atol=1e-3):
        raise FeverError("this network cannot be written as ONNX; leave out --onnx")


def interface(policy: Policy) -> dict[str, dict[str, Description]]:
    """Names, types and shapes of the graph's inputs and outputs; "N" is the batch axis."""
    network, distribution = policy.network, policy.distribution
    state = {"dtype": "float32", "shape": ["N", network.state_size]}
    recurrent = network.recurrent != "none"
    return {
        "inputs": {
            "observation": {"dtype": network.input_dtype, "shape": ["N", *network.input_shape]},
            **({"state": state} if recurrent else {}),
        },
        "outputs": {
            "parameters": {"dtype": "float32", "shape": ["N", network.outputs]},
            "action": {"dtype": str(distribution.env_dtype), "shape": ["N", *distribution.env_shape]},
            **({"next_state": state} if recurrent else {}),
        },
    }


def describe(policy: Policy, env: str, algo: str) -> dict[str, Any]:
    """What a program that runs the graph needs to know, as JSON."""
    notes = {
        "observation": "encoded as `observation_space` says: flat floats, one-hots for discrete parts, Dict parts side "
        "by side, images [height, width, channels] as uint8; an action mask (1 or 0) is the last columns",
        "parameters": "action values"
        if policy.network.action_values
        else "logits, one block for each choice"
        if isinstance(policy.distribution, Categorical)
        else "the action before tanh and scaling to the bounds"
        if isinstance(policy.distribution, Deterministic)
        else "means, then log standard deviations, before scaling to the bounds",
        "action": "the most likely action, as the environment takes it",
    }
    if policy.network.recurrent != "none":
        notes["state"] = "zeros when an episode begins, then `next_state` of the step before"
    spaces = {"observation_space": policy.observation, "action_space": policy.action}
    return {"env": env, "algo": algo, **interface(policy), "notes": notes, **spaces}


def export_onnx(checkpoint: Checkpoint, target: Path) -> Path:
    """Write a new folder with the graph and a JSON file about its inputs and outputs; refuses to overwrite."""
    from fever.runs.export import new_folder, own_policy

    policy = own_policy(checkpoint)
    with checkpoint.reading("written as ONNX"):
        model = build(policy)
        about = describe(policy, checkpoint.field("env", str), checkpoint.field("algo", str))
    with new_folder(target) as folder:
        (folder / MODEL).write_bytes(model.SerializeToString())
        (folder / DESCRIPTION).write_text(json.dumps(about, indent=2) + "\n")
    return target
