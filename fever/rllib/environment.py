"""Makes environments for RLlib, with one agent or several, from the same names, classes and factories as fever's."""

from __future__ import annotations

import inspect
import itertools
import os
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np

from fever.envs.contract import describe_space
from fever.envs.source import EnvContext, EnvSource, is_vector_class, make_env
from fever.envs.watchdog import close_quietly
from fever.errors import FeverError
from fever.plugins.user_code import user_code
from fever.rllib.failures import report, report_exceptions
from fever.signals import ignore_job_signals

MADE = itertools.count()  # numbers the environments of this process, for their folders
CONFIG = ("env_config", "config")  # names that RLlib's documentation gives the one argument of a constructor
SCALARS = ("bool", "int", "float", "str")  # annotations of parameters that take no mapping
CONTEXT = (
    "worker_index",
    "env_index",
    "workdir",
    "scratch",
)  # passed by fever to constructors that have these parameters


@dataclass(frozen=True)
class Spaces:
    """The spaces of an environment."""

    observation: Any  # as text; a mapping from agents to texts if there are several agents
    action: Any
    agents: list[Any]  # ids of the agents; empty for an environment with a single agent
    image: bool  # whether observations are images
    flattened: list[Any]  # agents whose observations have to be flattened; [None] for a single agent


class MakeEnv:
    """Makes one environment in a process of RLlib's, which calls it with the env runner's context."""

    def __init__(
        self, source: EnvSource, workdir: Path, places: list[str], render: bool = False, run: str | None = None
    ) -> None:
        """`run` is the name under which failures are reported."""
        import ray.cloudpickle

        self.packed = ray.cloudpickle.dumps(source)  # by value: it may be a class of the main program
        self.workdir, self.places, self.render, self.run = workdir, places, render, run

    def __call__(self, context: Any) -> gym.Env:
        import ray.cloudpickle

        sys.path.extend(path for path in self.places if path not in sys.path)
        runner = max(0, context.worker_index - 1)  # RLlib counts remote runners from 1,
        folder = self.workdir / f"process-{os.getpid()}"  # and evaluation runners from 1 again
        where = EnvContext(runner, folder, "rgb_array" if self.render else None)
        remote = self.run is not None and context.worker_index > 0
        if remote:
            ignore_job_signals()
            report_exceptions(str(self.run))
        try:
            return make_one(ray.cloudpickle.loads(self.packed), where, next(MADE))
        except Exception as error:
            if remote:
                report(str(self.run), error)
            raise


def make_one(source: EnvSource, context: EnvContext, index: int = 0) -> gym.Env:
    """One environment. Atari images become float32 in [0, 1] with channels last, as RLlib's networks expect."""
    factory, _ = source.resolve()
    if is_vector_class(factory):
        raise FeverError(f"{source.name} is a vector environment; RLlib needs a single one, or a factory of one")
    env = make_env(with_env_config(source, context, index), context, index)
    if source.name.startswith("ALE/") and len(env.observation_space.shape or ()) == 3:
        return Frames(env)
    return env


def with_env_config(source: EnvSource, context: EnvContext | None = None, index: int = 0) -> EnvSource:
    """The environment with its arguments as one mapping, if its constructor takes one as RLlib's do: `env_config`."""
    from ray.rllib.env.env_context import EnvContext as Mapping

    factory, _ = source.resolve()
    if factory is None or is_vector_class(factory) or (name := _mapping_parameter(factory, source.kwargs)) is None:
        return source
    worker = context.worker_index if context is not None else 0
    return EnvSource(source.target, {name: Mapping(source.kwargs, worker_index=worker, vector_index=index)})


def _mapping_parameter(constructor: Any, given: dict[str, Any]) -> str | None:
    """The parameter that takes all arguments as one mapping, or None.

    It is the only required parameter, if no argument has a parameter's name; or else one that has a name of CONFIG.
    """
    try:
        parameters = inspect.signature(constructor).parameters
    except (TypeError, ValueError):  # written in C
        return None
    free = {
        name: one.default is one.empty
        for name, one in parameters.items()
        if one.kind is one.POSITIONAL_OR_KEYWORD and name not in (*given, *CONTEXT)
    }
    required = [name for name, needed in free.items() if needed]
    if len(required) == 1 and not given.keys() & parameters.keys():
        kind = parameters[required[0]].annotation
        return None if getattr(kind, "__name__", kind) in SCALARS else required[0]
    more = any(one.kind is one.VAR_KEYWORD for one in parameters.values())
    strange = not more and not given.keys() <= parameters.keys()
    return next((name for name in CONFIG if name in free and (free[name] or strange)), None)


def probe_spaces(source: EnvSource) -> Spaces:
    """Make an environment once, reset it and return its spaces. Raises FeverError if it cannot be used."""
    with tempfile.TemporaryDirectory(prefix="fever-") as folder:
        env: Any = make_one(source, EnvContext(workdir=Path(folder)))
        try:
            return _reset_and_describe(env, source.name)
        finally:
            close_quietly(source.name, env.close)


def _reset_and_describe(env: Any, name: str) -> Spaces:
    from ray.rllib.env.multi_agent_env import MultiAgentEnv

    if isinstance(env.unwrapped, MultiAgentEnv) or isinstance(env, MultiAgentEnv):
        agents = list(getattr(env, "possible_agents", None) or getattr(env, "agents", None) or [])
        if not agents:
            raise FeverError(f"{name} has several agents; list their ids in its attribute possible_agents")
        _first_reset(env, name)
        observations, actions = env.observation_spaces or {}, env.action_spaces or {}
        given = {one: observations.get(one, env.observation_space) for one in agents}
        taken = {str(one): repr(actions.get(one, env.action_space)) for one in agents}
        flattened = [one for one, space in given.items() if not is_plain(space)]
        return Spaces({str(one): repr(space) for one, space in given.items()}, taken, agents, False, flattened)
    for kind, space in (("observation", env.observation_space), ("action", env.action_space)):
        if not isinstance(space, gym.Space):
            raise FeverError(f"{name} has no {kind} space of Gymnasium's, but {space!r}")
    _first_reset(env, name)
    image = len(env.observation_space.shape or ()) == 3
    flattened = [] if is_plain(env.observation_space) else [None]
    return Spaces(repr(env.observation_space), repr(env.action_space), [], image, flattened)


def _first_reset(env: Any, name: str) -> None:
    with user_code(f"{name} cannot be reset"):
        result = env.reset(seed=0)
    if not isinstance(result, tuple) or len(result) != 2 or not isinstance(result[1], dict):
        raise FeverError(f"{name}: reset() must return an observation and an info dictionary")


def is_plain(space: Any) -> bool:
    """Whether RLlib's networks take observations of this space directly: vectors and images."""
    return isinstance(space, gym.spaces.Box) and len(space.shape) in (1, 3)


class Frames(gym.ObservationWrapper):
    """Observations uint8 `[stack, H, W]` or `[H, W, channels]` to float32 `[H, W, channels]` in [0, 1]."""

    def __init__(self, env: gym.Env) -> None:
        super().__init__(env)
        description = describe_space(env.observation_space)
        self.first = description["order"] == "chw"
        self.observation_space = gym.spaces.Box(0.0, 1.0, tuple(description["shape"]), np.float32)

    def observation(self, observation: Any) -> np.ndarray:
        frames = np.moveaxis(observation, 0, -1) if self.first else observation
        return frames.astype(np.float32) / np.float32(255)
