from __future__ import annotations

import pytest

from fever.algos.base import Iteration
from fever.config import Stop
from fever.sampling.spec import Episode, Report
from fever.training.progress import MOST_INFO_NAMES, Progress, phase_shares


def report(env: float, total: float) -> Report:
    return Report(100, [], 0, 0, {"env": env, "total": total}, "here")


def test_shares_of_a_synchronous_iteration_add_up() -> None:
    iteration = Iteration([report(1.0, 2.0), report(1.0, 2.0)], {}, {"sample": 2.5, "learn": 1.5})
    shares = phase_shares(iteration, 4.0, workers=2)
    assert shares == {"time_env": 0.25, "time_inference": 0.25, "time_transfer": 0.125, "time_learn": 0.375}


def test_workers_are_never_busy_for_more_than_all_of_the_time() -> None:
    """Fragments that waited in a queue were made before the iteration that learns from them."""
    iteration = Iteration([report(3.0, 4.0)] * 4, {}, {"wait": 0.1, "learn": 0.9})
    shares = phase_shares(iteration, 1.0, workers=2)
    assert shares["time_env"] + shares["time_inference"] == pytest.approx(1)
    assert shares["time_env"] == pytest.approx(0.75)
    assert shares["time_transfer"] + shares["time_learn"] == pytest.approx(1)


def test_an_environment_that_reports_very_much_does_not_flood_the_metrics() -> None:
    progress = Progress(Stop())
    many = [{"info": {f"x{number}": 1.0 for number in range(50)}}]
    first = progress.info_means([{"info": {"y": 1.0}}, {"info": {"y": 4.0}}, {"info": {}}])
    assert first == {"info/y": 2.5}
    names = progress.info_means(many)
    assert list(names) == [f"info/x{number}" for number in range(MOST_INFO_NAMES - 1)]
    assert progress.info_means(many).keys() == names.keys()


def counted(returns: list[float], window: int = 3) -> Progress:
    progress = Progress(Stop(window=window))
    episodes = [Episode(value, 10, 0, {}) for value in returns]
    progress.count(Iteration([Report(40, episodes, 1, 0, {}, "here")], {}), 40)
    return progress


def test_a_resumed_run_continues_the_counters() -> None:
    before = Progress(Stop(window=3))
    episodes = [Episode(float(number), 10, 0, {}, counts=number != 3) for number in range(4)]
    rows = before.count(Iteration([Report(40, episodes, 1, 0, {}, "here")], {}), 40)
    assert [row["episode"] for row in rows] == [1, 2, 3, 4]
    assert before.statistics()["return_mean"] == 1
    after = Progress(Stop(window=3))
    after.restore(before.iteration, before.state())
    assert (after.iteration, after.episodes, after.generation) == (1, 4, 1)
    assert after.statistics() == before.statistics()
    many = counted([0.0, 9.0] * 60)
    after.restore(many.iteration, many.state())
    assert after.score == many.score


def test_the_score_is_the_mean_minus_its_standard_error() -> None:
    assert counted([1.0] * 19).score is None
    assert counted([5.0] * 20).score == 5
    returns = [0.0, 1.0] * 10  # standard error sqrt(20 * 0.25 / 19 / 20), more than 2 % of the range: all are taken
    assert counted(returns).score == pytest.approx(0.5 - (0.25 / 19) ** 0.5)


def test_the_score_is_over_more_episodes_where_they_vary() -> None:
    steady = counted([-1000.0] + [0.0] * 80 + [0.0, 1.0] * 10)  # small beside the range: the last 20 are enough
    assert steady.score == pytest.approx(0.5 - (0.25 / 19) ** 0.5)
    noisy = counted([2.0] * 50 + [0.0, 1.0] * 50)  # the last 100, and not the 50 before
    assert noisy.score == pytest.approx(0.5 - (0.25 / 99) ** 0.5)
    assert counted([1e9 + value for value in [0.0, 1.0] * 10]).score == pytest.approx(1e9 + 0.3853, abs=1e-3)


def test_an_evaluation_decides_whether_the_goal_is_reached() -> None:
    progress = counted([10.0] * 3)
    progress.stop = Stop(reward=5, window=3)
    assert progress.stop_reason(40) == "reward"
    progress.evaluates = True
    assert progress.stop_reason(40) == ""
    progress.evaluation = {"steps": 40, "return_mean": 5.0}
    assert progress.stop_reason(40) == "reward"
