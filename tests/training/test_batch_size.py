"""The same command with other numbers of workers: batches of one size, and larger ones only with `--scale-batch`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import fever
from fever.algos.on_policy import OnPolicyAlgorithm
from fever.config import RunConfig
from fever.envs.source import EnvSource
from fever.errors import FeverError
from fever.training.setup import prepare

ENV = "tests.environments:TimeLimitEnv"
SMALL: dict[str, Any] = {"steps": 32, "envs": 6, "hidden": (8,)}
SETTINGS: dict[str, Any] = {
    "ppo": {"minibatch": 96, "epochs": 2}, "a2c": {}, "trpo": {"value_epochs": 1}, "impala": {}, "appo": {},
}  # fmt: skip


def prepared(said: list[str], **fields: Any) -> Any:
    return prepare(RunConfig(env=ENV, **fields), EnvSource(ENV), said.append)


@pytest.mark.ray
@pytest.mark.parametrize("algo", ["ppo", "trpo", "impala"])
def test_an_iteration_counts_the_same_steps_with_workers(ray: Any, tmp_path: Path, algo: str) -> None:
    runs = [
        fever.train(ENV, algo, workers=workers, runs=tmp_path, stop={"iterations": 3}, **SMALL, **SETTINGS[algo])
        for workers in (0, 2)
    ]
    steps = [[row["steps"] for row in result.run.metrics()] for result in runs]
    assert steps[0] == steps[1] == [192, 384, 576]
    assert [row["updates"] for row in runs[0].run.metrics()] == [row["updates"] for row in runs[1].run.metrics()]
    assert [result.summary["envs"] for result in runs] == [6, 6]
    assert {row["env"] for row in runs[1].run.episodes()} == {0, 1, 2}, "each worker has half of them"


@pytest.mark.ray
def test_a_run_is_resumed_with_another_number_of_workers(ray: Any, tmp_path: Path) -> None:
    first = fever.train(ENV, runs=tmp_path, stop={"iterations": 2}, **SMALL, **SETTINGS["ppo"])
    more: dict[str, Any] = {"stop": {"iterations": 4}, "workers": 2, "runs": tmp_path}
    second = fever.resume(first.run, **more)
    assert [row["steps"] for row in second.run.metrics()] == [192, 384, 576, 768]
    assert (second.summary["envs"], second.run.config.envs, second.run.config.workers) == (6, 6, 2)
    third = fever.resume(first.run, **{**more, "stop": {"iterations": 5}, "workers": 0})
    assert [row["steps"] for row in third.run.metrics()][4:] == [960]


@pytest.mark.ray
def test_scale_batch_enlarges_what_is_learned_from(ray: Any, tmp_path: Path) -> None:
    settings = {**SMALL, **SETTINGS["ppo"], "scale_batch": True}
    run = fever.train(ENV, runs=tmp_path, workers=2, stop={"iterations": 2}, **settings).run
    rows = run.metrics()
    assert [row["steps"] for row in rows] == [384, 768]
    assert {row["updates"] for row in rows} == {4.0}, "as many gradient steps"
    assert rows[0]["learning_rate"] == pytest.approx(3e-4 * 2**0.5)
    assert (run.config.envs, run.config.settings["minibatch"], run.config.settings["learning_rate"]) == (6, 96, 3e-4)
    again = fever.resume(run, stop={"iterations": 3}, workers=0, runs=tmp_path).run
    assert (again.metrics()[-1]["steps"], again.metrics()[-1]["learning_rate"]) == (960, 3e-4)


@pytest.mark.parametrize("algo", ["ppo", "a2c", "trpo", "impala", "appo"])
def test_scale_batch_says_what_it_does(algo: str) -> None:
    said: list[str] = []
    found = prepared(said, algo=algo, workers=4, envs=2, scale_batch=True, settings={"hidden": [8]})
    learner = found.learner
    assert isinstance(learner, OnPolicyAlgorithm)
    assert (learner.fragments, learner.task.envs, learner.task.total_envs) == (4, 2, 8)
    assert learner.fragment_steps == learner.config.steps
    assert next(line for line in said if "--scale-batch" in line).startswith("--scale-batch: 4 times the batch, so ")
    rate = learner.learning_rate_name
    assert getattr(learner.config, rate) == pytest.approx(2 * found.config.settings[rate])


def test_sizes_are_refused_in_the_numbers_that_were_given() -> None:
    for workers in (0, 4):
        with pytest.raises(FeverError, match="minibatch=60 does not divide the batch of 2 environments x 128 steps"):
            prepared([], workers=workers, envs=2, scale_batch=True, settings={"minibatch": 60})


def test_many_workers_are_told_that_their_fragments_are_short() -> None:
    said: list[str] = []
    prepared(said, workers=100, settings={"hidden": [8]})
    assert (
        "note: 100 workers share a batch: the fragment of each has 11 steps; --scale-batch enlarges the batch" in said
    )
    said.clear()
    prepared(said, workers=100, scale_batch=True, settings={"hidden": [8]})
    assert not any("fragment" in line for line in said)


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--algo", "dqn"], "the batches of dqn do not depend on workers"),
        (["--algo", "trpo", "timesteps_per_batch=500"], "timesteps_per_batch=500 sets their size"),
        (["--algo", "impala", "fragments=2"], "fragments=2 sets their size"),
        (["--algo", "rllib:PPO"], "the batches of rllib:PPO do not depend on workers"),
    ],
)
def test_batches_that_do_not_grow_are_refused_by_every_command(
    fever: Any, tmp_path: Path, words: list[str], reason: str
) -> None:
    algo, settings = words[:2], words[2:]
    commands = [("train", "--workers", "2"), ("train", "--seeds", "2"), ("scale", "--workers", "1,2")]
    if settings:
        commands = commands[:1]
    elif algo == ["--algo", "dqn"]:
        commands.append(("tune", "learning_rate=uniform(1e-4,1e-3)", "--trials", "1"))
    for command, *more in commands:
        done = fever(command, "CartPole-v1", "--scale-batch", *more, *words)
        assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
        assert done.stderr.startswith("fever: --scale-batch ")
        assert reason in done.stderr
        assert not (tmp_path / "runs").exists()


def test_the_option_is_a_field_of_the_run(fever: Any, tmp_path: Path) -> None:
    words = ("--scale-batch", "--envs", "2", "steps=16", "minibatch=32", "--stop-iterations", "1", "--json")
    done = fever("train", ENV, *words, "--name", "a")
    assert done.returncode == 0, done.stderr
    assert "--scale-batch changes nothing: it takes two workers or more" in done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["envs"] == 2
    assert "scale_batch: true" in (tmp_path / "runs" / "a" / "config.yaml").read_text()
