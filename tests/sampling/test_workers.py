"""The pool of samplers on a real Ray, and the choice of its size."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

import fever
from fever.envs.make import make_envs
from fever.envs.source import EnvContext, EnvSource
from fever.envs.worker_count import choose_workers
from fever.errors import ContractError, FeverError, TrainingError
from fever.sampling.ray_cluster import Cluster
from tests.environments import SleepEnv
from tests.helpers import processes_with, run_fever, wait_for, without_ray
from tests.sampling.helpers import make_workers

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("ray")]


def test_any_number_of_fragments_comes_from_any_number_of_workers() -> None:
    workers, algorithm = make_workers(EnvSource("CartPole-v1"), 2)
    try:
        version = workers.broadcast(algorithm.weights())
        fragments = workers.collect(5)
        assert len(fragments) == 5
        assert {fragment.version for fragment in fragments} == {version}
        assert {fragment.worker_index for fragment in fragments} == {0, 1}
        assert fragments == sorted(fragments, key=lambda fragment: fragment.worker_index)
    finally:
        workers.close()


def test_worker_samples_what_a_sampler_in_this_process_samples() -> None:
    remote, algorithm = make_workers(EnvSource("CartPole-v1"), 1)
    local, _ = make_workers(EnvSource("CartPole-v1"), 0)
    try:
        for workers in (remote, local):
            workers.broadcast(algorithm.weights())
        (there,), (here,) = remote.collect(1), local.collect(1)
        for name, array in here.arrays.items():
            np.testing.assert_array_equal(array, there.arrays[name], err_msg=name)
    finally:
        remote.close()
        local.close()


def test_worker_process_is_small_and_imports_no_learner(ray: Any) -> None:
    workers, algorithm = make_workers(EnvSource("CartPole-v1"), 1, envs=8)
    try:
        workers.broadcast(algorithm.weights())
        workers.collect(3)
        facts = ray.get(workers.actors[0].facts.remote())
        assert not {"jax", "fever.algos.ppo", "fever.training.trainer", "torch"} & set(facts["modules"])
        assert facts["megabytes"] < 150
    finally:
        workers.close()


def test_killed_worker_is_replaced_and_its_work_redone(ray: Any) -> None:
    workers, algorithm = make_workers(EnvSource("tests.environments:SleepEnv", {"milliseconds": 20}), 2, steps=16)
    try:
        workers.broadcast(algorithm.weights())
        victim = ray.get(workers.actors[1].facts.remote())["pid"]
        workers.call(1, "sample", workers.params, 1)  # busy for a while, so that the kill comes in the middle
        os.kill(victim, signal.SIGKILL)
        fragments = workers.collect(4)
        assert len(fragments) == 4
        assert workers.restarts == 1
        replacement = ray.get(workers.actors[1].facts.remote())["pid"]
        assert replacement != victim
        workers.collect(2)
    finally:
        workers.close()


def test_crash_inside_an_environment_costs_one_worker(tmp_path: Path) -> None:
    source = EnvSource("tests.environments:CrashEnv", {"marker": str(tmp_path / "crashed"), "at": 10})
    workers, algorithm = make_workers(source, 2)
    try:
        workers.broadcast(algorithm.weights())
        for _ in range(3):
            assert len(workers.collect(2)) == 2
        assert workers.restarts >= 1
    finally:
        workers.close()


def test_worker_that_keeps_dying_ends_the_run() -> None:
    workers, algorithm = make_workers(EnvSource("tests.environments:CrashEnv", {"at": 1}), 1)
    try:
        workers.broadcast(algorithm.weights())
        with pytest.raises(TrainingError, match="worker 0 died 6 times in a row"):
            workers.collect(1)
    finally:
        workers.close()


@pytest.mark.parametrize("kind", ["OutOfMemoryError", "NodeDiedError"])
def test_worker_that_ray_ended_is_replaced_whatever_ray_calls_it(
    kind: str, ray: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    workers, algorithm = make_workers(EnvSource("CartPole-v1"), 1)
    try:
        workers.broadcast(algorithm.weights())
        get, errors = ray.get, [getattr(ray.exceptions, kind)("it is gone")]
        monkeypatch.setattr(
            ray, "get", lambda call, **limit: get(call, **limit) if not errors else raises(errors.pop())
        )
        assert len(workers.collect(1)) == 1
        assert workers.restarts == 1
    finally:
        workers.close()


def raises(error: Exception) -> None:
    raise error


def test_worker_that_dies_while_it_makes_its_environments_is_one_sentence() -> None:
    source = EnvSource("tests.environments:ExitElsewhereEnv", {"process": os.getpid()})
    with pytest.raises(TrainingError, match=r"^worker [01] died while its environments were made: .+$"):
        make_workers(source, 2)


def test_close_that_fails_leaves_ray_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    workers, _ = make_workers(EnvSource("CartPole-v1"), 1)
    left: list[bool] = []
    with monkeypatch.context() as patch:
        patch.setattr(workers.cluster, "leave", lambda: left.append(True))
        patch.setattr(workers, "kill", lambda *actors: raises(RuntimeError("no")))
        with pytest.raises(RuntimeError, match="no"):
            workers.close()
    assert left == [True]
    workers.close()


def test_broken_contract_in_a_worker_is_the_same_sentence() -> None:
    workers, algorithm = make_workers(EnvSource("tests.environments:BrokenEnv", {"fault": "nan_reward", "at": 3}), 2)
    try:
        workers.broadcast(algorithm.weights())
        with pytest.raises(ContractError, match=r"at step 3 of environment 0 of worker [01]: the reward is NaN"):
            workers.collect(2)
    finally:
        workers.close()


def test_environment_that_cannot_be_made_in_a_worker_is_the_same_sentence(tmp_path: Path) -> None:
    source = EnvSource("tests.environments:OnlyHereEnv", {"process": os.getpid()})
    with pytest.raises(FeverError, match="only in its own process"):
        make_workers(source, 2)


def test_environments_get_their_place_and_close_in_every_worker(tmp_path: Path) -> None:
    workers, algorithm = make_workers(EnvSource("tests.environments:ContextEnv"), 2, workdir=tmp_path)
    workers.broadcast(algorithm.weights())
    workers.collect(2)
    workers.close()
    texts = sorted(path.read_text() for path in tmp_path.glob("*/context.txt"))
    assert texts == [f"worker {worker}, environment {env}" for worker in (0, 1) for env in (0, 1)]
    (tmp_path / "closed").mkdir()
    workers, algorithm = make_workers(
        EnvSource("tests.environments:ClosingEnv", {"folder": str(tmp_path / "closed")}), 1
    )
    (tmp_path / "closed" / "closed-0").unlink()  # by the probe
    workers.close()
    assert len(list((tmp_path / "closed").iterdir())) == 2


def test_training_from_python_with_workers_and_a_factory(tmp_path: Path) -> None:
    result = fever.train(
        lambda: make_envs_of_five(), workers=2, envs=4, runs=tmp_path, stop={"iterations": 2}, steps=32, minibatch=64
    )
    assert result.summary["workers"] == 2
    assert result.summary["length_mean"] == 5
    assert result.run.metrics()[-1]["worker_restarts"] == 0
    assert {row["worker"] for row in result.run.episodes()} == {0, 1}


def make_envs_of_five() -> Any:
    from tests.environments import TimeLimitEnv

    return TimeLimitEnv(5)


@pytest.mark.parametrize(
    ("source", "expected", "reason"),
    [
        (EnvSource("CartPole-v1"), 0, "one process is fastest"),
        (EnvSource("tests.environments:BusyEnv", {"milliseconds": 3}), "cores", "gets a worker"),
        (EnvSource("tests.environments:SleepEnv", {"milliseconds": 10}), "many", "waits"),
    ],
)
def test_auto_measures_and_says_why(source: EnvSource, expected: Any, reason: str) -> None:
    envs = make_envs(source, 8, EnvContext())
    workers, why = choose_workers(envs, cores=4)
    envs.close()
    assert reason in why
    assert workers == {"cores": 4, "many": 32}.get(expected, expected)


@pytest.mark.parametrize(
    ("workers", "share", "fit"), [(3, 0.6, False), (2, 0.6, True), (6, 1 / 3, True), (20, 0.1, True), (2, 1.0, True)]
)
def test_no_share_of_a_gpu_is_of_two(workers: int, share: float, fit: bool) -> None:
    cluster = Mock(**{"ask.return_value": {"GPU": 2.0}})
    if fit:
        Cluster.require_gpus(cluster, share * workers, share)
    else:
        with pytest.raises(FeverError, match=r"3 workers with 0\.6 of a GPU each do not fit on 2 GPUs"):
            Cluster.require_gpus(cluster, share * workers, share)


def output_of(worker: int, caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.message for record in caplog.records if record.name == f"worker {worker}"]


def test_output_of_environments_in_workers_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    workers, algorithm = make_workers(EnvSource("tests.environments:PrintingEnv"), 2, envs=1, steps=3)
    try:
        assert [output_of(worker, caplog) for worker in (0, 1)] == [["made"], ["made"]]
        workers.broadcast(algorithm.weights())
        workers.collect(2)
        assert output_of(1, caplog) == ["made", "step 1", "step 2", "step 3"]
    finally:
        workers.close()
    assert output_of(1, caplog) == ["made", "step 1", "step 2", "step 3", "closed"]


def test_a_worker_that_prints_a_lot_sends_the_end_of_it(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    source = EnvSource("tests.environments:PrintingEnv", {"flood": 8000})
    workers, algorithm = make_workers(source, 1, envs=1, steps=3)
    try:
        workers.broadcast(algorithm.weights())
        workers.collect(1)
    finally:
        workers.close()
    _, skipped, *lines = output_of(0, caplog)
    assert skipped == "(14003 bytes are left out)"
    assert sum(len(line) + 1 for line in lines if set(line) <= {"x"}) == 10_000


def test_last_words_of_a_worker_that_dies_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    workers, algorithm = make_workers(EnvSource("tests.environments:PrintingEnv", {"at": 5}), 1, envs=1, steps=3)
    try:
        workers.broadcast(algorithm.weights())
        workers.collect(2)
        assert output_of(0, caplog)[4:7] == ["step 4", "step 5", "last words"]
    finally:
        workers.close()


def test_workers_end_with_the_command_and_leave_no_process(tmp_path: Path) -> None:
    done = run_fever(
        "train", "CartPole-v1", "--workers", "2", "--stop-iterations", "2", "--json", cwd=tmp_path,
        FEVER_TEST_MARK=str(tmp_path),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["workers"] == 2
    assert "warn" not in without_ray(done.stderr).lower()
    wait_for(lambda: not processes_with(f"FEVER_TEST_MARK={tmp_path}"), "end of all processes")


def test_workers_take_turns_in_making_their_environments(ray: Any, tmp_path: Path) -> None:
    source = EnvSource(f"{__name__}:TimedStart", {"folder": str(tmp_path)})
    workers, _ = make_workers(source, 4, envs=1, starts_at_once=2)
    workers.close()
    times = [tuple(map(float, path.read_text().split())) for path in tmp_path.iterdir()]
    assert len(times) == 5  # one more to see its spaces
    at_once = [sum(begin <= moment < end for begin, end in times) for moment, _ in times]
    assert max(at_once) <= 2


class TimedStart(SleepEnv):
    """Takes a while to be made, and writes when that was."""

    def __init__(self, folder: str) -> None:
        begin = time.time()
        time.sleep(0.5)
        super().__init__(0)
        (Path(folder) / f"{os.getpid()}").write_text(f"{begin} {time.time()}")
