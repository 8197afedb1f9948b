"""From settings to RLlib's configuration: names, kinds of values, policies, connectors."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")

from fever.algos.batch import check_sizes
from fever.config import RunConfig
from fever.errors import DamagedError, FeverError
from fever.rllib.adapter import rllib_config, with_envs
from fever.rllib.catalogue import names
from fever.rllib.environment import Spaces
from fever.rllib.play import Player
from fever.rllib.settings import check_settings, default_config, describe, fill, split_settings
from fever.runs.checkpoint import Checkpoint
from tests.rllib.parts import TwoAgents

pytestmark = pytest.mark.filterwarnings("ignore")  # RLlib warns often; a run writes it to its log


def test_own_networks_and_connectors_get_raw_observations() -> None:
    spaces = Spaces("", "", [], image=False, flattened=[None])
    own = {"env_to_module_connector": "tests.rllib.parts:TwoAgents"}
    for settings, flattened in (({}, True), (own, False), ({"rl_module_spec": None}, False)):
        config = fill(default_config("rllib:PPO"), settings, "rllib:PPO", spaces)
        connector = config._env_to_module_connector
        assert (connector is not None and connector is not TwoAgents) is flattened
    with pytest.raises(FeverError, match="add it to your env_to_module_connector"):
        fill(default_config("rllib:PPO"), {**own, "observation_filter": "MeanStdFilter"}, "rllib:PPO", spaces)


def test_an_lstm_has_sequences_of_rllibs_default_length() -> None:
    """RLlib wants to be told, and fails in the middle of its first iteration."""

    def model(**settings: Any) -> Any:
        return fill(default_config("rllib:PPO"), {"model_config": settings}, "rllib:PPO").model_config

    assert model(use_lstm=True)["max_seq_len"] == 20
    assert model(use_lstm=True, max_seq_len=7)["max_seq_len"] == 7
    assert "max_seq_len" not in model(fcnet_hiddens=[8])


def test_what_rllib_refuses_is_found_before_a_job_waits() -> None:
    """Neither the environment nor the machines are known then."""

    def check(algo: str = "rllib:PPO", workers: Any = "all", **settings: Any) -> None:
        check_sizes(RunConfig(env="no_such:Env", algo=algo, workers=workers, settings=settings))

    with pytest.raises(FeverError, match=r"RLlib refuses .*minibatch_size. \(128\) must be <= "):
        check(train_batch_size=100, sgd_minibatch_size=128)
    with pytest.raises(FeverError, match=r"RLlib refuses .*rollout_fragment_length"):
        check(workers=3, rollout_fragment_length=300, train_batch_size=500)
    check(rollout_fragment_length=300, train_batch_size=900)  # fits three workers
    check(policies="separate", policies_to_train=["left"])
    offline = {"dataset_num_iters_per_learner": 1}
    needs = {
        **dict.fromkeys(("rllib:BC", "rllib:MARWIL", "rllib:IQL"), offline),
        "rllib:CQL": {**offline, "replay_buffer_config": {"type": "EpisodeReplayBuffer"}},
    }
    for algo in names():
        check(algo, **needs.get(algo, {}))


def test_policies_are_mapped_to_agents() -> None:
    spaces = Spaces({}, {}, ["left", "right"], image=False, flattened=[])

    def mapping(**settings: Any) -> Any:
        return fill(default_config("rllib:PPO"), settings, "rllib:PPO", spaces).policy_mapping_fn

    assert mapping(policies=["right", "left"])("left", None) == "left"
    assert mapping(policies=["a", "b"], policy_mapping_fn="tests.rllib.parts:TwoAgents") is TwoAgents
    for policies in (["a", "b"], {"a": None}, ["left"]):
        with pytest.raises(FeverError, match=r"are not named like the agents \(left, right\); .* policy_mapping_fn="):
            mapping(policies=policies)
    check_settings("rllib:PPO", {"policies": ["a", "b"]})  # only checked: the agents are not known


@pytest.mark.parametrize(
    ("algo", "settings", "sentence"),
    [
        ("rllib:PPO", {"learning_rate": 1e-3}, "rllib:PPO has no setting learning_rate; did you mean"),
        ("rllib:PPO", {"lr": "fast"}, "lr='fast' cannot be used: it takes a number; the default is 5e-05"),
        ("rllib:PPO", {"use_gae": 3}, "it takes true or false; the default is True"),
        ("rllib:PP0", {}, "RLlib has no algorithm PP0; did you mean rllib:PPO"),
        ("rllib:APEX", {}, "RLlib has no algorithm APEX"),
        ("rllib:nowhere.algos:Mine", {}, "there is no module nowhere"),
        ("rllib:PPO", {"observation_filter": "Mean"}, "choose one of MeanStdFilter, NoFilter"),
        ("rllib:PPO", {"policies": "many"}, "choose shared, separate, or a list of names"),
        (
            "rllib:PPO",
            {"model_config": {"fcnet_hidens": [3]}},
            "no setting fcnet_hidens; did you mean fcnet_hiddens",
        ),
        *(
            ("rllib:PPO", {"model_config": {"fcnet_hiddens": widths}}, "it takes a list of whole numbers")
            for widths in (64, None, ["a"], [64.0])
        ),
        ("rllib:PPO", {"num_workers": "many"}, "cannot be used"),
    ],
)
def test_mistakes_are_named(algo: str, settings: dict[str, Any], sentence: str) -> None:
    with pytest.raises(FeverError, match=sentence):
        check_settings(algo, settings)


def test_settings_become_fields_of_the_run() -> None:
    settings = {"num_workers": 3, "num_sgd_iter": 4, "lr": "3e-4"}
    found, notes = split_settings(RunConfig(env="CartPole-v1", algo="rllib:PPO", settings=settings))
    assert (found.workers, found.settings) == (3, {"num_epochs": 4, "lr": 3e-4})
    assert "num_sgd_iter is num_epochs" in " ".join(notes)
    with pytest.raises(FeverError, match="num_env_runners=3 contradicts workers=2"):
        split_settings(RunConfig(env="CartPole-v1", algo="rllib:PPO", settings=settings, workers=2))


def test_algorithms_and_settings_are_looked_up() -> None:
    assert {"rllib:PPO", "rllib:SAC", "rllib:DreamerV3", "rllib:TQC"} <= set(names())
    assert len(names()) == len(set(names()))
    rows = {name: (default, meaning) for name, default, meaning, _ in describe("rllib:SAC")}
    assert rows["tau"][0] == "0.005"
    assert "target" in rows["tau"][1]
    assert "train_batch_size_per_learner" in rows
    assert "env" not in rows


def test_a_mapping_that_rllib_would_call_is_refused() -> None:
    with pytest.raises(FeverError, match=r"policy_mapping_fn must be a name"):
        check_settings("rllib:PPO", {"policy_mapping_fn": {"type": "os.getcwd"}})


@pytest.mark.parametrize(
    "facts", [{}, {"connectors": 3}, {"connectors": []}, {"connectors": {"array": "x"}}, {"connectors": {"dict": [1]}}]
)
def test_connectors_that_fever_has_not_written_are_damage(
    facts: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = {"iteration": 1, "score": None, "steps": 3, "algorithm": facts}
    monkeypatch.setattr(Checkpoint, "arrays", lambda self: {})
    player: Any = SimpleNamespace(runner=SimpleNamespace(set_state=lambda state: None))
    with pytest.raises(DamagedError, match="is damaged: it cannot be played with"):
        Player._load(player, Checkpoint(Path("a/checkpoints/00000001"), manifest))


def test_env_runners_share_the_environments() -> None:
    """RLlib's own setting is for each of them, and is multiplied once their number is known."""
    each: dict[str, Any] = {"num_envs_per_env_runner": 3}
    config = RunConfig(env="CartPole-v1", algo="rllib:PPO", settings=each)
    assert split_settings(config)[0].settings == each
    found = split_settings(config.model_copy(update={"workers": 4}))[0]
    assert (found.envs, found.settings) == (12, {})
    assert split_settings(config.model_copy(update={"workers": 4, "envs": 12}))[0].envs == 12
    with pytest.raises(FeverError, match="num_envs_per_env_runner=3 contradicts envs=8"):
        split_settings(config.model_copy(update={"workers": 4, "envs": 8}))
    for workers, envs, share in ((0, 5, 5), (2, 5, 3), (8, 5, 1), (2, None, 1)):
        config = RunConfig(env="CartPole-v1", algo="rllib:PPO", workers=workers, envs=envs)
        spaces = Spaces("", "", [], image=False, flattened=[])
        assert rllib_config(with_envs(config) if envs else config, spaces, "none").num_envs_per_env_runner == share
    assert with_envs(RunConfig(env="CartPole-v1", algo="rllib:PPO", workers=2)).envs == 2
