"""Experiments of the removed `rllib train -f` as configurations of fever."""

from __future__ import annotations

import inspect
import json
import re
import subprocess
import sys
from dataclasses import fields
from typing import Any

import pytest

from fever.algos.registry import config_of
from fever.config import RunConfig, load_yaml, validate
from fever.errors import FeverError
from fever.rllib.legacy.files import is_old_yaml, known_part
from fever.rllib.legacy.old_names import (
    MODEL_NAMES,
    RENAMED,
    RENAMED_FOR,
    RLLIB_ALGORITHMS,
    RUN_FIELDS,
)
from fever.rllib.legacy.options import translate_options
from fever.rllib.legacy.reader import rename
from fever.rllib.legacy.translate import translate
from tests.rllib.examples import EXPERIMENTS, FOLDER, example, old


def test_old_files_are_recognised() -> None:
    assert all(is_old_yaml(load_yaml(path)) for path in FOLDER.glob("*.yaml"))
    assert is_old_yaml({"env": "CartPole-v1", "run": "PPO", "config": {}})
    assert not is_old_yaml({"env": "CartPole-v1", "algo": "ppo", "settings": {"hidden": [8]}, "stop": {"steps": 9}})
    assert not is_old_yaml({"env": "mine:Runner", "env_kwargs": {"run": 3}})
    assert is_old_yaml({"x": {"env": "CartPole-v1", "run": "PPO"}, "env": {"run": "DQN"}})


def test_it_needs_neither_ray_nor_torch() -> None:
    code = "import sys, fever.rllib.legacy.translate; sys.exit(', '.join({'ray', 'torch', 'jax'} & sys.modules.keys()))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stderr.strip() == ""


@pytest.mark.parametrize(("file", "name"), EXPERIMENTS)
def test_examples_are_configurations(file: str, name: str) -> None:
    found = example(file, name)
    config = validate(RunConfig, found.values, file)
    assert config.stop.or_default(None) == config.stop  # the file's own rules
    assert config.algo.removeprefix("rllib:") in (*RLLIB_ALGORITHMS, "apex")
    if config.algo == "apex":
        validate(config_of("apex"), config.settings, "apex")
    else:
        assert rename(found.values["settings"], config.algo)[0] == found.values["settings"]  # all are current names


@pytest.mark.parametrize(("file", "name"), EXPERIMENTS)
@pytest.mark.filterwarnings("ignore")
def test_rllib_takes_the_examples(file: str, name: str) -> None:
    values = example(file, name).values
    if values["algo"] == "apex":
        return
    config = rllib_config(values["algo"])
    known = parameters(config)
    for setting in values["settings"]:
        assert setting in known, setting
    settings = dict(values["settings"])
    model = settings.pop("model_config", {})
    assert model.keys() <= model_fields()
    assert settings.pop("observation_filter", "NoFilter") in ("NoFilter", "MeanStdFilter")
    config.update_from_dict(settings)
    config.rl_module(model_config=model)
    config.env_runners(num_env_runners=values.get("workers", 0), num_envs_per_env_runner=1)
    config.validate()
    for setting, value in settings.items():
        if setting != "replay_buffer_config":
            assert getattr(config, setting) == value or setting == "evaluation_config"


@pytest.mark.filterwarnings("ignore")
def test_current_names_are_rllibs() -> None:
    known = {name for algorithm in RLLIB_ALGORITHMS for name in parameters(rllib_config(f"rllib:{algorithm}"))}
    targets = {*RENAMED.values(), *RENAMED_FOR["APPO"].values(), *RUN_FIELDS}
    assert {name.partition(".")[0] for name in targets} <= known
    assert {name.partition(".")[2] for name in targets if name.startswith("model_config.")} <= model_fields()
    assert set(MODEL_NAMES.values()) <= model_fields()


def rllib_config(algo: str) -> Any:
    pytest.importorskip("torch")
    pytest.importorskip("ray.rllib")
    import importlib

    name = algo.removeprefix("rllib:")
    return getattr(importlib.import_module(f"ray.rllib.algorithms.{name.lower()}"), name).get_default_config()


def parameters(config: Any) -> set[str]:
    """What the methods of RLlib's configuration take."""
    methods = "training rl_module env_runners learners multi_agent evaluation offline_data reporting fault_tolerance "
    methods += "environment callbacks debugging"
    owners = [owner for owner in type(config).__mro__ if owner is not object]
    functions = [vars(owner)[method] for owner in owners for method in methods.split() if method in vars(owner)]
    found = [one for function in functions for one in inspect.signature(function).parameters.values()]
    return {
        one.name for one in found if not (type(one.default) is int and one.default == -1)
    }  # RLlib's mark of deprecated ones


def model_fields() -> set[str]:
    from ray.rllib.core.rl_module.default_model_config import DefaultModelConfig

    return {field.name for field in fields(DefaultModelConfig)}


def test_settings_become_fields_of_the_run() -> None:
    found = example("cartpole-ppo.yaml")
    assert found.values == {
        "env": "CartPole-v1",
        "algo": "rllib:PPO",
        "workers": 1,
        "envs": 4,
        "stop": {"reward": 150, "steps": 100000, "window": 100},
        "settings": {
            "gamma": 0.99,
            "lr": 0.0003,
            "observation_filter": "MeanStdFilter",
            "num_epochs": 6,
            "train_batch_size_per_learner": 2000,
            "minibatch_size": 128,
            "vf_loss_coeff": 0.01,
            "model_config": {"fcnet_hiddens": [32], "fcnet_activation": "linear", "vf_share_layers": True},
        },
    }
    assert found.notes[0] == "not translated: framework: tf: PyTorch is used"
    assert "num_sgd_iter is num_epochs" in found.notes[1]
    assert "model is model_config" in found.notes[1]
    assert len(found.notes) == 2


@pytest.mark.filterwarnings("ignore")
def test_impala_of_2018() -> None:
    schedule = [[0, 0.0004], [10_000_000, "1e-12"]]
    config = {"sample_batch_size": 100, "train_batch_size": 400, "num_workers": 8, "num_envs_per_worker": 5}
    found = old("IMPALA", "BreakoutNoFrameskip-v4", **config, lr_schedule=schedule)
    assert (found.values["env"], found.values["algo"]) == ("ALE/Breakout-v5", "rllib:IMPALA")
    assert (found.values["workers"], found.values["envs"]) == (8, 40)
    assert found.values["settings"] == {
        "lr": [[0, 0.0004], [10_000_000, 1e-12]], "rollout_fragment_length": 100, "train_batch_size_per_learner": 400,
    }  # fmt: skip
    assert not any(note.startswith("not translated") for note in found.notes)
    rllib_config("rllib:IMPALA").update_from_dict(found.values["settings"]).validate()


@pytest.mark.parametrize(
    ("name", "nearest"),
    [("A3C", "a2c"), ("A2C", "a2c"), ("TD3", "td3"), ("DDPG", "td3"), ("APEX_DDPG", "td3"), ("SimpleQ", "dqn"),
     ("TRPO", "trpo"), ("AlphaStar", "rllib:APPO"), ("DREAMER", "rllib:DreamerV3")],
)  # fmt: skip
def test_removed_algorithms_name_the_closest(name: str, nearest: str) -> None:
    with pytest.raises(FeverError, match=f"RLlib has no algorithm {name}; .*{nearest}"):
        old(name)


@pytest.mark.parametrize("name", [None, "", 5, True, ["PPO"], {"grid_search": ["PPO", "APPO"]}])
def test_what_is_run_is_one_algorithm(name: Any) -> None:
    with pytest.raises(FeverError, match=r"a.yaml: run=.* cannot be used: it is the name of one algorithm, such as"):
        translate({"one": {"env": "CartPole-v1", "run": name}}, "a.yaml")


def test_experiments_are_chosen() -> None:
    values = load_yaml(FOLDER / "two-experiments.yaml")
    with pytest.raises(FeverError, match=r"frozenlake-appo, cartpole-impala; choose one with -f two.yaml:NAME"):
        translate(values, "two.yaml")
    assert translate(values, "two.yaml", "cartpole-impala").values["algo"] == "rllib:IMPALA"
    with pytest.raises(FeverError, match="no experiment other; it has: frozenlake-appo"):
        translate(values, "two.yaml", "other")
    flat = {"env": "CartPole-v1", "run": "DQN", "config": {"lr": "1e-4"}}
    assert translate(flat, "flat.yaml").values["settings"] == {"lr": 0.0001}  # YAML reads 1e-4 as text


def test_environments_are_chosen() -> None:
    values = load_yaml(FOLDER / "atari-ppo.yaml")
    with pytest.raises(FeverError, match=r"QbertNoFrameskip-v4.*: fever train ENV -f atari.yaml"):
        translate(values, "atari.yaml")
    assert translate(values, "atari.yaml", env="CartPole-v1").values["env"] == "CartPole-v1"
    with pytest.raises(FeverError, match="names no environment"):
        translate({"run": "PPO", "config": {}}, "empty.yaml")
    assert translate({"run": "PPO", "config": {"env": "Acrobot-v1"}}, "inside.yaml").values["env"] == "Acrobot-v1"


def test_environments_have_their_current_ids() -> None:
    found = old("PPO", "PongNoFrameskip-v4", env_config={"full_action_space": True}).values
    assert (found["env"], found["env_kwargs"]) == (
        "ALE/Pong-v5", {"repeat_action_probability": 0.0, "full_action_space": True},
    )  # fmt: skip
    assert old("PPO", "some.module.Mine").values["env"] == "some.module:Mine"
    assert old("PPO", "mine:Name").values["env"] == "mine:Name"
    assert old("PPO", "ale_py:ALE/Pong-v5", env_config={"frameskip": 1}).values["env"] == "ALE/Pong-v5"


def test_nondeterministic_is_left_out() -> None:
    """An attribute of gym's registration, which some files gave as an argument; environments do not have it."""
    found = old("PPO", "ALE/Pong-v5", env_config={"nondeterministic": False, "frameskip": 1})
    assert "env_kwargs" not in found.values
    assert any(note.startswith("nondeterministic is left out") for note in found.notes)
    kept = old("PPO", "mine:Name", env_config={"nondeterministic": False}).values
    assert kept["env_kwargs"] == {"nondeterministic": False}


def test_image_settings_become_env_kwargs() -> None:
    found = example("atari-impala.yaml").values
    assert found["env_kwargs"] == {
        "full_action_space": False, "repeat_action_probability": 0.0, "img_height": 42, "img_width": 42,
    }  # fmt: skip
    assert "model_config" not in found["settings"]
    assert "not translated: model.dim" in old("PPO", model={"dim": 42}).notes[0]


def test_arguments_of_classes() -> None:
    assert old("PPO", "my.module.Mine", env_config={"size": 3}).values["env_kwargs"] == {"config": {"size": 3}}
    assert old("PPO", "my.module.Mine", env_config={"config": {"size": 3}}).values["env_kwargs"] == {
        "config": {"size": 3}
    }
    assert old("PPO", env_config={"size": 3}, horizon=7).values["env_kwargs"] == {"size": 3, "max_episode_steps": 7}


@pytest.mark.parametrize(
    ("rules", "expected"),
    [
        ({"env_runners/episode_return_mean": 5}, {"reward": 5, "window": 100}),
        ({"env_runners": {"episode_return_mean": 5}}, {"reward": 5, "window": 100}),
        ({"num_env_steps_sampled_lifetime": "1e6", "training_iteration": 3}, {"steps": 1_000_000, "iterations": 3}),
        ({"time_total_s": 60}, {"seconds": 60}),
    ],
)
def test_stop_rules(rules: dict[str, Any], expected: dict[str, Any]) -> None:
    assert old("PPO", beside={"stop": rules}).values["stop"] == expected


@pytest.mark.parametrize("rules", [{"evaluation/env_runners/episode_return_mean": 5}, {"evaluation": {"x": 5}}])
def test_stop_rules_of_evaluation_are_not_those_of_training(rules: dict[str, Any]) -> None:
    found = old("PPO", beside={"stop": {**rules, "training_iteration": 3}})
    assert found.values["stop"] == {"iterations": 3}
    assert any(note.startswith("not translated: stop.evaluation") for note in found.notes)
    name = "evaluation/env_runners/episode_return_mean"
    assert old("BC", beside={"stop": {name: 5}}).values["stop"] == {"reward": 5, "window": 100}  # it has no other


def test_settings_that_rllib_does_not_have_are_left_out_and_named() -> None:
    pytest.importorskip("torch")

    config = {"lr": 0.1, "prediction_horizon": 3, "unroll": {"grid_search": [1, 2]}, "zigzag": False, "lambda": 0.9}
    found = known_part(old("DQN", **config))
    assert (found.values["settings"], found.space) == ({"lr": 0.1}, {})
    assert found.notes[0] == "not translated: prediction_horizon, unroll, lambda_: rllib:DQN has no such setting"
    kept = old("PPO", gamma={"grid_search": [0.9, 0.99]}, observation_filter="NoFilter")
    assert known_part(kept) == kept
    with pytest.raises(FeverError, match=r"RLlib has no algorithm Nothing; it has: .*rllib:PPO"):
        known_part(old("Nothing", lr=0.1))


def test_dropped_settings_are_named() -> None:
    config = {
        "model": {"custom_model": "mine", "zero_mean": True, "use_attention": False},
        "multiagent": {"policies": {"a": None, "b": None}, "policies_to_train": ["a"], "policy_mapping_fn": "eval"},
        "exploration_config": {"type": "Curiosity", "eta": 1.0},
        "lr": 0.5, "lr_schedule": [[0, 0.1], [9, 0.0]], "eager_tracing": True, "soft_horizon": False,
    }  # fmt: skip
    found = old("PPO", beside={"stop": {"episodes_total": 9}, "scheduler": "pbt"}, **config)
    assert found.values["settings"] == {
        "lr": [[0, 0.1], [9, 0.0]], "policies": ["a", "b"], "policies_to_train": ["a"],
    }  # fmt: skip
    lost = [note for note in found.notes if note.startswith("not translated")]
    for name in (
        "model.custom_model", "model.zero_mean", "multiagent.policy_mapping_fn", "Curiosity", "lr: lr_schedule",
        "eager_tracing", "stop.episodes_total", "scheduler",
    ):  # fmt: skip
        assert any(name in note for note in lost), name
    assert not any("soft_horizon" in note or "use_attention" in note for note in found.notes)  # they were off


def test_several_gpus_are_learners() -> None:
    settings = example("halfcheetah-ppo.yaml").values["settings"]
    assert (settings["num_learners"], settings["num_gpus_per_learner"]) == (4, 1)
    assert (settings["train_batch_size_per_learner"], settings["minibatch_size"]) == (65536 // 4, 4096 // 4)
    assert "without a GPU, one learner learns from the batches of all" in example("halfcheetah-ppo.yaml").notes
    assert "without a GPU, num_gpus_per_learner is ignored" in example("atari-impala.yaml").notes


def test_buffers() -> None:
    given = {"type": "MultiAgentReplayBuffer", "capacity": 9, "prioritized_replay_alpha": 0.5, "learning_starts": 7}
    settings = old("DQN", replay_buffer_config=given).values["settings"]
    assert settings["replay_buffer_config"] == {"type": "EpisodeReplayBuffer", "capacity": 9}
    assert settings["num_steps_sampled_before_learning_starts"] == 7
    assert old("DQN", exploration_fraction=0.5, schedule_max_timesteps=100).values["settings"] == {
        "epsilon": [[0, 1.0], [50, 0.02]]
    }


def test_models_that_differ() -> None:
    models = {"Q_model": {"fcnet_hiddens": [8]}, "policy_model": {"fcnet_hiddens": [4]}, "lr": 1.0}
    found = old("SAC", **models)
    assert found.values["settings"] == {"model_config": {"fcnet_hiddens": [8]}}
    assert "not translated: policy_model.fcnet_hiddens: Q_model.fcnet_hiddens sets the same setting" in found.notes
    assert "not translated: lr: it has actor_lr, critic_lr and alpha_lr" in found.notes


@pytest.mark.filterwarnings("ignore")
def test_rllib_takes_offline_files() -> None:
    config = {"input": "/data", "optimization": {"actor_learning_rate": "1e-4"}, "lr": 0.1, "bc_iters": 5}
    settings = old("CQL", "Pendulum-v1", **config).values["settings"]
    assert settings == {
        "input_": "/data", "actor_lr": 0.0001, "bc_iters": 5, "lr": None, "dataset_num_iters_per_learner": 1,
    }  # fmt: skip
    rllib_config("rllib:CQL").update_from_dict({**settings, "evaluation_interval": 1}).validate()


def test_former_inputs() -> None:
    folder = {"paths": "/data/episodes", "format": "json"}
    read = {"input_read_method": "read_json", "input_read_sample_batches": True}
    assert old("BC", input="dataset", input_config=folder).values["settings"] == {
        "input_": "/data/episodes", "dataset_num_iters_per_learner": 1, **read,
    }  # fmt: skip
    assert "input_read_method" not in old("BC", input="dataset", input_config={"paths": "/data"}).values["settings"]
    assert read.items() <= old("BC", input=["/data/a.json"]).values["settings"].items()
    assert old("PPO", input="sampler").values["settings"] == {}
    with pytest.raises(FeverError, match="input: dataset needs its path: input_config"):
        old("BC", input="dataset", input_config={"format": "json"})


def test_searches() -> None:
    found = example("cartpole-grid-search.yaml")
    assert found.space == {
        "num_epochs": "choice(1,4)",
        "minibatch_size": "choice(128,256,512)",
        "model_config.fcnet_hiddens": "choice([64, 64],[256, 256])",
    }
    assert found.trials == 2
    assert found.values["settings"]["num_epochs"] == 1
    assert "fever tune -f cartpole-grid-search.yaml searches them" in found.notes[0]
    assert found.grid
    ranges = old("PPO", lr="tune.loguniform(1e-4, 1e-2)", gamma={"eval": "tune.choice([0.9, 0.99])"})
    assert ranges.space == {"lr": "loguniform(0.0001,0.01)", "gamma": "choice(0.9,0.99)"}
    assert "not searched: num_workers" in old("PPO", num_workers={"grid_search": [1, 2]}).notes[0]
    assert old("PPO", gamma={"grid_search": [0.9]}).space == {}
    with pytest.raises(FeverError, match="is Python, which fever does not run"):
        old("PPO", lr={"eval": "lambda spec: 1"})


def test_mixed_searches_are_no_grid() -> None:
    listed = {"grid_search": [1, 2]}
    assert old("PPO", num_sgd_iter="tune.grid_search([1, 2])", num_workers=listed).grid
    assert not old("PPO", num_sgd_iter=listed, gamma="tune.choice([0.9, 0.99])").grid
    assert not old("PPO", num_sgd_iter=listed, lr="tune.uniform(0.1, 0.2)").grid
    assert not old("PPO", gamma={"grid_search": [0.9]}).grid  # nothing to search
    assert not old("PPO").grid


def test_searches_can_be_read() -> None:
    space = pytest.importorskip("fever.tune.space")
    for text in (*example("cartpole-grid-search.yaml").space.items(), ("x", 'choice("a b",c,null,true)')):
        space.parse_dimension(*text)


@pytest.mark.parametrize(
    ("algorithm", "beside", "sentence"),
    [
        ("PPO", {"stop": {"timesteps_total": None}}, "stop.timesteps_total must be a number, not None"),
        ("PPO", {"stop": {"training_iteration": "many"}}, "stop.training_iteration must be a number, not 'many'"),
        ("PPO", {"stop": {"a": {"episode_reward_mean": True}}}, "stop.a.episode_reward_mean must be a number"),
        ("PPO", {"stop": {"timesteps_total": float("inf")}}, "cannot convert float infinity to integer"),
        ("PPO", {"stop": 5}, "stop must be a mapping of names to values, not 5"),
        ("PPO", {"config": ["lr"]}, "config must be a mapping of names to values, not ['lr']"),
        ("PPO", {"config": "lr"}, "config must be a mapping of names to values, not 'lr'"),
        ("PPO", {"num_samples": "x"}, "num_samples must be a number, not 'x'"),
        ("PPO", {"env": {"grid_search": 3}}, ""),
        ("PPO", {3: 4}, ""),
    ],
)
def test_experiments_that_cannot_be_read(algorithm: str, beside: dict[str, Any], sentence: str) -> None:
    with pytest.raises(FeverError, match=f"^old.yaml cannot be understood: {re.escape(sentence)}"):
        old(algorithm, beside=beside)


BAD_SETTINGS = [
    ("PPO", {"env_config": ["a"]}, "env_config must be a mapping of names to values, not ['a']"),
    ("PPO", {"env_config": 3}, "env_config must be a mapping of names to values, not 3"),
    ("PPO", {"env_config": {"grid_search": [{}, 3]}}, "env_config must be a mapping of names to values, not 3"),
    ("PPO", {"lr": {"grid_search": []}}, "lr: grid_search must have a list of values, not []"),
    ("PPO", {"lr": {"grid_search": 3}}, "lr: grid_search must have a list of values, not 3"),
    ("PPO", {"lr": "tune.choice(3)"}, "tune.choice must have a list of values, not 3"),
    ("PPO", {"multiagent": {"policies": None}}, "multiagent.policies must be a mapping or a list of names, not None"),
    ("PPO", {"multiagent": {"policies": {"a": 3}}}, ""),
    ("PPO", {"train_batch_size": "auto"}, "train_batch_size must be a number, not 'auto'"),
    ("PPO", {"num_learners": "all"}, "num_learners must be a number, not 'all'"),
    ("PPO", {"replay_buffer_config": 3, "buffer_size": 4}, ""),
    ("DQN", {"exploration_config": {"epsilon_timesteps": "x"}}, "exploration_config.epsilon_timesteps must be"),
    ("DQN", {"exploration_fraction": "x"}, "exploration_fraction must be a number, not 'x'"),
    ("DQN", {"schedule_max_timesteps": None}, "schedule_max_timesteps must be a number, not None"),
    ("APEX", {"hiddens": 256}, "hiddens must be a list, not 256"),
    ("APEX", {"model": {"fcnet_hiddens": None}}, "model.fcnet_hiddens must be a list, not None"),
    ("APEX", {"model": {"conv_filters": [[16, 8]]}}, "model.conv_filters must have lists of filters, kernel"),
    ("APEX", {"model": {"conv_filters": [16, 8]}}, "model.conv_filters must have lists of filters, kernel and stride"),
    ("APEX", {"model": {"conv_filters": 16}}, "model.conv_filters must be a list, not 16"),
    ("APEX", {"target_network_update_freq": "x"}, "target_network_update_freq must be a number, not 'x'"),
    ("APEX", {"target_network_update_freq": 9, "train_batch_size": "auto"}, "train_batch_size must be a number"),
    ("APEX", {"target_network_update_freq": 9, "train_batch_size": 0}, ""),
]


@pytest.mark.parametrize(("algorithm", "config", "sentence"), BAD_SETTINGS)
def test_settings_that_cannot_be_read(algorithm: str, config: dict[str, Any], sentence: str) -> None:
    with pytest.raises(FeverError, match=f"^old.yaml cannot be understood: {re.escape(sentence)}"):
        old(algorithm, **config)
    with pytest.raises(FeverError, match=f"^--config cannot be understood: {re.escape(sentence)}"):
        translate_options({"run": algorithm, "env": "CartPole-v1", "config": json.dumps(config)})


def test_numbers_may_be_texts() -> None:
    found = old("PPO", beside={"stop": {"training_iteration": "12"}, "num_samples": "3"}, train_batch_size="4000")
    assert (found.values["stop"], found.trials) == ({"iterations": 12}, 3)
    assert found.values["settings"] == {"train_batch_size_per_learner": 4000}
    assert "convolutions" not in old("APEX", model={"conv_filters": None}).values["settings"]  # RLlib's former default


@pytest.mark.parametrize(
    ("algorithm", "config", "envs"),
    [("PPO", {}, 6), ("PPO", {"num_workers": 4}, 12), ("PPO", {"num_workers": 0}, 3), ("DQN", {}, 3)],
)
def test_environments_are_counted_for_all_workers(algorithm: str, config: dict[str, Any], envs: int) -> None:
    """Of a file that does not say how many workers, those are RLlib's default."""
    found = old(algorithm, "CartPole-v1", num_envs_per_worker=3, **config)
    assert found.values["envs"] == envs
    assert "num_envs_per_env_runner" not in found.values["settings"]
