"""The pool of samplers: one in this process, or many as Ray actors, with the same contract.

An on-policy algorithm calls `broadcast` once and `collect(K)` once per iteration, and gets exactly K fragments made
with those weights. A worker that dies is replaced, and the next free worker makes its fragment.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from fever.policy.spaces import Description
from fever.sampling.pool import Broadcasting
from fever.sampling.ray_pool import RayPool
from fever.sampling.sampler import Sampler
from fever.sampling.spec import Fragment, SamplerSpec


class Workers(Broadcasting):
    """What an on-policy algorithm sees of the samplers."""

    def collect(self, fragments: int) -> list[Fragment]:
        """Return exactly this many fragments, all made with the last broadcast weights, in a stable order."""
        raise NotImplementedError


class LocalWorkers(Workers):
    """One sampler in this process."""

    def __init__(self, spec: SamplerSpec, observation: Description, action: Description, generation: int = 0) -> None:
        self.sampler = Sampler(spec.for_worker(0, generation), observation, action)

    def collect(self, fragments: int) -> list[Fragment]:
        return [self.sampler.sample(self.params, self.version) for _ in range(fragments)]

    def change_env(self, kwargs: dict[str, Any]) -> None:
        self.sampler.change_env(kwargs)

    def starts_alike(self) -> bool:
        return self.sampler.starts_alike()

    def close(self) -> None:
        self.sampler.close()


class RayWorkers(RayPool, Workers):
    """Samplers as Ray actors."""

    def __init__(
        self, spec: SamplerSpec, observation: Description, action: Description, count: int, generation: int = 0
    ) -> None:
        super().__init__(Sampler, spec, (observation, action), count, generation)
        self.start_all()

    def collect(self, fragments: int) -> list[Fragment]:
        self.adjust_to_machines()
        made: list[tuple[int, int, Fragment]] = []  # (worker index, sequence number, fragment)
        pending: dict[Any, int] = {}
        idle = list(self.active)
        sequence: Counter[int] = Counter()
        while len(made) < fragments:
            while idle and len(made) + len(pending) < fragments:
                index = idle.pop(0)
                pending[self.call(index, "sample", self.params, self.version)] = index
            for call in self.finished(pending):
                index = pending.pop(call)
                if (fragment := self.result(call, index)) is not None:
                    made.append((index, sequence[index], fragment))
                    sequence[index] += 1
                if index in self.active:
                    idle.append(index)
        made.sort(key=lambda row: row[:2])
        return [fragment for _, _, fragment in made]


def make_workers(
    spec: SamplerSpec, observation: Description, action: Description, count: int, generation: int = 0
) -> Workers:
    """The pool for a number of workers; 0 means this process and no Ray."""
    if count == 0:
        return LocalWorkers(spec, observation, action, generation)
    return RayWorkers(spec, observation, action, count, generation)
