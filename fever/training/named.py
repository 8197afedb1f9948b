"""Callbacks that a configuration names: `module:Name`, or `module:Name={"size": 3}` with arguments."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

from fever.config import RunConfig
from fever.errors import FeverError
from fever.plugins.names import import_name
from fever.plugins.user_code import message_of
from fever.training.callbacks import Callback

LOGGERS = {  # named as text, because they import the trackers' libraries
    "wandb": "fever.training.loggers.wandb:Wandb",
    "mlflow": "fever.training.loggers.mlflow:Mlflow",
}
SECRET = re.compile(r"(?i)(api_?key|token|password|secret|credentials?)$")  # names of arguments that are not kept


def make_callbacks(config: RunConfig) -> list[Callback]:
    """Make the callbacks that a configuration names. Raises FeverError for what cannot be found or made."""
    return [_make(word) for word in config.callbacks]


def make_loggers(config: RunConfig) -> list[Callback]:
    """Make the loggers of experiment trackers. Raises FeverError if a library is missing, or nobody is logged in."""
    return [import_name(LOGGERS[name])() for name in config.loggers]


def find_callback(word: str) -> tuple[str, Callable[..., Any], dict[str, Any]]:
    """Name, class or factory, and arguments of a callback; it is not called."""
    name, equals, text = word.partition("=")
    if ":" not in name:
        raise FeverError(f"callback {word}: write it as module:Name, or with arguments as module:Name={{...}}")
    arguments = _arguments(name, text) if equals else {}
    try:
        return name, import_name(name), arguments
    except FeverError as error:
        raise FeverError(f"callback {name}: {error}") from error


def _arguments(name: str, text: str) -> dict[str, Any]:
    try:
        values = json.loads(text, object_hook=lambda values: _without_secrets(name, values))
    except (ValueError, RecursionError) as error:
        raise FeverError(f"callback {name}: its arguments {text[:1000]!r} are not JSON: {error}") from None
    if not isinstance(values, dict):
        raise FeverError(f'callback {name}: its arguments {text!r} must be a JSON object such as {{"size": 5}}')
    return values


def _without_secrets(name: str, values: dict[str, Any]) -> dict[str, Any]:
    """These arguments. Raises FeverError if one looks secret: config.yaml and facts.json would show it."""
    for argument in values:
        if SECRET.search(argument):
            raise FeverError(
                f"callback {name}: {argument} looks secret; have the callback read it from an environment variable"
            )
    return values


def _make(word: str) -> Callback:
    name, factory, arguments = find_callback(word)
    try:
        callback = factory(**arguments)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # the user's code may raise anything, sys.exit() included
        raise FeverError(f"callback {name} cannot be made: {type(error).__name__}: {message_of(error)}") from error
    if not isinstance(callback, Callback):
        kind = f"the class {callback.__name__}" if isinstance(callback, type) else f"a {type(callback).__name__}"
        raise FeverError(f"callback {name} gives {kind}, which is no object of fever.training.callbacks.Callback")
    return callback
