"""`import fever`: every function of the Python interface, as a script or notebook calls it."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest

import fever
from fever import api
from fever.config import Search
from fever.errors import FeverError
from fever.runs.run import Run
from fever.training.callbacks import Callback
from fever.training.result import Result
from tests.environments import TimeLimitEnv
from tests.helpers import ROOT, run_fever

SMALL = {"envs": 2, "steps": 16, "minibatch": 32, "epochs": 2}


def local_factory() -> Any:
    return lambda: TimeLimitEnv(limit=5)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def cartpole(folder: Path) -> Result:
    return fever.train("CartPole-v1", runs=folder, name="cartpole", stop={"iterations": 2}, **SMALL)


@pytest.fixture(scope="module")
def unnamed(folder: Path) -> Result:
    """A training of an environment that no name leads to."""
    return fever.train(local_factory(), runs=folder, name="unnamed", stop={"iterations": 2}, **SMALL)


def test_importing_fever_imports_no_library() -> None:
    code = "import sys, fever; fever.runs, fever.tune; print([name for name in sys.modules if name in %r])"
    heavy = ("numpy", "pydantic", "gymnasium", "jax", "ray", "matplotlib", "typer", "rich")
    done = subprocess.run([sys.executable, "-c", code % (heavy,)], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_every_function_is_offered_typed_and_documented() -> None:
    for name in set(fever.__all__) - {"__version__"}:
        assert callable(getattr(fever, name))
        assert name in dir(fever)
        function = getattr(api, name)
        assert len(function.__doc__) > 100
        hints = inspect.signature(function)
        assert hints.return_annotation is not inspect.Signature.empty
        assert all(one.annotation is not inspect.Parameter.empty for one in hints.parameters.values())
    with pytest.raises(AttributeError, match="no attribute 'trian'"):
        fever.trian  # noqa: B018


def test_resume_goes_on_and_drops_the_rule_that_is_met(cartpole: Result) -> None:
    shown: list[str] = []
    result = fever.resume(cartpole, stop={"steps": 200}, callbacks=[Notes(shown)])
    assert result.stop_reason == "steps"
    assert shown == ["3", "4", "5", "6", "7"]  # 32 steps in each; the run had 2 iterations
    assert result.run.path == cartpole.run.path
    with pytest.raises(FeverError, match=r"has met its stop rule \(steps\) already"):
        fever.resume(cartpole.run)
    with pytest.raises(FeverError, match=r"fever\.resume has no setting stop\.stepps; did you mean steps"):
        fever.resume(cartpole, stop={"stepps": 300})
    with pytest.raises(FeverError, match="stop=7 cannot be used: must be a mapping"):
        fever.resume(cartpole, stop=7)
    with pytest.raises(FeverError, match="workers='many' cannot be used: must be a whole number"):
        fever.resume(cartpole, workers="many")


class Notes(Callback):
    """A callback that notes iterations."""

    def __init__(self, shown: list[str]) -> None:
        self.shown = shown

    def on_iteration(self, info: Any) -> None:
        self.shown.append(str(info.metrics["iteration"]))


def test_evaluate_and_load_take_a_result_a_run_a_path_or_a_name(cartpole: Result, folder: Path) -> None:
    scores = [
        fever.evaluate(run, episodes=3, checkpoint="last").returns
        for run in (cartpole, cartpole.run, cartpole.run.path)
    ]
    scores.append(fever.evaluate("cartpole", runs=folder, episodes=3, checkpoint="last").returns)
    assert all(np.array_equal(scores[0], one) for one in scores)
    other = fever.evaluate(cartpole, episodes=3, checkpoint="last", stochastic=True, seed=3)
    assert not np.array_equal(scores[0], other.returns)
    assert fever.load(cartpole).act(np.zeros(4)) == fever.load("cartpole", runs=folder).act(np.zeros(4))
    for wrong in ({"episodes": 0}, {"episodes": 2.5}, {"seed": -1}):
        with pytest.raises(FeverError, match="must be a whole number"):
            fever.evaluate(cartpole, **wrong)
    with pytest.raises(FeverError, match="there is no run nowhere"):
        fever.evaluate("nowhere", runs=folder)


def test_the_environments_arguments_are_the_runs_unless_given(folder: Path) -> None:
    arguments = {"limit": 5}
    run = fever.train(TimeLimitEnv, env_kwargs=arguments, runs=folder, name="l", stop={"iterations": 1}, **SMALL).run
    assert fever.evaluate(run, episodes=2).lengths.tolist() == [5, 5]
    assert fever.evaluate(run, episodes=2, env=TimeLimitEnv).lengths.tolist() == [5, 5]
    assert fever.evaluate(run, episodes=2, env_kwargs={"limit": 3}).lengths.tolist() == [3, 3]
    assert fever.evaluate(run, episodes=2, env=lambda limit: TimeLimitEnv(limit + 2)).lengths.tolist() == [7, 7]


def test_an_unnamed_environment_is_passed_again(unnamed: Result) -> None:
    again = local_factory()
    assert fever.evaluate(unnamed, episodes=2, env=again).lengths.tolist() == [5, 5]
    assert fever.resume(unnamed, env=again, stop={"iterations": 3}).summary["length_mean"] == 5


@pytest.mark.parametrize("function", [fever.evaluate, fever.resume, fever.watch])
def test_without_it_one_sentence_says_so(unnamed: Result, function: Any) -> None:
    more = {"stop": {"iterations": 9}} if function is fever.resume else {}
    with pytest.raises(FeverError, match=r"local_factory.<locals>.<lambda> is known only to .* pass it again") as info:
        function(unnamed, **more)
    assert "\n" not in str(info.value)


@pytest.mark.parametrize("words", [("eval",), ("watch",), ("resume", "--stop-iterations", "9")])
def test_the_command_line_says_so_too(unnamed: Result, words: tuple[str, ...], tmp_path: Path) -> None:
    done = run_fever(words[0], str(unnamed.run.path), *words[1:], cwd=tmp_path)
    assert done.returncode == 2
    assert "fever.evaluate(run, env=...)" in done.stderr
    assert done.stderr.count("\n") == 1


SCRIPT = """
import fever
from tests.environments import TimeLimitEnv

class Mine(TimeLimitEnv):
    pass

result = fever.train(Mine, envs=2, steps=16, minibatch=32, stop={"iterations": 1}, name="mine")
assert result.run.config.env == "__main__:Mine"
assert len(fever.evaluate(result, episodes=2).returns) == 2
fever.resume(result, stop={"iterations": 2})
"""


def test_a_class_of_the_script_itself_is_found_there_and_only_there(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    variables = {"PYTHONPATH": str(ROOT), "PATH": "", "FEVER_HOME": os.environ["FEVER_HOME"]}
    subprocess.run([sys.executable, "script.py"], cwd=tmp_path, env=variables, check=True, timeout=120)
    done = run_fever("eval", "mine", cwd=tmp_path)
    assert done.returncode == 2
    assert "__main__:Mine is known only to" in done.stderr


@pytest.mark.parametrize(
    ("env", "sentence"),
    [
        (
            gym.make("MountainCar-v0"),
            r'exists already.*; pass the id "MountainCar-v0", a class, or .*lambda: gym\.make',
        ),
        (gym.make_vec("CartPole-v1", 2), 'exists already.*"CartPole-v1"'),
        (7, "env=7 makes no environments; pass the id"),
    ],
)
def test_an_environment_in_place_of_what_makes_one(env: Any, sentence: str, tmp_path: Path) -> None:
    with pytest.raises(FeverError, match=sentence):
        fever.train(env, runs=tmp_path / "runs")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"wokers": 2}, r"fever\.train has no argument wokers; did you mean workers\?"),
        ({"callback": []}, r"no argument callback; did you mean callbacks\?"),
        ({"total_timesteps": 9}, r'no argument total_timesteps; did you mean stop={"steps": \.\.\.}\?'),
        ({"num_envs": 9}, r"no argument num_envs; did you mean envs\?"),
        ({"learning_rat": 9}, r"ppo has no setting learning_rat; did you mean learning_rate\?"),
        ({"lr": 1e-3}, r"ppo has no setting lr; did you mean learning_rate\?"),
        ({"zzz": 1}, "ppo has no setting zzz"),
        ({"stop": {"step": 1}}, r"the run has no setting stop\.step; did you mean steps\?"),
        ({"workers": -1}, "workers=-1 cannot be used: must be 0 or more"),
    ],
)
def test_a_misspelt_argument_is_one_sentence(arguments: dict[str, Any], sentence: str, tmp_path: Path) -> None:
    with pytest.raises(FeverError, match=sentence):
        fever.train("CartPole-v1", runs=tmp_path / "runs", **arguments)
    assert list(tmp_path.iterdir()) == []


def test_runs_and_plot(cartpole: Result, unnamed: Result, folder: Path, tmp_path: Path) -> None:
    found = fever.runs(folder)
    assert {"cartpole", "unnamed"} <= {run.path.name for run in found}
    assert all(isinstance(run, Run) for run in found)
    assert repr(cartpole.run) in repr(found)
    assert fever.runs(tmp_path / "none") == []
    figure = fever.plot([cartpole, unnamed.run], to=tmp_path / "both.svg")
    assert {text.get_text() for text in figure.axes[0].get_legend().get_texts()} == {"cartpole", "unnamed"}
    assert (tmp_path / "both.svg").read_text().startswith("<?xml")
    assert fever.plot("cartpole", folder=folder)._repr_png_().startswith(b"\x89PNG")
    with pytest.raises(FeverError, match="at least one run"):
        fever.plot([])
    with pytest.raises(FeverError, match="a picture is written as"):
        fever.plot(cartpole, to=tmp_path / "x.nothing")


def test_watch_films_the_environment_that_is_passed(cartpole: Result, tmp_path: Path) -> None:
    path, total = fever.watch(cartpole, tmp_path / "one.gif", steps=3)
    assert path.stat().st_size > 1000
    assert total == 3


def test_training_in_two_threads(tmp_path: Path) -> None:
    def training(name: str) -> Result:
        return fever.train("CartPole-v1", runs=tmp_path, name=name, stop={"iterations": 2}, **SMALL)

    with ThreadPoolExecutor(2) as pool:
        assert [result.stop_reason for result in pool.map(training, "ab")] == ["iterations", "iterations"]


def test_defaults_of_a_search_are_those_of_its_configuration() -> None:
    parameters = inspect.signature(api.tune).parameters
    for name, field in Search.model_fields.items():
        if name != "space":
            assert parameters[name].default == field.default


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"space": "gamma"}, "space must be a mapping"),
        ({"space": {}}, "say what to search"),
        ({"space": {"gamma": 0.9}}, "0.9 cannot be searched: give a list of values"),
        ({"space": {"gama": [0.9]}}, "did you mean gamma"),
        ({"space": {"gamma": [0.9]}, "trails": 3}, r"fever\.tune has no argument trails; did you mean trials\?"),
        ({"space": {"gamma": [0.9]}, "method": "guess"}, "search.method='guess' cannot be used"),
    ],
)
def test_a_wrong_search_is_one_sentence(arguments: dict[str, Any], sentence: str, tmp_path: Path) -> None:
    with pytest.raises(FeverError, match=sentence):
        fever.tune("CartPole-v1", runs=tmp_path / "runs", **arguments)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.ray
def test_workers_of_a_training_in_a_thread(tmp_path: Path) -> None:
    def training() -> Result:
        return fever.train(local_factory(), workers=2, runs=tmp_path, stop={"iterations": 2}, **SMALL)

    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(training).result(120).summary["length_mean"] == 5
