"""RLlib's algorithms behind fever's commands: metrics, checkpoints, stop rules, several agents, lost runners."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess
from types import SimpleNamespace
from typing import Any, cast

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.envs.classic_control import CartPoleEnv

pytest.importorskip("torch")

import fever as library
from fever.config import RunConfig
from fever.envs.source import EnvSource
from fever.errors import FeverError, TrainingError
from fever.files import sealed
from fever.rllib.adapter import RllibLearner, limit_torch_threads
from fever.rllib.catalogue import find_class
from fever.rllib.environment import Spaces
from fever.rllib.play import Player
from fever.rllib.structure import pack, unpack
from fever.runs.evaluate import evaluate, source_of
from fever.runs.film import record
from fever.runs.run import Run
from fever.training import trainer
from fever.training.resume import resume
from fever.training.setup import prepare
from tests.helpers import wait_for, without_ray

pytestmark = [pytest.mark.ray, pytest.mark.filterwarnings("ignore")]  # RLlib warns often; a run writes it to its log
SMALL: dict[str, Any] = {"train_batch_size_per_learner": 200, "minibatch_size": 50, "num_epochs": 2}


def train(folder: Path, env: Any = "CartPole-v1", algo: str = "rllib:PPO", **more: Any) -> Any:
    """A short run."""
    given = {"workers": 0, "stop": {"iterations": 2}, "name": "run", **SMALL, **more}
    return library.train(env, algo, runs=folder / "runs", **given)


def test_a_run_has_metrics_episodes_and_weights(ray: Any, tmp_path: Path) -> None:
    result = train(tmp_path, stop={"steps": 600})
    assert result.summary["stop_reason"] == "steps"
    assert result.summary["steps"] >= 600
    run = Run(tmp_path / "runs" / "run")
    rows, episodes = run.metrics(), run.episodes()
    assert rows[-1]["episodes"] == len(episodes) > 5
    assert sum(row["length"] for row in episodes) <= rows[-1]["steps"]
    assert rows[-1]["return_mean"] == np.mean([row["return"] for row in episodes[-20:]])
    assert {"entropy", "kl", "value_loss", "explained_variance", "time_env", "time_learn"} <= set(rows[-1])
    assert 0.5 < sum(rows[-1][name] for name in ("time_env", "time_inference", "time_transfer", "time_learn")) < 1.2
    weights = run.checkpoint().arrays("policy/default_policy/")
    assert weights["encoder.actor_encoder.net.mlp.0.weight"].shape == (256, 4)
    assert run.config.workers == 0
    assert run.config.envs == 1  # RLlib's default, not fever's
    assert run.facts["packages"]["torch"]


def test_it_learns_and_plays_what_it_has_learned(ray: Any, tmp_path: Path) -> None:
    settings = {"train_batch_size_per_learner": 1000, "minibatch_size": 125, "num_epochs": 8, "lr": 1e-3}
    result = train(tmp_path, stop={"reward": 80, "steps": 40_000}, envs=8, **settings)
    assert result.stop_reason == "reward"
    total, policy, env = 0.0, result.policy, gym.make("CartPole-v1")
    for seed in range(5):
        observation, ended = env.reset(seed=seed)[0], False
        policy.reset()
        while not ended:
            observation, reward, terminated, truncated, _ = env.step(policy.act(observation))
            total, ended = total + float(reward), terminated or truncated
    assert total / 5 > 60


def test_resume_needs_trust(ray: Any, tmp_path: Path) -> None:
    train(tmp_path)
    run = Run(tmp_path / "runs" / "run")
    before = run.checkpoint()
    more = run.config.model_copy(update={"stop": run.config.stop.model_copy(update={"iterations": 4})})
    with pytest.raises(FeverError, match=r"pickles, which can run any program .* add --trust"):
        resume(run, more)
    result = resume(run, more, trust=True)
    rows = run.metrics()
    assert [row["iteration"] for row in rows] == [1, 2, 3, 4]
    assert [row["steps"] for row in rows] == [200, 400, 600, 800]
    assert result.summary["iterations"] == 4
    name = "policy/default_policy/pi.net.mlp.0.weight"
    moved = np.abs(before.arrays()[name] - run.checkpoint().arrays()[name]).max()
    assert 0 < moved < 0.01  # it continued from those weights


def test_damaged_pickles_are_refused_before_they_are_read(ray: Any, tmp_path: Path) -> None:
    train(tmp_path)
    run = Run(tmp_path / "runs" / "run")
    last = run.checkpoint()
    (last.files / "algorithm_state.pkl").write_bytes(b"something else")
    more = run.config.model_copy(update={"stop": run.config.stop.model_copy(update={"iterations": 4})})
    with pytest.raises(FeverError, match="has changed since it was written"):
        resume(run, more, str(last.iteration), trust=True)


def test_trust_is_required_whatever_the_manifest_says(ray: Any, tmp_path: Path) -> None:
    train(tmp_path)
    run = Run(tmp_path / "runs" / "run")
    last = run.checkpoint()
    hashes = {name: value for name, value in last.manifest["sha256"].items() if not name.endswith(".pkl")}
    (last.path / "manifest.json").write_text(sealed({**last.manifest, "sha256": hashes}))
    more = run.config.model_copy(update={"stop": run.config.stop.model_copy(update={"iterations": 4})})
    with pytest.raises(FeverError, match="add --trust"):
        resume(run, more)
    with pytest.raises(FeverError, match="does not belong to it"):
        resume(run, more, str(last.iteration), trust=True)


def test_a_failed_iteration_keeps_the_last_good_checkpoint(ray: Any, tmp_path: Path) -> None:
    values = {
        "env": "tests.rllib.parts:BreaksInStep", "env_kwargs": {"after": 900}, "algo": "rllib:PPO", "settings": SMALL,
        "workers": 0, "runs": str(tmp_path), "name": "run", "checkpoint_seconds": 0.01,
    }  # fmt: skip
    with pytest.raises(TrainingError, match="libwarehouse"):
        trainer.train(RunConfig.model_validate(values))
    run = Run(tmp_path / "run")
    assert [row["steps"] for row in run.metrics()] == [200, 400, 600, 800]
    assert run.checkpoint().iteration == 4
    assert run.status == "failed"


def test_rllibs_defaults_survive_yaml(ray: Any, tmp_path: Path) -> None:
    """A job's configuration is written as YAML: RLlib's defaults and its settings for workers still apply."""
    config = RunConfig(env="CartPole-v1", algo="rllib:IMPALA", settings={"num_envs_per_env_runner": 3})
    again = RunConfig.model_validate(config.model_dump(mode="json"))
    found = prepare(again, EnvSource("CartPole-v1"), print).config
    assert (found.workers, found.envs, found.settings) == (2, 6, {})
    config = RunConfig(env="CartPole-v1", algo="rllib:PPO")
    found = prepare(config, EnvSource("CartPole-v1"), print)
    assert (found.config.workers, found.config.envs) == (2, 2)
    assert found.learner.rllib.num_envs_per_env_runner == 1


@pytest.mark.slow
def test_a_lost_runner_is_replaced(ray: Any, tmp_path: Path) -> None:
    from fever.rllib import adapter

    killed: list[int] = []
    original = adapter.RllibLearner._iteration

    def kill_once(self: Any, result: Any, pool: Any, wall: float) -> Any:
        actor = self.algorithm.env_runner_group._worker_manager.actors()[1]
        if not killed:
            killed.append(ray.get(actor.apply.remote(lambda runner: os.getpid())))
            os.kill(killed[0], signal.SIGKILL)
        elif self.algorithm.iteration == 2:  # missed by now; Ray's restart may take longer than all six iterations
            wait_for(lambda: answers(actor), "new runner", 120, pause=0.2)
        return original(self, result, pool, wall)

    def answers(actor: Any) -> bool:
        try:
            return ray.get(actor.apply.remote(lambda runner: os.getpid()), timeout=20) != killed[0]
        except (ray.exceptions.RayActorError, ray.exceptions.GetTimeoutError):
            return False

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(adapter.RllibLearner, "_iteration", kill_once)
        result = train(tmp_path, workers=2, stop={"iterations": 6})
    assert killed
    assert result.summary["iterations"] == 6
    rows = Run(tmp_path / "runs" / "run").metrics()
    assert rows[-1]["worker_restarts"] == 1
    assert set(row["worker"] for row in Run(tmp_path / "runs" / "run").episodes()) == {0, 1}


@pytest.mark.parametrize("policies", ["shared", "separate"])
def test_several_agents(ray: Any, tmp_path: Path, policies: str) -> None:
    result = train(tmp_path, "tests.rllib.parts:TwoAgents", policies=policies)
    run = Run(tmp_path / "runs" / "run")
    found = {name.split("/")[0] for name in run.checkpoint().arrays("policy/")}
    assert found == ({"shared"} if policies == "shared" else {"left", "right"})
    row = run.metrics()[-1]
    assert {"return_mean/left", "return_mean/right"} <= set(row)
    assert ("left/entropy" in row) == (policies == "separate")
    assert result.summary["return_mean"] == pytest.approx(row["return_mean/left"] + row["return_mean/right"], rel=0.5)
    with pytest.raises(FeverError, match="fever eval"):
        _ = result.policy
    with pytest.raises(FeverError, match="policy_mapping_fn chooses among policies"):
        train(tmp_path, "tests.rllib.parts:TwoAgents", name="other", policy_mapping_fn="tests.rllib.parts:TwoAgents")
    scores = evaluate(run.checkpoint(), source_of(run), episodes=3)
    assert list(scores.lengths) == [10, 10, 10]
    assert list(evaluate(run.checkpoint(), source_of(run), episodes=3).returns) == list(scores.returns)
    assert list(evaluate(run.checkpoint(), source_of(run), episodes=2, max_steps=4).lengths) == [4, 4]
    assert record(run.checkpoint(), source_of(run), tmp_path / "film.gif", 20)[0]["return"] == scores.returns[0]


def test_normalised_observations_are_played_without_pickles(ray: Any, tmp_path: Path) -> None:
    train(tmp_path, observation_filter="MeanStdFilter")
    checkpoint = Run(tmp_path / "runs" / "run").checkpoint()
    with Player(checkpoint, EnvSource("CartPole-v1")) as player:
        state = player.runner.get_state(components="env_to_module_connector")["env_to_module_connector"]
    assert max(_numbers(state)) >= 400  # observations that the filter saw during the run


def _numbers(value: Any) -> list[float]:
    if isinstance(value, dict):
        return [number for one in value.values() for number in _numbers(one)]
    if isinstance(value, (list, tuple)):
        return [number for one in value for number in _numbers(one)]
    return [float(value)] if isinstance(value, (int, float)) else []


def test_discrete_observations_are_flattened(ray: Any, tmp_path: Path) -> None:
    result = train(tmp_path, "FrozenLake-v1", observation_filter="MeanStdFilter", workers=1)
    checkpoint = result.run.checkpoint()
    weights = checkpoint.arrays("policy/default_policy/")
    assert weights["encoder.actor_encoder.net.mlp.0.weight"].shape == (256, 16)
    scores = evaluate(checkpoint, source_of(result.run), episodes=3, max_steps=2)
    assert (len(set(scores.seeds)), scores.lengths.max(), scores.distinct) == (3, 2, 1)
    env = gym.make("FrozenLake-v1")
    observation, _ = env.reset(seed=0)
    for _ in range(3):
        observation, *_ = env.step(result.policy.act(observation))
    with Player(checkpoint, EnvSource("FrozenLake-v1")) as player:
        assert [type(piece).__name__ for piece in player.runner._env_to_module.connectors[:2]] == [
            "FlattenObservations", "MeanStdFilter",
        ]  # fmt: skip


def test_observations_are_flattened_per_agent(ray: Any, tmp_path: Path) -> None:
    result = train(tmp_path, "tests.rllib.parts:TwoAgents", env_kwargs={"number": True}, policies=["left", "right"])
    weights = result.run.checkpoint().arrays("policy/")
    name = "encoder.actor_encoder.net.mlp.0.weight"
    assert (weights[f"left/{name}"].shape, weights[f"right/{name}"].shape) == ((256, 3), (256, 2))
    assert len(evaluate(result.run.checkpoint(), source_of(result.run), episodes=2).returns) == 2


def test_exploration_continues_from_the_checkpoint(ray: Any, tmp_path: Path) -> None:
    settings = {
        "train_batch_size_per_learner": 32, "num_steps_sampled_before_learning_starts": 100, "minibatch_size": None,
        "num_epochs": 1, "min_sample_timesteps_per_iteration": 200, "epsilon": [[0, 1.0], [300, 0.0]],
    }  # fmt: skip
    result = train(tmp_path, algo="rllib:DQN", **settings)
    checkpoint, source = result.run.checkpoint(), source_of(result.run)
    greedy, explored = (evaluate(checkpoint, source, episodes=5, deterministic=one) for one in (True, False))
    assert list(greedy.returns) == list(explored.returns)
    observation = np.zeros(4, np.float32)
    assert result.policy.act(observation, deterministic=False) == result.policy.act(observation)
    other = {**result.run.config.settings, "gym_env_vectorize_mode": "async"}
    result.run.write_config(result.run.config.model_copy(update={"settings": other}))
    with Player(result.run.checkpoint(), source) as player:  # the environment still is in this process
        assert isinstance(player.env.unwrapped, CartPoleEnv)


def test_without_gpus_one_learner_has_all_batches(caplog: pytest.LogCaptureFixture) -> None:
    settings = {**SMALL, "num_learners": 4, "num_gpus_per_learner": 1}
    learner = make_learner(settings=settings)
    learner._fit_gpus(
        cast(Any, SimpleNamespace(ray=SimpleNamespace(cluster_resources=dict), ask=lambda question: question()))
    )
    found = learner.rllib
    assert (found.num_learners, found.num_gpus_per_learner) == (0, 0)
    assert (found.train_batch_size_per_learner, found.minibatch_size) == (800, 200)
    assert "num_learners are 0, train_batch_size_per_learner is 800, minibatch_size is 200" in caplog.text
    learner = make_learner(settings={**SMALL, "num_gpus_per_learner": 1})
    learner._fit_gpus(
        cast(Any, SimpleNamespace(ray=SimpleNamespace(cluster_resources=dict), ask=lambda question: question()))
    )
    assert learner.rllib.train_batch_size_per_learner == 200


def test_build_errors_name_the_spaces() -> None:
    learner = make_learner()
    learner.rllib = SimpleNamespace(build_algo=lambda: int("no such encoder"))
    with pytest.raises(FeverError, match=r"PPO for CartPole-v1 \(observations: Box.*, actions: Discrete\(2\)\): "):
        learner._build()


def make_learner(**fields: Any) -> RllibLearner:
    config = RunConfig(env="CartPole-v1", algo="rllib:PPO", workers=0, envs=1, **fields)
    spaces = Spaces("Box(4,)", "Discrete(2)", [], image=False, flattened=[])
    return RllibLearner(config, EnvSource("CartPole-v1"), spaces)


@pytest.mark.parametrize("widths", [64, None, ["wide"], [[64]]])
def test_threads_are_limited_for_any_model_settings(widths: Any) -> None:
    """A user's own network may have settings of any type."""
    limit_torch_threads(SimpleNamespace(model_config={"fcnet_hiddens": widths}), make_learner().spaces)


def test_own_algorithm(ray: Any, tmp_path: Path) -> None:
    result = train(tmp_path, algo="rllib:tests.rllib.parts:OwnAlgorithm", own_setting=3)
    assert Run(tmp_path / "runs" / "run").metrics()[-1]["own_metric"] == 3
    assert result.run.config.stem == "cartpole-v1-rllib-ownalgorithm"
    with pytest.raises(FeverError, match="is not a subclass of RLlib's Algorithm"):
        find_class("rllib:tests.rllib.parts:TwoAgents")


def test_errors_inside_rllib_are_one_sentence(ray: Any, tmp_path: Path) -> None:
    with pytest.raises((TrainingError, FeverError), match="libwarehouse"):
        train(tmp_path, "tests.rllib.parts:BreaksInStep")
    assert not (tmp_path / "runs").exists()


def test_nested_values_survive_packing() -> None:
    arrays: dict[str, np.ndarray] = {}
    value = {None: {"shape": (4,), "stats": [{"mean": np.arange(3.0), "count": np.int64(7)}], "clip": None}, 3: "x"}
    text = json.dumps(pack(value, arrays, "connectors/"))
    back = unpack(json.loads(text), arrays)
    assert back[None]["shape"] == (4,)
    assert back[3] == "x"
    np.testing.assert_array_equal(back[None]["stats"][0]["mean"], np.arange(3.0))
    with pytest.raises(TypeError, match="object"):
        pack({"a": object()}, arrays, "connectors/")


@pytest.mark.slow
def test_the_command_line(fever: Callable[..., CompletedProcess[str]], tmp_path: Path) -> None:
    """Train with old names and only fever's lines on the terminal; eval, watch; no resume without trust."""
    words = ("--workers", "1", "num_sgd_iter=2", "lr=3e-4", "train_batch_size_per_learner=400", "--name", "one")
    done = fever("train", "CartPole-v1", "--algo", "rllib:PPO", *words, "--stop-iterations", "2")
    assert done.returncode == 0, done.stderr
    assert without_ray(done.stderr) == ""
    lines = without_ray(done.stdout).splitlines()
    assert lines[0] == "other names now: num_sgd_iter is num_epochs"
    assert lines[1] == "starting Ray and 1 worker"
    assert lines[-1] == "next: fever eval runs/one"
    log = (tmp_path / "runs" / "one" / "log.txt").read_text()
    assert "WARNING ray" in log  # RLlib's warnings are in the log
    assert "Traceback" not in log
    shown = fever("eval", "one", "--episodes", "3", "--json")
    assert json.loads(shown.stdout)["episodes"] == 3, shown.stderr
    assert shown.stderr == ""
    filmed = fever("watch", "one", "--to", "film.gif", "--steps", "20")
    assert (filmed.returncode, (tmp_path / "film.gif").stat().st_size > 1000) == (0, True), filmed.stderr
    refused = fever("resume", "one", "--stop-iterations", "3")
    assert refused.returncode == 2
    assert "if you know who wrote it, add --trust" in refused.stderr
    refused = fever("export", "one")
    assert refused.returncode == 2
    assert "does not act with NumPy alone" in refused.stderr


@pytest.mark.slow
def test_ctrl_c_waits_for_the_iteration_and_saves(tmp_path: Path) -> None:
    import subprocess
    import sys

    words = ["train", "CartPole-v1", "--algo", "rllib:PPO", "--workers", "0", "--name", "cut", "num_epochs=2"]
    command = [sys.executable, "-m", "fever", *words, "train_batch_size_per_learner=500"]
    process = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    metrics = tmp_path / "runs" / "cut" / "metrics.jsonl"
    try:
        wait_for(lambda: metrics.exists() and metrics.read_text().count("\n") >= 2, "two iterations", 240)
        process.send_signal(signal.SIGINT)
        output = process.communicate(timeout=240)[0]
    finally:
        process.kill()
    assert process.returncode == 130, output
    assert "Traceback" not in output
    assert "rllib:PPO finishes its iteration, then the run is saved" in output
    assert output.endswith("next: fever resume runs/cut --trust  (it reads pickles)\n")
    run = Run(tmp_path / "runs" / "cut")
    assert run.summary is not None
    assert run.checkpoint().iteration == run.metrics()[-1]["iteration"]
