"""What a sampler is made of, and what it returns: fragments of experience and reports."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from fever.envs.source import EnvSource
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
    gpus: float = 0.0  # share of a GPU that its environments use

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
    | terminated, truncated | `[T, N]` bool | the episode ended here, by its own rules or by a time limit |
    | valid | `[T, N]` bool | false for the phantom step of next-step autoreset: never learn from it |
    | bootstrap | `[T, N]` | value of the state reached, where `observations[t+1]` is already the next episode's and the
    |           |          | episode was truncated; NaN elsewhere |
    | discounted | `[T, N]` | running discounted return of the episode so far (if the sampler has a gamma) |
    | state | `[N, S]` | recurrent state before the first row |
    """

    arrays: dict[str, np.ndarray]
