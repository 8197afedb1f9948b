"""Explorers: first priorities, how they explore, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fever.errors import ContractError
from fever.policy.spaces import encoded_shape
from fever.replay.explorer import Explorer
from fever.sampling.spec import Episode
from tests.environments import BrokenEnv, ClosingEnv, CounterEnv, IdentityEnv, ImageEnv, NextStepCounters, TimeLimitEnv
from tests.factories import COUNTERS, random_weights
from tests.replay.helpers import Row, explore, make_explorer, of_env, resolve, transitions


@COUNTERS
@pytest.mark.parametrize("n_step", [1, 3])
def test_first_priorities_by_hand(target: Any, n_step: int) -> None:
    explorer = make_explorer(target, n_step)
    rows = transitions(explorer, [3] * 10, 0.5)  # some actions are not the best ones
    params, network = random_weights(explorer.spec.network), explorer.spec.network

    def values(observation: np.ndarray) -> np.ndarray:
        return network.act(params, observation[None], np.zeros((1, 0), np.float32))[0][0]

    assert {row.discount for row in rows} >= {0.0, 0.5}
    chosen = [values(row.observation)[row.action[0]] for row in rows]
    assert any(value < values(row.observation).max() for value, row in zip(chosen, rows, strict=True))
    for value, row in zip(chosen, rows, strict=True):
        error = row.reward + row.discount * values(row.following).max() - value
        assert row.priority == pytest.approx(abs(error), rel=1e-4, abs=1e-5), row


def test_without_priorities_the_transitions_are_the_same() -> None:
    with_them, without = (transitions(make_explorer(CounterEnv, prioritized=flag), [20]) for flag in (True, False))
    assert [row.facts for row in with_them] == [row.facts for row in without]


class SwingEnv(TimeLimitEnv):
    """Rewards -3, 0 and 0.5 in turn."""

    def step(self, action: Any) -> Any:
        observation, _, *rest = super().step(action)
        return observation, (0.5, -3.0, 0.0)[self.count % 3], *rest


def test_clipped_rewards_are_signs_but_returns_stay_true() -> None:
    clipped, plain = make_explorer(SwingEnv, 1, 1, clip_rewards=True), make_explorer(SwingEnv, 1, 1)
    blocks, reports = explore(clipped, [8, 8])
    assert [row.reward for row in resolve(blocks)][:6] == [-1, 0, 1, -1, 0, -1]
    assert [row.reward for row in transitions(plain, [16])][:6] == [-3, 0, 0.5, -3, 0, -3]
    episodes = [episode for report in reports for episode in report.episodes]
    assert [(episode.total_reward, episode.length) for episode in episodes] == [(-5.5, 5)] * 3
    first = transitions(make_explorer(SwingEnv, 3, 1, clip_rewards=True), [8])[0]
    assert first.reward == -0.75  # -1 + 0 + 1/4


# Exploration.


def best_actions(explorer: Explorer, rows: list[Row]) -> np.ndarray:
    observations = np.stack([row.observation for row in rows])
    values, _ = explorer.spec.network.act(
        random_weights(explorer.spec.network), observations, np.zeros((len(rows), 0), np.float32)
    )
    return values.argmax(1)


def is_best(explorer: Explorer, rows: list[Row]) -> np.ndarray:
    return best_actions(explorer, rows) == [row.action[0] for row in rows]


def test_epsilon_0_acts_by_the_highest_value_and_1_evenly() -> None:
    explorer = make_explorer(IdentityEnv, 1, 4)  # three observations, three actions
    assert is_best(explorer, transitions(explorer, [100])).all()
    explorer = make_explorer(IdentityEnv, 1, 4)
    rows = transitions(explorer, [300], 1.0)
    np.testing.assert_allclose(np.bincount([row.action[0] for row in rows]) / len(rows), [1 / 3] * 3, atol=0.05)
    assert is_best(explorer, rows).mean() == pytest.approx(1 / 3, abs=0.05)
    explorer = make_explorer(IdentityEnv, 1, 4)
    assert is_best(explorer, transitions(explorer, [300], 0.3)).mean() == pytest.approx(0.8, abs=0.05)


def test_every_explorer_has_its_own_entry_by_worker_and_environment() -> None:
    explorer = make_explorer(CounterEnv, 1, 2, worker_index=1)
    rows = transitions(explorer, [200], [1.0, 1.0, 0.0, 1.0])
    assert is_best(explorer, of_env(rows, 0)).all()
    assert is_best(explorer, of_env(rows, 1)).mean() == pytest.approx(0.5, abs=0.1)


def test_a_stochastic_policy_explores_by_sampling() -> None:
    settings: dict[str, Any] = {"kwargs": {"action_space": "box"}, "greedy": False, "prioritized": False}
    actions = np.stack([row.action for row in transitions(make_explorer(IdentityEnv, 1, 4, **settings), [100])])
    assert (actions.shape[1:], actions.dtype) == ((2,), np.float32)
    assert (np.abs(actions) <= 1).all()
    assert len(np.unique(actions, axis=0)) == len(actions)
    uniform = np.stack([row.action for row in transitions(make_explorer(IdentityEnv, 1, 4, **settings), [500], 1.0)])
    np.testing.assert_allclose(np.histogram(uniform, 4, (-1, 1))[0] / uniform.size, [0.25] * 4, atol=0.03)


@COUNTERS
@pytest.mark.parametrize(
    ("worker", "epsilons", "counting"),
    [
        (0, [0.1, 0.5, 0.2, 0.9], [True, False]),  # the median is 0.35
        (1, [0.1, 0.5, 0.2, 0.9], [True, False]),
        (0, [0.4, 0.3, 0.2, 0.1], [False, False]),
        (1, [0.4, 0.3, 0.2, 0.1], [True, True]),
        (0, [0.3, 0.3, 0.3, 0.3], [True, True]),
    ],
)
def test_episodes_of_the_greedier_half_count(
    target: Any, worker: int, epsilons: list[float], counting: list[bool]
) -> None:
    _, reports = explore(make_explorer(target, worker_index=worker), [5] * 4, epsilons)
    episodes = [episode for report in reports for episode in report.episodes]
    assert {(episode.env_index, episode.counts) for episode in episodes} == {(0, counting[0]), (1, counting[1])}


@COUNTERS
def test_episodes_and_steps_are_reported_as_they_were(target: Any) -> None:
    expected = {0: [(6, 3), (10, 4), (6, 3), (10, 4)], 1: [(20, 4), (20, 4), (20, 4), (20, 4)]}
    explorer = make_explorer(target, worker_index=0)
    block, report = explorer.explore(random_weights(explorer.spec.network), 7, np.zeros(2), 3)
    assert (report.version, report.worker_index, report.steps) == (7, 0, 6)
    assert 0 < report.seconds["env"] + report.seconds["inference"] <= report.seconds["total"]
    _, reports = explore(explorer, [5] * 4)
    episodes: list[Episode] = [episode for one in (report, *reports) for episode in one.episodes]
    for index in range(2):
        mine = [episode for episode in episodes if episode.env_index == index]
        assert [(episode.total_reward, episode.length) for episode in mine][:4] == expected[index]
        assert [episode.info for episode in mine] == [{"steps": episode.length} for episode in mine]
    assert len(block.frames) == {NextStepCounters: 8}.get(target, 9)


def test_without_a_number_of_steps_the_specification_counts() -> None:
    explorer = make_explorer(CounterEnv, steps=7)
    assert explorer.explore(random_weights(explorer.spec.network), 0, np.zeros(2))[1].steps == 14


def test_streams_of_workers_and_of_their_replacements_differ() -> None:
    places = [{}, {"worker_index": 1}, {"generation": 1}, {"worker_index": 1, "generation": 1}]
    streams = [explore(make_explorer(CounterEnv, **place), [5])[0][0].stream for place in places]
    assert len(set(streams)) == 4


# What is refused.


@pytest.mark.parametrize("at", [1, 4, 5, 6, 10])  # calls have five steps
@pytest.mark.parametrize("what", ["reward", "observation"])
def test_a_nan_is_refused_with_its_step_environment_and_worker(what: str, at: int) -> None:
    kwargs = {"fault": f"nan_{what}", "at": at, "only": 1}
    explorer = make_explorer(BrokenEnv, envs=3, worker_index=2, kwargs=kwargs)
    explore(explorer, [5] * ((at - 1) // 5))
    message = rf":BrokenEnv breaks its contract at step {at} of environment 1 of worker 2: the {what} is NaN"
    with pytest.raises(ContractError, match=message):
        explore(explorer, [5])


def test_a_nan_in_the_last_observation_of_an_episode_is_refused() -> None:
    explorer = make_explorer(BrokenEnv, kwargs={"fault": "nan_observation", "at": 3, "length": 3})
    with pytest.raises(ContractError, match="at step 3 of environment 0 of worker 0: the observation is NaN"):
        explore(explorer, [5])


def test_a_nan_in_the_first_observation_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TimeLimitEnv, "reset", lambda self, seed: (np.array([np.nan], np.float32), {}))
    with pytest.raises(ContractError, match="at step 0 of environment 0 of worker 0: the observation is NaN"):
        make_explorer(TimeLimitEnv)


def test_a_nan_reward_beside_images_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    step = ImageEnv.step
    monkeypatch.setattr(ImageEnv, "step", lambda self, action: (step(self, action)[0], np.nan, False, False, {}))
    with pytest.raises(ContractError, match="at step 1 of environment 0 of worker 0: the reward is NaN"):
        explore(make_explorer(ImageEnv), [2])


def test_closing_an_explorer_closes_its_environments(tmp_path: Path) -> None:
    make_explorer(ClosingEnv, kwargs={"folder": tmp_path}).close()
    assert {path.name for path in tmp_path.iterdir()} == {"closed-0", "closed-1"}


@pytest.mark.parametrize("change", [{}, {"seed": 1}, {"generation": 1}], ids=["same", "seed", "start"])
def test_one_seed_gives_one_stream_and_another_another(change: dict[str, int]) -> None:
    (here,), (there,) = (explore(make_explorer("CartPole-v1", **more), [50], 0.5)[0] for more in ({}, change))
    same = [np.array_equal(getattr(here, name), getattr(there, name)) for name in ("frames", "actions", "rewards")]
    assert same == [True] * 3 if not change else not same[0]


def test_descriptions_fit_the_buffer() -> None:
    explorer = make_explorer("CartPole-v1", 3)
    block = explore(explorer, [30])[0][0]
    shape, dtype = encoded_shape(explorer.envs.observation)
    assert (block.frames.shape[1:], block.frames.dtype) == (shape, dtype)
    assert (block.actions.dtype, block.rewards.dtype, block.discounts.dtype) == (np.int32, np.float32, np.float32)
    assert (block.observations.dtype, block.observations.shape) == (np.int64, (len(block.rewards), 1))
