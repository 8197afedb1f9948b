"""Replay all over a cluster: explorers and shards of the buffer as Ray actors, and the thread that keeps them busy.

    explorer ──transitions──► shard ──draws──► learner (this process)
        ▲                       ▲──priorities──┘  │
        └──────────────weights, epsilons──────────┘

Nothing waits for anything else while the ratio of transitions drawn to transitions added is held: explorers get their
next call before the last one ends, and shards their next draw before the learner asks for it. If the learner falls
behind, explorers get no further calls; if they do, the learner waits. An explorer always fills the same shard, so every
frame is sent once. What dies or does not answer is replaced: an explorer by a new one, a shard by an empty one.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from fever.errors import RayLost
from fever.policy import Params
from fever.replay.buffer import Batch, ReplayBuffer, ReplaySpec
from fever.replay.experience import BUFFER_STREAM, Draw, Experience, ExperienceSpec
from fever.replay.explorer import Explorer
from fever.replay.saved import check_arrays, load_shards, save_shards
from fever.sampling.ray_pool import STARTS_PER_GENERATION, STOPPED_SECONDS, TRANSFER_SECONDS, loss_errors, reason_of
from fever.sampling.spec import Report
from fever.sampling.stopped import identity
from fever.sampling.threaded_pool import ThreadedPool

AHEAD = 2  # calls that an explorer, and draws that a shard, has in hand
SLACK = 4  # draws by which either side may run ahead of the ratio
MEASURE_SECONDS = 0.2  # between two looks at all priorities of a shard, which take milliseconds for a million
SHARD_SECONDS = 30.0  # for a shard to answer a draw, or to add a block
SAVED_BYTES = 20e6  # of a shard that are sent in a second, at least
PATIENCE = 0.2  # seconds that the learner waits for a draw before `draw` returns None


class ShardExplorer(Explorer):
    """An explorer that sends its transitions to a shard."""

    sent: Any = None  # the call that adds the last block

    def explore_into(self, shard: Any, params: Params, version: int, epsilons: np.ndarray) -> tuple[Report, int]:
        """Take one call's steps and send the transitions; returns the report, and how many were experienced."""
        import ray

        block, report = self.explore(params, version, epsilons)
        if self.sent is not None:  # at most one block is being added: a slow shard slows its explorers
            with suppress(*loss_errors()):  # it died or hangs, and a later call names its replacement
                ray.get(self.sent, timeout=SHARD_SECONDS)
        self.sent = shard.add.remote(block)
        return report, block.experienced


class ShardActor:
    """One shard of the replay buffer."""

    def __init__(self, spec: ReplaySpec, seed: list[int]) -> None:
        self.buffer = ReplayBuffer(spec)
        self.rng = np.random.default_rng(np.random.SeedSequence(seed))
        self.measures: dict[str, float] = {}
        self.measured = -MEASURE_SECONDS

    def add(self, block: Any) -> None:
        self.buffer.add(block)

    def draw(self, count: int) -> tuple[Batch | None, dict[str, float]]:
        """Transitions (None while there are none at all), and what the buffer holds."""
        if time.monotonic() - self.measured >= MEASURE_SECONDS:
            self.measures, self.measured = self.buffer.measures(), time.monotonic()
        return self.buffer.sample(self.rng, count) if self.buffer.size else None, self.measures

    def update(self, serials: np.ndarray, errors: np.ndarray) -> None:
        self.buffer.update(serials, errors)

    def identity(self) -> tuple[str, int]:
        return identity()

    def arrays(self) -> dict[str, np.ndarray]:
        return self.buffer.arrays()

    def restore(self, arrays: dict[str, np.ndarray]) -> None:
        self.buffer.restore(arrays)


class RayExperience(ThreadedPool, Experience):
    """Explorers and shards as Ray actors; a thread of this process hands out their work."""

    def __init__(self, spec: ExperienceSpec, workers: int, generation: int = 0) -> None:
        Experience.__init__(self, spec)
        spaces = spec.observation, spec.action
        ThreadedPool.__init__(self, ShardExplorer, spec.sampler, (*spaces, spec.exploration), workers, generation)
        self.shard_generations = [generation * STARTS_PER_GENERATION] * spec.shards
        self.measures: list[dict[str, float]] = [{} for _ in range(spec.shards)]
        self.sent = [0] * spec.shards  # transitions that a shard was sent since it was empty
        self.shard_heard = [0.0] * spec.shards  # when a shard was given work, or had done some
        self.transitions_lost = 0  # with shards that were replaced
        self.saving = False  # shards are busy with that
        self.shards = [self._start_shard(index) for index in range(spec.shards)]
        self.ready: queue.SimpleQueue[Draw] = queue.SimpleQueue()
        self.empty_shards: set[int] = set()  # shards that have nothing to draw
        self.turns = list(range(spec.shards))  # the shard that was drawn from longest ago comes first
        self.exploring: dict[Any, int] = {}  # call -> worker
        self.drawing: dict[Any, tuple[int, int]] = {}  # call -> shard, its generation
        self.reports_lock = threading.Lock()
        self.start_all()

    def _start_shard(self, index: int) -> Any:
        where = self.cluster.spread(index)
        actor = self.ray.remote(ShardActor).options(num_cpus=0, max_restarts=0, scheduling_strategy=where)
        self.cluster.check()
        shard = actor.remote(
            self.spec.replay, [self.spec.sampler.seed, BUFFER_STREAM, self.shard_generations[index], index]
        )
        self.stopped.follow(shard_name(index), shard)
        self.shard_heard[index] = time.monotonic()
        return shard

    def _replace_shard(self, index: int, reason: str) -> None:
        """An empty shard in the place of one that died or does not answer; the user is told what is lost."""
        lost = min(self.sent[index], self.spec.replay.capacity)
        self.kill(self.shards[index])
        self.restarts += 1
        self.transitions_lost += lost
        self.shard_generations[index] += 1
        self.shards[index] = self._start_shard(index)
        self.measures[index] = {}
        self.sent[index] = 0
        self.empty_shards.add(index)
        self.tell(f"shard {index} of the replay buffer {reason}; an empty one replaces it: {lost:,} transitions lost")

    def tell(self, notice: str) -> None:
        """Log it, and have the trainer show it."""
        logging.warning("%s", notice)
        self.notices = (*self.notices, notice)

    # the learner's side

    def publish(self, params: Params, version: int, epsilons: np.ndarray) -> None:
        self.params, self.version, self.epsilons = self.store(params), version, epsilons
        self.start_thread()

    def draw(self) -> Draw | None:
        self.check()
        try:
            return self.ready.get(timeout=PATIENCE)
        except queue.Empty:
            return None

    def update(self, draw: Draw, errors: np.ndarray) -> None:
        self.cluster.check()
        if draw.generation == self.shard_generations[draw.shard]:
            self.shards[draw.shard].update.remote(draw.batch.serials, errors)

    def measure(self) -> dict[str, float]:
        known = [measures for measures in self.measures if measures]
        names = ("buffer_fill", "priority_mean")
        means = {name: float(np.mean([measures[name] for measures in known])) if known else 0.0 for name in names}
        return means | {"transitions_lost": float(self.transitions_lost)}

    def take_reports(self) -> list[Report]:
        with self.reports_lock:
            return super().take_reports()

    # the thread's side

    def calls(self) -> list[Any]:
        return [*self.exploring, *self.drawing]

    def submit(self) -> None:
        """Calls for explorers that have too few in hand, and draws from shards, as far as the ratio allows."""
        spec, owed = self.spec, self.owed()
        if owed < SLACK * spec.draw * len(self.shards) or self.added < spec.warmup or self.empty_shards:
            busy = Counter(self.exploring.values())
            for index in self.active:
                for _ in range(AHEAD - busy[index]):
                    shard = self.shards[index % len(self.shards)]
                    call = self.call(index, "explore_into", shard, self.params, self.version, self.epsilons)
                    self.exploring[call] = index
        drawing = Counter(index for index, _ in self.drawing.values())
        room = AHEAD * len(self.shards) - self.ready.qsize() - len(self.drawing)
        for _ in range(room):
            able = [index for index in self.turns if drawing[index] < AHEAD and index not in self.empty_shards]
            if not able or owed < spec.draw:
                return
            index = able[0]
            if not drawing[index]:
                self.shard_heard[index] = time.monotonic()
            self.turns.remove(index)
            self.turns.append(index)
            self.drawing[self.shards[index].draw.remote(spec.draw)] = index, self.shard_generations[index]
            self.drawn += spec.draw
            drawing[index] += 1
            owed -= spec.draw

    def receive(self, call: Any) -> None:
        """What an explorer or a shard has finished, or that it died."""
        if call in self.exploring:
            index = self.exploring.pop(call)
            done = self.result(call, index)
            if done is None:
                self.exploring = {call: other for call, other in self.exploring.items() if other != index}
                return
            report, added = done
            self.added += added
            self.sent[index % len(self.shards)] += added
            self.empty_shards.discard(index % len(self.shards))
            with self.reports_lock:
                self.reports.append(report)
            return
        if call not in self.drawing:  # of an explorer that was replaced meanwhile
            return
        index, generation = self.drawing.pop(call)
        batch = None
        try:
            batch, measures = self.fetch(call)
        except self.lost as error:
            if generation == self.shard_generations[index]:
                self._replace_shard(index, f"died ({reason_of(error)})")
        else:
            self.shard_heard[index] = time.monotonic()
            if generation == self.shard_generations[index]:
                self.measures[index] = measures
        if batch is None:
            self.drawn -= self.spec.draw
            self.empty_shards.add(index)
        else:
            self.ready.put(Draw(batch, index, generation))

    def look(self, now: float) -> None:
        """Replace shards whose process is stopped, or which have not answered for long."""
        super().look(now)
        drawing = {index for index, generation in self.drawing.values() if generation == self.shard_generations[index]}
        for index, heard in enumerate(self.shard_heard):
            if now - heard > STOPPED_SECONDS and self.stopped.look(shard_name(index)):
                self._replace_shard(index, "was stopped")
            elif index in drawing and now - heard > SHARD_SECONDS and not self.saving:
                self._replace_shard(index, f"did not answer for {SHARD_SECONDS:.0f} s")

    # checkpoints and the end

    def save(self, folder: Path) -> None:
        if not self.spec.keep:
            return
        self.saving = True
        try:
            save_shards(folder, self._all_arrays(), len(self.shards), self.added, self.drawn)
        except RayLost:
            self.tell("the replay buffer is not saved: Ray is gone")
        except self.lost:
            self.tell("the replay buffer is not saved this time: a shard died or did not answer")
        finally:
            self.shard_heard = [time.monotonic()] * len(self.shards)
            self.saving = False

    def _all_arrays(self) -> Iterator[dict[str, np.ndarray]]:
        """The arrays of one shard after the other: all of them may fill the memory. They stay in Ray's object store,
        and must be freed before Ray dies, or after it was shut down."""
        for shard in self.shards:
            self.cluster.check()
            call = shard.arrays.remote()
            self.cluster.wait([call], SHARD_SECONDS + self.spec.replay.bytes / SAVED_BYTES, self.look_meanwhile)
            arrays = self.ray.get(call, timeout=TRANSFER_SECONDS)
            yield arrays
            self.cluster.check()  # an error keeps this frame, and with it the arrays
            del arrays

    def restore(self, folder: Path) -> None:
        shards, added, drawn = load_shards(folder, len(self.shards))
        for arrays in shards:
            check_arrays(self.spec.replay, arrays)  # here: an actor's error would come with its traceback
        self.count_from(added, drawn)
        self.sent = [int(arrays["counters"][1]) for arrays in shards]
        self.cluster.check()
        calls = [shard.restore.remote(arrays) for shard, arrays in zip(self.shards, shards, strict=True)]
        generations = [*self.shard_generations]
        for index, call in enumerate(calls):
            try:
                self.get(call, SHARD_SECONDS + self.spec.replay.bytes / SAVED_BYTES)
            except self.lost as error:
                if self.shard_generations[index] == generations[index]:  # not replaced while it was waited for
                    self._replace_shard(index, f"was lost while it was restored ({reason_of(error)})")

    def close(self) -> None:
        self.stop_thread()
        self.kill(*self.shards)
        super().close()


def shard_name(index: int) -> str:
    """The name of a shard, among the names of workers, which are numbers."""
    return f"shard {index}"
