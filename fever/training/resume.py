"""A run that is resumed: with which configuration, from which checkpoint."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fever.config import RunConfig, validate
from fever.envs.source import EnvSource
from fever.errors import FeverError
from fever.runs.run import Run
from fever.runs.trust import names_to_train
from fever.training.callbacks import Callback
from fever.training.display import Display
from fever.training.result import Result
from fever.training.trainer import Trainer


def resumed_config(
    run: Run,
    stop: Mapping[str, Any],
    changes: Mapping[str, Any],
    checkpoint: str,
    what: str,
    typed: Mapping[str, str] | None = None,
) -> tuple[RunConfig, list[str]]:
    """A run's configuration with new stop rules and other changes, and the names of old rules that were dropped
    because the checkpoint has met them.

    `what` and `typed` are for messages, as in `validate`. Raises `FeverError` for a rule or value that cannot be used.
    """
    if not isinstance(stop, Mapping):
        raise FeverError(f"{what}: stop={stop!r} cannot be used: must be a mapping")
    rules = {"time" if name == "seconds" else name: value for name, value in stop.items()}
    values = run.config.model_dump(mode="json")
    values["stop"] |= rules
    config = validate(RunConfig, {**values, **changes}, what, typed)
    left, dropped = run.drop_met(config.stop, rules, checkpoint)
    return config.model_copy(update={"stop": left}), dropped


def resume(
    run: Run,
    config: RunConfig,
    which: str = "last",
    source: EnvSource | None = None,
    display: Display | None = None,
    callbacks: Sequence[Callback] = (),
    trust: bool = False,
) -> Result:
    """Continue a run from a checkpoint with its configuration, whose stop rules may have changed. A checkpoint that
    holds pickles is read, and what a run from elsewhere names is imported, only if `trust` is set. Whoever gives
    `source` has seen to that of the environment. A run that was killed before its first checkpoint begins again."""
    display = display or Display()
    run = Run(run.path.absolute(), run.trusted or trust)  # the environment may change the working folder
    checkpoint = run.checkpoint(which) if run.saved or which != "last" else None
    if checkpoint is not None:
        checkpoint.require(run.trusted)
    run.require_trust(name for name in names_to_train(config) if source is None or name != config.env)
    run.trusted = True
    if checkpoint is None:
        display.message(f"{run.path} has no checkpoint: it begins again from its configuration")
    elif checkpoint.note:
        display.message(f"{checkpoint.note}; resuming from {checkpoint.name}")
    return Trainer(config, source, display, callbacks, run, checkpoint).run()
