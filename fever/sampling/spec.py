"""What a sampler is made of, and what it returns: fragments of experience and reports."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from fever.envs.recovery import RAISE_AT_ONCE, Failure, FailureRules
from fever.envs.source import EnvContext, EnvSource
from fever.policy import Network


@dataclass(frozen=True)
class SamplerSpec:
    """Everything a sampler needs; small enough to send to another machine."""

    source: EnvSource
    network: Network
    envs: int  # N, environments stepped together
    steps: int  # T, steps of each environment in a fragment
    gamma: float | None  # discount of the running returns for reward normalisation; None: not computed
    seed: int
    worker_index: int = 0
    generation: int = 0  # number of earlier starts of this worker: every start gets new random streams
    workdir: Path | None = None  # parent of the environments' private folders
    cpus: int | None = None  # cores of its own for the worker; None: it shares them
    starts_at_once: int = 64  # workers that make their environments at the same time
    gpus: float = 0.0  # share of a GPU that its environments use
    failure_rules: FailureRules = RAISE_AT_ONCE  # how failures of its environments are treated

    @property
    def context(self) -> EnvContext:
        """Where its environments run. Only in workers that the run began with are environments new to it."""
        rules = replace(self.failure_rules, strict_start=self.failure_rules.strict_start and self.generation == 0)
        return EnvContext(self.worker_index, self.workdir, failure_rules=rules)

    def for_worker(self, index: int, generation: int) -> SamplerSpec:
        return replace(self, worker_index=index, generation=generation)


@dataclass(frozen=True)
class Episode:
    """One finished episode."""

    total_reward: float
    length: int
    env_index: int
    info: dict[str, float]  # the scalars in the environment's last info
    counts: bool = True  # in the mean return; false for episodes of the more exploring half of the environments


@dataclass
class Report:
    """What a worker did in one call, apart from the experience."""

    steps: int  # environment steps taken, phantom steps left out
    episodes: list[Episode]  # that ended
    worker_index: int
    version: int  # of the weights that acted
    seconds: dict[str, float]  # spent in "env", "inference" and altogether ("total")
    host: str
    cores: str = field(default="", kw_only=True)  # that the worker is bound to, as 0-3; empty: all
    failures: list[Failure] = field(default_factory=list, kw_only=True)  # of environments, which were made anew


@dataclass
class Fragment(Report):
    """T steps of N environments, time-major.

    | array | shape | meaning |
    |---|---|---|
    | observations | `[T+1, N, ...]` | encoded; the last row is what the next fragment begins with |
    | first | `[T+1, N]` bool | an episode begins with this observation |
    | actions | `[T, N, ...]` | as the distribution stores them |
    | log_probs | `[T, N]` | of the actions, under the policy that chose them |
    | rewards | `[T, N]` | as the environment gave them |
    | terminated, truncated | `[T, N]` bool | the episode ended here, by its own rules or cut by a limit or a failure |
    | valid | `[T, N]` bool | false for steps to never learn from: the phantom step of next-step autoreset, and a step
    |       |               | in which the environment failed. The step before that one is truncated |
    | bootstrap | `[T, N]` | value of the state reached, where `observations[t+1]` is already the next episode's and the
    |           |          | episode was truncated; NaN elsewhere |
    | discounted | `[T, N]` | running discounted return of the episode so far (if the sampler has a gamma) |
    | state | `[N, S]` | recurrent state before the first row |
    """

    arrays: dict[str, np.ndarray]
