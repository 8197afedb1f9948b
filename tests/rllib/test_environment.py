"""Environments for RLlib: arguments of constructors, vector environments, images of Atari games."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

from fever.config import RunConfig
from fever.envs.source import EnvContext, EnvSource, make_any
from fever.errors import FeverError
from fever.rllib.environment import make_one, with_env_config
from fever.training.setup import prepare

pytestmark = pytest.mark.filterwarnings("ignore")  # RLlib warns often; a run writes it to its log


def test_constructors_of_rllib_get_one_mapping() -> None:
    source = EnvSource("tests.rllib.parts:OfRllib", {"length": 3})
    env: Any = make_one(source, EnvContext(worker_index=2))
    assert (env.length, env.number) == (3, 2)
    config = RunConfig(env=source.name, env_kwargs=source.kwargs, algo="rllib:PPO", workers=0)
    make_any(prepare(config, source, print).source, EnvContext()).close()  # as on every machine of a cluster


def one(env_config: Any) -> None: ...


def optional(config: Any = None) -> None: ...


def beside(cfg: Any, size: int = 3) -> None: ...


def both(config: Any, size: int = 3) -> None: ...


def scalar(size: int) -> None: ...


def named(size: int = 3) -> None: ...


def open_ended(config: Any = None, **more: Any) -> None: ...


def with_context(env_config: Any, workdir: Path) -> None: ...


@pytest.mark.parametrize(
    ("constructor", "given", "called"),
    [
        (one, {}, {"env_config": {}}),
        (one, {"size": 4}, {"env_config": {"size": 4}}),
        (one, {"env_config": {"size": 4}}, {"env_config": {"size": 4}}),
        (optional, {}, {}),
        (optional, {"size": 4}, {"config": {"size": 4}}),
        (optional, {"config": {"size": 4}}, {"config": {"size": 4}}),
        (beside, {"width": 4}, {"cfg": {"width": 4}}),
        (beside, {"size": 4}, {"size": 4}),  # the constructor's error says what is missing
        (both, {"size": 4}, {"config": {"size": 4}}),
        (scalar, {}, {}),
        (scalar, {"sise": 4}, {"sise": 4}),
        (named, {"sise": 4}, {"sise": 4}),
        (open_ended, {"size": 4}, {"size": 4}),
        (with_context, {"size": 4}, {"env_config": {"size": 4}}),
    ],
)
def test_arguments_of_constructors(constructor: Any, given: dict[str, Any], called: dict[str, Any]) -> None:
    assert with_env_config(EnvSource(constructor, given)).kwargs == called


def test_vector_environments_are_refused() -> None:
    source = EnvSource("tests.environments:NextStepCounters")
    assert with_env_config(source) is source
    with pytest.raises(FeverError, match="is a vector environment"):
        make_one(source, EnvContext())


@pytest.mark.parametrize(
    ("kwargs", "shape", "first"),
    [({}, (84, 84, 4), True), ({"grayscale": False}, (84, 84, 12), False), ({"obs_type": "rgb"}, (210, 160, 3), False)],
)
def test_atari_images_have_channels_last(kwargs: dict[str, Any], shape: tuple[int, ...], first: bool) -> None:
    pytest.importorskip("ale_py")
    env = make_one(EnvSource("ALE/Pong-v5", kwargs), EnvContext())
    try:
        seen = env.reset(seed=0)[0]
        raw = env.env.reset(seed=0)[0]  # type: ignore[attr-defined]
    finally:
        env.close()
    assert seen.shape == env.observation_space.shape == shape
    np.testing.assert_array_equal(seen, (np.moveaxis(raw, 0, -1) if first else raw).astype(np.float32) / 255)
