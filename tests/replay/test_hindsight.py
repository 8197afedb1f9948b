"""Hindsight experience replay. Most tests use `WalkEnv`, whose episodes are known in advance:

3 steps, truncated; 2 steps, terminated; 3 steps, truncated; ...   the place is the step, the reward minus the distance

An encoded observation is (achieved goal, desired goal, episode, place): Gymnasium sorts the parts of a Dict by name.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fever
from fever.errors import ContractError, FeverError
from fever.policy.spaces import encode
from fever.replay.buffer import ReplayBuffer, ReplaySpec
from fever.replay.hindsight import check_goals, decode, part_columns
from fever.runs.run import Run
from fever.training.resume import resume
from tests.environments import EndingWalkEnv, NoRewardEnv, OddRewardEnv, VectorGoals, WalkEnv
from tests.factories import random_weights
from tests.helpers import same_arrays
from tests.replay.helpers import Row, explore, make_explorer, transitions

REAL_GOAL = 50.0
# Copies with the final goal, discount 0.5, by hand: observation, reward, discount, next observation.
FINAL = [
    ((0, 3, 0, 0), -2.0, 0.5, (1, 3, 0, 1)),
    ((1, 3, 0, 1), -1.0, 0.5, (2, 3, 0, 2)),
    ((2, 3, 0, 2), 0.0, 0.5, (3, 3, 0, 3)),  # truncated, with the episode's true last observation
    ((0, 2, 1, 0), -1.0, 0.5, (1, 2, 1, 1)),
    ((1, 2, 1, 1), 0.0, 0.0, (2, 2, 1, 2)),  # terminated, as the transition was
]


def split(rows: list[Row]) -> tuple[list[Row], list[Row]]:
    """Transitions as experienced, and copies with another goal."""
    return [row for row in rows if row.observation[1] == REAL_GOAL], [row for row in rows if row.observation[1] < 4]


@pytest.mark.parametrize("calls", [[6], [1, 1, 1, 1, 1, 1], [2, 4], [4, 2]])
def test_copies_with_the_final_goal_by_hand(calls: list[int]) -> None:
    explorer = make_explorer(WalkEnv, n_step=1, envs=1, her=1, her_strategy="final")
    real, copies = split(transitions(explorer, calls))
    assert [row.facts for row in copies] == FINAL
    assert [row.facts for row in real] == [
        ((0, 50, 0, 0), -49.0, 0.5, (1, 50, 0, 1)),
        ((1, 50, 0, 1), -48.0, 0.5, (2, 50, 0, 2)),
        ((2, 50, 0, 2), -47.0, 0.5, (3, 50, 0, 3)),
        ((0, 50, 1, 0), -49.0, 0.5, (1, 50, 1, 1)),
        ((1, 50, 1, 1), -48.0, 0.0, (2, 50, 1, 2)),
    ]
    actions = {tuple(row.observation[2:].tolist()): row.action.tolist() for row in real}
    assert all(row.action.tolist() == actions[tuple(row.observation[2:].tolist())] for row in copies)


def test_the_environment_may_say_which_goals_end_an_episode() -> None:
    explorer = make_explorer(EndingWalkEnv, n_step=1, envs=1, her=1, her_strategy="final")
    _, copies = split(transitions(explorer, [5]))
    assert [row.discount for row in copies] == [0.5, 0.5, 0.0, 0.5, 0.0]


def test_future_goals_are_reached_later_in_the_same_episode() -> None:
    explorer = make_explorer(EndingWalkEnv, n_step=1, envs=2, her=3)
    real, copies = split(transitions(explorer, [100, 101]))
    ended = [row for row in real if (row.observation[2] < 78)]  # whole episodes: 2.5 steps on average
    assert len([row for row in copies if row.observation[2] < 78]) == 3 * len(ended) > 1000
    found: dict[tuple[float, float], list[float]] = {}
    for row in copies:
        _, goal, episode, place = row.observation.tolist()
        assert row.following.tolist() == [place + 1, goal, episode, place + 1]
        assert row.reward == place + 1 - goal
        assert row.discount == (0.0 if goal == place + 1 else 0.5)
        found.setdefault((3 - episode % 2, place), []).append(goal)
    for (length, place), goals in found.items():
        possible = np.arange(place + 1, length + 1)
        shares = [(np.array(goals) == goal).mean() for goal in possible]
        assert sum(shares) == pytest.approx(1)
        np.testing.assert_allclose(shares, 1 / len(possible), atol=0.1)  # uniform
    assert found.keys() == {(3, 0), (3, 1), (3, 2), (2, 0), (2, 1)}


def test_what_was_experienced_is_counted_without_the_copies() -> None:
    blocks, _ = explore(make_explorer(WalkEnv, n_step=1, envs=2, her=4), [3, 2])
    assert [(block.experienced, block.relabelled) for block in blocks] == [(4, 2 * 3 * 4), (4, 2 * 2 * 4)]
    assert [len(block.rewards) for block in blocks] == [28, 20]


def test_priorities_of_copies_are_their_td_errors() -> None:
    explorer = make_explorer(WalkEnv, n_step=1, envs=1, her=2)
    network, params = explorer.spec.network, random_weights(explorer.spec.network)
    _, copies = split(transitions(explorer, [6]))
    for row in copies:
        here, there = (network.policy(params, x[None])[0] for x in (row.observation, row.following))
        expected = abs(row.reward + row.discount * there.max() - here[row.action[0]])
        assert row.priority == pytest.approx(expected, rel=1e-4)
    assert len({round(row.priority, 4) for row in copies}) > 4


def test_clipped_rewards_are_those_of_copies_too() -> None:
    explorer = make_explorer(WalkEnv, n_step=1, envs=1, her=1, her_strategy="final", clip_rewards=True)
    _, copies = split(transitions(explorer, [6]))
    assert [row.reward for row in copies] == [-1, -1, 0, -1, 0]


def test_continuous_actions_are_copied() -> None:
    plan = {"kwargs": {"continuous": True}, "greedy": False, "prioritized": False}
    real, copies = split(transitions(make_explorer(WalkEnv, n_step=1, envs=1, her=1, **plan), [6]))
    actions = {tuple(row.observation[2:].tolist()): row.action.tolist() for row in real}
    assert [row.action.tolist() for row in copies] == list(actions.values())


def test_a_buffer_keeps_copies_and_their_frames_together() -> None:
    explorer = make_explorer(WalkEnv, n_step=1, envs=2, her=4)
    buffer = ReplayBuffer(ReplaySpec(2000, (4,), "float32", 1, (1,), "int32", False, 0.0, her=4))
    for block in explore(explorer, [7] * 200)[0]:
        assert buffer.add(block) == len(block.rewards)
    assert buffer.added > 6 * 2000
    assert buffer._alive(slice(0, 2000)).all()  # the frames of all transitions are there
    batch = buffer.sample(np.random.default_rng(0), 4000)
    achieved, desired, _, place = batch.next_observations.T
    np.testing.assert_array_equal(achieved, place)
    np.testing.assert_array_equal(batch.rewards, -np.abs(achieved - desired))
    np.testing.assert_array_equal(batch.observations[:, 1], desired)
    assert (desired < 4).mean() == pytest.approx(0.8, abs=0.03)


def test_a_buffer_saved_with_another_number_of_copies_is_refused() -> None:
    spec = {"prioritized": False, "alpha": 0.0}
    four = ReplayBuffer(ReplaySpec(100, (4,), "float32", 1, (1,), "int32", **spec, her=4))
    for block in explore(make_explorer(WalkEnv, n_step=1, envs=1, her=4), [5] * 60)[0]:
        four.add(block)
    with pytest.raises(FeverError, match="it was saved with another her"):
        ReplayBuffer(ReplaySpec(100, (4,), "float32", 1, (1,), "int32", **spec)).restore(four.arrays())


@pytest.mark.parametrize(
    ("description", "values"),
    [
        ({"type": "binary", "shape": [3]}, np.array([[0, 1, 1], [1, 0, 0]], np.int8)),
        ({"type": "discrete", "sizes": [4], "starts": [2], "shape": []}, np.array([2, 5])),
        ({"type": "discrete", "sizes": [2, 3], "starts": [0, 1], "shape": [2]}, np.array([[1, 3], [0, 2]])),
        ({"type": "box", "shape": [2, 2], "dtype": "float64"}, np.array([[[1.5, 2], [3, -4]]])),
        ({"type": "box", "shape": [2], "dtype": "int64"}, np.array([[3, -7]])),
        ({"type": "box", "shape": [3], "dtype": "uint8"}, np.array([[0, 7, 255]], np.uint8)),
    ],
)
def test_goals_are_decoded_as_the_environment_gave_them(description: dict[str, Any], values: np.ndarray) -> None:
    other = {"type": "box", "shape": [2], "dtype": "float32"}
    parts = {"a": other, "goal": description, "z": other}
    rest = np.zeros((len(values), 2), np.float32)
    encoded = encode({"type": "dict", "spaces": parts}, {"a": rest, "goal": values, "z": rest})
    decoded = decode(description, encoded[:, part_columns(parts, "goal")])
    assert (decoded.dtype, decoded.tolist()) == (values.dtype, values.tolist())


# What is refused.


def test_environments_are_refused_in_one_sentence() -> None:
    with pytest.raises(
        FeverError, match=r"^her needs an environment with compute_reward\(.*NoRewardEnv does not have$"
    ):
        make_explorer(NoRewardEnv, n_step=1, her=4)
    with pytest.raises(FeverError, match="VectorGoals is natively vectorised, which her does not support"):
        make_explorer(VectorGoals, n_step=1, her=4)
    for reward in ("nan", None, [1, 2]):
        explorer = make_explorer(OddRewardEnv, n_step=1, her=1, kwargs={"reward": reward})
        with pytest.raises(
            ContractError, match=r"^compute_reward of .*OddRewardEnv must return one finite number, not "
        ):
            explore(explorer, [2])


def test_observations_without_goals_that_can_be_exchanged_are_refused() -> None:
    box, image = {"type": "box", "shape": [2], "dtype": "float32"}, {"type": "image", "shape": [8, 8, 1], "order": "hw"}
    parts = {"observation": box, "achieved_goal": box | {"low": [0, 0]}, "desired_goal": box | {"low": [1, 1]}}
    goals = {"type": "dict", "spaces": parts}
    check_goals("x", goals)  # bounds may differ
    with pytest.raises(FeverError, match=r"^x has action masks, which her does not support$"):
        check_goals("x", {"type": "masked", "observation": goals, "sizes": [2], "key": None})
    others = [{"desired_goal": box | {"shape": [3]}}, {"achieved_goal": image, "desired_goal": image}]
    for other in others:
        with pytest.raises(FeverError, match="achieved_goal and desired_goal of one shape and type"):
            check_goals("x", {"type": "dict", "spaces": parts | other})


@pytest.mark.parametrize(
    ("env", "words", "sentence"),
    [
        ("tests.environments:WalkEnv", ["her=4"], "her needs n_step=1, not 5"),
        (
            "CartPole-v1",
            ["her=4", "n_step=1"],
            "her needs Dict observations with observation, achieved_goal, desired_goal",
        ),
        ("tests.environments:WalkEnv", ["her=-1", "n_step=1"], "must be 0 or more"),
        ("tests.environments:WalkEnv", ["her=true", "n_step=1"], "must be a whole number"),
        ("tests.environments:WalkEnv", ["n_sampled_goal=4"], "did you mean her?"),
        ("tests.environments:WalkEnv", ["her=4", "n_step=1", "buffer=20"], "buffer=20 is too small"),
        ("tests.environments:NoRewardEnv", ["her=4", "n_step=1"], "her needs an environment with compute_reward"),
    ],
)
def test_mistakes_are_one_sentence(env: str, words: list[str], sentence: str, fever: Callable[..., Any]) -> None:
    done = fever("train", env, "--algo", "dqn", *words)
    assert (done.returncode, done.stdout) == (2, "")
    assert sentence in done.stderr
    assert "Traceback" not in done.stderr


# Training.


def train(folder: Path, algo: str = "dqn", env: Any = "BitFlipEnv", **settings: Any) -> Any:
    plain = {"n_step": 1, "envs": 4, "batch": 16, "updates": 4, "warmup": 100, "hidden": (8,), "report_steps": 100}
    return fever.train(f"tests.environments:{env}", algo, runs=folder, **(plain | settings))


def weights(run: Run) -> dict[str, np.ndarray]:
    return run.checkpoint().arrays()


def test_one_seed_gives_one_training_which_can_be_resumed(tmp_path: Path) -> None:
    stop = {"steps": 600}
    runs = [train(tmp_path, her=her, stop=stop).run for her in (4, 4, 2)]
    assert same_arrays(weights(runs[0]), weights(runs[1]))
    assert not same_arrays(weights(runs[0]), weights(runs[2]))
    updates = runs[0].checkpoint().manifest["algorithm"]["updates"]
    assert updates == pytest.approx((600 - 100) * 32 / 16, rel=0.1)  # copies do not count in the replay ratio
    assert runs[0].metrics()[-1]["replay_ratio"] == pytest.approx(32, rel=0.1)
    later = runs[0].config.stop.model_copy(update={"steps": 1200})
    resume(runs[0], runs[0].config.model_copy(update={"stop": later}))
    assert runs[0].checkpoint().manifest["steps"] >= 1200


def test_sac_takes_goals(tmp_path: Path) -> None:
    settings = {"env_kwargs": {"continuous": True}, "her": 2, "stop": {"steps": 300}}
    assert train(tmp_path, "sac", "WalkEnv", **settings).run.metrics()[-1]["updates"] > 0


@pytest.mark.slow
def test_bits_are_flipped_to_a_goal_only_in_hindsight(tmp_path: Path) -> None:
    returns = {}
    for her in (0, 4):
        result = fever.train(
            "tests.environments:BitFlipEnv", "dqn", n_step=1, her=her, runs=tmp_path,
            stop={"steps": 12_000, "reward": -6.0, "window": 50},
        )  # fmt: skip
        returns[her] = result.return_mean
    assert returns[4] >= -6.0  # the best possible is -4 on average, without random actions
    assert returns[0] < -9.0
