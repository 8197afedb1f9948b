"""What a checkpoint holds of a training, and how a resumed run continues with it."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING

from fever import layout
from fever.errors import FeverError
from fever.files import as_count
from fever.runs.checkpoint import WEIGHTS_PREFIX, Checkpoint, same_network
from fever.runs.run import Run
from fever.training.env_arguments import EnvArguments
from fever.training.evaluation import Best
from fever.training.progress import Progress

if TYPE_CHECKING:
    from fever.training.setup import Prepared


class TrainingState:
    """The learner, the counters, the best score and the environment's arguments of one training."""

    def __init__(self, prepared: Prepared, env: EnvArguments, progress: Progress, best: Best) -> None:
        self.prepared, self.env, self.progress, self.best = prepared, env, progress, best

    def write(self, run: Run, score: float | None) -> Path | None:
        """Write a checkpoint of a policy with this score. Returns its folder, or None if the disk has no room."""
        began = time.perf_counter()
        learner, config, files = self.prepared.learner, self.prepared.config, self.prepared.files
        state = learner.state()
        weights = {WEIGHTS_PREFIX + name: value for name, value in learner.weights().items()}
        manifest = {
            "env": self.env.source.name,
            "algo": config.algo,
            "iteration": self.progress.iteration,
            "steps": learner.steps,
            "score": score,
            "score_of": self.best.kind,
            "policy": self.prepared.policy,
            "algorithm": state.facts,
            "trainer": {**self.progress.state(), "env_changes": self.env.changes},
        }
        path = None
        with run.disk.writing("the last checkpoint"):
            arrays = {**state.arrays, **weights}
            path = run.save_checkpoint(arrays, manifest, config.checkpoint_keep, files.save if files else None)
        if path is not None:
            self.best.saved(score, time.perf_counter() - began)
        return path

    def restore(self, run: Run, checkpoint: Checkpoint) -> None:
        """Continue counters, optimiser, schedules, statistics and the learner's random stream from a checkpoint."""
        from fever.algos.base import State

        kept, now = checkpoint.field("policy", dict), self.prepared.policy
        checkpoint.check_spaces(now["observation"], now["action"], self.env.source.name)
        with checkpoint.reading("resumed"):
            same = same_network(kept, json.loads(json.dumps(now)))
        if not same:
            where = run.path / layout.CONFIG
            raise FeverError(f"{checkpoint.path} has another network; restore the network settings in {where}")
        arrays = checkpoint.arrays()
        weights = {k.removeprefix(WEIGHTS_PREFIX): arrays.pop(k) for k in [*arrays] if k.startswith(WEIGHTS_PREFIX)}
        learner = self.prepared.learner
        with checkpoint.reading("resumed"):
            self.progress.restore(checkpoint.iteration, checkpoint.field("trainer", dict))
            learner.restore(State(arrays, checkpoint.field("algorithm", dict)), weights)
            as_count(learner.steps)
            if self.prepared.files is not None:
                self.prepared.files.restore(checkpoint.files)
        self.best.restore([one for one in run.checkpoints() if one.iteration <= checkpoint.iteration])
        if reason := self.progress.stop_reason(learner.steps):
            how = f"raise it with --stop-{reason}, or give another rule"
            raise FeverError(f"{run.path} has met its stop rule ({reason}) already; {how}")
