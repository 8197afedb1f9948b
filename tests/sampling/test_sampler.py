"""Most of these use the counters of `tests.environments`, whose episodes are known in advance:

environment 0: 3 steps, terminated; 4 steps, truncated; 3 steps, terminated; ...   rewards 1, 2, 3, ...
environment 1: 4 steps, terminated; 4 steps, truncated; 4 steps, terminated; ...   rewards 2, 4, 6, ...
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fever.algos.on_policy import unroll
from fever.envs.make import make_envs
from fever.envs.source import EnvContext, EnvSource
from fever.errors import ContractError
from fever.policy.policy import network_for
from fever.sampling.runner import scalars
from fever.sampling.sampler import Sampler
from fever.sampling.spec import Fragment, SamplerSpec
from tests.environments import (
    BrokenEnv,
    ClosingEnv,
    CounterEnv,
    IdentityEnv,
    ImageEnv,
    InfoEnv,
    NextStepCounters,
    SameStepCounters,
    TimeLimitEnv,
)
from tests.factories import COUNTERS, random_weights

SAME_STEP = pytest.mark.parametrize("target", [CounterEnv, SameStepCounters])


def make(target: Any, steps: int = 5, envs: int = 2, recurrent: str = "none", **settings: Any) -> Sampler:
    kwargs, fields = settings.pop("kwargs", {}), {"gamma": 0.5, "seed": 0, **settings}
    source = EnvSource(target, kwargs)
    probe = make_envs(source, 1, EnvContext())
    image = probe.observation["type"] == "image"
    network = network_for(
        probe.observation,
        probe.action,
        hidden=(8,),
        recurrent=recurrent,
        recurrent_size=6,
        log_std=0.0 if probe.action["type"] == "box" else None,
        convolutions=((4, 4, 2),) if image else (),
        convolution_features=8,
    )
    return Sampler(SamplerSpec(source, network, envs, steps, **fields), probe.observation, probe.action)


def fragments(sampler: Sampler, count: int = 1) -> list[Fragment]:
    return [sampler.sample(random_weights(sampler.spec.network)) for _ in range(count)]


def stream(parts: list[Fragment], name: str) -> np.ndarray:
    """The rows of successive fragments one after the other, with the last row of the last where there is one more."""
    rows = [part.arrays[name][: len(part.arrays["rewards"])] for part in parts]
    return np.concatenate([*rows, parts[-1].arrays[name][len(rows[-1]) :]])


# Shapes, and what belongs to what.


@pytest.mark.parametrize(
    ("target", "kwargs", "recurrent", "observation", "action", "state"),
    [
        (CounterEnv, {}, "none", ((3,), "float32"), ((1,), "int32"), 0),
        (NextStepCounters, {}, "lstm", ((3,), "float32"), ((1,), "int32"), 12),
        (IdentityEnv, {"action_space": "multidiscrete"}, "none", ((9,), "float32"), ((3,), "int32"), 0),
        (IdentityEnv, {"action_space": "box"}, "gru", ((2,), "float32"), ((2,), "float32"), 6),
        (ImageEnv, {"order": "chw"}, "none", ((10, 12, 3), "uint8"), ((1,), "int32"), 0),
    ],
)
def test_a_fragment_has_the_promised_shapes(
    target: Any, kwargs: Any, recurrent: str, observation: Any, action: Any, state: int
) -> None:
    (part,) = fragments(make(target, steps=4, envs=2, recurrent=recurrent, kwargs=kwargs))
    assert {name: (array.shape, str(array.dtype)) for name, array in part.arrays.items()} == {
        "observations": ((5, 2, *observation[0]), observation[1]),
        "first": ((5, 2), "bool"),
        "actions": ((4, 2, *action[0]), action[1]),
        "log_probs": ((4, 2), "float32"),
        "rewards": ((4, 2), "float32"),
        "terminated": ((4, 2), "bool"),
        "truncated": ((4, 2), "bool"),
        "valid": ((4, 2), "bool"),
        "bootstrap": ((4, 2), "float32"),
        "discounted": ((4, 2), "float32"),
        "state": ((2, state), "float32"),
    }


def test_a_fragment_says_who_made_it_with_which_weights_and_how_long_it_took() -> None:
    sampler = make(TimeLimitEnv, worker_index=3)
    part = sampler.sample(random_weights(sampler.spec.network), version=7)
    assert (part.worker_index, part.version) == (3, 7)
    assert part.host
    assert 0 < part.seconds["env"] + part.seconds["inference"] <= part.seconds["total"]


def test_rewards_belong_to_the_observation_and_the_action_of_their_row() -> None:
    (part,) = fragments(make(IdentityEnv, steps=20))  # reward 1 where the action is what the observation says
    right = part.arrays["observations"][:-1].argmax(-1) == part.arrays["actions"][..., 0]
    np.testing.assert_array_equal(part.arrays["rewards"], right)
    assert 0 < right.mean() < 1


@pytest.mark.parametrize("target", [CounterEnv, NextStepCounters])
@pytest.mark.parametrize("recurrent", ["none", "gru"])
def test_log_probabilities_are_those_that_the_learner_finds(target: Any, recurrent: str) -> None:
    import jax.numpy as jnp

    sampler = make(target, steps=6, recurrent=recurrent)
    network, params = sampler.spec.network, random_weights(sampler.spec.network)
    part = fragments(sampler, 2)[1]
    rows = {name: jnp.asarray(part.arrays[name]) for name in ("observations", "state", "first", "actions")}
    features = unroll(network, params, rows["observations"][:-1], rows["state"], rows["first"][:-1])
    outputs = network.policy(params, features, jnp)
    expected = sampler.distribution.log_prob(outputs, rows["actions"], jnp)
    np.testing.assert_allclose(part.arrays["log_probs"], expected, rtol=1e-4, atol=1e-5)


@COUNTERS
@pytest.mark.parametrize("recurrent", ["none", "lstm"])
def test_fragments_continue_where_the_last_one_ended(target: Any, recurrent: str) -> None:
    short, long = (make(target, steps, recurrent=recurrent) for steps in (5, 15))
    parts, whole = fragments(short, 3), fragments(long)
    for name in set(whole[0].arrays) - {"state"}:
        np.testing.assert_array_equal(stream(parts, name), stream(whole, name), err_msg=name)
    for before, after in pairwise(parts):
        for name in ("observations", "first"):
            np.testing.assert_array_equal(after.arrays[name][0], before.arrays[name][-1])
    assert [episode for part in parts for episode in part.episodes] == whole[0].episodes


# Where episodes end.


def test_phantom_steps_are_marked_and_the_episode_begins_after_them() -> None:
    # Environment 0: steps 0-2, phantom 3, steps 4-7, phantom 8, step 9 of a third episode.
    # Environment 1: steps 0-3, phantom 4, steps 5-8, phantom 9, and the third episode begins with row 10.
    parts = fragments(make(NextStepCounters, steps=5), 2)
    valid, first = stream(parts, "valid"), stream(parts, "first")
    assert [np.flatnonzero(~valid[:, index]).tolist() for index in range(2)] == [[3, 8], [4, 9]]
    assert [np.flatnonzero(first[:, index]).tolist() for index in range(2)] == [[0, 4, 9], [0, 5, 10]]
    assert [np.flatnonzero(stream(parts, "terminated")[:, index]).tolist() for index in range(2)] == [[2], [3]]
    assert [np.flatnonzero(stream(parts, "truncated")[:, index]).tolist() for index in range(2)] == [[7], [8]]


@SAME_STEP
def test_without_phantom_steps_every_row_is_valid_and_episodes_follow_at_once(target: Any) -> None:
    # Environment 0: steps 0-2, 3-6, 7-9. Environment 1: steps 0-3, 4-7, 8-.
    parts = fragments(make(target, steps=5), 2)
    assert stream(parts, "valid").all()
    first = stream(parts, "first")
    assert [np.flatnonzero(first[:, index]).tolist() for index in range(2)] == [[0, 3, 7, 10], [0, 4, 8]]


@pytest.mark.parametrize(("target", "expected"), [(CounterEnv, 20), (SameStepCounters, 20), (NextStepCounters, 16)])
def test_steps_leave_phantoms_out(target: Any, expected: int) -> None:
    (part,) = fragments(make(target, steps=10))  # two phantoms in each of two environments, where there are any
    assert part.steps == expected


def test_next_step_rows_are_followed_by_the_true_last_observation() -> None:
    (part,) = fragments(make(NextStepCounters, steps=10))
    observations = part.arrays["observations"]  # [environment, episode, steps taken in it]
    np.testing.assert_array_equal(observations[[3, 8], 0], [[0, 0, 3], [0, 1, 4]])
    np.testing.assert_array_equal(observations[[4, 9], 1], [[1, 0, 4], [1, 1, 4]])
    assert np.isnan(part.arrays["bootstrap"]).all()


@SAME_STEP
@pytest.mark.parametrize("recurrent", ["none", "lstm", "gru"])
def test_a_truncation_in_the_same_step_carries_the_value_of_the_true_last_observation(
    target: Any, recurrent: str
) -> None:
    sampler = make(target, steps=9, recurrent=recurrent)
    network, params = sampler.spec.network, random_weights(sampler.spec.network)
    (part,) = fragments(sampler)
    expected = np.full((9, 2), np.nan)
    for row, index in ((6, 0), (7, 1)):  # where the second episodes are truncated
        state = network.initial_state(1)
        for step in range(4):
            _, state = network.act(params, np.array([[index, 1, step]], np.float32), state)
        expected[row, index] = network.values(params, np.array([[index, 1, 4]], np.float32), state)[0]
        following = network.values(params, part.arrays["observations"][row + 1], network.initial_state(2))[index]
        assert abs(expected[row, index] - following) > 0.01  # the next episode's value is another
    np.testing.assert_allclose(part.arrays["bootstrap"], expected, rtol=1e-4, atol=1e-6)


@COUNTERS
def test_every_kind_of_vectorisation_gives_the_same_episodes(target: Any) -> None:
    # Environment 0: 1 + 2 + 3 = 6 in 3 steps, 6 + 4 = 10 in 4. Environment 1: twice 10 in 4 steps, always.
    expected = {0: [(6, 3), (10, 4), (6, 3), (10, 4)], 1: [(20, 4), (20, 4), (20, 4), (20, 4)]}
    episodes = [episode for part in fragments(make(target, steps=5), 4) for episode in part.episodes]
    for index in range(2):
        mine = [episode for episode in episodes if episode.env_index == index]
        assert [(episode.total_reward, episode.length) for episode in mine][:4] == expected[index]
        assert [episode.info for episode in mine] == [{"steps": episode.length} for episode in mine]


def test_cartpole_gives_one_reward_for_every_valid_step() -> None:
    parts = fragments(make("CartPole-v1", steps=100, envs=4), 2)
    episodes = [episode for part in parts for episode in part.episodes]
    assert len(episodes) > 10
    assert all(episode.total_reward == episode.length for episode in episodes)
    np.testing.assert_array_equal(stream(parts, "rewards"), stream(parts, "valid"))


# Discount 0.5, rewards 1, 2, 3 | 1, 2, 3, 4 | 1: 1, 0.5 + 2, 1.25 + 3 | 1, 2.5, 4.25, 2.125 + 4 | 1
@pytest.mark.parametrize(
    ("target", "expected"),
    [
        (CounterEnv, [1, 2.5, 4.25, 1, 2.5, 4.25, 6.125, 1]),
        (SameStepCounters, [1, 2.5, 4.25, 1, 2.5, 4.25, 6.125, 1]),
        (NextStepCounters, [1, 2.5, 4.25, 0, 1, 2.5, 4.25, 6.125]),
    ],
)
def test_discounted_returns_run_over_borders_and_stop_where_episodes_end(target: Any, expected: list[float]) -> None:
    parts = fragments(make(target, steps=2), 4)
    np.testing.assert_allclose(stream(parts, "discounted")[:, 0], expected)


def test_info_scalars_are_kept_for_every_episode() -> None:
    (part,) = fragments(make(InfoEnv, steps=11, envs=1))
    wanted = {"score": 50.0, "success": 1.0, "speed": 0.5, "distance": 2.5}
    assert [(episode.length, episode.info) for episode in part.episodes] == [(5, wanted), (5, wanted)]


def test_only_single_numbers_are_scalars() -> None:
    info = {"a": True, "b": np.bool_(False), "c": np.int8(3), "d": [1.0], "e": np.ones(1), "f": np.array("x"), "g": "1"}
    assert scalars(info) == {"a": 1.0, "b": 0.0, "c": 3.0}


def test_an_info_that_is_no_dictionary_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TimeLimitEnv, "step", lambda self, action: (np.zeros(1, np.float32), 0.0, True, False, None))
    with pytest.raises(ContractError, match="TimeLimitEnv breaks its contract at step 1 of environment 0: info must"):
        fragments(make(TimeLimitEnv))


# What is refused.


@pytest.mark.parametrize("at", [1, 4, 5, 6, 10])  # fragments have five steps
@pytest.mark.parametrize("what", ["reward", "observation"])
def test_a_nan_is_refused_with_its_step_environment_and_worker(what: str, at: int) -> None:
    kwargs = {"fault": f"nan_{what}", "at": at, "only": 1}
    sampler = make(BrokenEnv, steps=5, envs=3, worker_index=2, kwargs=kwargs)
    fragments(sampler, (at - 1) // 5)
    message = rf":BrokenEnv breaks its contract at step {at} of environment 1 of worker 2: the {what} is NaN"
    with pytest.raises(ContractError, match=message):
        fragments(sampler)


@pytest.mark.parametrize(("reward", "said"), [(float("inf"), "infinite"), (None, "NaN")])
def test_rewards_that_are_not_finite_are_refused(reward: Any, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TimeLimitEnv, "step", lambda self, action: (np.zeros(1, np.float32), reward, False, False, {}))
    with pytest.raises(ContractError, match=f"at step 1 of environment 0 of worker 0: the reward is {said}"):
        fragments(make(TimeLimitEnv))


def test_a_nan_in_the_last_observation_of_an_episode_is_refused() -> None:
    sampler = make(BrokenEnv, steps=5, kwargs={"fault": "nan_observation", "at": 3, "length": 3})
    with pytest.raises(ContractError, match="at step 3 of environment 0 of worker 0: the observation is NaN"):
        fragments(sampler)


@pytest.mark.parametrize("which", ["observation", "action"])
def test_other_spaces_than_at_first_are_refused_and_the_environments_closed(which: str, tmp_path: Path) -> None:
    sampler = make(ClosingEnv, kwargs={"folder": tmp_path})
    spaces = {"observation": sampler.envs.observation, "action": sampler.envs.action}
    spaces[which] = {**spaces[which], "shape": [9]}
    with pytest.raises(ContractError, match="ClosingEnv has other spaces in worker 0 than the network was made for"):
        Sampler(sampler.spec, **spaces)
    assert {path.name for path in tmp_path.iterdir()} == {"closed-0", "closed-1"}


def test_a_reset_that_fails_closes_the_environments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sampler = make(ClosingEnv, kwargs={"folder": tmp_path})
    monkeypatch.setattr(ClosingEnv, "reset", lambda self, seed: None)
    with pytest.raises(ContractError, match=r"reset\(\) must return an observation"):
        Sampler(sampler.spec, sampler.envs.observation, sampler.envs.action)
    assert {path.name for path in tmp_path.iterdir()} == {"closed-0", "closed-1"}


def test_closing_a_sampler_closes_its_environments(tmp_path: Path) -> None:
    make(ClosingEnv, kwargs={"folder": tmp_path}).close()
    assert {path.name for path in tmp_path.iterdir()} == {"closed-0", "closed-1"}


# Seeds.

SEEDED = pytest.mark.parametrize(
    "build",
    [
        lambda **seeds: make(IdentityEnv, steps=20, kwargs={"action_space": "box"}, **seeds),
        lambda **seeds: make("CartPole-v1", steps=20, **seeds),
    ],
    ids=["loop", "native"],
)


@SEEDED
def test_the_same_seed_gives_identical_fragments(build: Callable[..., Sampler]) -> None:
    for here, there in zip(fragments(build(), 2), fragments(build(), 2), strict=True):
        assert here.episodes == there.episodes
        for name, array in here.arrays.items():
            np.testing.assert_array_equal(array, there.arrays[name], err_msg=name)


@SEEDED
@pytest.mark.parametrize("change", [{"seed": 1}, {"worker_index": 1}, {"generation": 1}], ids=str)
def test_another_seed_worker_or_start_gives_other_observations(build: Callable[..., Sampler], change: dict) -> None:
    (here,), (there,) = fragments(build()), fragments(build(**change))
    assert not np.isclose(here.arrays["observations"][0], there.arrays["observations"][0]).any()


def test_another_worker_draws_other_actions_from_the_same_observations() -> None:
    (here,), (there,) = (fragments(make(CounterEnv, steps=50, worker_index=index)) for index in (0, 1))
    np.testing.assert_array_equal(here.arrays["observations"], there.arrays["observations"])
    assert not np.array_equal(here.arrays["actions"], there.arrays["actions"])


def test_environments_of_one_sampler_differ() -> None:
    observations = fragments(make(IdentityEnv, kwargs={"action_space": "box"}))[0].arrays["observations"]
    assert not np.isclose(observations[:, 0], observations[:, 1]).any()
