"""Finds what `module:Name` names: an environment, an algorithm, a network, a callback of the user's."""

from __future__ import annotations

import difflib
import functools
import importlib
import sys
from collections.abc import Callable
from typing import Any

from fever.errors import FeverError
from fever.plugins.user_code import place_of, sentence_of

INSTALLERS = frozenset({"pip", "pkg_resources", "setuptools", "uv", "wheel"})
NOT_USER_CODE = (
    "part of Python or of its package installers, which have no environments, networks, algorithms or callbacks; if it "
    "is yours, rename it"
)


def import_name(name: str) -> Callable[..., Any]:
    """The class or function that `module:Name` stands for. Raises FeverError if there is none."""
    module, _, attribute = name.rpartition(":")
    return import_attribute(module, attribute)


def import_attribute(module: str, name: str) -> Callable[..., Any]:
    """A class or function of a module; a dotted name is one within a class. What the module has itself imported from
    the standard library is refused, so `my_module:system` cannot be `os.system`."""
    found = home = import_module(module)
    try:
        for part in name.split("."):
            if found is not home and not isinstance(found, type):
                raise FeverError(f"{module}:{name} is not in {module}: a dotted name is one within a class")
            found = getattr(found, part)
    except AttributeError as error:
        names = [key for key, value in vars(home).items() if callable(value) and key[0] != "_"]
        close = difflib.get_close_matches(name, names, n=3, cutoff=0.4)
        hint = f"; did you mean {' or '.join(close)}?" if close else ""
        raise FeverError(f"module {module} has no {name}{hint}") from error
    except FeverError:
        raise
    except Exception as error:  # of a module's own __getattr__
        raise FeverError(f"{module}:{name} cannot be looked up: {sentence_of(error)}") from error
    if not callable(found):
        raise FeverError(f"{module}:{name} is neither a class nor a factory function")
    if _is_foreign(_owner(found)):
        raise FeverError(f"{module}:{name} is {NOT_USER_CODE}")
    return found


def _owner(found: Any) -> str:
    """The module that a class, a function or an object that can be called was written in."""
    while isinstance(found, functools.partial | functools.partialmethod):
        found = found.func
    return str(getattr(found, "__module__", None) or type(found).__module__)


def _is_foreign(module: str) -> bool:
    """Whether a module is Python's own, or an installer: neither has environments, networks, algorithms, callbacks."""
    return module.partition(".")[0] in sys.stdlib_module_names | INSTALLERS


def import_module(module: str) -> Any:
    """A module by name. Raises FeverError if it does not exist or cannot be imported, with the line that failed."""
    if not all(part.isidentifier() for part in module.split(".")):
        raise FeverError(f"{module!r} is not the name of a module")
    if _is_foreign(module):
        raise FeverError(f"module {module} is {NOT_USER_CODE}")
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is not None and (module == error.name or module.startswith(f"{error.name}.")):
            raise FeverError(
                f"there is no module {module} here; start fever in the folder that has it, or install it"
            ) from error
        raise FeverError(f"module {module} cannot be imported: {error}{place_of(error)}") from error
    except SyntaxError as error:
        raise FeverError(f"module {module} cannot be imported: {error.msg}{place_of(error)}") from error
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # sys.exit() in a script without a main guard, for example
        raise FeverError(f"module {module} cannot be imported: {sentence_of(error)}") from error
