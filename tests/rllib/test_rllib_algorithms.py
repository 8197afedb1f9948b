"""Short runs of every algorithm that the installed RLlib has, on discrete and continuous actions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

import fever as library
from fever.config import RunConfig, load_yaml, validate
from fever.envs.source import EnvSource
from fever.errors import FeverError, TrainingError
from fever.rllib.catalogue import names
from fever.rllib.environment import MakeEnv, probe_spaces
from fever.rllib.legacy.files import known_part
from fever.rllib.play import make_runner
from fever.rllib.settings import split_settings
from fever.runs.evaluate import evaluate, source_of
from fever.runs.run import Run
from fever.system import absolute_sys_path
from fever.training.resume import resume
from fever.tune import search
from tests.helpers import ROOT
from tests.rllib.examples import EXPERIMENTS, example

pytestmark = [pytest.mark.slow, pytest.mark.ray, pytest.mark.filterwarnings("ignore")]
REPLAY = {"train_batch_size_per_learner": 32, "num_steps_sampled_before_learning_starts": 100}
STREAM = {"train_batch_size_per_learner": 100, "rollout_fragment_length": 50, "min_time_s_per_iteration": 1}
OFFLINE = {
    "train_batch_size_per_learner": 64,
    "dataset_num_iters_per_learner": 2,
    "evaluation_duration": 2,
    "input_read_episodes": True,
}
SETTINGS: dict[str, dict[str, Any]] = {  # short iterations; a new algorithm needs an entry
    "PPO": {"train_batch_size_per_learner": 200, "num_epochs": 2},
    "APPO": STREAM,
    "IMPALA": STREAM,
    "DQN": {**REPLAY, "min_sample_timesteps_per_iteration": 200},
    "SAC": REPLAY,
    "TQC": REPLAY,
    "DreamerV3": {"model_size": "nano", "batch_size_B": 2, "batch_length_T": 8, "training_ratio": 16},
    **dict.fromkeys(("BC", "CQL", "IQL", "MARWIL"), OFFLINE),
}
REFUSED = {("DQN", "Pendulum-v1"), ("CQL", "CartPole-v1"), ("IQL", "CartPole-v1"), ("TQC", "CartPole-v1")}
CASES = [(name, env) for name in sorted(SETTINGS) for env in ("CartPole-v1", "Pendulum-v1")]


@pytest.fixture(scope="module")
def ray() -> Any:
    """Ray with enough cores for Ray Data, which reads offline data."""
    from fever.sampling.ray_cluster import connect

    assert connect(8).owned
    import ray

    yield ray
    ray.shutdown()


@pytest.fixture(scope="module")
def recorded(ray: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Episodes that RLlib has written while it trained, by environment."""
    folder = tmp_path_factory.mktemp("recorded")
    for env in ("CartPole-v1", "Pendulum-v1"):
        library.train(
            env, "rllib:PPO", runs=folder / "runs", workers=0, envs=4, stop={"iterations": 4}, output=f"{folder}/{env}",
            output_max_rows_per_file=2, batch_mode="complete_episodes", **SETTINGS["PPO"],
        )  # fmt: skip
    return {env: f"{folder}/{env}" for env in ("CartPole-v1", "Pendulum-v1")}


def test_every_algorithm_is_tried() -> None:
    assert set(names()) == {f"rllib:{name}" for name in SETTINGS}


@pytest.mark.parametrize(("name", "env"), [case for case in CASES if case not in REFUSED])
def test_trains_saves_and_plays(name: str, env: str, recorded: dict[str, str], tmp_path: Path) -> None:
    offline = SETTINGS[name] is OFFLINE
    more = {"input_": [recorded[env]]} if offline else {}
    workers = 1 if SETTINGS[name] is STREAM else 0
    stop = {"steps": 500, "window": 1} if workers else {"iterations": 2, "window": 1}  # a stream's first may be empty
    result = library.train(env, f"rllib:{name}", runs=tmp_path, workers=workers, stop=stop, **SETTINGS[name], **more)
    assert result.summary["steps"] > 0
    row = result.run.metrics()[-1]
    assert any(key.endswith(("loss", "L_total", "L_prediction")) for key in row), row
    if offline:
        assert row["episodes"] >= 2  # of evaluation
        assert "evaluation_return_mean" in row
    if name != "DreamerV3":  # which acts on more than an observation
        assert env_takes(env, result.policy)
    assert len(evaluate(result.run.checkpoint(), source_of(result.run), episodes=1).returns) == 1


@pytest.mark.parametrize("name", ["DQN", "IMPALA"])
def test_resumes_from_its_checkpoint(name: str, ray: Any, tmp_path: Path) -> None:
    """With a replay buffer, which starts empty, and with a stream."""
    workers, stop = int(SETTINGS[name] is STREAM), {"steps": 600, "window": 1}
    first = library.train("CartPole-v1", f"rllib:{name}", runs=tmp_path, workers=workers, stop=stop, **SETTINGS[name])
    run = Run(first.run.path)  # as another process has it: one's own run is trusted
    before = run.checkpoint()
    steps, weights = before.manifest["steps"], before.arrays("policy/")  # a slow run drops this checkpoint later
    more = run.config.model_copy(update={"stop": run.config.stop.model_copy(update={"steps": steps + 600})})
    with pytest.raises(FeverError, match="add --trust"):
        resume(run, more)
    assert resume(run, more, trust=True).summary["steps"] >= steps + 600
    rows = run.metrics()
    assert [row["iteration"] for row in rows] == list(range(1, len(rows) + 1))
    counted = [row["steps"] for row in rows]
    assert counted == sorted(counted)
    assert workers or counted[before.iteration] - steps == 200, "steps of the first part are counted once"
    after = run.checkpoint().arrays("policy/")
    moved = [np.abs(after[key] - value).max() for key, value in weights.items()]
    assert 0 < max(moved) < 0.3, "it went on from those weights"


def test_a_search(ray: Any, tmp_path: Path) -> None:
    values = {
        "env": "tests.rllib.parts:OfRllib", "env_kwargs": {"length": 3}, "algo": "rllib:PPO",
        "settings": SETTINGS["PPO"], "stop": {"iterations": 2, "window": 1},
        "runs": str(tmp_path), "name": "search", "search": {"space": {"lr": "choice(1e-3,1e-4)"}, "method": "grid"},
    }  # fmt: skip
    summary = search(validate(RunConfig, values, "the test"))
    assert (summary["trials"], summary["failed"], summary["stop_reason"]) == (2, 0, "trials")
    run = Run(tmp_path / "search")
    trials = [Run(run.path / "trials" / name) for name in ("0001", "0002")]
    assert [trial.config.settings["lr"] for trial in trials] == [1e-3, 1e-4]
    assert all(trial.metrics()[-1]["iteration"] == 2 and trial.checkpoint().files.is_dir() for trial in trials)
    best = validate(RunConfig, load_yaml(run.path / "best.yaml"), "best.yaml")
    assert best.settings["lr"] == summary["best"]["settings"]["lr"]
    for file in ("summary.json", "tune/tuner.pkl", "trials/0001/summary.json"):  # as if it had been interrupted
        (run.path / file).unlink()
    with pytest.raises(FeverError, match="holds pickles"):
        search(run.config, run=run)
    longer = run.config.model_copy(update={"stop": run.config.stop.model_copy(update={"iterations": 3})})
    assert search(longer, run=run, trust=True)["failed"] == 0
    assert [len(trial.metrics()) for trial in trials] == [3, 2], "one went on, the other had ended"


@pytest.mark.parametrize(("file", "name"), [one for one in EXPERIMENTS if "apex" not in one[1]])
def test_examples_can_be_built(file: str, name: str, tmp_path: Path) -> None:
    """Their environments, connectors and networks, in one process."""
    found = known_part(example(file, name))
    assert not any("has no such setting" in note for note in found.notes)
    config = split_settings(validate(RunConfig, {**found.values, "workers": 0, "envs": 1}, file))[0]
    source = EnvSource(config.env, config.env_kwargs)
    runner = make_runner(config, probe_spaces(source), MakeEnv(source, tmp_path, absolute_sys_path()))
    try:
        (episode,) = runner.sample(num_timesteps=4, explore=True)
        assert episode.env_steps() == 4
    finally:
        runner.stop()


def env_takes(name: str, policy: Any) -> bool:
    """Whether an environment accepts a policy's action."""
    import gymnasium as gym

    env = gym.make(name)
    observation, _ = env.reset(seed=0)
    for _ in range(3):
        observation, *_ = env.step(policy.act(observation))
    return True


@pytest.mark.parametrize(("name", "env"), sorted(case for case in REFUSED if SETTINGS[case[0]] is not OFFLINE))
def test_refuses_actions_that_it_cannot_take(name: str, env: str, ray: Any, tmp_path: Path) -> None:
    with pytest.raises((FeverError, TrainingError), match=r"RLlib (cannot build|failed)"):
        library.train(env, f"rllib:{name}", runs=tmp_path, workers=0, stop={"iterations": 1}, **SETTINGS[name])


def test_an_old_file_of_ape_x_trains(tmp_path: Path) -> None:
    """With fever's own Ape-X, on two workers and frames of Atari."""
    from tests.helpers import run_fever

    pytest.importorskip("ale_py")
    file = str(ROOT / "examples" / "rllib" / "atari-apex.yaml")
    words = ("warmup=200", "buffer=2000", "batch=8", "--workers", "1", "--envs", "2", "--stop-steps", "600")
    done = run_fever("train", "PongNoFrameskip-v4", "-f", file, *words, cwd=tmp_path, timeout=280)
    assert done.returncode == 0, done.stderr
    assert "RLlib no longer has Ape-X: this is fever's own" in done.stderr
    assert "the step limit was reached" in done.stdout
