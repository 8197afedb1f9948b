"""N environments: natively vectorised where the environment has that, otherwise a plain loop."""

from __future__ import annotations

from fever.envs.contract import Envs
from fever.envs.loop import LoopEnvs
from fever.envs.native import NativeEnvs
from fever.envs.source import EnvContext, EnvSource, is_vector_class


def make_envs(source: EnvSource, count: int, context: EnvContext) -> Envs:
    """Make N environments, natively vectorised if the source has that."""
    return NativeEnvs(source, count, context) if source.vectorized else LoopEnvs(source, count, context)


def make_one(source: EnvSource, context: EnvContext) -> Envs:
    """Make one environment without autoreset: the caller calls `reset` before every episode."""
    factory, _ = source.resolve()
    if is_vector_class(factory):
        return NativeEnvs(source, 1, context)
    return LoopEnvs(source, 1, context, autoreset=False)
