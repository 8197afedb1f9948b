"""Small tasks, samplers and weights that the tests of several rooms need."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from fever.algos.base import Task
from fever.algos.batch import share
from fever.envs.make import make_envs
from fever.envs.source import EnvContext, EnvSource
from fever.policy import Network, Params
from fever.sampling.sampler import Sampler
from fever.sampling.spec import SamplerSpec
from tests.environments import CounterEnv, NextStepCounters, SameStepCounters

COUNTERS = pytest.mark.parametrize("target", [CounterEnv, SameStepCounters, NextStepCounters])
COMPILED: dict[str, Any] = {}


def as_source(target: Any) -> EnvSource:
    return target if isinstance(target, EnvSource) else EnvSource(target)


def make_task(target: Any, envs: int = 2, workers: int = 0, seed: int = 0, total_steps: int | None = None) -> Task:
    """The task of an environment (class, name or EnvSource), of which workers share `envs`. It is made once, to see its
    spaces and its action mask."""
    source = as_source(target)
    probe = make_envs(source, 1, EnvContext())
    probe.reset([0])
    probe.close()
    each = share(envs, workers)
    return Task("a test", probe.observation, probe.action, each, workers, seed, total_steps, total_envs=envs)


def make_sampler(algorithm: Any, target: Any, envs: int, gamma: float = 0.99, seed: int = 0) -> Sampler:
    """A sampler in this process that acts with an algorithm's policy."""
    spec = SamplerSpec(as_source(target), algorithm.network, envs, algorithm.config.steps, gamma, seed)
    return Sampler(spec, algorithm.task.observation, algorithm.task.action)


def share_compiled(algorithm: Any, outside: set[str]) -> Any:
    """Let algorithms with the same update compile it once. `outside`: settings that are not part of the update."""
    task, config = algorithm.task, algorithm.config.model_dump(exclude=outside)
    key = repr((type(algorithm), task.observation, task.action, config))
    algorithm._jitted_update = COMPILED.setdefault(key, algorithm._jitted_update)
    return algorithm


def random_weights(network: Network, scale: float = 0.5, seed: int = 0) -> Params:
    """Larger than at the start of training: every weight shows in the outputs, and actions depend on observations."""
    rng = np.random.default_rng(seed)
    return {name: rng.normal(0, scale, value.shape).astype(np.float32) for name, value in network.init(rng).items()}
