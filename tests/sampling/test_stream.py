"""The stream of fragments: its queue by hand, then on a real Ray: who waits for whom, versions, deaths, the end."""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import fever.sampling.ray_pool
from fever.algos.base import SamplingContext
from fever.algos.impala import Impala, ImpalaConfig
from fever.envs.source import EnvSource
from fever.errors import ContractError, TrainingError
from fever.policy import Params
from fever.sampling.spec import Fragment
from fever.sampling.stream import LocalStream, RayStream
from fever.sampling.worker_actor import Output
from tests.factories import make_task
from tests.helpers import wait_for

LIMIT = 120  # seconds that anything here may take on a busy machine


pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("ray")]


def learner(source: EnvSource, workers: int, **settings: Any) -> Impala:
    """Of fragments of 10 steps of 2 environments; `fragments` * `queue` of them wait at most."""
    settings = {"hidden": (8,), "steps": 10, "minibatches": 1, **settings}
    return Impala(ImpalaConfig(**settings), make_task(source, 2 * max(1, workers), workers))


@contextmanager
def started(
    env: str = "CartPole-v1",
    kwargs: dict[str, Any] | None = None,
    workers: int = 2,
    folder: Path | None = None,
    publish: bool = True,
    **settings: Any,
) -> Iterator[tuple[Any, Params]]:
    """A stream, its samplers at work with weights of version 0, and these weights."""
    source = EnvSource(env, kwargs or {})
    algorithm = learner(source, workers, **settings)
    stream = algorithm.start(SamplingContext(source, folder, 0))
    try:
        if publish:
            stream.publish(algorithm.weights(), 0)
        yield stream, algorithm.weights()
    finally:
        stream.close()


def pids_of(stream: RayStream) -> list[int]:
    return [facts["pid"] for facts in stream.ray.get([actor.facts.remote() for actor in stream.actors], timeout=LIMIT)]


# The queue by hand: a stream without samplers, whose calls bring what the test says.


@contextmanager
def by_hand(queue_size: int = 100, max_lag: int = 100) -> Iterator[tuple[RayStream, Callable[..., None]]]:
    """A stream, and a function that lets a fragment of some worker and version arrive."""
    algorithm = learner(EnvSource("CartPole-v1"), 1)
    spec: Any = SimpleNamespace(source=None, cpus=None)  # no worker is made
    stream = RayStream(spec, algorithm.task.observation, algorithm.task.action, 0, 0, queue_size, max_lag)
    stream.fetch = lambda call: (call, Output("", {}))  # type: ignore[method-assign, assignment, return-value]

    def arrive(version: int, worker: int = 0) -> None:
        fragment = Arrived(0, [], worker, version, {}, "", {})
        stream.pending[fragment] = worker
        stream.receive(fragment)

    try:
        yield stream, arrive
    finally:
        stream.close()


class Arrived(Fragment):
    """A fragment that is also the call that brought it."""

    __hash__ = object.__hash__


def versions(fragments: list[Fragment]) -> list[int]:
    return [fragment.version for fragment in fragments]


def test_the_oldest_fragments_are_dropped_where_there_is_no_room() -> None:
    with by_hand(queue_size=3) as (stream, arrive):
        for version in range(8):
            arrive(version)
            assert stream.waiting == min(version + 1, 3)
        assert stream.dropped == 5
        assert versions(stream.next(2)) == [5, 6]
        arrive(8)
        assert versions(stream.next(2)) == [7, 8]
        assert (stream.waiting, stream.dropped) == (0, 5)


def test_fragments_come_in_the_order_of_their_arrival_whoever_made_them() -> None:
    with by_hand() as (stream, arrive):
        for worker in (1, 1, 0, 1, 2):
            arrive(0, worker)
        assert [fragment.worker_index for fragment in stream.next(5)] == [1, 1, 0, 1, 2]


@pytest.mark.parametrize("order", [[1, 2, 6, 7, 8, 9], [6, 1, 7, 8, 2, 9], [6, 7, 8, 9, 2, 1]])
def test_no_fragment_that_is_too_old_is_given_out_wherever_it_waits(order: list[int]) -> None:
    with by_hand(max_lag=3) as (stream, arrive):
        for version in order:
            arrive(version)
        stream.version = 9
        assert sorted(versions(stream.next(4))) == [6, 7, 8, 9]
        assert (stream.waiting, stream.dropped) == (0, 2)


def test_what_a_replaced_sampler_still_brings_is_not_taken() -> None:
    with by_hand() as (stream, _):
        stream.receive(Arrived(0, [], 0, 0, {}, "", {}))
        assert stream.waiting == 0


# In this process.


def test_one_sampler_in_this_process_is_deterministic_and_fresh() -> None:
    with started(workers=0) as (here, weights), started(workers=0) as (there, _):
        assert isinstance(here, LocalStream)
        for version in (0, 1, 2):
            here.publish(weights, version)
            there.publish(weights, version)
            pair = here.next(2), there.next(2)
            assert versions(pair[0]) == versions(pair[1]) == [version] * 2
            for one, other in zip(*pair, strict=True):
                for name, array in one.arrays.items():
                    np.testing.assert_array_equal(array, other.arrays[name], err_msg=name)
        one, two = (fragment.arrays["observations"] for fragment in here.next(2))
        np.testing.assert_array_equal(one[-1], two[0])  # one stream, cut into fragments
        assert (here.waiting, here.dropped) == (0, 0)


# With workers.


@pytest.mark.slow
def test_a_slow_sampler_holds_up_nobody() -> None:
    with started("tests.environments:UnevenEnv", {"milliseconds": 10}, fragments=4) as (stream, _):
        wait_for(lambda: stream.waiting, "fragment")
        began, counts = time.monotonic(), Counter[int]()
        while not counts[0] or counts.total() < 40:
            assert time.monotonic() < began + LIMIT
            fragments = stream.next(4)
            assert len(fragments) == 4
            counts.update(fragment.worker_index for fragment in fragments)
        assert counts[1] > 1.5 * counts[0]  # nominally ten times as many, but as many if they were held up


def test_samplers_never_wait_and_the_newest_fragments_are_kept() -> None:
    # One environment step after the other is counted in the observation: the place of a fragment in all that was made.
    kwargs = {"milliseconds": 1, "limit": 10**9}
    with started("tests.environments:SleepEnv", kwargs, 1, fragments=2, queue=2) as (stream, _):
        wait_for(lambda: stream.dropped, "dropped fragment")
        before = stream.dropped
        begin = time.monotonic()
        while stream.dropped <= before + 10:  # while somebody learns
            assert time.monotonic() < begin + LIMIT
            with stream.arrival:
                assert stream.waiting <= 4
            time.sleep(0.01)
        with stream.arrival:  # nothing arrives between these, but for what `next` waits for
            fragments, dropped = stream.next(4), stream.dropped
            (following,) = stream.next(1)
        assert [fragment.arrays["observations"][0, 0, 0] for fragment in fragments] == [
            10 * (dropped + place) for place in range(4)
        ]
        assert following.arrays["observations"][0, 0, 0] == 10 * (dropped + 4)


def test_every_fragment_was_made_with_the_weights_of_its_version() -> None:
    source = EnvSource("CartPole-v1")
    algorithm = learner(source, 2)
    network, distribution, weights = algorithm.network, algorithm.distribution, {}
    stream = algorithm.start(SamplingContext(source, None, 0))
    try:
        latest: Counter[int] = Counter()
        for version in range(30):
            rng = np.random.default_rng(version)
            weights[version] = {
                name: rng.normal(0, 0.5, value.shape).astype(np.float32) if name.startswith("policy") else value
                for name, value in algorithm.weights().items()
            }
            stream.publish(weights[version], version)
            for fragment in stream.next(2):
                assert latest[fragment.worker_index] <= fragment.version <= version
                latest[fragment.worker_index] = fragment.version
                rows, actions = fragment.arrays["observations"][:-1].reshape(20, 4), fragment.arrays["actions"]
                outputs, _ = network.act(weights[fragment.version], rows, np.zeros((20, 0), np.float32))
                np.testing.assert_allclose(
                    distribution.log_prob(outputs, actions.reshape(20, -1)),
                    fragment.arrays["log_probs"].reshape(20),
                    rtol=1e-4,
                    atol=1e-5,
                )
        stream.publish(weights[7], 99)
        begin = time.monotonic()
        while not all(version == 99 for version in versions(stream.next(2))):
            assert time.monotonic() < begin + LIMIT
    finally:
        stream.close()


@pytest.mark.slow
def test_no_fragment_is_older_than_allowed_though_one_sampler_is_slow() -> None:
    kwargs = {"milliseconds": 10}
    with started("tests.environments:UnevenEnv", kwargs, max_lag=3, fragments=2) as (stream, weights):
        begin, version = time.monotonic(), 0
        while version < 15 or not stream.dropped:
            assert time.monotonic() < begin + LIMIT
            assert all(version - 3 <= given <= version for given in versions(stream.next(2)))
            version += 1
            stream.publish(weights, version)


def test_a_killed_sampler_is_replaced_and_the_stream_goes_on() -> None:
    with started("tests.environments:SleepEnv", {"milliseconds": 2}) as (stream, _):
        stream.next(2)
        victim = stream.actors[1]
        pid = pids_of(stream)[1]
        os.kill(pid, signal.SIGKILL)
        begin = time.monotonic()
        while not stream.restarts:
            assert time.monotonic() < begin + LIMIT
            assert len(stream.next(1)) == 1
        assert (stream.restarts, stream.generations) == (1, [0, 1])
        assert stream.actors[1] is not victim
        stream.next(stream.waiting)
        while all(fragment.worker_index != 1 for fragment in stream.next(1)):  # the new one's, after those before
            assert time.monotonic() < begin + LIMIT
        assert stream.restarts == 1
        assert pids_of(stream)[1] != pid


def test_a_sampler_that_dies_in_an_environment_costs_one_worker(tmp_path: Path) -> None:
    kwargs = {"marker": str(tmp_path / "crashed"), "at": 25}
    with started("tests.environments:CrashEnv", kwargs, 1) as (stream, _):
        assert len(stream.next(4)) == 4
        assert stream.restarts == 1


def test_a_sampler_that_keeps_dying_ends_the_run() -> None:
    with started("tests.environments:CrashEnv", {"at": 1}, 1) as (stream, _):
        for _ in range(2):  # and again, whoever asks
            with pytest.raises(TrainingError, match="worker 0 died 6 times in a row"):
                stream.next(1)
        stream.thread.join(LIMIT)
        assert not stream.thread.is_alive()


def test_a_broken_contract_is_the_same_sentence_in_the_learner() -> None:
    kwargs = {"fault": "nan_reward", "at": 33}
    with started("tests.environments:BrokenEnv", kwargs) as (stream, _):
        sentence = r"at step 33 of environment 0 of worker [01]: the reward is NaN"
        with pytest.raises(ContractError, match=sentence):  # noqa: PT012
            for _ in range(100):
                stream.next(1)


def test_closing_closes_environments_and_ends_every_process(tmp_path: Path) -> None:
    with started("tests.environments:ClosingEnv", {"folder": str(tmp_path)}, 1) as (stream, _):
        (tmp_path / "closed-0").unlink()  # by the probe
        stream.next(2)
        facts = stream.ray.get(stream.actors[0].facts.remote(), timeout=LIMIT)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["closed-0", "closed-1"]
    assert not stream.thread.is_alive()
    wait_for(lambda: not Path(f"/proc/{facts['pid']}").exists(), "end of the process")
    assert not {"jax", "fever.algos.impala", "fever.training.trainer", "torch"} & set(facts["modules"])


def test_closing_does_not_wait_for_calls_that_take_minutes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fever.sampling.ray_pool, "CLOSE_SECONDS", 1)
    with started("tests.environments:SleepEnv", {"milliseconds": 20_000}, publish=False) as (stream, weights):
        pids = pids_of(stream)
        stream.publish(weights, 0)
        wait_for(lambda: len(stream.pending) == 4, "call")
        began = time.monotonic()
    assert time.monotonic() < began + 60  # a call takes 400 s
    assert not stream.thread.is_alive()
    wait_for(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids), "end of the processes")
