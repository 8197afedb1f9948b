"""Runs whose environments raise, hang, return NaN or cannot be closed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest

import fever
from fever.config import RunConfig
from fever.envs import recovery, watchdog
from fever.envs.loop import LoopEnvs
from fever.envs.recovery import Failure, FailureRules
from fever.envs.source import EnvContext, EnvSource
from fever.envs.watchdog import WATCHDOG
from fever.errors import TrainingError
from fever.runs.player import Player
from fever.runs.run import Run
from fever.system import process_state
from fever.training.display import Display
from fever.training.env_failures import HOUR, EnvFailures
from fever.training.trainer import Trainer
from tests.helpers import ROOT, wait_for

ENV = "tests.environments:UnreliableEnv"
FULL = 210.0  # the return of an episode that is not cut
SMALL = {"warmup": 100, "updates": 2, "batch": 4, "replay_ratio": 0.5}
SETTINGS: dict[str, dict[str, Any]] = {
    "ppo": {"steps": 64}, "trpo": {"timesteps_per_batch": 256}, "impala": {"steps": 64}, "dqn": SMALL, "sac": SMALL,
}  # fmt: skip


class Messages(Display):
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def message(self, text: str) -> None:
        self.said.append(text)


def trained(folder: Path, kwargs: dict[str, Any], algo: str = "ppo", steps: int = 800, **more: Any) -> Any:
    """A result, or the exception, and what the display was told."""
    display = Messages()
    config = RunConfig(
        env=ENV, env_kwargs=kwargs, algo=algo, envs=2, settings=SETTINGS[algo], stop={"steps": steps}, runs=str(folder),
        name="a", **more,
    )  # fmt: skip
    return Trainer(config, None, display).run(), display.said


@pytest.mark.parametrize("algo", SETTINGS)
def test_a_run_goes_on_though_environments_raise(tmp_path: Path, algo: str) -> None:
    kwargs = {"chance": 0.02, "after": 10, "continuous": algo == "sac"}
    result, said = trained(tmp_path, kwargs, algo, 1200)
    assert result.stop_reason == "steps"
    failures = result.run.metrics()[-1]["env_failures"]
    assert failures == result.summary["env_failures"] > 3
    assert {row["return"] for row in result.run.episodes()} == {FULL}  # an episode that was cut is none
    notes = [text for text in said if text.startswith("note: ")]
    assert len(notes) == 1
    assert f"{ENV}'s step() raised ValueError: the robot fell over (environment" in notes[0]
    log = (result.run.path / "log.txt").read_text()
    assert (log.count("Traceback"), log.count("step() raised ValueError")) == (1, failures)


def test_an_environment_that_calls_sys_exit_has_failed_like_others(tmp_path: Path) -> None:
    result, said = trained(tmp_path, {"fault": "exit", "chance": 0.02, "after": 10})
    assert (result.stop_reason, result.summary["env_failures"] > 0) == ("steps", True)
    assert "step() raised SystemExit: the licence is gone" in " ".join(said)
    with pytest.raises(TrainingError, match=r"UnreliableEnv called sys.exit\(the licence is gone\)"):
        trained(tmp_path / "b", {"fault": "exit", "chance": 1.0, "after": 3})


@pytest.mark.parametrize("algo", ["ppo", "dqn"])
def test_what_is_no_exception_is_a_failure_like_others(tmp_path: Path, algo: str) -> None:
    result, said = trained(tmp_path, {"fault": "panic", "chance": 0.02, "after": 10}, algo)
    assert (result.stop_reason, result.summary["env_failures"] > 0) == ("steps", True)
    assert "step() raised Panic: index out of bounds" in " ".join(said)
    with pytest.raises(TrainingError, match=r"UnreliableEnv: Panic: index out of bounds \(.*faults\.py"):
        trained(tmp_path / "b", {"fault": "panic", "chance": 1.0, "after": 3}, algo)


def test_too_many_failures_in_an_hour_end_the_run_with_everything_saved(tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match=r"--max-env-failures allows 3; the last one: .*the robot fell over"):
        trained(tmp_path, {"chance": 0.02, "after": 40}, steps=10**6, max_env_failures=3)
    run = Run.open("a", tmp_path)
    assert run.status == "failed"
    assert run.checkpoint().iteration == len(run.metrics()) > 0


def test_zero_failures_allowed_is_the_environments_own_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="the robot fell over"):
        trained(tmp_path, {"chance": 1.0, "after": 40}, max_env_failures=0)


def test_failures_of_more_than_an_hour_ago_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    failures, now = EnvFailures(2, print), [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    for now[0] in (0.0, 1.0, HOUR + 0.5):
        failures.note([Failure("it failed", "")])
        failures.check()
    assert failures.total == 3
    failures.note([Failure("it failed", "")])
    with pytest.raises(TrainingError, match="3 times within an hour"):
        failures.check()


def test_an_environment_that_cannot_be_made_again_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recovery, "WAITS", (0.01, 0.01))
    envs = LoopEnvs(EnvSource(ENV, {"chance": 1.0}), 1, EnvContext(failure_rules=FailureRules(rebuild=True)))
    envs.reset([0])
    calls: list[int] = []

    def make(*arguments: Any) -> Any:
        calls.append(1)
        raise OSError("no licence is free")

    monkeypatch.setattr("fever.envs.loop.make_env", make)
    with pytest.raises(TrainingError, match=r"failed and could not be made anew: OSError: no licence is free \("):
        envs.step([0])
    assert len(calls) == 3
    envs.close()


# Calls that hang.


@pytest.mark.parametrize("algo", ["ppo", "trpo", "dqn"])
def test_a_step_that_hangs_is_interrupted(tmp_path: Path, algo: str) -> None:
    before = signal.getsignal(signal.SIGALRM)
    began = time.monotonic()
    kwargs = {"fault": "hang", "chance": 1.0, "after": 150, "seconds": 1000}
    result, said = trained(tmp_path, kwargs, algo, 600, step_timeout=0.3)
    assert time.monotonic() - began < 100
    assert result.summary["env_failures"] >= 2
    assert any("step() (environment " in text and "took longer than 0.3 s" in text for text in said)
    assert {row["return"] for row in result.run.episodes()} == {FULL}
    assert signal.getsignal(signal.SIGALRM) == before


def test_a_handler_that_others_have_set_is_replaced_while_environments_are_watched() -> None:
    """Though environments of before, which nobody has closed, are watched as well."""
    before = signal.getsignal(signal.SIGALRM)
    old, new = watchdog.Watch("old", ""), watchdog.Watch("new", "", step=0.1)
    WATCHDOG.add(old)
    called: list[int] = []
    try:
        signal.signal(signal.SIGALRM, lambda number, frame: called.append(number))
        WATCHDOG.add(new)
        with pytest.raises(watchdog.EnvTimeout), new.calling("step"):
            time.sleep(10)
    finally:
        WATCHDOG.remove(new)
        WATCHDOG.remove(old)
        signal.signal(signal.SIGALRM, before)
    assert not called


def test_a_reset_has_a_limit_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    envs = LoopEnvs(
        EnvSource("tests.environments:TimeLimitEnv"), 2, EnvContext(failure_rules=FailureRules(True, None, 1.0))
    )
    slow = [0.0, 1000.0]
    reset = type(envs.envs[0]).reset
    monkeypatch.setattr(
        type(envs.envs[0]),
        "reset",
        lambda self, seed: (time.sleep(slow.pop() if slow else 0), reset(self, seed=seed))[1],
    )
    envs.reset([0, 1])
    assert [failure.sentence for failure in envs.recovery.take()] == [
        "tests.environments:TimeLimitEnv's reset() (environment 0) took longer than 1 s"
    ]
    envs.close()


def test_a_call_that_has_ended_is_not_interrupted() -> None:
    envs = LoopEnvs(EnvSource("tests.environments:TimeLimitEnv"), 1, EnvContext())
    watch = envs.watch
    watch.expected = (1, 0, "step")
    signal.pthread_kill(threading.main_thread().ident, signal.SIGALRM)  # the step has ended meanwhile
    time.sleep(0.01)
    assert watch.expected is None
    envs.close()


def test_a_call_that_cannot_be_interrupted_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(WATCHDOG, "on_stuck", said.append)
    monkeypatch.setattr(signal, "pthread_kill", lambda *arguments: None)  # as if it were in C
    envs = LoopEnvs(
        EnvSource(ENV, {"fault": "hang", "chance": 1.0, "seconds": 1.0}),
        1,
        EnvContext(failure_rules=FailureRules(True, 0.2)),
    )
    envs.reset([0])
    envs.step([0])
    envs.close()
    assert len(said) == 1
    assert "took longer than 0.2 s and cannot be interrupted; with --workers 1" in said[0]


def test_a_long_step_without_a_limit_is_said_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchdog, "WARN_SECONDS", 0.1)
    monkeypatch.setattr(watchdog, "MOST_SECONDS", 0.05)
    _, said = trained(tmp_path, {"fault": "hang", "chance": 1.0, "after": 60, "seconds": 0.3}, steps=128)
    assert sum("with --step-timeout SECONDS" in text for text in said) == 1


# Closing.


@pytest.mark.parametrize("close", ["raise", "panic", "hang", "exit"])
def test_a_close_that_fails_stops_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, close: str
) -> None:
    monkeypatch.setattr(watchdog, "CLOSE_SECONDS", 0.2)
    result, said = trained(tmp_path, {"chance": 0.01, "after": 10, "close": close}, steps=400)
    assert result.stop_reason == "steps"
    problems = {"raise": "RuntimeError: the simulator is gone", "hang": "close() (environment 0) took longer than"}
    problems |= {"panic": "close() raised Panic: already borrowed", "exit": "close() called sys.exit(3)"}
    problem = problems[close]
    first = next(text for text in caplog.messages if text.startswith("closing"))  # of the one that was tried
    assert problem in first
    assert any(text.startswith("not all environments were closed") and problem in text for text in said)
    scores = fever.evaluate(result.run, episodes=2)
    assert scores.returns.tolist() == [FULL] * 2


@pytest.mark.parametrize(("close", "expected"), [("hang", TimeoutError), ("panic", RuntimeError)])
def test_closing_has_a_limit_in_other_threads_as_well(
    monkeypatch: pytest.MonkeyPatch, close: str, expected: type[Exception]
) -> None:
    monkeypatch.setattr(watchdog, "CLOSE_SECONDS", 0.2)
    envs = LoopEnvs(EnvSource(ENV, {"close": close, "seconds": 60}), 1, EnvContext())
    failures: list[BaseException] = []

    def close_them() -> None:
        try:
            envs.close()
        except (TimeoutError, RuntimeError) as error:
            failures.append(error)

    thread = threading.Thread(target=close_them, daemon=True)
    thread.start()
    thread.join(30)
    assert [type(error) for error in failures] == [expected]


# Evaluation.


class Idle:
    """A policy that does the same in every state."""

    def act_encoded(self, observations: Any, state: Any, deterministic: bool) -> Any:
        return [0] * len(observations)

    def reset(self) -> None: ...

    def keep(self, going: Any) -> None: ...


def test_an_episode_in_which_the_environment_fails_is_played_again() -> None:
    context = EnvContext(failure_rules=FailureRules(rebuild=True, strict_start=False))
    player = Player(EnvSource(ENV, {"chance": 0.02, "after": 10}), 12, 0, context)
    done: list[int] = []
    scores = player.play(Idle(), tell=done.append)
    failures = player.take_failures()
    player.close()
    assert failures
    assert scores.returns.tolist() == [FULL] * 12
    assert done[-1] == 12
    assert done == sorted(done)


def test_an_episode_that_always_fails_is_named() -> None:
    context = EnvContext(failure_rules=FailureRules(rebuild=True, strict_start=False))
    player = Player(EnvSource(ENV, {"chance": 1.0, "after": 15}), 1, 0, context)
    with pytest.raises(TrainingError, match=r"episode 0 \(seed \d+\) of .*UnreliableEnv failed 11 times: .*fell over"):
        player.play(Idle())
    player.close()


def test_evaluations_of_a_run_are_counted_as_well(tmp_path: Path) -> None:
    kwargs = {"chance": 0.0}
    more = {"eval_every": 400, "eval_episodes": 10, "eval_env_kwargs": {"chance": 0.02, "after": 10}}
    result, _ = trained(tmp_path, kwargs, steps=800, **more)
    assert result.summary["env_failures"] > 0
    assert result.summary["evaluation"]["return_mean"] == FULL


def test_a_process_that_was_paused_tries_to_interrupt_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """After Ctrl-Z and fg, the first look at a call may come long after twice its limit."""
    sent: list[int] = []
    monkeypatch.setattr(watchdog.signal, "pthread_kill", lambda thread, number: sent.append(number))
    dog, watch, said = watchdog.Watchdog(), watchdog.Watch("Env", "", step=1.0), []
    dog.on_stuck = said.append
    call = 0, 0, "step"
    for taken, signals, sentences in [(100.0, 1, 0), (100.5, 1, 0), (101.5, 1, 1), (200.0, 1, 1)]:
        dog._act(watch, call, 1.0, taken)
        assert (len(sent), len(said)) == (signals, sentences)


class SlowToMake(gym.Env):
    """Raises in its third step; made again, it hangs in its constructor once."""

    observation_space, action_space = gym.spaces.Box(-1, 1, (1,)), gym.spaces.Discrete(2)
    made = 0

    def __init__(self) -> None:
        SlowToMake.made, self.steps = SlowToMake.made + 1, 0
        if SlowToMake.made == 2:
            time.sleep(30)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return np.zeros(1, np.float32), {}

    def step(self, action: Any) -> Any:
        self.steps += 1
        if self.steps == 3 and SlowToMake.made == 1:
            raise RuntimeError("the engine has ended")
        return np.zeros(1, np.float32), 0.0, False, False, {}


def test_a_constructor_that_hangs_when_it_is_called_again_has_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SlowToMake, "made", 0)
    failure_rules = FailureRules(rebuild=True, step_timeout=1.0, reset_timeout=1.0)
    envs = LoopEnvs(EnvSource(SlowToMake, {}), 1, EnvContext(failure_rules=failure_rules))
    try:
        envs.reset([0])
        began = time.monotonic()
        for _ in range(5):
            envs.step(np.zeros(1, np.int64))
        assert time.monotonic() - began < 15
        assert SlowToMake.made == 3
    finally:
        envs.close()


HANGING_SIMULATOR = """
import subprocess
from fever.envs.watchdog import WATCHDOG, Watch

WATCHDOG.ends_process = True
watch = Watch("Simulator", "", step=0.2)
WATCHDOG.add(watch)
simulator = subprocess.Popen(["sleep", "60"], stdout=-3, stderr=-3, start_new_session=True)
print(simulator.pid, flush=True)
with watch.calling("step"):
    simulator.wait()
"""


def test_a_simulator_that_hangs_ends_with_its_worker() -> None:
    command, environment = [sys.executable, "-c", HANGING_SIMULATOR], {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr.splitlines()[-1]) == (
        1,
        "fever: Simulator's step() (environment 0) took longer than 0.2 s",
    )
    wait_for(lambda: process_state(int(done.stdout)) in ("", "Z"), "the end of the simulator")
