"""Environments that fail: what is learned from them happened, and happened once."""

from __future__ import annotations

import io
import sys
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest

from fever.envs.loop import LoopEnvs
from fever.envs.recovery import FailureRules
from fever.envs.source import EnvContext, EnvSource
from fever.errors import ContractError, FeverError
from fever.policy.policy import network_for
from fever.sampling import worker_actor
from fever.sampling.sampler import Sampler
from fever.sampling.spec import Fragment, SamplerSpec
from fever.sampling.worker_actor import Output, WorkerActor
from tests.environments import NextStepCounters, SameStepCounters, UnreliableEnv
from tests.factories import make_task, random_weights
from tests.replay.helpers import explore, make_explorer, resolve
from tests.sampling.helpers import player

RULES = FailureRules(rebuild=True, strict_start=False)
LIMIT = 20  # steps of an episode that is not cut
FAULTS = pytest.mark.parametrize("fault", ["raise", "reward", "observation", "reset"])


@pytest.fixture(autouse=True)
def the_same_luck(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unreliable environments draw their luck from their number in this process."""
    monkeypatch.setattr(UnreliableEnv, "made", 0)


def sample(target: Any, kwargs: dict[str, Any], count: int = 8, recurrent: str = "none") -> list[Fragment]:
    """Consecutive fragments of 50 steps."""
    task = make_task(EnvSource(target, kwargs | ({"chance": 0.0} if kwargs else {})))
    network = network_for(task.observation, task.action, hidden=(8,), recurrent=recurrent, recurrent_size=4)
    spec = SamplerSpec(EnvSource(target, kwargs), network, 2, 50, 0.9, 0, failure_rules=RULES)
    sampler, params = Sampler(spec, task.observation, task.action), random_weights(network)
    try:
        return [sampler.sample(params) for _ in range(count)]
    finally:
        sampler.close()


def joined(fragments: list[Fragment]) -> dict[str, np.ndarray]:
    """All rows one after the other, with the last observation behind them."""
    names = ("rewards", "terminated", "truncated", "valid", "bootstrap", "discounted")
    arrays = {name: np.concatenate([part.arrays[name] for part in fragments]) for name in names}
    for name in ("observations", "first"):
        parts = [part.arrays[name][:-1] for part in fragments]
        arrays[name] = np.concatenate([*parts, fragments[-1].arrays[name][-1:]])
    return arrays


@FAULTS
def test_fragments_hold_what_happened_and_nothing_twice(fault: str) -> None:
    fragments = sample(UnreliableEnv, {"fault": fault, "chance": 0.3 if fault == "reset" else 0.1, "after": 10})
    arrays = joined(fragments)
    failures = [failure for part in fragments for failure in part.failures]
    assert len(failures) > 5
    assert (len(failures) > (~arrays["valid"]).sum()) == (fault == "reset")  # the step before a failing reset is real
    assert all(np.isfinite(arrays[name]).all() for name in ("observations", "rewards", "discounted"))
    seen: Counter[tuple[float, ...]] = Counter()
    cuts = 0
    for t, index in np.ndindex(arrays["valid"].shape):
        here, there = (arrays["observations"][row, index] for row in (t, t + 1))
        assert arrays["first"][t, index] == (here[2] == 0)
        if not arrays["valid"][t, index]:
            assert there[0] > here[0] or (here == there).all()  # another environment, or one that was made for
            assert there[2] == 0  # all steps after a NaN, at its beginning
            continue
        seen[tuple(here)] += 1
        assert arrays["rewards"][t, index] == here[2] + 1
        assert not arrays["terminated"][t, index]
        going = np.isnan(arrays["bootstrap"][t, index])
        assert going == (here[2] + 1 < LIMIT)
        if going:
            assert there.tolist() == [here[0], here[1], here[2] + 1]
            inside = (t + 1) % 50 != 0  # the last row of a fragment is bootstrapped from in any case
            cut = t + 1 < len(arrays["valid"]) and not arrays["valid"][t + 1, index]
            assert arrays["truncated"][t, index] == (cut and inside)
            cuts += cut
    assert max(seen.values()) == 1
    assert bool(cuts) == (fault != "reset")
    assert sum(part.steps for part in fragments) == arrays["valid"].sum() == sum(seen.values())
    episodes = [episode for part in fragments for episode in part.episodes]
    assert {(episode.length, episode.total_reward) for episode in episodes} == {(LIMIT, LIMIT * (LIMIT + 1) / 2)}


def test_the_running_return_and_the_recurrent_state_begin_anew_after_a_failure() -> None:
    fragments = sample(UnreliableEnv, {"chance": 0.5, "after": 10}, 20, recurrent="gru")
    arrays = joined(fragments)
    after = arrays["first"][:-1] & arrays["valid"]
    np.testing.assert_array_equal(arrays["discounted"][after], arrays["rewards"][after])
    failed = [(~part.arrays["valid"][-1], following) for part, following in pairwise(fragments)]
    assert any(rows.any() for rows, _ in failed)
    assert not any(following.arrays["state"][rows].any() for rows, following in failed)


class NextStepFailing(NextStepCounters):
    """Counters that raise in every 17th step of all of them."""

    steps = 0

    def step(self, actions: Any) -> Any:
        type(self).steps += 1
        if self.steps % 17 == 0:
            raise OSError("the device is gone")
        return super().step(actions)


class SameStepFailing(SameStepCounters, NextStepFailing):
    """The same in the other mode."""


@pytest.mark.parametrize("target", [NextStepFailing, SameStepFailing])
def test_all_of_a_vector_environment_is_made_anew(target: Any) -> None:
    target.steps = 0
    arrays = joined(sample(target, {}, 2))
    failed = np.zeros(100, bool)
    failed[16::17] = True
    for t, index in np.ndindex(arrays["valid"].shape):
        here, there = (arrays["observations"][row, index] for row in (t, t + 1))
        assert arrays["first"][t, index] == (here[2] == 0)
        if failed[t]:
            assert not arrays["valid"][t, index]
            assert there.tolist() == [index, 0, 0]
        elif arrays["valid"][t, index]:
            ended = arrays["terminated"][t, index] or not np.isnan(arrays["bootstrap"][t, index])
            if not ended or target is NextStepFailing:
                assert there.tolist() == [index, here[1], here[2] + 1]
            cut = not ended and t < 99 and failed[t + 1] and t != 49
            length = 4 if here[1] % 2 else 3 + index
            assert arrays["truncated"][t, index] == (cut or bool(here[1] % 2 and here[2] + 1 == length))


@FAULTS
@pytest.mark.parametrize("n_step", [1, 3])
def test_transitions_hold_what_happened_and_nothing_twice(fault: str, n_step: int) -> None:
    kwargs = {"fault": fault, "chance": 0.3 if fault == "reset" else 0.1, "after": 10}
    explorer = make_explorer(UnreliableEnv, n_step, kwargs=kwargs, failure_rules=RULES)
    blocks, reports = explore(explorer, [7] * 60)
    rows, gamma = resolve(blocks), explorer.exploration.gamma
    failures = sum(len(report.failures) for report in reports)
    assert failures > 5
    seen = Counter(tuple(row.observation) for row in rows)
    assert max(seen.values()) == 1
    assert len(rows) > sum(report.steps for report in reports) - 2 * (n_step + 1)
    lengths: Counter[int] = Counter()
    for row in rows:
        number, episode, count = row.observation
        length = int(row.following[2] - count)
        assert row.following.tolist() == [number, episode, count + length]
        assert 1 <= length <= n_step
        assert row.discount == pytest.approx(gamma**length)  # never terminated: always bootstrapped from
        assert row.reward == pytest.approx(sum(gamma**k * (count + k + 1) for k in range(length)))
        lengths[length] += length < n_step and row.following[2] < LIMIT
    assert n_step == 1 or fault == "reset" or sum(lengths.values()) > 5  # windows that a failure has cut


def test_rollouts_are_cut_where_the_environment_fails() -> None:
    runner, params = player(UnreliableEnv, kwargs={"chance": 0.1, "after": 10}, failure_rules=RULES)
    parts = runner.play(params, 0, list(range(40)))
    cut = [part for part in parts if not part.episodes]
    assert len(cut) > 5
    assert {part.steps for part in parts if part.episodes} == {LIMIT}
    assert sum(len(part.failures) for part in parts) >= len(cut)
    for part in parts:
        observations = part.arrays["observations"][:, 0]
        assert observations[:, 2].tolist() == list(range(part.steps + 1))  # up to the last one that is known
        assert len(np.unique(observations[:, :2], axis=0)) == 1
        assert part.arrays["truncated"][:, 0].tolist() == [False] * (part.steps - 1) + [True]
        assert np.isfinite(part.arrays["bootstrap"][-1, 0])
        assert part.arrays["valid"].all()
    runner.close()


def test_without_care_the_first_failure_is_raised() -> None:
    runner, params = player(UnreliableEnv, kwargs={"chance": 1.0, "after": 5})
    with pytest.raises(ValueError, match="the robot fell over"):
        runner.play(params, 0, [0])


def test_an_environment_that_always_fails_is_given_up() -> None:
    runner, params = player(UnreliableEnv, kwargs={"chance": 1.0}, failure_rules=RULES)
    made = UnreliableEnv.made
    with pytest.raises(ValueError, match="the robot fell over"):
        runner.play(params, 0, [0])
    assert UnreliableEnv.made == made + 2


def test_a_contract_broken_in_the_first_steps_is_raised_at_once() -> None:
    runner, params = player(
        UnreliableEnv, kwargs={"fault": "reward", "chance": 1.0}, failure_rules=FailureRules(rebuild=True)
    )
    made = UnreliableEnv.made
    with pytest.raises(ContractError, match="at step 1 of rollout 0: the reward is NaN"):
        runner.play(params, 0, [0])
    assert UnreliableEnv.made == made


def test_where_environments_run_is_in_messages() -> None:
    assert (EnvContext(0).where, EnvContext(2).where) == ("", " of worker 2")


class BadStart(gym.Env):
    """Raises in its 15th step, and begins with NaN when it is made the second time."""

    observation_space, action_space = gym.spaces.Box(-1, 1, (1,)), gym.spaces.Discrete(2)
    made = 0

    def __init__(self) -> None:
        BadStart.made, self.steps = BadStart.made + 1, 0
        self.number = BadStart.made

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return np.full(1, np.nan if self.number == 4 else 0.5, np.float32), {}

    def step(self, action: Any) -> Any:
        self.steps += 1
        if self.number == 3 and self.steps == 15:  # the first was made to look at its spaces
            raise RuntimeError("the engine has ended")
        return np.full(1, 0.5, np.float32), 1.0, False, self.steps % 20 == 0, {}


def test_an_environment_that_begins_with_nan_is_made_anew_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BadStart, "made", 0)
    fragments = sample(BadStart, {}, count=2)
    assert all(np.isfinite(part.arrays["observations"]).all() for part in fragments)
    sentences = [failure.sentence for part in fragments for failure in part.failures]
    assert ["raised RuntimeError" in sentences[0], "the first observation is NaN" in sentences[1]] == [True, True]


class BadReset(gym.Env):
    """Episodes of five steps that end with reward -100. Reset `bad` of an environment returns NaN or another
    shape, or raises, once."""

    observation_space, action_space = gym.spaces.Box(-1, 10, (1,)), gym.spaces.Discrete(2)
    bad, done = 3, False

    def __init__(self, how: str) -> None:
        self.how, self.episode, self.count = how, 0, 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.episode, self.count = self.episode + 1, 0
        observation = np.zeros(1, np.float32)
        if self.episode == self.bad and not BadReset.done:
            BadReset.done = True
            if self.how == "raise":
                raise ConnectionError("the simulator did not answer")
            observation = np.zeros(2, np.float32) if self.how == "shape" else observation * np.nan
        return observation, {}

    def step(self, action: Any) -> Any:
        self.count += 1
        ends = self.count == 5
        return np.full(1, self.count, np.float32), -100.0 if ends else 1.0, ends, False, {}


@pytest.mark.parametrize("bad", [3, 11])  # within a fragment, and in its last step
@pytest.mark.parametrize("how", ["raise", "nan", "shape"])
def test_a_bad_reset_does_not_take_the_episode_before_with_it(
    how: str, bad: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(BadReset, "bad", bad)
    monkeypatch.setattr(BadReset, "done", True)
    task = make_task(EnvSource(BadReset, {"how": how}))
    monkeypatch.setattr(BadReset, "done", False)
    network = network_for(task.observation, task.action, hidden=(8,))
    spec = SamplerSpec(EnvSource(BadReset, {"how": how}), network, 1, 50, 0.9, 0, failure_rules=RULES)
    sampler, params = Sampler(spec, task.observation, task.action), random_weights(network)
    fragments = [sampler.sample(params) for _ in range(3)]
    sampler.close()
    arrays = joined(fragments)
    assert sum(len(part.failures) for part in fragments) == 1
    assert all(np.isfinite(arrays[name]).all() for name in ("observations", "rewards", "discounted"))
    episodes = [episode for part in fragments for episode in part.episodes]
    assert {(episode.length, episode.total_reward) for episode in episodes} == {(5, -96.0)}
    ends = arrays["rewards"][:, 0] == -100
    np.testing.assert_array_equal(arrays["terminated"][:, 0], ends)
    assert arrays["valid"][ends].all()
    assert not arrays["truncated"][arrays["valid"]].any()
    assert len(episodes) == ends.sum() >= 20
    lost = 0 if bad == 11 or how != "nan" else 50 - 5 * (bad - 1)  # NaN is seen at a fragment's end
    assert (~arrays["valid"]).sum() == lost


class BusyPort(gym.Env):
    """Cannot be made a second and a third time, because the first still has what it needs."""

    observation_space, action_space = gym.spaces.Box(-1, 1, (1,)), gym.spaces.Discrete(2)
    made = 0

    def __init__(self) -> None:
        BusyPort.made += 1
        if self.made in (2, 3):
            raise OSError("address already in use")


@pytest.mark.parametrize(("rules", "works"), [(RULES, True), (FailureRules(rebuild=True), False)])
def test_environments_of_a_worker_that_replaces_another_may_fail_at_first(
    rules: FailureRules, works: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(BusyPort, "made", 0)
    monkeypatch.setattr("fever.envs.recovery.WAITS", (0.01, 0.01))
    source, context = EnvSource(BusyPort), EnvContext(failure_rules=rules)
    if works:
        LoopEnvs(source, 2, context).close()
        assert BusyPort.made == 4
    else:
        with pytest.raises(FeverError, match="address already in use"):
            LoopEnvs(source, 2, context)


class MaskedStart(gym.Env):
    """Has an action mask in its info. Reset `at` of all raises, lacks the mask, or has another shape."""

    observation_space, action_space = gym.spaces.Box(0, 1e9, (1,)), gym.spaces.Discrete(2)
    resets, at = 0, 0

    def __init__(self, how: str) -> None:
        self.how = how

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        MaskedStart.resets += 1
        observation, info = np.full(1, self.np_random.integers(1000), np.float32), {"action_mask": np.ones(2, np.int8)}
        if MaskedStart.resets == self.at:
            if self.how == "raise":
                raise ConnectionError("the simulator did not answer")
            return (np.zeros(3, np.float32), info) if self.how == "shape" else (observation, {})
        return observation, info

    def step(self, action: Any) -> Any:
        return np.zeros(1, np.float32), 1.0, True, False, {"action_mask": np.ones(2, np.int8)}


@pytest.mark.parametrize("how", ["raise", "mask", "shape"])
def test_a_seeded_reset_that_fails_is_tried_again_with_its_seed(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MaskedStart, "resets", 0)
    monkeypatch.setattr(MaskedStart, "at", 5)  # the second of the second round
    envs = LoopEnvs(EnvSource(MaskedStart, {"how": how}), 3, EnvContext(failure_rules=RULES), autoreset=False)
    first = envs.reset([7, 8, 9])
    envs.narrow(np.array([True, False, False]))
    np.testing.assert_array_equal(envs.reset([7, 8, 9]), first)
    assert len(envs.recovery.take()) == 1
    envs.close()


@pytest.mark.parametrize("how", ["none", "closed"])
def test_an_environment_may_take_standard_output_away(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    closed = io.StringIO()
    closed.close()
    worker = object.__new__(WorkerActor)
    worker.output = Output("", {})
    monkeypatch.setattr(sys, "stdout", None if how == "none" else closed)
    assert worker._new_output() == Output("", {})


def test_a_file_of_output_that_has_become_long_begins_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_actor, "FILE_BYTES", 100)
    path = tmp_path / "worker.out"
    worker = object.__new__(WorkerActor)
    worker.output = Output("", {str(path): 0})
    with open(path, "ab", buffering=0) as file:
        for number in range(50):
            file.write(f"line {number}\n".encode())
            assert worker._new_output().text == f"line {number}\n"
            assert path.stat().st_size < 100
    path.write_text("last words\n")  # of a worker that died before its pool knew that the file began anew
    assert Output.read({str(path): 99}).text == "last words\n"
