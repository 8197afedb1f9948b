"""The run directory, which training writes and everything else reads; docs/run-directory.md explains its files."""

from __future__ import annotations

import itertools
import json
import math
import re
import shutil
import time
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from fever import layout
from fever.algos.registry import needs_trust
from fever.config import LONGEST_YAML, RunConfig, Stop, load_yaml, validate
from fever.errors import FeverError
from fever.files import last_line, newest, read_json, refuse_link, user_path, write_atomically
from fever.job import EXIT, RECORD, current_job
from fever.runs.checkpoint import Checkpoint
from fever.runs.checkpoints import Checkpoints
from fever.runs.disk import Appender, Disk
from fever.runs.lock import RunLock, is_locked
from fever.runs.rows import (
    KEEP_EPISODES,
    KEEP_METRICS,
    ArchivingWriter,
    RowWriter,
    Wanted,
    every,
    sample,
    sample_archive,
    stored_rows,
)
from fever.runs.trust import require, sign
from fever.text import format_bytes

RULES = {"reward": "reward", "steps": "steps", "iterations": "iterations", "time": "seconds"}  # stop reason -> field
MANAGED = (  # what fever writes, replaces and deletes below the top of the directory, upper levels first
    *(f"{name}/*" for name in (layout.CHECKPOINTS, layout.REPLAY, layout.TRACKERS, layout.VIDEOS, layout.TRIALS)),
    f"{layout.WORK}/*", f"{layout.WORK}/evaluation/*",  # what is in an environment's folder is its own
    f"{layout.JOB}/*", f"{layout.JOB}/*/*", f"{layout.TUNE}/*", f"{layout.TUNE}/*/*",
)  # fmt: skip


class Run:
    """One run directory, open for writing while it trains or for reading afterwards."""

    def __init__(self, path: Path, trusted: bool = False) -> None:
        """`trusted`: the user has said so with `--trust`, or the run is made by this process."""
        self.path, self.trusted = path, trusted
        self.disk = Disk(path)
        self._files: dict[str, Any] = {}  # name -> what appends to it
        self._lock: RunLock | None = None
        self._made_parent = False

    def __repr__(self) -> str:
        return f"Run({str(self.path)!r})"

    @classmethod
    def create(cls, config: RunConfig, facts: dict[str, Any]) -> Run:
        """Make a new run directory. Raises `FeverError` if it exists already."""
        text = to_yaml(config)
        name = config.name or fresh_name(config)
        run = cls(user_path(config.runs) / name, trusted=True)
        run._made_parent = not run.path.parent.exists()
        try:
            if run.only_job:
                run.discard()  # left by a process of this job that was killed before it learned anything
            else:
                run.path.mkdir(parents=True)
            write_atomically(run.path / layout.CONFIG, text)
            sign(run.path, config)
            write_atomically(run.path / layout.FACTS, json.dumps(facts, indent=2) + "\n")
        except FileExistsError:
            raise FeverError(
                f"{run.path} exists already; choose another --name, or continue it with: "
                f"fever resume {run.path}{trust_word(config)}"
            ) from None
        except OSError as error:
            with suppress(OSError):
                run.discard()
            raise FeverError(f"{run.path} cannot be created: {error.strerror}") from error
        return run

    @classmethod
    def open(cls, where: str | Path, runs: str | Path = "runs", trusted: bool = False) -> Run:
        """Find a run by path, by name below `runs`, or the newest one by the word `last`."""
        runs = user_path(runs)
        if str(where) == "last":
            found = list_runs(runs)
            if not found:
                raise FeverError(f"there is no run in {runs}")
            return cls(found[-1].path, trusted)
        for path in (user_path(where), runs / where):
            if _is_run(path):
                return cls(path, trusted)
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
        """Remove what fever made in a directory in which nothing was learned, then the directory, and its parent if
        that was created for it. A job's folder is kept, because its log says what happened."""
        for path in self.path.iterdir():
            if _is_own(path.name) and path != self.job and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)
        with suppress(OSError):  # it holds something else
            self.path.rmdir()
            if self._made_parent:
                self.path.parent.rmdir()

    def refuse_links(self) -> None:
        """Raise `FeverError` if something that fever writes or deletes is a symbolic link, which may lead anywhere, or
        a pipe or a device, which may never end. The directory itself may be a link."""
        own = (path for path in self.path.glob("*") if _is_own(path.name))
        for path in itertools.chain(own, *(self.path.glob(pattern) for pattern in MANAGED)):
            refuse_link(path)

    def to_write(self, name: str) -> Path:
        """The path of a file or folder of this name in the directory, which is about to be written."""
        self.refuse_links()
        return self.path / name

    # configuration and facts

    def write_config(self, config: RunConfig) -> None:
        """Write the resolved configuration; `fever train -f` runs it again. The caller trusts the run by now."""
        with self.disk.writing(layout.CONFIG):
            write_atomically(self.path / layout.CONFIG, to_yaml(config))
            sign(self.path, config)

    def require_trust(self, names: Iterable[str]) -> None:
        """Raise `FeverError` if the run may not import these names, which are its own: see `fever.runs.trust`."""
        require(self.path, names, self.trusted)

    @property
    def config(self) -> RunConfig:
        values = {"preset": False, **load_yaml(self.path / layout.CONFIG)}  # older versions had none
        return validate(RunConfig, values, str(self.path / layout.CONFIG))

    @property
    def facts(self) -> dict[str, Any]:
        """Versions, machine and git state when the run was started."""
        return read_json(self.path / layout.FACTS)

    @property
    def summary(self) -> dict[str, Any] | None:
        """How the run ended; None while it runs, and after a kill."""
        path = self.path / layout.SUMMARY
        if not path.exists():
            return None
        found = read_json(path)
        if not isinstance(found.get("stop_reason"), str):
            raise FeverError(f"{path} is damaged: it has no stop_reason")
        return found

    def write_summary(self, summary: dict[str, Any]) -> None:
        with self.disk.writing(layout.SUMMARY):
            write_atomically(self.path / layout.SUMMARY, json.dumps(summary, indent=2) + "\n")

    # the lock: one process at a time trains a run

    def lock(self) -> None:
        """Claim the directory for this process until `close`, for writing: it must not have links."""
        self.refuse_links()
        self._lock = RunLock(self.path)

    @property
    def running(self) -> bool:
        """Whether a process is training the run."""
        return is_locked(self.path)

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
        summary = self.summary
        return summary["stop_reason"] if summary is not None else "killed"

    # metrics and episodes

    def log(self, row: dict[str, Any]) -> None:
        """Append one row of metrics."""
        if layout.METRICS not in self._files:
            path = self.path / layout.METRICS
            self._files[layout.METRICS] = RowWriter(path, "iteration", KEEP_METRICS, self.disk)
        self._files[layout.METRICS].write([_plain(row)])

    def log_episodes(self, rows: list[dict[str, Any]]) -> None:
        """Append one row per finished episode."""
        if layout.EPISODES not in self._files:
            path, old = self.path / layout.EPISODES, self.path / layout.OLD_EPISODES
            self._files[layout.EPISODES] = ArchivingWriter(path, old, "episode", KEEP_EPISODES, self.disk)
        self._files[layout.EPISODES].write([_plain(row) for row in rows])

    def log_evaluation(self, row: dict[str, Any]) -> None:
        """Append the row of one evaluation."""
        if layout.EVALUATIONS not in self._files:
            self._files[layout.EVALUATIONS] = Appender(self.path / layout.EVALUATIONS, self.disk)
        self._files[layout.EVALUATIONS].write(f"{json.dumps(_plain(row))}\n".encode())

    def metrics(self, points: int | None = None, wanted: Wanted = every) -> list[dict[str, Any]]:
        """The rows in order. Where a resumed run repeated iterations, the newer rows replace the older ones.

        With `points`, about so many of a large file, spread evenly: that takes milliseconds whatever its size. Of each
        row, its number and its `wanted` fields.
        """
        path, wanted = self.path / layout.METRICS, _and("iteration", wanted)
        rows = stored_rows(path, wanted) if points is None else sample(path, points, wanted)
        return newest(rows, "iteration")

    def last_row(self) -> dict[str, Any]:
        """The last row of metrics; empty if there is none. Reads only the end of the file."""
        return last_line(self.path / layout.METRICS)

    def episodes(self, points: int | None = None, wanted: Wanted = every) -> list[dict[str, Any]]:
        """Finished episodes in order, the archived ones first; the rest is as for `metrics`."""
        path, old = self.path / layout.EPISODES, self.path / layout.OLD_EPISODES
        wanted = _and("episode", wanted)
        if points is None:
            recent = [*stored_rows(path, wanted)]  # first: they may move to the archive at this moment
            return newest([*stored_rows(old, wanted), *recent], "episode")
        recent = sample(path, points, wanted)
        return newest([*sample_archive(old, points, wanted), *recent], "episode")

    def evaluations(self, wanted: Wanted = every) -> list[dict[str, Any]]:
        """All evaluations in order. Where a resumed run repeated iterations, newer rows replace older ones."""
        return newest(stored_rows(self.path / layout.EVALUATIONS, _and("iteration", wanted)), "iteration")

    def curves(self, points: int | None = None, wanted: Wanted = every) -> dict[str, np.ndarray]:
        """Every metric as an array over iterations; NaN where a row lacks it. The rest is as for `metrics`."""
        rows = self.metrics(points, wanted)
        names = list(dict.fromkeys(name for row in rows for name, value in row.items() if not isinstance(value, list)))
        return {name: column(rows, name) for name in names}

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
        return Checkpoints(self.path).save(arrays, manifest, keep, save_files)

    def checkpoints(self) -> list[Checkpoint]:
        """All checkpoints with a readable manifest, oldest first; their other files are not verified."""
        return [replace(one, trusted=self.trusted) for one in Checkpoints(self.path).readable()]

    @property
    def saved(self) -> bool:
        """Whether there is a checkpoint, perhaps a damaged one."""
        return bool(Checkpoints(self.path).folders())

    def checkpoint(self, which: Literal["last", "best"] | str = "last") -> Checkpoint:
        """The last checkpoint, the one with the best score, or the one of an iteration, given by its number; verified.
        In place of a damaged last or best one, it is the newest whole one, with a `note`."""
        if not self.saved and (self.path / layout.TRIALS).is_dir():
            raise FeverError(
                f"{self.path} is a search; name one of its runs, for example {self.path / layout.TRIALS}/0001"
            )
        found = Checkpoints(self.path).choose(str(which))
        path = found.path.absolute()  # what is read later, when the environment may have left the working folder
        return replace(found, path=path, trusted=self.trusted)

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
        for file in self._files.values():
            file.close()
        if self._lock is not None:
            self._lock.release()
        self._files, self._lock = {}, None


def list_runs(runs: Path) -> list[Run]:
    """All runs in a folder, the oldest first."""
    try:
        paths = [path for path in runs.iterdir() if _is_run(path)]
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise FeverError(f"{runs} cannot be read: {error.strerror}") from error
    return [Run(path) for path in sorted(paths, key=_begun)]


def _is_run(path: Path) -> bool:
    """Whether a folder has a configuration, or may have one: it cannot be looked into."""
    try:
        (path / layout.CONFIG).lstat()
    except PermissionError:
        return True
    except (OSError, ValueError):  # there is none, or no file can have such a name
        return False
    return True


def _begun(path: Path) -> float:
    """When a run was started. Incomplete copies and runs killed at once may lack a file."""
    for name in (layout.FACTS, layout.CONFIG):
        with suppress(OSError):
            return (path / name).stat().st_mtime
    return 0.0


def to_yaml(config: RunConfig, without: Collection[str] = ()) -> str:
    """A configuration as YAML for `fever train -f`, without the fields named in `without`. Raises `FeverError` if fever
    could not read it again."""
    import yaml

    from fever.plain_yaml import NotYaml, read

    try:
        values = config.model_dump(mode="json", exclude=set(without))
    except ValueError as error:  # pydantic's, for values that JSON does not have
        raise FeverError(
            f"env_kwargs and settings must be what JSON can hold: {error}; for other values, pass a function that "
            "creates the environment"
        ) from error
    text = yaml.safe_dump(values, sort_keys=False)
    try:
        if len(text) > LONGEST_YAML:
            raise NotYaml(f"it would have {format_bytes(len(text))}")
        read(text)
    except NotYaml as error:
        raise FeverError(
            f"the configuration cannot be kept as YAML: {error}; put large data into a file of its own, and its path "
            "into the settings"
        ) from error
    return text


def _is_own(name: str) -> bool:
    """Whether fever makes a file or folder of this name in a run directory, perhaps hidden until it is complete."""
    visible = re.sub(r"^\.(.+)\.[0-9a-f]{8}$", r"\1", name)
    return visible in layout.OWN or visible.startswith(layout.EVENTS)


def _plain(value: Any) -> Any:
    """A value, or a row of them, with None for NaN and infinity, which JSON does not have."""
    if isinstance(value, dict):
        return {name: _plain(part) for name, part in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _and(number: str, wanted: Wanted) -> Wanted:
    """What is wanted, and the number of the row."""
    return lambda name: name == number or wanted(name)


def column(rows: list[dict[str, Any]], name: str) -> np.ndarray:
    """One field of all rows as numbers; NaN where a row lacks it or has something else."""
    return np.array([_number(row.get(name)) for row in rows], float)


def _number(value: Any) -> float:
    with suppress(OverflowError):  # a damaged row
        return float(value) if isinstance(value, (int, float)) else math.nan
    return math.nan


def trust_word(config: RunConfig) -> str:
    """The option that resuming such a run needs because it reads pickles, with a space before it; or nothing."""
    return " --trust" if config.search is not None or needs_trust(config.algo) else ""


def fresh_name(config: RunConfig) -> str:
    """A name for a new run that is not taken: environment, algorithm and time."""
    base = f"{config.stem}-{time.strftime('%Y%m%d-%H%M%S')}"
    name, number = base, 2
    while (user_path(config.runs) / name).exists():
        name, number = f"{base}-{number}", number + 1
    return name
