"""Small pools of workers and of rollouts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from fever.algos.ppo import PPO, PPOConfig
from fever.algos.trpo import TRPO, TRPOConfig
from fever.envs.source import EnvSource
from fever.policy import Params
from fever.sampling.episodes import ROLLOUT_STREAM, EpisodeRunner
from fever.sampling.rollouts import make_rollouts
from fever.sampling.spec import Fragment, SamplerSpec
from fever.sampling.workers import LocalWorkers, RayWorkers
from tests.environments import CounterEnv
from tests.factories import make_task, random_weights

DRAWN = "tests.environments:DrawnEnv"
LIMIT = 120  # seconds to wait for anything, on a busy machine
SIZES = {"observations": 1, "first": 1}  # arrays that have this many rows more than steps


def make_workers(source: EnvSource, count: int, envs: int = 2, steps: int = 8, **fields: Any) -> tuple[Any, PPO]:
    """A pool of workers of `envs` environments each (0: in this process), and the algorithm with their policy."""
    task = make_task(source, envs * max(1, count), count)
    algorithm = PPO(PPOConfig(steps=steps, minibatch=envs * steps), task)
    spec = SamplerSpec(source, algorithm.network, envs, steps, 0.99, 0, **fields)
    if count == 0:
        return LocalWorkers(spec, task.observation, task.action), algorithm
    return RayWorkers(spec, task.observation, task.action, count), algorithm


def algorithm(source: EnvSource, **settings: Any) -> TRPO:
    settings = {"hidden": (8,), "timesteps_per_batch": 100, **settings}
    return TRPO(TRPOConfig(**settings), make_task(source, envs=1))


def spec_of(learner: TRPO, source: EnvSource, **fields: Any) -> SamplerSpec:
    return SamplerSpec(
        **{"source": source, "network": learner.network, "envs": 1, "steps": 1, "gamma": 0.9, "seed": 0} | fields
    )


def weights_of(learner: TRPO, seed: int = 0) -> Params:
    return random_weights(learner.network, 0.7, seed)


def seed_of(number: int, seed: int = 0) -> int:
    """The seed with which a rollout resets its environment."""
    return int(np.random.SeedSequence([seed, ROLLOUT_STREAM, number]).spawn(1)[0].generate_state(1)[0])


def player(
    target: Any = CounterEnv, limit: int | None = None, kwargs: dict[str, Any] | None = None, **fields: Any
) -> tuple[EpisodeRunner, Params]:
    source = EnvSource(target, kwargs or {})
    learner = algorithm(source)
    spec = spec_of(learner, source, **fields)
    return EpisodeRunner(spec, learner.task.observation, learner.task.action, limit), weights_of(learner)


@contextmanager
def rollouts(count: int, kwargs: dict[str, Any] | None = None, limit: int | None = None) -> Iterator[Any]:
    """A pool that plays episodes of DrawnEnv, and the learner whose policy it acts with."""
    source = EnvSource(DRAWN, kwargs or {})
    learner = algorithm(source)
    pool = make_rollouts(spec_of(learner, source), learner.task.observation, learner.task.action, limit, count)
    try:
        yield pool, learner
    finally:
        pool.close()


def assert_same(here: list[Fragment], there: list[Fragment]) -> None:
    assert [part.steps for part in here] == [part.steps for part in there]
    for one, other in zip(here, there, strict=True):
        assert one.arrays.keys() == other.arrays.keys()
        for name, array in one.arrays.items():
            np.testing.assert_array_equal(array, other.arrays[name], err_msg=name)
            assert array.dtype == other.arrays[name].dtype
        assert one.episodes == other.episodes
