"""Experiments for the removed `rllib train -f`: those in examples/rllib, and others made of settings."""

from __future__ import annotations

from typing import Any

from fever.config import load_yaml
from fever.rllib.legacy.translate import Translation, translate
from tests.helpers import ROOT

FOLDER = ROOT / "examples" / "rllib"
EXPERIMENTS = [(path.name, name) for path in sorted(FOLDER.glob("*.yaml")) for name in load_yaml(path)]


def example(file: str, name: str | None = None) -> Translation:
    """An experiment in examples/rllib."""
    env = "QbertNoFrameskip-v4" if file == "atari-ppo.yaml" else None
    return translate(load_yaml(FOLDER / file), file, name, env)


def old(
    algorithm: str, /, env: str = "CartPole-v1", beside: dict[str, Any] | None = None, **config: Any
) -> Translation:
    """An experiment of an old file; `beside` is what stands beside its `config`."""
    return translate({"x": {"env": env, "run": algorithm, "config": config, **(beside or {})}}, "old.yaml")
