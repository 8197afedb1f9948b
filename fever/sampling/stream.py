"""A stream of fragments from samplers that never wait for the learner.

The thread of `BusyPool` gives every sampler its next call, with the newest weights, before the last one ends. Finished
fragments wait in a queue of bounded length and bounded age: what the learner does not get to in time is dropped, the
oldest first, so a slow learner learns from fresh experience and a slow sampler holds up nobody.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from typing import Any

from fever.policy import Params
from fever.policy.spaces import Description
from fever.sampling.pool import Pool
from fever.sampling.ray_pool import BusyPool
from fever.sampling.sampler import Sampler
from fever.sampling.spec import Fragment, SamplerSpec
from fever.sampling.workers import SamplerActor

AHEAD = 2  # calls that a sampler has in hand
PATIENCE = 0.2  # seconds between two looks at whether the thread still lives


class Stream(Pool):
    """What an asynchronous algorithm sees of the samplers."""

    dropped = 0  # fragments that were never learned from

    @property
    def waiting(self) -> int:
        """Fragments in the queue."""
        return 0

    def publish(self, params: Params, version: int) -> None:
        """Make these the weights that act from the next call on; versions go up."""
        raise NotImplementedError

    def next(self, fragments: int) -> list[Fragment]:
        """The next fragments, as soon as there are so many."""
        raise NotImplementedError


class LocalStream(Stream):
    """One sampler in this process: whatever it gives is fresh."""

    def __init__(self, spec: SamplerSpec, observation: Description, action: Description, generation: int) -> None:
        self.sampler = Sampler(spec.for_worker(0, generation), observation, action)

    def publish(self, params: Params, version: int) -> None:
        self.params, self.version = params, version

    def next(self, fragments: int) -> list[Fragment]:
        return [self.sampler.sample(self.params, self.version) for _ in range(fragments)]

    def close(self) -> None:
        self.sampler.close()


class RayStream(BusyPool, Stream):
    """Samplers as Ray actors that are always busy."""

    def __init__(
        self,
        spec: SamplerSpec,
        observation: Description,
        action: Description,
        count: int,
        generation: int,
        room: int,
        max_lag: int,
    ) -> None:
        """`room` fragments wait at most, and none whose weights are more than `max_lag` versions old is given out."""
        super().__init__(count, generation)
        self.spec, self.spaces = spec, (observation, action)
        self.room, self.max_lag = room, max_lag
        self.pending: dict[Any, int] = {}  # call -> worker
        self.queue: deque[Fragment] = deque()
        self.arrival = threading.Condition()
        self.version = 0
        self.newest: tuple[Any, int] = None, 0  # weights and their version: one attribute, for the thread to see both
        self.start_all()

    def start(self, index: int) -> Any:
        return self.actor(SamplerActor, Sampler, self.spec.for_worker(index, self.generations[index]), *self.spaces)

    # the learner's side

    def publish(self, params: Params, version: int) -> None:
        self.newest, self.version = (self.put(params), version), version
        self.start_thread()

    def next(self, fragments: int) -> list[Fragment]:
        with self.arrival:
            while True:
                self.check()
                fresh = [fragment for fragment in self.queue if fragment.version >= self.version - self.max_lag]
                self.dropped += len(self.queue) - len(fresh)
                self.queue = deque(fresh)  # a slow sampler's are old, but arrive after newer ones
                if len(self.queue) >= fragments:
                    return [self.queue.popleft() for _ in range(fragments)]
                self.arrival.wait(PATIENCE)

    @property
    def waiting(self) -> int:
        return len(self.queue)

    # the thread's side

    def calls(self) -> list[Any]:
        return list(self.pending)

    def hand_out(self) -> None:
        busy = Counter(self.pending.values())
        for index in self.at_work:
            for _ in range(AHEAD - busy[index]):
                self.pending[self.actors[index].sample.remote(*self.newest)] = index

    def take(self, call: Any) -> None:
        if call not in self.pending:  # of a sampler that was replaced meanwhile
            return
        index = self.pending.pop(call)
        try:
            fragment = self.get(call)
        except self.lost as error:
            self.pending = {other: worker for other, worker in self.pending.items() if worker != index}
            self.replace(index, error)
            return
        self.deaths[index] = 0
        with self.arrival:
            self.queue.append(fragment)
            while len(self.queue) > self.room:
                self.queue.popleft()
                self.dropped += 1
            self.arrival.notify()
