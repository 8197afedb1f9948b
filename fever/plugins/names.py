"""Finds what `module:Name` names: an environment, an algorithm, a network, a callback of the user's."""

from __future__ import annotations

import difflib
import importlib
import traceback
from collections.abc import Callable
from typing import Any

from fever.errors import FeverError


def import_name(name: str) -> Callable[..., Any]:
    """The class or function that `module:Name` stands for. Raises FeverError if there is none."""
    module, _, attribute = name.rpartition(":")
    return import_attribute(module, attribute)


def import_attribute(module: str, name: str) -> Callable[..., Any]:
    """A class or function of a module; a dotted name is one within a class."""
    found = home = import_module(module)
    try:
        for part in name.split("."):
            found = getattr(found, part)
    except AttributeError as error:
        names = [key for key, value in vars(home).items() if callable(value) and key[0] != "_"]
        close = difflib.get_close_matches(name, names, n=3, cutoff=0.4)
        hint = f"; did you mean {' or '.join(close)}?" if close else ""
        raise FeverError(f"module {module} has no {name}{hint}") from error
    if not callable(found):
        raise FeverError(f"{module}:{name} is neither a class nor a factory function")
    return found


def import_module(module: str) -> Any:
    """A module by name. Raises FeverError if it does not exist or cannot be imported, with the line that failed."""
    if not all(part.isidentifier() for part in module.split(".")):
        raise FeverError(f"{module!r} is not the name of a module")
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is not None and (module == error.name or module.startswith(f"{error.name}.")):
            raise FeverError(
                f"there is no module {module} here; start fever in the folder that has it, or install it"
            ) from error
        raise FeverError(f"module {module} cannot be imported: {error}{_place(error)}") from error
    except SyntaxError as error:
        where = f"line {error.lineno} of {error.filename}"
        raise FeverError(f"module {module} cannot be imported: {error.msg} ({where})") from error
    except (Exception, SystemExit) as error:
        what = f"{type(error).__name__}: {error}"
        raise FeverError(f"module {module} cannot be imported: {what}{_place(error)}") from error


def _place(error: BaseException) -> str:
    """Where an import failed: the innermost line of a module's own; empty if there is none."""
    lines = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.name == "<module>"]
    return f" (line {lines[-1].lineno} of {lines[-1].filename})" if lines else ""
