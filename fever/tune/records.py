"""The results of a search: a row for every trial, the best settings, the summary."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from fever import layout
from fever.config import RunConfig
from fever.files import read_lines, write_atomically
from fever.runs.disk import Appender
from fever.runs.run import to_yaml

WAITING, RUNNING, FINISHED, STOPPED, FAILED = "waiting", "running", "finished", "stopped early", "failed"


@dataclass(frozen=True)
class Record:
    """What is known about one trial."""

    number: int
    settings: dict[str, Any]
    state: str = WAITING
    score: float | None = None
    return_mean: float | None = None
    steps: int = 0  # of all its seeds
    seconds: float = 0.0  # of training
    host: str = ""
    error: str | None = None  # one sentence
    copied: list[int] = field(default_factory=list)  # numbers of the trials that it continued from copies of

    @property
    def over(self) -> bool:
        return self.state in (FINISHED, STOPPED, FAILED)


def append(file: Appender, record: Record) -> None:
    """Append the row of a trial that has ended; on a full disk it waits."""
    file.write(f"{json.dumps(asdict(record))}\n".encode())


def read(path: Path) -> dict[int, Record]:
    """Trials by number. The last row of a trial counts; a line that a kill has cut off is skipped."""
    found = {}
    for row in read_lines(path):
        with suppress(TypeError):  # of another version
            record = Record(**row)
            found[record.number] = record
    return found


def ranked(records: Iterable[Record]) -> list[Record]:
    """The best first: finished trials, running ones, those stopped early, those without a score, failed ones."""
    order = {FINISHED: 0, RUNNING: 1, WAITING: 1, STOPPED: 2, FAILED: 4}

    def place(record: Record) -> tuple[int, float, int]:
        if record.score is None:
            return max(3, order[record.state]), 0.0, record.number
        return order[record.state], -record.score, record.number

    return sorted(records, key=place)


def best_of(records: Iterable[Record]) -> Record | None:
    """The trial with the highest score; one that was stopped early only if none has finished."""
    candidates = [one for one in records if one.state in (FINISHED, STOPPED) and one.score is not None]
    return ranked(candidates)[0] if candidates else None


def commonest_error(records: Iterable[Record]) -> str:
    """The most frequent error of failed trials."""
    errors = Counter(one.error for one in records if one.error)
    return str(errors.most_common(1)[0][0]) if errors else "no error was recorded"


def write_best(path: Path, config: RunConfig, best: Record) -> None:
    """Write the configuration of a run with the best settings, for `fever train -f`. It leaves `workers` open if trials
    had none, because a run alone may use more cores than one of many."""
    config = config.model_copy(update={"settings": {**config.settings, **best.settings}})
    without = ["search", "name", "runs"] + ([] if config.workers else ["workers"])
    write_atomically(path, to_yaml(config, without))


def summarise(path: Path, config: RunConfig, records: list[Record], reason: str) -> dict[str, Any]:
    """The summary of a search, as far as it follows from its trials."""
    best = best_of(records)
    states = Counter(one.state for one in records)
    return {
        "run": str(path),
        "env": config.env,
        "algo": config.algo,
        "stop_reason": reason,
        "trials": sum(one.over for one in records),
        "failed": states[FAILED],
        "stopped_early": states[STOPPED],
        "steps": sum(one.steps for one in records),
        "best": best and {"trial": best.number, "score": best.score, "settings": best.settings},
        "best_file": str(path / layout.BEST) if best else None,
        "picture": str(path / layout.PICTURE) if any(one.over for one in records) else None,
    }
