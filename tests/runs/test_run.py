"""The run directory: what is in it, what survives, what is refused."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

import fever
from fever import plain_yaml
from fever.config import LONGEST_YAML, MOST_EPISODES, RunConfig, validate
from fever.errors import FeverError
from fever.runs.run import Run, list_runs
from fever.training.result import Result

SMALL = {"envs": 2, "steps": 16, "minibatch": 32, "epochs": 2}


def test_directory_has_what_the_documentation_lists(result: Result) -> None:
    page = (Path(__file__).parents[2] / "docs/run-directory.md").read_text()
    for path in result.run.path.iterdir():
        name = "events.out.tfevents" if "tfevents" in path.name else path.name
        assert f"`{name}" in page, name


TABLES = {
    "ppo": ["PPO"],
    "a2c": ["PPO"],
    "trpo": ["TRPO"],
    "impala": ["IMPALA and APPO"],
    "dqn": ["Replay: DQN, Ape-X, SAC, TD3, TQC"],
    "qrdqn": ["Replay: DQN, Ape-X, SAC, TD3, TQC"],
    "sac": ["Replay: DQN, Ape-X, SAC, TD3, TQC", "SAC and TQC"],
    "td3": ["Replay: DQN, Ape-X, SAC, TD3, TQC"],
    "tqc": ["Replay: DQN, Ape-X, SAC, TD3, TQC", "SAC and TQC"],
}


@pytest.mark.slow
@pytest.mark.parametrize("algo", TABLES)
def test_every_metric_is_in_the_tables_of_the_documentation(algo: str, result: Result, tmp_path: Path) -> None:
    if algo != "ppo":
        env = "Pendulum-v1" if algo in ("sac", "td3", "tqc") else "CartPole-v1"
        replay = algo in ("dqn", "qrdqn", "sac", "td3", "tqc")
        light = {"warmup": 100, "updates": 2, "batch": 4, "replay_ratio": 0.5} if replay else {}
        result = fever.train(env, algo=algo, runs=tmp_path, stop={"steps": 2000}, **light)
    page = (Path(__file__).parents[2] / "docs/metrics.md").read_text()
    tables = {part.splitlines()[0]: part for part in page.split("\n## ")[1:]}
    documented = [
        line.split("`")[1]
        for name in ["All algorithms", *TABLES[algo]]
        for line in tables[name].splitlines()
        if line.startswith("| `")
    ]
    written = [name for name in result.run.metrics()[-1] if not name.startswith("info/")]  # the environment's own
    assert sorted(documented) == sorted(written)


def test_episodes_have_the_scalars_of_the_last_info(result: Result) -> None:
    rows = result.run.episodes()
    assert len(rows) == result.summary["episodes"]
    assert rows[0]["info"] == {"score": 50.0, "success": 1.0, "speed": 0.5, "distance": 2.5}
    assert (rows[0]["return"], rows[0]["length"]) == (5.0, 5)


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ([0] * 2_000, "it holds more than 2,000 values"),
        (10**30, "is not an integer of 64 bits"),
        ("x" * 100_001, "it would have 101 kB"),
    ],
)
def test_a_configuration_that_could_not_be_read_again_is_not_written(
    tmp_path: Path, values: Any, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The limits are a hundredth of what they are: 200,000 values take many seconds."""
    monkeypatch.setattr(plain_yaml, "MOST_PARTS", plain_yaml.MOST_PARTS // 100)
    monkeypatch.setattr("fever.runs.run.LONGEST_YAML", LONGEST_YAML // 100)
    with pytest.raises(FeverError, match=f"the configuration cannot be kept as YAML: .*{reason}"):
        Run.create(RunConfig(env="CartPole-v1", env_kwargs={"x": values}, runs=str(tmp_path), name="one"), {})
    assert not any(tmp_path.iterdir())


@pytest.mark.slow
def test_large_arguments_are_kept(tmp_path: Path) -> None:
    config = RunConfig(env="CartPole-v1", env_kwargs={"x": [0.5] * 120_000}, runs=str(tmp_path), name="one")
    assert Run.create(config, {}).config == config


def test_the_row_of_the_longest_evaluation_is_read(tmp_path: Path) -> None:
    config = RunConfig(env="CartPole-v1", runs=str(tmp_path), name="one")
    run = Run.create(config.model_copy(update={"eval_episodes": MOST_EPISODES}), {})
    run.log_evaluation({"iteration": 1, "returns": [-1.2345678901234567e-300] * MOST_EPISODES})
    run.close()
    assert len(run.evaluations()[0]["returns"]) == MOST_EPISODES
    with pytest.raises(FeverError, match="must be 10000 or less"):
        validate(RunConfig, {"env": "CartPole-v1", "eval_episodes": MOST_EPISODES + 1}, "x")


def test_numbers_that_json_lacks_are_null_in_rows_of_episodes(tmp_path: Path) -> None:
    run = Run.create(RunConfig(env="CartPole-v1", runs=str(tmp_path), name="one"), {})
    run.log_episodes([{"episode": 1, "info": {"error": float("nan"), "gap": float("inf"), "score": 2.0}}])
    run.close()
    (line,) = (run.path / "episodes.jsonl").read_text().splitlines()
    assert json.loads(line, parse_constant=pytest.fail)["info"] == {"error": None, "gap": None, "score": 2.0}


def test_curves_are_arrays_over_iterations(result: Result) -> None:
    assert result.curves["iteration"].tolist() == [1, 2, 3, 4, 5, 6]
    assert result.curves["return_mean"][-1] == 5


def test_versions_and_configuration_are_kept(result: Result) -> None:
    assert result.run.facts["packages"]["jax"]
    assert result.run.config.settings["epochs"] == 2
    assert result.run.config.env == "tests.environments:InfoEnv"


def test_rows_made_again_by_a_resumed_run_replace_the_old(tmp_path: Path) -> None:
    run = Run.create(RunConfig(env="X-v0", runs=str(tmp_path), name="a"), {})
    rows = [(1, "a"), (2, "a"), (3, "a"), (2, "b"), (3, "b")]
    text = "".join(json.dumps({"iteration": number, "by": who}) + "\n" for number, who in rows)
    (run.path / "metrics.jsonl").write_text(text + '{"iteration": 4, "b')  # and a kill in the middle of a line
    assert [(row["iteration"], row["by"]) for row in run.metrics()] == [(1, "a"), (2, "b"), (3, "b")]
    text = "".join(json.dumps({"episode": number, "by": who}) + "\n" for number, who in rows)
    (run.path / "episodes.jsonl").write_text(text)
    assert [(row["episode"], row["by"]) for row in run.episodes()] == [(1, "a"), (2, "b"), (3, "b")]


def test_rows_after_a_line_that_was_cut_are_read(tmp_path: Path, monkeypatch: Any) -> None:
    run = Run.create(RunConfig(env="X-v0", runs=str(tmp_path), name="a"), {})
    assert run.last_row() == {}
    for name in ("metrics.jsonl", "episodes.jsonl"):
        (run.path / name).write_text('{"iteration": 1, "episode": 1}\n{"iteration": 2, "epi')
    assert run.last_row()["iteration"] == 1
    run.log({"iteration": 2, "steps": 10})
    run.log_episodes([{"episode": 2}])
    assert [row["iteration"] for row in run.metrics()] == [1, 2]
    assert [row["episode"] for row in run.episodes()] == [1, 2]
    for length in (1, 7, 1 << 16):
        monkeypatch.setattr("fever.files.TAIL", length)
        assert run.last_row() == {"iteration": 2, "steps": 10}
    run.close()


def test_a_folder_that_others_use_by_now_stays(tmp_path: Path) -> None:
    first, second = (Run.create(RunConfig(env="X-v0", runs=str(tmp_path / "runs"), name=name), {}) for name in "ab")
    first.discard()
    assert [run.path for run in list_runs(tmp_path / "runs")] == [second.path]


def test_a_run_without_facts_is_listed(tmp_path: Path) -> None:
    for name in "ab":
        Run.create(RunConfig(env="X-v0", runs=str(tmp_path), name=name), {})
    (tmp_path / "a" / "facts.json").unlink()
    assert {run.path.name for run in list_runs(tmp_path)} == {"a", "b"}


def test_one_process_at_a_time_trains_a_run(tmp_path: Path) -> None:
    run = Run.create(RunConfig(env="X-v0", runs=str(tmp_path), name="a"), {})
    assert not run.running
    run.lock()
    child = os.fork()
    if child == 0:
        time.sleep(60)  # a child that outlives the trainer does not keep the lock
        os._exit(0)
    try:
        other = Run(run.path)
        assert other.running
        with pytest.raises(FeverError, match=f"is being trained right now by process {os.getpid()}$"):
            other.lock()
        run.close()
        assert not other.running
        with open(run.path / "lock") as probe:
            fcntl.flock(probe, fcntl.LOCK_SH)  # as somebody else's look at the run does
            assert not other.running
        other.lock()
        other.close()
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_runs_are_listed_and_found(result: Result) -> None:
    assert [run.path.name for run in list_runs(result.run.path.parent)] == ["a"]
    for where in (result.run.path, "a", "last"):
        assert Run.open(where, result.run.path.parent).path.name == "a"
