"""Configurations from the options of `train` and `tune`: files of both kinds, options of RLlib, ranges."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fever.algos.ppo import PPOConfig
from fever.cli.options import configuration
from fever.config import RunConfig, validate
from fever.errors import FeverError
from fever.launch.schedulers.slurm import Slurm
from tests.helpers import ROOT

OLD_FILES = ROOT / "examples" / "rllib"


def read(command: str = "train", elsewhere: bool = False, **options: Any) -> RunConfig:
    return configuration(options, command, quiet=False, elsewhere=elsewhere)


def test_options_win_over_the_file(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("env: CartPole-v1\nworkers: 3\nsettings: {gamma: 0.9, steps: 8}\nstop: {steps: 10, seconds: 5}\n")
    config = read(file=str(file), workers="2", settings=["gamma=0.8", "iterations=4"], stop_steps=20)
    assert (config.workers, config.settings) == (2, {"gamma": 0.8, "steps": 8})
    assert (config.stop.steps, config.stop.seconds, config.stop.iterations) == (20, 5, 4)
    assert read(file=str(file), env="gamma=0.7").settings["gamma"] == 0.7  # the first word is a setting


def test_words_of_tutorials_are_understood_with_a_hint(capsys: pytest.CaptureFixture[str]) -> None:
    config = read(env="CartPole-v1", num_cpus=2, num_gpus=0.5, run="DQN", name_env="CartPole-v1")
    assert (config.env, config.algo, config.workers, config.device) == ("CartPole-v1", "dqn", 2, "auto")
    hints = capsys.readouterr().err.splitlines()
    assert "fever: --run DQN: taken as --algo dqn, fever's own; RLlib's is --algo rllib:DQN" in hints
    assert "fever: --num-cpus 2: taken as --workers 2" in hints
    assert len(hints) == 4
    assert read(old_env="CartPole-v1", run="CQL").algo == "rllib:CQL"


@pytest.mark.parametrize("words", [{"env": "Pong-ram-v4"}, {"name_env": "Pong-ram-v4"}])
def test_old_ids_are_understood_with_a_hint(words: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    config = read(**words, env_kwargs='{"frameskip": 2}')
    assert config.env == "ALE/Pong-v5"
    assert config.env_kwargs == {"repeat_action_probability": 0.0, "obs_type": "ram", "frameskip": 2}
    assert "fever: Pong-ram-v4 is ALE/Pong-v5 now, without sticky actions" in capsys.readouterr().err


def test_an_algorithm_that_rllib_no_longer_has_is_refused() -> None:
    """Before anything is asked of RLlib, which may be installed only where the run will be."""
    with pytest.raises(FeverError, match="--algo rllib:A3C: RLlib has no algorithm A3C; the closest is a2c"):
        read(env="CartPole-v1", algo="rllib:A3C", elsewhere=True)


def test_old_files_take_an_environment_and_an_experiment(capsys: pytest.CaptureFixture[str]) -> None:
    config = read(env="QbertNoFrameskip-v4", file=str(OLD_FILES / "atari-ppo.yaml"))
    assert (config.env, config.algo) == ("ALE/Qbert-v5", "rllib:PPO")
    assert "QbertNoFrameskip-v4 is ALE/Qbert-v5 now" in capsys.readouterr().err
    config = read(file=f"{OLD_FILES / 'two-experiments.yaml'}:cartpole-impala", workers="1")
    assert (config.algo, config.workers) == ("rllib:IMPALA", 1)
    with pytest.raises(FeverError, match="choose one with -f"):
        read(file=str(OLD_FILES / "two-experiments.yaml"))


def test_a_search_is_made_of_ranges_and_options() -> None:
    config = read("tune", env="CartPole-v1", settings=["gamma=uniform(0.9,1)", "steps=8"], trials=5, method="grid")
    assert config.search is not None
    assert (config.search.space, config.search.trials, config.search.method) == (
        {"gamma": "uniform(0.9,1)"}, 5, "grid",
    )  # fmt: skip
    assert config.settings == {"steps": 8}
    with pytest.raises(FeverError, match="is a range of values, which only a search takes: fever tune"):
        read(env="CartPole-v1", settings=["gamma=uniform(0.9,1)"])
    with pytest.raises(FeverError, match="say what to search"):
        read("tune", env="CartPole-v1")


def test_what_an_old_file_had_as_a_grid_is_searched() -> None:
    config = read("tune", file=str(OLD_FILES / "cartpole-grid-search.yaml"))
    assert config.search is not None
    assert (config.search.method, config.search.seeds) == ("grid", 2)  # num_samples: 2
    assert all(text.startswith("choice(") for text in config.search.space.values())
    assert read(file=str(OLD_FILES / "cartpole-grid-search.yaml")).search is None


def test_an_old_file_says_how_many_trials_only_if_it_does(tmp_path: Path) -> None:
    file = tmp_path / "old.yaml"
    file.write_text("x: {env: CartPole-v1, run: PPO, config: {}}\n")
    config = read("tune", file=str(file), settings=["lr=loguniform(1e-5,1e-2)"])
    assert config.search is not None
    assert (config.search.trials, config.search.seeds) == (20, 1)
    file.write_text("x: {env: CartPole-v1, run: PPO, num_samples: 3, config: {}}\n")
    config = read("tune", file=str(file), settings=["lr=loguniform(1e-5,1e-2)"])
    assert config.search is not None
    assert (config.search.trials, config.search.seeds) == (3, 1)
    file.write_text("x: {env: CartPole-v1, run: PPO, config: {lr: {grid_search: [0.1, 0.2]}}}\n")
    config = read("tune", file=str(file))
    assert config.search is not None
    assert (config.search.method, config.search.seeds) == ("grid", 1)


def test_what_rllib_does_not_have_is_left_out_of_files_only(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("torch")
    file = tmp_path / "old.yaml"
    file.write_text("x: {env: CartPole-v1, run: PPO, config: {lr: 0.1, unheard_of: 3}}\n")
    assert read(file=str(file)).settings == {"lr": 0.1}
    assert "not translated: unheard_of: rllib:PPO has no such setting" in capsys.readouterr().err
    assert "unheard_of" in read(file=str(file), settings=["unheard_of=3"]).settings  # and is refused later


def test_all_workers_are_for_runs_elsewhere_but_not_for_searches() -> None:
    assert read(env="CartPole-v1", elsewhere=True).workers == "all"
    assert read(env="CartPole-v1", elsewhere=True, workers="1").workers == 1
    for name in ("num_env_runners", "num_workers", "num_rollout_workers"):
        assert read(env="CartPole-v1", algo="rllib:PPO", settings=[f"{name}=2"], elsewhere=True).workers is None
    assert read("tune", env="CartPole-v1", settings=["gamma=uniform(0.9,1)"], elsewhere=True).workers is None


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({}, "name an environment to train on, for example: fever train CartPole-v1"),
        ({"env": "CartPole-v1", "workers": "many"}, "--workers many: must be a whole number, auto, all or ranks"),
        ({"env": "CartPole-v1", "env_kwargs": "[1]"}, r"--env-kwargs \[1\]: must be a JSON object"),
        ({"file": "nowhere.yaml"}, "nowhere.yaml cannot be read"),
        ({"run": "A3C", "env": "CartPole-v1"}, "RLlib has no algorithm A3C; the closest is"),
    ],
)
def test_mistakes_are_one_sentence(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(FeverError, match=sentence):
        read(**options)


@pytest.mark.parametrize("command", ["train", "tune"])
@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("stop: 100", "run.yaml: stop=100 cannot be used: must be a mapping"),
        ("settings: [a]", r"run.yaml: settings=\['a'\] cannot be used: must be a mapping"),
        ("search: optuna", "run.yaml: search='optuna' cannot be used"),
        ("search: {space: 3}", "search.* ?space=3 cannot be used"),
        ("space: {gamma: 'uniform(0.9,1)'}", "run.yaml has no setting space; .*search"),
        ("interval: 3", "run.yaml has no setting interval; "),
        (
            "search: {space: {gamma: 'uniform(0.9,1)'}, trial: 3}",
            "run.yaml has no setting search.trial; did you mean trials. It has: trials, parallel, space, method, sch",
        ),
    ],
)
def test_mistakes_in_a_file_are_one_sentence(command: str, text: str, sentence: str, tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(f"env: CartPole-v1\n{text}\n")
    with pytest.raises(FeverError, match=sentence):
        read(command, file=str(tmp_path / "run.yaml"))


@pytest.mark.parametrize(
    ("model", "values", "sentence"),
    [
        (PPOConfig, {"interval": 3}, "x has no setting interval; it has: "),
        (PPOConfig, {"int": 3}, "x has no setting int; "),
        (Slurm, {"interfaces": "ib0"}, "x has no setting interfaces; did you mean interface"),
        (Slurm, {"interface": [1]}, r"x: interface=\[1\] cannot be used: "),
        (RunConfig, {"env": "a", "workers": -1}, "x: workers=-1 cannot be used: "),
        (RunConfig, {"env": "a", "workers": "some"}, "x: workers='some' cannot be used: "),
        (RunConfig, {"env": "a", "stop": {"integer": 1}}, "x has no setting stop.integer; it has: iterations"),
    ],
)
def test_names_in_a_sentence_are_the_users(model: Any, values: dict[str, Any], sentence: str) -> None:
    with pytest.raises(FeverError, match=f"^{sentence}"):
        validate(model, values, "x")
