"""A row of the zoo under what the user has set: `with_preset`. Values of the user's always win."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

from fever.config import RunConfig
from fever.errors import FeverError
from fever.text import format_count
from fever.zoo.rows import Row, find_row, plain_id, written

SHOWN = 8  # values in the line that says what was taken


def find_preset(config: RunConfig, env: str, env_kwargs: dict[str, Any]) -> Row | None:
    """The row that a run takes; None without one, with plain defaults in it, if it is not measured, or if the user
    wants none. `env` and `env_kwargs` are the environment's as `EnvSource` has them: with the current id."""
    row = find_row(env, env_kwargs, config.algo, measured=True) if config.preset else None
    return row if row is not None and not row.plain else None


def taken(config: RunConfig, row: Row) -> dict[str, Any]:
    """What a configuration gets from a row: settings, and `envs`. With a network of the user's, no layers behind it."""
    own = {*config.settings, *(["envs"] if config.envs is not None else [])}
    own |= {"hidden"} if config.settings.get("network") is not None else set()
    return {name: value for name, value in row.values.items() if name not in own}


def with_preset(config: RunConfig, row: Row | None) -> RunConfig:
    """The configuration with a row's values under its own. A schedule of the row's gets the row's budget as its end, if
    the stop rules do not say one."""
    if row is None:
        return config
    settings = taken(config, row)
    changes: dict[str, Any] = {"envs": settings.pop("envs", config.envs), "settings": {**settings, **config.settings}}
    scheduled = any(name.endswith("_schedule") and value != "constant" for name, value in settings.items())
    if scheduled and _has_rules(config) and config.stop.steps is None:
        changes["stop"] = config.stop.model_copy(update={"steps": row.steps})
    return config.model_copy(update=changes)


def line(config: RunConfig, row: Row | None, env: str, without: Collection[str] = ()) -> str | None:
    """The sentence about what a configuration gets from a row; None if that is nothing. `without`: settings that a
    search samples."""
    if row is None:
        return None
    found = {name: value for name, value in taken(config, row).items() if name not in without}
    if not found:
        return None
    steps = with_preset(config, row).stop.steps
    end = f"; ends at {format_count(row.steps)} steps" if not _has_rules(config) or steps != config.stop.steps else ""
    values = written(found, SHOWN)
    return f"preset of the zoo for {plain_id(env)}, {config.algo}: {values}{end} (--no-preset: plain defaults)"


@contextmanager
def blames(row: Row | None, config: RunConfig) -> Iterator[None]:
    """Where the settings are checked together: a refusal that names a value of the row's says where that is from.
    `config` has the row's values under the user's."""
    try:
        yield
    except FeverError as error:
        found = {} if row is None else {**config.settings, "envs": config.envs}
        ours = {} if row is None else {name: one for name, one in row.values.items() if found.get(name) == one}
        named = {name: one for name, one in ours.items() if re.search(rf"\b{re.escape(name)}\b", str(error))}
        if not named:
            raise
        raise FeverError(
            f"{error} (the preset of the zoo has {written(named)}: set it as well, or leave the preset out with "
            "--no-preset)"
        ) from None


def _has_rules(config: RunConfig) -> bool:
    """Whether the user has set a stop rule."""
    return config.stop.or_default(None) is config.stop
