"""The configuration that a run is resumed with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fever.config import RunConfig, validate
from fever.errors import FeverError
from fever.runs.run import Run


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
