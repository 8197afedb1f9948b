"""`--video-every`: when the policy is filmed, what stays, what filming must not change, and renderers that fail."""

from __future__ import annotations

import re
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fever
from fever.config import RunConfig
from fever.errors import FeverError
from fever.runs.groups import experiment_of
from fever.runs.run import Run
from fever.runs.video import VideoFile
from fever.training import videos
from fever.training.callbacks import Callback, TrainingInfo
from fever.training.trainer import train
from fever.training.videos import KEPT, prune
from tests.environments import PictureEnv
from tests.helpers import call_fever, run_fever, same_arrays
from tests.runs.test_video import read
from tests.training.test_trainer import Messages

SMALL = {"envs": 2, "steps": 16, "minibatch": 32, "epochs": 1}  # 32 steps an iteration
ENV = "tests.environments:PictureEnv"


def names(run: Run) -> list[str]:
    return sorted(path.name for path in (run.path / "videos").glob("*"))


def run_with(tmp_path: Path, display: Any, **kwargs: Any) -> Run:
    """Train for eight iterations, of which every second is filmed, with these arguments of the environment."""
    settings = {name: value for name, value in SMALL.items() if name != "envs"}
    config = RunConfig(
        env=ENV, env_kwargs=kwargs, envs=2, settings=settings, stop={"iterations": 8}, runs=str(tmp_path), name="a",
        video_every=64,
    )  # fmt: skip
    return train(config, display=display).run


def test_the_policy_is_filmed_every_so_many_steps(tmp_path: Path) -> None:
    result = fever.train(PictureEnv, runs=tmp_path, stop={"iterations": 5}, video_every="0.064k", **SMALL)
    assert names(result.run) == ["video-000000064.mp4", "video-000000128.mp4"]
    frames, rate = read(result.run.path / "videos/video-000000128.mp4")
    assert (frames.shape, rate) == ((13, 40, 60, 3), 10)
    log = (result.run.path / "log.txt").read_text()
    assert re.search(r"video-000000064\.mp4: return \S+, 12 steps", log)
    summary = result.summary
    spent = summary["breakdown"]["videos"]
    assert min(summary["breakdown"].values()) >= 0
    assert 0 < spent < summary["seconds"]
    assert summary["steps_per_second"] == pytest.approx(summary["steps"] / (summary["seconds"] - spent), rel=0.02)


@pytest.mark.parametrize(
    ("algo", "settings"),
    [("ppo", SMALL), ("dqn", {"envs": 2, "warmup": 20, "batch": 8, "updates": 2, "report_steps": 64})],
)
def test_filming_changes_no_weight(algo: str, settings: dict[str, Any], tmp_path: Path) -> None:
    found = []
    for every in (None, 1):
        more = {"hidden": (8,), "name": f"run-{every}", "video_every": every, **settings}
        run = fever.train(PictureEnv, algo, runs=tmp_path, stop={"steps": 400}, **more).run
        found.append(run.checkpoint("last").arrays())
        assert bool(names(run)) is (every is not None)
    assert same_arrays(*found)


def test_a_resumed_run_continues_the_count(tmp_path: Path) -> None:
    result = fever.train(PictureEnv, runs=tmp_path, stop={"iterations": 4}, video_every=64, **SMALL)
    for iterations, filmed in ((5, ["064", "128"]), (6, ["064", "128", "192"])):
        result = fever.resume(result, env=PictureEnv, stop={"iterations": iterations})
        assert names(result.run) == [f"video-000000{steps}.mp4" for steps in filmed]


def test_the_newest_videos_stay_and_the_first(tmp_path: Path) -> None:
    numbers = [*range(10, 10 * (KEPT + 4), 10), 9_000, 9_010]
    others = ["video-000000020.avi", "video-x.mp4", "00000010.mp4", ".other.mp4"]
    for name in [f"video-{number:09}.mp4" for number in numbers] + others + [".video-000000020.12ab.mp4"]:
        (tmp_path / name).touch()
    (tmp_path / "video-000000015.mp4").symlink_to("video-x.mp4")
    prune(tmp_path, steps=8_000)  # a resumed run repeats what was after its checkpoint
    left = {path.name for path in tmp_path.iterdir()}
    newest = numbers[:-2][-KEPT:]
    assert left == {f"video-{number:09}.mp4" for number in [10, *newest]} | {*others, "video-000000015.mp4"}


def test_without_a_writer_of_mp4_it_is_a_gif(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(videos, "can_write_mp4", lambda: False)
    result = fever.train(PictureEnv, runs=tmp_path, stop={"iterations": 2}, video_every=64, **SMALL)
    assert names(result.run) == ["video-000000064.gif"]


@pytest.mark.parametrize("draws", ["none", "ansi", "raise"])
def test_what_cannot_be_drawn_is_refused_before_training(draws: str, tmp_path: Path) -> None:
    words = ("--env-kwargs", f'{{"draws": "{draws}"}}', "--video-every", "1k", "--stop-steps", "2k")
    done = call_fever("train", ENV, *words, cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith(f"fever: --video-every: {ENV} cannot be ")
    assert done.stderr.count("\n") == 1
    assert [*tmp_path.iterdir()] == []


def test_a_renderer_that_fails_is_told_of_once(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(videos, "ATTEMPTS", 2)
    display = Messages()
    run = run_with(tmp_path, display, draws="raise", bad_from=4)
    said = [text for text in display.said if "video" in text]
    reason = f"{ENV} cannot be drawn: RuntimeError: the renderer is gone"
    assert len(said) == 1
    assert said[0].startswith(f"note: a video could not be made, and training goes on: {reason}")
    assert run.metrics()[-1]["iteration"] == 8
    assert (run.path / "log.txt").read_text().count("WARNING root: no video") == 2  # no third attempt
    assert not (run.path / "videos").exists()


def test_another_video_is_tried_after_a_failure(tmp_path: Path, monkeypatch: Any) -> None:
    made, finish = [], VideoFile.__exit__

    def fail(self: VideoFile, *error: Any) -> None:
        made.append(self.path.name)
        finish(self, *error)
        if len(made) in (1, 3):
            self.path.unlink()
            raise OSError("the disk has gone for a moment")

    monkeypatch.setattr(VideoFile, "__exit__", fail)
    monkeypatch.setattr(videos, "ATTEMPTS", 2)  # in a row
    run = run_with(tmp_path, Messages())
    assert made == [f"video-000000{steps}.mp4" for steps in ("064", "128", "192", "256")]
    assert names(run) == made[1::2]


def test_filming_has_a_limit_of_time_and_steps(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(videos, "STEPS", 5)
    run = run_with(tmp_path, Messages(), length=1_000_000)
    assert len(read(run.path / "videos/video-000000064.mp4")[0]) == 6
    monkeypatch.setattr(videos, "SECONDS", -1.0)
    run = run_with(tmp_path / "b", Messages(), length=1_000_000)
    assert len(read(run.path / "videos/video-000000064.mp4")[0]) == 1


def test_ctrl_c_ends_a_video_and_the_run_is_saved(tmp_path: Path) -> None:
    class Interrupting(PictureEnv):
        def render(self) -> Any:
            if self.passed == 5:
                signal.raise_signal(signal.SIGINT)
            return super().render()

    result = fever.train(Interrupting, runs=tmp_path, stop={"iterations": 9}, video_every=64, **SMALL)
    assert result.stop_reason == "interrupted"
    assert [row["iteration"] for row in result.run.metrics()] == [1, 2]  # no row is lost
    assert result.run.checkpoint("last").iteration == 2
    assert not (result.run.path / "videos").exists()
    assert "no video" not in (result.run.path / "log.txt").read_text()


def test_a_signal_that_waits_when_filming_begins_is_not_lost(tmp_path: Path) -> None:
    class Interrupting(Callback):  # called before the policy is filmed
        def on_iteration(self, info: TrainingInfo) -> None:
            if info.iteration == 2:
                signal.raise_signal(signal.SIGINT)

    more = {"callbacks": [Interrupting()], "video_every": 64, **SMALL}
    result = fever.train(PictureEnv, runs=tmp_path, stop={"iterations": 9}, **more)
    assert (result.stop_reason, result.run.metrics()[-1]["iteration"]) == ("interrupted", 2)


def test_a_step_that_hangs_fails_the_video_alone(tmp_path: Path) -> None:
    class Hanging(PictureEnv):
        def render(self) -> Any:
            while self.passed == 5:
                pass
            return super().render()

    more = {"step_timeout": 0.3, "video_every": 64, **SMALL}
    result = fever.train(Hanging, runs=tmp_path, stop={"iterations": 3}, **more)
    assert result.stop_reason == "iterations"
    assert "step() (environment 0 of worker 2) took longer than 0.3 s" in (result.run.path / "log.txt").read_text()


def test_the_video_shows_the_environment_of_the_moment(tmp_path: Path) -> None:
    class Longer(Callback):
        def on_iteration(self, info: TrainingInfo) -> None:
            if info.iteration == 3:
                info.set_env_kwargs(length=7)

    more = {"callbacks": [Longer()], "video_every": 64, **SMALL}
    run = fever.train(ENV, runs=tmp_path, stop={"iterations": 4}, **more).run
    lengths = [len(read(run.path / "videos" / name)[0]) for name in names(run)]
    assert lengths == [13, 8]


def test_rllib_is_refused_in_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(
        FeverError, match="--video-every: rllib:PPO is not filmed while it trains; film its checkpoints"
    ):
        fever.train("CartPole-v1", "rllib:PPO", runs=tmp_path, video_every=1000)
    assert [*tmp_path.iterdir()] == []


def test_a_run_with_videos_belongs_to_the_same_experiment() -> None:
    assert experiment_of(RunConfig(env="X-v0")) == experiment_of(RunConfig(env="X-v0", video_every=5, seed=3))


@pytest.mark.slow
def test_the_command_line_takes_it_for_train_and_resume(tmp_path: Path) -> None:
    words = ("--envs", "2", "steps=16", "minibatch=32", "epochs=1", "--stop-iterations", "2", "--name", "a", "-q")
    assert run_fever("train", ENV, *words, cwd=tmp_path).returncode == 0
    assert not (tmp_path / "runs/a/videos").exists()
    more = ("--video-every", "0.1k", "--stop-iterations", "4", "-q", "--trust")
    done = run_fever("resume", "a", *more, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert names(Run(tmp_path / "runs/a")) == ["video-000000128.mp4"]
    np.testing.assert_equal(Run(tmp_path / "runs/a").config.video_every, 100)
