"""What all experiment trackers have in common: a thread of its own sends everything, so that training never waits.

If the tracker cannot be reached, the rows are kept and sent later; log.txt says so once. No error ends the training.
"""

from __future__ import annotations

import logging
import os
import queue
import re
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fever import layout
from fever.config import RunConfig
from fever.files import read_json, write_atomically
from fever.runs.run import Run
from fever.training.callbacks import Callback, TrainingInfo

MOST_ROWS = 10_000  # that wait to be sent; the oldest are dropped
RETRY_SECONDS = 10.0  # after an error
END_SECONDS = 60.0  # that the end of a training waits for what has not been sent,
UNREACHED_SECONDS = 10.0  # or if the tracker was never reached
SEED = re.compile(r"[-_.]?(seed|s)[-_.]?\d+$")  # at the end of a run's name
SECRET_VARIABLE = re.compile(r"KEY|TOKEN|PASSWORD|SECRET|CREDENTIAL")

Row = tuple[int, dict[str, float]]  # environment steps, metrics


@dataclass(frozen=True)
class Ending:
    """What is sent at the end."""

    summary: dict[str, Any]  # the content of summary.json; empty if there is none
    best: Path | None  # the folder of the best checkpoint
    videos: list[Path]

    @property
    def failed(self) -> bool:
        return self.summary.get("stop_reason", "failed") == "failed"


class Logger(Callback):
    """Sends a run to an experiment tracker. A subclass has the three calls to the tracker, which run in the thread."""

    tracker = ""  # its name

    def begin(self, config: RunConfig, run: Run) -> None:
        """Begin, or continue, the tracker's run."""
        raise NotImplementedError

    def write(self, rows: list[Row]) -> None:
        """Send some rows."""
        raise NotImplementedError

    def end(self, ending: Ending) -> None:
        """Send the rest, and end the tracker's run."""
        raise NotImplementedError

    # the trainer's side

    def on_start(self, info: TrainingInfo) -> None:
        self.rows: queue.SimpleQueue[Row | Ending] = queue.SimpleQueue()
        self.ending = threading.Event()
        self.warned = self.begun = False
        self.thread = threading.Thread(target=self._send, args=(info.config, info.run), name=self.tracker, daemon=True)
        self.thread.start()

    def on_iteration(self, info: TrainingInfo) -> None:
        numbers = {name: value for name, value in info.metrics.items() if isinstance(value, (int, float))}
        self.rows.put((info.steps, numbers))

    def on_stop(self, info: TrainingInfo) -> None:
        found = info.run.checkpoints()
        best = info.run.checkpoint("best").path if found else None
        found_videos = (info.run.path / layout.VIDEOS).glob("[!.]*")
        videos = sorted(path for path in found_videos if path.is_file() and not path.is_symlink())
        self.rows.put(Ending(info.summary or {}, best, videos))
        self.ending.set()
        seconds = END_SECONDS if self.begun else UNREACHED_SECONDS
        self.thread.join(seconds)
        if self.thread.is_alive():
            logging.warning("%s did not receive everything within %g s", self.tracker, seconds)

    # the thread's side

    def _send(self, config: RunConfig, run: Run) -> None:
        """Send rows as they come, all that wait in one call, until the end."""
        waiting: list[Row] = []
        ending: Ending | None = None
        while ending is None:
            item = self.rows.get()
            while not isinstance(item, Ending):
                waiting.append(item)
                if self.rows.empty():
                    break
                item = self.rows.get()
            ending = item if isinstance(item, Ending) else None
            del waiting[:-MOST_ROWS]
            try:
                if not self.begun:
                    self.begin(config, run)
                    self.begun = True
                self.write(waiting)
                waiting = []
                if ending is not None:
                    self.end(ending)
            except Exception as error:  # noqa: BLE001 - a tracker may raise anything, and training goes on
                self._warn(error, last=ending is not None)
                self.ending.wait(RETRY_SECONDS)

    def _warn(self, error: Exception, last: bool) -> None:
        """Say that something was not sent: the first time, and at the end."""
        if last or not self.warned:
            self.warned = True
            what = f"{type(error).__name__}: {redact(str(error))}"
            logging.warning("%s cannot be reached; training goes on: %s", self.tracker, what)

    # the tracker's id of the run, by which a resumed run continues it

    def read_id(self, run: Run) -> str | None:
        path = self._id_file(run)
        return read_json(path)["id"] if path.is_file() else None

    def write_id(self, run: Run, identity: str) -> None:
        path = self._id_file(run)
        path.parent.mkdir(exist_ok=True)
        write_atomically(path, f'{{"id": "{identity}"}}\n')

    def _id_file(self, run: Run) -> Path:
        return run.path / layout.TRACKERS / f"{self.tracker}.json"


def group_of(config: RunConfig, run: Run) -> str:
    """What runs that differ in their seeds alone have in common: the search that they are trials of, or environment,
    algorithm and the run's name without its seed."""
    if run.path.parent.name == layout.TRIALS:
        return run.path.parent.parent.name
    name = SEED.sub("", config.name or "")
    return f"{config.stem}-{name}" if name else config.stem


def name_of(run: Run) -> str:
    """The run's name; that of a trial begins with its search's."""
    if run.path.parent.name == layout.TRIALS:
        return f"{run.path.parent.parent.name}-{run.path.name}"
    return run.path.resolve().name


def redact(text: str) -> str:
    """The text without passwords in URLs and without the values of variables such as WANDB_API_KEY."""
    text = re.sub(r"://[^/@\s]+@", "://***@", text)
    for name, value in os.environ.items():
        if SECRET_VARIABLE.search(name) and len(value) >= 6:
            text = text.replace(value, "***")
    return text
