"""What has changed in the runs that somebody watches, since the last look."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from fever import layout
from fever.board import details
from fever.board.curves import COUNTERS, columns_of
from fever.board.listing import Listing
from fever.board.values import number, numbers
from fever.files import open_regular
from fever.runs.rows import Follower
from fever.runs.run import Run, column
from fever.text import clean

Event = tuple[str, dict[str, Any]]  # its name, and what it says
MOST_ROWS = 2000  # of one event; of more, every k-th
LOG_STEP = 1 << 16  # bytes of a log in one event
PARTS = {  # what is fetched again when it has changed -> the file or folder that shows it
    "checkpoints": layout.CHECKPOINTS, "videos": layout.VIDEOS, "evaluations": layout.EVALUATIONS,
    "summary": layout.SUMMARY, "config": layout.CONFIG,
}  # fmt: skip


class Watched:
    """One run that is watched: its files are read from where they end now."""

    def __init__(self, name: str, run: Run) -> None:
        self.name, self.run = name, run
        self.metrics = Follower(run.path / layout.METRICS, "iteration", from_end=True)
        self.episodes = Follower(run.path / layout.EPISODES, "episode", from_end=True)
        self.log_place = self._size(layout.LOG)
        self.parts = self._stamps()
        self.workers: dict[str, Any] = {}
        self.workers_stamp = ("", 0.0)

    def events(self, state: str) -> Iterator[Event]:
        """What is new; `state` is that of the run's row."""
        if rows := self.metrics.rows():
            yield "points", {"id": self.name, "columns": _columns(_thinned(rows))}
        if rows := self.episodes.rows():
            rows = _thinned(rows)
            infos = [row["info"] for row in rows if isinstance(row.get("info"), dict)]
            names = list(dict.fromkeys(name for info in infos for name in info))
            yield "episodes", {"id": self.name, **columns_of(rows, names)}
        yield from self._log()
        stamp = state, self._time(layout.WORKERS)
        if stamp != self.workers_stamp:
            self.workers_stamp = stamp
            yield "workers", {"id": self.name, **details.workers(self.run, state)}
        now = self._stamps()
        if changed := [name for name, stamp in now.items() if stamp != self.parts[name]]:
            self.parts = now
            yield "changed", {"id": self.name, "what": changed}

    def _log(self) -> Iterator[Event]:
        size = self._size(layout.LOG)
        if size < self.log_place:  # it was shortened
            self.log_place = size
            yield "changed", {"id": self.name, "what": ["log"]}
        elif size > self.log_place:
            with suppress(OSError), open_regular(self.run.path / layout.LOG) as file:
                begin = max(self.log_place, size - LOG_STEP)
                file.seek(begin)
                content = file.read(size - begin)
                whole = content[: content.rfind(b"\n") + 1]  # not in the middle of a character
                self.log_place = begin + len(whole)
                if whole:
                    yield "log", {"id": self.name, "text": clean(whole.decode(errors="replace"))}

    def _stamps(self) -> dict[str, float]:
        return {name: self._time(part) for name, part in PARTS.items()}

    def _time(self, name: str) -> float:
        with suppress(OSError):
            return os.lstat(self.run.path / name).st_mtime
        return 0.0

    def _size(self, name: str) -> int:
        with suppress(OSError):
            return os.lstat(self.run.path / name).st_size
        return 0


class Watcher:
    """Follows the runs that at least one reader of the page watches."""

    def __init__(self, listing: Listing) -> None:
        self.listing = listing
        self.watched: dict[str, Watched] = {}

    def watch(self, names: set[str]) -> None:
        """Follow these runs from now on, and no others; unknown ones are left out."""
        self.watched = {name: one for name, one in self.watched.items() if name in names}
        fresh = names - self.watched.keys()
        if not fresh <= self.listing.entries.keys():
            self.listing.refresh()  # once, however many are unknown
        for name in fresh & self.listing.entries.keys():
            with suppress(Exception):  # as below
                self.watched[name] = Watched(name, self.listing.run(name))

    def look(self) -> Iterator[tuple[str | None, Event]]:
        """Events since the last look, each with the run that it is about; None: about the list."""
        changed, gone = self.listing.scan()
        if changed or gone:
            yield None, ("runs", {"rows": changed, "gone": gone})
        for name, one in list(self.watched.items()):
            entry = self.listing.entries.get(name)
            if entry is None:
                del self.watched[name]
                continue
            with suppress(Exception):  # whatever is in its files, nobody hears less of the other runs
                self.listing.run(name)  # refuses links, which may have come since
                for event in one.events(entry.row["state"]):
                    yield name, event


def _thinned(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return rows[:: 1 + len(rows) // MOST_ROWS]


def _columns(rows: list[dict[str, Any]]) -> dict[str, Any]:
    names = [name for row in rows for name, value in row.items() if number(value) is not None]
    return {name: numbers(column(rows, name)) for name in dict.fromkeys((*COUNTERS, *names))}
