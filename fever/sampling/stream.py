"""A stream of fragments from samplers that never wait for the learner.

The thread of `ThreadedPool` submits every sampler's next call, with the newest weights, before the last one ends.
Finished fragments wait in a queue of bounded length and age. When the learner is too slow the oldest fragments are
dropped, so it always learns from fresh experience, and a slow sampler delays no other.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from typing import Any

from fever.policy import Params
from fever.policy.spaces import Description
from fever.sampling.pool import Pool
from fever.sampling.sampler import Sampler
from fever.sampling.spec import Fragment, SamplerSpec
from fever.sampling.threaded_pool import ThreadedPool
from fever.sampling.workers import LocalWorkers

AHEAD = 2  # calls submitted to a sampler at a time
PATIENCE = 0.2  # seconds between two checks of whether the thread is still alive


class Stream(Pool):
    """What an asynchronous algorithm sees of the samplers."""

    dropped = 0  # fragments, so far

    @property
    def waiting(self) -> int:
        """Fragments in the queue."""
        return 0

    def publish(self, params: Params, version: int) -> None:
        """Use these weights from the next call on; versions increase."""
        raise NotImplementedError

    def next(self, fragments: int) -> list[Fragment]:
        """Wait for this many fragments and return them."""
        raise NotImplementedError


class LocalStream(LocalWorkers, Stream):
    """One sampler in this process: every fragment is made with the newest weights."""

    def publish(self, params: Params, version: int) -> None:
        self.params, self.version = params, version

    def next(self, fragments: int) -> list[Fragment]:
        return self.collect(fragments)


class RayStream(ThreadedPool, Stream):
    """Samplers as Ray actors that are always busy."""

    def __init__(
        self,
        spec: SamplerSpec,
        observation: Description,
        action: Description,
        count: int,
        generation: int,
        queue_size: int,
        max_lag: int,
    ) -> None:
        """At most `queue_size` fragments wait; those made with weights over `max_lag` versions old are dropped."""
        super().__init__(Sampler, spec, (observation, action), count, generation)
        self.queue_size, self.max_lag = queue_size, max_lag
        self.pending: dict[Any, int] = {}  # call -> worker
        self.queue: deque[Fragment] = deque()
        self.arrival = threading.Condition()
        self.version = 0
        self.newest: tuple[Any, int] = None, 0  # weights and version, set together for the thread
        self.start_all()

    # the learner's side

    def publish(self, params: Params, version: int) -> None:
        self.newest, self.version = (self.store(params), version), version
        self.start_thread()

    def next(self, fragments: int) -> list[Fragment]:
        with self.arrival:
            while True:
                self.check()
                fresh = [fragment for fragment in self.queue if fragment.version >= self.version - self.max_lag]
                self.dropped += len(self.queue) - len(fresh)
                self.queue = deque(fresh)  # any of them may be old: slow samplers send late
                if len(self.queue) >= fragments:
                    return [self.queue.popleft() for _ in range(fragments)]
                self.arrival.wait(PATIENCE)

    @property
    def waiting(self) -> int:
        return len(self.queue)

    # the thread's side

    def calls(self) -> list[Any]:
        return list(self.pending)

    def submit(self) -> None:
        busy = Counter(self.pending.values())
        for index in self.active:
            for _ in range(AHEAD - busy[index]):
                self.pending[self.call(index, "sample", *self.newest)] = index

    def receive(self, call: Any) -> None:
        if call not in self.pending:  # of a sampler that was replaced meanwhile
            return
        index = self.pending.pop(call)
        fragment = self.result(call, index)
        if fragment is None:
            self.pending = {other: worker for other, worker in self.pending.items() if worker != index}
            return
        with self.arrival:
            self.queue.append(fragment)
            while len(self.queue) > self.queue_size:
                self.queue.popleft()
                self.dropped += 1
            self.arrival.notify()
