"""Replay all over a cluster: explorers and shards of the buffer as Ray actors, and the thread that keeps them busy.

    explorer ──transitions──► shard ──draws──► learner (this process)
        ▲                       ▲──priorities──┘  │
        └──────────────weights, epsilons──────────┘

Nothing waits for anything else while the ratio of transitions drawn to transitions added is held: explorers get their
next call before the last one ends, and shards their next draw before the learner asks for it. If the learner falls
behind, explorers get no further calls; if they do, the learner waits. An explorer always fills the same shard, so every
frame is sent once. What dies is replaced: an explorer by a new one, a shard by an empty one.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from fever.policy import Params
from fever.replay.buffer import Batch, ReplayBuffer, ReplaySpec
from fever.replay.experience import BUFFER_STREAM, Draw, Experience, ExperienceSpec, load_shards, save_shards
from fever.replay.explorer import Explorer
from fever.sampling.ray_pool import ThreadedPool, loss_errors, reason_of
from fever.sampling.spec import Report

AHEAD = 2  # calls that an explorer, and draws that a shard, has in hand
SLACK = 4  # draws by which either side may run ahead of the ratio
MEASURE_SECONDS = 0.2  # between two looks at all priorities of a shard, which take milliseconds for a million
PATIENCE = 0.2  # seconds that the learner waits for a draw before `draw` returns None


class ShardExplorer(Explorer):
    """An explorer that sends its transitions to a shard."""

    sent: Any = None  # the call that adds the last block

    def explore_into(self, shard: Any, params: Params, version: int, epsilons: np.ndarray) -> tuple[Report, int]:
        """Take one call's steps and send the transitions; returns the report, and how many were experienced."""
        import ray

        block, report = self.explore(params, version, epsilons)
        if self.sent is not None:  # at most one block is being added: a slow shard slows its explorers
            with suppress(*loss_errors()):  # it died, and the next call names its replacement
                ray.get(self.sent)
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
        self.shard_generations = [generation] * spec.shards
        self.shards = [self._start_shard(index) for index in range(spec.shards)]
        self.measures: list[dict[str, float]] = [{} for _ in self.shards]
        self.ready: queue.SimpleQueue[Draw] = queue.SimpleQueue()
        self.empty_shards: set[int] = set()  # shards that have nothing to draw
        self.turns = list(range(spec.shards))  # the shard that was drawn from longest ago comes first
        self.exploring: dict[Any, int] = {}  # call -> worker
        self.drawing: dict[Any, tuple[int, int]] = {}  # call -> shard, its generation
        self.reports_lock = threading.Lock()
        self.start_all()

    def _start_shard(self, index: int) -> Any:
        actor = self.ray.remote(ShardActor).options(num_cpus=0, max_restarts=0, scheduling_strategy="SPREAD")
        return actor.remote(
            self.spec.replay, [self.spec.sampler.seed, BUFFER_STREAM, self.shard_generations[index], index]
        )

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
        if draw.generation == self.shard_generations[draw.shard]:
            self.shards[draw.shard].update.remote(draw.batch.serials, errors)

    def measure(self) -> dict[str, float]:
        known = [measures for measures in self.measures if measures]
        names = ("buffer_fill", "priority_mean")
        return {name: float(np.mean([measures[name] for measures in known])) if known else 0.0 for name in names}

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
            self.empty_shards.discard(index % len(self.shards))
            with self.reports_lock:
                self.reports.append(report)
            return
        if call not in self.drawing:  # of an explorer that was replaced meanwhile
            return
        index, generation = self.drawing.pop(call)
        try:
            batch, measures = self.get(call)
        except self.lost as error:
            batch, measures = None, {}
            if generation == self.shard_generations[index]:
                reason = reason_of(error)
                logging.warning("shard %d of the replay buffer died and is replaced by an empty one: %s", index, reason)
                self.restarts += 1
                self.shard_generations[index] += 1
                self.shards[index] = self._start_shard(index)
        self.measures[index] = measures
        if batch is None:
            self.drawn -= self.spec.draw
            self.empty_shards.add(index)
        else:
            self.ready.put(Draw(batch, index, generation))

    # checkpoints and the end

    def save(self, folder: Path) -> None:
        if not self.spec.keep:
            return
        if not self.cluster.reachable():
            logging.warning("the replay buffer is not saved: Ray is gone")
            return
        arrays = (self.get(shard.arrays.remote()) for shard in self.shards)  # one at a time: they may fill the memory
        try:
            save_shards(folder, arrays, len(self.shards), self.added, self.drawn)
        except self.lost:
            logging.warning("the replay buffer is not saved this time: a shard died")

    def restore(self, folder: Path) -> None:
        shards, self.added, self.drawn = load_shards(folder, len(self.shards))
        self.get([shard.restore.remote(arrays) for shard, arrays in zip(self.shards, shards, strict=True)])

    def close(self) -> None:
        self.stop_thread()
        self.kill(*self.shards)
        super().close()
