"""What a measurement is, and what is read from the run directory that it leaves."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fever.config import RunConfig, Stop, validate
from fever.errors import FeverError
from fever.plain_yaml import read as read_yaml
from fever.runs.run import to_yaml
from fever.scaling.measure import read
from fever.scaling.study import what_is_shared
from fever.scaling.warmup import MEASURED, StopWhenMeasured, WarmUp
from fever.training.named import make_callbacks
from tests.scaling.synthetic import plan, row, write_run


def test_rows_of_the_warm_up_do_not_count(tmp_path: Path) -> None:
    """It compiles for 8 s, and then takes 1,000 steps in half a second."""
    rows = [row(1, 8.0), *(row(number, 8.0 + 0.5 * (number - 1)) for number in range(2, 22))]
    found = read(plan(2), 2, 1, write_run(tmp_path / "run", rows, workers=2))
    assert found.problem is None
    assert found.samples_per_second == pytest.approx(2000)
    assert found.updates_per_second == pytest.approx(80)
    assert found.samples_per_iteration == pytest.approx(1000)
    assert found.seconds == pytest.approx(9.0)  # without the second after the first gradient steps
    assert (found.workers, found.note) == (2, None)


def test_replay_is_warm_when_it_learns(tmp_path: Path) -> None:
    rows = [row(number, float(number), updates=0.0) for number in range(1, 6)]
    rows += [row(number, float(number)) for number in range(6, 20)]
    found = read(plan(1), 1, 1, write_run(tmp_path / "run", rows))
    assert found.seconds == 12.0


def test_long_iterations_count_for_more(tmp_path: Path) -> None:
    rows = [row(1, 1.0), row(2, 2.0), row(3, 3.0, time_env=0.0), row(4, 12.0, time_env=1.0)]
    assert read(plan(1), 1, 1, write_run(tmp_path / "run", rows)).shares["time_env"] == pytest.approx(0.9)


def test_times_and_updates_that_are_not_known_stay_unknown(tmp_path: Path) -> None:
    rows = [{name: value for name, value in row(n, n).items() if name not in ("updates", "time_env")} for n in range(9)]
    found = read(plan(1), 1, 1, write_run(tmp_path / "run", rows))
    assert (found.updates_per_second, found.shares) == (None, {})


def test_the_target_is_timed_from_the_first_row(tmp_path: Path) -> None:
    """The mean return is 20 per iteration, and counts from 20 episodes on."""
    run = write_run(tmp_path / "run", [row(number, 5.0 + number) for number in range(1, 21)])
    assert read(plan(1, target=100.0), 1, 1, run).target_seconds == 4.0
    assert read(plan(1, target=20.0), 1, 1, run).target_seconds == 1.0
    assert read(plan(1, target=1000.0), 1, 1, run).target_seconds is None


def test_a_run_that_was_never_warm_is_a_problem(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", [row(1, 20.0, updates=0.0)])
    assert read(plan(1), 1, 1, run).problem == "run ended after 20s, before it was warm; raise --longest"


def test_a_short_measurement_is_noted(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", [row(number, float(number)) for number in range(1, 5)])
    assert read(plan(1), 1, 1, run).note == "measured for 2s only"


def test_hosts_that_were_not_used_are_a_problem(tmp_path: Path) -> None:
    rows = [row(number, float(number)) for number in range(1, 20)]
    run = write_run(tmp_path / "run", rows, hosts={"node1": 10, "node2": 10})
    assert read(plan(3, kind="hosts"), 3, 1, run).problem == "it sampled on 2 hosts only"
    assert read(plan(2, kind="hosts"), 2, 1, run).problem is None


def test_damaged_rows_are_left_out(tmp_path: Path) -> None:
    rows: list[Any] = [row(number, float(number)) for number in range(1, 20)]
    rows[10] = {"iteration": 11, "seconds": "x"}
    assert read(plan(1), 1, 1, write_run(tmp_path / "run", rows)).samples_per_second == pytest.approx(1000)
    with pytest.raises(FeverError, match="no samples"):
        read(plan(1), 1, 1, write_run(tmp_path / "none", [row(n, float(n), steps=5) for n in range(9)]))


def test_a_run_is_an_ordinary_one_with_its_own_end(tmp_path: Path) -> None:
    config = RunConfig(
        env="CartPole-v1",
        callbacks=("my:Own",),
        stop=Stop(steps=9000, reward=475, iterations=3),
        eval_every=100,
        seed=5,
    )
    made = plan(1, 2, config=config, target=475.0).run_config(2, 3, tmp_path)
    again = validate(RunConfig, read_yaml(to_yaml(made)), "file")
    assert (again.workers, again.seed, again.name, again.eval_every) == (2, 7, "workers-2-round-3", None)
    assert again.stop == Stop(steps=9000, seconds=600.0)
    assert again.callbacks[0] == "my:Own"
    (own,) = make_callbacks(again.model_copy(update={"callbacks": again.callbacks[1:]}))
    assert isinstance(own, StopWhenMeasured)
    assert (own.seconds, own.target) == (10.0, 475.0)


def test_nodes_and_hosts_are_options_of_the_job(tmp_path: Path) -> None:
    nodes = plan(1, 2, kind="nodes", place={"on": "slurm", "cpus_per_node": 36})
    assert nodes.words(2) == ["--on", "slurm", "--cpus-per-node", "36", "--nodes", "2"]
    assert nodes.run_config(2, 1, tmp_path).workers is None
    assert plan(1, 2).words(2) == []


@pytest.mark.parametrize(("target", "last"), [(None, 7), (180.0, 9)])
def test_the_callback_ends_a_run_that_was_measured(target: float | None, last: int) -> None:
    """Warm after 2 s, measured for 5; the return 180 is reached in the ninth iteration."""
    callback, asked = StopWhenMeasured(5, target), []
    info: Any = SimpleNamespace(config=RunConfig(env="CartPole-v1"), request_stop=asked.append)
    for number in range(1, 20):
        info.metrics = row(number, float(number))
        callback.on_iteration(info)
        if asked:
            break
    assert (number, asked) == (last, [MEASURED])


def test_without_counted_updates_a_run_is_warm_after_its_first_row() -> None:
    warmup = WarmUp()
    assert [warmup.ends_with({"seconds": seconds}) for seconds in (3.0, 3.5, 4.0)] == [False, False, True]


@pytest.mark.parametrize(
    ("fields", "envs", "same_batch"),
    [
        ({}, 8, True),
        ({"envs": 3, "algo": "a2c"}, 3, True),
        ({"scale_batch": True}, None, False),
        ({"algo": "trpo", "settings": {"timesteps_per_batch": 100}}, None, True),
        ({"algo": "impala"}, 8, True),
        ({"algo": "dqn"}, 8, False),
        ({"algo": "rllib:PPO"}, None, True),
        ({"algo": "rllib:PPO", "envs": 4}, 4, True),
    ],
)
def test_the_model_knows_what_workers_share(fields: dict[str, Any], envs: int | None, same_batch: bool) -> None:
    config = RunConfig(env="CartPole-v1", **fields)
    assert what_is_shared(config) == {"envs": envs, "same_batch": same_batch}
