"""Settings by the names that RLlib has had: renamed, dropped with a reason, refused."""

from __future__ import annotations

from fever.rllib.legacy.reader import rename


def test_settings_of_the_command_line() -> None:
    given = {
        "num_sgd_iter": 10,
        "num_workers": 3,
        "model_config.fcnet_hiddens": [8],
        "model_config": {"use_lstm": True},
    }
    settings, notes = rename(given, "rllib:PPO")
    assert settings == {
        "num_epochs": 10, "num_env_runners": 3, "model_config": {"fcnet_hiddens": [8], "use_lstm": True},
    }  # fmt: skip
    assert notes == ["other names now: num_sgd_iter is num_epochs, num_workers is num_env_runners"]
    assert rename({"max_requests_in_flight_per_sampler_worker": 3}, "rllib:IMPALA")[0] == {
        "max_requests_in_flight_per_env_runner": 3
    }
    present = {
        "num_epochs": 2,
        "rollout_fragment_length": 100,
        "clip_param": 0.1,
        "replay_buffer_config": {"type": "X"},
    }
    assert rename(present, "rllib:APPO") == (present, [])


def test_own_settings_are_kept() -> None:
    given = {
        "horizon": 7, "num_sgd_iter": 3, "num_workers": 2, "exploration_config": {"type": "Mine", "eta": 1},
        "verbose": 1, "num_epochs": 4, "model": {"dim": 42},
    }  # fmt: skip
    own = frozenset({"horizon", "num_epochs", "exploration_config", "verbose", "model"})
    settings, notes = rename(given, "rllib:mine:Algorithm", own)
    assert settings == {
        "horizon": 7, "num_env_runners": 2, "exploration_config": {"type": "Mine", "eta": 1}, "verbose": 1,
        "num_epochs": 4, "model": {"dim": 42},
    }  # fmt: skip
    assert notes == [
        "not translated: num_sgd_iter: num_epochs sets the same setting",
        "other names now: num_workers is num_env_runners",
    ]
    assert rename({"lr": 0.1}, "rllib:CQL", frozenset({"lr"})) == ({"lr": 0.1}, [])
    buffer = {"replay_buffer_config": {"type": "ReplayBuffer", "alpha": 0.5}}
    assert rename({**buffer, "prioritized_replay": False}, "rllib:DQN", frozenset(buffer))[0] == buffer
