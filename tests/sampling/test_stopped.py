"""Workers whose processes are stopped, on a real Ray."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from fever.envs.source import EnvSource
from fever.envs.watchdog import WATCHDOG
from fever.sampling.stopped import StoppedProcesses
from fever.system import STOPPED, process_state
from tests.helpers import wait_for
from tests.sampling.helpers import LIMIT, make_workers, rollouts, weights_of

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("ray")]


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers are looked at soon after their last sign of life."""
    monkeypatch.setattr("fever.sampling.ray_pool.STOPPED_SECONDS", 1.0)
    monkeypatch.setattr("fever.sampling.ray_pool.LOOK_SECONDS", 0.3)


def stop(ray: Any, actor: Any) -> int:
    process = ray.get(actor.identity.remote(), timeout=LIMIT)[1]
    os.kill(process, signal.SIGSTOP)
    return process


def test_stopped_worker_is_replaced_and_its_work_redone(ray: Any) -> None:
    workers, algorithm = make_workers(EnvSource("CartPole-v1"), 2)
    try:
        workers.broadcast(algorithm.weights())
        workers.collect(2)
        victim, began = stop(ray, workers.actors[1]), time.monotonic()
        assert len(workers.collect(4)) == 4
        assert time.monotonic() - began < LIMIT / 2
        assert workers.restarts == 1
        assert {fragment.worker_index for fragment in workers.collect(4)} == {0, 1}
        wait_for(lambda: not process_state(victim), "end of the stopped process", 30)
    finally:
        workers.close()


def test_stopped_worker_delays_rollouts_only(ray: Any) -> None:
    with rollouts(2) as (pool, learner):
        pool.broadcast(weights_of(learner))
        whole = pool.collect(0, 60)
        stop(ray, pool.actors[0])
        again = pool.collect(0, 60)
        assert [part.steps for part in again] == [part.steps for part in whole]
        pool.collect(100, 400)
        assert pool.restarts == 1


def test_slow_worker_is_left_alone() -> None:
    workers, algorithm = make_workers(EnvSource("tests.environments:SleepEnv", {"milliseconds": 3000}), 1, 1, steps=1)
    try:
        workers.broadcast(algorithm.weights())
        workers.collect(1)
        assert workers.restarts == 0
    finally:
        workers.close()


def test_a_process_is_stopped_if_it_was_at_two_looks(ray: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    workers, _ = make_workers(EnvSource("CartPole-v1"), 1)
    try:
        stopped = StoppedProcesses(workers.cluster)
        assert not stopped.look("nobody")
        stopped.follow("it", workers.actors[0])
        process = stop(ray, workers.actors[0])
        wait_for(lambda: stopped.look("it") or stopped.seen["it"], "a look")
        os.kill(process, signal.SIGCONT)
        wait_for(lambda: process_state(process) != STOPPED, "going on")
        assert not stopped.look("it")
        monkeypatch.setattr(workers.cluster, "here", "another machine")  # the state is read by a task of Ray's
        os.kill(process, signal.SIGSTOP)
        wait_for(lambda: stopped.look("it"), "two looks", LIMIT, pause=0.2)
        os.kill(process, signal.SIGCONT)
    finally:
        workers.close()


def test_the_state_of_a_process_that_ended_is_empty() -> None:
    process = subprocess.Popen(["true"])
    process.wait()
    assert process_state(process.pid) == ""
    assert process_state(os.getpid()) in ("R", "S")


@pytest.mark.parametrize("elsewhere", [pytest.param(False, marks=pytest.mark.slow), True])
def test_warning_of_a_slow_environment_arrives_while_its_worker_is_busy(
    elsewhere: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fever.sampling.ray_pool.WARN_SECONDS", 0.5)
    said: list[str] = []
    heard = tmp_path / "heard"

    def say(text: str) -> None:
        said.append(text)
        heard.touch()

    source = EnvSource("tests.environments:WarningEnv", {"file": str(heard)})
    with WATCHDOG.telling(say):
        workers, algorithm = make_workers(source, 1)
        try:
            workers.broadcast(algorithm.weights())
            if elsewhere:
                monkeypatch.setattr(workers.cluster, "here", "another machine")  # the file is read by a task of Ray's
            workers.collect(1)
        finally:
            workers.close()
    assert said == ["note: worker 0: it is slow; with --step-timeout SECONDS, an environment that hangs is made anew"]
