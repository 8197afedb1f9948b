"""A trial as Ray Tune runs it: an actor whose every step ends with a report, and which is reused for later trials."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any, ClassVar

from ray.train._internal.session import _TrainingResult
from ray.tune import Checkpoint, PlacementGroupFactory, Trainable

from fever.errors import TrainingError
from fever.job import JOB
from fever.sampling.ray_cluster import WORKER_VARIABLES

COMPILED = "JAX_COMPILATION_CACHE_DIR"  # most trials compile the same programs, which takes seconds
REPORT_SECONDS = 2.0  # for Ray Tune to receive the last report of a process
ONE_CORE = {
    **WORKER_VARIABLES,
    "PJRT_NPROC": "1",
}  # JAX and NumPy read these when they are imported


class TrialActor(Trainable):
    """Runs trials of one search; `for_search` makes the subclass that knows which.

    `save` and `restore` override Ray Tune's, which need a file system that all machines share.
    """

    packed: ClassVar[bytes]  # plan and environment, pickled: unpickling needs the search path
    places: ClassVar[list[str]]  # the driver's module search path
    bundles: ClassVar[list[dict[str, float]]]  # resources of a trial

    @classmethod
    def for_search(cls, packed: bytes, places: list[str], bundles: list[dict[str, float]]) -> type[TrialActor]:
        """The class of one search's trials."""
        return type("trial", (cls,), {"packed": packed, "places": places, "bundles": bundles})

    @classmethod
    def default_resource_request(cls, config: dict[str, Any]) -> PlacementGroupFactory:
        return PlacementGroupFactory(cls.bundles)

    def setup(self, config: dict[str, Any]) -> None:
        os.environ.pop(JOB, None)  # set for the driver, which stops Ray when it exits; a trial must not
        sys.path.extend(path for path in self.places if path not in sys.path)
        import ray.cloudpickle

        from fever.envs.watchdog import WATCHDOG
        from fever.signals import ignore_job_signals

        ignore_job_signals()
        WATCHDOG.on_stuck = self._give_up
        self.plan, self.source = ray.cloudpickle.loads(self.packed)
        self.folder = self.plan.folder.local()
        here = self.folder.store is None
        compiled = {COMPILED: self.plan.compiled if here else str(self.folder.root / "compiled")}
        for name, value in {**ONE_CORE, **compiled, "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.2"}.items():
            os.environ.setdefault(name, value)
        self._begin(config)

    def _begin(self, config: dict[str, Any]) -> None:
        from fever.tune.trial import Trial

        settings = self.plan.space.settings(config)
        self.trial = Trial(self.plan, self.folder, self.source, int(self.trial_name), settings)

    def step(self) -> dict[str, Any]:
        return self.trial.next()

    def _give_up(self, text: str) -> None:
        """Fail the trial because its environment is stuck; no signal interrupts the thread that trains. Then end the
        process: it can be used for no other trial."""
        self.trial.reports.put(TrainingError(text))
        time.sleep(REPORT_SECONDS)
        os._exit(1)

    def reset_config(self, new_config: dict[str, Any]) -> bool:
        self.trial.end()
        self._begin(new_config)
        return True

    def cleanup(self) -> None:
        self.trial.end()
        self.folder.close()

    def save(self, checkpoint_dir: str | None = None) -> _TrainingResult:
        """Copy the trial to where Ray Tune looks for it, on the driver's machine."""
        result: dict[str, Any] = dict(self._last_result or {})
        assert self._storage is not None
        self._storage._update_checkpoint_index(result)
        path = Path(self._storage.checkpoint_fs_path)
        copied = self.trial.copy(str(path.relative_to(self.plan.folder.root)))
        return _TrainingResult(Checkpoint(str(path)) if copied else None, result)

    def restore(self, checkpoint_path: Any) -> None:
        """Continue from what `save` returned, for this trial or for another."""
        self._iteration = checkpoint_path.metrics.get("training_iteration", 0)
        self._time_total = checkpoint_path.metrics.get("time_total_s", 0.0)
        path = Path(checkpoint_path.checkpoint.path)
        if path.is_relative_to(self.plan.folder.root):
            self.trial.adopt(str(path.relative_to(self.plan.folder.root)))
        self._restored = True
