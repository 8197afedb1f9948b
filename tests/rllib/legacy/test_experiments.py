"""The experiments that RLlib's authors published (github.com/ray-project/rl-experiments), as files of `rllib train`.

Each is written anew from its settings. Those that can run here run for one iteration, with fewer workers and smaller
batches; the others are refused with a sentence.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from fever.cli.options import configuration
from fever.training import trainer
from tests.helpers import call_fever

GAMES = ["BreakoutNoFrameskip-v4", "BeamRiderNoFrameskip-v4", "QbertNoFrameskip-v4", "SpaceInvadersNoFrameskip-v4"]
ATARI = {"grid_search": GAMES}
DECAY = [[0, 0.0005], [20_000_000, 1e-12]]  # of the learning rate
Q_LEARNING = {
    "num_atoms": 1, "noisy": False, "double_q": False, "dueling": False, "hiddens": [512], "adam_epsilon": 0.00015,
    "buffer_size": 1_000_000, "schedule_max_timesteps": 2_000_000, "exploration_final_eps": 0.01,
    "exploration_fraction": 0.1, "prioritized_replay_alpha": 0.5, "beta_annealing_fraction": 1.0,
    "final_prioritized_replay_beta": 1.0,
}  # fmt: skip
APEX = {
    **Q_LEARNING, "n_step": 3, "lr": 0.0001, "num_gpus": 1, "num_workers": 8, "num_envs_per_worker": 8,
    "sample_batch_size": 20, "train_batch_size": 512, "target_network_update_freq": 50_000,
    "timesteps_per_iteration": 25_000,
}  # fmt: skip
DQN = {
    **Q_LEARNING, "prioritized_replay": False, "n_step": 1, "target_network_update_freq": 8000, "lr": 0.0000625,
    "learning_starts": 20_000, "sample_batch_size": 4, "train_batch_size": 32, "num_gpus": 0.2,
    "timesteps_per_iteration": 10_000,
}  # fmt: skip
IMPALA = {"sample_batch_size": 50, "train_batch_size": 500, "num_workers": 32, "num_envs_per_worker": 5}
PPO = {
    "lambda": 0.95, "kl_coeff": 0.5, "clip_rewards": True, "clip_param": 0.1, "vf_clip_param": 10.0,
    "entropy_coeff": 0.01, "train_batch_size": 5000, "sample_batch_size": 100, "sgd_minibatch_size": 500,
    "num_sgd_iter": 10, "num_workers": 10, "num_envs_per_worker": 5, "batch_mode": "truncate_episodes",
    "observation_filter": "NoFilter", "vf_share_layers": True, "num_gpus": 1,
}  # fmt: skip
CHEETAH_PPO = {
    "gamma": 0.99, "lambda": 0.95, "kl_coeff": 1.0, "num_sgd_iter": 32, "lr": 0.0003, "vf_loss_coeff": 0.5,
    "clip_param": 0.2, "sgd_minibatch_size": 4096, "train_batch_size": 65_536, "num_workers": 16, "num_gpus": 1,
    "grad_clip": 0.5, "num_envs_per_worker": {"grid_search": [16, 32]}, "batch_mode": "truncate_episodes",
    "observation_filter": "MeanStdFilter",
}  # fmt: skip
RATES = {f"{part}_learning_rate": 0.0003 for part in ("actor", "critic", "entropy")}
SAC = {
    "horizon": 1000, "soft_horizon": False, "tau": 0.005, "target_entropy": "auto", "no_done_at_end": True, "n_step": 1,
    "sample_batch_size": 1, "prioritized_replay": False, "train_batch_size": 256, "target_network_update_freq": 1,
    "timesteps_per_iteration": 1000, "learning_starts": 10_000, "exploration_enabled": True, "optimization": RATES,
    "num_workers": 0, "num_gpus": 0, "clip_actions": False, "normalize_actions": True, "evaluation_interval": 1,
    "metrics_smoothing_episodes": 5,
    **{name: {"hidden_activation": "relu", "hidden_layer_sizes": [256, 256]} for name in ("Q_model", "policy_model")},
}  # fmt: skip
FAST_PONG = {
    "sample_batch_size": 50, "train_batch_size": 1000, "num_workers": 128, "num_envs_per_worker": 5,
    "broadcast_interval": 5, "max_sample_requests_in_flight_per_worker": 1, "num_data_loader_buffers": 4, "num_gpus": 2,
    "model": {"dim": 42},
}  # fmt: skip

SMALL_DQN = ["min_sample_timesteps_per_iteration=64", "num_steps_sampled_before_learning_starts=32"]
SMALL_PPO = ["train_batch_size_per_learner=200", "minibatch_size=100", "num_epochs=1"]
SMALL_IMPALA = [
    "train_batch_size_per_learner=100",
    "rollout_fragment_length=20",
    "min_sample_timesteps_per_iteration=100",
]
RUN: dict[str, tuple[str, Any, dict[str, Any], list[str]]] = {  # algorithm, environment, settings, what is smaller here
    "atari-apex": ("APEX", ATARI, APEX, ["report_steps=200", "warmup=100", "buffer=10000", "batch=32"]),
    "atari-basic-dqn": ("DQN", ATARI, DQN, SMALL_DQN),
    "atari-dist-dqn": ("DQN", ATARI, {**DQN, "num_atoms": 51}, SMALL_DQN),
    "atari-duel-ddqn": ("DQN", ATARI, {**DQN, "double_q": True, "dueling": True}, SMALL_DQN),
    "atari-impala": ("IMPALA", ATARI, {**IMPALA, "lr_schedule": DECAY}, SMALL_IMPALA),
    "atari-ppo": ("PPO", ATARI, PPO, SMALL_PPO),
    "atari-ppo-torch": ("PPO", ATARI, {**PPO, "use_pytorch": False}, SMALL_PPO),
    "halfcheetah-ppo": ("PPO", "HalfCheetah-v2", CHEETAH_PPO, SMALL_PPO),
    "halfcheetah-sac": (
        "SAC", "HalfCheetah-v3", SAC, [*SMALL_DQN, "evaluation_duration=1", "evaluation_duration_unit=timesteps"],
    ),
    "pong-impala-fast": ("IMPALA", "PongNoFrameskip-v4", FAST_PONG, SMALL_IMPALA),
}  # fmt: skip
OFFLINE = {
    "input": "d4rl.hopper-random-v0",
    "bc_iters": 20_000,
    "num_actions": 10,
    "evaluation_config": {"input": "sampler"},
}
REFUSED = {  # algorithm, environment, settings, and the sentence
    "atari-a2c": ("A2C", ATARI, {"num_workers": 5, "lr_schedule": DECAY}, "no algorithm A2C; the closest is a2c"),
    "dreamer": ("DREAMER", "mine.Walker", {}, "no algorithm DREAMER; the closest is rllib:DreamerV3"),
    "ant-maml": ("MAML", "ray.rllib.examples.env.ant_rand_goal.AntRandGoalEnv", {}, "no algorithm MAML"),
    "hopper-mbmpo": ("MBMPO", "ray.rllib.examples.env.mbmpo_env.HopperWrapper", {}, "no algorithm MBMPO"),
    "halfcheetah-ddpg": ("DDPG", "HalfCheetah-v2", {}, "no algorithm DDPG; the closest is td3"),
    "mujoco-td3": ("TD3", "Ant-v2", {"learning_starts": 10_000}, "no algorithm TD3; the closest is td3"),
    "humanoid-es": ("ES", "Humanoid-v2", {"num_workers": 95}, "no algorithm ES; the closest is ppo"),
    "bullet-sac": ("SAC", "HalfCheetahBulletEnv-v0", SAC, "there is no environment HalfCheetahBulletEnv-v0"),
    "hopper-cql": ("CQL", "ray.rllib.examples.env.d4rl_env.hopper_random", OFFLINE, "hopper_random cannot be made"),
    "vizdoom": ("PPO", "VizdoomBasic-v0", {"model": {"use_attention": True}}, "no environment VizdoomBasic-v0"),
}  # fmt: skip


def write(folder: Path, name: str, algorithm: str, env: Any, config: dict[str, Any]) -> str:
    """An experiment as a file of `rllib train`; returns its path."""
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump({name: {"env": env, "run": algorithm, "config": config}}))
    return str(path)


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.filterwarnings("ignore")  # RLlib warns often; a run writes it to its log
@pytest.mark.parametrize("name", RUN)
def test_published_experiments_run(ray: Any, tmp_path: Path, name: str) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("ale_py")
    pytest.importorskip("mujoco")
    algorithm, env, settings, smaller = RUN[name]
    options: dict[str, Any] = {"file": write(tmp_path, name, algorithm, env, settings), "workers": "1", "envs": 2}
    options |= {"runs": str(tmp_path / "runs"), "settings": [*smaller, "iterations=1"]}
    options |= {} if isinstance(env, str) else {"env": env["grid_search"][0]}
    config = configuration(options, "train", quiet=True, elsewhere=False)
    assert config.algo == ("apex" if algorithm == "APEX" else f"rllib:{algorithm}")
    summary = trainer.train(config).summary
    assert (summary["iterations"], summary["stop_reason"]) == (1, "iterations")
    assert summary["steps"] > 0


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", REFUSED)
def test_the_others_are_refused_with_a_sentence(tmp_path: Path, name: str) -> None:
    algorithm, env, settings, sentence = REFUSED[name]
    pytest.importorskip("torch")
    words = [] if isinstance(env, str) else [env["grid_search"][0]]
    file = write(tmp_path, name, algorithm, env, settings)
    done = call_fever("train", *words, "-f", file, "--workers", "0", "--quiet", cwd=tmp_path)
    assert done.returncode == 2
    assert sentence in done.stderr
    assert not (tmp_path / "runs").exists()
