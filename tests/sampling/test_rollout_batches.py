"""Batches of whole episodes: the same whoever plays them, and laid end to end."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fever
from fever.algos.normalize import Moments
from fever.algos.on_policy import join_episodes
from fever.algos.trpo import TRPO
from fever.envs.source import EnvSource
from fever.errors import ContractError
from fever.sampling.rollouts import LocalRollouts, RayRollouts, Rollouts
from fever.sampling.spec import Fragment
from fever.training.resume import resume
from tests.helpers import wait_for
from tests.sampling.helpers import (
    DRAWN,
    LIMIT,
    SIZES,
    algorithm,
    assert_same,
    player,
    rollouts,
    seed_of,
    spec_of,
    weights_of,
)

pytestmark = pytest.mark.ray


def reference(iterations: int, steps: int = 100) -> list[list[Fragment]]:
    """The batches of one environment in this process."""
    with rollouts(0) as (pool, learner):
        return batches(pool, learner, iterations, steps)


def batches(
    pool: Rollouts, learner: TRPO, iterations: int, steps: int = 100, before: Callable[[int], None] = lambda _: None
) -> list[list[Fragment]]:
    """What a training collects, with other weights in every iteration."""
    first, found = 0, []
    for iteration in range(iterations):
        before(iteration)
        version = pool.broadcast(weights_of(learner, iteration))
        found.append(pool.collect(first, steps))
        assert {part.version for part in found[-1]} == {version}
        first += len(found[-1])
    return found


def check_batches(
    pool: Rollouts, learner: TRPO, iterations: int, steps: int = 100, before: Callable[[int], None] = lambda _: None
) -> list[list[Fragment]]:
    """Collect as a training does; it must be what one environment in this process gives."""
    found = batches(pool, learner, iterations, steps, before)
    for here, there in zip(reference(iterations, steps), found, strict=True):
        assert_same(here, there)
    return found


@pytest.fixture
def learner() -> TRPO:
    return algorithm(EnvSource(DRAWN))


def test_a_batch_is_the_fewest_rollouts_with_enough_steps(learner: TRPO) -> None:
    made = reference(4)
    for parts in made:
        assert sum(part.steps for part in parts) >= 100 > sum(part.steps for part in parts[:-1])
    runner, _ = player(DRAWN)
    flat, version = [part for parts in made for part in parts], [i for i, parts in enumerate(made) for _ in parts]
    for number, (part, iteration) in enumerate(zip(flat, version, strict=True)):
        assert_same(runner.play(weights_of(learner, iteration), iteration + 1, [number]), [part])
    assert len({part.steps for part in flat}) == 5


def test_one_rollout_may_be_enough() -> None:
    assert [[part.steps for part in parts] for parts in reference(2, steps=1)] == [
        [part.steps] for part in reference(1)[0][:2]
    ]


@pytest.fixture(scope="module")
def pair(ray: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Two workers for all tests that need two, and the folder that their environments look into."""
    folder = tmp_path_factory.mktemp("pair")
    with rollouts(2, {"milliseconds": 2, "folder": str(folder)}) as (pool, _):
        yield pool, folder


@pytest.fixture
def two(ray: Any, pair: Any) -> tuple[RayRollouts, Path]:
    """The same, as if nothing had happened before."""
    pool, folder = pair
    calls = list(pool.pending)
    assert not calls or not ray.wait(calls, num_returns=len(calls), timeout=LIMIT)[1]
    for call in calls:  # whose results nobody wants
        pool.idle.append(pool.pending.pop(call)[0])
    for file in folder.iterdir():
        file.unlink()
    pool.lengths.clear()
    pool.restarts = 0
    return pool, folder


def close_gate(folder: Path, number: int, others: int = 10**9) -> None:
    """Let a rollout wait until so many others have ended."""
    (folder / "new").write_text(f"{seed_of(number)} {others}")
    (folder / "new").rename(folder / "gate")


@pytest.mark.parametrize("count", [1, 3])
def test_any_number_of_workers_gives_the_same_batches(ray: Any, count: int) -> None:
    with rollouts(count, {"milliseconds": 2}) as (pool, learner):
        assert isinstance(pool, RayRollouts)
        check_batches(pool, learner, 6)
        assert pool.restarts == 0


def test_two_workers_give_the_same_batches_and_share_the_work(two: Any, learner: TRPO) -> None:
    found = check_batches(two[0], learner, 6)
    assert {part.worker_index for parts in found for part in parts} == {0, 1}
    exactly = sum(part.steps for part in found[0])
    assert len(check_batches(two[0], learner, 1, steps=exactly)[0]) == len(found[0])


def test_weights_are_stored_once_per_broadcast(two: Any, ray: Any, learner: TRPO, monkeypatch: Any) -> None:
    stored, put = [], ray.put
    monkeypatch.setattr(ray, "put", lambda value: stored.append(value) or put(value))
    check_batches(two[0], learner, 3)
    assert len(stored) == 3
    assert isinstance(two[0].params, ray.ObjectRef)
    np.testing.assert_array_equal(ray.get(two[0].params)["policy/w"], weights_of(learner, 2)["policy/w"])


def test_a_long_episode_holds_up_nobody_else(two: Any, learner: TRPO) -> None:
    """The first rollout ends only after six others have."""
    pool, folder = two
    close_gate(folder, 0, others=6)
    (found,) = check_batches(pool, learner, 1, steps=200)
    slow = found[0].worker_index
    assert [part.worker_index for part in found[1:7]] == [1 - slow] * 6


def test_a_long_episode_that_was_not_needed_does_not_hold_up_the_next_batches(two: Any, learner: TRPO) -> None:
    """Each batch is one rollout. Two are under way at first, and the second waits until the test opens its gate."""
    pool, folder = two
    close_gate(folder, 1)

    def before(iteration: int) -> None:
        if iteration == 1:
            wait_for((folder / "waiting").exists, "waiting episode")
        if iteration == 5:
            (folder / "open").touch()

    found = check_batches(pool, learner, 6, steps=1, before=before)
    assert len({part.worker_index for parts in found[:5] for part in parts}) == 1


def test_an_episode_of_older_weights_is_made_anew(two: Any, learner: TRPO) -> None:
    """As above, but the second rollout ends just before the next batch begins, which needs it."""
    pool, folder = two
    close_gate(folder, 1)

    def before(iteration: int) -> None:
        if iteration == 1:
            wait_for((folder / "waiting").exists, "waiting episode")
            (folder / "open").touch()
            wait_for((folder / f"ended-{seed_of(1)}").exists, "ended episode")

    check_batches(pool, learner, 2, steps=1, before=before)


def test_a_worker_killed_in_the_middle_of_an_episode_changes_nothing(two: Any, ray: Any, learner: TRPO) -> None:
    pool, folder = two
    workers = {ray.get(actor.facts.remote())["pid"]: index for index, actor in enumerate(pool.actors)}
    generations, killed = list(pool.generations), []
    close_gate(folder, len(reference(1)[0]) + 1)  # in the second batch

    def kill() -> None:
        wait_for((folder / "waiting").exists, "waiting episode")
        killed.append(int((folder / "waiting").read_text()))
        os.kill(killed[0], signal.SIGKILL)

    thread = threading.Thread(target=kill)
    thread.start()
    check_batches(pool, learner, 3)
    thread.join()
    victim = workers[killed[0]]
    assert pool.restarts == 1
    assert ray.get(pool.actors[victim].facts.remote())["pid"] not in workers
    assert pool.generations == [count + (index == victim) for index, count in enumerate(generations)]


def test_a_worker_killed_between_batches_changes_nothing(two: Any, ray: Any, learner: TRPO) -> None:
    pool, _ = two

    def before(iteration: int) -> None:
        if iteration == 1:
            os.kill(ray.get(pool.actors[0].facts.remote())["pid"], signal.SIGKILL)

    check_batches(pool, learner, 4, before=before)
    assert pool.restarts == 1


def test_broken_contract_in_a_worker_is_the_same_sentence(ray: Any) -> None:
    source = EnvSource("tests.environments:BrokenEnv", {"fault": "nan_reward", "at": 3, "length": 5})
    learner = algorithm(source)
    pool = RayRollouts(spec_of(learner, source), learner.task.observation, learner.task.action, None, 1)
    try:
        pool.broadcast(weights_of(learner))
        with pytest.raises(ContractError, match="at step 3 of rollout 8: the reward is NaN"):
            pool.collect(8, 10)
    finally:
        pool.close()


def test_a_training_is_the_same_with_workers_and_when_it_was_resumed_without(ray: Any, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"algo": "trpo", "runs": tmp_path, "hidden": [8], "timesteps_per_batch": 200}
    plain = fever.train("CartPole-v1", stop={"iterations": 4}, **settings).run
    run = fever.train("CartPole-v1", workers=2, stop={"iterations": 2}, **settings).run
    stop = run.config.stop.model_copy(update={"iterations": 4})
    resume(run, run.config.model_copy(update={"stop": stop, "workers": 0}))
    found = run.checkpoint().arrays("policy/")
    for name, array in plain.checkpoint().arrays("policy/").items():
        np.testing.assert_array_equal(array, found[name], err_msg=name)
    assert [row["length"] for row in run.episodes()] == [row["length"] for row in plain.episodes()]
    assert {row["worker"] for row in run.episodes()} == {0, 1}


# One batch out of many episodes.


def test_a_chain_is_episodes_one_after_the_other_and_rows_that_do_not_count() -> None:
    parts = reference(1)[0]
    taken = sum(part.steps for part in parts)
    batch = join_episodes(parts, taken + 7)
    assert {name: len(array) for name, array in batch.items() if name != "state"} == {
        name: taken + 7 + SIZES.get(name, 0) for name in parts[0].arrays if name != "state"
    }
    place = 0
    for part in parts:
        end = place + part.steps
        for name, array in part.arrays.items():
            if name != "state":
                assert batch[name].dtype == array.dtype
                np.testing.assert_array_equal(batch[name][place:end], array[: part.steps], err_msg=name)
        assert (batch["terminated"] | batch["truncated"])[place:end, 0].tolist() == [False] * (part.steps - 1) + [True]
        place = end
    assert batch["valid"][:, 0].tolist() == [True] * taken + [False] * 7
    assert batch["terminated"][taken:].all()
    assert np.isnan(batch["bootstrap"][taken:]).all()
    for name in ("rewards", "first", "truncated"):
        assert not batch[name][taken:].any(), name
    for name in ("observations", "actions", "log_probs"):
        assert (batch[name][taken:] == batch[name][taken - 1]).all(), name  # nothing that was never seen
    exact = join_episodes(parts, taken)
    assert len(exact["rewards"]) == taken
    assert exact["valid"].all()


@pytest.mark.parametrize("target", ["Pendulum-v1", "tests.environments:MaskedEnv"])
def test_rows_that_do_not_count_change_nothing(target: str) -> None:
    source, learned = EnvSource(target), []
    for spare in (0, 200):
        learner = algorithm(source, value_minibatch=10**6, value_epochs=5)
        shape = learner.network.input_shape
        learner.normalizer.observations = Moments(50.0, np.full(shape, 0.3), np.full(shape, 0.5))
        pool = LocalRollouts(spec_of(learner, source, gamma=0.99), learner.task.observation, learner.task.action, 30)
        pool.broadcast(learner.weights())
        parts = pool.collect(0, 100)
        learner.rows = sum(part.steps for part in parts) + spare
        learned.append((learner, learner.learn(parts)))
    (plain, metrics), (padded, other_metrics) = learned
    assert metrics["updates"] == 5
    assert metrics["step_fraction"] > 0
    assert metrics == pytest.approx(other_metrics, rel=1e-3, abs=1e-5)
    assert (plain.steps, plain.normalizer.returns) == (padded.steps, padded.normalizer.returns)
    for name, array in plain.weights().items():
        np.testing.assert_allclose(array, padded.weights()[name], rtol=1e-3, atol=1e-4, err_msg=name)
