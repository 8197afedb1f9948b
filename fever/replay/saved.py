"""The replay buffer on disk: one file for each shard, and a manifest with their hashes.

Files of a new set have new names, and the set is in force when its manifest replaces the old one. So there is always
one whole set, the old or the new one, whenever the process is killed.
"""

from __future__ import annotations

import logging
import re
import secrets
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fever import layout
from fever.errors import DamagedError, FeverError
from fever.files import (
    LARGEST,
    as_count,
    flush_to_disk,
    read_sealed,
    sealed,
    sha256,
    unreadable_tensors,
    write_atomically,
)
from fever.text import format_bytes

if TYPE_CHECKING:
    from fever.replay.buffer import ReplaySpec

FORMAT = 2  # of the manifest; format 1 had none, and counters in every file
SHARD = r"shard-\d+(-[0-9a-f]{8})?\.safetensors"


def save_shards(folder: Path, shards: Iterable[dict[str, np.ndarray]], count: int, added: int, drawn: int) -> None:
    """Write `count` buffers and the counters into a folder, one buffer at a time.

    If one fails, the set that the folder has stays in force.
    """
    from safetensors.numpy import save_file

    folder.mkdir(exist_ok=True)
    token = secrets.token_hex(4)
    hashes: dict[str, str] = {}
    waiting = iter(shards)
    try:
        for index in range(count):
            file = folder / f"shard-{index}-{token}.safetensors"
            hashes[file.name] = ""
            arrays = next(waiting)
            save_file({name: np.ascontiguousarray(array) for name, array in arrays.items()}, file)
            del arrays  # before the next one is loaded
            flush_to_disk(file)
            hashes[file.name] = sha256(file)
        manifest = {"format": FORMAT, "added": added, "drawn": drawn, "sha256": hashes}
        write_atomically(folder / layout.MANIFEST, sealed(manifest))
    except BaseException:
        for name in hashes:
            (folder / name).unlink(missing_ok=True)
        with suppress(OSError):  # it holds an older set
            folder.rmdir()
        raise
    for path in folder.iterdir():
        if re.fullmatch(SHARD, path.name) and path.name not in hashes:
            path.unlink()
    size = sum((folder / name).stat().st_size for name in hashes)
    logging.info("the replay buffer is saved: %s in %s", format_bytes(size), folder)


def load_shards(folder: Path, count: int) -> tuple[list[dict[str, np.ndarray]], int, int]:
    """Read what `save_shards` wrote: buffers, transitions added, transitions drawn.

    Raises `DamagedError` if a single bit has changed, and `FeverError` if there are not `count` shards.
    """
    manifest = _manifest(folder)
    if manifest is None:
        return _load_format_1(folder, count)
    hashes = manifest.get("sha256")
    added, drawn = (_count(folder, manifest, name) for name in ("added", "drawn"))
    if not isinstance(hashes, dict) or not all(re.fullmatch(SHARD, name) for name in hashes):
        raise _damaged(folder / layout.MANIFEST)
    _check_count(folder, len(hashes), count)
    for name, digest in hashes.items():
        try:
            same = sha256(folder / name) == digest
        except OSError as error:
            raise _damaged(folder / name) from error
        if not same:
            raise _damaged(folder / name)
    return [_load(folder / name) for name in hashes], added, drawn


def check_arrays(spec: ReplaySpec, arrays: dict[str, np.ndarray]) -> None:
    """Raise `FeverError` if a saved buffer does not fit one of this spec, which has other settings, and `DamagedError`
    if no buffer has such arrays: they may be anybody's."""
    expected = {name: (shape[1:], np.dtype(dtype)) for name, (shape, dtype) in spec.rings.items()}
    expected["counters"] = ((), np.dtype(np.int64))
    if spec.prioritized:
        expected["priorities"] = ((), np.dtype(np.float64))
    for name, (shape, dtype) in expected.items():
        if name not in arrays:
            raise FeverError(f"the saved replay buffer has no {name}, which this one needs")
        if not arrays[name].ndim or (arrays[name].shape[1:], arrays[name].dtype) != (shape, dtype):
            raise FeverError(
                f"the saved replay buffer has {name} of shape {arrays[name].shape[1:]} and type "
                f"{arrays[name].dtype}, this one of shape {shape} and type {dtype}"
            )
    if arrays["counters"].shape != (3,) or arrays["counters"].min() < 0:
        raise _wrong("counters")
    capacity, added, frames_added = arrays["counters"].tolist()
    if capacity != spec.capacity:
        raise FeverError(f"the saved replay buffer holds {capacity:,} transitions, this one holds {spec.capacity:,}")
    rows, frames = min(added, capacity), min(frames_added, spec.frame_capacity)
    if len(arrays["frames"]) != frames:
        raise FeverError("the saved replay buffer holds another number of frames: it was saved with another her")
    for name in expected.keys() - {"counters", "frames"}:
        if len(arrays[name]) != rows:
            raise _wrong(name)
    if not rows:
        return
    if arrays["pointers"].min() < 0 or arrays["pointers"].max() >= frames:
        raise _wrong("pointers")
    if arrays["oldest"].min() < 0 or not frames_added - frames <= arrays["oldest"].max() < frames_added:
        raise _wrong("oldest")
    for name in ("frames", "actions", "rewards", "discounts", *(["priorities"] if spec.prioritized else [])):
        if arrays[name].dtype.kind == "f" and np.isnan(arrays[name].min(initial=0)):
            raise _wrong(name)
    if spec.prioritized and not (arrays["priorities"].min() >= 0 < arrays["priorities"].max() < np.inf):
        raise _wrong("priorities")


def _manifest(folder: Path) -> dict[str, Any] | None:
    """The manifest; None for format 1."""
    if not (folder / layout.MANIFEST).exists() and (folder / "shard-0.safetensors").exists():
        return None
    try:
        manifest = read_sealed(folder / layout.MANIFEST)
    except DamagedError as error:
        raise _damaged(folder / layout.MANIFEST) from error
    if _count(folder, manifest, "format") != FORMAT:
        raise FeverError(f"{folder} was written by a later version of fever")
    return manifest


def _load_format_1(folder: Path, count: int) -> tuple[list[dict[str, np.ndarray]], int, int]:
    shards, counters = [], np.zeros(3)
    for index in range(count):
        file = folder / f"shard-{index}.safetensors"
        arrays = _load(file)
        counters = arrays.pop("experience", np.zeros(0))
        if counters.shape != (3,) or not np.all((counters >= 0) & (counters < LARGEST)):  # NaN is not
            raise _damaged(file)
        _check_count(folder, int(counters[2]), count)
        shards.append(arrays)
    return shards, int(counters[0]), int(counters[1])


def _load(file: Path) -> dict[str, np.ndarray]:
    from safetensors.numpy import load_file

    try:
        return load_file(file)
    except unreadable_tensors() as error:
        raise _damaged(file) from error


def _count(folder: Path, manifest: dict[str, Any], name: str) -> int:
    try:
        return as_count(manifest.get(name))
    except ValueError as error:
        raise _damaged(folder / layout.MANIFEST) from error


def _check_count(folder: Path, found: int, count: int) -> None:
    if found != count:
        raise FeverError(f"{folder} holds {found} shards of a replay buffer, not replay_shards={count}")


def _damaged(file: Path) -> DamagedError:
    return DamagedError(f"the saved replay buffer is damaged: {file}")


def _wrong(name: str) -> DamagedError:
    return DamagedError(f"the saved replay buffer is damaged: no buffer has such {name}")
