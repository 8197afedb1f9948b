"""`fever watch`: which episodes are filmed, the files of several checkpoints, environments that cannot be drawn."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import fever
from fever.envs.source import EnvSource
from fever.errors import FeverError
from fever.runs.evaluate import evaluate, source_of
from fever.runs.film import rate_of, record
from fever.runs.run import Run
from fever.training.callbacks import Callback, TrainingInfo
from tests.environments import PictureEnv
from tests.helpers import run_fever, wait_for
from tests.runs.test_video import read

SMALL = {"envs": 2, "steps": 16, "minibatch": 32, "epochs": 1}


class SaveAlways(Callback):
    def on_iteration(self, info: TrainingInfo) -> None:
        info.request_checkpoint()


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run of three iterations on `PictureEnv`, each with its checkpoint."""
    runs = tmp_path_factory.mktemp("pictures") / "runs"
    env = "tests.environments:PictureEnv"
    more = {"callbacks": [SaveAlways()], **SMALL}
    return fever.train(env, runs=runs, name="a", stop={"iterations": 3}, **more).run  # type: ignore[arg-type]


def test_the_episodes_are_those_that_eval_plays(pictures: Run, tmp_path: Path) -> None:
    checkpoint, source = pictures.checkpoint("last"), source_of(pictures)
    done: list[int] = []
    rows = record(checkpoint, source, tmp_path / "a.mp4", 100, episodes=3, tell=done.append)
    assert rows == evaluate(checkpoint, source, 3).rows()
    frames, rate = read(tmp_path / "a.mp4")
    assert (frames.shape, rate) == ((39, 40, 60, 3), 10)  # a frame after every reset and step
    assert [round(float(frame.mean()), -1) for frame in frames] == [10.0 * step for step in range(13)] * 3
    assert done == [1, 2, 3]


def test_an_endless_episode_is_cut(pictures: Run, tmp_path: Path) -> None:
    source = EnvSource(PictureEnv, {"length": 1_000_000})
    rows = record(pictures.checkpoint("last"), source, tmp_path / "a.gif", 7, episodes=2)
    assert [(row["length"], row["end"]) for row in rows] == [(7, "max_steps")] * 2


@pytest.mark.parametrize(
    ("target", "kwargs", "sentence"),
    [
        ("PictureEnv", {"draws": "none"}, "cannot be filmed: its render() returned nothing; a picture is an array"),
        ("PictureEnv", {"draws": "list"}, "cannot be filmed: its render() returned a list"),
        ("PictureEnv", {"draws": "flat"}, "cannot be filmed: its render() returned an array of shape (7200,)"),
        ("PictureEnv", {"draws": "ansi"}, "cannot be filmed: it has no render mode rgb_array (it has ansi)"),
        ("PictureEnv", {"draws": "raise", "bad_from": 5}, "cannot be drawn: RuntimeError: the renderer is gone"),
        ("UndrawnEnv", {}, "cannot be drawn: it has no method render"),
        ("SameStepCounters", {}, "cannot be filmed: it is natively vectorised"),
    ],
)
def test_what_cannot_be_drawn_is_one_sentence(
    target: str, kwargs: dict[str, Any], sentence: str, pictures: Run, tmp_path: Path
) -> None:
    name = f"tests.environments:{target}"
    with pytest.raises(FeverError) as error:
        record(pictures.checkpoint("last"), EnvSource(name, kwargs), tmp_path / "a.gif", 100)
    assert str(error.value).startswith(f"{name} {sentence}")
    assert [*tmp_path.iterdir()] == []


def test_frames_of_several_sizes_make_one_video(pictures: Run, tmp_path: Path) -> None:
    source = EnvSource(PictureEnv, {"draws": "wider", "bad_from": 3})
    record(pictures.checkpoint("last"), source, tmp_path / "a.mp4", 100)
    assert read(tmp_path / "a.mp4")[0].shape == (13, 40, 60, 3)


@pytest.mark.parametrize(
    ("metadata", "rate"),
    [
        ({"render_fps": 12.5}, 12.5),
        ({}, 30),
        ({"render_fps": None}, 30),
        ({"render_fps": 0}, 30),
        ({"render_fps": float("nan")}, 30),
        ({"render_fps": "fast"}, 30),
        ({"render_fps": 1e9}, 240),
        (None, 30),
    ],
)
def test_the_rate_is_the_environments(metadata: Any, rate: float) -> None:
    env = PictureEnv()
    env.metadata = metadata
    assert rate_of(env) == rate


def test_several_checkpoints_make_a_video_each(pictures: Run) -> None:
    folder = pictures.path.parent.parent
    numbers = [checkpoint.iteration for checkpoint in pictures.checkpoints()]
    assert len(numbers) > 1
    words = f"last,{numbers[0]},{numbers[-1]}"
    done = run_fever("watch", "a", "--checkpoint", words, "--out", "x.gif", "--episodes", "2", cwd=folder)
    assert done.returncode == 0, done.stderr
    first, last = (f"{number:08}" for number in (numbers[0], numbers[-1]))
    lines = done.stdout.splitlines()
    assert lines[0].startswith("x-last.gif: 2 episodes, return mean ")
    assert lines[0].endswith(f" (checkpoint {last})")
    assert lines[3].startswith(f"x-{numbers[0]}.gif: 2 episodes, ")
    assert lines[3].endswith(f" (checkpoint {first})")
    assert [line.split()[0] for line in (lines[1], lines[2], lines[4], lines[5])] == ["0", "1", "0", "1"]
    assert lines[1].split()[1:3] == [
        "seed",
        str(evaluate(pictures.checkpoint("last"), source_of(pictures), 1).seeds[0]),
    ]
    assert f"fever: the {numbers[-1]} checkpoint is the same as last: {last}\n" in done.stderr
    assert sorted(path.name for path in folder.glob("*.gif")) == sorted(["x-last.gif", f"x-{numbers[0]}.gif"])


@pytest.mark.parametrize("word", ["last,", "last,../x", "last,best,first", "last,99"])
def test_a_checkpoint_that_does_not_exist_is_one_sentence(word: str, pictures: Run) -> None:
    folder = pictures.path.parent.parent
    done = run_fever("watch", "a", "--checkpoint", word, "--out", "y.gif", cwd=folder)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith("fever: ")
    assert "Traceback" not in done.stderr
    assert not [*folder.glob("y*")]  # not even the first one


def test_the_video_is_in_the_run_by_default(pictures: Run) -> None:
    path, total = fever.watch(pictures, episodes=2, checkpoint="last")
    assert path.parent == pictures.path / "videos"
    assert path.stem == pictures.checkpoint("last").name
    assert total == pytest.approx(evaluate(pictures.checkpoint("last"), source_of(pictures), 2).returns.mean())
    with pytest.raises(FeverError, match="episodes=0 cannot be used"):
        fever.watch(pictures, episodes=0)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_leaves_no_half_file(number: signal.Signals, pictures: Run, tmp_path: Path) -> None:
    words = ["watch", str(pictures.path), "--out", str(tmp_path / "a.mp4"), "--steps", "10000000"]
    command = [sys.executable, "-m", "fever", *words, "--env-kwargs", '{"length": 100000000}']
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    try:
        wait_for(lambda: [path for path in tmp_path.iterdir() if path.stat().st_size], "file", 60)
        process.send_signal(number)
        _, said = process.communicate(timeout=60)
    finally:
        process.kill()
    assert (process.returncode, said.strip()) == (130, "fever: interrupted")
    assert [*tmp_path.iterdir()] == []
