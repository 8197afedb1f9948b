"""The run directory, which training writes and everything else reads; docs/run-directory.md explains its files."""

from __future__ import annotations

import fcntl
import json
import math
import os
import shutil
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

import numpy as np

from fever import layout
from fever.algos.registry import needs_trust
from fever.config import RunConfig, Stop, load_yaml, validate
from fever.errors import FeverError
from fever.files import (
    flush_to_disk,
    last_line,
    newest,
    open_to_append,
    read_json,
    read_lines,
    sha256,
    write_atomically,
)
from fever.job import EXIT, RECORD, current_job
from fever.runs.checkpoint import Checkpoint, best_of

FORMAT = 1  # version of the checkpoint's manifest; raised when older readers would misread a new one
RULES = {"reward": "reward", "steps": "steps", "iterations": "iterations", "time": "seconds"}  # stop reason -> field
LOCK_SECONDS = 1.0  # to claim a run: `running` holds a shared lock for a moment


class Run:
    """One run directory, open for writing while it trains or for reading afterwards."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._metrics: Any = None
        self._episodes: Any = None
        self._evaluations: Any = None
        self._lock: Any = None
        self._made_parent = False

    def __repr__(self) -> str:
        return f"Run({str(self.path)!r})"

    @classmethod
    def create(cls, config: RunConfig, facts: dict[str, Any]) -> Run:
        """Make a new run directory. Raises `FeverError` if it exists already."""
        text = to_yaml(config)
        name = config.name or fresh_name(config)
        run = cls(Path(config.runs).expanduser() / name)
        run._made_parent = not run.path.parent.exists()
        try:
            if run.only_job:
                run.discard()  # left by a process of this job that was killed before it learned anything
            else:
                run.path.mkdir(parents=True)
        except FileExistsError:
            raise FeverError(
                f"{run.path} exists already; choose another --name, or continue it with: "
                f"fever resume {run.path}{trust_word(config)}"
            ) from None
        except OSError as error:
            raise FeverError(f"{run.path} cannot be created: {error.strerror}") from error
        write_atomically(run.path / layout.CONFIG, text)
        write_atomically(run.path / layout.FACTS, json.dumps(facts, indent=2) + "\n")
        return run

    @classmethod
    def open(cls, where: str | Path, runs: str | Path = "runs") -> Run:
        """Find a run by path, by name below `runs`, or the newest one by the word `last`."""
        runs = Path(runs).expanduser()
        if str(where) == "last":
            found = list_runs(runs)
            if not found:
                raise FeverError(f"there is no run in {runs}")
            return found[-1]
        for path in (Path(where).expanduser(), runs / where):
            if (path / layout.CONFIG).is_file():
                return cls(path)
        names = ", ".join(run.path.name for run in list_runs(runs)[-5:])
        raise FeverError(f"there is no run {where}" + (f"; the latest in {runs} are: {names}" if names else ""))

    @property
    def job(self) -> Path:
        """The folder of the job that trains this run; it exists only if a job does."""
        return self.path / layout.JOB

    @property
    def only_job(self) -> bool:
        """Whether this process belongs to the job that made this directory, and nothing has been learned yet."""
        own = current_job()
        mine = own is not None and own.path.resolve() == self.job.resolve()
        return mine and not self.checkpoints() and not self.running

    def discard(self) -> None:
        """Remove a directory in which nothing was learned, and its parent if that was created for it. A job's folder
        is kept, because its log says what happened."""
        if self.job.is_dir():
            for path in self.path.iterdir():
                if path != self.job:
                    shutil.rmtree(path) if path.is_dir() else path.unlink()
            return
        shutil.rmtree(self.path, ignore_errors=True)
        if self._made_parent:
            with suppress(OSError):  # it holds another run by now
                self.path.parent.rmdir()

    # configuration and facts

    def write_config(self, config: RunConfig) -> None:
        """Write the resolved configuration; `fever train -f` runs it again."""
        write_atomically(self.path / layout.CONFIG, to_yaml(config))

    @property
    def config(self) -> RunConfig:
        return validate(RunConfig, load_yaml(self.path / layout.CONFIG), str(self.path / layout.CONFIG))

    @property
    def facts(self) -> dict[str, Any]:
        """Versions, machine and git state when the run was started."""
        return read_json(self.path / layout.FACTS)

    @property
    def summary(self) -> dict[str, Any] | None:
        """How the run ended; None while it runs, and after a kill."""
        return read_json(self.path / layout.SUMMARY) if (self.path / layout.SUMMARY).is_file() else None

    def write_summary(self, summary: dict[str, Any]) -> None:
        write_atomically(self.path / layout.SUMMARY, json.dumps(summary, indent=2) + "\n")

    # the lock: one process at a time trains a run

    def lock(self) -> None:
        """Claim the directory for this process until `close`; forked children do not hold the lock."""
        from filelock import FileLock, Timeout  # imported here: takes 0.05 s, and reading a run needs no lock

        path = self.path / layout.LOCK
        lock = FileLock(path, timeout=LOCK_SECONDS, thread_local=False)
        try:
            lock.acquire()
        except Timeout:
            owner = path.read_text().strip() or "unknown"
            raise FeverError(f"{self.path} is being trained right now by process {owner}") from None
        path.write_text(f"{os.getpid()}\n")
        self._lock = lock

    @property
    def running(self) -> bool:
        """Whether a process on this machine is training the run."""
        try:
            with open(self.path / layout.LOCK) as file:  # filelock has no shared lock, for which reading is enough
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
                return False
        except BlockingIOError:
            return True
        except OSError:
            return False

    @property
    def elsewhere(self) -> bool:
        """Whether this is a copy of a run that a job trains on other machines, and no end of it is known."""
        if not (self.job / RECORD).is_file() or (self.job / EXIT).exists():
            return False
        return "remote_path" in read_json(self.job / RECORD)

    @property
    def status(self) -> str:
        """`running`, the stop reason, or `killed` if there is none."""
        if self.running or self.elsewhere:
            return "running"
        return self.summary["stop_reason"] if self.summary else "killed"

    # metrics and episodes

    def log(self, row: dict[str, Any]) -> None:
        """Append one row of metrics and flush it."""
        if self._metrics is None:
            self._metrics = open_to_append(self.path / layout.METRICS)
        self._metrics.write(json.dumps(_plain(row)) + "\n")
        self._metrics.flush()

    def log_episodes(self, rows: list[dict[str, Any]]) -> None:
        """Append one row per finished episode and flush them."""
        if self._episodes is None:
            self._episodes = open_to_append(self.path / layout.EPISODES)
        self._episodes.write("".join(json.dumps(_plain(row)) + "\n" for row in rows))
        self._episodes.flush()

    def log_evaluation(self, row: dict[str, Any]) -> None:
        """Append the row of one evaluation and flush it."""
        if self._evaluations is None:
            self._evaluations = open_to_append(self.path / layout.EVALUATIONS)
        self._evaluations.write(json.dumps(_plain(row)) + "\n")
        self._evaluations.flush()

    def metrics(self) -> list[dict[str, Any]]:
        """All rows in order. Where a resumed run repeated iterations, the newer rows replace the older ones."""
        return newest(read_lines(self.path / layout.METRICS), "iteration")

    def last_row(self) -> dict[str, Any]:
        """The last row of metrics; empty if there is none. Reads only the end of the file."""
        return last_line(self.path / layout.METRICS)

    def episodes(self) -> list[dict[str, Any]]:
        """All finished episodes in order. Where a resumed run repeated iterations, newer rows replace older ones."""
        return newest(read_lines(self.path / layout.EPISODES), "episode")

    def evaluations(self) -> list[dict[str, Any]]:
        """All evaluations in order. Where a resumed run repeated iterations, newer rows replace older ones."""
        return newest(read_lines(self.path / layout.EVALUATIONS), "iteration")

    def curves(self) -> dict[str, np.ndarray]:
        """Every metric as an array over iterations; NaN where a row lacks it."""
        rows = self.metrics()
        names = list(dict.fromkeys(name for row in rows for name, value in row.items() if not isinstance(value, list)))
        return {name: np.array([_number(row.get(name)) for row in rows]) for name in names}

    # checkpoints

    def save_checkpoint(
        self,
        arrays: dict[str, np.ndarray],
        manifest: dict[str, Any],
        keep: int,
        save_files: Callable[[Path], None] | None = None,
    ) -> Path:
        """Write a checkpoint atomically, then delete old ones except the last `keep` and the best. Returns its folder.

        `save_files` writes the learner's own files into the folder that it is given. Checkpoints of later iterations
        are deleted as well: they are from before the run was resumed.
        """
        from safetensors.numpy import save_file

        folder = self.path / layout.CHECKPOINTS
        target = folder / f"{manifest['iteration']:08d}"
        partial = folder / f".partial-{os.getpid()}"
        for left in (*folder.glob(".partial-*"), *folder.glob(".dropped-*")):  # left by a process that was killed
            shutil.rmtree(left, ignore_errors=True)
        partial.mkdir(parents=True)
        file = partial / layout.ARRAYS
        save_file({name: np.array(array, order="C") for name, array in arrays.items()}, file)
        if save_files is not None:
            (partial / layout.FILES).mkdir()
            save_files(partial / layout.FILES)
        written = sorted(path for path in partial.rglob("*") if path.is_file())
        for path in written:
            flush_to_disk(path)
        hashes = {str(path.relative_to(partial)): sha256(path) for path in written}
        manifest = {"format": FORMAT, **manifest, "sha256": hashes}
        write_atomically(partial / layout.MANIFEST, json.dumps(manifest, indent=2) + "\n")
        later = [_set_aside(path) for path in reversed(self._folders()) if path.name >= target.name]
        partial.rename(target)
        for path in (*later, *self._prune(keep)):
            shutil.rmtree(path)
        return target

    def _prune(self, keep: int) -> list[Path]:
        """Set aside all checkpoints except the last `keep` and the best; returns their new paths."""
        found = self.checkpoints()
        best = best_of(found)
        return [_set_aside(one.path) for one in found[:-keep] if best is None or one.path != best.path]

    def _folders(self) -> list[Path]:
        return sorted((self.path / layout.CHECKPOINTS).glob("[0-9]*"))

    def checkpoints(self) -> list[Checkpoint]:
        """All complete checkpoints, oldest first."""
        found = []
        for path in self._folders():
            try:
                found.append(Checkpoint(path, read_json(path / layout.MANIFEST)))
            except FeverError:
                if (path / layout.MANIFEST).exists():
                    raise
        return found

    def checkpoint(self, which: Literal["last", "best"] | str = "last") -> Checkpoint:
        """The last checkpoint, the one with the best score, or the one of an iteration, given by its number."""
        found = self.checkpoints()
        if not found and (self.path / layout.TRIALS).is_dir():
            raise FeverError(
                f"{self.path} is a search; name one of its runs, for example {self.path / layout.TRIALS}/0001"
            )
        if not found:
            raise FeverError(f"{self.path} has no checkpoint yet")
        chosen: Checkpoint | None
        if which == "last":
            chosen = found[-1]
        elif which == "best":
            chosen = best_of(found) or found[-1]
        else:
            chosen = next((one for one in found if one.path.name.lstrip("0") == str(which).lstrip("0")), None)
        if chosen is None:
            names = ", ".join(str(one.iteration) for one in found)
            raise FeverError(f"{self.path} has no checkpoint {which}; it has: {names}, last, best")
        if chosen.manifest.get("format") != FORMAT:
            raise FeverError(f"{chosen.path} was written by another version of fever")
        return chosen

    def drop_met(self, stop: Stop, given: Collection[str], which: str = "last") -> tuple[Stop, list[str]]:
        """The stop rules to resume a checkpoint with, and the names of those that were dropped.

        `given` has the names of the rules that the user gave now. If there are any, old rules that the checkpoint
        has met already are dropped: they would end the run at once.
        """
        dropped: list[str] = []
        if RULES.keys() & set(given) and self.checkpoints():
            checkpoint = self.checkpoint(which)
            while (rule := checkpoint.met(stop)) and rule not in given:
                stop = stop.model_copy(update={RULES[rule]: None})
                dropped.append(rule)
        return stop, dropped

    def close(self) -> None:
        """Close files and release the lock."""
        for file in (self._metrics, self._episodes, self._evaluations):
            if file is not None:
                file.close()
        if self._lock is not None:
            self._lock.release()
        self._metrics = self._episodes = self._evaluations = self._lock = None


def list_runs(runs: Path) -> list[Run]:
    """All runs in a folder, the oldest first."""
    if not runs.is_dir():
        return []
    paths = [path for path in runs.iterdir() if (path / layout.CONFIG).is_file()]
    return [Run(path) for path in sorted(paths, key=_begun)]


def _begun(path: Path) -> float:
    """When a run was started. Incomplete copies and runs killed at once may lack a file."""
    for name in (layout.FACTS, layout.CONFIG):
        with suppress(OSError):
            return (path / name).stat().st_mtime
    return 0.0


def to_yaml(config: RunConfig, without: Collection[str] = ()) -> str:
    """A configuration as YAML for `fever train -f`, without the fields named in `without`."""
    import yaml

    try:
        values = config.model_dump(mode="json", exclude=set(without))
    except ValueError as error:  # pydantic's, for values that JSON does not have
        raise FeverError(
            f"env_kwargs and settings must be what JSON can hold: {error}; for other values, pass a function that "
            "creates the environment"
        ) from error
    return yaml.safe_dump(values, sort_keys=False)


def _set_aside(checkpoint: Path) -> Path:
    """Rename a checkpoint, so that a kill while it is deleted leaves no incomplete one; returns its new path."""
    return checkpoint.rename(checkpoint.with_name(f".dropped-{checkpoint.name}"))


def _plain(value: Any) -> Any:
    """A value, or a row of them, with None for NaN and infinity, which JSON does not have."""
    if isinstance(value, dict):
        return {name: _plain(part) for name, part in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _number(value: Any) -> float:
    return float(value) if isinstance(value, (int, float)) else float("nan")


def trust_word(config: RunConfig) -> str:
    """The option that resuming such a run needs because it reads pickles, with a space before it; or nothing."""
    return " --trust" if config.search is not None or needs_trust(config.algo) else ""


def fresh_name(config: RunConfig) -> str:
    """A name for a new run that is not taken: environment, algorithm and time."""
    base = f"{config.stem}-{time.strftime('%Y%m%d-%H%M%S')}"
    name, number = base, 2
    while (Path(config.runs).expanduser() / name).exists():
        name, number = f"{base}-{number}", number + 1
    return name
