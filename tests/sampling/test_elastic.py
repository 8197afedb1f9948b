"""Pools that follow machines which come and go: every kind of pool, on a real Ray whose machines are said to change.

That a machine really comes and goes is in test_ssh.py.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from fever.algos.base import SamplingContext
from fever.algos.registry import find_algorithm
from fever.config import validate
from fever.envs.source import EnvSource
from fever.sampling.ray_cluster import Machine
from fever.sampling.ray_pool import RayPool
from tests.factories import make_task
from tests.helpers import wait_for

SETTINGS: dict[str, dict[str, Any]] = {
    "ppo": {"steps": 8, "minibatch": 16},
    "impala": {"steps": 8},
    "trpo": {"timesteps_per_batch": 100},
    "apex": {"warmup": 50, "buffer": 4000, "updates": 1, "batch": 32, "explore_steps": 5},
}


pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("ray")]


@contextmanager
def training(algo: str, folder: Path) -> Iterator[tuple[Any, Callable[[], set[int]]]]:
    """A pool of two workers that machines of two cores are for, and a function that learns once from whom it says."""
    source = EnvSource("CartPole-v1")
    kind = find_algorithm(algo)
    settings = validate(kind.Config, {"hidden": [8], **SETTINGS[algo]}, algo)
    algorithm = kind(settings, make_task(source, 4, workers=2))
    pool: Any = algorithm.start(SamplingContext(source, folder, 0))
    assert isinstance(pool, RayPool)
    pool.cluster.elastic = True
    have(pool, 2)
    pool.track_machines(2)
    iterations = algorithm.train(pool)
    try:
        yield pool, lambda: {report.worker_index for report in next(iterations).reports}
    finally:
        pool.close()


def have(pool: RayPool, cores: float) -> None:
    """Let the machines have so many cores together."""
    here = pool.cluster.machines(now=True)[0]
    pool.cluster.machines = lambda now=False: [Machine(here.node, here.host, cores)]  # type: ignore[method-assign]


@pytest.mark.parametrize("algo", [pytest.param(algo, marks=[pytest.mark.slow] * (algo != "ppo")) for algo in SETTINGS])
def test_workers_come_and_go_with_machines(algo: str, tmp_path: Path, ray: Any) -> None:
    with training(algo, tmp_path) as (pool, learn):
        assert learn() <= {0, 1}
        have(pool, 3)
        wait_for(lambda: learn() and pool.count == 3, "third worker")
        if algo != "ppo":  # whose batch stays as it was, so whoever is first has a part in it
            wait_for(lambda: 2 in learn(), "experience of the third")
        victims = [pool.actors[1], pool.actors[2]]
        have(pool, 1)
        for victim in victims:
            ray.kill(victim)
        wait_for(lambda: learn() and pool.count == 1, "two workers gone")
        assert pool.active == [0]
        assert learn() == {0} or algo in ("impala", "apex")  # theirs may wait in a queue
        have(pool, 2)
        wait_for(lambda: learn() and pool.count == 2, "one that came back")
        assert sorted(pool.active) == [0, 1]
        assert pool.generations[1] > 0
        have(pool, 1)  # it is known only now that there is one machine less: nobody died
        wait_for(lambda: learn() and pool.count == 1, "one that is too many")


def test_a_number_that_was_asked_for_is_not_exceeded(tmp_path: Path) -> None:
    with training("ppo", tmp_path) as (pool, _):
        pool.tracks_machines = False
        assert [pool.wanted() for cores in (1, 2, 8) if not have(pool, cores)] == [1, 2, 2]
        pool.planned = 6  # three to a core
        assert [pool.wanted() for cores in (1, 2, 4) if not have(pool, cores)] == [3, 6, 6]


def test_a_worker_that_cannot_be_built_on_a_new_machine_ends_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with training("ppo", tmp_path) as (pool, learn):
        pool.sampler_spec = dataclasses.replace(pool.sampler_spec, source=EnvSource("nowhere:Env"))
        have(pool, 3)
        wait_for(lambda: learn() and "cannot work on" in caplog.text, "warning")
        assert pool.count == 2
        assert learn() <= {0, 1}
