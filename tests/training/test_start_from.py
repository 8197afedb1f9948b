"""Runs that begin with the weights of another run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fever
from fever import layout
from fever.config import RunConfig
from fever.errors import DamagedError, FeverError
from fever.files import sealed
from fever.job import JOB, START, JobFolder
from fever.policy.spaces import Description, difference
from fever.runs.run import Run
from fever.training.start_from import pack_start, resolve
from fever.training.trainer import Trainer

SMALL: dict[str, Any] = {"hidden": [8], "batch": 16, "updates": 2, "warmup": 20, "report_steps": 40}
ON_POLICY: dict[str, Any] = {"hidden": [8], "steps": 16}
BOX: Description = {"type": "box", "shape": [3], "dtype": "float32", "low": [0], "high": [1]}


def train(runs: Path, algo: str, name: str, env: str = "CartPole-v1", iterations: int = 2, **more: Any) -> Run:
    settings = SMALL if algo in ("dqn", "sac") else ON_POLICY
    stop = {"iterations": iterations}
    return fever.train(env, algo, envs=2, name=name, runs=runs, stop=stop, **{**settings, **more}).run


def begin(runs: Path, algo: str, start_from: str, env: str = "CartPole-v1", **settings: Any) -> Any:
    """A learner that has the weights, before the first step."""
    own = {**(SMALL if algo in ("dqn", "sac") else ON_POLICY), **settings}
    return Trainer(RunConfig(env=env, algo=algo, runs=str(runs), start_from=start_from, settings=own)).learner


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return one.keys() == other.keys() and all(np.array_equal(one[name], other[name]) for name in one)


def test_weights_and_statistics_come_along_and_nothing_else(tmp_path: Path) -> None:
    run = train(tmp_path, "ppo", "first")
    learner = begin(tmp_path, "ppo", "first")
    kept = run.checkpoint()
    assert same(learner.weights(), kept.arrays("policy/"))
    assert "observation/mean" in learner.weights()
    assert learner.normalizer.returns.count == float(kept.arrays()["returns/count"]) > 0
    assert (learner.steps, kept.manifest["steps"] > 0) == (0, True)
    momentum = [leaf for name, leaf in learner.state().arrays.items() if name.startswith("optimizer") and leaf.ndim]
    assert momentum
    assert not any(leaf.any() for leaf in momentum)


def test_a_chain_of_two_is_recorded_and_not_repeated_when_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = train(tmp_path, "ppo", "first")
    second = train(tmp_path, "ppo", "second", start_from="first:best")
    assert second.config.start_from == f"{first.path.resolve()}:2"
    assert [row["iteration"] for row in second.metrics()] == [1, 2]
    assert second.metrics()[0]["steps"] <= 32  # counted from 0: one batch of two environments
    third = train(tmp_path, "ppo", "third", start_from=str(second.path), learning_rate=1e-9, iterations=1)
    before, after = second.checkpoint().arrays("policy/"), third.checkpoint().arrays("policy/")
    np.testing.assert_allclose(after["policy/w"], before["policy/w"], atol=1e-6)
    assert third.config.start_from == f"{second.path.resolve()}:2"
    monkeypatch.setattr("fever.training.start_from.take_weights", lambda *words: pytest.fail("taken again"))
    config = second.config
    longer = config.model_copy(update={"stop": config.stop.model_copy(update={"iterations": 3})})
    resumed = Trainer(longer, run=second, checkpoint=second.checkpoint())
    assert resumed.run().summary["iterations"] == 3


def test_off_policy_runs_take_all_networks(tmp_path: Path) -> None:
    run = train(tmp_path, "sac", "first", "Pendulum-v1")
    learner, kept = begin(tmp_path, "sac", "first", "Pendulum-v1"), run.checkpoint().arrays()
    for name in ("critics", "target", "temperature"):
        np.testing.assert_array_equal(learner.learned[name], kept[f"learned/{name}"])
    assert not np.array_equal(learner.learned["critics"], learner.learned["target"])
    assert same(learner.weights(), run.checkpoint().arrays("policy/"))
    assert (learner.steps, learner.updates) == (0, 0)
    assert not any(np.any(leaf) for name, leaf in learner.state().arrays.items() if "optimizers" in name)
    fixed = begin(tmp_path, "sac", "first", "Pendulum-v1", temperature=0.5)  # what the user has set stays
    np.testing.assert_allclose(fixed.learned["temperature"], np.log(0.5), rtol=1e-6)


def test_another_algorithm_takes_what_fits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = train(tmp_path, "ppo", "first", normalize_observations=False)
    learner = begin(tmp_path, "dqn", "first", activation="tanh", dueling=False)
    here, there = learner.weights(), run.checkpoint().arrays("policy/")
    np.testing.assert_array_equal(here["policy0/w"], there["policy0/w"])
    assert (here["policy/w"] != there["policy/w"]).any()  # logits are no action values
    np.testing.assert_array_equal(learner.learned["target"], learner.learned["online"])
    train(tmp_path, "dqn", "second", activation="tanh", dueling=False)
    back = fever.train(
        "CartPole-v1", "trpo", start_from="second", runs=tmp_path, stop={"iterations": 1}, envs=2, progress=True,
        normalize_observations=False, **ON_POLICY,
    )  # fmt: skip
    assert back.run.config.algo == "trpo"
    assert "policy0; drawn anew: policy, value0, value" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("env", "algo", "settings", "sentence"),
    [
        (
            "Acrobot-v1",
            "ppo",
            {},
            r"Acrobot-v1, which has another observation space: its shape is \[4\] there and \[6\] here",
        ),
        ("CartPole-v1", "ppo", {"hidden": [8, 8]}, r"its network has hidden=\[8\] and this run's \[8, 8\]"),
        ("CartPole-v1", "ppo", {"recurrent": "gru"}, r'its network has recurrent="none" and this run\'s "gru"'),
        ("CartPole-v1", "ppo", {"normalize_observations": False}, "its policy normalises observations and this run's"),
        ("CartPole-v1", "dqn", {"activation": "tanh"}, "its policy normalises observations and this run's does not"),
    ],
)
def test_what_does_not_fit_is_refused(
    tmp_path: Path, env: str, algo: str, settings: dict[str, Any], sentence: str
) -> None:
    train(tmp_path, "ppo", "first", iterations=1)
    with pytest.raises(FeverError, match=sentence):
        begin(tmp_path, algo, "first", env, **settings)
    assert [path.name for path in tmp_path.iterdir()] == ["first"]


def test_names_of_runs_and_libraries_are_checked(tmp_path: Path) -> None:
    train(tmp_path, "ppo", "first", iterations=1)
    for start_from, algo, sentence in (
        ("first", "rllib:PPO", "rllib:PPO cannot begin with the weights of another run"),
        ("second", "ppo", "there is no run second; the latest in .* are: first"),
        ("first:7", "ppo", "has no checkpoint 7; it has: 1, last, best"),
    ):
        with pytest.raises(FeverError, match=sentence):
            resolve(RunConfig(env="CartPole-v1", algo=algo, runs=str(tmp_path), start_from=start_from))


@pytest.mark.parametrize("network", [None, [1]])
def test_a_manifest_of_a_stranger_without_a_network_is_refused(network: Any, tmp_path: Path) -> None:
    kept = train(tmp_path, "ppo", "first", iterations=1).checkpoint()
    policy = {**kept.manifest["policy"], "network": network}
    (kept.path / layout.MANIFEST).write_text(sealed({**kept.manifest, "policy": policy}))
    with pytest.raises(DamagedError, match="has no network that can be used"):
        begin(tmp_path, "ppo", "first")


def test_spaces_are_compared_part_by_part() -> None:
    two = {"type": "dict", "spaces": {"a": BOX, "b": {**BOX, "shape": [2]}}}
    other = {"type": "dict", "spaces": {"a": BOX, "b": {**BOX, "shape": [5]}}}
    assert difference(two, two) == ""
    assert difference(two, other) == "in part 'b', its shape is [2] there and [5] here"
    assert difference(two, {"type": "dict", "spaces": {"a": BOX}}) == "part 'b' is only there"
    assert (
        difference({"type": "tuple", "spaces": [BOX]}, {"type": "tuple", "spaces": [BOX, BOX]}) == "part 1 is only here"
    )
    assert difference(BOX, two) == "it is box there and dict here"
    wide = {**BOX, "high": [2]}
    assert (difference(BOX, wide), difference(BOX, wide, bounds=False)) == ("its bounds differ", "")
    masked = {"type": "masked", "observation": BOX, "sizes": [3], "key": None}
    assert difference(masked, {**masked, "observation": two}) == "it is box there and dict here"
    assert difference(masked, {**masked, "sizes": [4]}) == "its sizes is [3] there and [4] here"


def test_a_job_on_another_machine_uses_the_copy_that_was_sent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = train(tmp_path, "ppo", "first", iterations=1)
    weights = run.checkpoint().arrays("policy/")
    config = resolve(RunConfig(env="CartPole-v1", runs=str(tmp_path), start_from="first", settings=ON_POLICY))
    folder = JobFolder(tmp_path / "sent" / "job")
    pack_start(config, folder)
    assert json.loads((folder.path / START / layout.MANIFEST).read_text())["iteration"] == 1
    run.path.rename(tmp_path / "elsewhere")  # as on another machine
    with pytest.raises(FeverError, match="there is no run"):
        Trainer(config)
    monkeypatch.setenv(JOB, str(folder.path))
    trainer = Trainer(config)
    assert same(trainer.learner.weights(), weights)
    assert trainer.config.start_from == config.start_from
