"""The run directory: the only thing that plots, tables and `resume` read. Its layout is in docs/run-directory.md."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from fever.config import RunConfig, load_yaml, validate
from fever.errors import FeverError
from fever.events import EventWriter
from fever.policy import Policy

FORMAT = 1  # of the checkpoint's manifest; raised when an old reader could not read a new one
WEIGHTS_PREFIX = "policy/"  # arrays under it are what acting needs; the rest is for resuming


@dataclass(frozen=True)
class Checkpoint:
    """One complete checkpoint on disk."""

    path: Path
    manifest: dict[str, Any]

    @property
    def iteration(self) -> int:
        return int(self.manifest["iteration"])

    @property
    def score(self) -> float | None:
        return self.manifest["score"]

    def arrays(self, prefix: str = "") -> dict[str, np.ndarray]:
        """The arrays whose names begin with `prefix` (cut off); a file whose hash is not the manifest's is refused."""
        from safetensors import SafetensorError, safe_open

        for name, digest in self.manifest["sha256"].items():
            file = self.path / name
            if not file.is_file():
                raise FeverError(f"the checkpoint is damaged: {file} is missing")
            if sha256(file) != digest:
                raise FeverError(
                    f"the checkpoint is damaged: {file} is not what was written; --checkpoint chooses another one"
                )
        try:
            with safe_open(self.path / "arrays.safetensors", framework="numpy") as file:
                names = [name for name in file.keys() if name.startswith(prefix)]  # noqa: SIM118 - not a dictionary
                return {name.removeprefix(prefix): file.get_tensor(name) for name in names}
        except SafetensorError as error:
            raise FeverError(f"the checkpoint is damaged: {self.path / 'arrays.safetensors'}: {error}") from error

    def policy(self) -> Policy:
        """The policy that this checkpoint holds."""
        return Policy.from_description(self.manifest["policy"], self.arrays(WEIGHTS_PREFIX))


class Run:
    """One run directory, open for writing while it trains or for reading afterwards."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._metrics: Any = None
        self._episodes: Any = None
        self._board: Any = None
        self._lock: Any = None
        self._made_parent = False

    @classmethod
    def create(cls, config: RunConfig, facts: dict[str, Any]) -> Run:
        """Make a new run directory; an existing one is never touched."""
        name = config.name or _fresh_name(config)
        run = cls(Path(config.runs).expanduser() / name)
        run._made_parent = not run.path.parent.exists()
        try:
            run.path.mkdir(parents=True)
        except FileExistsError:
            raise FeverError(
                f"{run.path} exists already; choose another --name, or continue it with: fever resume {run.path}"
            ) from None
        except OSError as error:
            raise FeverError(f"{run.path} cannot be made: {error.strerror}") from error
        run.write_config(config)
        write_atomically(run.path / "facts.json", json.dumps(facts, indent=2) + "\n")
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
            if (path / "config.yaml").is_file():
                return cls(path)
        names = ", ".join(run.path.name for run in list_runs(runs)[-5:])
        raise FeverError(f"there is no run {where}" + (f"; the latest in {runs} are: {names}" if names else ""))

    def discard(self) -> None:
        """Remove a directory in which nothing was learned, and the folder of runs if that was made for it."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self._made_parent:
            self.path.parent.rmdir()

    # configuration and facts

    def write_config(self, config: RunConfig) -> None:
        """Write the resolved configuration; `fever train -f` runs it again."""
        import yaml

        text = yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False)
        write_atomically(self.path / "config.yaml", text)

    @property
    def config(self) -> RunConfig:
        return validate(RunConfig, load_yaml(self.path / "config.yaml"), str(self.path / "config.yaml"))

    @property
    def facts(self) -> dict[str, Any]:
        """Versions and git state of the run's start."""
        return read_json(self.path / "facts.json")

    @property
    def summary(self) -> dict[str, Any] | None:
        """How the run ended, or None: it is still running, or it was killed."""
        return read_json(self.path / "summary.json") if (self.path / "summary.json").is_file() else None

    def write_summary(self, summary: dict[str, Any]) -> None:
        write_atomically(self.path / "summary.json", json.dumps(summary, indent=2) + "\n")

    # one writer at a time

    def lock(self) -> None:
        """Claim the directory for this process until `close`."""
        self._lock = open(self.path / "lock", "a+")  # noqa: SIM115 - held as long as the run trains
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._lock.seek(0)
            owner = self._lock.read().strip()
            self._lock = None
            raise FeverError(f"{self.path} is being trained right now by process {owner or 'unknown'}") from None
        self._lock.truncate(0)
        self._lock.write(f"{os.getpid()}\n")
        self._lock.flush()

    @property
    def running(self) -> bool:
        """Whether a process on this machine is training it."""
        try:
            with open(self.path / "lock") as file:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
                return False
        except BlockingIOError:
            return True
        except OSError:
            return False

    @property
    def status(self) -> str:
        """`running`, why it stopped, or `killed` when it could not say."""
        if self.running:
            return "running"
        return self.summary["stop_reason"] if self.summary else "killed"

    # metrics and episodes

    def log(self, row: dict[str, Any]) -> None:
        """Append one row of metrics; it is in the file when this returns."""
        if self._metrics is None:
            self._metrics = open(self.path / "metrics.jsonl", "a")  # noqa: SIM115 - open as long as the run is
        self._metrics.write(json.dumps({name: _plain(value) for name, value in row.items()}) + "\n")
        self._metrics.flush()
        self._board = self._board or EventWriter(self.path)
        scalars = {name: value for name, value in row.items() if isinstance(value, (int, float)) and name != "steps"}
        self._board.write(row["steps"], scalars)

    def log_episodes(self, rows: list[dict[str, Any]]) -> None:
        """Append one row per finished episode."""
        if self._episodes is None:
            self._episodes = open(self.path / "episodes.jsonl", "a")  # noqa: SIM115 - open as long as the run is
        self._episodes.write("".join(json.dumps(row) + "\n" for row in rows))
        self._episodes.flush()

    def metrics(self) -> list[dict[str, Any]]:
        """All rows in order. Rows that a resumed run made again replace those it had made before it was killed."""
        rows: list[dict[str, Any]] = []
        for row in _read_lines(self.path / "metrics.jsonl"):
            while rows and rows[-1]["iteration"] >= row["iteration"]:
                rows.pop()
            rows.append(row)
        return rows

    def episodes(self) -> list[dict[str, Any]]:
        """All finished episodes in order."""
        return list(_read_lines(self.path / "episodes.jsonl"))

    def curves(self) -> dict[str, np.ndarray]:
        """Every metric as an array over iterations; NaN where a row lacks it."""
        rows = self.metrics()
        names = list(dict.fromkeys(name for row in rows for name, value in row.items() if not isinstance(value, list)))
        return {name: np.array([_number(row.get(name)) for row in rows]) for name in names}

    # checkpoints

    def save(self, arrays: dict[str, np.ndarray], manifest: dict[str, Any], keep: int) -> Path:
        """Write a checkpoint and drop old ones, all but the last `keep` and the best. Atomic: it is whole or absent.

        Later iterations than this one belong to a course that a resumed run has left: they are dropped too.
        """
        from safetensors.numpy import save_file

        folder = self.path / "checkpoints"
        target = folder / f"{manifest['iteration']:08d}"
        partial = folder / f".partial-{os.getpid()}"
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        file = partial / "arrays.safetensors"
        save_file({name: np.array(array, order="C") for name, array in arrays.items()}, file)
        _flush_to_disk(file)
        manifest = {"format": FORMAT, **manifest, "sha256": {file.name: sha256(file)}}
        write_atomically(partial / "manifest.json", json.dumps(manifest, indent=2) + "\n")
        for later in self.checkpoints():
            if later.iteration >= manifest["iteration"]:
                shutil.rmtree(later.path)
        partial.rename(target)
        self._prune(keep)
        return target

    def _prune(self, keep: int) -> None:
        found = self.checkpoints()
        best = best_of(found)
        for checkpoint in found[:-keep]:
            if best is None or checkpoint.path != best.path:
                shutil.rmtree(checkpoint.path)

    def checkpoints(self) -> list[Checkpoint]:
        """All complete checkpoints, oldest first."""
        folder = self.path / "checkpoints"
        paths = sorted(folder.glob("[0-9]*")) if folder.is_dir() else []
        return [Checkpoint(path, read_json(path / "manifest.json")) for path in paths]

    def checkpoint(self, which: Literal["last", "best"] | str = "last") -> Checkpoint:
        """The last one, the one with the best score, or one by its number."""
        found = self.checkpoints()
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

    def close(self) -> None:
        """Close files and give up the lock."""
        for file in (self._metrics, self._episodes, self._board, self._lock):
            if file is not None:
                file.close()
        self._metrics = self._episodes = self._board = self._lock = None


def list_runs(runs: Path) -> list[Run]:
    """All runs in a folder, the oldest first."""
    if not runs.is_dir():
        return []
    paths = [path for path in runs.iterdir() if (path / "config.yaml").is_file()]
    return [Run(path) for path in sorted(paths, key=lambda path: (path / "facts.json").stat().st_mtime)]


def best_of(checkpoints: list[Checkpoint]) -> Checkpoint | None:
    """The checkpoint with the highest score, the latest of equals; None if none has a score."""
    scored = [one for one in checkpoints if one.score is not None]
    return max(scored, key=lambda one: (one.score, one.iteration)) if scored else None


def write_atomically(path: Path, text: str) -> None:
    """Write a whole file or nothing."""
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(text)
    _flush_to_disk(partial)
    partial.replace(path)


def read_json(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise FeverError(f"{path} is missing or damaged") from error


def sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _flush_to_disk(path: Path) -> None:
    with open(path, "rb") as file:
        os.fsync(file.fileno())


def _read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Rows of a JSON-lines file; a last line cut short by a kill is left out."""
    if not path.is_file():
        return
    with open(path) as file:
        for line in file:
            try:
                yield json.loads(line)
            except ValueError:
                continue


def _plain(value: Any) -> Any:
    return None if isinstance(value, float) and not np.isfinite(value) else value


def _number(value: Any) -> float:
    return float(value) if isinstance(value, (int, float)) else float("nan")


def _fresh_name(config: RunConfig) -> str:
    env = re.sub(r"[^\w.+-]+", "-", config.env.rpartition(":")[2]).strip("-").lower()
    base = f"{env}-{config.algo}-{time.strftime('%Y%m%d-%H%M%S')}"
    name, number = base, 2
    while (Path(config.runs).expanduser() / name).exists():
        name, number = f"{base}-{number}", number + 1
    return name
