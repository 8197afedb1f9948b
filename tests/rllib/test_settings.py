"""From settings to RLlib's configuration: names, kinds of values, policies, connectors."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torch")

from fever.config import RunConfig
from fever.errors import FeverError
from fever.rllib.catalogue import names
from fever.rllib.environment import Spaces
from fever.rllib.settings import check_settings, default_config, describe, fill, split_settings
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
