from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from fever.returns import gae

# Five steps of one environment: step 1 terminates, step 3 is truncated, step 4 begins a third episode.
REWARDS = [1.0, 2.0, 3.0, 4.0, 5.0]
VALUES = [10.0, 20.0, 30.0, 40.0, 50.0]
NEXT_VALUES = [20.0, 99.0, 40.0, 60.0, 80.0]  # the 99 must not be seen: nothing follows a termination
TERMINATED = [False, True, False, False, False]
TRUNCATED = [False, False, False, True, False]


def advantages(lam: float, rewards: list[float] = REWARDS, terminated: list[bool] = TERMINATED) -> np.ndarray:
    columns = [np.array(row)[:, None] for row in (rewards, VALUES, NEXT_VALUES, terminated, TRUNCATED)]
    return np.asarray(gae(*map(jnp.asarray, columns), 0.5, lam))[:, 0]


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
    together = gae(*map(jnp.asarray, (rewards, values, next_values, terminated, truncated)), 0.9, 0.7)
    for index in range(count):
        advantage = 0.0
        for t in reversed(range(time)):
            delta = rewards[t, index] - values[t, index]
            if not terminated[t, index]:
                delta += 0.9 * next_values[t, index]
            ended = terminated[t, index] or truncated[t, index]
            advantage = delta if ended else delta + 0.63 * advantage
            assert together[t, index] == pytest.approx(advantage, rel=1e-4, abs=1e-5)
