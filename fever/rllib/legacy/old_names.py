"""Tables: the current names for what earlier versions of RLlib called algorithms, environments and settings."""

from __future__ import annotations

import re
from typing import Any


def words(text: str) -> frozenset[str]:
    return frozenset(text.split())


# algorithms

RLLIB_ALGORITHMS = (  # of Ray 2.60
    "PPO", "APPO", "IMPALA", "DQN", "SAC", "CQL", "BC", "MARWIL", "IQL", "TQC", "DreamerV3",
)  # fmt: skip
APEX = ("APEX", "APEX_DQN", "APEX-DQN", "APEXDQN")
REPLACEMENTS = {  # algorithm that RLlib no longer has, in capitals without _ and - -> the closest one to use instead
    "A2C": "a2c", "A3C": "a2c, or asynchronously impala", "PG": "a2c", "DDPPO": "ppo with --workers",
    "TRPO": "trpo", "DDPG": "td3", "TD3": "td3", "APEXDDPG": "td3", "ES": "ppo", "ARS": "ppo",
    "SIMPLEQ": "dqn", "RAINBOW": "dqn", "R2D2": "ppo with recurrent=lstm", "RNNSAC": "sac", "CRR": "rllib:CQL",
    "DREAMER": "rllib:DreamerV3", "QMIX": "rllib:PPO", "MADDPG": "rllib:SAC", "MAML": "ppo", "MBMPO": "ppo",
    "ALPHAZERO": "ppo", "ALPHASTAR": "rllib:APPO", "LEELACHESSZERO": "ppo", "SLATEQ": "dqn", "DT": "rllib:BC",
    "BANDITLINUCB": "dqn", "BANDITLINTS": "dqn",
}  # fmt: skip

# settings

_OLD_NAMES = {  # current name -> earlier names
    "num_env_runners": "num_workers num_rollout_workers",
    "num_envs_per_env_runner": "num_envs_per_worker",
    "num_gpus_per_env_runner": "num_gpus_per_worker",
    "num_cpus_per_env_runner": "num_cpus_per_worker",
    "custom_resources_per_env_runner": "custom_resources_per_worker",
    "num_learners": "num_learner_workers",
    "num_gpus_per_learner": "num_gpus_per_learner_worker",
    "num_cpus_per_learner": "num_cpus_per_learner_worker",
    "num_epochs": "num_sgd_iter",
    "minibatch_size": "sgd_minibatch_size mini_batch_size_per_learner",
    "train_batch_size_per_learner": "train_batch_size",
    "shuffle_batch_per_epoch": "shuffle_sequences",
    "lambda_": "lambda",
    "lr": "lr_schedule",
    "entropy_coeff": "entropy_coeff_schedule",
    "rollout_fragment_length": "sample_batch_size",
    "explore": "exploration_enabled",
    "max_requests_in_flight_per_env_runner": "max_sample_requests_in_flight_per_worker "
    "max_requests_in_flight_per_sampler_worker",
    "num_aggregator_actors_per_learner": "num_aggregation_workers",
    "max_requests_in_flight_per_aggregator_actor": "max_requests_in_flight_per_aggregator_worker",
    "restart_failed_env_runners": "recreate_failed_workers recreate_failed_env_runners",
    "ignore_env_runner_failures": "ignore_worker_failures",
    "max_num_env_runner_restarts": "max_num_worker_restarts",
    "delay_between_env_runner_restarts_s": "delay_between_worker_restarts_s",
    "num_consecutive_env_runner_failures_tolerance": "num_consecutive_worker_failures_tolerance",
    "env_runner_health_probe_timeout_s": "worker_health_probe_timeout_s",
    "env_runner_restore_timeout_s": "worker_restore_timeout_s",
    "validate_env_runners_after_construction": "validate_workers_after_construction",
    "min_time_s_per_iteration": "min_iter_time_s min_time_s_per_reporting",
    "min_sample_timesteps_per_iteration": "timesteps_per_iteration min_sample_timesteps_per_reporting",
    "min_train_timesteps_per_iteration": "min_train_timesteps_per_reporting",
    "metrics_num_episodes_for_smoothing": "metrics_smoothing_episodes",
    "metrics_episode_collection_timeout_s": "collect_metrics_timeout",
    "evaluation_num_env_runners": "evaluation_num_workers",
    "evaluation_duration": "evaluation_num_episodes",
    "num_steps_sampled_before_learning_starts": "learning_starts min_size_for_sampling",
    "replay_buffer_config.capacity": "buffer_size",
    "replay_buffer_config.alpha": "prioritized_replay_alpha",
    "replay_buffer_config.beta": "prioritized_replay_beta",
    "actor_lr": "optimization.actor_learning_rate",
    "critic_lr": "optimization.critic_learning_rate",
    "alpha_lr": "optimization.entropy_learning_rate",
    "model_config.head_fcnet_hiddens": "hiddens",
    "model_config.vf_share_layers": "vf_share_layers",
    "policies": "multiagent.policies",
    "policies_to_train": "multiagent.policies_to_train",
    "count_steps_by": "multiagent.count_steps_by",
    "input_": "input",
}
RENAMED = {old: new for new, olds in _OLD_NAMES.items() for old in olds.split()}
RENAMED_FOR = {
    "APPO": {
        "num_sgd_iter": "circular_buffer_iterations_per_batch",
        "minibatch_buffer_size": "circular_buffer_num_batches",
        "target_update_frequency": "target_network_update_freq",
    },
    "APEX": {"optimizer.num_replay_buffer_shards": "num_replay_buffer_shards", "clip_rewards": "clip_rewards"},
}
MODEL_SETTINGS = ("model", "policy_model", "policy_model_config", "Q_model", "q_model_config")  # now: model_config
MODEL_NAMES = {
    **{name: name for name in (
        "fcnet_hiddens", "fcnet_activation", "conv_filters", "conv_activation", "vf_share_layers", "free_log_std",
        "log_std_clip_param", "use_lstm", "lstm_cell_size", "max_seq_len", "lstm_use_prev_action",
        "lstm_use_prev_reward", "head_fcnet_hiddens", "head_fcnet_activation",
    )},
    "post_fcnet_hiddens": "head_fcnet_hiddens", "post_fcnet_activation": "head_fcnet_activation",
    "hidden_layer_sizes": "fcnet_hiddens", "hidden_activation": "fcnet_activation",
}  # fmt: skip
NESTED = (
    *MODEL_SETTINGS, "model_config", "optimization", "optimizer", "exploration_config", "replay_buffer_config",
    "multiagent", "evaluation_config",
)  # fmt: skip
_REASONS = {  # why settings have no current name -> those settings
    "PyTorch is used": "eager eager_tracing eager_max_retraces no_eager_on_workers tf_session_args "
    "local_tf_session_args enable_tf1_exec_eagerly",
    "episodes end where the environment says": "horizon soft_horizon no_done_at_end",
    "it would be a function, which YAML cannot hold": "multiagent.policy_mapping_fn multiagent.observation_fn "
    "custom_eval_function before_learn_on_batch env_task_fn",
    "RLlib no longer has noisy networks": "noisy sigma0 parameter_noise",
    "RLlib uses its own value for Adam": "adam_epsilon",
    "RLlib ignores it; ALE's env_kwargs reward_clipping clips rewards and reported returns": "clip_rewards",
    "the exponent is constant": "final_prioritized_replay_beta beta_annealing_fraction "
    "prioritized_replay_beta_annealing_timesteps",
    "RLlib no longer has it": "minibatch_buffer_size replay_proportion replay_buffer_num_slots learner_queue_timeout "
    "num_multi_gpu_tower_stacks opt_type decay momentum _separate_vf_optimizer _lr_vf vtrace_drop_last_ts sample_async "
    "num_data_loader_buffers num_data_load_threads prioritized_replay_eps replay_sequence_length replay_batch_size "
    "replay_mode replay_burn_in replay_zero_init_states storage_unit use_state_preprocessor remote_env_batch_wait_ms "
    "input_evaluation",
}
REMOVED = {name: reason for reason, names in _REASONS.items() for name in names.split()}
_SEVERAL_RATES = {"lr": "it has actor_lr, critic_lr and alpha_lr"}
_IMPALA = {"lambda": "V-trace does not use it", "use_gae": "V-trace does not use it", "epsilon": "Adam is used"}
REMOVED_FOR = {
    "SAC": _SEVERAL_RATES, "CQL": _SEVERAL_RATES, "TQC": _SEVERAL_RATES, "IQL": _SEVERAL_RATES, "IMPALA": _IMPALA,
    "APPO": {"learner_queue_size": "circular_buffer_num_batches is its queue", "use_critic": "it always has a critic"},
    "APEX": {
        "noisy": "fever has no noisy networks", "adam_epsilon": "fever uses its own value for Adam",
        **dict.fromkeys(("beta_annealing_fraction", "final_prioritized_replay_beta"), "it rises to 1 at stop.steps"),
    },
}  # fmt: skip
UNNEEDED = words(  # without effect now, or done by fever itself
    "log_level simple_optimizer monitor record_env synchronize_filters enable_connectors _fake_gpus "
    "enable_rl_module_and_learner enable_env_runner_and_connector_v2 _enable_learner_api _enable_rl_module_api "
    "_enable_new_api_stack _disable_preprocessor_api _disable_execution_plan_api auto_wrap_old_gym_envs "
    "always_attach_evaluation_results create_env_on_driver num_cpus_for_driver num_cpus_for_local_worker "
    "num_cpus_for_main_process worker_side_prioritization _enable_replay_buffer_api per_worker_exploration "
    "evaluation_config.input checkpoint_freq checkpoint_at_end checkpoint_score_attr checkpoint_config max_failures "
    "verbose resources_per_trial trial_resources upload_dir sync_config pass_criteria"
)
RUN_FIELDS = {  # current name of a setting -> the field of RunConfig that it sets
    "num_env_runners": "workers", "num_envs_per_env_runner": "envs", "num_gpus_per_env_runner": "gpus_per_worker",
    "seed": "seed",
}  # fmt: skip
RUNNERS = {"PPO": 2, "APPO": 2, "IMPALA": 2}  # env runners where a file does not say how many; otherwise 0
APEX_NAMES = {  # current name in RLlib -> name in fever's Ape-X
    "lr": "learning_rate", "gamma": "gamma", "n_step": "n_step", "double_q": "double", "dueling": "dueling",
    "train_batch_size_per_learner": "batch", "replay_buffer_config.capacity": "buffer",
    "replay_buffer_config.alpha": "priority_exponent", "replay_buffer_config.beta": "importance",
    "num_steps_sampled_before_learning_starts": "warmup", "grad_clip": "max_gradient_norm",
    "rollout_fragment_length": "explore_steps", "training_intensity": "replay_ratio",
    "num_replay_buffer_shards": "replay_shards", "min_sample_timesteps_per_iteration": "report_steps",
    "model_config.fcnet_activation": "activation", "clip_rewards": "clip_rewards",
}  # fmt: skip
APEX_DEFAULTS = {  # RLlib's defaults for its Ape-X, by RLlib's current names
    "n_step": 3, "lr": 5e-4, "grad_clip": 40.0, "train_batch_size_per_learner": 512, "training_intensity": 1,
    "target_network_update_freq": 500_000, "num_steps_sampled_before_learning_starts": 50_000,
    "replay_buffer_config.capacity": 2_000_000, "replay_buffer_config.alpha": 0.6, "replay_buffer_config.beta": 0.4,
    "rollout_fragment_length": 50, "min_sample_timesteps_per_iteration": 25_000,
}  # fmt: skip
APEX_FIXED = {"updates": 4, "epsilon_steps": 1}  # as RLlib's: few gradient steps a call, no schedule of exploration
APEX_LOST = {
    "epsilon": "every explorer keeps one epsilon of a fixed series, as RLlib's workers did",
    "num_atoms": "fever's Ape-X learns expected values, not distributions",
    "min_time_s_per_iteration": "iterations are counted in steps",
}
APEX_NEEDS_NO = ("compress_observations", "batch_mode")
OFF: tuple[Any, ...] = (None, False, 0, "", [], {})  # values that switch any setting off
NEUTRAL = {  # setting -> the value that switches it off
    "num_multi_gpu_tower_stacks": 1, "minibatch_buffer_size": 1, "num_atoms": 1, "tau": 1.0,
    "observation_filter": "NoFilter",
}  # fmt: skip
STOP = {  # the last part of a metric's name -> the stop rule
    "episode_reward_mean": "reward", "episode_return_mean": "reward", "timesteps_total": "steps",
    "num_env_steps_sampled": "steps", "num_env_steps_sampled_lifetime": "steps", "agent_timesteps_total": "steps",
    "num_agent_steps_sampled_lifetime": "steps", "num_env_steps_trained": "steps", "time_total_s": "seconds",
    "training_iteration": "iterations",
}  # fmt: skip
RLLIB_WINDOW = 100  # episodes in RLlib's mean return
BUFFER = "replay_buffer_config."
MODEL_PREFIXES = tuple(f"{name}." for name in MODEL_SETTINGS)
OLD_BUFFERS = ("ReplayBuffer", "PrioritizedReplayBuffer", "MultiAgentReplayBuffer", "MultiAgentPrioritizedReplayBuffer")
OLD_EXPLORATION = {  # name in 2018 -> in `exploration_config`; the schedule took `fraction` of `steps`
    "exploration_final_eps": "final_epsilon", "exploration_initial_eps": "initial_epsilon",
    "exploration_fraction": "fraction", "schedule_max_timesteps": "steps",
}  # fmt: skip
OFFLINE = ("BC", "MARWIL", "CQL", "IQL")
TEXT_NUMBER = re.compile(r"[+-]?\d+(\.\d*)?[eE][+-]?\d+")  # a number that YAML reads as text: 1e-4
