"""Algorithms by name. An algorithm is imported when it is asked for, so that a command starts without JAX."""

from __future__ import annotations

import difflib
import importlib

from fever.algos.base import Algorithm
from fever.config import NetworkSettings
from fever.errors import FeverError

ALGORITHMS = {
    "ppo": "fever.algos.ppo:PPO",
    "trpo": "fever.algos.trpo:TRPO",
    "impala": "fever.algos.impala:Impala",
    "appo": "fever.algos.impala:APPO",
    "dqn": "fever.algos.dqn:DQN",
    "apex": "fever.algos.apex:Apex",
    "sac": "fever.algos.sac:SAC",
}


def find_algorithm(name: str) -> type[Algorithm]:
    """The class of an algorithm by its name in the registry."""
    if name not in ALGORITHMS:
        close = difflib.get_close_matches(name, ALGORITHMS, n=1)
        hint = f"did you mean {close[0]}? Choose" if close else "choose"
        names = f"{', '.join(ALGORITHMS)}, or one of RLlib's such as rllib:PPO"
        raise FeverError(f"{name} is not a known algorithm; {hint} one of {names}")
    module, _, attribute = ALGORITHMS[name].partition(":")
    return getattr(importlib.import_module(module), attribute)


def config_of(name: str) -> type[NetworkSettings]:
    """The settings of an algorithm."""
    return find_algorithm(name).Config
