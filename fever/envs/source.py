"""Finds and makes environments, given by an id, "module:Name", a class or a function; single or natively vectorised.

A wrong name, wrong arguments and missing packages raise FeverError with one sentence.
"""

from __future__ import annotations

import difflib
import functools
import inspect
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gymnasium as gym
from gymnasium.vector import VectorEnv

from fever.envs.local_folder import LOCAL_FOLDERS
from fever.envs.old_ids import find_current
from fever.envs.recovery import RAISE_AT_ONCE, FailureRules
from fever.envs.watchdog import Watch
from fever.errors import FeverError
from fever.plugins.names import import_attribute, import_module
from fever.plugins.user_code import message_of, sentence_of, user_code

EXTRAS = {"mujoco": "mujoco", "box2d": "box2d", "Box2D": "box2d", "pygame": "render", "ale_py": "atari"}
NAMELESS = re.compile(r"<\w+>|\(\.\.\.\)$")  # in names of lambdas, of what is inside functions, of partial functions


@dataclass(frozen=True)
class EnvSource:
    """Which environment: an id, "module:Name", a class or a factory function, and the arguments for it."""

    target: str | Callable[..., Any]
    kwargs: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Take a partial function apart into target and keyword arguments, if these can be written as JSON, and give an
        old id its current name and arguments. Refuse what makes no environments."""
        target = self.target
        if isinstance(target, gym.Env | VectorEnv) or not (isinstance(target, str) or callable(target)):
            raise FeverError(_not_a_source(target))
        if isinstance(target, functools.partial) and not target.args and _is_json(target.keywords):
            object.__setattr__(self, "kwargs", {**target.keywords, **self.kwargs})
            object.__setattr__(self, "target", target.func)
        if isinstance(target, str) and (current := find_current(target)) is not None and not _is_users(target):
            object.__setattr__(self, "kwargs", {**current.arguments, **self.kwargs})
            object.__setattr__(self, "target", current.id)

    @property
    def name(self) -> str:
        """The name in configurations and messages; `EnvSource(name)` is the same environment if it can be imported."""
        if isinstance(self.target, str):
            return self.target
        if isinstance(self.target, functools.partial):  # with arguments that a name does not show
            return f"{EnvSource(self.target.func).name}(...)"
        named = self.target if hasattr(self.target, "__qualname__") else type(self.target)
        return f"{named.__module__}:{named.__qualname__}"

    def resolve(self) -> tuple[Callable[..., Any] | None, gym.envs.registration.EnvSpec | None]:
        """Either a class or factory, or the specification of a registered id."""
        if not isinstance(self.target, str):
            return self.target, None
        module, _, name = self.target.rpartition(":")
        if NAMELESS.search(name) or (module == "__main__" and not hasattr(sys.modules["__main__"], name.split(".")[0])):
            raise FeverError(
                f"{self.target} is known only to the Python program that defined it; pass it again from there: "
                "fever.evaluate(run, env=...), or likewise fever.resume and fever.watch"
            )
        if module and not re.search(r"-v\d+$", name):
            return import_attribute(module, name), None
        if module:
            import_module(module)
        atari = _atari() if name.startswith("ALE/") else None
        if name not in gym.registry:
            raise FeverError(_unknown_environment(name))
        spec = gym.spec(name)
        return None, spec if atari is None else atari.prepare(spec, self.kwargs)

    @property
    def vectorized(self) -> bool:
        """Whether the environment is natively vectorised."""
        factory, spec = self.resolve()
        return spec.vector_entry_point is not None if spec is not None else is_vector_class(factory)

    @property
    def reward_threshold(self) -> float | None:
        """The return at which this environment counts as solved; None if its registration has none."""
        _, spec = self.resolve()
        return spec.reward_threshold if spec is not None else None


@dataclass(frozen=True)
class EnvContext:
    """Where an environment runs; passed to constructors that have these arguments."""

    worker_index: int = 0  # 0 in this process and for the first worker
    workdir: Path | None = None  # parent of the private folder of every environment
    render_mode: str | None = None
    failure_rules: FailureRules = RAISE_AT_ONCE

    @property
    def where(self) -> str:
        """ " of worker 1" in messages; empty for the first worker, which may be this process."""
        return f" of worker {self.worker_index}" if self.worker_index else ""

    def watch(self, name: str) -> Watch:
        """For the watchdog, with the limits in force."""
        return Watch(name, self.where, self.failure_rules.step_timeout, self.failure_rules.reset_timeout)


def _is_users(name: str) -> bool:
    """Whether the user has registered this id, and not Gymnasium or ALE."""
    spec = gym.registry.get(name)
    entry = spec.entry_point if spec is not None else None
    module = entry if isinstance(entry, str) else getattr(entry, "__module__", "gymnasium")
    return not module.startswith(("gymnasium", "ale_py"))


def make_env(source: EnvSource, context: EnvContext, index: int = 0) -> gym.Env:
    """Make one ordinary environment; the caller closes it."""
    factory, spec = source.resolve()
    if spec is not None:
        constructor = _entry_point(source, spec.entry_point)
        _check_arguments(source, constructor, "max_episode_steps")  # gym.make's own
        arguments = {**source.kwargs, **_context_arguments(source, constructor, context, index)}
        if context.render_mode is not None:
            arguments["render_mode"] = context.render_mode
        return _construct(source, lambda: gym.make(spec, disable_env_checker=True, **arguments))
    assert factory is not None
    _check_arguments(source, factory)
    arguments = {**source.kwargs, **_context_arguments(source, factory, context, index)}
    if context.render_mode is not None and "render_mode" in (_parameters(factory) or {}):
        arguments["render_mode"] = context.render_mode
    env = _construct(source, lambda: factory(**arguments))
    with user_code(f"{source.name} has no spaces"):
        complete = hasattr(env, "observation_space") and hasattr(env, "action_space")
    if not complete:
        raise FeverError(f"{source.name} made a {type(env).__name__}, which has no observation_space and action_space")
    return env


def make_vector_env(source: EnvSource, count: int, context: EnvContext) -> VectorEnv:
    """Make a natively vectorised environment; the caller closes it."""
    if "num_envs" in source.kwargs:
        raise FeverError(f"num_envs cannot be an argument of {source.name}; set the number of environments with --envs")
    factory, spec = source.resolve()
    if spec is not None:
        _check_arguments(source, _entry_point(source, spec.vector_entry_point))
        return _construct(
            source,
            lambda: gym.make_vec(spec, num_envs=count, vectorization_mode="vector_entry_point", **source.kwargs),
        )
    assert factory is not None
    _check_arguments(source, factory)
    arguments = {**source.kwargs, **_context_arguments(source, factory, context, 0)}
    return _construct(source, lambda: factory(num_envs=count, **arguments))


def make_any(source: EnvSource, context: EnvContext) -> Any:
    """Make one environment of either kind, to check that it works; the caller closes it."""
    return make_vector_env(source, 1, context) if source.vectorized else make_env(source, context)


def _not_a_source(target: Any) -> str:
    """The sentence about an environment that is made already, or anything else in place of what makes one."""
    if isinstance(target, gym.Env | VectorEnv):
        what = "env is an environment that exists already, and training makes its own"
        name = target.spec.id if target.spec is not None else "CartPole-v1"
    else:
        what, name = f"env={target!r} makes no environments", "CartPole-v1"
    return f'{what}; pass the id "{name}", a class, or a function: lambda: gym.make("{name}")'


def _is_json(values: dict[str, Any]) -> bool:
    """Whether these values can be written as JSON."""
    from pydantic_core import to_jsonable_python

    try:
        to_jsonable_python(values)
    except ValueError:
        return False
    return True


def _entry_point(source: EnvSource, entry: Any) -> Any:
    """The constructor behind a registered id."""
    load = gym.envs.registration.load_env_creator
    return _construct(source, lambda: load(entry)) if isinstance(entry, str) else entry


def _check_arguments(source: EnvSource, constructor: Any, *more: str) -> None:
    """Raise FeverError for arguments that the constructor does not have and `more` does not list."""
    parameters = _parameters(constructor)
    if parameters is None or any(one.kind is inspect.Parameter.VAR_KEYWORD for one in parameters.values()):
        return
    for name in source.kwargs:
        if name not in parameters and name not in more:
            raise FeverError(f"{source.name} has no argument {name}; it has: {', '.join(parameters) or 'none'}")


def _construct(source: EnvSource, make: Callable[[], Any]) -> Any:
    """Call a constructor; whatever it raises becomes a FeverError."""
    try:
        return make()
    except (ImportError, gym.error.DependencyNotInstalled) as error:
        raise FeverError(_missing_package(source.name, error)) from error
    except gym.error.Error as error:
        raise FeverError(f"{source.name} cannot be made: {error}") from error
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a user's constructor may raise anything, sys.exit() included
        given = f" with the arguments {source.kwargs}" if source.kwargs or "missing" in message_of(error) else ""
        raise FeverError(f"{source.name} cannot be made{given}: {sentence_of(error)}") from error


def _missing_package(name: str, error: Exception) -> str:
    text = str(error).strip().rstrip(".")
    for word, extra in EXTRAS.items():
        if word in text:
            return f'{name} needs a package that is not installed; install it with: pip install "fever[{extra}]"'
    return f"{name} needs a package that is not installed: {text}"


def _unknown_environment(name: str) -> str:
    if name.startswith("ALE/") and not any(known.startswith("ALE/") for known in gym.registry):
        return f'{name} needs the Atari environments; install them with: pip install "fever[atari]"'
    lowered = {known.lower(): known for known in gym.registry}
    close = [lowered[match] for match in difflib.get_close_matches(name.lower(), lowered, n=3, cutoff=0.5)]
    same = [known for known in gym.registry if known.lower().rpartition("-v")[0] == name.lower().rpartition("-v")[0]]
    names = list(dict.fromkeys(same[::-1] + close))[:3]
    hint = f"; did you mean {' or '.join(names)}?" if names else ""
    return f'there is no environment {name}{hint} (an environment of your own is written as "module:Name")'


def _atari() -> Any:
    """The module that registers ALE's environments; None without ale-py."""
    try:
        from fever.envs import atari
    except ModuleNotFoundError:
        return None
    return atari


def is_vector_class(factory: Any) -> bool:
    factory = factory.func if isinstance(factory, functools.partial) else factory
    return inspect.isclass(factory) and issubclass(factory, VectorEnv)


def _parameters(constructor: Any) -> Mapping[str, inspect.Parameter] | None:
    """The parameters of a constructor; None if it has no signature, as some written in C."""
    try:
        return inspect.signature(constructor).parameters
    except (TypeError, ValueError):
        return None


def _context_arguments(source: EnvSource, constructor: Any, context: EnvContext, index: int) -> dict[str, Any]:
    """Those of worker_index, env_index, workdir and scratch that the constructor has as parameters."""
    wanted = _parameters(constructor) or {}
    arguments: dict[str, Any] = {}
    if "worker_index" in wanted:
        arguments["worker_index"] = context.worker_index
    if "env_index" in wanted:
        arguments["env_index"] = index
    if "workdir" in wanted and context.workdir is not None:
        folder = context.workdir / f"worker-{context.worker_index}-env-{index}"
        folder.mkdir(parents=True, exist_ok=True)
        arguments["workdir"] = folder
    if "scratch" in wanted and "scratch" not in source.kwargs:
        name = f"worker-{context.worker_index}-env-{index}"
        arguments["scratch"] = LOCAL_FOLDERS.make((context.workdir, context.worker_index, index), name)
    return arguments
