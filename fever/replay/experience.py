"""Experience replay: explorers fill a buffer and a learner draws from it, at a fixed ratio.

`LocalExperience` alternates both in this process, deterministic under a seed. `RayExperience` in `shards.py` runs
explorers and shards of the buffer concurrently. Both have the same interface, `Experience`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fever.policy import Params
from fever.policy.spaces import Description
from fever.replay.buffer import Batch, ReplayBuffer, ReplaySpec
from fever.replay.explorer import Exploration, Explorer
from fever.replay.saved import load_shards, save_shards
from fever.sampling.pool import Pool
from fever.sampling.spec import Report, SamplerSpec
from fever.signals import uninterruptible
from fever.text import format_bytes

BUFFER_STREAM = 2**32 - 2  # random stream of the buffer, in the place of a worker's index


@dataclass(frozen=True)
class ExperienceSpec:
    """Everything that experience is made from; sent to workers and shards."""

    sampler: SamplerSpec
    observation: Description
    action: Description
    exploration: Exploration
    replay: ReplaySpec  # of one shard
    shards: int
    keep: bool  # whether `save` writes the buffer
    draw: int  # transitions in one draw
    ratio: float  # transitions drawn for each one added
    warmup: int  # transitions added before the first draw

    @property
    def steps_between_draws(self) -> int:
        """Steps of each environment per draw that keep the ratio, in one process."""
        return max(1, math.ceil(self.draw / (self.ratio * self.sampler.envs)))


@dataclass
class Draw:
    """Transitions for one call of the learner."""

    batch: Batch
    shard: int = 0
    generation: int = 0  # how often the shard had been replaced


class Experience(Pool):
    """What a learner sees of explorers and replay buffer."""

    def __init__(self, spec: ExperienceSpec) -> None:
        self.spec = spec
        # Transitions added, without copies that have other goals, and drawn; version of the weights.
        self.added = self.drawn = self.version = 0
        self.params: Any = None
        self.epsilons = np.ones(spec.exploration.explorers)
        self.reports: list[Report] = []
        shards, self.capacity = spec.shards, spec.shards * spec.replay.capacity
        parts = f" in {shards} shards" if shards > 1 else ""
        size = format_bytes(shards * spec.replay.bytes)
        self.description = f"replay buffer: {self.capacity:,} transitions{parts}, {size} when full"

    def publish(self, params: Params, version: int, epsilons: np.ndarray) -> None:
        """Use these weights from the next call on; explorer i acts at random with probability `epsilons[i]`."""
        raise NotImplementedError

    def draw(self) -> Draw | None:
        """The next transitions to learn from; None if there are not enough yet."""
        raise NotImplementedError

    def update(self, draw: Draw, errors: np.ndarray) -> None:
        """Update the priorities of a draw's transitions from TD errors."""
        raise NotImplementedError

    def measure(self) -> dict[str, float]:
        """Metrics of the buffer."""
        raise NotImplementedError

    def owed(self) -> float:
        """Transitions that may still be drawn at this ratio."""
        return self.spec.ratio * (self.added - self.spec.warmup) - self.drawn

    def count_from(self, added: int, drawn: int) -> None:
        """Continue with saved counters. What is owed is at most what a full buffer owes, one way or the other: counters
        that do not fit each other, or another ratio, would have the run learn or explore alone without end."""
        self.added = added
        due, most = self.spec.ratio * max(0, added - self.spec.warmup), self.spec.ratio * self.capacity + self.spec.draw
        self.drawn = int(min(max(drawn, due - most), due + most))

    def take_reports(self) -> list[Report]:
        """Reports of the workers since the last call."""
        taken, self.reports = self.reports, []
        return taken


class LocalExperience(Experience):
    """One explorer and one buffer in this process."""

    def __init__(self, spec: ExperienceSpec, generation: int = 0) -> None:
        super().__init__(spec)
        self.buffer = ReplayBuffer(spec.replay)
        sampler = spec.sampler.for_worker(0, generation)
        self.explorer = Explorer(sampler, spec.observation, spec.action, spec.exploration)
        self.rng = np.random.default_rng(np.random.SeedSequence([sampler.seed, BUFFER_STREAM, generation]))
        self.steps = spec.steps_between_draws

    def starts_alike(self) -> bool:
        return self.explorer.starts_alike()

    def publish(self, params: Params, version: int, epsilons: np.ndarray) -> None:
        self.params, self.version, self.epsilons = params, version, epsilons

    def draw(self) -> Draw | None:
        if self.owed() < self.spec.draw:
            block, report = self.explorer.explore(self.params, self.version, self.epsilons, self.steps)
            with uninterruptible():  # an interrupted run saves the buffer, which must be consistent
                self.buffer.add(block)
                self.added += block.experienced
            self.reports.append(report)
        if self.owed() < self.spec.draw or not self.buffer.size:
            return None
        self.drawn += self.spec.draw
        return Draw(self.buffer.sample(self.rng, self.spec.draw))

    def update(self, draw: Draw, errors: np.ndarray) -> None:
        self.buffer.update(draw.batch.serials, errors)

    def measure(self) -> dict[str, float]:
        return {**self.buffer.measures(), "transitions_lost": 0.0}

    def save(self, folder: Path) -> None:
        if self.spec.keep:
            save_shards(folder, [self.buffer.arrays()], 1, self.added, self.drawn)

    def restore(self, folder: Path) -> None:
        (arrays,), added, drawn = load_shards(folder, 1)
        self.buffer.restore(arrays)
        self.count_from(added, drawn)

    def change_env(self, kwargs: dict[str, Any]) -> None:
        self.explorer.change_env(kwargs)

    def close(self) -> None:
        self.explorer.close()
