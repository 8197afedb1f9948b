"""Old ids of environments are understood wherever an environment is named."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import pytest

from fever.envs.old_ids import GAMES, VERSIONS, find_current
from fever.envs.source import EnvContext, EnvSource, make_any

STILL = {"repeat_action_probability": 0.0}


@pytest.mark.parametrize(
    ("name", "present", "arguments"),
    [
        ("PongNoFrameskip-v4", "ALE/Pong-v5", STILL),
        ("BreakoutNoFrameskip-v0", "ALE/Breakout-v5", {}),
        ("PongDeterministic-v0", "ALE/Pong-v5", {}),
        ("SpaceInvadersDeterministic-v4", "ALE/SpaceInvaders-v5", {**STILL, "frameskip": 3}),
        ("MsPacman-v0", "ALE/MsPacman-v5", {}),
        ("Pong-ram-v0", "ALE/Pong-v5", {"obs_type": "ram"}),
        ("Pong-ram-v4", "ALE/Pong-v5", {**STILL, "obs_type": "ram"}),
        ("Pong-ramNoFrameskip-v0", "ALE/Pong-v5", {"obs_type": "ram", "frameskip": 1}),
        ("HalfCheetah-v2", "HalfCheetah-v5", {}),
        ("Pendulum-v0", "Pendulum-v1", {}),
    ],
)
def test_old_ids(name: str, present: str, arguments: dict[str, Any]) -> None:
    found = find_current(name)
    assert found is not None
    assert (found.id, found.arguments) == (present, arguments)
    assert found.note.startswith(f"{name} is {present} now")
    source = EnvSource(name, {"full_action_space": True})
    assert (source.name, source.kwargs) == (present, {**arguments, "full_action_space": True})


@pytest.mark.parametrize(
    "name",
    ["HalfCheetah-v4", "CartPole-v0", "CartPole-v1", "ALE/Pong-v5", "Mine-v0", "mine:Name", "MineNoFrameskip-v4"],
)
def test_other_names_stay(name: str) -> None:
    assert find_current(name) is None
    assert EnvSource(name).name == name


def test_current_environments_exist() -> None:
    assert {f"{name}-v{version}" for name, version in VERSIONS.items()} <= gym.registry.keys()
    ale_py = pytest.importorskip("ale_py")
    gym.register_envs(ale_py)
    assert {f"ALE/{game}-v5" for game in GAMES} <= gym.registry.keys()


@pytest.mark.parametrize(("name", "shape"), [("Pong-ram-v0", (128,)), ("BreakoutNoFrameskip-v4", (4, 84, 84))])
def test_old_games_can_be_played(name: str, shape: tuple[int, ...]) -> None:
    pytest.importorskip("ale_py")
    env = make_any(EnvSource(name), EnvContext())
    space = env.single_observation_space if hasattr(env, "single_observation_space") else env.observation_space
    env.close()
    assert space.shape == shape


def test_an_argument_of_the_users_wins() -> None:
    assert (
        EnvSource("PongNoFrameskip-v4", {"repeat_action_probability": 0.5}).kwargs["repeat_action_probability"] == 0.5
    )
