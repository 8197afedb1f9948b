"""Searches for settings: spaces and scores by hand, trials in this process, and whole searches on a real Ray Tune."""

from __future__ import annotations

import io
import json
import os
import shutil
import signal
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from fever import trainer
from fever.cluster import Machine
from fever.config import RunConfig, Stop, validate
from fever.errors import FeverError, TrainingError
from fever.rllib.settings import split_settings
from fever.run import Run
from fever.sources import EnvSource
from fever.tune import is_space_expression, search
from fever.tune.records import Record, append, ranked, read, write_best
from fever.tune.score import BUDGET, Course, mean_score
from fever.tune.space import check_space, parse, parse_dimension
from fever.tune.store import Folder, Keeper, Store
from fever.tune.study import check_kind, may_resume, resolve, rllib_bundles
from fever.tune.table import LiveTable, PlainTable, QuietTable, closing_lines
from fever.tune.trial import Plan, Trial
from tests.environments import TimeLimitEnv
from tests.helpers import without_ray

SMALL = {"steps": 32, "minibatch": 64, "epochs": 4}  # settings of PPO that learn in seconds
RATES = {"learning_rate": "loguniform(1e-5,1e-2)", "hidden": "choice([32],[16,16])"}


def configure(folder: Path, env: str = "CartPole-v1", **fields: Any) -> RunConfig:
    """A search's configuration; fields of the search and of the run side by side."""
    names = ("space", "trials", "method", "scheduler", "seeds", "parallel")
    values = {"space": RATES, **{name: fields.pop(name) for name in names if name in fields}}
    values = {"env": env, "settings": SMALL, "stop": {"steps": 3000}, "search": values, "runs": str(folder), **fields}
    return validate(RunConfig, values, "the test")


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
        check_kind(config.search, parse(config.search.space))


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
        ({"method": "grid"}, "a grid goes through choice"),
        ({"method": "optuna", "scheduler": "pbt"}, "leave optuna out"),
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
    course = Course(Stop(steps=1000, reward=100))
    course.add({"steps": 100, "seconds": 1, "iteration": 1})  # no episode yet: counts with the first return
    assert course.mean is None
    course.add({"steps": 200, "seconds": 2, "iteration": 2, "return_mean": 10})
    course.add({"steps": 400, "seconds": 4, "iteration": 3, "return_mean": 100})
    assert course.mean == (200 * 10 + 200 * 100) / 400
    assert course.end("reward") == pytest.approx((200 * 10 + 200 * 100 + 600 * 100) / 1000)
    assert course.end("steps") == course.mean
    assert mean_score([70.0], course) == pytest.approx((1000 * 70 + 22000) / 1400)


def test_sooner_is_better() -> None:
    scores = []
    for steps in (300, 600):
        course = Course(Stop(steps=1000, reward=100))
        course.add({"steps": steps, "seconds": 1, "iteration": 1, "return_mean": 100})
        course.area -= 50 * steps
        scores.append(course.end("reward"))
    assert scores[0] > scores[1]


def test_trials_that_ran_to_their_end_come_first() -> None:
    rows = [Record(1, {}, "failed"), Record(2, {}, "stopped early", 9.0), Record(3, {}, "finished", 5.0)]
    rows += [Record(4, {}, "finished", 7.0), Record(5, {}, "running")]
    assert [row.number for row in ranked(rows)] == [4, 3, 2, 5, 1]


def test_time_is_whole_only_when_a_trial_is_finished(tmp_path: Path) -> None:
    trial = make_trial(tmp_path, None, 1)
    trial.course = Course(Stop(steps=1000))
    trial.course.add({"steps": 999.9, "seconds": 1.0, "iteration": 1, "return_mean": 1.0})
    assert trial._report()["time"] == BUDGET - 1, "a scheduler would take it for one that it has stopped"
    trial.ended.append(1.0)
    assert trial._report(finished=True)["time"] == BUDGET


# one trial, in this process


@pytest.fixture
def keeper(ray: Any, tmp_path: Path) -> Any:
    """What trials on other machines send their files to."""
    actor = ray.remote(Keeper).options(num_cpus=0).remote(tmp_path / "home")
    yield actor
    ray.kill(actor)


def make_trial(
    tmp_path: Path, keeper: Any, number: int, seeds: int = 1, copies: bool = False, env: Any = None, **fields: Any
) -> Trial:
    """A trial as on another machine: its folder is sent to `tmp_path/home`."""
    config = configure(tmp_path, **fields)
    space = parse({"learning_rate": "loguniform(1e-5,1e-2)"})
    plan = Plan(config.model_copy(update={"search": None}), space, seeds, copies, Store(tmp_path, "", keeper), "")
    folder = Folder(tmp_path / f"away-{number}", keeper)
    return Trial(plan, folder, EnvSource(env or "CartPole-v1"), number, {"learning_rate": 1e-3})


def test_trial_elsewhere_is_cut_off_sent_home_and_goes_on_there(tmp_path: Path, keeper: Any) -> None:
    trial = make_trial(tmp_path, keeper, 7, seeds=2)
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

    again = make_trial(tmp_path, keeper, 7, seeds=2)
    assert again.next()["time"] > 1.2 * BUDGET
    last = again.next()
    while not last["done"]:
        last = again.next()
    rows = [json.loads(line) for line in (home / "0007-seed-1" / "metrics.jsonl").read_text().splitlines()]
    assert [row["iteration"] for row in rows] == list(range(1, len(rows) + 1)), "it went on where it was"
    assert len(rows) > done
    scores = []
    for name in ("0007", "0007-seed-1"):
        course = Course(Stop(steps=3000))
        for row in Run(home / name).metrics():
            course.add(row)
        scores.append(course.end("steps"))
    assert last["score"] == pytest.approx(sum(scores) / 2)  # type: ignore[arg-type]
    assert last["time"] == 2 * BUDGET


def test_trial_goes_on_from_a_copy_of_another(tmp_path: Path, keeper: Any) -> None:
    good = make_trial(tmp_path, keeper, 1, copies=True, stop={"steps": 6000})
    bad = make_trial(tmp_path, keeper, 2, copies=True, stop={"steps": 6000})
    for _ in range(3):
        bad.next()
    bad.end()
    while good.next()["time"] < BUDGET // 2:
        pass
    assert good.copy("tune/1/checkpoint_000001")
    origin = json.loads((tmp_path / "home/tune/1/checkpoint_000001/origin.json").read_text())
    good.end()

    bad = make_trial(tmp_path, keeper, 2, copies=True, stop={"steps": 6000}, settings={**SMALL, "gamma": 0.9})
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

    once = make_trial(tmp_path, keeper, 2, copies=True)
    once.adopt("tune/1/checkpoint_000001")
    assert len(run.metrics()) == len(Run(tmp_path / "home" / "trials" / "0002").metrics()), "a copy is taken once"


def test_runs_of_rllib_are_known_by_their_present_names(tmp_path: Path) -> None:
    trial = make_trial(tmp_path, None, 1, algo="rllib:PPO", settings={"train_batch_size": 64})
    for settings, same in (({"model.fcnet_hiddens": [16]}, True), ({"model.fcnet_hiddens": [32]}, False)):
        trial.settings = settings
        config = trial.plan.run_config(1, {"model.fcnet_hiddens": [16]}, 0, tmp_path)
        left = Run.create(split_settings(config)[0], {})
        (left.path / "checkpoints" / "000001").mkdir(parents=True)
        (left.path / "checkpoints" / "000001" / "manifest.json").write_text("{}")
        found = trial._left(left.path, trial.plan.run_config(1, settings, 0, tmp_path))
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
    trial = make_trial(tmp_path, None, 1, env=Leaving)
    trial.thread.start()
    report = trial.reports.get(timeout=240)
    while isinstance(report, dict):
        trial.may_go_on.release()
        report = trial.reports.get(timeout=240)
    assert isinstance(report, TrainingError)
    assert str(report) == "it was ended from inside, by SystemExit('no licence')"


def test_trial_without_an_episode_says_so(tmp_path: Path, keeper: Any) -> None:
    trial = make_trial(tmp_path, keeper, 1, stop={"steps": 8}, settings={"steps": 1, "minibatch": 8})
    with pytest.raises(TrainingError, match="no episode ended within 8 steps"):
        trial.next()


# what is left


def test_a_trial_after_a_line_that_was_cut_is_read(tmp_path: Path) -> None:
    append(tmp_path / "trials.jsonl", Record(1, {}))
    with open(tmp_path / "trials.jsonl", "a") as file:
        file.write('{"number": 2, "sett')
    append(tmp_path / "trials.jsonl", Record(3, {}))
    assert sorted(read(tmp_path / "trials.jsonl")) == [1, 3]


@pytest.mark.parametrize("workers", [0, 2])
def test_the_best_settings_say_nothing_of_workers_if_trials_had_none(tmp_path: Path, workers: int) -> None:
    write_best(tmp_path / "best.yaml", configure(tmp_path, workers=workers), Record(1, {"gamma": 0.9}))
    values = yaml.safe_load((tmp_path / "best.yaml").read_text())
    assert values["settings"] == {**SMALL, "gamma": 0.9}
    assert values.get("workers") == (workers or None)
    assert ("workers" in values) == bool(workers)


# whole searches


@pytest.fixture(scope="module")
def searched(ray: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A random search of four trials, with what it printed."""
    folder, stream = tmp_path_factory.mktemp("searched"), io.StringIO()
    summary = search(configure(folder, trials=4, name="first"), display=PlainTable(stream))
    return {"folder": folder, "printed": stream.getvalue(), **summary}


def rows_of(run: str | Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (Path(run) / "trials.jsonl").read_text().splitlines()]


def test_random_search_leaves_a_complete_run_directory(searched: dict[str, Any]) -> None:
    run, rows = Run(Path(searched["run"])), rows_of(searched["run"])
    assert searched["stop_reason"] == "trials"
    assert (searched["trials"], searched["failed"], searched["stopped_early"]) == (4, 0, 0)
    assert sorted(row["number"] for row in rows) == [1, 2, 3, 4]
    assert {row["state"] for row in rows} == {"finished"}
    assert run.summary == {key: value for key, value in searched.items() if key not in ("folder", "printed")}
    assert run.config.search.trials == 4  # type: ignore[union-attr]
    assert (run.path / "search.png").stat().st_size > 10_000
    assert (run.path / "tune" / "tuner.pkl").is_file()
    assert not run.running
    for row in rows:
        trial = Run(run.path / "trials" / f"{row['number']:04d}")
        assert trial.summary["stop_reason"] == "steps"  # type: ignore[index]
        assert {key: trial.config.settings[key] for key in row["settings"]} == row["settings"]
        assert 1e-5 <= row["settings"]["learning_rate"] <= 1e-2
        assert trial.config.search is None
    best = max(rows, key=lambda row: row["score"])
    assert searched["best"] == {key: best[key] for key in ("score", "settings")} | {"trial": best["number"]}
    assert 0 < searched["cores_busy"] <= 1


def test_search_prints_a_line_per_trial_and_what_is_next(searched: dict[str, Any]) -> None:
    printed = searched["printed"]
    assert sum(line.startswith("trial ") and " finished: score " in line for line in printed.splitlines()) == 4
    assert printed.splitlines()[-1] == f"next: fever train -f {searched['best_file']}"
    assert "ray" not in printed.replace("starting Ray", ""), "what libraries say is in the log"


def test_best_settings_train(searched: dict[str, Any], tmp_path: Path) -> None:
    values = yaml.safe_load(Path(searched["best_file"]).read_text())
    assert not {"search", "name", "runs"} & set(values)
    config = validate(RunConfig, {**values, "runs": str(tmp_path), "stop": {"iterations": 1}}, "best.yaml")
    assert trainer.train(config).run.config.settings["hidden"] == searched["best"]["settings"]["hidden"]


def test_search_that_is_done_is_not_resumed(searched: dict[str, Any]) -> None:
    run = Run(Path(searched["run"]))
    with pytest.raises(FeverError, match="has run all its trials"):
        search(run.config, run=run, trust=True)


def test_failed_trials_are_recorded_and_the_search_goes_on(
    ray: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    crash = {"marker": str(tmp_path / "crashed"), "at": 300}  # takes its process along, once
    space = {"learning_rate": "choice(1e-3,1e30,1e-4)"}
    config = configure(
        tmp_path, "tests.environments:CrashEnv", env_kwargs=crash, space=space, method="grid", parallel=1, name="some"
    )
    summary = search(config)
    rows = {row["number"]: row for row in rows_of(summary["run"])}
    assert [rows[number]["state"] for number in (1, 2, 3)] == ["failed", "failed", "finished"]
    assert rows[1]["error"] == "its process died"
    assert "the loss is not a number any more" in rows[2]["error"]
    assert (summary["failed"], summary["best"]["trial"]) == (2, 3)
    assert [without_ray(said) for said in capfd.readouterr()] == ["", ""], "only the display writes to the terminal"
    assert "the loss is not a number" in (tmp_path / "some" / "log.txt").read_text()


def test_search_of_which_every_trial_fails_says_why(ray: Any, tmp_path: Path) -> None:
    broken = {"fault": "nan_reward", "at": 3}
    config = configure(tmp_path, "tests.environments:BrokenEnv", env_kwargs=broken, trials=2, parallel=1, name="all")
    with pytest.raises(TrainingError, match=r"all 2 trials failed, most of them so: .*the reward is NaN"):
        search(config)
    assert Run(tmp_path / "all").status == "failed"


def test_asha_stops_bad_trials_early(ray: Any, tmp_path: Path) -> None:
    space = {"learning_rate": "choice(3e-3,1e-7,1e-8)"}
    config = configure(
        tmp_path, space=space, method="grid", scheduler="asha", parallel=1, stop={"steps": 8000}, name="asha"
    )
    summary = search(config)
    rows = {row["number"]: row for row in rows_of(summary["run"])}
    assert [rows[number]["state"] for number in (1, 2, 3)] == ["finished", "stopped early", "stopped early"]
    assert summary["stopped_early"] == 2
    assert rows[2]["steps"] < 4000
    early = Run(Path(summary["run"]) / "trials" / "0002")
    assert early.summary["stop_reason"] == "interrupted"  # type: ignore[index]
    assert early.checkpoints(), "it could be gone on with"


class Abreast(TimeLimitEnv):
    """Waits for the other one of two trials wherever that is behind, until one has gone on from a copy: so they are
    compared, and the copy is fetched before it has gone."""

    def __init__(self, workdir: Path, limit: int = 10) -> None:
        super().__init__(limit)
        self.run = workdir.parents[1]
        self.other = self.run.with_name({"0001": "0002"}.get(self.run.name, "0001"))

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        deadline, own = time.monotonic() + 240, self._steps(self.run)
        copies = [run / "copied.json" for run in (self.run, self.other)]
        while own > self._steps(self.other) + 300 and time.monotonic() < deadline:
            if any(path.exists() for path in copies):
                break
            time.sleep(0.02)
        return super().reset(seed=seed, options=options)

    @staticmethod
    def _steps(run: Path) -> float:
        """That a run has learned from; it may be over, or not have begun, or about to go on from a copy."""
        try:
            if json.loads((run / "summary.json").read_text())["stop_reason"] != "interrupted":
                return float("inf")
        except (OSError, ValueError):
            pass
        try:
            return json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])["steps"]
        except (OSError, ValueError, LookupError):
            return 0


def test_pbt_goes_on_from_copies_of_good_trials(ray: Any, tmp_path: Path) -> None:
    config = configure(
        tmp_path,
        "tests.test_tune:Abreast",
        space={"learning_rate": "loguniform(1e-6,1e-2)"},
        scheduler="pbt",
        trials=2,
        stop={"steps": 5000},
        name="pbt",
    )
    summary = search(config)
    rows = rows_of(summary["run"])
    assert {row["state"] for row in rows} == {"finished"}
    copied = [row for row in rows if row["copied"]]
    assert copied
    assert all(1e-6 <= row["settings"]["learning_rate"] <= 1e-2 for row in rows)
    run = Run(Path(summary["run"]) / "trials" / f"{copied[0]['number']:04d}")
    assert run.config.settings["learning_rate"] == copied[0]["settings"]["learning_rate"]
    iterations = [row["iteration"] for row in run.metrics()]
    assert iterations == list(range(1, len(iterations) + 1))
    assert not list((run.path.parents[1] / "tune").glob("*/checkpoint_*")), "copies go when all is done"


TWO_CORES = SimpleNamespace(
    machines=lambda: [Machine("node", "host", 2.0)], cores=2.0, ray=SimpleNamespace(cluster_resources=dict)
)


def make_study(tmp_path: Path, **fields: Any) -> SimpleNamespace:
    """As much of a study as is needed to say what a trial takes."""
    rllib = "algo" in fields
    space = {"lr" if rllib else "learning_rate": "loguniform(1e-5,1e-2)"}
    source = EnvSource("CartPole-v1")
    config = resolve(configure(tmp_path, **{"space": space, "settings": {}} | fields), source)
    assert config.search is not None
    bundles = rllib_bundles(config, parse(space), source) if rllib else None
    return SimpleNamespace(
        search=config.search, config=config, workers=config.workers, trials=config.search.trials, bundles=bundles
    )


@pytest.mark.parametrize(
    ("fields", "cpus"),
    [
        ({}, [1]),
        ({"workers": 1}, [1.9]),  # of two cores: the rest is for the worker, which is not part of what Tune reserves
        ({"workers": 1, "algo": "rllib:PPO"}, [1, 1]),
        ({"algo": "rllib:IMPALA"}, [1, 1]),  # its learner
        ({"scheduler": "pbt", "trials": 8, "algo": "rllib:PPO"}, [0.25]),
        ({"scheduler": "pbt", "trials": 8}, [0.25]),  # all at once
        ({"scheduler": "pbt", "trials": 8, "parallel": 1}, [2]),
    ],
)
def test_trials_take_their_share_of_the_cores(tmp_path: Path, fields: dict[str, Any], cpus: list[float]) -> None:
    from fever.tune.tuner import trial_bundles

    bundles = trial_bundles(make_study(tmp_path, **fields), TWO_CORES)  # type: ignore[arg-type]
    assert [bundle["CPU"] for bundle in bundles] == cpus
    assert not any("GPU" in bundle for bundle in bundles)


def test_trial_that_would_wait_for_ever_is_refused(tmp_path: Path) -> None:
    from fever.tune.tuner import trial_bundles

    study = make_study(tmp_path, algo="rllib:IMPALA", workers=2)
    with pytest.raises(FeverError, match="one trial of rllib:IMPALA needs 4 cores for its processes, but there are 2"):
        trial_bundles(study, TWO_CORES)  # type: ignore[arg-type]


def test_process_that_no_machine_has_room_for_is_refused(tmp_path: Path) -> None:
    from fever.tune.tuner import trial_bundles

    study = make_study(tmp_path, algo="rllib:PPO", workers=1, settings={"num_cpus_per_env_runner": 3})
    two = [Machine("one", "host-1", 2.0), Machine("two", "host-2", 2.0)]
    cluster = SimpleNamespace(machines=lambda: two, cores=4.0, ray=TWO_CORES.ray)
    sentence = (
        "one trial of rllib:PPO needs 3 cores for one process, but no machine has more than 2; lower num_cpus_per"
    )
    with pytest.raises(FeverError, match=sentence):
        trial_bundles(study, cluster)  # type: ignore[arg-type]


class Interrupting(QuietTable):
    """Presses Ctrl-C when one trial is over and the next one is under way."""

    pressed = False

    def update(self, records: list[Record]) -> None:
        states = {record.number: record for record in records}
        under_way = 2 in states and states[2].state == "running" and states[2].steps > 5000
        if under_way and not self.pressed:
            self.pressed = True
            os.kill(os.getpid(), signal.SIGINT)


def test_interrupted_search_goes_on(ray: Any, tmp_path: Path) -> None:
    config = configure(tmp_path, method="optuna", trials=3, parallel=1, seeds=1, stop={"steps": 20000}, name="cut")
    handler = signal.getsignal(signal.SIGINT)
    summary = search(config, display=Interrupting())
    assert signal.getsignal(signal.SIGINT) is handler
    assert summary["stop_reason"] == "interrupted"
    assert [row["number"] for row in rows_of(summary["run"])] == [1]
    assert closing_lines(summary)[-1].startswith(f"next: fever resume {summary['run']} --trust")
    run = Run(Path(summary["run"]))
    before = Run(run.path / "trials" / "0002").checkpoint().iteration
    assert before > 1

    with pytest.raises(FeverError, match=r"reads Ray Tune's pickles in .*, which can run any program; .* add --trust"):
        search(run.config, run=run)
    again = search(run.config, run=run, trust=True)
    rows = rows_of(again["run"])
    assert [row["number"] for row in rows] == [1, 2, 3], "finished trials are not repeated"
    assert again["stop_reason"] == "trials"
    assert again["seconds"] > summary["seconds"]
    metrics = (run.path / "trials" / "0002" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["iteration"] for line in metrics] == list(range(1, len(metrics) + 1))
    assert len(metrics) > before


def test_trials_with_pickles_are_not_gone_on_with_unless_trusted(tmp_path: Path) -> None:
    """Whoever made the directory need not have left Ray Tune's own: the search begins anew, its trials do not."""
    run = Run.create(
        configure(tmp_path, algo="rllib:PPO", settings={}, space={"lr": "uniform(0,1)"}, name="theirs"), {}
    )
    assert not may_resume(run, trust=False)
    (run.path / "trials" / "0001" / "checkpoints" / "000001" / "files").mkdir(parents=True)
    with pytest.raises(FeverError, match=r"reads RLlib's pickles in .*/trials, which can run any program; .* --trust"):
        search(run.config, run=run)
    assert not may_resume(run, trust=True)


def test_search_that_fails_leaves_what_there_is(ray: Any, tmp_path: Path, searched: dict[str, Any]) -> None:
    shutil.copytree(searched["run"], tmp_path / "broken")
    (tmp_path / "broken" / "summary.json").unlink()
    (tmp_path / "broken" / "best.yaml").unlink()
    (tmp_path / "broken" / "tune" / "tuner.pkl").write_bytes(b"nothing")
    run = Run(tmp_path / "broken")
    config = run.config.model_copy(update={"stop": Stop(steps=4000)})
    with pytest.raises(TrainingError, match=r"^Ray Tune failed: [^\n]*; more is in .*log.txt$"):
        search(config, run=run, trust=True)
    assert run.status == "failed"
    assert run.summary["trials"] == 4  # type: ignore[index]
    assert (run.path / "best.yaml").is_file()
    assert run.config.stop.steps == 4000, "what has changed is written"


def test_two_seeds_and_the_same_values_for_the_same_seed(ray: Any, searched: dict[str, Any], tmp_path: Path) -> None:
    config = configure(tmp_path, trials=2, seeds=2, stop={"iterations": 4}, name="seeds")
    summary = search(config)
    proposed = {row["number"]: row["settings"] for row in rows_of(searched["run"])}
    rows = {row["number"]: row for row in rows_of(summary["run"])}
    assert {number: row["settings"] for number, row in rows.items()} == {one: proposed[one] for one in (1, 2)}
    for number, row in rows.items():
        runs = [Run(Path(summary["run"]) / "trials" / f"{number:04d}{seed}") for seed in ("", "-seed-1")]
        assert [run.config.seed for run in runs] == [0, 1]
        assert row["steps"] == sum(run.metrics()[-1]["steps"] for run in runs)


def test_live_table_shows_the_best_first(tmp_path: Path) -> None:
    from rich.console import Console

    console = Console(file=io.StringIO(), force_terminal=True, width=120, height=30)
    table = LiveTable(console)
    table.start(configure(tmp_path), tmp_path, 3, 2)
    settings = {"learning_rate": 1e-3, "hidden": [32]}
    table.update([
        Record(1, settings, "finished", 11.0, 20.0, 3000), Record(2, settings, "finished", 33.0, 40.0, 3000),
        Record(3, settings, "failed", error="its process died"),
    ])  # fmt: skip
    table.stop()
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "3 of 3 trials over, 0 running, 1 failed, best score 33.0 (trial 2)" in text
    assert text.index("40.0") < text.index("20.0")
    assert "0.001" in text
    assert "[32]" in text
