from __future__ import annotations

from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AutoresetMode

from fever.envs.loop import LoopEnvs, close_all
from fever.envs.make import make_envs
from fever.envs.native import NativeEnvs
from fever.envs.source import EnvContext, EnvSource, make_env
from fever.envs.worker_count import time_steps
from fever.errors import ContractError, FeverError
from tests import environments
from tests.environments import (
    BrokenEnv,
    ClosingEnv,
    CounterEnv,
    DictEnv,
    FailingEnv,
    IdentityEnv,
    NextStepCounters,
    ReusingCounters,
    SameStepCounters,
    SimulatorEnv,
    TimeLimitEnv,
)

HERE = EnvContext()


def steps(envs: Any, count: int) -> list[Any]:
    """Reset, then take a number of steps with action 0."""
    envs.reset(list(range(envs.count)))
    return [envs.step(np.zeros(envs.count, np.int64)) for _ in range(count)]


# Stepping.


@pytest.mark.parametrize(
    ("target", "kind"),
    [("CartPole-v1", NativeEnvs), ("Pendulum-v1", LoopEnvs), (NextStepCounters, NativeEnvs), (CounterEnv, LoopEnvs)],
)
def test_native_vectorisation_is_used_where_there_is_one(target: Any, kind: type) -> None:
    envs = make_envs(EnvSource(target), 3, HERE)
    assert type(envs) is kind
    assert envs.count == 3
    assert len(envs.reset([1, 2, 3])) == 3
    envs.close()


@pytest.mark.parametrize(
    ("target", "expected"),
    [("CartPole-v1", True), (NextStepCounters, True), (SameStepCounters, False), (CounterEnv, False)],
)
def test_the_autoreset_mode_is_told(target: Any, expected: bool) -> None:
    assert make_envs(EnvSource(target), 1, HERE).next_step is expected


def test_a_vector_environment_that_never_resets_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(NextStepCounters, "metadata", {"autoreset_mode": AutoresetMode.DISABLED})
    with pytest.raises(FeverError, match="NextStepCounters has autoreset disabled"):
        make_envs(EnvSource(NextStepCounters), 1, HERE)


@pytest.mark.parametrize("target", [CounterEnv, SameStepCounters])
def test_a_reset_in_the_same_step_keeps_the_last_observation_and_info(target: Any) -> None:
    # Environment 0 terminates after 3 steps, environment 1 after 4; then a new episode (number 1) is at step 0.
    third, fourth = steps(make_envs(EnvSource(target), 2, HERE), 4)[2:]
    np.testing.assert_array_equal(third.observations, [[0, 1, 0], [1, 0, 3]])
    np.testing.assert_array_equal(third.terminated, [True, False])
    np.testing.assert_array_equal(third.truncated, [False, False])
    assert list(third.final) == list(third.infos) == [0]
    np.testing.assert_array_equal(third.final[0], [0, 0, 3])
    assert third.infos[0]["steps"] == 3
    np.testing.assert_array_equal(third.rewards, [3, 6])
    np.testing.assert_array_equal(fourth.observations, [[0, 1, 1], [1, 1, 0]])
    np.testing.assert_array_equal(fourth.final[1], [1, 0, 4])


def test_a_reset_in_the_next_step_gives_the_last_observation_first() -> None:
    third, fourth, fifth = steps(make_envs(EnvSource(NextStepCounters), 1, HERE), 5)[2:]
    assert (third.observations.tolist(), third.terminated.tolist()) == ([[0, 0, 3]], [True])
    assert (third.final, third.infos[0]["steps"]) == ({}, 3)
    assert (fourth.observations.tolist(), fourth.terminated.tolist()) == ([[0, 1, 0]], [False])
    assert fourth.infos == {}
    assert fifth.observations.tolist() == [[0, 1, 1]]


def test_every_environment_of_a_loop_gets_its_own_seed_and_action() -> None:
    envs = LoopEnvs(EnvSource(IdentityEnv, {"action_space": "discrete"}), 4, HERE)
    seen = envs.reset([5, 6, 5, 7]).argmax(1)
    alone = [LoopEnvs(EnvSource(IdentityEnv), 1, HERE).reset([seed])[0].argmax() for seed in (5, 6, 5, 7)]
    assert seen.tolist() == alone
    np.testing.assert_array_equal(envs.step(seen).rewards, np.ones(4))
    wrong = (np.array([env.observation for env in envs.envs]) + 1) % 3
    np.testing.assert_array_equal(envs.step(wrong).rewards, np.zeros(4))


def test_the_first_observations_are_the_callers_to_keep() -> None:
    envs = make_envs(EnvSource(ReusingCounters), 2, HERE)
    first = envs.reset([0, 1])
    envs.step(np.zeros(2, np.int64))
    assert first.tolist() == [[0, 0, 0], [1, 0, 0]]


def test_what_a_simulator_computes_in_another_process_is_no_waiting() -> None:
    envs = make_envs(EnvSource(SimulatorEnv, {"milliseconds": 20}), 1, HERE)
    try:
        step, computing = time_steps(envs)
    finally:
        envs.close()
    assert step > 0.015
    assert computing > 0.1  # a hundredth of it in this process


# Breaking the contract.

FAULTS = {
    "wrong_shape": r"the observation has shape \(4,\)",
    "wrong_dtype": "the observation has dtype <U1 and its space says numbers",
    "none_observation": r"the observation has shape \(\)",
    "four_values": r"step\(\) must return observation, reward \(a number\), terminated, truncated and info",
}


@pytest.mark.parametrize("length", [100, 3], ids=["in the middle", "at the end of an episode"])
@pytest.mark.parametrize(("fault", "message"), FAULTS.items())
def test_a_broken_contract_names_the_environment_the_step_and_the_fault(fault: str, message: str, length: int) -> None:
    envs = LoopEnvs(EnvSource(BrokenEnv, {"fault": fault, "at": 3, "only": 1, "length": length}), 3, HERE)
    steps(envs, 2)
    where = "tests.environments:BrokenEnv breaks its contract at step 3 of environment 1: "
    with pytest.raises(ContractError, match=where + message):
        envs.step(np.zeros(3, np.int64))


@pytest.mark.parametrize(("at", "step"), [(0, 0), (1, 5)], ids=["the first one", "within a step"])
@pytest.mark.parametrize("only", [0, 1])
def test_a_broken_reset_names_the_environment_and_the_step(only: int, at: int, step: int) -> None:
    envs = LoopEnvs(EnvSource(BrokenEnv, {"fault": "bad_reset", "at": at, "only": only, "length": 5}), 2, HERE)
    message = rf"at step {step} of environment {only}: reset\(\) must return an observation and an info dictionary"
    with pytest.raises(ContractError, match=message):
        steps(envs, 5)


@pytest.mark.parametrize(("at", "in_reset"), [(3, False), (0, True), (1, True)])
def test_an_error_of_gymnasiums_while_it_is_played_is_one_sentence(at: int, in_reset: bool) -> None:
    envs = LoopEnvs(EnvSource(FailingEnv, {"at": at, "in_reset": in_reset}), 2, HERE)
    with pytest.raises(FeverError, match=r"^tests\.environments:FailingEnv: the engine has ended$"):
        steps(envs, 5)


@pytest.mark.parametrize(
    ("final", "message"),
    [
        ({}, "so its info must have final_obs"),
        ({"final_obs": [np.zeros(4), None]}, r"the observation has shape \(4,\)"),
    ],
)
def test_a_reset_in_the_same_step_without_the_last_observation_is_refused(
    final: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = SameStepCounters.step
    monkeypatch.setattr(SameStepCounters, "step", lambda self, actions: (*step(self, actions)[:4], final))
    with pytest.raises(ContractError, match=f"SameStepCounters breaks its contract at step 3: .*{message}"):
        steps(make_envs(EnvSource(SameStepCounters), 2, HERE), 3)


@pytest.mark.parametrize("reward", ["much", np.zeros(2), {}], ids=["text", "two numbers", "dict"])
def test_a_reward_that_is_no_number_is_refused(reward: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TimeLimitEnv, "step", lambda self, action: (np.zeros(1, np.float32), reward, False, False, {}))
    with pytest.raises(ContractError, match=r"at step 1 of environment 0: step\(\) must return .*reward \(a number\)"):
        steps(LoopEnvs(EnvSource(TimeLimitEnv), 1, HERE), 1)


def break_part(monkeypatch: pytest.MonkeyPatch, change: Any) -> LoopEnvs:
    """Two Dict environments, of which the second gives changed observations."""
    envs = LoopEnvs(EnvSource(DictEnv), 2, HERE)
    envs.reset([0, 1])
    show = envs.envs[1]._show
    monkeypatch.setattr(envs.envs[1], "_show", lambda: change(show()))
    return envs


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda seen: {**seen, "cue": 9}, "in part 'cue', the observation has a value outside its discrete space"),
        (lambda seen: {**seen, "distraction": np.array(["a", "b"])}, "in part 'distraction', .* says numbers"),
        (lambda seen: {**seen, "distraction": np.zeros(3)}, r"in part 'distraction', the observation has shape \(3,\)"),
        (lambda seen: {"cue": seen["cue"]}, "the observation has no part 'distraction'"),
        (lambda seen: {**seen, "nested": {}}, "in part 'nested', the observation has no part 'flags'"),
        (lambda seen: None, "the observation has no part 'cue'"),
    ],
    ids=["value", "dtype", "shape", "missing part", "missing nested part", "none"],
)
def test_a_broken_part_of_an_observation_is_named(change: Any, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    envs = break_part(monkeypatch, change)
    with pytest.raises(ContractError, match=f"DictEnv breaks its contract at step 1 of environment 1: {message}"):
        envs.step(np.zeros(2, np.int64))


def test_a_broken_vector_environment_names_itself_and_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    envs = NativeEnvs(EnvSource(NextStepCounters), 2, HERE)
    steps(envs, 2)
    monkeypatch.setattr(envs.env, "_observe", lambda: np.zeros((2, 9), np.float32))
    with pytest.raises(ContractError, match=r"NextStepCounters breaks its contract at step 3: .* shape \(9,\)"):
        envs.step(np.zeros(2, np.int64))


# Closing.


def closed(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_every_environment_of_a_loop_is_closed(tmp_path: Path) -> None:
    LoopEnvs(EnvSource(ClosingEnv, {"folder": tmp_path}), 3, HERE).close()
    assert closed(tmp_path) == {"closed-0", "closed-1", "closed-2"}


def test_a_failure_in_the_middle_of_making_them_closes_those_before(tmp_path: Path) -> None:
    with pytest.raises(FeverError, match="this environment cannot be made"):
        LoopEnvs(EnvSource(ClosingEnv, {"folder": tmp_path, "fails": 2}), 4, HERE)
    assert closed(tmp_path) == {"closed-0", "closed-1"}


def test_environments_whose_space_is_refused_are_closed(tmp_path: Path) -> None:
    with pytest.raises(FeverError):
        LoopEnvs(EnvSource(ClosingEnv, {"folder": tmp_path, "action_space": spaces.Text(5)}), 2, HERE)
    assert closed(tmp_path) == {"closed-0", "closed-1"}


def test_a_vector_environment_whose_space_is_refused_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    monkeypatch.setattr(environments.Counter, "action_space", spaces.Sequence(spaces.Discrete(2)))
    monkeypatch.setattr(gym.vector.utils, "batch_space", lambda space, count: space)
    monkeypatch.setattr(NextStepCounters, "__del__", lambda self: None, raising=False)  # Gymnasium's may close it later
    monkeypatch.setattr(NextStepCounters, "close", lambda self: calls.append("closed"))
    with pytest.raises(FeverError, match="Sequence is not supported"):
        NativeEnvs(EnvSource(NextStepCounters), 2, HERE)
    assert calls == ["closed"]


def test_messages_name_an_environment_by_its_number_although_others_are_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    envs = LoopEnvs(EnvSource(CounterEnv), 3, HERE, autoreset=False)
    envs.reset([0, 1, 2])
    envs.narrow(np.array([False, True, True]))
    said: list[str] = []
    for env in envs.envs:
        step = env.step
        monkeypatch.setattr(env, "step", lambda action, step=step: said.append(envs.watch.describe()) or step(action))
        close = env.close
        monkeypatch.setattr(env, "close", lambda close=close: said.append(envs.watch.describe()) or close())
    envs.step(np.zeros(2, np.int64))
    envs.close()
    assert [text.rpartition("'s ")[2] for text in said] == [
        f"{call}() (environment {number})" for call in ("step", "close") for number in (1, 2)
    ]


@pytest.mark.parametrize("sticks", [0, 1])
def test_a_close_that_raises_does_not_keep_the_others_open(tmp_path: Path, sticks: int) -> None:
    envs = LoopEnvs(EnvSource(ClosingEnv, {"folder": tmp_path, "sticks": sticks}), 3, HERE)
    with pytest.raises(RuntimeError, match="does not like to be closed"):
        envs.close()
    assert closed(tmp_path) == {"closed-0", "closed-1", "closed-2"}


def test_closing_twice_closes_once(tmp_path: Path) -> None:
    envs = [make_env(EnvSource(ClosingEnv, {"folder": tmp_path}), HERE)]
    close_all(envs, HERE.watch("ClosingEnv"), [0])
    (tmp_path / "closed-0").unlink()
    close_all(envs, HERE.watch("ClosingEnv"), [0])
    assert closed(tmp_path) == set()


def test_a_close_that_raises_does_not_hide_why_an_environment_could_not_be_made(tmp_path: Path) -> None:
    with pytest.raises(FeverError, match="this environment cannot be made"):
        LoopEnvs(EnvSource(ClosingEnv, {"folder": tmp_path, "fails": 2, "sticks": 0}), 3, HERE)
