"""Explorers and shards on a real Ray: the ratio, deaths and replacements, saving, the end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from fever.algos.apex import Apex, ApexConfig
from fever.algos.base import SamplingContext
from fever.envs.source import EnvSource
from fever.errors import ContractError, FeverError, TrainingError
from fever.replay.experience import Draw
from fever.replay.saved import load_shards
from fever.replay.shards import AHEAD, SLACK, RayExperience, ShardActor, ShardExplorer
from tests.factories import make_task
from tests.helpers import ROOT, processes_with, run_fever, wait_for, without_ray

LIMIT = 120  # seconds that anything here may take on a busy machine
IN_HAND = 2 * AHEAD * 10 * 2  # transitions that two explorers have on their way, of two environments and ten steps


pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("ray")]


@contextmanager
def started(
    folder: Path,
    env: str = "CartPole-v1",
    kwargs: dict[str, Any] | None = None,
    workers: int = 2,
    publish: bool = True,
    **settings: Any,
) -> Iterator[RayExperience]:
    """Two explorers and two shards, at work: draws of 64 transitions, four for each one added."""
    settings = {
        "hidden": (8,), "batch": 64, "updates": 1, "replay_ratio": 4.0, "warmup": 100, "buffer": 4000,
        "replay_shards": 2, "explore_steps": 10, "n_step": 3, **settings,
    }  # fmt: skip
    source = EnvSource(env, kwargs or {})
    algorithm = Apex(ApexConfig(**settings), make_task(source, 2 * workers, workers))
    experience = algorithm.start(SamplingContext(source, folder, 0))
    assert isinstance(experience, RayExperience)
    try:
        if publish:
            experience.publish(algorithm.weights(), 0, algorithm.epsilons())
        yield experience
    finally:
        experience.close()


def next_draw(experience: RayExperience) -> Draw:
    return wait_for(experience.draw, "draw")


def learn(experience: RayExperience, draws: int) -> list[Draw]:
    """Draw so many times and send priorities back, as a learner does."""
    taken = []
    for _ in range(draws):
        draw = next_draw(experience)
        experience.update(draw, np.linspace(0, 1, len(draw.batch.serials)))
        taken.append(draw)
    return taken


def rest(experience: RayExperience) -> None:
    """Wait until explorers have used up their slack, while nobody draws."""

    def settled() -> bool:
        before = experience.added
        time.sleep(0.3)
        return experience.added == before and not experience.exploring

    wait_for(settled, "rest")


@pytest.fixture(scope="module")
def running(ray: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayExperience]:
    """One experience for all tests that leave its processes alive."""
    with started(tmp_path_factory.mktemp("running")) as experience:
        yield experience


def pid_of(ray: Any, actor: Any) -> int:
    return ray.get(actor.facts.remote(), timeout=LIMIT)["pid"]


def test_draws_come_from_every_shard_and_hold_the_ratio(running: RayExperience, ray: Any) -> None:
    wait_for(lambda: {draw.shard for draw in learn(running, 4)} == {0, 1}, "draws of both shards")
    draws = learn(running, 60)
    assert {len(draw.batch.rewards) for draw in draws} == {64}
    counts = Counter(draw.shard for draw in draws)
    assert min(counts[0], counts[1]) >= 5
    assert running.drawn <= 4.0 * (running.added - 100)
    assert running.drawn > 4.0 * (running.added - 100) - SLACK * 64 * 2 - 4.0 * IN_HAND
    reports: list[Any] = []
    wait_for(
        lambda: reports.extend(running.take_reports()) or {report.worker_index for report in reports} == {0, 1},
        "reports of both explorers",
    )
    assert {report.version for report in reports} == {0}

    def added() -> list[int]:
        learn(running, 1)
        arrays = ray.get([shard.arrays.remote() for shard in running.shards], timeout=LIMIT)
        return [int(one["counters"][1]) for one in arrays]

    wait_for(lambda: min(added()) > 50, "transitions in both shards")
    measures = running.measure()
    assert 0 < measures["buffer_fill"] <= 1
    assert measures["priority_mean"] > 0
    assert running.restarts == 0
    assert running.description.startswith("replay buffer: 4,000 transitions in 2 shards, ")


def test_explorers_wait_for_a_learner_that_does_not_draw(running: RayExperience) -> None:
    learn(running, 5)
    rest(running)
    assert running.owed() >= SLACK * 64 * 2
    assert running.owed() <= SLACK * 64 * 2 + 4.0 * IN_HAND  # what was on its way when the slack was used up
    assert running.ready.qsize() <= AHEAD * 2
    added = running.added
    learn(running, 20)
    wait_for(lambda: running.added > added, "transition")


def test_new_weights_reach_the_explorers(running: RayExperience) -> None:
    running.publish(running.ray.get(running.params), 9, running.epsilons)

    def arrived() -> bool:
        learn(running, 1)
        return any(report.version == 9 for report in running.take_reports())

    wait_for(arrived, "report of the new weights")


def test_explorers_are_small_and_import_no_learner(running: RayExperience, ray: Any) -> None:
    learn(running, 10)
    facts = ray.get(running.actors[0].facts.remote(), timeout=LIMIT)
    assert not {"jax", "fever.algos.dqn", "fever.training.trainer", "torch"} & set(facts["modules"])
    assert facts["megabytes"] < 150


def test_every_shard_holds_its_explorers_transitions_whole(tmp_path: Path) -> None:
    with started(tmp_path, "tests.environments:CounterEnv") as experience:
        for draw in learn(experience, 20):
            batch = draw.batch
            # The counters of environment i: episode, step; rewards (i + 1) * s; odd episodes are truncated after 4.
            env, episode, step = batch.observations.T
            length = np.where(episode % 2 == 1, 4, 3 + env)
            reach = np.minimum(step + 3, length)
            np.testing.assert_array_equal(batch.next_observations, np.stack([env, episode, reach], axis=1))
            ended = (reach == length) & (episode % 2 == 0)
            np.testing.assert_allclose(batch.discounts, np.where(ended, 0, 0.99 ** (reach - step)), rtol=1e-5)
            rewards = sum(np.where(step + k < reach, 0.99**k * (env + 1) * (step + k + 1), 0) for k in range(3))
            np.testing.assert_allclose(batch.rewards, rewards, rtol=1e-5)


def test_more_shards_than_explorers_do_not_let_these_run_away(tmp_path: Path) -> None:
    with started(tmp_path, workers=1) as experience:
        learn(experience, 40)
        time.sleep(3)  # while nobody draws
        assert experience.owed() <= SLACK * 64 * 2 + 4.0 * IN_HAND


def test_a_learner_waits_while_nothing_is_owed(tmp_path: Path) -> None:
    kwargs = {"milliseconds": 20}
    with started(tmp_path, "tests.environments:SleepEnv", kwargs, replay_ratio=1.0, warmup=30) as experience:
        drawn = missed = 0
        deadline = time.monotonic() + LIMIT
        while drawn < 3 and time.monotonic() < deadline:
            draw = experience.draw()
            drawn, missed = drawn + (draw is not None), missed + (draw is None)
            assert experience.drawn <= max(0, experience.added - 30)
        assert drawn == 3
        assert missed > 0


def test_a_killed_explorer_is_replaced(tmp_path: Path, ray: Any) -> None:
    with started(tmp_path) as experience:
        learn(experience, 5)
        victim = experience.actors[1]
        os.kill(pid_of(ray, victim), signal.SIGKILL)

        def replaced() -> bool:
            learn(experience, 1)
            return experience.restarts > 0

        wait_for(replaced, "replacement")
        experience.take_reports()

        def at_work() -> bool:
            learn(experience, 1)
            return any(report.worker_index == 1 for report in experience.take_reports())

        wait_for(at_work, "report of the new explorer")
        assert (experience.restarts, experience.generations) == (1, [0, 1])
        assert experience.actors[1] is not victim


def test_an_explorer_that_keeps_dying_ends_the_run(tmp_path: Path) -> None:
    with (
        started(tmp_path, "tests.environments:CrashEnv", {"at": 1}, 1, replay_shards=1) as experience,
        pytest.raises(TrainingError, match="worker 0 died 6 times in a row"),
    ):
        wait_for(experience.draw, "end", 300)


def test_a_killed_shard_is_replaced_by_an_empty_one(tmp_path: Path, ray: Any) -> None:
    with started(tmp_path) as experience:
        victim = experience.shards[0]
        stale = wait_for(
            lambda: next((draw for draw in learn(experience, 10) if draw.shard == 0), None), "draw of the first"
        )
        ray.kill(victim)

        def replaced() -> bool:
            learn(experience, 1)
            return experience.shards[0] is not victim

        wait_for(replaced, "replacement")
        assert (experience.restarts, experience.shard_generations[0]) == (1, 1)
        experience.update(stale, np.ones(64))  # serials of another life are not for the new shard
        wait_for(
            lambda: any(draw.shard == 0 and draw.generation == 1 for draw in learn(experience, 2)),
            "draw of the new one",
        )
        wait_for(lambda: {draw.shard for draw in learn(experience, 20)} == {0, 1}, "draws of both")
        assert experience.drawn <= 4.0 * (experience.added - 100)

        def fill() -> float:  # measured a few times a second
            return ray.get(experience.shards[0].draw.remote(1), timeout=LIMIT)[1]["buffer_fill"]

        wait_for(lambda: 0 < fill() < 1, "transitions in the new one")


@pytest.mark.parametrize("resting", [False, True], ids=["explorers at work", "explorers at rest"])
def test_the_only_shard_may_die(resting: bool, tmp_path: Path, ray: Any) -> None:
    with started(tmp_path, replay_shards=1) as experience:
        learn(experience, 5)
        if resting:
            rest(experience)
        ray.kill(experience.shards[0])
        wait_for(lambda: any(draw.generation == 1 for draw in learn(experience, 1)), "draw of the new one")
        assert experience.restarts == 1


@pytest.mark.parametrize("kind", ["RayActorError", "OutOfMemoryError", "NodeDiedError"])
def test_an_explorer_outlives_its_shard(kind: str, ray: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    explorer = object.__new__(ShardExplorer)
    monkeypatch.setattr(explorer, "explore", lambda *arguments: (SimpleNamespace(experienced=2), "report"))
    explorer.sent = "what the shard died of"
    shard = SimpleNamespace(add=SimpleNamespace(remote=lambda block: "the next"))
    error = getattr(ray.exceptions, kind)(*([] if kind == "RayActorError" else ["it is gone"]))
    monkeypatch.setattr(ray, "get", Mock(side_effect=error))
    assert explorer.explore_into(shard, {}, 0, np.ones(1)) == ("report", 2)
    assert explorer.sent == "the next"


def test_a_broken_contract_in_an_explorer_is_the_same_sentence(tmp_path: Path) -> None:
    kwargs = {"fault": "nan_reward", "at": 33}
    with (
        started(tmp_path, "tests.environments:BrokenEnv", kwargs) as experience,
        pytest.raises(ContractError, match=r"at step 33 of environment 0 of worker [01]: the reward is NaN"),
    ):
        learn(experience, 10**6)


def test_an_environment_that_cannot_be_made_in_a_worker_is_the_same_sentence(tmp_path: Path) -> None:
    kwargs = {"process": os.getpid()}
    with (
        pytest.raises(FeverError, match="only in its own process"),
        started(tmp_path, "tests.environments:OnlyHereEnv", kwargs),
    ):
        pytest.fail("it was made")


def test_what_is_saved_comes_back_into_as_many_shards(tmp_path: Path, ray: Any) -> None:
    folder = tmp_path / "replay"
    with started(tmp_path, buffer=400) as experience:

        def full() -> bool:
            learn(experience, 5)
            arrays = ray.get([shard.arrays.remote() for shard in experience.shards], timeout=LIMIT)
            return all(one["counters"][1] >= 200 for one in arrays)

        wait_for(full, "full shards")
        experience.save(folder)
        shards, added, drawn = load_shards(folder, 2)
        weights = ray.get(experience.params)
        names = sorted(path.name for path in folder.iterdir())
        assert [name.partition("-")[0] for name in names] == ["manifest.json", "shard", "shard"]
        assert 0 < drawn <= 4 * (added - 100)
        assert [arrays["counters"][0] for arrays in shards] == [200, 200]
        assert not np.array_equal(shards[0]["frames"], shards[1]["frames"])
    with started(tmp_path, publish=False, buffer=400) as experience:
        experience.restore(folder)
        assert (experience.added, experience.drawn) == (added, drawn)
        for shard, arrays in zip(experience.shards, shards, strict=True):
            there = ray.get(shard.arrays.remote(), timeout=LIMIT)
            for name, array in arrays.items():
                np.testing.assert_array_equal(array, there[name], err_msg=name)
        experience.publish(weights, 0, np.ones(4))
        assert {draw.shard for draw in learn(experience, 20)} == {0, 1}
        assert experience.added > added


def test_a_shard_that_is_gone_leaves_what_was_saved(tmp_path: Path, ray: Any) -> None:
    folder = tmp_path / "replay"
    with started(tmp_path, publish=False) as experience:
        experience.save(folder)
        experience.added = 7
        ray.kill(experience.shards[1])
        with suppress(ray.exceptions.RayActorError):  # it may answer for a moment
            while True:
                ray.get(experience.shards[1].identity.remote(), timeout=LIMIT)
        experience.save(folder)
        experience.save(tmp_path / "other")
    assert load_shards(folder, 2)[1] == 0
    assert len(list(folder.iterdir())) == 3  # two shards and the manifest
    assert not (tmp_path / "other").exists()


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes are looked at soon after their last sign of life."""
    monkeypatch.setattr("fever.replay.shards.STOPPED_SECONDS", 1.0)
    monkeypatch.setattr("fever.sampling.ray_pool.LOOK_SECONDS", 0.3)


@pytest.mark.usefixtures("impatient")
def test_a_stopped_shard_is_replaced_and_the_user_is_told_what_is_lost(tmp_path: Path, ray: Any) -> None:
    with started(tmp_path) as experience:
        wait_for(lambda: experience.sent[1] and learn(experience, 1), "transitions in the second shard")
        rest(experience)

        def held() -> int:
            return int(ray.get(experience.shards[1].arrays.remote(), timeout=LIMIT)["counters"][1])

        wait_for(lambda: held() == experience.sent[1], "all transitions that were sent")
        sent = experience.sent[1]
        os.kill(ray.get(experience.shards[1].identity.remote(), timeout=LIMIT)[1], signal.SIGSTOP)
        before = experience.shards[1]
        wait_for(lambda: learn(experience, 1) and experience.shards[1] is not before, "another shard", 60)
        wait_for(lambda: {draw.shard for draw in learn(experience, 4)} == {0, 1}, "draws of both shards")
        assert experience.restarts == 1
        (notice,) = experience.notices
        assert "shard 1 of the replay buffer was stopped; an empty one replaces it" in notice
        assert experience.measure()["transitions_lost"] >= min(sent, 2000) > 0


@pytest.mark.usefixtures("impatient")
def test_a_stopped_shard_is_not_saved_and_not_waited_for(tmp_path: Path, ray: Any) -> None:
    folder = tmp_path / "replay"
    with started(tmp_path, publish=False) as experience:  # nothing looks after shards but `save`
        experience.save(folder)
        os.kill(ray.get(experience.shards[0].identity.remote(), timeout=LIMIT)[1], signal.SIGSTOP)
        began = time.monotonic()
        experience.save(folder)
        assert time.monotonic() - began < 25
        assert any("not saved this time" in notice for notice in experience.notices)
    assert load_shards(folder, 2)[1] == 0


def test_a_shard_that_hangs_is_replaced(tmp_path: Path, ray: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fever.replay.shards.SHARD_SECONDS", 2.0)
    monkeypatch.setattr(ShardActor, "restore", lambda self, seconds: time.sleep(seconds))
    with started(tmp_path) as experience:
        learn(experience, 10)
        experience.shards[0].restore.remote(LIMIT)
        before = experience.shards[0]
        wait_for(lambda: experience.draw() and experience.shards[0] is not before, "another shard", 60)
        assert "did not answer for 2 s" in experience.notices[0]


def test_closing_closes_environments_and_ends_every_process(tmp_path: Path, ray: Any) -> None:
    folder = tmp_path / "closed"
    folder.mkdir()
    with started(tmp_path, "tests.environments:ClosingEnv", {"folder": str(folder)}) as experience:
        (folder / "closed-0").unlink()  # by the probe
        learn(experience, 2)
        pids = [pid_of(ray, actor) for actor in experience.actors]
    assert len(list(folder.iterdir())) == 2
    assert not experience.thread.is_alive()
    wait_for(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids), "end of the explorers", 20)
    for shard in experience.shards:
        with pytest.raises(ray.exceptions.RayActorError):
            ray.get(shard.arrays.remote(), timeout=LIMIT)


# By the command line.


@pytest.mark.slow
def test_an_interrupted_command_saves_all_and_can_be_resumed(tmp_path: Path) -> None:
    words = [
        "train", "CartPole-v1", "--algo", "apex", "--workers", "2", "--envs", "4", "--name", "a", "hidden=[8]",
        "batch=64", "warmup=200", "buffer=50000", "replay_ratio=8", "replay_shards=2", "report_steps=500",
        "explore_steps=20",
    ]  # fmt: skip
    mark = {"FEVER_TEST_MARK": str(tmp_path)}
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "120", **mark}
    process = subprocess.Popen(
        [sys.executable, "-m", "fever", *words],
        cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    metrics = tmp_path / "runs/a/metrics.jsonl"
    try:
        wait_for(
            lambda: process.poll() is not None or (metrics.exists() and metrics.stat().st_size), "row of metrics", 100
        )
        process.send_signal(signal.SIGINT)
        output, errors = process.communicate(timeout=120)
    finally:
        process.kill()
    assert process.returncode == 130, errors
    assert "warn" not in without_ray(errors).lower()
    assert "Traceback" not in errors
    assert "next: fever resume runs/a" in output
    run = tmp_path / "runs/a"
    names = sorted(path.name[:7] for path in (run / "replay").iterdir())
    assert names == ["manifes", "shard-0", "shard-1"]
    assert list(run.glob("checkpoints/0*/manifest.json"))
    wait_for(lambda: not processes_with(f"FEVER_TEST_MARK={tmp_path}"), "end of all processes")
    last = json.loads(metrics.read_text().splitlines()[-1])
    assert len(last["epsilons"]) == 2
    before = metrics.read_text().splitlines()
    done = run_fever(
        "resume", "a", "--stop-steps", str(last["steps"] + 2000), "--json", cwd=tmp_path, **mark
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "warn" not in without_ray(done.stderr).lower()
    assert json.loads(done.stdout.splitlines()[-1])["stop_reason"] == "steps"
    rows = [json.loads(line) for line in metrics.read_text().splitlines()[len(before) :]]
    assert rows[0]["iteration"] == last["iteration"] + 1
    assert rows[0]["buffer_fill"] >= last["buffer_fill"]
    assert rows[-1]["replay_ratio"] == pytest.approx(8, rel=0.2)
    assert rows[-1]["worker_restarts"] == 0
    wait_for(lambda: not processes_with(f"FEVER_TEST_MARK={tmp_path}"), "end of all processes")
