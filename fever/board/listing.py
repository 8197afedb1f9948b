"""Which runs there are in a folder, and a row for each: read once, and again when a file of it has changed."""

from __future__ import annotations

import math
import os
import stat
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from fever import layout
from fever.board.values import number, text
from fever.errors import FeverError
from fever.experiments.select import SEED
from fever.files import read_json, refuse_link, user_path
from fever.job import EXIT, RECORD, STARTED
from fever.runs.groups import experiment_of
from fever.runs.run import Run
from fever.scaling.report import REPORT
from fever.text import STATUS

RUNNING, QUEUED, DONE, FAILED, KILLED, DAMAGED = "running", "queued", "done", "failed", "killed", "damaged"
LOOKED_AT = (  # files whose change makes a row anew
    layout.CONFIG, layout.METRICS, layout.EVALUATIONS, layout.SUMMARY, layout.FACTS, layout.LOCK, REPORT,
    f"{layout.JOB}/{RECORD}", f"{layout.JOB}/{STARTED}", f"{layout.JOB}/{EXIT}",
)  # fmt: skip
STAYS = (layout.CONFIG, layout.FACTS)  # of these, files on which the slow part of a row depends
AGAIN_SECONDS = 2.0  # between two looks whether a run that runs has been killed, or one can be read that could not
MOST_RUNS = 20_000  # in a folder
IRREGULAR = (0, -1)  # the stamp of a link, a pipe or a folder
Signature = tuple[tuple[int, int] | None, ...]
Row = dict[str, Any]


@dataclass
class Entry:
    """A run that is known, and what its row was made of."""

    path: Path
    kind: str  # run, search, trial or scaling
    parent: str | None
    signature: Signature = ()
    looked: float = 0.0
    stays: Signature = ()  # what `fixed` was made of
    fixed: Row = field(default_factory=dict)
    row: Row = field(default_factory=dict)


class Listing:
    """The runs in a folder, by their ids: paths relative to it, such as `cartpole` or `search/trials/0003`."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = user_path(folder).resolve()
        self.entries: dict[str, Entry] = {}
        self.news: dict[str, None] = {}  # ids, in order, of what has changed since `scan` last said so
        self.lock = threading.Lock()  # requests are answered in several threads

    def scan(self) -> tuple[list[Row], list[str]]:
        """Look at the folder; returns rows that are new or have changed since the last call, and ids that are gone."""
        with self.lock:
            self._scan()
            news, self.news = self.news, {}
            changed = [self.entries[name].row for name in news if name in self.entries]
            return changed, [name for name in news if name not in self.entries]

    def refresh(self) -> None:
        """Look at the folder; what has changed is left for the next `scan` to tell."""
        with self.lock:
            self._scan()

    def _scan(self) -> None:
        found = dict(self._find())
        for name in self.entries.keys() - found.keys():
            del self.entries[name]
            self.news[name] = None
        for name, (path, kind, parent) in found.items():
            entry = self.entries.get(name)
            if entry is None or entry.kind != kind:
                entry = Entry(path, kind, parent)
            if self._look(name, entry):
                self.news[name] = None
            self.entries[name] = entry  # with its row, which other threads may ask for at any time

    def rows(self) -> list[Row]:
        """All rows as of the last scan, the newest first."""
        return sorted((one.row for one in list(self.entries.values())), key=lambda row: -(row["began"] or 0.0))

    def entry(self, name: str) -> Entry:
        """A run that is known. Raises `FeverError` for any other name, so that no name is ever used as a path."""
        if name not in self.entries:
            self.refresh()
        if (found := self.entries.get(name)) is None:
            raise FeverError("there is no such run here")
        return found

    def run(self, name: str) -> Run:
        """A run that is known, in which nothing is a link to somewhere else."""
        entry = self.entry(name)
        if entry.path.is_symlink():
            raise FeverError(f"{name} is a symbolic link, which the page does not follow")
        run = Run(entry.path)
        run.refuse_links()
        return run

    def _find(self) -> Iterator[tuple[str, tuple[Path, str, str | None]]]:
        """Runs, searches with their trials, reports on scaling with their measurements."""
        for path in _folders(self.folder):
            is_run, report = os.path.lexists(path / layout.CONFIG), os.path.lexists(path / REPORT)
            if is_run or report or (path.is_symlink() and os.path.exists(path / layout.CONFIG)):
                trials = path / layout.TRIALS
                searched = is_run and not (path.is_symlink() or trials.is_symlink()) and os.path.isdir(trials)
                kind = "search" if searched else "run" if is_run else "scaling"
                name = spelled(path.name)
                yield name, (path, kind, None)
                if path.is_symlink():
                    continue
                inside = trials if searched else path if report else None
                for trial in _folders(inside) if inside is not None else ():
                    if os.path.lexists(trial / layout.CONFIG) and not trial.is_symlink():
                        yield spelled(str(trial.relative_to(self.folder))), (trial, "trial", name)

    def _look(self, name: str, entry: Entry) -> bool:
        """Make the row anew if a file has changed; returns whether it is another one."""
        signature, now = _signature(entry.path), time.monotonic()
        again = entry.row.get("state") in (RUNNING, QUEUED, DAMAGED) and now - entry.looked >= AGAIN_SECONDS
        if signature == entry.signature and not again:
            return False
        before, entry.signature, entry.looked = entry.row, signature, now
        entry.row = self._row(name, entry)
        return entry.row != before

    def _row(self, name: str, entry: Entry) -> Row:
        row = _empty_row(name, entry)
        try:
            if entry.path.is_symlink():
                raise FeverError("it is a symbolic link, which the page does not follow")
            odd = (one for one, stamp in zip(LOOKED_AT, entry.signature, strict=True) if stamp == IRREGULAR)
            for one in (layout.JOB, *odd):
                refuse_link(entry.path / one)
            if entry.kind == "scaling":
                return row | _of_report(entry.path)
            stays = tuple(_stamp(entry.path / one) for one in STAYS)
            if stays != entry.stays:
                entry.fixed, entry.stays = _of_configuration(Run(entry.path)), stays
            return row | entry.fixed | _of_progress(Run(entry.path))
        except Exception as error:  # noqa: BLE001 - one run does not hide the others, whatever is in its files
            reason = str(error) if isinstance(error, FeverError | OSError) else repr(error)
            return row | {"state": DAMAGED, "reason": text(reason.replace(f"{entry.path}/", ""), 500)}


def _empty_row(name: str, entry: Entry) -> Row:
    missing = (
        "env algo seed workers reason host steps iteration episodes seconds return evaluation steps_per_second goal "
        "updated experiment"
    )
    return {
        **dict.fromkeys(missing.split()), "id": name, "name": text(entry.path.name, 300), "kind": entry.kind,
        "parent": entry.parent, "state": KILLED, "elsewhere": False, "experiment_name": text(entry.path.name, 300),
        "began": _time_of(entry.path),
    }  # fmt: skip


def _of_configuration(run: Run) -> Row:
    """What does not change while a run trains."""
    config = run.config
    facts: dict[str, Any] = {}
    with suppress(FeverError):
        facts = run.facts
    began = None
    with suppress(ValueError, OverflowError):
        began = datetime.strptime(str(facts.get("time")), "%Y-%m-%dT%H:%M:%S%z").timestamp()
    return {
        "env": text(config.env, 200), "algo": text(config.algo, 200), "seed": config.seed, "workers": config.workers,
        "goal": number(config.stop.reward), "experiment": None if config.search else experiment_of(config),
        "experiment_name": text(run.path.name.partition(SEED)[0], 300),
        "began": began or _time_of(run.path / layout.CONFIG),
    }  # fmt: skip


def _of_progress(run: Run) -> Row:
    """What changes while it trains."""
    last, summary = run.last_row(), run.summary or {}
    values = {**summary, **last}
    state, reason, host = _state(run, summary, bool(last))
    evaluation = summary.get("evaluation")
    latest = evaluation.get("return_mean") if isinstance(evaluation, dict) else None
    speed = last if state == RUNNING else values | summary
    return {
        **{name: number(values.get(name)) for name in ("steps", "iteration", "episodes", "seconds")},
        "return": number(values.get("return_mean")), "evaluation": number(last.get("eval/return_mean", latest)),
        "steps_per_second": number(speed.get("steps_per_second")), "state": state, "reason": reason,
        "elsewhere": run.elsewhere, "host": host, "updated": _time_of(run.path / layout.METRICS),
    }  # fmt: skip


def _state(run: Run, summary: Row, learned: bool) -> tuple[str, str | None, str | None]:
    """State, reason, and the machine that trains a run elsewhere."""
    host = None
    if run.elsewhere:
        host = text(read_json(run.job / RECORD).get("head", ""), 200) or None
    if run.running or (run.elsewhere and learned):
        return RUNNING, None, host
    if (reason := summary.get("stop_reason")) == "failed":
        return FAILED, text(str(summary.get("error") or reason), 500), host
    if reason is not None:
        return DONE, STATUS.get(reason, text(reason, 200)), host
    if (run.job / RECORD).is_file() and not (run.job / EXIT).exists():
        if run.elsewhere or not (run.job / STARTED).exists():
            return QUEUED, "its job has not begun", host
        if not learned:
            return RUNNING, "its machines are starting", host
    return KILLED, "it ended without a summary", host


def _of_report(path: Path) -> Row:
    report = read_json(path / REPORT)
    return {
        "env": text(report.get("env", ""), 200), "algo": text(report.get("algo", ""), 200), "state": DONE,
        "reason": text(report.get("answer", ""), 500), "updated": _time_of(path / REPORT),
    }  # fmt: skip


def _folders(path: Path) -> list[Path]:
    """Folders in a folder, links to some included; none if it cannot be read."""
    with suppress(OSError), os.scandir(path) as found:
        names = [one.name for one in found if not one.name.startswith(".") and _is_folder(one)]
        return [path / name for name in names[:MOST_RUNS]]
    return []


def spelled(name: str) -> str:
    """A name with bytes that are no text, if it has any, as codes: browsers cannot ask for halves of characters."""
    return os.fsencode(name).decode(errors="backslashreplace")


def _is_folder(one: os.DirEntry[str]) -> bool:
    return one.is_dir(follow_symlinks=False) or os.path.isdir(one.path)  # its own `is_dir` raises for a link to itself


def _signature(path: Path) -> Signature:
    return tuple(_stamp(path / name) for name in LOOKED_AT)


def _stamp(path: Path) -> tuple[int, int] | None:
    """What changes when a file is written; None if it is none."""
    with suppress(OSError, ValueError):
        found = os.lstat(path)
        return (found.st_mtime_ns, found.st_size) if stat.S_ISREG(found.st_mode) else IRREGULAR
    return None


def _time_of(path: Path) -> float | None:
    with suppress(OSError):
        found = os.lstat(path).st_mtime
        return found if math.isfinite(found) else None
    return None
