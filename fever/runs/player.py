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
from fever.envs.recovery import Failure
from fever.envs.source import EnvContext, EnvSource
from fever.envs.watchdog import close_quietly
from fever.errors import ContractError, FeverError, TrainingError

MOST_EPISODES = 1_000_000  # whose returns, lengths and seeds are kept in memory
PARALLEL = 10  # episodes played at once, at most
CONFIDENCE = 0.95  # of the interval of the mean
ATTEMPTS = 10  # to play an episode in which the environment fails
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
    if count > MOST_EPISODES:
        raise FeverError(f"{count} episodes are too many: at most {MOST_EPISODES:,} are played at once")
    return [int(one) for one in np.random.SeedSequence(seed).generate_state(count)]


class Player:
    """Environments that stay open until `close`, in which the same episodes are played again and again.

    Episodes are played in waves, one in each environment; an environment whose episode has ended waits for the next
    wave. If all environments begin alike though their seeds differ, one environment plays all episodes in turn: many
    that ignore reset(seed) draw another scenario with every reset. With `anew`, environments are made again for every
    wave if their scenarios turn out to be drawn when they are made: they differ between environments, and a reset with
    another seed changes nothing.

    An episode in which the environment fails is played again with the same seed, when all others are over.
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
        self.done = 0  # episodes that have ended
        self.again: list[int] = []  # episodes in which the environment failed
        self.failures: list[Failure] = []
        self.envs = self._make(0)

    def _make(self, first_index: int) -> Envs:
        if self.native:
            return NativeEnvs(self.source, self.count, self.context)
        return LoopEnvs(self.source, self.count, self.context, autoreset=False, first_index=first_index)

    def _remake(self, first_index: int) -> None:
        self.close()
        self.envs = self._make(first_index)

    def take_failures(self) -> list[Failure]:
        """The environments' failures since the last call."""
        taken, self.failures = [*self.failures, *self.envs.recovery.take()], []
        return taken

    def close(self) -> None:
        """Close the environments."""
        self.failures += self.envs.recovery.take()
        close_quietly(self.source.name, self.envs.close, limited=True)

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
        self.done, self.again = 0, []
        if self.in_turn:
            self._remake(0)  # the same episodes as before
        observations = self._begin(0, starts)
        check(self.envs)
        if not self.native and len(starts) > 1 and len(set(starts)) == 1:
            self.in_turn, self.count, starts = True, 1, []
            self._remake(0)
            observations = self._begin(0, starts)
        self._play_wave(policy, deterministic, observations, self._numbers(0), tell)
        for first in range(self.count, len(self.seeds), self.count):
            self._play_wave(policy, deterministic, self._begin(first, starts), self._numbers(first), tell)
        self._play_again(policy, deterministic, tell)
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

    def _numbers(self, first: int) -> np.ndarray:
        """The numbers of the episodes of a wave `[count]`; -1 for environments that have none."""
        numbers = np.arange(first, first + self.count)
        return np.where(numbers < len(self.seeds), numbers, -1)

    def _play_again(self, policy: Any, deterministic: bool, tell: Callable[[int], None]) -> None:
        """Play the episodes in which the environment failed until it does not."""
        for _ in range(ATTEMPTS):
            failed, self.again = self.again, []
            for first in range(0, len(failed), self.count):
                numbers = np.full(self.count, -1)
                numbers[: len(failed[first : first + self.count])] = failed[first : first + self.count]
                observations = self.envs.reset([self.seeds[number] for number in numbers])
                self._play_wave(policy, deterministic, observations, numbers, tell)
        if self.again:
            episode = f"episode {self.again[0]} (seed {self.seeds[self.again[0]]}) of {self.source.name}"
            failures = self.take_failures()
            reason = f": {failures[-1].sentence}" if failures else ""
            raise TrainingError(f"{episode} failed {ATTEMPTS + 1} times{reason}")

    def _play_wave(
        self,
        policy: Any,
        deterministic: bool,
        observations: np.ndarray,
        numbers: np.ndarray,
        tell: Callable[[int], None],
    ) -> None:
        """Play the episodes with these numbers `[count]`, one in each environment; -1: none."""
        totals, going = np.zeros(self.count), numbers >= 0
        policy.reset()
        length = 0
        while going.any():
            if isinstance(self.envs, LoopEnvs) and not going.all():
                self.envs.narrow(going)
                policy.keep(going)
                numbers, totals, observations, going = numbers[going], totals[going], observations[going], going[going]
            step = self.envs.step(policy.act_encoded(observations, None, deterministic))
            observations, length = step.observations, length + 1
            totals += step.rewards
            if step.failed:
                failed = [place for place in step.failed if going[place]]
                self.again += numbers[failed].tolist()
                going[failed] = False
            ended = (step.terminated | step.truncated | (length >= self.limit)) & going
            if ended.any():
                for place in np.flatnonzero(ended).tolist():
                    how = ENDS[0 if step.terminated[place] else 1 if step.truncated[place] else 2]
                    self._record(int(numbers[place]), place, float(totals[place]), length, how)
                self.done += int(ended.sum())
                tell(self.done)
                going &= ~ended

    def _record(self, number: int, place: int, total: float, length: int, how: str) -> None:
        if not math.isfinite(total):
            error = ContractError(f"{self.source.name} breaks its contract: the return of an episode is {total}")
            self.envs.recovery.note(place, "step", error, length, length)
            self.again.append(number)
            return
        self.returns[number], self.lengths[number], self.ends[number] = total, length, how
