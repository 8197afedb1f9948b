"""The model of speed by count: exact where the law is its own, and honest about its error where it is not."""

from __future__ import annotations

import pytest

from fever.scaling.model import CORES, ENVIRONMENT, INFERENCE, LEARNER, METRICS, TRANSFER, Model, Point, Setting, fit
from tests.scaling.synthetic import waits_for_learner


def points(*counts: int, **law: float) -> list[Point]:
    found = []
    for count in counts:
        rate, shares = waits_for_learner(count, **law)
        found.append(Point(count, count, rate, {METRICS[name]: share for name, share in shares.items()}))
    return found


@pytest.mark.parametrize("computing", [0.0, 0.1, 0.5, 1.0])
def test_counts_beyond_the_cores_are_predicted(computing: float) -> None:
    model = Model(points(1, 2, 4, computing=computing), Setting(False, 2, computing))
    for workers in (1, 2, 3, 4, 8, 64):
        assert model.rate(workers) == pytest.approx(waits_for_learner(workers, computing=computing)[0], rel=0.02)


def test_what_computes_does_not_scale_beyond_the_cores_and_what_waits_does() -> None:
    counts = points(1, 2)  # both look alike on two cores
    assert Model(counts, Setting(False, 2, 1.0)).rate(16) < 2.3 * counts[0].rate
    assert Model(counts, Setting(False, 2, 0.0)).rate(16) > 10 * counts[0].rate


def test_cores_that_slow_each_other_are_part_of_the_model() -> None:
    """Two busy cores are each 15 % slower than one: counts of 1, 2 and 4 tell."""
    counts = []
    for workers, slower in ((1, 1.0), (2, 1.15), (4, 1.15)):
        rate, shares = waits_for_learner(workers, env=5e-3 * slower, computing=1.0, learner=0, transfer=0)
        counts.append(Point(workers, workers, rate, {METRICS[name]: share for name, share in shares.items()}))
    model = Model(counts, Setting(False, 2, 1.0))
    for point in counts:
        assert model.rate(point.workers) == pytest.approx(point.rate, rel=0.02)


def test_machines_of_a_job_bring_their_cores() -> None:
    counts = points(4, 8, 12, computing=1.0, cores=1000)
    model = Model(counts, Setting(False))
    assert model.rate(64) == pytest.approx(waits_for_learner(64, computing=1.0, cores=1000)[0], rel=0.02)


def test_an_asynchronous_learner_is_a_limit_of_its_own() -> None:
    """Workers take 200 samples per second each, the learner at most 1,000."""

    def at(workers: int) -> Point:
        rate = min(200.0 * workers, 1000.0)
        shares = {"environment": 0.9, "inference": 0.1, "transfer": 1 - rate / 1000, "learner": rate / 1000}
        return Point(workers, workers, rate, shares)

    model = Model([at(1), at(2), at(3)], Setting(True))
    assert model.rate(4) == pytest.approx(800, rel=0.02)
    assert model.rate(16) == pytest.approx(1000, rel=0.02)
    assert (model.bottleneck(4), model.bottleneck(16)) == (ENVIRONMENT, LEARNER)
    assert model.next_bottleneck(3) == (LEARNER, 6)


def test_without_times_the_speed_itself_is_fitted() -> None:
    law = {workers: workers / (1e-3 + 1e-4 * workers) for workers in (1, 2, 4, 16)}
    model = Model([Point(workers, workers, law[workers], {}) for workers in (1, 2, 4)], Setting(True, 16))
    assert not model.explains
    assert model.rate(16) == pytest.approx(law[16], rel=0.05)


@pytest.mark.parametrize(
    ("law", "part"),
    [
        ({"computing": 0.0}, ENVIRONMENT),
        ({"computing": 1.0}, CORES),
        ({"env": 1e-4, "learner": 1e-3}, LEARNER),
        ({"env": 1e-4, "transfer": 1e-3}, TRANSFER),
    ],
)
def test_the_bottleneck_is_named(law: dict[str, float], part: str) -> None:
    model = Model(points(1, 2, 4, **law), Setting(False, 2, law.get("computing", 0.0)))
    assert model.bottleneck(4) == part


def test_the_next_bottleneck_is_where_the_law_has_it() -> None:
    """5.1 ms of a worker against 0.2 ms of the learner per worker: 25 workers."""
    model = Model(points(1, 2, 4, transfer=0.0, learner=2e-4, cores=64), Setting(False, 64, 0.0))
    assert model.next_bottleneck(4) == (LEARNER, 32)


def test_workers_in_the_learners_process_do_not_bend_the_model() -> None:
    assert Model(points(0, 1, 2), Setting(False, 2)).rate(8) == Model(points(1, 2), Setting(False, 2)).rate(8)


def test_no_part_is_negative() -> None:
    assert fit([[1, 1], [1, 2], [1, 4]], [3.0, 2.0, 1.0], [1, 1, 1]) == (pytest.approx(2.0), 0.0)
    assert fit([[1, 1], [1, 2]], [1.0, 4.0], [1, 1]) == (0.0, pytest.approx(1.8))


def shared(workers: int, envs: int = 16) -> Point:
    """The exact law of workers that share environments and a batch of 1,024 steps; seconds of an iteration."""
    each = -(-envs // workers)
    samples = 1024 / workers  # of each worker
    parts = {
        ENVIRONMENT: samples * 2e-3, INFERENCE: samples * (1e-5 + 3e-4 / each), LEARNER: 0.03,
        TRANSFER: 0.01 + 0.001 * workers,
    }  # fmt: skip
    span = sum(parts.values())
    return Point(workers, workers, 1024 / span, {part: seconds / span for part, seconds in parts.items()})


def test_workers_that_share_environments_and_a_batch_are_predicted() -> None:
    """Calls of the network get smaller until every worker has one environment; a batch takes its learner as long."""
    setting = Setting(False, computing=0.0, envs=16, same_batch=True)
    model = Model([shared(1), shared(2), shared(4)], setting)
    for workers in (1, 2, 3, 4, 8, 16, 64):
        assert model.rate(workers) == pytest.approx(shared(workers).rate, rel=0.01)
    assert model.acting == (pytest.approx(1e-5), pytest.approx(3e-4))
    assert model.bottleneck(4) == ENVIRONMENT
    assert model.next_bottleneck(4) == (TRANSFER, 64)
    apart = Model([shared(1), shared(2), shared(4)], Setting(False, computing=0.0))
    assert apart.rate(64) > 1.2 * shared(64).rate, "it believes in batches that grow"


def test_workers_with_one_environment_each_have_one_kind_of_call() -> None:
    model = Model([shared(16), shared(32)], Setting(False, computing=0.0, envs=16, same_batch=True))
    assert model.acting == (pytest.approx(3.1e-4), 0.0)
    assert model.rate(64) == pytest.approx(shared(64).rate, rel=0.01)
