"""From a name, class or function to an environment: finding it, its arguments, and where it runs."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import gymnasium as gym
import pytest
from gymnasium import spaces

from fever.envs.loop import LoopEnvs
from fever.envs.make import make_envs
from fever.envs.source import EnvContext, EnvSource, make_env
from fever.errors import FeverError
from tests.environments import (
    BrokenEnv,
    ClosingEnv,
    ContextEnv,
    CounterEnv,
    NextStepCounters,
    TimeLimitEnv,
    make_time_limit,
)

HERE = EnvContext()


def made(target: Any, **kwargs: Any) -> Any:
    """One environment without its wrappers."""
    return make_env(EnvSource(target, kwargs), HERE).unwrapped


# Finding an environment.


@pytest.mark.parametrize(
    ("target", "kind"),
    [
        ("Pendulum-v1", "PendulumEnv"),
        ("tests.environments:TimeLimitEnv", "TimeLimitEnv"),
        ("tests.environments:FeverCounter-v0", "CounterEnv"),
        ("tests.environments:make_time_limit", "TimeLimitEnv"),
        (TimeLimitEnv, "TimeLimitEnv"),
        (make_time_limit, "TimeLimitEnv"),
        (lambda: CounterEnv(), "CounterEnv"),
    ],
)
def test_every_way_to_name_an_environment_finds_it(target: Any, kind: str) -> None:
    assert type(made(target)).__name__ == kind


@pytest.mark.parametrize("target", [TimeLimitEnv, make_time_limit, "tests.environments:TimeLimitEnv"])
def test_the_name_of_a_source_finds_it_again(target: Any) -> None:
    source = EnvSource(target, {"limit": 3})
    assert made(source.name, limit=3).limit == made(target, limit=3).limit == 3


def test_a_partial_function_is_a_factory_too() -> None:
    assert LoopEnvs(EnvSource(functools.partial(TimeLimitEnv, limit=3)), 1, HERE).envs[0].limit == 3


def test_the_name_and_kwargs_of_a_partial_function_find_it_again() -> None:
    source = EnvSource(functools.partial(TimeLimitEnv, limit=3))
    assert made(source.name, **source.kwargs).limit == 3


def test_the_time_limit_of_a_registered_environment_can_be_set() -> None:
    env = make_env(EnvSource("Pendulum-v1", {"max_episode_steps": 50}), HERE)
    assert env.spec is not None
    assert env.spec.max_episode_steps == 50


def test_arguments_reach_the_constructor() -> None:
    assert made(TimeLimitEnv, limit=9).limit == 9
    assert made("Pendulum-v1", g=1.5).g == 1.5


def test_the_registered_threshold_is_known_and_classes_have_none() -> None:
    assert EnvSource("CartPole-v1").reward_threshold == 475
    assert EnvSource(TimeLimitEnv).reward_threshold is None


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("CartPol-v1", "there is no environment CartPol-v1; did you mean CartPole-v1"),
        ("cartpole-v1", "did you mean CartPole-v1"),
        ("CartPole", "did you mean CartPole-v1"),
        ("CartPole-v7", "did you mean CartPole-v1"),
        ("qqqqzzzz", r'there is no environment qqqqzzzz \(an environment of your own is written as "module:Name"\)'),
        ("tests.environments:FeverCountr-v0", "there is no environment FeverCountr-v0; did you mean FeverCounter-v0"),
        ("tests.environments:TimeLimtEnv", "tests.environments has no TimeLimtEnv; did you mean TimeLimitEnv"),
        ("tests.environments:TimeLimitEnv.Inner", "tests.environments has no TimeLimitEnv.Inner"),
        ("tests.environments:SPACES", "tests.environments:SPACES is neither a class nor a factory function"),
        ("tests.nothing:Env", "there is no module tests.nothing here; start fever in the folder that has it"),
        ("nowhere_at_all:Env-v0", "there is no module nowhere_at_all here"),
    ],
)
def test_an_unknown_name_is_refused_with_the_closest_ones(target: str, message: str) -> None:
    with pytest.raises(FeverError, match=message):
        EnvSource(target).resolve()


def test_a_module_that_lacks_a_package_names_that_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "module_with_a_need.py").write_text("import a_package_that_is_missing\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(FeverError, match=r"module_with_a_need cannot be imported: .*a_package_that_is_missing"):
        EnvSource("module_with_a_need:Env").resolve()


@pytest.mark.parametrize(
    ("target", "kwargs", "message"),
    [
        (TimeLimitEnv, {"limits": 3}, "TimeLimitEnv has no argument limits; it has: limit"),
        (BrokenEnv, {}, "BrokenEnv cannot be made with the arguments {}: .*fault"),
        ("Pendulum-v1", {"gravity": 3}, "Pendulum-v1 has no argument gravity; it has: .*g"),
        ("CartPole-v1", {"gravity": 3}, "CartPole-v1 has no argument gravity; it has: .*sutton_barto_reward"),
        ("CartPole-v1", {"num_envs": 1}, "num_envs cannot be an argument of CartPole-v1; .* --envs"),
        (NextStepCounters, {"bogus": 1}, "NextStepCounters has no argument bogus"),
        (NextStepCounters, {"num_envs": 1}, "num_envs cannot be an argument of .*NextStepCounters; .* --envs"),
    ],
)
def test_wrong_arguments_are_refused_in_one_sentence(target: Any, kwargs: dict, message: str) -> None:
    with pytest.raises(FeverError, match=message):
        make_envs(EnvSource(target, kwargs), 2, HERE)


def test_an_error_inside_a_constructor_is_a_sentence_with_its_place() -> None:
    with pytest.raises(FeverError, match=r"ValueError: there is no fault nonsense \(.*faults\.py:\d+\)") as caught:
        made(BrokenEnv, fault="nonsense")
    assert isinstance(caught.value.__cause__, ValueError)  # with the user's traceback, for Python


@pytest.mark.parametrize(
    ("missing", "message"),
    [
        ("mujoco", r'needs a package that is not installed; install it with: pip install "fever\[mujoco\]"'),
        ("some_simulator", "needs a package that is not installed: No module named 'some_simulator'"),
    ],
)
def test_a_missing_package_is_named(missing: str, message: str) -> None:
    def factory() -> None:
        raise ModuleNotFoundError(f"No module named '{missing}'")

    with pytest.raises(FeverError, match=message):
        made(factory)


@pytest.mark.parametrize("kind", ["entry_point", "vector_entry_point"])
def test_a_registered_environment_whose_module_is_missing_says_so(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gym.envs.registration, "registry", gym.registry.copy())
    monkeypatch.setattr(gym, "registry", gym.envs.registration.registry)
    gym.register("FeverMissing-v0", **{kind: "a_package_that_is_missing:Env"})
    with pytest.raises(FeverError, match=r"FeverMissing-v0 needs a package that is not installed: .*a_package_that_is"):
        make_envs(EnvSource("FeverMissing-v0"), 1, HERE)


def test_a_factory_that_makes_no_environment_is_refused() -> None:
    with pytest.raises(FeverError, match="made a dict, which has no observation_space and action_space"):
        made(lambda: {})


@pytest.mark.parametrize("which", ["observation", "action"])
def test_a_space_that_cannot_be_trained_on_is_named(which: str, tmp_path: Path) -> None:
    source = EnvSource(ClosingEnv, {"folder": tmp_path, f"{which}_space": spaces.Text(5)})
    with pytest.raises(FeverError, match=f"ClosingEnv cannot be trained on: its {which} space: Text is not supported"):
        make_envs(source, 2, HERE)


# Where an environment runs.


def test_context_arguments_reach_constructors_that_name_them(tmp_path: Path) -> None:
    envs = LoopEnvs(EnvSource(ContextEnv), 2, EnvContext(worker_index=3, workdir=tmp_path))
    for index, env in enumerate(envs.envs):
        assert (env.worker_index, env.env_index) == (3, index)
        assert env.workdir == tmp_path / f"worker-3-env-{index}"
        assert (env.workdir / "context.txt").read_text() == f"worker 3, environment {index}"


def test_without_a_workdir_none_is_given_and_no_folder_is_made() -> None:
    assert made(ContextEnv).workdir is None


def test_environments_that_name_no_workdir_get_no_folder(tmp_path: Path) -> None:
    make_env(EnvSource(TimeLimitEnv), EnvContext(workdir=tmp_path))
    assert list(tmp_path.iterdir()) == []


def test_context_arguments_reach_registered_environments() -> None:
    env = make_env(EnvSource("tests.environments:FeverCounter-v0"), HERE, index=4)
    assert env.unwrapped.counter.index == 4
