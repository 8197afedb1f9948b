from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fever.algos.returns import VTrace, gae, vtrace

compiled_gae, compiled_vtrace = jax.jit(gae), jax.jit(vtrace)

# Five steps of one environment: step 1 terminates, step 3 is truncated, step 4 begins a third episode.
REWARDS = [1.0, 2.0, 3.0, 4.0, 5.0]
VALUES = [10.0, 20.0, 30.0, 40.0, 50.0]
NEXT_VALUES = [20.0, 99.0, 40.0, 60.0, 80.0]  # the 99 must not be seen: nothing follows a termination
TERMINATED = [False, True, False, False, False]
TRUNCATED = [False, False, False, True, False]


def advantages(lam: float, rewards: list[float] = REWARDS, terminated: list[bool] = TERMINATED) -> np.ndarray:
    columns = [np.array(row)[:, None] for row in (rewards, VALUES, NEXT_VALUES, terminated, TRUNCATED)]
    return np.asarray(compiled_gae(*map(jnp.asarray, columns), 0.5, lam))[:, 0]


def test_advantages_by_hand_with_a_termination_and_a_truncation() -> None:
    # delta_0 = 1 + 0.5 * 20 - 10 =  1     delta_1 = 2 - 20 = -18 (terminated)
    # delta_2 = 3 + 0.5 * 40 - 30 = -7     delta_3 = 4 + 0.5 * 60 - 40 = -6 (truncated: the value stays)
    # delta_4 = 5 + 0.5 * 80 - 50 = -5     decay: gamma * lambda = 0.5 * 0.8 = 0.4
    # A_4 = -5, A_3 = -6, A_2 = -7 + 0.4 * -6 = -9.4, A_1 = -18, A_0 = 1 + 0.4 * -18 = -6.2
    np.testing.assert_allclose(advantages(lam=0.8), [-6.2, -18.0, -9.4, -6.0, -5.0], rtol=1e-6)


def test_lambda_zero_is_the_one_step_error() -> None:
    np.testing.assert_allclose(advantages(lam=0.0), [1.0, -18.0, -7.0, -6.0, -5.0], rtol=1e-6)


def test_lambda_one_is_the_discounted_return_minus_the_value() -> None:
    # Returns, backwards: 5 + 40 = 45; 4 + 30 = 34; 3 + 0.5 * 34 = 20; 2; 1 + 0.5 * 2 = 2.
    np.testing.assert_allclose(advantages(lam=1.0), [2 - 10, 2 - 20, 20 - 30, 34 - 40, 45 - 50], rtol=1e-6)


def test_a_step_that_is_both_terminated_and_truncated_counts_as_terminated() -> None:
    found = advantages(lam=0.8, terminated=[False, True, False, True, False])
    assert found[3] == pytest.approx(4 - 40)


@pytest.mark.parametrize("end", [TERMINATED, TRUNCATED], ids=["terminated", "truncated"])
def test_no_reward_reaches_back_over_the_end_of_an_episode(end: list[bool]) -> None:
    last = end.index(True)
    rewards = [reward if t <= last else 1e6 for t, reward in enumerate(REWARDS)]
    np.testing.assert_array_equal(advantages(0.95, rewards=rewards)[: last + 1], advantages(0.95)[: last + 1])


def test_environments_do_not_mix() -> None:
    generator = np.random.default_rng(0)
    time, count = 20, 3
    rewards, values, next_values = generator.normal(size=(3, time, count)).astype(np.float32)
    terminated, truncated = generator.random((2, time, count)) < 0.1
    together = np.asarray(gae(*map(jnp.asarray, (rewards, values, next_values, terminated, truncated)), 0.9, 0.7))
    for index in range(count):
        advantage = 0.0
        for t in reversed(range(time)):
            delta = rewards[t, index] - values[t, index]
            if not terminated[t, index]:
                delta += 0.9 * next_values[t, index]
            ended = terminated[t, index] or truncated[t, index]
            advantage = delta if ended else delta + 0.63 * advantage
            assert together[t, index] == pytest.approx(advantage, rel=1e-4, abs=1e-5)


# V-trace. The policy that learns likes the actions of these five steps more, or less, than the one that took them.
RATIOS = [0.5, 4.0, 3.0, 0.5, 1.5]
TABLE = [RATIOS, REWARDS, VALUES, NEXT_VALUES, TERMINATED, TRUNCATED]
ends = pytest.mark.parametrize("end", [TERMINATED, TRUNCATED], ids=["terminated", "truncated"])


def trace(rows: list[Any], *settings: float) -> np.ndarray:
    """Goals and advantages of one environment, `[2, T]`."""
    return np.stack(compiled_vtrace(*(jnp.asarray(np.array(row)[:, None]) for row in rows), *settings))[..., 0]


def test_goals_and_advantages_of_vtrace_by_hand() -> None:
    # gamma = 0.5, lambda = 0.8, rho = min(ratio, 2), c = 0.8 * min(ratio, 1)
    #
    #     one-step error               rho   weighted   gamma * c    value_target                             advantage
    # 4   5 + 0.5 * 80 - 50 =  -5      1.5     -7.5     border       50 - 7.5             =  42.5     5 + 0.5 * 80 - 50
    # 3   4 + 0.5 * 60 - 40 =  -6      0.5     -3       truncated    40 - 3               =  37       4 + 0.5 * 60 - 40
    # 2   3 + 0.5 * 40 - 30 =  -7      2      -14       0.4          30 - 14 + 0.4 * -3   =  14.8     3 + 0.5 * 37 - 30
    # 1   2            - 20 = -18      2      -36       terminated   20 - 36              = -16       2 - 20
    # 0   1 + 0.5 * 20 - 10 =   1      0.5      0.5     0.2          10 + 0.5 + 0.2 * -36 =   3.3     1 - 0.5 * 16 - 10
    found = trace(TABLE, 0.5, 0.8, 2.0, 1.0)
    np.testing.assert_allclose(found[0], [3.3, -16, 14.8, 37, 42.5], rtol=1e-6)
    np.testing.assert_allclose(found[1], [-17, -18, -8.5, -6, -5], rtol=1e-6)


def test_each_limit_of_vtrace_is_for_its_own_ratio() -> None:
    # As above with rho at most 1 and c at most 3 (lambda = 1): weighted errors 0.5, -18, -7, -3, -5; gamma * c in
    # step 0 is 0.25, in step 2 it is 1.5.
    found = trace(TABLE, 0.5, 1.0, 1.0, 3.0)[0]
    np.testing.assert_allclose(found, [10 + 0.5 - 0.25 * 18, 20 - 18, 30 - 7 - 1.5 * 3, 40 - 3, 50 - 5], rtol=1e-6)
    np.testing.assert_array_equal(trace(TABLE, 0.5), trace(TABLE, 0.5, 1.0, 1.0, 1.0))  # as in the paper


def test_a_ratio_of_zero_leaves_the_value_as_it_is() -> None:
    found = trace([[0.0] * 5, *TABLE[1:]], 0.5)[0]
    np.testing.assert_array_equal(found, VALUES)


def experience(seed: int, time: int = 12, count: int = 4) -> tuple[np.ndarray, ...]:
    """Ratios and the rest of a made-up fragment: next values are those of the next rows, but not after a truncation."""
    generator = np.random.default_rng(seed)
    rewards, values, others = generator.normal(size=(3, time, count))
    terminated, truncated = generator.random((2, time, count)) < 0.15
    next_values = np.where(truncated, others, np.concatenate([values[1:], others[-1:]]))
    return np.exp(generator.normal(0, 0.7, (time, count))), rewards, values, next_values, terminated, truncated


def numpy_vtrace(arrays: tuple[np.ndarray, ...], *settings: float) -> Any:
    found = compiled_vtrace(
        *(jnp.asarray(array, None if array.dtype == bool else jnp.float32) for array in arrays), *settings
    )
    return VTrace(*map(np.asarray, found))


@pytest.mark.parametrize(
    "settings", [(0.9, 1.0, 1.0, 1.0), (0.97, 0.8, 1.5, 0.7), (0.8, 0.9, 0.6, 2.0), (1.0, 0.0, 1.0, 1.0)]
)
def test_vtrace_is_the_sum_of_the_paper(settings: tuple[float, ...]) -> None:
    """Equation 1 of Espeholt et al. 2018 as it is written, over the rows up to the end of the episode or fragment."""
    gamma, lam, delta_limit, trace_limit = settings
    for seed in range(3):
        arrays = experience(seed)
        ratios, rewards, values, next_values, terminated, truncated = arrays
        found = numpy_vtrace(arrays, *settings)
        value_targets = np.zeros_like(rewards)
        for s, env in reversed(list(np.ndindex(rewards.shape))):
            value_target, product, discount = values[s, env], 1.0, 1.0
            for t in range(s, len(rewards)):
                following = 0.0 if terminated[t, env] else next_values[t, env]
                delta = rewards[t, env] + gamma * following - values[t, env]
                value_target += discount * product * min(delta_limit, ratios[t, env]) * delta
                if terminated[t, env] or truncated[t, env]:
                    break
                discount, product = discount * gamma, product * lam * min(trace_limit, ratios[t, env])
            value_targets[s, env] = value_target
            over = terminated[s, env] or truncated[s, env] or s == len(rewards) - 1
            following = next_values[s, env] * (not terminated[s, env]) if over else value_targets[s + 1, env]
            advantage = rewards[s, env] + gamma * following - values[s, env]
            assert found.value_targets[s, env] == pytest.approx(value_target, rel=1e-4, abs=1e-5)
            assert found.advantages[s, env] == pytest.approx(advantage, rel=1e-4, abs=1e-5)


def test_vtrace_of_ones_own_experience_is_the_return_up_to_the_border() -> None:
    ratios, rewards, values, next_values, terminated, truncated = arrays = experience(5)
    found = numpy_vtrace((np.ones_like(ratios), *arrays[1:]), 0.9)
    returns = next_values[-1]  # what is seen of an episode that goes on behind the border
    for t in reversed(range(len(rewards))):
        later = np.where(truncated[t], next_values[t], returns)
        returns = rewards[t] + 0.9 * np.where(terminated[t], 0, later)
        np.testing.assert_allclose(found.value_targets[t], returns, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(found.advantages[t], returns - values[t], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("lam", [0.0, 0.5, 0.95, 1.0])
def test_goals_of_ones_own_experience_are_those_of_generalised_advantages(lam: float) -> None:
    ratios, *rest = experience(6)
    found = numpy_vtrace((np.ones_like(ratios), *rest), 0.9, lam, 1.7, 1.3)  # limits above 1 limit nothing
    np.testing.assert_allclose(
        found.value_targets, rest[1] + compiled_gae(*map(jnp.asarray, rest), 0.9, lam), rtol=1e-4, atol=1e-5
    )


@ends
def test_nothing_of_the_next_episode_reaches_vtrace(end: list[bool]) -> None:
    last = end.index(True)
    rows = [np.array(row) for row in TABLE]
    for row in rows[:4]:  # ratios, rewards, values, next values
        row[last + 1 :] = 1e6
    np.testing.assert_array_equal(trace(rows, 0.5)[:, : last + 1], trace(TABLE, 0.5)[:, : last + 1])
    if end is TERMINATED:  # nor the value of what is behind a termination
        rows[3][last] = 1e6
        np.testing.assert_array_equal(trace(rows, 0.5)[:, : last + 1], trace(TABLE, 0.5)[:, : last + 1])
