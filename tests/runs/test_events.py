"""TensorBoard's files, read back with TensorBoard's own classes: metrics, and settings for its plugin HParams."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

import fever
from fever.config import RunConfig
from fever.runs.disk import Disk
from fever.runs.events import EventWriter, settings_of
from fever.runs.groups import experiment_of
from fever.training.callbacks import Callback, TrainingInfo
from fever.training.result import Result


def test_tensorboard_reads_the_events(result: Result) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(result.run.path))
    events.Reload()
    rows = result.run.metrics()
    scalars = events.Scalars("return_mean")
    assert [point.step for point in scalars] == [row["steps"] for row in rows]
    assert scalars[-1].value == pytest.approx(rows[-1]["return_mean"])
    assert set(events.Tags()["scalars"]) == {*rows[-1]} - {"steps"}


def read(folder: Path) -> Any:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    return events


def records(folder: Path) -> tuple[Any, Any]:
    """What the run was when it began, and how it ended, as TensorBoard understands it."""
    from tensorboard.plugins.hparams import metadata

    content = read(folder).PluginTagToContent(metadata.PLUGIN_NAME)
    assert set(content) == {metadata.SESSION_START_INFO_TAG, metadata.SESSION_END_INFO_TAG}
    start = metadata.parse_session_start_info_plugin_data(content[metadata.SESSION_START_INFO_TAG])
    return start, metadata.parse_session_end_info_plugin_data(content[metadata.SESSION_END_INFO_TAG])


def plain(value: Any) -> Any:
    return getattr(value, value.WhichOneof("kind"))


def test_tensorboard_reads_the_settings(result: Result) -> None:
    from tensorboard.plugins.hparams import api_pb2

    start, end = records(result.run.path)
    found = {name: plain(value) for name, value in start.hparams.items()}
    assert found == settings_of(result.run.config)
    assert found.items() >= {"env": "tests.environments:InfoEnv", "algo": "ppo", "envs": 2, "epochs": 2}.items()
    assert found["normalize_advantages"] is True
    assert not {"seed", "hidden"} & set(found)  # hidden is not set
    assert start.group_name == experiment_of(result.run.config)
    assert end.status == api_pb2.STATUS_SUCCESS
    assert 0 < end.end_time_secs - start.start_time_secs < 600


def test_settings_are_numbers_truth_values_and_texts() -> None:
    values = {"hidden": [64, 32], "clip": 0.2, "dueling": True, "name": None, "kwargs": {"a": [1]}, "x": 10**400}
    config = RunConfig(env="X-v0", env_kwargs={"size": 9, "where": None}, settings=values)
    found = settings_of(config)
    assert found == {
        "env": "X-v0", "algo": "ppo", "device": "auto", "env_kwargs.size": 9, "hidden": "64,32", "clip": 0.2,
        "dueling": True, "kwargs": '{"a": [1]}', "x": str(10**400),
    }  # fmt: skip


def test_a_run_that_fails_has_failed_for_tensorboard_too(tmp_path: Path) -> None:
    from tensorboard.plugins.hparams import api_pb2

    class Fails(Callback):
        def on_iteration(self, info: TrainingInfo) -> None:
            if info.iteration == 2:
                raise ValueError("no licence")

    more = {"envs": 2, "steps": 16, "minibatch": 32, "epochs": 1, "callbacks": [Fails()]}
    with pytest.raises(fever.errors.TrainingError):
        fever.train("CartPole-v1", runs=tmp_path, name="a", stop={"iterations": 3}, **more)
    assert records(tmp_path / "a")[1].status == api_pb2.STATUS_FAILURE


def test_numbers_that_are_too_large_are_infinite(tmp_path: Path) -> None:
    writer = EventWriter(tmp_path, Disk(tmp_path))
    writer.begin({"name\ud800": "\ud800", "long": "x" * 300}, "a")  # lengths of one byte, and of two
    writer.write(1, {"a": 1e300, "b": -(10**400), "c": math.nan})
    writer.close()
    events = read(tmp_path)
    assert [events.Scalars(name)[0].value for name in "ab"] == [math.inf, -math.inf]
    assert math.isnan(events.Scalars("c")[0].value)
