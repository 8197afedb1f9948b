"""Whole episodes. Every rollout is one episode with a seed of its own, whoever makes it and whenever.

Rollouts are numbered for the whole run, and a batch is the shortest row of them that has enough steps. So the same
seed gives the same batch with any number of workers, after a worker has died, and after a run was resumed.
"""

from __future__ import annotations

import math
from collections import deque
from typing import Any

from fever.policy import Params
from fever.policy.spaces import Description
from fever.sampling.episodes import EpisodeRunner
from fever.sampling.pool import Broadcasting
from fever.sampling.ray_pool import RayPool, WorkerActor
from fever.sampling.spec import Fragment, SamplerSpec

CALL_STEPS = 256  # of short episodes that a worker makes in one call


class Rollouts(Broadcasting):
    """What an algorithm sees of those who play episodes."""

    def collect(self, first: int, steps: int) -> list[Fragment]:
        """The fewest rollouts, numbered from `first` on, that have this many steps together, in order."""
        raise NotImplementedError


class LocalRollouts(Rollouts):
    """One environment in this process."""

    def __init__(self, spec: SamplerSpec, observation: Description, action: Description, limit: int | None) -> None:
        self.runner = EpisodeRunner(spec, observation, action, limit)

    def collect(self, first: int, steps: int) -> list[Fragment]:
        made: list[Fragment] = []
        taken = 0
        while taken < steps:
            made += self.runner.play(self.params, self.version, [first + len(made)])
            taken += made[-1].steps
        return made

    def close(self) -> None:
        self.runner.close()


class RayRollouts(RayPool, Rollouts):
    """Players as Ray actors. Whoever is free gets the next numbers, so a long episode holds up nobody else."""

    def __init__(
        self, spec: SamplerSpec, observation: Description, action: Description, limit: int | None, count: int
    ) -> None:
        super().__init__(count, generation=0)
        self.spec, self.arguments = spec, (observation, action, limit)
        self.pending: dict[Any, tuple[int, list[int], int]] = {}  # call -> worker, rollouts, version
        self.idle: deque[int] = deque()
        self.lengths: deque[int] = deque(maxlen=100)  # of the last episodes: to foresee how many are needed
        self.start_all()
        self.idle.extend(self.at_work)

    def employ(self, index: int) -> None:
        super().employ(index)
        self.idle.append(index)

    def start(self, index: int) -> Any:
        spec = self.spec.for_worker(index, self.generations[index])
        return self.actor(EpisodeActor, EpisodeRunner, spec, *self.arguments)

    def collect(self, first: int, steps: int) -> list[Fragment]:
        self.fit()
        made: dict[int, Fragment] = {}
        missing = steps  # that nobody has made, whether their rollouts follow one another or not
        waiting: deque[int] = deque()  # rollouts of workers that died
        following = first  # the next number that nobody has
        while (whole := self._enough(made, first, steps)) is None:
            while self.idle and (numbers := self._next_numbers(missing, waiting, following, steps)):
                following = max(following, numbers[-1] + 1)
                worker = self.idle.popleft()
                call = self.actors[worker].play.remote(self.params, self.version, numbers)
                self.pending[call] = worker, numbers, self.version
            for call in self.finished(self.pending):
                worker, numbers, version = self.pending.pop(call)
                try:
                    parts = self.get(call)
                except self.lost as error:
                    self.replace(worker, error)
                    waiting.extend(numbers if version == self.version else [])
                    continue
                self.idle.append(worker)
                self.deaths[worker] = 0
                self.lengths.extend(part.steps for part in parts)
                if version == self.version:  # those of the batch before were not needed for it
                    made.update(zip(numbers, parts, strict=True))
                    missing -= sum(part.steps for part in parts)
        return whole

    def _enough(self, made: dict[int, Fragment], first: int, steps: int) -> list[Fragment] | None:
        """The batch, once all rollouts that belong to it are there."""
        taken = 0
        for number in range(first, first + len(made)):
            if number not in made:
                return None
            taken += made[number].steps
            if taken >= steps:
                return [made[one] for one in range(first, number + 1)]
        return None

    def _next_numbers(self, missing: int, waiting: deque[int], following: int, steps: int) -> list[int]:
        """The rollouts for the next free worker; none if those under way will probably have the missing steps."""
        if waiting:
            return [waiting.popleft()]
        under_way = sum(len(numbers) for _, numbers, version in self.pending.values() if version == self.version)
        length = sum(self.lengths) / len(self.lengths) if self.lengths else steps / self.count
        wanted = missing / length - under_way
        if wanted <= 0 and under_way:
            return []
        share = math.ceil(wanted / self.count)
        return list(range(following, following + max(1, min(share, int(CALL_STEPS / length)))))


class EpisodeActor(WorkerActor):
    """A worker that plays episodes."""

    def play(self, params: Params, version: int, numbers: list[int]) -> list[Fragment]:
        self.build()
        return self.runner.play(params, version, numbers)


def make_rollouts(
    spec: SamplerSpec, observation: Description, action: Description, limit: int | None, count: int
) -> Rollouts:
    """The pool for a number of workers; 0 means this process and no Ray."""
    if count == 0:
        return LocalRollouts(spec, observation, action, limit)
    return RayRollouts(spec, observation, action, limit, count)
