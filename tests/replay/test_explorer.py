"""Most of these use the counters of `tests.environments`, whose episodes are known in advance:

environment 0: 3 steps, terminated; 4 steps, truncated; 3 steps, terminated; ...   rewards 1, 2, 3, ...
environment 1: 4 steps, terminated; 4 steps, truncated; 4 steps, terminated; ...   rewards 2, 4, 6, ...
"""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv

from fever.replay.buffer import ReplayBuffer, ReplaySpec
from tests.environments import NextStepCounters
from tests.factories import COUNTERS
from tests.replay.helpers import explore, make_explorer, of_env, resolve, transitions

# Transitions of the counters, discount 0.5, worked out by hand: observation, rewards summed up, discount, what the
# value is taken of. An observation is (environment, episode, step).
ONE_STEP = {
    0: [
        ((0, 0, 0), 1.0, 0.5, (0, 0, 1)),
        ((0, 0, 1), 2.0, 0.5, (0, 0, 2)),
        ((0, 0, 2), 3.0, 0.0, (0, 0, 3)),  # terminated
        ((0, 1, 0), 1.0, 0.5, (0, 1, 1)),
        ((0, 1, 1), 2.0, 0.5, (0, 1, 2)),
        ((0, 1, 2), 3.0, 0.5, (0, 1, 3)),
        ((0, 1, 3), 4.0, 0.5, (0, 1, 4)),  # truncated: the true last observation
        ((0, 2, 0), 1.0, 0.5, (0, 2, 1)),
    ],
    1: [
        ((1, 0, 0), 2.0, 0.5, (1, 0, 1)),
        ((1, 0, 1), 4.0, 0.5, (1, 0, 2)),
        ((1, 0, 2), 6.0, 0.5, (1, 0, 3)),
        ((1, 0, 3), 8.0, 0.0, (1, 0, 4)),
        ((1, 1, 0), 2.0, 0.5, (1, 1, 1)),
        ((1, 1, 1), 4.0, 0.5, (1, 1, 2)),
        ((1, 1, 2), 6.0, 0.5, (1, 1, 3)),
        ((1, 1, 3), 8.0, 0.5, (1, 1, 4)),
        ((1, 2, 0), 2.0, 0.5, (1, 2, 1)),
    ],
}
THREE_STEPS = {
    0: [
        ((0, 0, 0), 2.75, 0.0, (0, 0, 3)),  # 1 + 2/2 + 3/4
        ((0, 0, 1), 3.5, 0.0, (0, 0, 3)),  # 2 + 3/2
        ((0, 0, 2), 3.0, 0.0, (0, 0, 3)),
        ((0, 1, 0), 2.75, 0.125, (0, 1, 3)),
        ((0, 1, 1), 4.5, 0.125, (0, 1, 4)),  # 2 + 3/2 + 4/4
        ((0, 1, 2), 5.0, 0.25, (0, 1, 4)),  # 3 + 4/2
        ((0, 1, 3), 4.0, 0.5, (0, 1, 4)),
        ((0, 2, 0), 2.75, 0.0, (0, 2, 3)),
    ],
    1: [
        ((1, 0, 0), 5.5, 0.125, (1, 0, 3)),  # 2 + 4/2 + 6/4
        ((1, 0, 1), 9.0, 0.0, (1, 0, 4)),  # 4 + 6/2 + 8/4
        ((1, 0, 2), 10.0, 0.0, (1, 0, 4)),  # 6 + 8/2
        ((1, 0, 3), 8.0, 0.0, (1, 0, 4)),
        ((1, 1, 0), 5.5, 0.125, (1, 1, 3)),
        ((1, 1, 1), 9.0, 0.125, (1, 1, 4)),
        ((1, 1, 2), 10.0, 0.25, (1, 1, 4)),
        ((1, 1, 3), 8.0, 0.5, (1, 1, 4)),
        ((1, 2, 0), 5.5, 0.125, (1, 2, 3)),
    ],
}


@COUNTERS
@pytest.mark.parametrize(("n_step", "table"), [(1, ONE_STEP), (3, THREE_STEPS)])
@pytest.mark.parametrize("calls", [[20], [1] * 20, [2] * 10, [5] * 4, [1, 7, 2, 10]], ids=str)
def test_transitions_are_those_of_the_table_however_the_calls_are_cut(
    target: Any, n_step: int, table: dict[int, list[Any]], calls: list[int]
) -> None:
    rows = transitions(make_explorer(target, n_step), calls)
    for index in range(2):
        mine = [row.facts for row in of_env(rows, index)]
        assert mine[: len(table[index])] == table[index]


@COUNTERS
@pytest.mark.parametrize("n_step", [1, 3])
def test_the_cut_changes_neither_order_nor_actions_nor_priorities(target: Any, n_step: int) -> None:
    whole = transitions(make_explorer(target, n_step), [40])
    assert whole
    for size in (1, 2, 5):
        parts = transitions(make_explorer(target, n_step), [size] * (40 // size))
        assert [row.facts for row in parts] == [row.facts for row in whole]
        np.testing.assert_array_equal([row.action for row in parts], [row.action for row in whole])
        np.testing.assert_allclose(
            [row.priority for row in parts], [row.priority for row in whole], rtol=1e-5, atol=1e-6
        )


@COUNTERS
@pytest.mark.parametrize("n_step", [1, 3])
def test_every_step_starts_one_transition_and_a_phantom_none(target: Any, n_step: int) -> None:
    explorer = make_explorer(target, n_step)
    blocks, reports = explore(explorer, [5] * 8)
    rows = resolve(blocks)
    starts = [tuple(row.observation.tolist()) for row in rows]
    assert len(set(starts)) == len(starts)
    for index in range(2):
        mine = [(episode, step) for env, episode, step in starts if env == index]
        lengths = {0: 3 + index, 1: 4}
        assert all(step < lengths[episode % 2] for episode, step in mine)
        expected = [(episode, step) for episode in range(20) for step in range(lengths[int(episode) % 2])]
        assert mine == expected[: len(mine)]
    unripe = explorer.carried["valid"].sum()  # steps taken whose n steps are not known yet
    assert len(rows) + unripe == sum(report.steps for report in reports)
    assert len(explorer.carried["valid"]) == n_step


@COUNTERS
def test_every_observation_is_sent_once(target: Any) -> None:
    explorer = make_explorer(target, 3)
    blocks, _ = explore(explorer, [5] * 8)
    frames = np.concatenate([block.frames for block in blocks])
    seen = [tuple(frame) for frame in frames.tolist()]
    assert len(set(seen)) == len(seen)  # the counters never show the same twice
    ends = sum(step == (4 if episode % 2 else 3 + env) for env, episode, step in seen)
    # What was reset to and what every step gave, and the last observations of episodes where those come besides.
    assert len(seen) == 2 + 2 * 40 + (0 if target is NextStepCounters else ends)
    assert ends == {NextStepCounters: 9 + 8}.get(target, 11 + 10)


@COUNTERS
@pytest.mark.parametrize("n_step", [1, 3])
def test_a_buffer_puts_together_what_the_environment_gave(target: Any, n_step: int) -> None:
    blocks, _ = explore(make_explorer(target, n_step), [5] * 8)
    buffer = ReplayBuffer(ReplaySpec(100, (3,), "float32", 1, (1,), "int32", True, 0.6))
    assert sum(buffer.add(block) for block in blocks) == buffer.added == sum(len(block.rewards) for block in blocks)
    rows = resolve(blocks)
    batch = buffer.sample(np.random.default_rng(0), 3000)
    assert set(batch.serials.tolist()) == set(range(len(rows)))
    for name, field in (("observations", "observation"), ("next_observations", "following"), ("actions", "action")):
        expected = np.stack([getattr(rows[serial], field) for serial in batch.serials])
        np.testing.assert_array_equal(getattr(batch, name), expected, err_msg=name)
    np.testing.assert_array_equal(batch.rewards, [rows[serial].reward for serial in batch.serials])
    np.testing.assert_array_equal(batch.discounts, [rows[serial].discount for serial in batch.serials])
    (first,) = (known for known in buffer.streams.values())
    assert len(first[1]) < 20  # what may still be named is not much


# Stacks of frames.


class NextStepStacks(VectorEnv):
    """Stacks of three images, every one with a number of its own; episodes of 2, 3, 4, ... steps, all truncated.

    A reset shows three images that were never shown before.
    """

    metadata = {"autoreset_mode": AutoresetMode.NEXT_STEP}
    stacked_frames = 3

    def __init__(self, num_envs: int) -> None:
        self.num_envs = num_envs
        self.single_observation_space, self.single_action_space = (
            spaces.Box(0, 255, (5, 6, 3), np.uint8), spaces.Discrete(2)
        )  # fmt: skip
        self.observation_space = gym.vector.utils.batch_space(self.single_observation_space, num_envs)
        self.action_space = gym.vector.utils.batch_space(self.single_action_space, num_envs)
        self.rng = np.random.default_rng(0)
        self.shown: list[list[list[np.ndarray]]] = [[] for _ in range(num_envs)]  # env, episode, step

    def _image(self) -> np.ndarray:
        return self.rng.integers(0, 256, (5, 6)).astype(np.uint8)

    def _begin(self, index: int) -> None:
        self.shown[index].append([np.stack([self._image() for _ in range(3)], axis=-1)])

    def _advance(self, index: int) -> bool:
        episode = self.shown[index][-1]
        episode.append(np.concatenate([episode[-1][..., 1:], self._image()[..., None]], axis=-1))
        return len(episode) - 1 == len(self.shown[index]) + 1 + index

    def _observe(self) -> np.ndarray:
        return np.stack([episodes[-1][-1] for episodes in self.shown])

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        for index in range(self.num_envs):
            self._begin(index)
        self.ended = np.zeros(self.num_envs, bool)
        return self._observe(), {}

    def step(self, actions: Any) -> Any:
        truncated = np.zeros(self.num_envs, bool)
        for index in range(self.num_envs):
            if self.ended[index]:
                self._begin(index)
            else:
                truncated[index] = self._advance(index)
        self.ended = truncated
        return self._observe(), np.ones(self.num_envs), np.zeros(self.num_envs, bool), truncated, {}


class SameStepStacks(NextStepStacks):
    """The same; the step that ends an episode also resets it."""

    metadata = {"autoreset_mode": AutoresetMode.SAME_STEP}

    def step(self, actions: Any) -> Any:
        self.ended[:] = False
        last, rewards, terminated, truncated, info = super().step(actions)
        if not truncated.any():
            return last, rewards, terminated, truncated, info
        final = np.full(self.num_envs, None, object)
        for index in np.flatnonzero(truncated):
            final[index] = last[index]
            self._begin(index)
        return self._observe(), rewards, terminated, truncated, {"final_obs": final, "_final_obs": truncated}


@pytest.mark.parametrize("target", [NextStepStacks, SameStepStacks])
@pytest.mark.parametrize("n_step", [1, 3])
@pytest.mark.parametrize("calls", [[30], [1] * 30, [5] * 6], ids=["30", "1", "5"])
def test_stacks_are_put_together_exactly(target: Any, n_step: int, calls: list[int]) -> None:
    explorer = make_explorer(target, n_step)
    assert explorer.stack == 3
    blocks, _ = explore(explorer, calls)
    env = explorer.envs.env
    buffer = ReplayBuffer(ReplaySpec(100, (5, 6), "uint8", 3, (1,), "int32", True, 0.6))
    for block in blocks:
        assert block.frames.shape[1:] == (5, 6)
        assert buffer.add(block) == len(block.rewards)
    batch = buffer.sample(np.random.default_rng(0), 5000)
    places = [int(np.flatnonzero(batch.serials == serial)[0]) for serial in range(buffer.added)]
    found = [(batch.observations[place], batch.next_observations[place]) for place in places]
    for episodes in env.shown:
        pairs = [
            (episode[step], episode[min(step + n_step, len(episode) - 1)])
            for episode in episodes
            for step in range(len(episode) - 1)
        ]
        starts = {here.tobytes(): place for place, (here, _) in enumerate(pairs)}
        mine = [pair for pair in found if pair[0].tobytes() in starts]
        assert len(mine) > 15
        for (here, there), (expected_here, expected_there) in zip(
            mine, pairs, strict=False
        ):  # in order, from the first
            np.testing.assert_array_equal(here, expected_here)
            np.testing.assert_array_equal(there, expected_there)
    images = sum(len(episode) + 2 for episodes in env.shown for episode in episodes)
    assert sum(len(block.frames) for block in blocks) == images  # one a step, and two more where an episode begins
