"""fever: trains deep-reinforcement-learning agents with one command, on one machine or many.

The functions below are in `fever.api`, which is imported when one of them is used first: `import fever` is cheap.
"""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fever.api import evaluate, load, plot, resume, runs, train, tune, watch

__version__ = "0.1.0"
__all__ = ["__version__", "evaluate", "load", "plot", "resume", "runs", "train", "tune", "watch"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module("fever.api"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


class _CallablePackage(ModuleType):
    """A package that has the name of a function in `fever.api`. Importing a package binds its name here, so the package
    itself is made to call the function."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return getattr(importlib.import_module("fever.api"), self.__name__.rpartition(".")[2])(*args, **kwargs)


for _name in ("runs", "tune"):
    importlib.import_module(f"fever.{_name}").__class__ = _CallablePackage
