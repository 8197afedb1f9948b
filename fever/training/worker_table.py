"""What every worker does, for whoever watches the run: `workers.json`, written about once a second."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from fever import layout
from fever.files import write_atomically
from fever.sampling.spec import Report
from fever.training.callbacks import Callback, TrainingInfo

if TYPE_CHECKING:
    from fever.training.trainer import Trainer

PAUSE_SECONDS = 1.0  # between two writes
STEADY = 0.5  # weight of what was before, in speeds: one look may see half an iteration of a worker


@dataclass
class Worker:
    """One worker since this process began."""

    host: str
    cores: str = ""  # that it is bound to
    steps: int = 0
    episodes: int = 0
    heard: float = 0.0  # when its last report came, in time.time()
    version: int = 0  # of the weights that it acted with
    seconds: dict[str, float] = field(default_factory=lambda: {"env": 0.0, "inference": 0.0, "total": 0.0})
    written: tuple[float, int] = (0.0, 0)  # when it was written last, and its steps then
    rate: float = 0.0  # steps per second

    def update_rate(self, now: float) -> None:
        before, steps = self.written
        latest = (self.steps - steps) / max(now - before, 1e-9)
        self.rate = latest if not self.rate else STEADY * self.rate + (1 - STEADY) * latest
        self.written = now, self.steps


class WorkerTable:
    """The workers of a run, by their index."""

    def __init__(self) -> None:
        self.began = time.time()
        self.workers: dict[int, Worker] = {}
        self.newest = 0  # version of weights

    def add(self, report: Report) -> None:
        """Count what a worker did in one call."""
        worker = self.workers.get(report.worker_index)
        if worker is None:
            worker = self.workers[report.worker_index] = Worker(report.host, written=(self.began, 0))
        worker.host, worker.heard, worker.version = report.host, time.time(), report.version
        worker.cores = report.cores
        worker.steps += report.steps
        worker.episodes += len(report.episodes)
        for name in worker.seconds:
            worker.seconds[name] += report.seconds.get(name, 0.0)
        self.newest = max(self.newest, report.version)

    def describe(self, replaced: Callable[[int], int], newest: int = 0, over: bool = False) -> dict[str, Any]:
        """The content of the file; `replaced(index)` is how often a worker was replaced, `newest` the version of the
        weights that were sent out last. Once the training is `over`, speeds are what they were."""
        self.newest = max(self.newest, newest)
        now, rows = time.time(), []
        for index, worker in sorted(self.workers.items()):
            if not over:
                worker.update_rate(now)
            total = worker.seconds["total"] or 1.0
            rows.append({
                "worker": index, "host": worker.host, "cores": worker.cores,
                "steps": worker.steps, "episodes": worker.episodes,
                "steps_per_second": round(worker.rate, 1), "heard": round(worker.heard, 3),
                "weights_behind": self.newest - worker.version, "restarts": replaced(index),
                "time_env": round(worker.seconds["env"] / total, 4),
                "time_inference": round(worker.seconds["inference"] / total, 4),
            })  # fmt: skip
        return {"written": round(now, 3), "workers": rows}


class WorkerFile(Callback):
    """Writes the table about once a second, and at the end."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer
        self.due = 0.0

    def on_iteration(self, info: TrainingInfo) -> None:
        if time.monotonic() >= self.due:
            self.due = time.monotonic() + PAUSE_SECONDS
            self._write(info)

    def on_stop(self, info: TrainingInfo) -> None:
        if info.run.path.is_dir():
            self._write(info, over=True)

    def _write(self, info: TrainingInfo, over: bool = False) -> None:
        pool, table = self.trainer.pool, self.trainer.progress.workers
        if pool is None or not table.workers or not info.run.disk.ready():
            return
        with info.run.disk.writing(layout.WORKERS):
            text = json.dumps(table.describe(pool.replaced, pool.version, over))
            write_atomically(info.run.path / layout.WORKERS, text + "\n", fsync=False)
