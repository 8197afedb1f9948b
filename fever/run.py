"""The run directory: the only thing that plots, tables and `resume` read. Its layout is in docs/run-directory.md."""

from __future__ import annotations

import fcntl
import hashlib
import io
import json
import os
import shutil
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TextIO

import numpy as np

from fever.config import RunConfig, Stop, is_rllib, load_yaml, validate
from fever.errors import FeverError
from fever.events import EventWriter
from fever.launch.files import write_whole
from fever.launch.meeting import JOB
from fever.policy import Policy
from fever.policy.spaces import Description

FORMAT = 1  # of the checkpoint's manifest; raised when an old reader could not read a new one
WEIGHTS_PREFIX = "policy/"  # arrays under it are what acting needs; the rest is for resuming
TAIL = 1 << 16  # bytes that are read at once from a file's end
RULES = {"reward": "reward", "steps": "steps", "iterations": "iterations", "time": "seconds"}  # stop reason -> field


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

    @property
    def files(self) -> Path:
        """Folder of what a learner keeps in files of its own; not there for most."""
        return self.path / "files"

    def met(self, stop: Stop) -> str:
        """The stop rule that the run had met here, or nothing."""
        kept = self.manifest["trainer"]
        return stop_reason(stop, kept["returns"], self.manifest["steps"], self.iteration, kept["seconds"])

    def check_spaces(self, observation: Description, action: Description, name: str) -> None:
        """Refuse to act in, or go on with, an environment of this name that has other spaces."""
        for which, has in (("observation", observation), ("action", action)):
            if has != self.manifest["policy"][which]:
                raise FeverError(f"the checkpoint {self.path} was made for another {which} space than {name} has")

    def require(self, trust: bool) -> None:
        """Refuse to go on from pickles, unless the user trusts them or the job that wrote them goes on by itself."""
        pickled = self.files.exists() or "rllib" in self.manifest["policy"]  # whatever the manifest says of its files
        if pickled and not trust and JOB not in os.environ:
            raise FeverError(
                f"{self.files} holds RLlib's pickles, which can run any program when they are read; "
                "if you know who wrote them, add --trust"
            )

    def verify(self) -> None:
        """Refuse a file whose hash is not the manifest's, and one that the manifest does not know."""
        for path in self.files.rglob("*"):
            if path.is_file() and str(path.relative_to(self.path)) not in self.manifest["sha256"]:
                raise FeverError(f"the checkpoint is damaged: {path} does not belong to it")
        for name, digest in self.manifest["sha256"].items():
            file = self.path / name
            if not file.is_file():
                raise FeverError(f"the checkpoint is damaged: {file} is missing")
            if sha256(file) != digest:
                raise FeverError(
                    f"the checkpoint is damaged: {file} is not what was written; --checkpoint chooses another one"
                )

    def arrays(self, prefix: str = "") -> dict[str, np.ndarray]:
        """The arrays whose names begin with `prefix` (cut off), if no file is damaged."""
        from safetensors import SafetensorError, safe_open

        self.verify()
        try:
            with safe_open(self.path / "arrays.safetensors", framework="numpy") as file:
                names = [name for name in file.keys() if name.startswith(prefix)]  # noqa: SIM118 - not a dictionary
                return {name.removeprefix(prefix): file.get_tensor(name) for name in names}
        except SafetensorError as error:
            raise FeverError(f"the checkpoint is damaged: {self.path / 'arrays.safetensors'}: {error}") from error

    def policy(self) -> Any:
        """The policy that this checkpoint holds: a `Policy`, or for RLlib's algorithms an `RllibPolicy`, which acts the
        same way."""
        if "rllib" in self.manifest["policy"]:
            from fever.rllib.play import RllibPolicy

            return RllibPolicy(self)
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
        text = to_yaml(config)
        name = config.name or fresh_name(config)
        run = cls(Path(config.runs).expanduser() / name)
        run._made_parent = not run.path.parent.exists()
        try:
            if run.only_job:
                run.discard()  # but for the job's folder: what a killed process left before it had learned anything
            else:
                run.path.mkdir(parents=True)
        except FileExistsError:
            raise FeverError(
                f"{run.path} exists already; choose another --name, or continue it with: "
                f"fever resume {run.path}{trust_word(config)}"
            ) from None
        except OSError as error:
            raise FeverError(f"{run.path} cannot be made: {error.strerror}") from error
        write_atomically(run.path / "config.yaml", text)
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

    @property
    def job(self) -> Path:
        """The folder of the job that trains this run, if one does."""
        return self.path / "job"

    @property
    def only_job(self) -> bool:
        """Whether the job that this process drives has made this directory, and nothing was learned yet."""
        own = os.environ.get(JOB)
        mine = own is not None and Path(own).resolve() == self.job.resolve()
        return mine and not self.checkpoints() and not self.running

    def discard(self) -> None:
        """Remove a directory in which nothing was learned, and the folder of runs if that was made for it. A job's
        folder stays: it says what happened."""
        if self.job.is_dir():
            for path in self.path.iterdir():
                if path != self.job:
                    shutil.rmtree(path) if path.is_dir() else path.unlink()
            return
        shutil.rmtree(self.path, ignore_errors=True)
        if self._made_parent:
            with suppress(OSError):  # another run is in it by now
                self.path.parent.rmdir()

    # configuration and facts

    def write_config(self, config: RunConfig) -> None:
        """Write the resolved configuration; `fever train -f` runs it again."""
        write_atomically(self.path / "config.yaml", to_yaml(config))

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
    def elsewhere(self) -> bool:
        """Whether this is the copy of a run that a job trains on other machines, and nobody has seen it end."""
        if not (self.job / "job.json").is_file() or (self.job / "exit.json").exists():
            return False
        return "there" in read_json(self.job / "job.json")

    @property
    def status(self) -> str:
        """`running`, why it stopped, or `killed` when it could not say."""
        if self.running or self.elsewhere:
            return "running"
        return self.summary["stop_reason"] if self.summary else "killed"

    # metrics and episodes

    def log(self, row: dict[str, Any]) -> None:
        """Append one row of metrics; it is in the file when this returns."""
        if self._metrics is None:
            self._metrics = open_to_append(self.path / "metrics.jsonl")
        self._metrics.write(json.dumps({name: _plain(value) for name, value in row.items()}) + "\n")
        self._metrics.flush()
        self._board = self._board or EventWriter(self.path)
        scalars = {name: value for name, value in row.items() if isinstance(value, (int, float)) and name != "steps"}
        self._board.write(row["steps"], scalars)

    def log_episodes(self, rows: list[dict[str, Any]]) -> None:
        """Append one row per finished episode."""
        if self._episodes is None:
            self._episodes = open_to_append(self.path / "episodes.jsonl")
        self._episodes.write("".join(json.dumps(row) + "\n" for row in rows))
        self._episodes.flush()

    def metrics(self) -> list[dict[str, Any]]:
        """All rows in order. Rows that a resumed run made again replace those it had made before it was killed."""
        return _newest(_read_lines(self.path / "metrics.jsonl"), "iteration")

    def last_row(self) -> dict[str, Any]:
        """The last row of metrics, from the file's end alone; empty if there is none."""
        return _last_line(self.path / "metrics.jsonl")

    def episodes(self) -> list[dict[str, Any]]:
        """All finished episodes in order, without those of a course that a resumed run has left."""
        return _newest(_read_lines(self.path / "episodes.jsonl"), "episode")

    def curves(self) -> dict[str, np.ndarray]:
        """Every metric as an array over iterations; NaN where a row lacks it."""
        rows = self.metrics()
        names = list(dict.fromkeys(name for row in rows for name, value in row.items() if not isinstance(value, list)))
        return {name: np.array([_number(row.get(name)) for row in rows]) for name in names}

    # checkpoints

    def save(
        self,
        arrays: dict[str, np.ndarray],
        manifest: dict[str, Any],
        keep: int,
        save_files: Callable[[Path], None] | None = None,
    ) -> Path:
        """Write a checkpoint and drop old ones, all but the last `keep` and the best. Atomic: it is whole or absent.
        `save_files` writes what does not fit into arrays.

        Later iterations than this one belong to a course that a resumed run has left: they are dropped too.
        """
        from safetensors.numpy import save_file

        folder = self.path / "checkpoints"
        target = folder / f"{manifest['iteration']:08d}"
        partial = folder / f".partial-{os.getpid()}"
        for left in (*folder.glob(".partial-*"), *folder.glob(".dropped-*")):  # by a process that was killed
            shutil.rmtree(left, ignore_errors=True)
        partial.mkdir(parents=True)
        file = partial / "arrays.safetensors"
        save_file({name: np.array(array, order="C") for name, array in arrays.items()}, file)
        if save_files is not None:
            (partial / "files").mkdir()
            save_files(partial / "files")
        written = sorted(path for path in partial.rglob("*") if path.is_file())
        for path in written:
            _flush_to_disk(path)
        hashes = {str(path.relative_to(partial)): sha256(path) for path in written}
        manifest = {"format": FORMAT, **manifest, "sha256": hashes}
        write_atomically(partial / "manifest.json", json.dumps(manifest, indent=2) + "\n")
        later = [_set_aside(path) for path in reversed(self._folders()) if path.name >= target.name]
        partial.rename(target)
        for path in (*later, *self._prune(keep)):
            shutil.rmtree(path)
        return target

    def _prune(self, keep: int) -> list[Path]:
        """Set all checkpoints aside but the last `keep` and the best; returns where they are now."""
        found = self.checkpoints()
        best = best_of(found)
        return [_set_aside(one.path) for one in found[:-keep] if best is None or one.path != best.path]

    def _folders(self) -> list[Path]:
        return sorted((self.path / "checkpoints").glob("[0-9]*"))

    def checkpoints(self) -> list[Checkpoint]:
        """All complete checkpoints, oldest first."""
        found = []
        for path in self._folders():
            try:
                found.append(Checkpoint(path, read_json(path / "manifest.json")))
            except FeverError:
                if (path / "manifest.json").exists():
                    raise
        return found

    def checkpoint(self, which: Literal["last", "best"] | str = "last") -> Checkpoint:
        """The last one, the one with the best score, or one by its number."""
        found = self.checkpoints()
        if not found and (self.path / "trials").is_dir():
            raise FeverError(f"{self.path} is a search; name one of its runs, for example {self.path}/trials/0001")
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
        """The stop rules to go on with from a checkpoint: where some were given anew, by the names of their options,
        others that it has met already no longer count. Also the names of these."""
        dropped: list[str] = []
        if RULES.keys() & set(given) and self.checkpoints():
            checkpoint = self.checkpoint(which)
            while (rule := checkpoint.met(stop)) and rule not in given:
                stop = stop.model_copy(update={RULES[rule]: None})
                dropped.append(rule)
        return stop, dropped

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
    return [Run(path) for path in sorted(paths, key=_begun)]


def _begun(path: Path) -> float:
    """When a run was begun; a copy that is not whole, or a run killed at once, may lack what says so."""
    for name in ("facts.json", "config.yaml"):
        with suppress(OSError):
            return (path / name).stat().st_mtime
    return 0.0


def best_of(checkpoints: list[Checkpoint]) -> Checkpoint | None:
    """The checkpoint with the highest score, the latest of equals; None if none has a score."""
    scored = [one for one in checkpoints if one.score is not None]
    return max(scored, key=lambda one: (one.score, one.iteration)) if scored else None


def stop_reason(stop: Stop, returns: Sequence[float], steps: int, iteration: int, seconds: float) -> str:
    """The name of the first stop rule that is met, or nothing."""
    window = list(returns)[-stop.window :]
    if stop.reward is not None and len(window) == stop.window and np.mean(window) >= stop.reward:
        return "reward"
    if stop.steps is not None and steps >= stop.steps:
        return "steps"
    if stop.iterations is not None and iteration >= stop.iterations:
        return "iterations"
    if stop.seconds is not None and seconds >= stop.seconds:
        return "time"
    return ""


def to_yaml(config: RunConfig, without: Collection[str] = ()) -> str:
    """A configuration as text that `fever train -f` reads, without some of its fields."""
    import yaml

    try:
        values = config.model_dump(mode="json", exclude=set(without))
    except ValueError as error:  # pydantic's, for what is no JSON
        raise FeverError(
            f"env_kwargs and settings must be what JSON can hold: {error}; a function that makes the environment may "
            "hold anything"
        ) from error
    return yaml.safe_dump(values, sort_keys=False)


def write_atomically(path: Path, text: str) -> None:
    """Write a whole file or nothing."""
    write_whole(path, text, lasting=True)


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


def _set_aside(checkpoint: Path) -> Path:
    """Take a checkpoint away in one step, so that a kill while it is deleted leaves no part of it; returns where it
    is."""
    return checkpoint.rename(checkpoint.with_name(f".dropped-{checkpoint.name}"))


def open_to_append(path: Path) -> TextIO:
    """Open a file of lines to add more; one that a kill has cut short is ended, and does not spoil the next."""
    file = open(path, "a+b")  # noqa: SIM115 - the caller closes it
    if file.seek(0, os.SEEK_END):
        file.seek(-1, os.SEEK_END)
        if file.read(1) != b"\n":
            file.write(b"\n")
    return io.TextIOWrapper(file)


def _last_line(path: Path) -> dict[str, Any]:
    """The last whole row of a JSON-lines file, or nothing."""
    if not path.is_file():
        return {}
    with open(path, "rb") as file:
        start, tail = file.seek(0, os.SEEK_END), b""
        while start:
            length = min(start, TAIL)
            start = file.seek(start - length)
            tail = file.read(length) + tail
            lines = tail.split(b"\n")
            for line in reversed(lines[1:] if start else lines):  # the first one may begin before
                with suppress(ValueError):
                    return json.loads(line)
    return {}


def _newest(rows: Iterable[dict[str, Any]], number: str) -> list[dict[str, Any]]:
    """Rows in the order of their numbers: one that was made again replaces the old one, and all that came after it."""
    kept: list[dict[str, Any]] = []
    for row in rows:
        while kept and kept[-1][number] >= row[number]:
            kept.pop()
        kept.append(row)
    return kept


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


def trust_word(config: RunConfig) -> str:
    """What has to be said to go on with such a run, because that reads pickles."""
    return " --trust" if config.search is not None or is_rllib(config.algo) else ""


def fresh_name(config: RunConfig) -> str:
    """A name that no run has: environment, algorithm and time."""
    base = f"{config.stem}-{time.strftime('%Y%m%d-%H%M%S')}"
    name, number = base, 2
    while (Path(config.runs).expanduser() / name).exists():
        name, number = f"{base}-{number}", number + 1
    return name
