"""Where JAX keeps compiled programs between runs."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest
from safetensors.numpy import load_file

from fever.layout import ARRAYS
from tests.helpers import run_fever

TRAIN = ("train", "CartPole-v1", "--stop-steps", "2048", "--quiet")


def train(folder: Path, name: str, **variables: str) -> dict[str, bytes]:
    """Train a little in a fresh process whose cache folder is `folder`; returns the weights' bytes."""
    own = {"JAX_COMPILATION_CACHE_DIR": "", "XDG_CACHE_HOME": str(folder / "cache"), "PYTHONWARNINGS": "error"}
    done = run_fever(*TRAIN, "--name", name, cwd=folder, **{**own, **variables})
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    last = max((folder / "runs" / name / "checkpoints").iterdir())
    return {key: array.tobytes() for key, array in load_file(last / ARRAYS).items()}


def programs(folder: Path) -> list[Path]:
    return sorted((folder / "cache" / "fever").glob("compiled-*/*-cache"))


def test_the_second_run_reads_what_the_first_has_compiled(tmp_path: Path) -> None:
    first = train(tmp_path, "first")
    kept = programs(tmp_path)
    assert any("update" in path.name for path in kept)
    assert stat.S_IMODE(kept[0].parent.stat().st_mode) == 0o700
    (read,) = kept[0].parent.glob("jit__update*-atime")
    before = int.from_bytes(read.read_bytes(), "little")  # nanoseconds
    assert train(tmp_path, "second") == first
    assert programs(tmp_path) == kept
    assert int.from_bytes(read.read_bytes(), "little") > before
    for path in kept:  # as a process that was killed while writing leaves it
        path.write_bytes(path.read_bytes()[:1000])
    assert train(tmp_path, "third") == first


@pytest.mark.parametrize("variable", ["JAX_COMPILATION_CACHE_DIR", "XDG_CACHE_HOME"])
def test_another_folder_is_left_to_the_user(tmp_path: Path, variable: str) -> None:
    """JAX's own folder is used if it is set; a cache folder that cannot be made is done without."""
    (tmp_path / "file").touch()
    other = tmp_path / ("other" if variable.startswith("JAX") else "file")
    train(tmp_path, "run", **{variable: str(other)})
    assert not programs(tmp_path)
