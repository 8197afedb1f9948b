"""The environment's arguments, which callbacks may change while a run trains: a curriculum."""

from __future__ import annotations

import json
import logging
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from fever.config import RunConfig
from fever.envs.make import make_envs
from fever.envs.source import EnvContext, EnvSource
from fever.envs.watchdog import close_quietly
from fever.errors import FeverError
from fever.policy.spaces import mismatch
from fever.runs.checkpoint import Checkpoint
from fever.runs.run import Run
from fever.sampling.pool import Pool

TRIAL_WORKER = 1_000_000  # index of the worker that a trial environment believes to be in: no sampler has it
METRIC_PREFIX = "env/"  # of the metrics that show changed arguments


def kept_changes(config: RunConfig, run: Run, checkpoint: Checkpoint) -> dict[str, Any]:
    """The changes that callbacks had made when a checkpoint was written, without arguments that the run is now resumed
    with another value of."""
    before = run.config.env_kwargs
    changes = checkpoint.env_changes
    return {name: value for name, value in changes.items() if config.env_kwargs.get(name) == before.get(name)}


class EnvArguments:
    """The environment with the arguments in force; checkpoints keep `changes`, made since the run began."""

    def __init__(self, source: EnvSource, changes: dict[str, Any]) -> None:
        self.changes, self.first = changes, source  # the latter as the run began
        self.source = replace(source, kwargs={**source.kwargs, **changes})

    def change(self, changes: dict[str, Any], pool: Pool, policy: dict[str, Any]) -> bool:
        """Have the pool use these arguments from the next episodes on; returns whether any is new. `policy` has the
        spaces that must not change. Raises FeverError, and changes nothing, if the environment cannot be made with
        them: it is made once here, so that no worker fails later."""
        kwargs = {**self.source.kwargs, **changes}
        if kwargs == self.source.kwargs:
            return False
        try:
            changes = json.loads(json.dumps(changes, allow_nan=False))
        except (TypeError, ValueError) as error:
            raise FeverError(f"the environment's arguments must be what JSON can hold: {error}") from error
        source = replace(self.source, kwargs=kwargs)
        if not pool.can_change_env:
            raise FeverError("RLlib's algorithms cannot change the environment's arguments while they train")
        _try_once(source, policy)
        pool.change_env(kwargs)
        self.source, self.changes = source, {**self.changes, **changes}
        logging.info("the environment's arguments from the next episodes on: %s", json.dumps(self.changes))
        return True

    def metrics(self) -> dict[str, float]:
        """The arguments in force that were changed and are numbers."""
        numbers = {name: value for name, value in self.changes.items() if isinstance(value, (int, float))}
        return {METRIC_PREFIX + name: float(value) for name, value in numbers.items()}


def _try_once(source: EnvSource, policy: dict[str, Any]) -> None:
    """Make the environment once: it must be able to change its arguments, and have the spaces of the policy."""
    with tempfile.TemporaryDirectory(prefix="fever-") as folder:
        envs = make_envs(source, 1, EnvContext(TRIAL_WORKER, Path(folder)))
        try:
            envs.reset([0])  # some show only then that they have action masks
            if found := mismatch((policy["observation"], policy["action"]), (envs.observation, envs.action)):
                raise FeverError(f"{source.name} with {source.kwargs} does not fit the run: it has {found}")
            envs.change(source.kwargs)  # refused by those that cannot
        finally:
            close_quietly(source.name, envs.close, limited=True)
