"""Checkpoints: which are kept, what survives a kill, what is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fever
from fever.config import RunConfig
from fever.errors import DamagedError, FeverError
from fever.files import SEAL, sealed, sha256
from fever.runs.evaluate import evaluate
from fever.runs.run import Run
from fever.training.result import Result
from fever.training.resume import resume

SMALL = {"envs": 2, "steps": 16, "minibatch": 32, "epochs": 2}


def test_last_and_best_checkpoints_are_kept(tmp_path: Path) -> None:
    run = Run.create(RunConfig(env="X-v0", runs=str(tmp_path), name="a"), {})
    for iteration, score in enumerate([None, 1.0, 9.0, 3.0, 4.0, 5.0], start=1):
        run.save_checkpoint({"x": np.arange(3.0)}, {"iteration": iteration, "score": score}, keep=2)
    assert [one.iteration for one in run.checkpoints()] == [3, 5, 6]
    assert run.checkpoint("best").iteration == 3
    assert run.checkpoint("last").iteration == 6
    assert run.checkpoint("5").iteration == 5
    with pytest.raises(FeverError, match="it has: 3, 5, 6, last, best"):
        run.checkpoint("4")


def test_interrupted_save_leaves_the_older_checkpoint_in_force(tmp_path: Path, monkeypatch: Any) -> None:
    run = Run.create(RunConfig(env="X-v0", runs=str(tmp_path), name="a"), {})
    run.save_checkpoint({"x": np.arange(3.0)}, {"iteration": 1, "score": None}, keep=2)

    def cut(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("fever.runs.checkpoints.write_atomically", cut)
    with pytest.raises(KeyboardInterrupt):
        run.save_checkpoint({"x": np.arange(3.0)}, {"iteration": 2, "score": None}, keep=2)
    assert [one.iteration for one in run.checkpoints()] == [1]


@pytest.mark.parametrize("iteration", [1, 2], ids=["made again", "no longer kept"])
def test_a_kill_while_a_checkpoint_is_dropped_leaves_the_new_one(
    tmp_path: Path, monkeypatch: Any, iteration: int
) -> None:
    run = Run.create(RunConfig(env="X-v0", runs=str(tmp_path), name="a"), {})
    run.save_checkpoint({"x": np.arange(3.0)}, {"iteration": 1, "score": None}, keep=1)

    def cut(path: Path, **_: Any) -> None:
        (path / "manifest.json").unlink()
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", cut)
        with pytest.raises(KeyboardInterrupt):
            run.save_checkpoint({"x": np.ones(3)}, {"iteration": iteration, "score": None}, keep=1)
    assert [one.iteration for one in run.checkpoints()] == [iteration]
    assert run.checkpoint().arrays()["x"].tolist() == [1, 1, 1]
    (run.path / "checkpoints" / ".partial-1").mkdir()
    (run.path / "checkpoints" / "00000003").mkdir()  # as older versions left it
    assert run.checkpoint().iteration == iteration
    run.save_checkpoint({"x": np.arange(3.0)}, {"iteration": 3, "score": None}, keep=1)
    assert [path.name for path in (run.path / "checkpoints").iterdir()] == ["00000003"]


def test_checkpoint_keeps_shapes_and_scalars(tmp_path: Path) -> None:
    run = Run.create(RunConfig(env="X-v0", runs=str(tmp_path), name="a"), {})
    arrays = {"scalar": np.asarray(3.5), "transposed": np.arange(6.0).reshape(2, 3).T, "empty": np.zeros((2, 0))}
    run.save_checkpoint(arrays, {"iteration": 1, "score": None}, keep=1)
    loaded = run.checkpoint().arrays()
    for name, array in arrays.items():
        np.testing.assert_array_equal(loaded[name], array)
        assert loaded[name].shape == array.shape


def test_damaged_checkpoint_is_named(tmp_path: Path) -> None:
    result = fever.train("CartPole-v1", runs=tmp_path, name="a", stop={"iterations": 1}, **SMALL)
    file = result.run.checkpoint().path / "arrays.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    with pytest.raises(FeverError, match=r"are damaged: 00000001 \(arrays\.safetensors has changed since"):
        fever.load(result.run.path)
    file.unlink()
    with pytest.raises(FeverError, match=r"arrays\.safetensors is missing"):
        fever.load(result.run.path)
    (file.parent / "manifest.json").write_text("{")
    with pytest.raises(FeverError, match=r"manifest\.json cannot be read\); nothing was deleted"):
        fever.load(result.run.path)


def test_checkpoint_for_other_spaces_is_refused(result: Result) -> None:
    from fever.envs.source import EnvSource

    with pytest.raises(FeverError, match="does not fit CartPole-v1, which has another observation space"):
        evaluate(result.run.checkpoint(), EnvSource("CartPole-v1"), episodes=1)
    with pytest.raises(FeverError, match="has another observation space"):
        resume(result.run, result.run.config.model_copy(update={"env": "CartPole-v1"}))


def test_a_checkpoint_from_before_a_field_of_the_network_was_added_is_resumed(tmp_path: Path) -> None:
    result = fever.train("CartPole-v1", runs=tmp_path, stop={"iterations": 1}, **SMALL)
    path = result.run.checkpoint().path / "manifest.json"
    manifest = json.loads(path.read_text())
    del manifest["policy"]["network"]["quantiles"], manifest["manifest_sha256"]
    path.write_text(sealed(manifest))
    assert fever.resume(result, stop={"iterations": 2}).summary["iterations"] == 2
    manifest["policy"]["network"]["hidden"] = [8]
    path = result.run.checkpoint().path / "manifest.json"
    path.write_text(sealed({**manifest, "sha256": json.loads(path.read_text())["sha256"]}))
    with pytest.raises(FeverError, match="has another network"):
        fever.resume(result, stop={"iterations": 3})


TENSORS = [("F8_E5M2", [1], 1), ("F8_E4M3", [1], 1), ("F4", [2], 1), ("F32", [1] * 65, 4)]


@pytest.mark.parametrize(("dtype", "shape", "size"), TENSORS, ids=str)
def test_types_and_shapes_that_numpy_has_not_are_damage(
    result: Result, tmp_path: Path, dtype: str, shape: list[int], size: int
) -> None:
    run = Run(Path(shutil.copytree(result.run.path, tmp_path / "a")))
    header = json.dumps({"policy/x": {"dtype": dtype, "shape": shape, "data_offsets": [0, size]}}).encode()
    header += b" " * (-len(header) % 8)
    for folder in (run.path / "checkpoints").iterdir():
        (folder / "arrays.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(size))
        manifest = {k: v for k, v in json.loads((folder / "manifest.json").read_text()).items() if k != SEAL}
        manifest["sha256"]["arrays.safetensors"] = sha256(folder / "arrays.safetensors")
        (folder / "manifest.json").write_text(sealed(manifest))
    with pytest.raises(DamagedError, match=r"the checkpoint is damaged: .*arrays\.safetensors"):
        run.checkpoint().arrays()
