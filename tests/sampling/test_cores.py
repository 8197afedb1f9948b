"""Cores of their own for workers: how many workers fit, which cores each gets, and what its child processes inherit."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest

from fever.config import RunConfig
from fever.envs.make import make_envs
from fever.envs.source import EnvContext, EnvSource
from fever.envs.worker_count import choose_workers
from fever.errors import FeverError
from fever.job import JOB
from fever.launch.doctor import examine
from fever.sampling.cores import core_list
from fever.sampling.ray_machines import places_on, require_room
from fever.training import setup
from tests.helpers import wait_for
from tests.sampling.helpers import make_workers

CLAIM = """
import os, sys
from fever.sampling import cores
cores.CLAIM = f"test-{os.getppid()}-"
cores.FREE_SECONDS = 0
got = cores.bind_to_cores(1)
print(got == sorted(os.sched_getaffinity(0)) if got else "none", cores.claimed_cores(), flush=True)
sys.stdin.read()
"""


class AffinityEnv(gym.Env):
    """Prints which cores its child processes may use, and how many threads."""

    observation_space = gym.spaces.Box(-1, 1, (2,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def __init__(self) -> None:
        look = "import os; print('child', sorted(os.sched_getaffinity(0)), os.environ['OMP_NUM_THREADS'])"
        print(subprocess.run([sys.executable, "-c", look], capture_output=True, text=True).stdout, flush=True)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed)
        return self.np_random.random(2).astype(np.float32), {}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        return np.zeros(2, np.float32), 1.0, False, False, {}


def claimant() -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-c", CLAIM], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def said_by(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def test_processes_share_out_the_cores_and_a_killed_one_gives_its_own_back() -> None:
    usable = sorted(os.sched_getaffinity(0))
    holders = []
    try:
        for count in range(1, len(usable) + 1):
            holders.append(claimant())
            assert said_by(holders[-1]) == f"True {usable[:count]}"
        late = claimant()
        holders.append(late)
        assert said_by(late) == f"none {usable}"
        holders[0].send_signal(signal.SIGKILL)
        holders[0].wait()
        holders.append(claimant())
        assert said_by(holders[-1]).startswith("True")
    finally:
        for process in holders:
            process.kill()
            process.communicate()


def test_core_list() -> None:
    assert [core_list(cores) for cores in ([], [3], [0, 1, 2, 5, 8, 9])] == ["", "3", "0-2,5,8-9"]


def test_workers_that_fit() -> None:
    assert places_on([8.0, 6.0, 3.0], 4) == 3
    assert places_on([8.0, 6.0], None) == 14
    require_room([2.0, 4.0], 4)
    with pytest.raises(FeverError, match="--cpus-per-worker 8: the largest machine has 4 cores"):
        require_room([2.0, 4.0], 8)


@pytest.mark.parametrize(
    ("algo", "machines", "workers", "reason"),
    [
        ("ppo", [8.0], 2, "one for every 4 of 8 cores; the learner"),
        ("ppo", [10.0, 7.0], 3, "one for every 4 of 17 cores"),
        ("impala", [16.0], 3, "except the learner's"),
        ("impala", [18.0], 4, "one for every 4 of 18 cores"),  # two are left for the learner
        ("impala", [8.0], 2, "one for every 4 of 8"),
    ],
)
def test_all_workers_are_as_many_as_fit(
    monkeypatch: pytest.MonkeyPatch, algo: str, machines: list[float], workers: int, reason: str
) -> None:
    monkeypatch.setattr(setup, "machines_in_reach", lambda: machines)
    config = setup.with_worker_count(RunConfig(env="CartPole-v1", algo=algo, cpus_per_worker=4), print)
    assert config.workers == "all"
    envs = make_envs(EnvSource("CartPole-v1"), 1, EnvContext())
    found, why, _ = setup._choose_workers(config, envs)
    envs.close()
    assert found == workers
    assert reason in why


def test_auto_fills_the_places_of_an_expensive_environment() -> None:
    envs = make_envs(EnvSource("tests.environments:SleepEnv", {"milliseconds": 10}), 2, EnvContext())
    assert choose_workers(envs, 8, places=2)[0] == 2
    envs.close()


def test_cores_without_workers_are_refused_and_too_many_workers_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(setup, "machines_in_reach", lambda: [4.0])
    with pytest.raises(FeverError, match="--workers 0 has none"):
        setup.with_worker_count(RunConfig(env="CartPole-v1", workers=0, cpus_per_worker=2), print)
    said: list[str] = []
    setup.with_worker_count(RunConfig(env="CartPole-v1", workers=3, cpus_per_worker=2), said.append)
    assert said == ["note: 3 workers of 2 cores share 4; 2 of them are bound to theirs"]


@pytest.mark.ray
def test_workers_and_their_children_run_on_their_cores(ray: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    usable = sorted(os.sched_getaffinity(0))[:2]
    source = EnvSource(f"{__name__}:AffinityEnv")
    workers, algorithm = make_workers(source, len(usable), envs=1, cpus=1)
    try:
        workers.broadcast(algorithm.weights())
        bound = {fragment.worker_index: fragment.cores for fragment in workers.collect(4)}
        said = [record.message for record in caplog.records if record.message.startswith("child")]
        assert sorted(said) == [f"child [{core}] 1" for core in usable]
        assert sorted(bound.values()) == [str(core) for core in usable]
        victim = ray.get(workers.actors[0].facts.remote())["pid"]
        os.kill(victim, signal.SIGKILL)
        wait_for(lambda: workers.collect(2) and workers.restarts, "replacement")
        again = {fragment.worker_index: fragment.cores for fragment in workers.collect(8)}
        assert sorted(again.values()) == [str(core) for core in usable]  # the new one has the cores of the old one
    finally:
        workers.close()


@pytest.mark.ray
def test_threads_follow_the_cores(ray: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    usable = sorted(os.sched_getaffinity(0))
    workers, _ = make_workers(EnvSource(f"{__name__}:AffinityEnv"), 1, envs=1, cpus=len(usable))
    workers.close()
    assert f"child {usable} {len(usable)}" in caplog.messages


def test_doctor_says_which_cores_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fever.sampling.cores.claimed_cores", lambda: [0, 1])
    [cores] = [finding for finding in examine() if finding.topic == "cores"]
    assert cores.text.endswith("workers of runs (--cpus-per-worker) are bound to 0-1")


def test_one_worker_for_each_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = {"node1": {"rank": 0, "cores": 2, "cpus": [0, 1]}}
    plan = {"id": "x", "members": {str(number): "nonce" for number in range(4)}, "nodes": nodes}
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    envs = make_envs(EnvSource("CartPole-v1"), 1, EnvContext())

    def choose(workers: str) -> tuple[int, str]:
        return setup._choose_workers(RunConfig(env="CartPole-v1", workers=workers), envs)[:2]

    with pytest.raises(FeverError, match="here are no ranks"):
        choose("ranks")
    monkeypatch.setenv(JOB, str(tmp_path))
    assert choose("ranks") == (4, "one for each of 4 ranks, on 2 cores")
    workers, why = choose("all")
    assert workers == 2
    assert why.startswith("one for each of 2 cores, which is all that 4 ranks have (--workers ranks: one for each of")
    envs.close()
