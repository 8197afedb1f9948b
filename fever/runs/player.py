"""Plays numbered episodes with a policy. Episode k is reset with the k-th seed of its own, whatever the others do."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import numpy as np

from fever.envs.contract import Envs
from fever.envs.loop import LoopEnvs
from fever.envs.native import NativeEnvs
from fever.envs.source import EnvContext, EnvSource
from fever.errors import ContractError

PARALLEL = 10  # episodes played at once, at most
CONFIDENCE = 0.95  # of the interval of the mean
FEWEST = 5  # episodes that are compared
ENDS = ("terminated", "truncated", "max_steps")


@dataclass(frozen=True)
class Scores:
    """Evaluated episodes, in the order of their numbers."""

    returns: np.ndarray  # [episodes]
    lengths: np.ndarray  # [episodes]
    seeds: list[int]  # that each was reset with; a natively vectorised environment has one for all that begin together
    ends: list[str]  # one of ENDS for each; empty if it is not known
    distinct: int | None  # number of different first observations; None if it is not known
    seconds: float

    @property
    def interval(self) -> tuple[float, float] | None:
        """The 95 % interval of the mean return by Student's t; None for one episode."""
        count = len(self.returns)
        if count < 2:
            return None
        from scipy.special import stdtrit  # imported here: takes 0.2 s

        mean, error = float(self.returns.mean()), float(self.returns.std(ddof=1)) / math.sqrt(count)
        width = float(stdtrit(count - 1, (1 + CONFIDENCE) / 2)) * error
        return mean - width, mean + width

    @property
    def alike(self) -> bool:
        """Whether so many episodes began with an observation that others had, too, that something may be wrong."""
        return self.distinct is not None and len(self.returns) > 1 and self.distinct <= len(self.returns) / 2

    def is_below(self, other: Scores) -> bool:
        """Whether the mean return is lower than the other one by more than twice the standard error of their
        difference and by more than a tenth. Fewer than five episodes say nothing."""
        if min(len(self.returns), len(other.returns)) < FEWEST:
            return False
        gap = float(other.returns.mean() - self.returns.mean())
        error = math.sqrt(sum(one.returns.var() / max(1, len(one.returns) - 1) for one in (self, other)))
        return gap > 2 * error and gap > 0.1 * abs(float(other.returns.mean()))

    def summary(self) -> dict[str, Any]:
        return {
            "episodes": len(self.returns),
            "return_mean": float(self.returns.mean()),
            "return_interval": self.interval,
            "return_std": float(self.returns.std()),
            "return_min": float(self.returns.min()),
            "return_max": float(self.returns.max()),
            "length_mean": float(self.lengths.mean()),
        }

    def rows(self) -> list[dict[str, Any]]:
        """One row for each episode."""
        ends: list[Any] = self.ends or [None] * len(self.seeds)
        columns = zip(self.seeds, self.returns.tolist(), self.lengths.tolist(), ends, strict=True)
        return [
            {"episode": number, "seed": seed, "return": total, "length": length, "end": end}
            for number, (seed, total, length, end) in enumerate(columns)
        ]


def alike_sentence(name: str, distinct: int, what: str) -> str:
    """What to say when `what`, such as "20 episodes", began with few different observations although seeds differed."""
    ways = "the same observation" if distinct == 1 else f"only {distinct} different observations"
    return (
        f"{what} of {name} with different seeds began with {ways}: it ignores reset(seed), unless it is meant to start "
        "alike; let reset() call super().reset(seed=seed) and draw the scenario with self.np_random"
    )


def episode_seeds(seed: int, count: int) -> list[int]:
    """The seeds of episodes 0 to `count` - 1; those of more episodes begin with the same ones."""
    return [int(one) for one in np.random.SeedSequence(seed).generate_state(count)]


class Player:
    """Environments that stay open until `close`, in which the same episodes are played again and again.

    Episodes are played in waves, one in each environment; an environment whose episode has ended waits for the next
    wave. If all environments begin alike though their seeds differ, one environment plays all episodes in turn: many
    that ignore reset(seed) draw another scenario with every reset. With `anew`, environments are made again for every
    wave if their scenarios turn out to be drawn when they are made: they differ between environments, and a reset with
    another seed changes nothing.
    """

    def __init__(
        self,
        source: EnvSource,
        episodes: int,
        seed: int,
        context: EnvContext,
        max_steps: int | None = None,
        anew: bool = False,
    ) -> None:
        """Make the environments. Episodes are cut off after `max_steps` steps."""
        self.source, self.context = source, context
        self.seeds = episode_seeds(seed, episodes)
        self.limit, self.anew = max_steps or sys.maxsize, anew
        waves = math.ceil(episodes / PARALLEL)
        self.count = math.ceil(episodes / waves)  # environments
        self.returns, self.lengths = np.zeros(episodes), np.zeros(episodes, np.int64)
        self.ends = [""] * episodes
        self.native = source.vectorized
        self.in_turn = False  # one environment plays all episodes
        self.envs = self._make(0)

    def _make(self, first_index: int) -> Envs:
        if self.native:
            return NativeEnvs(self.source, self.count, self.context)
        return LoopEnvs(self.source, self.count, self.context, autoreset=False, first_index=first_index)

    def _remake(self, first_index: int) -> None:
        self.envs.close()
        self.envs = self._make(first_index)

    def close(self) -> None:
        """Close the environments."""
        self.envs.close()

    def reset(self) -> np.ndarray:
        """Reset all environments, as for the first episodes; returns the encoded observations."""
        return self.envs.reset(self.seeds[: self.count])

    def play(
        self,
        policy: Any,
        deterministic: bool = True,
        check: Callable[[Envs], None] = lambda envs: None,
        tell: Callable[[int], None] = lambda done: None,
    ) -> Scores:
        """Play all episodes. `check` is called with the environments after their first reset, `tell` with the number of
        episodes that have ended."""
        begin = perf_counter()
        starts: list[bytes] = []
        if self.in_turn:
            self._remake(0)  # the same episodes as before
        observations = self._begin(0, starts)
        check(self.envs)
        if not self.native and len(starts) > 1 and len(set(starts)) == 1:
            self.in_turn, self.count, starts = True, 1, []
            self._remake(0)
            observations = self._begin(0, starts)
        self._play_wave(policy, deterministic, observations, 0, tell)
        for first in range(self.count, len(self.seeds), self.count):
            self._play_wave(policy, deterministic, self._begin(first, starts), first, tell)
        seconds = perf_counter() - begin
        distinct = len(set(starts))
        seeds = [self.seeds[k - k % self.count if self.native else k] for k in range(len(self.seeds))]
        return Scores(self.returns.copy(), self.lengths.copy(), seeds, [*self.ends], distinct, seconds)

    def _begin(self, first: int, starts: list[bytes]) -> np.ndarray:
        """Reset all environments for the episodes from `first` on; adds their first observations to `starts`."""
        seeds = self.seeds[first : first + self.count]
        filled = seeds + self.seeds[: self.count - len(seeds)]  # environments that have no episode in the last wave
        observations = self.envs.reset(filled)
        begun = [row.tobytes() for row in observations[: len(seeds)]]
        before = starts[first - self.count : first] if first else []
        if self.anew and not self.native and len(set(before)) > 1 and begun == before[: len(begun)]:
            self._remake(first)
            observations = self.envs.reset(filled)
            begun = [row.tobytes() for row in observations[: len(seeds)]]
        starts += begun
        return observations

    def _play_wave(
        self, policy: Any, deterministic: bool, observations: np.ndarray, first: int, tell: Callable[[int], None]
    ) -> None:
        """Play one episode in each environment, the first of which has number `first`."""
        numbers = np.arange(first, first + self.count)  # of the episodes in the environments that are stepped
        totals, going = np.zeros(self.count), numbers < len(self.seeds)
        policy.reset()
        done, length = first, 0
        while going.any():
            if isinstance(self.envs, LoopEnvs) and not going.all():
                self.envs.narrow(going)
                policy.keep(going)
                numbers, totals, observations, going = numbers[going], totals[going], observations[going], going[going]
            step = self.envs.step(policy.act_encoded(observations, None, deterministic))
            observations, length = step.observations, length + 1
            totals += step.rewards
            ended = (step.terminated | step.truncated | (length >= self.limit)) & going
            if ended.any():
                for place in np.flatnonzero(ended).tolist():
                    how = ENDS[0 if step.terminated[place] else 1 if step.truncated[place] else 2]
                    self._record(numbers[place], float(totals[place]), length, how)
                done += int(ended.sum())
                tell(done)
                going &= ~ended

    def _record(self, number: int, total: float, length: int, how: str) -> None:
        if not math.isfinite(total):
            raise ContractError(f"{self.source.name} breaks its contract: the return of an episode is {total}")
        self.returns[number], self.lengths[number], self.ends[number] = total, length, how
