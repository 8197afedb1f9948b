"""Evaluation during training, in environments that training never sees; and which policy is the best so far."""

from __future__ import annotations

import json
import math
import time
from pathlib import Path
from typing import Any

import numpy as np

from fever.algos.registry import find_provider
from fever.config import RunConfig
from fever.envs.contract import Envs
from fever.envs.recovery import Failure
from fever.envs.source import EnvContext, EnvSource
from fever.errors import FeverError
from fever.plugins.network import load_policy
from fever.policy import Params
from fever.policy.spaces import mismatch
from fever.runs.checkpoint import EVALUATION, TRAINING, Checkpoint, best_of
from fever.runs.player import Player
from fever.training.env_failures import failure_rules_of

SEED = 2_000_000  # of the episodes; `fever eval` plays others, on which no checkpoint was chosen
METRICS = {f"eval/{name}": name for name in ("return_mean", "return_std", "length_mean", "seconds")}
BEST_SHARE = 0.03  # of the time may go into saving checkpoints because their scores of training are the best so far


INSTEAD_IN_RLLIB = {  # field of a run -> what an algorithm of RLlib has in its place
    "eval_every": "has its own evaluation; switch it on with the setting evaluation_interval",
    "video_every": "is not filmed while it trains; film its checkpoints with fever watch",
    "step_timeout": "steps its environments itself; it has the setting sample_timeout_s",
    "reset_timeout": "resets its environments itself; it has the setting env_runner_health_probe_timeout_s",
    "max_env_failures": "makes environments anew itself; it has the setting restart_failed_sub_environments",
}


def check_own_loop(config: RunConfig) -> None:
    """Refuse what an algorithm of another library would ignore, because it has its own loop over environments."""
    if find_provider(config.algo) is None:
        return
    for name, instead in INSTEAD_IN_RLLIB.items():
        if getattr(config, name) != RunConfig.model_fields[name].default:
            raise FeverError(f"--{name.replace('_', '-')}: {config.algo} {instead}")


class Evaluation:
    """Plays `eval_episodes` episodes with the most likely actions every `eval_every` steps, in this process."""

    def __init__(self, config: RunConfig, source: EnvSource, policy: dict[str, Any], workdir: Path) -> None:
        """Make the environments, which stay open; `policy` is the policy's description, as in checkpoints."""
        assert config.eval_every is not None
        self.every, self.policy = config.eval_every, load_policy(policy, {})
        source = EnvSource(source.target, {**source.kwargs, **config.eval_env_kwargs})
        assert isinstance(config.workers, int)
        first = max(1, config.workers)  # no sampler begins with this index
        context = EnvContext(first, workdir, failure_rules=failure_rules_of(config))
        self.row: dict[str, Any] = {}  # of this iteration's evaluation, if there was one
        self.weights: Params = {}  # that were evaluated last
        self.player = Player(source, config.eval_episodes, SEED, context)
        try:
            self.player.reset()  # some show only then that they have action masks
            self._check(self.player.envs)
        except BaseException:
            self.player.close()
            raise

    def due(self, steps: int, before: int) -> bool:
        """Whether a multiple of `eval_every` steps was passed since the last evaluation, after `before` steps."""
        return steps // self.every > before // self.every

    def run(self, weights: Params) -> dict[str, Any]:
        """Evaluate these weights; returns the evaluation's row without the counters."""
        self.policy.params = self.weights = weights
        scores = self.player.play(self.policy)
        summary = scores.summary()
        return {
            **{name: summary[name] for name in ("return_mean", "return_interval", "return_std", "length_mean")},
            "returns": scores.returns.tolist(),
            "lengths": scores.lengths.tolist(),
            "distinct_starts": scores.distinct,
            "seconds": round(scores.seconds, 4),
        }

    @property
    def score(self) -> float | None:
        """The mean return of this iteration's evaluation; None if there was none."""
        return self.row["return_mean"] if self.row else None

    def drop_if_outdated(self, weights: Params) -> bool:
        """Drop the row if these weights are others than those evaluated; whether that was so."""
        if not self.row or all(np.array_equal(weights[name], value) for name, value in self.weights.items()):
            return False
        self.row = {}
        return True

    def _check(self, envs: Envs) -> None:
        made_for = self.policy.observation, self.policy.action
        if found := mismatch(made_for, (envs.observation, envs.action)):
            raise FeverError(f"evaluation's environment does not fit training's: it has {found}")

    def take_failures(self) -> list[Failure]:
        """The environments' failures since the last call."""
        return self.player.take_failures()

    def close(self) -> None:
        """Close the environments."""
        self.player.close()


class Best:
    """The score of the best checkpoint so far, and whether a better policy is to be saved at once."""

    def __init__(self, config: RunConfig) -> None:
        """Scores are of evaluations, if the run is evaluated. Those of evaluations with other arguments are others."""
        self.evaluates = config.eval_every is not None
        arguments = f" with {json.dumps(config.eval_env_kwargs, sort_keys=True)}" if config.eval_env_kwargs else ""
        self.kind = f"{EVALUATION}{arguments}" if self.evaluates else TRAINING
        self.score = -math.inf
        self.due = 0.0  # when a checkpoint may be saved again because of its score of training

    def is_beaten(self, score: float | None) -> bool:
        """Whether to save a policy with this score. One that an evaluation finds as good as the best is saved, too: it
        has learned for longer. Scores of training change all the time, so these are saved seldom enough."""
        if score is None:
            return False
        if self.evaluates:
            return score >= self.score
        return score > self.score and time.monotonic() >= self.due

    def saved(self, score: float | None, seconds: float) -> None:
        """A checkpoint with this score was written, which took so long."""
        self.score = max(self.score, score) if score is not None else self.score
        self.due = time.monotonic() + seconds / BEST_SHARE

    def restore(self, checkpoints: list[Checkpoint]) -> None:
        """Continue with the checkpoints of a run that is resumed."""
        best = best_of(checkpoints)
        if best is not None and best.score is not None and best.score_of == self.kind:
            self.score = best.score
