"""Short runs of every algorithm that the installed RLlib has, on discrete and continuous actions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import fever as library
from fever.errors import FeverError, TrainingError
from fever.evaluate import evaluate, source_of
from fever.rllib import names
from tests.conftest import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
REPLAY = {"train_batch_size_per_learner": 32, "num_steps_sampled_before_learning_starts": 100}
STREAM = {"train_batch_size_per_learner": 100, "rollout_fragment_length": 50, "min_time_s_per_iteration": 1}
OFFLINE = {
    "train_batch_size_per_learner": 64,
    "dataset_num_iters_per_learner": 2,
    "evaluation_duration": 2,
    "input_read_episodes": True,
}
SETTINGS: dict[str, dict[str, Any]] = {  # so that an iteration takes a moment; an algorithm that is new has its own
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
    """With cores enough for Ray Data, which reads what is learned from offline."""
    from fever.cluster import connect

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
    assert set(names()) == set(SETTINGS)


@pytest.mark.parametrize(("name", "env"), [case for case in CASES if case not in REFUSED])
def test_trains_saves_and_plays(name: str, env: str, recorded: dict[str, str], tmp_path: Path) -> None:
    offline = SETTINGS[name] is OFFLINE
    more = {"input_": [recorded[env]]} if offline else {}
    workers = 1 if SETTINGS[name] is STREAM else 0
    stop = {"steps": 500, "window": 1} if workers else {"iterations": 2, "window": 1}  # a stream begins with nothing
    result = library.train(env, f"rllib:{name}", runs=tmp_path, workers=workers, stop=stop, **SETTINGS[name], **more)
    assert result.summary["steps"] > 0
    row = result.run.metrics()[-1]
    assert any(key.endswith(("loss", "L_total", "L_prediction")) for key in row), row
    if offline:
        assert row["episodes"] >= 2  # of evaluation
        assert "evaluation_return_mean" in row
    if name != "DreamerV3":  # whose state is more than an observation
        assert env_takes(env, result.policy)
    assert len(evaluate(result.run.checkpoint(), source_of(result.run), episodes=1).returns) == 1


def env_takes(name: str, policy: Any) -> bool:
    """Whether an environment takes the action that a policy gives."""
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
    from tests.conftest import run_fever

    pytest.importorskip("ale_py")
    file = str(ROOT / "examples" / "rllib" / "atari-apex.yaml")
    words = ("warmup=200", "buffer=2000", "batch=8", "--workers", "1", "--envs", "2", "--stop-steps", "600")
    done = run_fever("train", "PongNoFrameskip-v4", "-f", file, *words, cwd=tmp_path, timeout=280)
    assert done.returncode == 0, done.stderr
    assert "RLlib has no Ape-X any more: it is fever's own" in done.stderr
    assert "the step limit was reached" in done.stdout
