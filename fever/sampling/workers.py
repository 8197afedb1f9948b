"""The pool of samplers: one in this process, or many as Ray actors, with the same contract.

An on-policy algorithm calls `broadcast` once and `collect(K)` once per iteration, and gets exactly K fragments made
with those weights, whoever made them. A worker that dies is replaced and its fragment is made by whoever is free.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from fever.policy import Params
from fever.policy.spaces import Description
from fever.sampling.pool import Broadcasting
from fever.sampling.ray_pool import RayPool, WorkerActor
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

    def close(self) -> None:
        self.sampler.close()


class RayWorkers(RayPool, Workers):
    """Samplers as Ray actors."""

    def __init__(
        self, spec: SamplerSpec, observation: Description, action: Description, count: int, generation: int = 0
    ) -> None:
        super().__init__(count, generation)
        self.spec, self.spaces = spec, (observation, action)
        self.start_all()

    def start(self, index: int) -> Any:
        return self.actor(SamplerActor, Sampler, self.spec.for_worker(index, self.generations[index]), *self.spaces)

    def collect(self, fragments: int) -> list[Fragment]:
        self.fit()
        made: list[tuple[int, int, Fragment]] = []  # worker, its how-manieth, fragment
        pending: dict[Any, int] = {}
        idle = list(self.at_work)
        share: Counter[int] = Counter()
        while len(made) < fragments:
            while idle and len(made) + len(pending) < fragments:
                index = idle.pop(0)
                pending[self.actors[index].sample.remote(self.params, self.version)] = index
            for reference in self.finished(pending):
                index = pending.pop(reference)
                try:
                    fragment = self.get(reference)
                except self.lost as error:
                    self.replace(index, error)
                else:
                    self.deaths[index] = 0
                    made.append((index, share[index], fragment))
                    share[index] += 1
                if index in self.at_work:
                    idle.append(index)
        made.sort(key=lambda row: row[:2])
        return [fragment for _, _, fragment in made]


class SamplerActor(WorkerActor):
    """A worker that makes fragments."""

    def sample(self, params: Params, version: int) -> Fragment:
        self.build()
        return self.runner.sample(params, version)


def make_workers(
    spec: SamplerSpec, observation: Description, action: Description, count: int, generation: int = 0
) -> Workers:
    """The pool for a number of workers; 0 means this process and no Ray."""
    if count == 0:
        return LocalWorkers(spec, observation, action, generation)
    return RayWorkers(spec, observation, action, count, generation)
