"""Atari: what ALE's environments give through `make_envs`, with the real games."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gymnasium.vector import VectorEnv

from fever.envs.contract import Step
from fever.envs.loop import LoopEnvs
from fever.envs.make import make_envs
from fever.envs.native import NativeEnvs
from fever.envs.source import EnvContext, EnvSource, make_env
from fever.errors import FeverError
from tests.helpers import run_fever

HERE = EnvContext()
TINY = ["--stop-iterations", "1", "--envs", "2", "steps=16", "minibatch=32", "epochs=1", "-q", "--json"]


def made(game: str = "Pong", count: int = 2, **kwargs: Any) -> Any:
    return make_envs(EnvSource(f"ALE/{game}-v5", kwargs), count, HERE)


def play(envs: Any, steps: int, seed: int = 1) -> tuple[np.ndarray, list[Step]]:
    """Reset, then take random steps."""
    first = envs.reset([seed + index for index in range(envs.count)])
    rng = np.random.default_rng(seed)
    choices = envs.action["sizes"][0]
    return first, [envs.step(rng.integers(0, choices, envs.count)) for _ in range(steps)]


# What an observation is.


@pytest.mark.parametrize(
    ("kwargs", "kind", "shape", "stack"),
    [
        ({}, NativeEnvs, (84, 84, 4), 4),
        ({"stack_num": 2, "img_height": 60, "img_width": 50}, NativeEnvs, (60, 50, 2), 2),
        ({"grayscale": False}, NativeEnvs, (84, 84, 12), 1),
        ({"obs_type": "ram"}, LoopEnvs, (128,), 1),
        ({"obs_type": "rgb"}, LoopEnvs, (210, 160, 3), 1),
        ({"obs_type": "grayscale"}, LoopEnvs, (210, 160, 1), 1),
    ],
    ids=str,
)
def test_observations_have_the_shape_asked_for(kwargs: dict, kind: type, shape: tuple, stack: int) -> None:
    envs = made(**kwargs)
    first, (step,) = play(envs, 1)
    assert type(envs) is kind
    assert (first.shape, first.dtype, envs.stack) == ((2, *shape), np.uint8, stack)
    assert (step.observations.shape, step.observations.dtype) == (first.shape, np.uint8)
    assert envs.action["sizes"] == [6]  # the minimal set
    envs.close()


def test_the_frames_of_an_observation_move_on_by_one_and_the_newest_is_last() -> None:
    first, steps = play(made("Breakout"), 20)
    assert not first[..., :-1].any()  # before the first frame of an episode there is nothing
    assert first[..., -1].any(axis=(1, 2)).all()
    before = first
    for step in steps:
        np.testing.assert_array_equal(step.observations[..., :-1], before[..., 1:])
        before = step.observations
    assert (before[..., -1] != before[..., 0]).any()


def test_a_colour_observation_has_its_frames_side_by_side_newest_last() -> None:
    first, steps = play(made("Breakout", grayscale=False), 8)
    assert not first[..., :-3].any()
    np.testing.assert_array_equal(steps[-1].observations[..., :-3], steps[-2].observations[..., 3:])
    red, green, blue = (steps[-1].observations[0, 24, 40, -3:]).astype(int)  # the uppermost row of bricks
    assert red > green + 50
    assert red > blue + 50


def test_observations_are_not_overwritten_by_later_steps() -> None:
    envs = made("Breakout")
    first, _ = play(envs, 0)
    copy = first.copy()
    for _ in range(3):
        envs.step(np.ones(2, np.int64))
    np.testing.assert_array_equal(first, copy)


# Seeds and sticky actions.


def frames(steps: list[Step]) -> np.ndarray:
    return np.stack([step.observations for step in steps])


@pytest.mark.parametrize("kwargs", [{}, {"obs_type": "ram"}], ids=["images", "ram"])
def test_a_seed_fixes_the_game_and_environments_differ(kwargs: dict) -> None:
    big = 2**32 - 7
    envs = made("Breakout", **kwargs)
    once, again, other = (frames(play(envs, 25, seed)[1]) for seed in (big, big, 3))
    np.testing.assert_array_equal(once, again)
    assert (once != other).any()
    assert (once[:, 0] != once[:, 1]).any()


@pytest.mark.parametrize(("kwargs", "same"), [({}, False), ({"repeat_action_probability": 0.0}, True)], ids=str)
@pytest.mark.parametrize("start", [{"noop_max": 0}, {"obs_type": "ram"}], ids=["images", "ram"])
def test_actions_stick_unless_asked_not_to(kwargs: dict, same: bool, start: dict) -> None:
    envs = made("Breakout", 3, **start, **kwargs)
    envs.reset(list(range(3)))
    for action in [1, 2, 3, 2, 2, 3, 3, 3] * 2:
        last = envs.step(np.full(3, action)).observations
    assert bool((last == last[:1]).all()) is same


def test_one_step_is_four_frames_for_both_kinds_of_observation() -> None:
    for kwargs in ({}, {"obs_type": "ram"}):
        envs = made("Breakout", 1, **kwargs, max_num_frames_per_episode=80)
        steps = play(envs, 20)[1]
        assert [bool(step.truncated[0]) for step in steps] == [False] * 19 + [True]
        assert not steps[-1].terminated[0]


# Rewards and the ends of episodes.


def test_rewards_are_the_true_scores() -> None:
    rewards = np.concatenate([step.rewards for step in play(made("MsPacman"), 100)[1]])
    assert rewards.max() >= 10
    assert made("MsPacman", reward_clipping=True).env.spec.kwargs["reward_clipping"] is True


def test_a_lost_life_does_not_end_the_episode_and_the_last_observation_is_the_true_one() -> None:
    envs = made("Breakout", 1)
    assert envs.next_step
    steps = play(envs, 500)[1]
    ends = [index for index, step in enumerate(steps) if step.terminated[0]]
    assert len(ends) > 0
    end = ends[0]
    last, reset, after = (step.observations for step in steps[end : end + 3])
    assert steps[end].infos[0]["lives"] == 0  # of five
    assert steps[end].final == {}
    np.testing.assert_array_equal(last[..., :-1], steps[end - 1].observations[..., 1:])
    assert not reset[..., :-1].any()
    assert not steps[end + 1].terminated[0]
    assert steps[end + 1].rewards[0] == 0
    np.testing.assert_array_equal(after[..., 2:-1], reset[..., 3:])


def test_an_episode_can_end_with_the_first_life() -> None:
    steps = play(made("Breakout", 1, episodic_life=True), 100)[1]
    ends = [step for step in steps if step.terminated[0]]
    assert ends[0].infos[0]["lives"] == 4


# The ordinary environment, for watching.


def test_the_environment_to_watch_observes_what_the_vector_environment_does_and_draws_it() -> None:
    env = make_env(EnvSource("ALE/Breakout-v5"), EnvContext(render_mode="rgb_array"))
    many = made("Breakout", 1)
    expected = many.env.reset(seed=5)[0][0]
    observation, _ = env.reset(seed=5)
    assert env.metadata["render_fps"] == 15
    rng = np.random.default_rng(0)
    for _ in range(250):
        np.testing.assert_array_equal(observation, expected)
        picture = env.render()
        assert picture.shape == (210, 160, 3)
        drawn = (picture @ [0.299, 0.587, 0.114]).reshape(42, 5, 4, 40).mean((1, 3))
        seen = observation[-1].reshape(42, 2, 4, 21).mean((1, 3))
        np.testing.assert_allclose(drawn, seen, atol=1)  # the same moment of the same game, in 42 x 4 patches
        action = rng.integers(4)
        observation, reward, terminated, truncated, _ = env.step(action)
        step = many.env.step(np.array([action]))
        assert (reward, terminated, truncated) == (step[1][0], step[2][0], step[3][0])
        expected = step[0][0]
        if terminated:
            observation, _ = env.reset()
            expected = many.env.step(np.array([0]))[0][0]
    env.close()


def test_the_game_drawn_is_the_game_played_without_a_seed_too() -> None:
    env: Any = make_env(EnvSource("ALE/Breakout-v5"), EnvContext(render_mode="rgb_array"))
    env.reset()
    for _ in range(30):
        env.step(env.action_space.sample())
    played, drawn = (game.step(np.array([0]))[4] for game in env.unwrapped.games)
    assert played["frame_number"] == drawn["frame_number"]


# Finding and refusing.


@pytest.mark.parametrize(
    ("game", "kwargs", "message"),
    [
        ("Pnog", {}, "there is no environment ALE/Pnog-v5; did you mean ALE/Pong-v5"),
        ("Pong", {"stack": 4}, "ALE/Pong-v5 has no argument stack; it has: .*stack_num"),
        (
            "Pong",
            {"num_envs": 4},
            "num_envs cannot be an argument of ALE/Pong-v5; set the number of environments with --envs",
        ),
        ("Pong", {"life_loss_info": True}, "ALE/Pong-v5 has no argument life_loss_info"),
        ("Pong", {"max_episode_steps": 9}, "has no argument max_episode_steps; it has: .*max_num_frames_per_episode"),
        ("Pong", {"obs_type": "ram", "stack_num": 4}, "ALE/Pong-v5 has no argument stack_num; it has: .*difficulty"),
        ("Pong", {"obs_type": "sound"}, "ALE/Pong-v5 cannot be made: Invalid observation type: sound"),
    ],
)
def test_a_mistake_is_one_sentence(game: str, kwargs: dict, message: str) -> None:
    with pytest.raises(FeverError, match=message):
        made(game, **kwargs)


def test_other_vector_environments_keep_their_own_metadata() -> None:
    made()
    assert "autoreset_mode" not in VectorEnv.metadata


def test_ale_is_imported_only_when_named() -> None:
    code = (
        "import sys; from fever.envs.make import *; make_envs(EnvSource('CartPole-v1'), 1, EnvContext()); "
        "assert 'ale_py' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_without_ale_it_is_said_what_to_install(tmp_path: Path) -> None:
    (tmp_path / "ale_py.py").write_text("raise ModuleNotFoundError(\"No module named 'ale_py'\", name='ale_py')\n")
    done = run_fever("train", "ALE/Pong-v5", cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert 'ALE/Pong-v5 needs the Atari environments; install them with: pip install "fever[atari]"' in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("kwargs", [{}, {"obs_type": "ram"}], ids=["images", "ram"])
def test_atari_trains_without_a_word_of_warning(fever: Any, tmp_path: Path, kwargs: dict) -> None:
    done = fever("train", "ALE/Pong-v5", "--name", "pong", "--env-kwargs", json.dumps(kwargs), *TINY)
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["steps"] == 32
    if not kwargs:
        done = fever("watch", "pong", "--to", "pong.gif", "--steps", "8", "--checkpoint", "last")
        assert (done.returncode, done.stderr) == (0, "")
        assert (tmp_path / "pong.gif").stat().st_size > 500


def test_an_unknown_game_is_one_sentence_on_the_command_line(fever: Any) -> None:
    done = fever("train", "ALE/Pnog-v5")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "did you mean ALE/Pong-v5" in done.stderr
