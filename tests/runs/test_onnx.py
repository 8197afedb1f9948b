"""Exported graphs, run by ONNX Runtime, against fever's own networks; and what `fever export` refuses."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest

import fever
from fever.errors import FeverError
from fever.policy import Network, Policy
from fever.policy.policy import network_for
from fever.policy.spaces import with_mask
from fever.runs.export import export
from fever.runs.onnx import build, export_onnx
from fever.runs.run import Run
from fever.training.result import Result
from tests.helpers import run_fever

BOX = {"type": "box", "shape": [5], "dtype": "float32", "low": [None] * 5, "high": [None] * 5}
BYTES = {"type": "box", "shape": [7], "dtype": "uint8", "low": [0] * 7, "high": [255] * 7}
DISCRETE = {"type": "discrete", "sizes": [3], "starts": [-1], "shape": []}
SEVERAL = {"type": "discrete", "sizes": [3, 5, 2], "starts": [0, 2, 0], "shape": [3]}
BINARY = {"type": "binary", "shape": [2, 2]}
TORQUES = {"type": "box", "shape": [2, 1], "dtype": "float32", "low": [-2.0, 0.0], "high": [2.0, 0.5]}
WIDE = {**TORQUES, "dtype": "float64"}
SMALL_HEADS = {"hidden": (16, 8)}
GAUSSIAN = {**SMALL_HEADS, "log_std": -0.5}


def image(height: int, width: int, channels: int) -> dict[str, Any]:
    return {"type": "image", "shape": [height, width, channels], "order": "hwc"}


CONVOLUTIONS = ((16, 8, 4), (32, 4, 2), (32, 3, 1))  # Mnih et al.
CASES = {
    "perceptron": (BOX, DISCRETE, SMALL_HEADS),
    "relu, no hidden layer": (BOX, DISCRETE, {"hidden": (), "activation": "relu"}),
    "several choices of other sizes": (BOX, SEVERAL, {**SMALL_HEADS, "activation": "relu"}),
    "bits": (BOX, BINARY, SMALL_HEADS),
    "bytes": (BYTES, DISCRETE, SMALL_HEADS),
    "gaussian": (BOX, TORQUES, GAUSSIAN),
    "gaussian in doubles": (BOX, WIDE, GAUSSIAN),
    "squashed": (BOX, TORQUES, {**SMALL_HEADS, "squashed": True, "value_head": False}),
    "deterministic": (BOX, TORQUES, {**SMALL_HEADS, "squashed": "deterministic", "value_head": False}),
    "quantiles": (BOX, DISCRETE, {**SMALL_HEADS, "action_values": True, "quantiles": 5, "dueling": True}),
    "action values": (BOX, DISCRETE, {**SMALL_HEADS, "action_values": True, "value_head": False}),
    "dueling": (BOX, DISCRETE, {**SMALL_HEADS, "action_values": True, "dueling": True}),
    "masked": (with_mask(BOX, SEVERAL, None), SEVERAL, SMALL_HEADS),
    "masked, dueling": (
        with_mask(BOX, DISCRETE, None), DISCRETE, {**SMALL_HEADS, "action_values": True, "dueling": True},
    ),
    "images": (image(50, 41, 3), DISCRETE, {"hidden": (), "convolutions": CONVOLUTIONS}),
    "small images, torques": (image(10, 10, 4), TORQUES, {**GAUSSIAN, "convolutions": ((16, 3, 1),)}),
    "gru": (BOX, DISCRETE, {**SMALL_HEADS, "recurrent": "gru", "recurrent_size": 6}),
    "lstm, masked": (
        with_mask(BOX, DISCRETE, None), DISCRETE, {**SMALL_HEADS, "recurrent": "lstm", "recurrent_size": 6},
    ),
}  # fmt: skip


def make_policy(observation: Any, action: Any, settings: dict[str, Any], normalised: bool) -> Policy:
    rng = np.random.default_rng(3)
    network = network_for(observation, action, **settings)
    params = network.init(rng)
    for name, value in params.items():  # biases are not zero, and outputs of the order of one
        params[name] = value + rng.normal(0, 0.5 / np.sqrt(len(value)), value.shape).astype(np.float32)
    if normalised:
        size, unit = network.input_shape, 100 if network.input_dtype == "uint8" else 1
        params["observation/mean"] = rng.normal(0, 1, size).astype(np.float32)
        params["observation/std"] = (unit * rng.uniform(0.01, 2, size)).astype(np.float32)  # small ones: clips
    return Policy(observation, action, network, params)


def observations(policy: Policy, count: int) -> np.ndarray:
    rng, network = np.random.default_rng(5), policy.network
    if network.input_dtype == "uint8":
        return rng.integers(0, 256, (count, *network.input_shape), np.uint8)
    rows = rng.normal(0, 2, (count, *network.input_shape)).astype(np.float32)
    if network.mask:
        masks = rng.integers(0, 2, (count, network.mask)).astype(np.float32)
        masks[:, 0::2] = 1  # every choice has an allowed action
        rows[:, -network.mask :] = masks
    return rows


@pytest.mark.parametrize("normalised", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_the_graph_computes_what_the_policy_does(case: str, normalised: bool) -> None:
    policy = make_policy(*CASES[case], normalised)
    session = onnxruntime.InferenceSession(build(policy).SerializeToString(), providers=["CPUExecutionProvider"])
    rng, network = np.random.default_rng(7), policy.network
    for count in (1, 9):  # the batch axis is open
        rows, state = observations(policy, count), rng.standard_normal((count, network.state_size), np.float32)
        inputs = {"observation": rows} | ({"state": state} if network.state_size else {})
        found = dict(zip((one.name for one in session.get_outputs()), session.run(None, inputs), strict=True))
        parameters, following = network.act(policy.params, rows, state)
        assert np.max(np.abs(found["parameters"] - parameters)) < 1e-5
        actions = policy.distribution.to_env(policy.distribution.mode(parameters))
        assert found["action"].shape == actions.shape
        assert found["action"].dtype == actions.dtype
        np.testing.assert_allclose(found["action"], actions, atol=1e-5)
        if network.state_size:
            np.testing.assert_allclose(found["next_state"], following, atol=1e-5)


def test_export_of_a_run(result: Result, tmp_path: Path) -> None:
    done = run_fever("export", str(result.run.path), "--onnx", "--to", "graph", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "graph/policy.onnx: its inputs and outputs are described in graph/policy.json\n"
    about = json.loads((tmp_path / "graph" / "policy.json").read_text())
    session = onnxruntime.InferenceSession(tmp_path / "graph" / "policy.onnx", providers=["CPUExecutionProvider"])
    assert [one.name for one in session.get_inputs()] == list(about["inputs"])
    assert [(one.name, one.shape) for one in session.get_outputs()] == [
        (name, one["shape"]) for name, one in about["outputs"].items()
    ]
    policy = fever.load(result.run)
    rows = observations(policy, 4)
    np.testing.assert_array_equal(session.run(["action"], {"observation": rows})[0], policy.act_batch(rows))
    again = run_fever("export", str(result.run.path), "--onnx", "--to", "graph", cwd=tmp_path)
    assert again.returncode == 2
    assert "graph exists already" in again.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["graph"]


def test_without_the_package_one_sentence(result: Result, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnx", None)
    with pytest.raises(FeverError, match=r'install it with: pip install "fever\[onnx\]"'):
        export_onnx(result.run.checkpoint(), tmp_path / "graph")
    assert list(tmp_path.iterdir()) == []


class Doubled(Network):
    """A network of a user's own."""

    def features(self, params: Any, x: Any, xp: Any = np) -> Any:
        return super().features(params, x, xp) * 2


def test_a_network_of_ones_own_is_refused() -> None:
    policy = make_policy(*CASES["perceptron"], normalised=False)
    policy.network = Doubled(**vars(policy.network))
    with pytest.raises(FeverError, match=r"a network of one's own \(Doubled\) cannot be written as ONNX"):
        build(policy)


def test_a_network_that_computes_something_else_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """As after a change of `Network` that the graph does not follow."""
    policy = make_policy(*CASES["perceptron"], normalised=False)
    monkeypatch.setattr(Network, "_features", lambda self, params, x, xp: x * 2)
    with pytest.raises(FeverError, match="this network cannot be written as ONNX"):
        build(policy)


def test_no_text_of_a_run_becomes_code(result: Result, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = Run(result.run.path).checkpoint()
    evil = '"""\nimport pathlib; pathlib.Path("hit").touch()\n"""'
    checkpoint.manifest.update(env=evil)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    export(checkpoint, tmp_path / "crafted_policy")
    module = importlib.import_module("crafted_policy")
    assert module.load().act(np.zeros(result.policy.network.input_shape)) is not None
    assert not (tmp_path / "hit").exists()
    assert json.loads((tmp_path / "crafted_policy" / "policy.json").read_text())["env"] == evil
