"""Callbacks that the command line or a configuration names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fever.config import RunConfig
from fever.errors import FeverError
from fever.runs.run import Run
from fever.training.callbacks import Callback, TrainingInfo
from fever.training.named import make_callbacks
from fever.tune import search
from tests.helpers import run_fever
from tests.tune.helpers import configure

HERE = "tests.training.test_named"
SMALL = ("tests.environments:TimeLimitEnv", "--envs", "2", "steps=16", "minibatch=32", "--runs", ".", "-q")


class Counts(Callback):
    """Adds a metric that counts from `start`."""

    def __init__(self, start: int = 0) -> None:
        self.count = start

    def on_iteration(self, info: TrainingInfo) -> dict[str, float]:
        self.count += 1
        return {"counts/count": self.count}


class Fails(Callback):
    def on_iteration(self, info: TrainingInfo) -> None:
        if info.iteration == 2:
            raise ValueError("boom")


class Refuses(Callback):
    def __init__(self) -> None:
        raise OSError("no disk")


def make_nothing() -> None:
    """A factory that makes no callback."""


def make_class() -> Any:
    return Counts


def make(*words: str) -> list[Any]:
    return make_callbacks(RunConfig(env="CartPole-v1", callbacks=words))


def test_classes_and_factories_are_called_with_their_arguments() -> None:
    first, second = make(f"{HERE}:Counts", f'{HERE}:Counts={{"start": 3}}')
    assert (first.count, second.count) == (0, 3)


@pytest.mark.parametrize(
    ("word", "why"),
    [
        ("Counts", "callback Counts: write it as module:Name"),
        ("nowhere:Counts", "callback nowhere:Counts: there is no module nowhere here"),
        (f"{HERE}:Count", "has no Count; did you mean Counts"),
        (f"{HERE}:HERE", "is neither a class nor a factory function"),
        (f"{HERE}:make_nothing", "gives a NoneType, which is no object of fever.training.callbacks.Callback"),
        (f"{HERE}:make_class", "gives the class Counts, which is no object of"),
        (f"{HERE}:Refuses", "cannot be made: OSError: no disk"),
        (f"{HERE}:Counts=3", "must be a JSON object"),
        (f"{HERE}:Counts={{", "are not JSON"),
        (f'{HERE}:Counts={{"begin": 3}}', "cannot be made: TypeError: .*'begin'"),
        (f'{HERE}:Counts={{"api_key": "abc"}}', "api_key looks secret"),
        (f'{HERE}:Counts={{"server": {{"token": "abc"}}}}', "token looks secret"),
    ],
)
def test_mistakes_are_one_sentence(word: str, why: str) -> None:
    with pytest.raises(FeverError, match=why) as found:
        make(word)
    assert "abc" not in str(found.value)


def test_names_without_arguments_are_sent_to_clusters() -> None:
    config = RunConfig(env="my_envs:Maze", callbacks=("a.b:C", 'd:E={"x": "y:z"}'))
    assert config.names() == ["my_envs:Maze", "a.b:C", "d:E"]


@pytest.mark.slow
def test_callbacks_on_the_command_line(tmp_path: Path) -> None:
    def fever(*words: str) -> Any:
        return run_fever(*words, cwd=tmp_path)

    callback = f'{HERE}:Counts={{"start": 5}}'
    done = fever("train", *SMALL, "--name", "a", "--stop-iterations", "2", "--callback", callback)
    assert done.returncode == 0, done.stderr
    run = Run(tmp_path / "a")
    assert run.config.callbacks == (callback,)
    assert [row["counts/count"] for row in run.metrics()] == [6, 7]

    done = fever("resume", "a", "--runs", ".", "--stop-iterations", "3", "-q")  # keeps the callbacks
    assert done.returncode == 0, done.stderr
    assert [row["counts/count"] for row in run.metrics()] == [6, 7, 6]

    done = fever("train", *SMALL, "--name", "b", "--callback", f"{HERE}:Refuses")
    assert (done.returncode, done.stderr) == (2, f"fever: callback {HERE}:Refuses cannot be made: OSError: no disk\n")
    assert not (tmp_path / "b").exists()

    done = fever("train", *SMALL, "--name", "c", "--callback", callback, "--callback", f"{HERE}:Fails")
    assert done.returncode == 1
    assert done.stderr.endswith(f"fever: the callback {HERE}:Fails failed in on_iteration: ValueError: boom\n")
    failed = Run(tmp_path / "c")
    assert failed.status == "failed"
    assert failed.checkpoint().iteration == len(failed.metrics()) == 2


def test_a_search_makes_no_directory_if_a_callback_cannot_be_made(tmp_path: Path) -> None:
    with pytest.raises(FeverError, match="Refuses cannot be made"):
        search(configure(tmp_path / "runs", callbacks=[f"{HERE}:Refuses"]))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.ray
def test_every_trial_of_a_search_has_the_callbacks(tmp_path: Path) -> None:
    config = configure(
        tmp_path, "tests.environments:TimeLimitEnv", trials=1, stop={"iterations": 2}, callbacks=[f"{HERE}:Counts"],
        space={"learning_rate": "uniform(1e-4,1e-3)"}, name="s", envs=2,
    )  # fmt: skip
    search(config)
    rows = [json.loads(line) for line in (tmp_path / "s/trials/0001/metrics.jsonl").read_text().splitlines()]
    assert [row["counts/count"] for row in rows] == [1, 2]
