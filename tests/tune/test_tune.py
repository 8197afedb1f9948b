"""Searches for settings: spaces and scores by hand, trials in this process, and whole searches on a real Ray Tune."""

from __future__ import annotations

import errno
import json
import os
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from fever.config import Stop
from fever.envs.source import EnvSource
from fever.errors import FeverError, TrainingError
from fever.rllib.settings import split_settings
from fever.runs import disk
from fever.runs.disk import Appender, Disk
from fever.runs.run import Run
from fever.signals import Interrupts
from fever.tune import search
from fever.tune.records import Record, append, ranked, read, write_best
from fever.tune.score import BUDGET, LearningCurve, mean_score
from fever.tune.space import check_space, is_space_expression, parse, parse_dimension
from fever.tune.store import SearchFolder, TrialFolder, TrialStore
from fever.tune.study import Study, check_kind, resolve
from fever.tune.table import SearchDisplay
from fever.tune.trial import Plan, Trial
from fever.tune.watch import Watcher
from tests.environments import TimeLimitEnv
from tests.tune.helpers import SMALL, configure

pytestmark = pytest.mark.ray


# what may be searched


@pytest.mark.parametrize(
    ("text", "edges"),
    [
        ("uniform(0, 1)", [1e-9, 1 - 1e-9]),
        ("loguniform(1e-5,1e-2)", [pytest.approx(1e-5), pytest.approx(1e-2)]),
        ("quniform(-1, 1, 0.5)", [-1, 1]),
        ("quniform(0.1, 0.7, 0.1)", [0.1, 0.7]),
        ("randint(1, 5)", [1, 4]),
        ("lograndint(8,1024)", [8, 1023]),
        ("choice([64,64],[256,256])", [[64, 64], [256, 256]]),
        ("choice(tanh, 'relu', null, true, -1e-3, {a: 1})", ["tanh", "relu", None, True, -1e-3, {"a": 1}]),
    ],
)
def test_expressions_are_read(text: str, edges: list[Any]) -> None:
    assert is_space_expression(text)
    assert parse_dimension("x", text).edges() == edges


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("logunifrom(1,2)", "there is no logunifrom"),
        ("uniform(1)", "uniform takes 2 numbers"),
        ("uniform(2,1)", "the first number must be the smaller one"),
        ("uniform(0,1e999)", "is not a value"),
        ("loguniform(0,1)", "numbers above 0"),
        ("randint(1.5,3)", "whole numbers"),
        ("quniform(0,1,2)", "the step"),
        ("quniform(0,1,0.3)", "multiples of the step"),
        ("quniform(1,10,3)", "multiples of the step"),
        ("choice()", "at least one value"),
        ("uniform(low=0,high=1)", "not a function with values"),
        ("choice(__import__('os').system('true'))", "is not a value"),
        ("choice(1", "not a function with values"),
        ("(lambda: 1)()", "not a function with values"),
        ("choice(" + "-" * 100_000 + "1)", "not a function with values"),
        ("choice(" + "-" * 500 + "1)", "is not a value"),
        ("choice(99999999999999999999)", "is not a value"),
    ],
)
def test_other_expressions_are_refused_with_what_is_allowed(text: str, why: str) -> None:
    with pytest.raises(FeverError, match=why) as error:
        parse_dimension("x", text)
    assert "allowed are uniform(low,high)" in str(error.value)


def test_ordinary_settings_are_no_expressions() -> None:
    assert not any(map(is_space_expression, ("[64,64]", "1e-3", "tanh", "null", "")))


def test_values_outside_are_moved_back_into_the_space() -> None:
    space = parse({"a": "uniform(0,1)", "b": "randint(2,5)", "c": "choice(1,2)", "d": "quniform(0,1,0.25)"})
    moved = space.within({"a": 1.2, "b": 7, "c": "2", "d": 0.4})
    assert space.settings(moved) == {"a": 1.0, "b": 4, "c": 2, "d": 0.5}


@pytest.mark.parametrize(("text", "kind"), [("quniform(16, 64, 16)", int), ("quniform(0, 64, 0.5)", float)])
def test_whole_steps_give_whole_numbers(text: str, kind: type) -> None:
    space = parse({"x": text})
    value = space.settings(space.within({"x": 37.0}))["x"]
    assert type(value) is kind
    assert value == (32 if kind is int else 37)
    assert kind is float or [type(edge) for edge in space.dimensions["x"].edges()] == [int, int]


@pytest.mark.parametrize("name", ["model_config", "model_config.fcnet_hiddens", "model", "model.use_lstm"])
def test_pbt_keeps_the_networks_of_rllib(tmp_path: Path, name: str) -> None:
    config = configure(tmp_path, space={name: "choice(1,2)"}, scheduler="pbt", algo="rllib:PPO", settings={})
    assert config.search is not None
    with pytest.raises(FeverError, match=f"pbt cannot search {name}"):
        check_kind(config, parse(config.search.space))


@pytest.mark.parametrize(
    ("fields", "workers"),
    [
        ({}, 0),
        ({"workers": "auto"}, 0),
        ({"workers": 2}, 2),
        ({"algo": "rllib:PPO", "settings": {}}, 0),
        ({"algo": "rllib:PPO", "settings": {"num_env_runners": 2}}, 2),
    ],
)
def test_trials_have_no_workers_unless_told(tmp_path: Path, fields: dict[str, Any], workers: int) -> None:
    config = resolve(configure(tmp_path, **fields), EnvSource("CartPole-v1"))
    assert config.workers == workers


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"space": {"learning_rat": "uniform(0,1)"}}, "ppo has no setting learning_rat; did you mean learning_rate"),
        ({"space": {"gamma": "uniform(0,2)"}}, "gamma=1.99"),
        ({"space": {"activation": "choice(tanh,tan)"}}, "activation='tan'"),
        ({"method": "grid"}, "a grid needs choice"),
        ({"method": "optuna", "scheduler": "pbt"}, "leave out --search optuna"),
        ({"scheduler": "pbt"}, "pbt cannot search hidden"),
        ({"scheduler": "pbt", "seeds": 2}, "one seed"),
        ({"scheduler": "pbt", "trials": 1}, "at least two trials"),
        ({"env": "CartPole-v9"}, "there is no environment"),
        (
            {"algo": "rllib:PPO", "settings": {}, "space": {"num_env_runners": "choice(1,2)"}},
            "num_env_runners cannot be searched: all trials have the same; give it as --workers",
        ),
        (
            {"algo": "rllib:PPO", "settings": {}, "space": {"num_envs_per_worker": "choice(1,2)"}},
            "num_envs_per_worker cannot be searched: .* --envs",
        ),
    ],
)
def test_searches_that_cannot_work_are_refused_before_anything_starts(
    tmp_path: Path, fields: dict[str, Any], why: str
) -> None:
    with pytest.raises(FeverError, match=why):
        search(configure(tmp_path / "runs", **fields))
    assert not (tmp_path / "runs").exists()


def test_settings_with_open_bounds_can_be_searched(tmp_path: Path) -> None:
    config = configure(tmp_path, space={"learning_rate": "uniform(0,1)"})  # must be above 0, and will be
    check_space(config, parse({"learning_rate": "uniform(0,1)"}))


# what a score is


def test_score_is_the_mean_return_over_the_budget() -> None:
    curve = LearningCurve(Stop(steps=1000, reward=100))
    curve.add({"steps": 100, "seconds": 1, "iteration": 1})  # no episode yet: counts with the first return
    assert curve.mean is None
    curve.add({"steps": 200, "seconds": 2, "iteration": 2, "return_mean": 10})
    curve.add({"steps": 400, "seconds": 4, "iteration": 3, "return_mean": 100})
    assert curve.mean == (200 * 10 + 200 * 100) / 400
    assert curve.end("reward") == pytest.approx((200 * 10 + 200 * 100 + 600 * 100) / 1000)
    assert curve.end("steps") == curve.mean
    assert mean_score([70.0], curve) == pytest.approx((1000 * 70 + 22000) / 1400)


def test_sooner_is_better() -> None:
    scores = []
    for steps in (300, 600):
        curve = LearningCurve(Stop(steps=1000, reward=100))
        curve.add({"steps": steps, "seconds": 1, "iteration": 1, "return_mean": 100})
        curve.area -= 50 * steps
        scores.append(curve.end("reward"))
    assert scores[0] > scores[1]


def test_trials_that_ran_to_their_end_come_first() -> None:
    rows = [Record(1, {}, "failed"), Record(2, {}, "stopped early", 9.0), Record(3, {}, "finished", 5.0)]
    rows += [Record(4, {}, "finished", 7.0), Record(5, {}, "running")]
    assert [row.number for row in ranked(rows)] == [4, 3, 2, 5, 1]


def test_time_is_whole_only_when_a_trial_is_finished(tmp_path: Path) -> None:
    trial = make_trial(tmp_path, None, 1)
    trial.curve = LearningCurve(Stop(steps=1000))
    trial.curve.add({"steps": 999.9, "seconds": 1.0, "iteration": 1, "return_mean": 1.0})
    assert trial._report()["time"] == BUDGET - 1, "a scheduler would take it for one that it has stopped"
    trial.ended.append(1.0)
    assert trial._report(finished=True)["time"] == BUDGET


# one trial, in this process


@pytest.fixture
def store(ray: Any, tmp_path: Path) -> Any:
    """What trials on other machines send their files to."""
    actor = ray.remote(TrialStore).options(num_cpus=0).remote(tmp_path / "home")
    yield actor
    ray.kill(actor)


def make_trial(
    tmp_path: Path, store: Any, number: int, seeds: int = 1, copies: bool = False, env: Any = None, **fields: Any
) -> Trial:
    """A trial as on another machine: its folder is sent to `tmp_path/home`."""
    config = configure(tmp_path, **fields)
    space = parse({"learning_rate": "loguniform(1e-5,1e-2)"})
    plan = Plan(config.model_copy(update={"search": None}), space, seeds, copies, SearchFolder(tmp_path, "", store), "")
    folder = TrialFolder(tmp_path / f"away-{number}", store)
    return Trial(plan, folder, EnvSource(env or "CartPole-v1"), number, {"learning_rate": 1e-3})


def test_trial_on_another_machine_is_interrupted_copied_back_and_continued(tmp_path: Path, store: Any) -> None:
    trial = make_trial(tmp_path, store, 7, seeds=2)
    reports = [trial.next()]
    while reports[-1]["time"] <= 1.2 * BUDGET:
        reports.append(trial.next())
    trial.end()
    home = tmp_path / "home" / "trials"
    assert sorted(path.name for path in home.iterdir()) == ["0007", "0007-seed-1"]
    assert Run(home / "0007").summary["stop_reason"] == "steps"  # type: ignore[index]
    assert Run(home / "0007-seed-1").summary["stop_reason"] == "interrupted"  # type: ignore[index]
    assert Run(home / "0007-seed-1").config.seed == 1
    done = Run(home / "0007-seed-1").checkpoint().iteration

    again = make_trial(tmp_path, store, 7, seeds=2)
    assert again.next()["time"] > 1.2 * BUDGET
    last = again.next()
    while not last["done"]:
        last = again.next()
    rows = [json.loads(line) for line in (home / "0007-seed-1" / "metrics.jsonl").read_text().splitlines()]
    assert [row["iteration"] for row in rows] == list(range(1, len(rows) + 1)), "it went on where it was"
    assert len(rows) > done
    scores = []
    for name in ("0007", "0007-seed-1"):
        curve = LearningCurve(Stop(steps=3000))
        for row in Run(home / name).metrics():
            curve.add(row)
        scores.append(curve.end("steps"))
    assert last["score"] == pytest.approx(sum(scores) / 2)  # type: ignore[arg-type]
    assert last["time"] == 2 * BUDGET


def test_trial_continues_from_a_copy_of_another(tmp_path: Path, store: Any) -> None:
    good = make_trial(tmp_path, store, 1, copies=True, stop={"steps": 6000})
    bad = make_trial(tmp_path, store, 2, copies=True, stop={"steps": 6000})
    for _ in range(3):
        bad.next()
    bad.end()
    while good.next()["time"] < BUDGET // 2:
        pass
    assert good.copy("tune/1/checkpoint_000001")
    origin = json.loads((tmp_path / "home/tune/1/checkpoint_000001/origin.json").read_text())
    good.end()

    bad = make_trial(tmp_path, store, 2, copies=True, stop={"steps": 6000}, settings={**SMALL, "gamma": 0.9})
    bad.adopt("tune/1/checkpoint_000001")
    report = bad.next()
    assert report["steps"] > origin["steps"] >= 3000
    assert json.loads(report["copied"]) == [1]
    while not report["done"]:
        report = bad.next()
    run = Run(tmp_path / "home" / "trials" / "0002")
    assert run.config.settings["gamma"] == 0.9
    shared = [
        row["iteration"] for row in Run(tmp_path / "home/trials/0001").metrics() if row["steps"] <= origin["steps"]
    ]
    both = (Run(tmp_path / "home/trials" / name).metrics()[: len(shared)] for name in ("0001", "0002"))
    assert [row["return_mean"] for row in next(both)] == [row["return_mean"] for row in next(both)]

    once = make_trial(tmp_path, store, 2, copies=True)
    once.adopt("tune/1/checkpoint_000001")
    assert len(run.metrics()) == len(Run(tmp_path / "home" / "trials" / "0002").metrics()), "a copy is taken once"


def test_runs_of_rllib_are_known_by_their_present_names(tmp_path: Path) -> None:
    trial = make_trial(tmp_path, None, 1, algo="rllib:PPO", settings={"train_batch_size": 64})
    for settings, same in (({"model.fcnet_hiddens": [16]}, True), ({"model.fcnet_hiddens": [32]}, False)):
        trial.settings = settings
        config = trial.plan.run_config(1, {"model.fcnet_hiddens": [16]}, 0, tmp_path)
        left = Run.create(split_settings(config)[0], {})
        left.save_checkpoint({}, {"iteration": 1, "score": None}, 1)
        found = trial._previous_run(left.path, trial.plan.run_config(1, settings, 0, tmp_path))
        assert (found is not None) is same
        if same:
            shutil.rmtree(left.path)
        assert not left.path.exists(), "another trial's is removed"


class Leaving(TimeLimitEnv):
    """Calls exit() after some steps, as a library may that has lost its licence."""

    left = 300

    def step(self, action: Any) -> Any:
        self.left -= 1
        return super().step(action) if self.left else sys.exit("no licence")


def test_trial_whose_environment_exits_fails(tmp_path: Path) -> None:
    trial = make_trial(tmp_path, None, 1, env=Leaving, max_env_failures=0)
    trial.thread.start()
    report = trial.reports.get(timeout=240)
    while isinstance(report, dict):
        trial.may_continue.release()
        report = trial.reports.get(timeout=240)
    assert isinstance(report, TrainingError)
    assert str(report) == "tests.tune.test_tune:Leaving called sys.exit(no licence)"


def test_trial_without_an_episode_says_so(tmp_path: Path, store: Any) -> None:
    trial = make_trial(tmp_path, store, 1, stop={"steps": 8}, settings={"steps": 1, "minibatch": 8})
    with pytest.raises(TrainingError, match="no episode ended within 8 steps"):
        trial.next()


# what is left


def test_a_trial_after_a_line_that_was_cut_is_read(tmp_path: Path) -> None:
    append(table(tmp_path), Record(1, {}))
    with open(tmp_path / "trials.jsonl", "a") as file:
        file.write('{"number": 2, "sett')
    append(table(tmp_path), Record(3, {}))
    assert sorted(read(tmp_path / "trials.jsonl")) == [1, 3]


def table(folder: Path) -> Appender:
    return Appender(folder / "trials.jsonl", Disk(folder))


@pytest.mark.parametrize("workers", [0, 2])
def test_the_best_settings_say_nothing_of_workers_if_trials_had_none(tmp_path: Path, workers: int) -> None:
    write_best(tmp_path / "best.yaml", configure(tmp_path, workers=workers), Record(1, {"gamma": 0.9}))
    values = yaml.safe_load((tmp_path / "best.yaml").read_text())
    assert values["settings"] == {**SMALL, "gamma": 0.9}
    assert values.get("workers") == (workers or None)
    assert ("workers" in values) == bool(workers)


# links


def leave_run(trial: Trial, path: Path) -> Run:
    """A run with a checkpoint of iteration 5, which has the settings of the trial."""
    config = trial.plan.run_config(trial.number, trial.settings, 0, path.parent)
    left = Run.create(config.model_copy(update={"runs": str(path.parent), "name": path.name}), {})
    left.save_checkpoint({}, {"iteration": 5, "score": None, "steps": 7}, 1)
    return left


def test_a_trial_that_is_a_link_to_another_run_is_refused(tmp_path: Path) -> None:
    trial = make_trial(tmp_path, None, 1, copies=True)
    other = leave_run(trial, tmp_path / "other")
    path = trial.folder.root / "trials" / "0001"
    path.parent.mkdir(parents=True)
    path.symlink_to(other.path)
    with pytest.raises(FeverError, match="trials/0001 is a symbolic link"):
        trial._previous_run(path, trial.plan.run_config(1, trial.settings, 0, trial.folder.root))
    with pytest.raises(FeverError, match="trials/0001 is a symbolic link"):
        trial.next()
    copy = trial.folder.root / "tune" / "2" / "checkpoint_000001"
    copy.mkdir(parents=True)
    (copy / "origin.json").write_text('{"trial": 2, "copy": "x", "steps": 1}')
    with pytest.raises(FeverError, match="trials/0001 is a symbolic link"):
        trial.adopt("tune/2/checkpoint_000001")
    assert other.checkpoint().iteration == 5


def test_a_copy_is_not_written_through_a_link(tmp_path: Path) -> None:
    trial = make_trial(tmp_path, None, 1, copies=True)
    leave_run(trial, trial.folder.root / "trials" / "0001")
    (tmp_path / "outside").mkdir()
    (trial.folder.root / "tune").symlink_to(tmp_path / "outside")
    with pytest.raises(FeverError, match="tune is a symbolic link"):
        trial.copy("tune/1/checkpoint_000001")
    assert not any((tmp_path / "outside").iterdir())


# a full disk


def full(*_: Any, **__: Any) -> Any:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_copy_that_has_no_room_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    good, bad = (make_trial(tmp_path, None, number, copies=True) for number in (1, 2))
    leave_run(good, good.folder.root / "trials" / "0001")
    assert good.copy("tune/1/checkpoint_000001")
    own = leave_run(bad, bad.folder.root / "trials" / "0002")
    shutil.copytree(good.folder.root / "tune", bad.folder.root / "tune")
    with monkeypatch.context() as patched:
        patched.setattr(shutil, "copyfile", full)
        patched.setattr(shutil, "copy2", full)
        assert not good.copy("tune/1/checkpoint_000002")
        bad.adopt("tune/1/checkpoint_000001")
    assert not (good.folder.root / "tune/1/checkpoint_000002").exists()
    assert (own.checkpoint().iteration, bad._copied()) == (5, [])
    bad.adopt("tune/1/checkpoint_000001")
    assert (own.checkpoint().iteration, [one["trial"] for one in bad._copied()]) == (5, [1])
    assert [path.name for path in own.path.parent.iterdir()] == ["0002"]


def test_rows_of_trials_wait_until_the_disk_has_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Named(SimpleNamespace):
        def __str__(self) -> str:
            return str(self.number)

    def named(number: int) -> Any:
        return Named(number=number, config={"x": 0.5}, last_result={"finished": True}, status="TERMINATED")

    monkeypatch.setattr(disk, "RETRY_SECONDS", 0.0)
    cluster: Any = SimpleNamespace(check=lambda: None)
    watcher = Watcher(parse({"x": "uniform(0,1)"}), table(tmp_path), SearchDisplay(), Interrupts(), cluster)
    with monkeypatch.context() as patched:
        patched.setattr(disk, "open_unbuffered", full)
        watcher.on_trial_complete(1, [], named(1))
        watcher.on_trial_complete(1, [], named(2))
        assert read(tmp_path / "trials.jsonl") == {}
    watcher.on_step_end(2, [])
    assert sorted(read(tmp_path / "trials.jsonl")) == [1, 2]


def test_results_that_a_full_disk_refuses_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = configure(tmp_path, name="a")
    run = Run.create(config, {})
    (run.path / "best.yaml").write_text("the last one")
    study = Study.__new__(Study)
    study.config, study.space = config, parse({"learning_rate": "uniform(0,1)"})
    study.ended = {1: Record(1, {"learning_rate": 0.5}, "finished", 3.0)}
    for place in ("fever.tune.records.write_atomically", "fever.tune.picture.draw", "fever.runs.run.write_atomically"):
        monkeypatch.setattr(place, full)
    assert study._write(run, "trials", 1.0, None)["best"]["trial"] == 1
    assert (run.path / "best.yaml").read_text() == "the last one"
    with pytest.raises(TrainingError, match=r"is full; not saved: best.yaml, search.png, summary.json"):
        run.disk.require_saved()
