"""Ray Tune's callback in the driver: records trials, updates the display, passes signals on."""

from __future__ import annotations

import json
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from ray.tune import Callback as TuneCallback

from fever.errors import FeverError, RayLost, TrainingError
from fever.runs.disk import Appender
from fever.sampling.ray_cluster import Cluster
from fever.signals import Interrupts
from fever.tune import records
from fever.tune.records import FAILED, FINISHED, RUNNING, STOPPED, WAITING, Record
from fever.tune.space import Space
from fever.tune.table import SearchDisplay

LOOK_SECONDS = 1.0  # between two looks at Ray's processes
LEAVE_SECONDS = 10.0  # for Ray Tune to end after Ray has died


@contextmanager
def ending_with_ray(cluster: Cluster, end: Callable[[RayLost], None]) -> Iterator[None]:
    """Call `end`, which ends the process, if Ray dies and the block is not left soon: without Ray, Ray Tune waits for
    ever, or in C code, where no signal is heard."""
    over = threading.Event()

    def look() -> None:
        while not over.wait(LOOK_SECONDS):
            try:
                cluster.check()
            except RayLost as error:
                if not over.wait(LEAVE_SECONDS):
                    end(error)
                return

    thread = threading.Thread(target=look, name="ray", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


class Watcher(TuneCallback):
    """Called by Ray Tune in the process of the driver, between its steps."""

    def __init__(
        self, space: Space, file: Appender, display: SearchDisplay, interrupts: Interrupts, cluster: Cluster
    ) -> None:
        """`file`: the table of trials that have ended."""
        self.space, self.file, self.display, self.interrupts = space, file, display, interrupts
        self.cluster = cluster
        self.written = records.read(file.path)
        self.records: dict[int, Record] = dict(self.written)
        self.handler = signal.getsignal(signal.SIGUSR1)
        self.end: Any = None  # Ray Tune's signal handler: saves its state and stops

    def __getstate__(self) -> dict[str, Any]:
        """Nothing is pickled with Ray Tune's state: terminals and signals belong to this process."""
        return {}

    def setup(self, *arguments: Any, **info: Any) -> None:
        """Restore the signal handler that Ray Tune has just replaced; `on_step_end` calls its handler."""
        if threading.current_thread() is threading.main_thread():
            self.end = signal.getsignal(signal.SIGUSR1)
            signal.signal(signal.SIGUSR1, self.handler)

    def on_step_end(self, iteration: int, trials: list[Any], **info: Any) -> None:
        for trial in trials:
            known = self.records.get(int(str(trial)))
            if known is None or (known.state == RUNNING and trial.status == "PAUSED"):
                self._set(trial, state=WAITING)
        self.cluster.check()
        self.display.update(list(self.records.values()))
        if self.file.waiting:
            self.file.write(b"")  # the disk was full, and perhaps no other trial ends soon
        if self.interrupts.pending and self.end is not None:
            self.end(signal.SIGUSR1, None)

    def on_trial_start(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        self._set(trial, state=RUNNING, error=None)

    def on_trial_result(
        self, iteration: int, trials: list[Any], trial: Any, result: dict[str, Any], **info: Any
    ) -> None:
        self._set(
            trial,
            state=RUNNING,
            score=result["score"],
            return_mean=result["return_mean"],
            steps=result["steps"],
            seconds=result["seconds"],
            host=result["hostname"],
            copied=json.loads(result["copied"]),
        )

    def on_trial_complete(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        self._over(trial, FINISHED if trial.last_result.get("finished") else STOPPED)

    def on_trial_error(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        self._over(trial, FAILED, read_error(trial))

    def _over(self, trial: Any, state: str, error: str | None = None) -> None:
        record = self._set(trial, state=state, error=error)
        if self.written.get(record.number) != record:  # a resumed search may report it again
            self.written[record.number] = record
            records.append(self.file, record)
        self.display.ended(record)

    def _set(self, trial: Any, **changes: Any) -> Record:
        number, settings = int(str(trial)), self.space.settings(trial.config)
        record = self.records.get(number) or Record(number, settings)
        self.records[number] = record = replace(record, settings=settings, **changes)
        return record


def read_error(trial: Any) -> str:
    """Why a trial failed, as one sentence, from the files that Ray Tune has just written."""
    import ray.cloudpickle
    from ray.exceptions import RayActorError, RayTaskError

    try:
        error = ray.cloudpickle.loads(Path(trial.pickled_error_file).read_bytes())
    except Exception:  # noqa: BLE001 - a class that cannot be unpickled, or no file
        text = Path(trial.error_file).read_text().strip() if trial.error_file else "unknown"
        return text.splitlines()[-1]
    if isinstance(error, RayActorError):
        return "its process died"
    cause = error.cause if isinstance(error, RayTaskError) and error.cause is not None else error
    if isinstance(cause, (FeverError, TrainingError)):
        return " ".join(str(cause).split())
    return f"{type(cause).__name__}: {' '.join(str(cause).split())}"
