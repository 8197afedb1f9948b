"""Environments for RLlib: the same names, classes and factories as everywhere, with one agent or several."""

from __future__ import annotations

import inspect
import itertools
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np

from fever.envs.contract import describe_space
from fever.envs.source import EnvContext, EnvSource, is_vector_class, make_env
from fever.errors import FeverError

MADE = itertools.count()  # environments in this process, for their folders
CONFIG = ("env_config", "config")  # what RLlib's documentation calls the one argument of a constructor
SCALARS = ("bool", "int", "float", "str")  # annotations of what is no mapping
CONTEXT = ("worker_index", "env_index", "workdir")  # which fever gives to constructors that name them


@dataclass(frozen=True)
class Spaces:
    """What an environment takes and gives."""

    observation: Any  # as text, by agent if there are several
    action: Any
    agents: list[Any]  # of an environment with several, empty for one
    image: bool
    flattened: list[Any]  # agents whose observations RLlib's networks take as vectors only; None is the only agent


class MakeEnv:
    """Makes an environment in any process of RLlib's, as RLlib calls it: with the context of a runner."""

    def __init__(self, source: EnvSource, workdir: Path, places: list[str], render: bool = False) -> None:
        import ray.cloudpickle

        self.packed = ray.cloudpickle.dumps(source)  # may be a class of the main program
        self.workdir, self.places, self.render = workdir, places, render

    def __call__(self, context: Any) -> gym.Env:
        import ray.cloudpickle

        sys.path.extend(path for path in self.places if path not in sys.path)
        runner = max(0, context.worker_index - 1)  # RLlib counts from 1 where there are several,
        folder = self.workdir / f"process-{os.getpid()}"  # and again for those that evaluate
        where = EnvContext(runner, folder, "rgb_array" if self.render else None)
        return make_one(ray.cloudpickle.loads(self.packed), where, next(MADE))


def make_one(source: EnvSource, context: EnvContext, index: int = 0) -> gym.Env:
    """One environment as RLlib's networks want it: images of Atari games with channels last, between 0 and 1."""
    factory, _ = source.resolve()
    if is_vector_class(factory):
        raise FeverError(f"{source.name} is many environments in one; RLlib's runners need one, or a factory of it")
    env = make_env(called_as_by_rllib(source, context, index), context, index)
    if source.name.startswith("ALE/") and len(env.observation_space.shape or ()) == 3:
        return Frames(env)
    return env


def called_as_by_rllib(source: EnvSource, context: EnvContext | None = None, index: int = 0) -> EnvSource:
    """The same with all its arguments as one mapping, if its constructor is of RLlib's kind: `__init__(env_config)`."""
    from ray.rllib.env.env_context import EnvContext as Mapping

    factory, _ = source.resolve()
    if factory is None or is_vector_class(factory) or (name := _mapping_parameter(factory, source.kwargs)) is None:
        return source
    worker = context.worker_index if context is not None else 0
    return EnvSource(source.target, {name: Mapping(source.kwargs, worker_index=worker, vector_index=index)})


def _mapping_parameter(constructor: Any, given: dict[str, Any]) -> str | None:
    """The parameter that takes all that is given as one mapping: the only one that has to be there, if nothing is given
    by its name; or one with RLlib's name for it."""
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


def look_at(source: EnvSource, workdir: Path) -> Spaces:
    """Make an environment once and reset it, to learn its spaces and to hear what is wrong with it."""
    from ray.rllib.env.multi_agent_env import MultiAgentEnv

    env: Any = make_one(source, EnvContext(workdir=workdir))
    try:
        if isinstance(env.unwrapped, MultiAgentEnv) or isinstance(env, MultiAgentEnv):
            agents = list(getattr(env, "possible_agents", None) or getattr(env, "agents", None) or [])
            if not agents:
                raise FeverError(f"{source.name} has several agents but no possible_agents that names them")
            env.reset(seed=0)
            observations, actions = env.observation_spaces or {}, env.action_spaces or {}
            given = {one: observations.get(one, env.observation_space) for one in agents}
            taken = {str(one): repr(actions.get(one, env.action_space)) for one in agents}
            flattened = [one for one, space in given.items() if not is_plain(space)]
            return Spaces({str(one): repr(space) for one, space in given.items()}, taken, agents, False, flattened)
        for name, space in (("observation", env.observation_space), ("action", env.action_space)):
            if not isinstance(space, gym.Space):
                raise FeverError(f"{source.name} has no {name} space: {space!r} is none of Gymnasium's")
        env.reset(seed=0)
        image = len(env.observation_space.shape or ()) == 3
        flattened = [] if is_plain(env.observation_space) else [None]
        return Spaces(repr(env.observation_space), repr(env.action_space), [], image, flattened)
    finally:
        env.close()


def is_plain(space: Any) -> bool:
    """Whether RLlib's networks take such observations as they are: vectors and images."""
    return isinstance(space, gym.spaces.Box) and len(space.shape) in (1, 3)


class Frames(gym.ObservationWrapper):
    """uint8 `[stack, H, W]`, or in colour `[H, W, C]`, to float32 with channels last between 0 and 1."""

    def __init__(self, env: gym.Env) -> None:
        super().__init__(env)
        description = describe_space(env.observation_space)
        self.first = description["order"] == "chw"
        self.observation_space = gym.spaces.Box(0.0, 1.0, tuple(description["shape"]), np.float32)

    def observation(self, observation: Any) -> np.ndarray:
        frames = np.moveaxis(observation, 0, -1) if self.first else observation
        return frames.astype(np.float32) / np.float32(255)
