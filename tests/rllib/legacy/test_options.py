"""Options of the removed `rllib train`, and hints what to write instead."""

from __future__ import annotations

import json

import pytest

from fever.algos.registry import ALGORITHMS
from fever.errors import FeverError
from fever.rllib.legacy.options import translate_options
from fever.rllib.legacy.reader import rename


def test_options_that_cannot_be_read() -> None:
    for rules in ({"timesteps_total": None}, {"training_iteration": "many"}):
        with pytest.raises(FeverError, match=r"^the command line cannot be understood: stop.\w+ must be a number"):
            translate_options({"stop": json.dumps(rules)})
    with pytest.raises(FeverError, match="--stop must be a JSON object, not 5"):
        translate_options({"stop": "5"})
    with pytest.raises(FeverError, match=r"^a setting of rllib:DQN cannot be understood: exploration_config"):
        rename({"exploration_config": {"epsilon_timesteps": "x"}}, "rllib:DQN")


def test_options_become_fields_with_hints() -> None:
    values, hints = translate_options(
        {"run": "DQN", "name_env": "CartPole-v1", "num_cpus": 2, "num_gpus": 0.5, "checkpoint_freq": None}
    )
    assert values == {"algo": "dqn", "env": "CartPole-v1", "workers": 2}
    assert hints == [
        "--run DQN: taken as --algo dqn, fever's own; RLlib's is --algo rllib:DQN",
        "--name-env CartPole-v1: the environment is the first argument: fever train CartPole-v1",
        "--num-cpus 2: taken as --workers 2",
        "--num-gpus 0.5: the learner uses a GPU if there is one; --on slurm asks for as many: --gpus",
    ]
    assert translate_options({"run": "MARWIL"})[0] == {"algo": "rllib:MARWIL"}
    assert all(translate_options({"run": name.upper()})[0] == {"algo": name} for name in ALGORITHMS)
    with pytest.raises(FeverError, match=r"--run: RLlib has no algorithm A3C"):
        translate_options({"run": "A3C"})


def test_options_that_take_json() -> None:
    words = {
        "run": "PPO", "env": "PongNoFrameskip-v4", "num_workers": 4, "local_dir": "out",
        "config": '{"num_sgd_iter": 3, "env_config": {"frameskip": 2}}',
        "stop": '{"episode_reward_mean": 9, "time_total_s": 60}',
    }  # fmt: skip
    values, hints = translate_options(words)
    assert values == {
        "algo": "rllib:PPO",
        "env": "ALE/Pong-v5",
        "env_kwargs": {"repeat_action_probability": 0.0, "frameskip": 2},
        "workers": 4,
        "runs": "out",
        "settings": {"num_epochs": 3},
        "stop": {"reward": 9, "seconds": 60, "window": 100},
    }
    assert "--stop: taken as --stop-reward 9 --stop-time 60 --stop-window 100" in hints
    assert len(hints) == len(set(hints))
    assert "env" not in translate_options({"run": "PPO", "config": {"lr": 0.1}})[0]
    with pytest.raises(FeverError, match="--config has settings of an RLlib algorithm; name it"):
        translate_options({"config": {}})
    with pytest.raises(FeverError, match="--stop is not JSON"):
        translate_options({"stop": "{"})
