"""Whole episodes: what one rollout holds, and that a batch of them is the same whoever makes it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from fever.errors import ContractError
from fever.policy import distribution_for
from fever.sampling.episodes import ROLLOUT_STREAM
from fever.sampling.spec import Fragment
from tests.environments import (
    BrokenEnv,
    CounterEnv,
    DrawnEnv,
    IdentityEnv,
    InfoEnv,
    NextStepCounters,
    SameStepCounters,
    TimeLimitEnv,
)
from tests.sampling.helpers import (
    SIZES,
    assert_same,
    player,
    seed_of,
)


def same(here: Fragment, there: Fragment) -> bool:
    return here.steps == there.steps and all(
        np.array_equal(here.arrays[name], there.arrays[name], equal_nan=True)
        for name in ("observations", "actions", "rewards")
    )


# One episode.


@pytest.mark.parametrize("target", [CounterEnv, NextStepCounters])
def test_a_rollout_holds_one_whole_episode(target: Any) -> None:
    runner, params = player(target, worker_index=0)
    ended, cut = runner.play(params, 7, [0, 1])
    for part, length, episode in ((ended, 3, 0), (cut, 4, 1)):
        arrays = part.arrays
        assert {
            name: len(array) - SIZES.get(name, 0) for name, array in arrays.items() if name != "state"
        } == dict.fromkeys(arrays.keys() - {"state"}, length)
        steps = np.arange(length + 1)
        expected = np.stack([0 * steps, 0 * steps + episode, steps], 1)[:, None]
        np.testing.assert_array_equal(arrays["observations"], expected)
        np.testing.assert_array_equal(arrays["rewards"], steps[1:, None])
        np.testing.assert_array_equal(arrays["first"][:, 0], steps == 0)
        last = steps[1:, None] == length
        np.testing.assert_array_equal(arrays["terminated"], last & (part is ended))
        np.testing.assert_array_equal(arrays["truncated"], last & (part is cut))
        assert arrays["valid"].all()
        running = np.array([sum(0.9 ** (t - s) * (s + 1) for s in range(t + 1)) for t in range(length)])
        np.testing.assert_allclose(arrays["discounted"][:, 0], running, rtol=1e-6)
        outputs, _ = runner.spec.network.act(params, arrays["observations"][:-1, 0], arrays["state"])
        log_probs = distribution_for({"type": "discrete", "sizes": [2], "starts": [0]}).log_prob(
            outputs, arrays["actions"][:, 0]
        )
        np.testing.assert_allclose(arrays["log_probs"][:, 0], log_probs, rtol=1e-4, atol=1e-5)
        assert (arrays["actions"].shape, arrays["actions"].dtype) == ((length, 1, 1), np.int32)
        assert {array.dtype for array in (arrays["rewards"], arrays["log_probs"], arrays["observations"])} == {
            np.dtype(np.float32)
        }
        assert arrays["state"].shape == (1, 0)
        (book,) = part.episodes
        assert (book.total_reward, book.length, book.env_index, book.info) == (
            length * (length + 1) / 2,
            length,
            0,
            {"steps": length},
        )
        assert (part.steps, part.version, part.worker_index) == (length, 7, 0)
        assert part.seconds.keys() == {"env", "inference", "total"}
    assert np.isnan(ended.arrays["bootstrap"]).all()
    value = runner.spec.network.values(params, np.float32([[0, 1, 4]]), np.zeros((1, 0)))[0]
    np.testing.assert_array_equal(cut.arrays["bootstrap"][:, 0], np.float32([np.nan, np.nan, np.nan, value]))


@pytest.mark.parametrize("parity", [0, 1], ids=["terminated", "truncated"])
def test_the_last_observation_is_that_before_a_reset_in_the_same_step(parity: int) -> None:
    """Such an environment resets itself once more, so that all its rollouts here are its even or its odd episodes."""
    runner, params = player(SameStepCounters)
    if parity:
        runner.envs.reset([0])
    for part in runner.play(params, 0, [0, 1]):
        length = 3 + parity
        assert part.steps == length
        np.testing.assert_array_equal(part.arrays["observations"][:, 0, 2], np.arange(length + 1))
        assert len(set(part.arrays["observations"][:, 0, 1])) == 1
        assert part.episodes[0].info == {"steps": length}
        value = runner.spec.network.values(params, part.arrays["observations"][-1], np.zeros((1, 0)))[0]
        assert part.arrays["truncated"][-1, 0] == parity
        np.testing.assert_equal(part.arrays["bootstrap"][-1, 0], value if parity else np.float32(np.nan))


@pytest.mark.parametrize("target", [CounterEnv, NextStepCounters, SameStepCounters])
def test_a_limit_cuts_and_bootstraps(target: Any) -> None:
    runner, params = player(target, limit=2)
    for part in runner.play(params, 0, [0, 1, 2]):
        arrays = part.arrays
        assert (part.steps, part.episodes[0].length, part.episodes[0].total_reward) == (2, 2, 3)
        np.testing.assert_array_equal(arrays["observations"][:, 0, 2], [0, 1, 2])
        assert arrays["truncated"][:, 0].tolist() == [False, True]
        assert not arrays["terminated"].any()
        value = runner.spec.network.values(params, arrays["observations"][-1], np.zeros((1, 0)))[0]
        np.testing.assert_array_equal(arrays["bootstrap"][:, 0], np.float32([np.nan, value]))


def test_a_limit_that_is_the_episode_s_length_changes_nothing() -> None:
    (runner, params), (limited, _) = player(), player(limit=3)
    here, there = runner.play(params, 0, [0])[0], limited.play(params, 0, [0])[0]
    assert_same([here], [there])
    assert here.arrays["terminated"][-1, 0]


def test_without_a_discount_there_are_no_running_returns() -> None:
    runner, params = player(gamma=None)
    assert "discounted" not in runner.play(params, 0, [0])[0].arrays


def test_an_episode_keeps_the_scalars_of_its_last_info() -> None:
    runner, params = player(InfoEnv)
    (episode,) = runner.play(params, 0, [3])[0].episodes
    assert episode.info == {"score": 50, "success": 1, "speed": 0.5, "distance": 2.5}


@pytest.mark.parametrize("target", [CounterEnv, NextStepCounters])
def test_every_rollout_resets_once(target: Any) -> None:
    runner, params = player(target)
    parts = runner.play(params, 0, list(range(5)))
    assert [part.arrays["observations"][0, 0, 1] for part in parts] == [0, 1, 2, 3, 4]  # the count of resets


def test_long_episodes_draw_more_noise() -> None:
    runner, params = player(TimeLimitEnv, kwargs={"limit": 600})
    params = {name: 0 * value for name, value in params.items()}  # both actions are as likely, whatever is observed
    actions = runner.play(params, 0, [0])[0].arrays["actions"][:, 0, 0]
    assert len(actions) == 600
    assert 0.4 < actions.mean() < 0.6
    assert not np.array_equal(actions[:256], actions[256:512])


@pytest.mark.parametrize("target", [DrawnEnv, IdentityEnv])
def test_a_number_is_a_rollout_whoever_makes_it_and_whenever(target: Any) -> None:
    (here, params), (there, _), (other, _) = (
        player(target),
        player(target, worker_index=3, generation=2),
        player(target, seed=1),
    )
    parts = here.play(params, 0, [0, 1, 2, 3, 4])
    again = there.play(params, 0, [4, 2, 0])
    assert_same([parts[4], parts[2], parts[0]], again)
    assert {part.worker_index for part in again} == {3}
    for index, part in enumerate(parts):
        assert not any(same(part, one) for one in parts[:index])
    assert not any(same(*pair) for pair in zip(parts, other.play(params, 0, [0, 1, 2, 3, 4]), strict=True))


def test_the_seed_of_a_rollout_has_a_stream_of_its_own() -> None:
    """Environment and actions must not share random numbers."""
    seeds = [seed_of(number) for number in range(100)]
    assert len(set(seeds)) == 100
    assert not set(seeds) & {
        int(np.random.SeedSequence([0, ROLLOUT_STREAM, n]).generate_state(1)[0]) for n in range(100)
    }


@pytest.mark.parametrize(
    ("fault", "at", "name", "step"),
    [("nan_observation", 3, "observation", 3), ("nan_reward", 3, "reward", 3), ("nan_observation", 5, "observation", 5),
     ("nan_reward", 5, "reward", 5), ("nan_reward", 1, "reward", 1), ("nan_observation", 8, "observation", 3),
     ("nan_reward", 8, "reward", 3)],
)  # fmt: skip
def test_what_is_not_finite_is_refused_with_rollout_and_step(fault: str, at: int, name: str, step: int) -> None:
    runner, params = player(BrokenEnv, kwargs={"fault": fault, "at": at, "length": 5})
    number = 40 + (at > 5)  # the eighth step of its life is the third of the second rollout
    with pytest.raises(
        ContractError,
        match=f"^tests.environments:BrokenEnv .* at step {step} of rollout {number}: the {name} is NaN$",
    ):
        runner.play(params, 0, [40, 41])


def test_an_environment_with_other_spaces_is_refused() -> None:
    runner, params = player(IdentityEnv)
    runner.spaces = (runner.spaces[0], {"type": "discrete", "sizes": [9], "starts": [0]})
    with pytest.raises(ContractError, match="has other spaces in worker 0 than the network was made for"):
        runner.play(params, 0, [0])
