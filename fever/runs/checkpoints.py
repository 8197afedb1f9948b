"""The checkpoints of a run: how they are written, which are kept, and which one is meant. `checkpoint.py` is one."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from fever import layout
from fever.errors import DamagedError, FeverError
from fever.files import flush_to_disk, sealed, sha256, write_atomically
from fever.runs.checkpoint import FORMAT, TRAINING, Checkpoint, best_of, read_checkpoint

NAME = r"\d{8,18}"
PARTIAL, DROPPED, REPLACED = ".partial-", ".dropped-", ".replaced-"  # prefixes of folders that come or go


class Checkpoints:
    """The folder `checkpoints` of a run. What fever has not made there is neither counted nor deleted."""

    def __init__(self, run: Path) -> None:
        self.run, self.path = run, run / layout.CHECKPOINTS

    def folders(self) -> dict[str, Path]:
        """Folders of checkpoints by name, the oldest first, damaged ones included. One that was being replaced when
        the process was killed counts, if its successor is not there."""
        found = {path.name.removeprefix(REPLACED): path for path in self._ours(f"{re.escape(REPLACED)}{NAME}")}
        found |= {path.name: path for path in self._ours(NAME)}
        return {name: found[name] for name in sorted(found, key=int) if _has_files(found[name])}

    def _ours(self, pattern: str) -> list[Path]:
        """Folders with such names; no links."""
        if not self.path.is_dir():
            return []
        named = [path for path in self.path.iterdir() if re.fullmatch(pattern, path.name)]
        return [path for path in named if path.is_dir() and not path.is_symlink()]

    def readable(self) -> list[Checkpoint]:
        """All with a readable manifest, the oldest first. Their other files are not verified."""
        return self._read()[0]

    def _read(self) -> tuple[list[Checkpoint], dict[str, FeverError]]:
        """Those with a readable manifest, and what is wrong with the others."""
        found, wrong = [], {}
        for name, path in self.folders().items():
            try:
                found.append(read_checkpoint(path))
            except FeverError as error:
                wrong[name] = error
        return found, wrong

    # choosing

    def choose(self, which: str) -> Checkpoint:
        """The newest whole one for `last`, the one with the best score for `best`, or the one of an iteration.

        All its files are verified. If the last or the best one is damaged, it is the newest whole one, and its `note`
        says so. Raises `FeverError` if there is none.
        """
        folders = self.folders()
        if not folders:
            raise FeverError(f"{self.run} has no checkpoint yet")
        if which in ("last", "best"):
            return self._choose_whole(which)
        name = next((name for name in folders if name.lstrip("0") == which.lstrip("0")), None)
        if name is None:
            listed = ", ".join(str(int(name)) for name in folders)
            raise FeverError(f"{self.run} has no checkpoint {which}; it has: {listed}, last, best")
        try:
            chosen = read_checkpoint(folders[name])
            reason = chosen.damage()
        except DamagedError as error:
            reason = str(error)
        if reason:
            whole = [str(one.iteration) for one in self.readable() if not one.damage()]
            rest = f"these are whole: {', '.join(whole)}" if whole else "no other one is whole"
            raise DamagedError(f"checkpoint {name} of {self.run} is damaged ({reason}); {rest}")
        return chosen

    def _choose_whole(self, which: str) -> Checkpoint:
        found, wrong = self._read()
        for error in wrong.values():
            if not isinstance(error, DamagedError):  # of a later version, which has trained on
                raise error
        damaged = {name: str(error) for name, error in wrong.items()}
        order = found[::-1]
        if which == "best" and (best := best_of(found)) is not None:
            order.insert(0, best)
        for one in order:
            if reason := one.damage():
                damaged[one.name] = reason
                continue
            named = sorted(name for name in damaged if which == "best" or int(name) > one.iteration)
            return replace(one, note=" and ".join(f"checkpoint {name} is damaged ({damaged[name]})" for name in named))
        listed = ", ".join(f"{name} ({reason})" for name, reason in sorted(damaged.items()))
        raise DamagedError(f"all checkpoints of {self.run} are damaged: {listed}; nothing was deleted")

    # writing

    def save(
        self,
        arrays: dict[str, np.ndarray],
        manifest: dict[str, Any],
        keep: int,
        save_files: Callable[[Path], None] | None,
    ) -> Path:
        """Write a checkpoint that appears whole, as `Run.save_checkpoint` says; returns its folder."""
        self._sweep()
        partial = self.path / f"{PARTIAL}{os.getpid()}"
        try:
            self._write(partial, arrays, manifest, save_files)
            target = self._put(partial, f"{manifest['iteration']:08d}")
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
        self._prune(keep)
        self._sweep()
        return target

    def _write(
        self,
        partial: Path,
        arrays: dict[str, np.ndarray],
        manifest: dict[str, Any],
        save_files: Callable[[Path], None] | None,
    ) -> None:
        from safetensors.numpy import save_file

        self.path.mkdir(exist_ok=True)  # not the run's: if that was deleted, the run is to hear of it
        partial.mkdir()
        save_file({name: np.array(array, order="C") for name, array in arrays.items()}, partial / layout.ARRAYS)
        if save_files is not None:
            (partial / layout.FILES).mkdir()
            save_files(partial / layout.FILES)
        written = sorted(path for path in partial.rglob("*") if path.is_file())
        for path in written:
            flush_to_disk(path)
        hashes = {str(path.relative_to(partial)): sha256(path) for path in written}
        manifest = {"format": FORMAT, "score_of": TRAINING, **manifest, "sha256": hashes}
        write_atomically(partial / layout.MANIFEST, sealed(manifest))

    def _put(self, partial: Path, name: str) -> Path:
        """Give a complete checkpoint its name. Those of later iterations are dropped, and one of the same iteration is
        there until the new one is."""
        target = self.path / name
        for other, path in reversed(self.folders().items()):
            if int(other) > int(name):
                _set_aside(path, other)
        if _has_files(target):
            target.rename(self.path / f"{REPLACED}{name}")
        try:
            return partial.rename(target)
        except OSError:  # something is there that is not fever's
            target.rename(self.path / f"{name}.found")
            return partial.rename(target)

    def _prune(self, keep: int) -> None:
        """Set aside all except the last `keep` and the best; damaged ones only if they are older than all these."""
        found = self.readable()
        kept = {one.name for one in found[-keep:]}
        if (best := best_of(found)) is not None:
            kept.add(best.name)
        readable, oldest = {one.name for one in found}, min(map(int, kept))
        for name, path in self.folders().items():
            if name not in kept and (name in readable or int(name) < oldest):
                _set_aside(path, name)

    def _sweep(self) -> None:
        """Delete what was set aside, and what a process left that was killed."""
        for path in self._ours(f"{re.escape(REPLACED)}{NAME}"):
            if path != self.folders().get(path.name.removeprefix(REPLACED)):
                _set_aside(path, path.name.removeprefix(REPLACED))
        for path in self._ours(rf"{re.escape(PARTIAL)}\d+|{re.escape(DROPPED)}{NAME}"):
            shutil.rmtree(path, ignore_errors=True)


def _has_files(folder: Path) -> bool:
    """Whether a folder has a file of a checkpoint. Older versions left empty ones; others may be somebody's own."""
    return (folder / layout.MANIFEST).is_file() or (folder / layout.ARRAYS).is_file()


def _set_aside(path: Path, name: str) -> None:
    """Rename a checkpoint that is to be deleted, so that a kill meanwhile leaves no incomplete one."""
    path.rename(path.with_name(f"{DROPPED}{name}"))
