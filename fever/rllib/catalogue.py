"""The algorithms of the installed RLlib, found by looking into its package."""

from __future__ import annotations

import difflib
import importlib
import inspect
import logging
import pkgutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from fever.algos.registry import without_prefix
from fever.errors import FeverError
from fever.job import current_job
from fever.sampling.ray_settings import apply_settings
from fever.training.logs import quiet_ray


def require_rllib() -> None:
    """Import RLlib, or say how to install it."""
    apply_settings(current_job())
    try:
        import ray.rllib  # noqa: F401
        import torch  # noqa: F401
    except ImportError as error:
        raise FeverError(
            'algorithms of RLlib need PyTorch and RLlib; install them with: pip install "fever[rllib]"'
        ) from error


@contextmanager
def silence() -> Iterator[None]:
    """Discard log records and warnings of RLlib. Those that matter come again when a run has a log file."""
    root = logging.getLogger()
    before, root.handlers = root.handlers, [logging.NullHandler()]
    try:
        with quiet_ray(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        root.handlers = before


def find_class(algo: str) -> Any:
    """The class of `rllib:NAME`, which is RLlib's own, or of `rllib:module:Name`. Raises FeverError."""
    require_rllib()
    from ray.rllib.algorithms.algorithm import Algorithm

    from fever.plugins.names import import_attribute

    module, _, name = without_prefix(algo).rpartition(":")
    with silence():
        found: Any = import_attribute(module, name) if module else _rllib_class(name)
    if not (inspect.isclass(found) and issubclass(found, Algorithm)):
        raise FeverError(f"{module}:{name} is not a subclass of RLlib's Algorithm")
    return found


def names() -> list[str]:
    """The names of all algorithms that the installed RLlib has, with fever's prefix: `rllib:PPO`."""
    require_rllib()
    return [f"rllib:{name}" for package in _packages() for name in _algorithms(package)]


def _rllib_class(name: str) -> Any:
    """RLlib's class of this name. Its package has the same name in lower case, so only one package is imported."""
    for package in _packages():
        if package == name.lower() and name in (found := _algorithms(package)):
            return found[name]
    known = names()
    close = {without_prefix(one).lower(): one for one in known}
    match = difflib.get_close_matches(name.lower(), close, n=1)
    hint = f"did you mean {close[match[0]]}? It" if match else "it"
    raise FeverError(f"RLlib has no algorithm {name}; {hint} has: {', '.join(known)}")


def _packages() -> list[str]:
    import ray.rllib.algorithms

    return [module.name for module in pkgutil.iter_modules(ray.rllib.algorithms.__path__) if module.ispkg]


def _algorithms(package: str) -> dict[str, Any]:
    """The algorithms that one of RLlib's packages defines, by name."""
    from ray.rllib.algorithms.algorithm import Algorithm

    with silence():
        module = importlib.import_module(f"ray.rllib.algorithms.{package}")
    return {
        name: value
        for name, value in vars(module).items()
        if inspect.isclass(value)
        and issubclass(value, Algorithm)
        and value.__module__.startswith(module.__name__)
        and value.__name__ == name  # no aliases
    }
