"""Callbacks: when they are called, what they add, how they stop a run, and what happens when they fail."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

import fever
from fever.errors import FeverError, TrainingError
from fever.runs.run import Run
from fever.training.callbacks import Callback, TrainingInfo

SMALL = {"envs": 2, "steps": 16, "minibatch": 32, "epochs": 2}


class Recorder(Callback):
    """Keeps what it was called with."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def on_start(self, info: TrainingInfo) -> None:
        self.calls.append(("start", info.iteration, info.steps, info.run.path.name, info.config.workers))

    def on_episode(self, info: TrainingInfo, episode: dict[str, Any]) -> None:
        self.calls.append(("episode", episode["episode"]))

    def on_iteration(self, info: TrainingInfo) -> None:
        self.calls.append(("iteration", info.iteration, info.steps))

    def on_checkpoint(self, info: TrainingInfo, path: Path) -> None:
        self.calls.append(("checkpoint", path.name))

    def on_stop(self, info: TrainingInfo) -> None:
        self.calls.append(("stop", info.summary["stop_reason"] if info.summary else None))


def train(folder: Path, *callbacks: Callback, env: Any = "tests.environments:InfoEnv", **stop: Any) -> Any:
    rules = stop or {"iterations": 3}
    return fever.train(env, runs=folder, name="a", stop=rules, callbacks=callbacks, **SMALL)


def test_callbacks_are_called_during_training(tmp_path: Path) -> None:
    recorder = Recorder()
    result = train(tmp_path, recorder)
    calls = recorder.calls
    assert calls[0] == ("start", 0, 0, "a", 0)
    assert [call for call in calls if call[0] == "iteration"] == [("iteration", n, 32 * n) for n in (1, 2, 3)]
    episodes = [number for kind, number in (call[:2] for call in calls) if kind == "episode"]
    assert episodes == list(range(1, result.summary["episodes"] + 1))
    assert calls.index(("episode", 1)) < calls.index(("iteration", 1, 32))
    assert calls[-2:] == [("checkpoint", "00000003"), ("stop", "iterations")]


def test_metrics_of_a_callback_are_in_the_row_and_in_tensorboard(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    class Adds(Callback):
        def on_iteration(self, info: TrainingInfo) -> dict[str, float]:
            return {"mine/doubled": 2 * info.metrics["return_mean"]}

    class Reads(Callback):
        def on_iteration(self, info: TrainingInfo) -> None:
            assert info.metrics["mine/doubled"] == 10

    result = train(tmp_path, Adds(), Reads())
    assert [row["mine/doubled"] for row in result.run.metrics()] == [10, 10, 10]
    events = EventAccumulator(str(result.run.path))
    events.Reload()
    assert [point.value for point in events.Scalars("mine/doubled")] == [10, 10, 10]


def test_a_callback_asks_for_a_checkpoint_and_for_the_end(tmp_path: Path) -> None:
    class Asks(Recorder):
        def on_iteration(self, info: TrainingInfo) -> None:
            if info.iteration == 2:
                info.request_checkpoint()

        def on_checkpoint(self, info: TrainingInfo, path: Path) -> None:
            super().on_checkpoint(info, path)
            assert info.run.checkpoint().path == path
            if info.iteration > 1:  # the first iteration is saved without being asked
                info.request_stop("plateau")

    asks = Asks()
    result = train(tmp_path, asks, iterations=5)
    assert result.stop_reason == Run.open("a", tmp_path).status == "plateau"
    assert result.summary["iterations"] == 2
    assert ("checkpoint", "00000002") in asks.calls


def test_a_stop_rule_goes_before_a_request(tmp_path: Path) -> None:
    class Stops(Callback):
        def on_iteration(self, info: TrainingInfo) -> None:
            info.request_stop()

    assert train(tmp_path / "one", Stops(), iterations=1).stop_reason == "iterations"
    assert train(tmp_path / "two", Stops(), iterations=2).stop_reason == "callback"


@pytest.mark.parametrize("hook", ["on_episode", "on_iteration", "on_checkpoint"])
def test_a_callback_that_fails_is_named_and_the_run_is_saved(tmp_path: Path, hook: str) -> None:
    def fail(*_: Any) -> None:
        raise ZeroDivisionError("by zero")

    fails = type("Fails", (Callback,), {hook: fail})()
    recorder = Recorder()
    with pytest.raises(TrainingError, match=rf"^the callback .*:Fails failed in {hook}: ZeroDivisionError: by zero$"):
        train(tmp_path, recorder, fails)
    run = Run.open("a", tmp_path)
    assert run.status == "failed"
    assert run.checkpoint().iteration == len(run.metrics()) > 0
    assert recorder.calls[-1] == ("stop", "failed")


def test_a_callback_that_calls_sys_exit_has_failed(tmp_path: Path) -> None:
    class Leaves(Callback):
        def on_iteration(self, info: TrainingInfo) -> None:
            sys.exit(0)

        def on_stop(self, info: TrainingInfo) -> None:
            raise GeneratorExit

    with pytest.raises(TrainingError, match=r"Leaves failed in on_iteration: SystemExit: 0$"):
        train(tmp_path, Leaves())
    assert Run.open("a", tmp_path).status == "failed"


def test_an_algorithm_that_calls_sys_exit_has_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fever.training.progress.Progress.count", lambda *arguments: sys.exit(0))
    with pytest.raises(TrainingError, match=r"^SystemExit: 0 \(.*test_callbacks\.py:\d+\)$"):
        train(tmp_path)


def test_failing_at_the_start_leaves_nothing_and_at_the_stop_everything(tmp_path: Path) -> None:
    class FailsAtStart(Callback):
        def on_start(self, info: TrainingInfo) -> None:
            raise OSError("no such server")

    class FailsAtStop(Callback):
        def on_stop(self, info: TrainingInfo) -> None:
            raise OSError("no such server")

    recorder = Recorder()
    with pytest.raises(TrainingError, match="FailsAtStart failed in on_start: OSError: no such server"):
        train(tmp_path / "runs", FailsAtStart(), recorder)
    assert list(tmp_path.iterdir()) == []
    assert recorder.calls[-1] == ("stop", None)
    with pytest.raises(TrainingError, match="FailsAtStop failed in on_stop"):
        train(tmp_path, FailsAtStop(), recorder)
    assert Run.open("a", tmp_path).status == "iterations"
    assert recorder.calls[-1] == ("stop", "iterations"), "the others are told as well"


@pytest.mark.parametrize(
    ("returned", "message"),
    [({"return_mean": 1.0}, "the metric return_mean, which the row has already"), ({"x": "y"}, "x='y' as a metric")],
)
def test_metrics_that_cannot_be_used_are_refused(tmp_path: Path, returned: dict[str, Any], message: str) -> None:
    class Returns(Callback):
        def on_iteration(self, info: TrainingInfo) -> Any:
            return returned

    with pytest.raises(TrainingError, match=rf"Returns returned .*{message}"):
        train(tmp_path, Returns())


def test_means_of_what_environments_report_are_metrics(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run = train(tmp_path).run
    own = {name: value for name, value in run.metrics()[-1].items() if name.startswith("info/")}
    assert own == {"info/score": 50.0, "info/success": 1.0, "info/speed": 0.5, "info/distance": 2.5}
    events = EventAccumulator(str(run.path))
    events.Reload()
    assert set(own) < set(events.Tags()["scalars"])
    assert json.loads((run.path / "episodes.jsonl").read_text().splitlines()[0])["info"]["score"] == 50.0


@pytest.mark.parametrize("callbacks", [[lambda info: None], [Callback], "module:Name", Callback()])
def test_what_is_no_list_of_callbacks_is_one_sentence(callbacks: Any, tmp_path: Path) -> None:
    with pytest.raises(FeverError, match="callbacks"):
        fever.train("CartPole-v1", callbacks=callbacks, runs=tmp_path / "runs")
    assert not (tmp_path / "runs").exists()
