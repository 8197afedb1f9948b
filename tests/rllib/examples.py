"""The experiments in examples/rllib, which are files of RLlib's old command line."""

from __future__ import annotations

from fever.config import load_yaml
from fever.rllib.legacy.translate import Translation, translate
from tests.helpers import ROOT

FOLDER = ROOT / "examples" / "rllib"
EXPERIMENTS = [(path.name, name) for path in sorted(FOLDER.glob("*.yaml")) for name in load_yaml(path)]


def example(file: str, name: str | None = None) -> Translation:
    env = "QbertNoFrameskip-v4" if file == "atari-ppo.yaml" else None
    return translate(load_yaml(FOLDER / file), file, name, env)
