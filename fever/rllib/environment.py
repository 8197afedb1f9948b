"""Environments for RLlib: the same names, classes and factories as everywhere, with one agent or several."""

from __future__ import annotations

import itertools
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np

from fever.errors import FeverError
from fever.policy.spaces import describe
from fever.sources import EnvContext, EnvSource, is_vector_class, make_env

MADE = itertools.count()  # environments in this process, for their folders


@dataclass(frozen=True)
class Spaces:
    """What an environment takes and gives."""

    observation: Any  # as text, by agent if there are several
    action: Any
    agents: list[Any]  # of an environment with several, empty for one
    image: bool


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
    env = make_env(source, context, index)
    if source.name.startswith("ALE/") and len(env.observation_space.shape or ()) == 3:
        return Frames(env)
    return env


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
            given = {str(one): repr(observations.get(one, env.observation_space)) for one in agents}
            taken = {str(one): repr(actions.get(one, env.action_space)) for one in agents}
            return Spaces(given, taken, agents, image=False)
        for name, space in (("observation", env.observation_space), ("action", env.action_space)):
            if not isinstance(space, gym.Space):
                raise FeverError(f"{source.name} has no {name} space: {space!r} is none of Gymnasium's")
        env.reset(seed=0)
        image = len(env.observation_space.shape or ()) == 3
        return Spaces(repr(env.observation_space), repr(env.action_space), [], image)
    finally:
        env.close()


class Frames(gym.ObservationWrapper):
    """uint8 `[stack, H, W]`, or in colour `[H, W, C]`, to float32 with channels last between 0 and 1."""

    def __init__(self, env: gym.Env) -> None:
        super().__init__(env)
        description = describe(env.observation_space)
        self.first = description["order"] == "chw"
        self.observation_space = gym.spaces.Box(0.0, 1.0, tuple(description["shape"]), np.float32)

    def observation(self, observation: Any) -> np.ndarray:
        frames = np.moveaxis(observation, 0, -1) if self.first else observation
        return frames.astype(np.float32) / np.float32(255)
