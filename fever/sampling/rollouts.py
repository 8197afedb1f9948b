"""Pools that play whole episodes. Every rollout is one episode with a seed of its own.

Rollouts are numbered for the whole run, and a batch is the shortest sequence of them that has enough steps. So the same
seed gives the same batch with any number of workers, after a worker has died, and after a run was resumed.
"""

from __future__ import annotations

import math
from collections import deque
from typing import Any

from fever.policy.spaces import Description
from fever.sampling.episodes import EpisodeRunner
from fever.sampling.pool import Broadcasting
from fever.sampling.ray_pool import RayPool
from fever.sampling.spec import Fragment, SamplerSpec

CALL_STEPS = 256  # environment steps in one call, of episodes that are shorter


class Rollouts(Broadcasting):
    """What an algorithm sees of the pool that plays episodes."""

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

    def change_env(self, kwargs: dict[str, Any]) -> None:
        self.runner.change_env(kwargs)

    def close(self) -> None:
        self.runner.close()


class RayRollouts(RayPool, Rollouts):
    """Episode runners as Ray actors. A free worker gets the next numbers, so a long episode delays no other."""

    def __init__(
        self, spec: SamplerSpec, observation: Description, action: Description, limit: int | None, count: int
    ) -> None:
        super().__init__(EpisodeRunner, spec, (observation, action, limit), count, 0)
        self.pending: dict[Any, tuple[int, list[int], int]] = {}  # call -> worker, rollouts, version
        self.idle: deque[int] = deque()
        self.lengths: deque[int] = deque(maxlen=100)  # of the last episodes, to estimate how many are needed
        self.start_all()
        self.idle.extend(self.active)

    def activate(self, index: int) -> None:
        super().activate(index)
        self.idle.append(index)

    def collect(self, first: int, steps: int) -> list[Fragment]:
        self.adjust_to_machines()
        made: dict[int, Fragment] = {}
        missing = steps  # not made yet, in whichever rollouts
        waiting: deque[int] = deque()  # rollouts of workers that died
        following = first  # the next number to hand out
        while (whole := self._enough(made, first, steps)) is None:
            while self.idle and (numbers := self._next_numbers(missing, waiting, following, steps)):
                following = max(following, numbers[-1] + 1)
                worker = self.idle.popleft()
                call = self.call(worker, "play", self.params, self.version, numbers)
                self.pending[call] = worker, numbers, self.version
            for call in self.finished(self.pending):
                worker, numbers, version = self.pending.pop(call)
                parts = self.result(call, worker)
                if parts is None:
                    waiting.extend(numbers if version == self.version else [])
                    continue
                self.idle.append(worker)
                self.lengths.extend(part.steps for part in parts)
                if version == self.version:  # otherwise left over from the batch before
                    made.update(zip(numbers, parts, strict=True))
                    missing -= sum(part.steps for part in parts)
        return whole

    def _enough(self, made: dict[int, Fragment], first: int, steps: int) -> list[Fragment] | None:
        """The batch, once all of its rollouts are made; None before."""
        taken = 0
        for number in range(first, first + len(made)):
            if number not in made:
                return None
            taken += made[number].steps
            if taken >= steps:
                return [made[one] for one in range(first, number + 1)]
        return None

    def _next_numbers(self, missing: int, waiting: deque[int], following: int, steps: int) -> list[int]:
        """The rollouts for the next free worker; none if the pending ones will probably have the missing steps."""
        if waiting:
            return [waiting.popleft()]
        pending = sum(len(numbers) for _, numbers, version in self.pending.values() if version == self.version)
        length = sum(self.lengths) / len(self.lengths) if self.lengths else steps / self.count
        wanted = missing / length - pending
        if wanted <= 0 and pending:
            return []
        share = math.ceil(wanted / self.count)
        return list(range(following, following + max(1, min(share, int(CALL_STEPS / length)))))


def make_rollouts(
    spec: SamplerSpec, observation: Description, action: Description, limit: int | None, count: int
) -> Rollouts:
    """The pool for a number of workers; 0 means this process and no Ray."""
    if count == 0:
        return LocalRollouts(spec, observation, action, limit)
    return RayRollouts(spec, observation, action, limit, count)
