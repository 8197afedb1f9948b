"""The replay buffer: a ring of transitions that point into a ring of frames. NumPy only: no JAX, no Ray.

Every observation is stored once, however many transitions refer to it, and frames are stacked only when sampled. With
priorities, a sum tree samples transitions in proportion to them (Schaul et al. 2016).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from fever.errors import FeverError
from fever.replay.saved import check_arrays
from fever.replay.sum_tree import SumTree, pieces
from fever.system import free_memory

PRIORITY_FLOOR = 1e-6  # added to every |TD error|, so that every transition can be sampled
REDRAWS = 16  # attempts to replace dead transitions by uniform draws, before the living ones are listed


def write(ring: np.ndarray, start: int, rows: np.ndarray) -> None:
    """Write rows into a ring from slot `start`, wrapping around at the end."""
    for place, piece in pieces(start, len(rows), len(ring)):
        ring[place] = rows[piece]


@dataclass
class Transitions:
    """M transitions of one stream, and the K frames they need that were not sent before.

    A frame is a vector, an image, or one image of a stack; it is sent once and then referred to by its number.
    """

    stream: int  # its id; frames are numbered within a stream, from 0, without gaps
    first_frame: int  # number of frames[0]
    oldest_frame: int  # the lowest frame number that a later block of this stream may refer to
    frames: np.ndarray  # [K, *frame_shape]
    observations: np.ndarray  # int64 [M, stack], frame numbers, oldest of the stack first
    next_observations: np.ndarray  # int64 [M, stack]
    actions: np.ndarray  # [M, *action_shape]
    rewards: np.ndarray  # float32 [M], discounted sums over n steps
    discounts: np.ndarray  # float32 [M], what the value of the next observation is multiplied by; 0 after termination
    priorities: np.ndarray  # float32 [M], |TD error| as the actor sees it; ignored by a buffer without priorities
    relabelled: int = 0  # how many of them, the last ones, are copies with another goal, see `Hindsight`

    @property
    def experienced(self) -> int:
        """Transitions without the copies: the ratio of learning to exploring is held for these."""
        return len(self.rewards) - self.relabelled


@dataclass
class Batch:
    """Transitions sampled from a buffer; the first axis of every array is the transition."""

    observations: np.ndarray  # [count, *observation_shape]
    next_observations: np.ndarray  # [count, *observation_shape]
    actions: np.ndarray  # [count, *action_shape]
    rewards: np.ndarray  # float32 [count]
    discounts: np.ndarray  # float32 [count]
    serials: np.ndarray  # int64 [count], running numbers of the transitions, for `update`
    relative_priorities: np.ndarray  # float32 [count], size * probability; weights are this**-beta, normalised


@dataclass(frozen=True)
class ReplaySpec:
    """Shapes and types of a buffer. With shards, `capacity` is that of one shard."""

    capacity: int  # transitions
    frame_shape: tuple[int, ...]
    frame_dtype: str
    stack: int  # frames per observation, along a new last axis; 1: a frame is the whole observation
    action_shape: tuple[int, ...]
    action_dtype: str
    prioritized: bool
    alpha: float  # exponent of the priorities
    her: int = 0  # copies of every transition with other goals; each has two frames of its own

    @property
    def frame_capacity(self) -> int:
        """Number of frames: slightly more than transitions, because an episode's last frame starts no transition."""
        return int(self.capacity * (1.1 + 2 * self.her) / (1 + self.her)) + 1000

    @property
    def observation_shape(self) -> tuple[int, ...]:
        return self.frame_shape if self.stack == 1 else (*self.frame_shape, self.stack)

    @property
    def rings(self) -> dict[str, tuple[tuple[int, ...], str]]:
        """Shape and type of each of the buffer's rings; those of transitions are `capacity` long."""
        return {
            "frames": ((self.frame_capacity, *self.frame_shape), self.frame_dtype),
            "pointers": ((self.capacity, 2, self.stack), "int32" if self.frame_capacity < 2**31 else "int64"),
            "oldest": ((self.capacity,), "int64"),
            "actions": ((self.capacity, *self.action_shape), self.action_dtype),
            "rewards": ((self.capacity,), "float32"),
            "discounts": ((self.capacity,), "float32"),
        }

    @property
    def bytes(self) -> int:
        """Bytes of the arrays of a full buffer."""
        rings = sum(math.prod(shape) * np.dtype(dtype).itemsize for shape, dtype in self.rings.values())
        return rings + (SumTree.bytes_for(self.capacity) if self.prioritized else 0)


class ReplayBuffer:
    """The last `capacity` transitions. Transition number s is in slot s % capacity, frame number f in f % its ring.

    A transition is dead once one of its frames was overwritten; it still occupies its slot but is never sampled.
    """

    def __init__(self, spec: ReplaySpec) -> None:
        self.spec = spec
        # np.zeros takes no memory until it is written to.
        self.frames, self.pointers, self.oldest, self.actions, self.rewards, self.discounts = (
            np.zeros(shape, dtype) for shape, dtype in spec.rings.values()
        )
        self.tree = SumTree(spec.capacity) if spec.prioritized else None
        self.added = 0  # transitions ever added
        self.frames_added = 0
        # stream -> (number of its first known frame, numbers in this buffer of that frame and all later ones)
        self.streams: dict[int, tuple[int, np.ndarray]] = {}

    @property
    def size(self) -> int:
        """Transitions in the ring, the dead included."""
        return min(self.added, self.spec.capacity)

    @property
    def fill(self) -> float:
        """How full the ring is, 0 to 1."""
        return self.size / self.spec.capacity

    @property
    def priority_mean(self) -> float:
        """Mean priority of the living transitions; 1 without priorities."""
        if self.tree is None:
            return 1.0
        priorities = self.tree.levels[0][: self.size][self._alive(slice(0, self.size))]
        return float(priorities.mean()) if len(priorities) else 0.0

    def measures(self) -> dict[str, float]:
        """For the metrics."""
        return {"buffer_fill": self.fill, "priority_mean": self.priority_mean}

    def add(self, block: Transitions) -> int:
        """Store a block; returns how many transitions were added. Those with unknown frames are left out."""
        if len(block.rewards) > self.spec.capacity or len(block.frames) > self.spec.frame_capacity:
            raise FeverError(
                f"a block of {len(block.rewards)} transitions and {len(block.frames)} frames does not fit into a "
                f"buffer of {self.spec.capacity} and {self.spec.frame_capacity}; set a larger buffer"
            )
        priorities = None if self.tree is None else self._priorities(block.priorities)
        numbers = self._add_frames(block)  # [M, 2, stack]
        oldest = numbers.min(axis=(1, 2))
        columns = [numbers % self.spec.frame_capacity, oldest, block.actions, block.rewards, block.discounts]
        known = oldest >= self._first_frame()
        if not known.all():
            columns = [column[known] for column in columns]
            priorities = None if priorities is None else priorities[known]
        start, count = self.added % self.spec.capacity, len(columns[0])
        rings = (self.pointers, self.oldest, self.actions, self.rewards, self.discounts)
        for ring, column in zip(rings, columns, strict=True):
            write(ring, start, column)
        if self.tree is not None and priorities is not None:
            self.tree.set_range(start, priorities)
        self.added += count
        return count

    def sample(self, rng: np.random.Generator, count: int) -> Batch:
        """Sample living transitions with replacement: in proportion to their priorities, or uniformly."""
        slots = self._draw_uniform(rng, count) if self.tree is None else self._draw(self.tree, rng, count)
        relative = np.ones(count, np.float32)
        if self.tree is not None:
            relative = (self.tree.get(slots) * (self.size / self.tree.total)).astype(np.float32)
        pointers = self.pointers.take(slots, axis=0)
        return Batch(
            observations=self._observations(pointers[:, 0]),
            next_observations=self._observations(pointers[:, 1]),
            actions=self.actions.take(slots, axis=0),
            rewards=self.rewards.take(slots),
            discounts=self.discounts.take(slots),
            serials=self.added - 1 - (self.added - 1 - slots) % self.spec.capacity,
            relative_priorities=relative,
        )

    def update(self, serials: np.ndarray, errors: np.ndarray) -> None:
        """Update the priorities of transitions `[M]` from new TD errors `[M]`; overwritten transitions are ignored."""
        if self.tree is None:
            return
        slots = serials % self.spec.capacity
        here = (serials >= self.added - self.size) & (serials < self.added) & self._alive(slots)
        if not here.all():
            slots, errors = slots[here], errors[here]
        self.tree.set(slots, self._priorities(errors))

    def arrays(self) -> dict[str, np.ndarray]:
        """Arrays for a checkpoint: views of the filled parts, to be written before anything is added."""
        frames = min(self.frames_added, self.spec.frame_capacity)
        arrays = {name: getattr(self, name)[: frames if name == "frames" else self.size] for name in self.spec.rings}
        if self.tree is not None:
            arrays["priorities"] = self.tree.levels[0][: self.size]
        return {**arrays, "counters": np.array([self.spec.capacity, self.added, self.frames_added])}

    def restore(self, arrays: dict[str, np.ndarray]) -> None:
        """Restore what `arrays()` returned; streams cannot be continued. Changes nothing if `check_arrays` raises."""
        check_arrays(self.spec, arrays)
        capacity, added, frames_added = arrays["counters"].tolist()
        for name in self.spec.rings:
            write(getattr(self, name), 0, arrays[name])
        self.added, self.frames_added, self.streams = added, frames_added, {}
        if self.tree is not None:
            self.tree = SumTree(capacity)
            self.tree.set_range(0, arrays["priorities"])

    def _add_frames(self, block: Transitions) -> np.ndarray:
        """Store the frames; returns this buffer's numbers of all frames of the block `[M, 2, stack]`, -1 if unknown."""
        if block.stream not in self.streams:  # a new stream: forget those whose frames are all overwritten
            first = self._first_frame()
            self.streams = {name: known for name, known in self.streams.items() if known[1].max(initial=-1) >= first}
        write(self.frames, self.frames_added % self.spec.frame_capacity, block.frames)
        new = np.arange(self.frames_added, self.frames_added + len(block.frames))
        self.frames_added += len(block.frames)
        first, known = self.streams.get(block.stream, (block.first_frame, new[:0]))
        if block.first_frame < first:  # numbered from the start again
            first, known = block.first_frame, new[:0]
        kept = block.first_frame - first
        lost = np.full(max(kept - len(known), 0), -1)
        known = np.concatenate([known[:kept], lost, new])
        numbers = np.stack([block.observations, block.next_observations], axis=1) - first
        missing = (numbers < 0) | (numbers >= len(known))
        numbers = np.where(missing, -1, known.take(numbers, mode="clip")) if len(known) else np.full_like(numbers, -1)
        drop = min(max(block.oldest_frame - first, 0), len(known))
        self.streams[block.stream] = (first + drop, known[drop:].copy())
        return numbers

    def _first_frame(self) -> int:
        """The oldest frame that was not overwritten."""
        return max(self.frames_added - self.spec.frame_capacity, 0)

    def _alive(self, slots: np.ndarray | slice) -> np.ndarray:
        return self.oldest[slots] >= self._first_frame()

    def _priorities(self, errors: np.ndarray) -> np.ndarray:
        priorities = (np.abs(errors.astype(np.float64)) + PRIORITY_FLOOR) ** self.spec.alpha
        if not np.isfinite(priorities.sum()):
            raise ValueError("a TD error is not a finite number")
        return priorities

    def _draw(self, tree: SumTree, rng: np.random.Generator, count: int) -> np.ndarray:
        """Living slots `[count]` in proportion to their priorities; dead slots that are drawn get priority zero."""
        self._check_any(tree.total > 0)
        slots = tree.sample(rng, count)
        while len(dead := np.flatnonzero(~self._alive(slots))):
            tree.set(slots[dead], 0.0)
            self._check_any(tree.total > 0)
            slots[dead] = tree.find(rng.random(len(dead)) * tree.total)
        return slots

    def _draw_uniform(self, rng: np.random.Generator, count: int) -> np.ndarray:
        """Living slots `[count]`, uniformly."""
        self._check_any(self.size > 0)
        slots = rng.integers(0, self.size, count)
        for _ in range(REDRAWS):
            dead = np.flatnonzero(~self._alive(slots))
            if not len(dead):
                return slots
            slots[dead] = rng.integers(0, self.size, len(dead))
        living = np.flatnonzero(self._alive(slice(0, self.size)))
        self._check_any(len(living) > 0)
        return np.where(self._alive(slots), slots, living.take(rng.integers(0, len(living), count)))

    def _check_any(self, any_left: bool) -> None:
        if not any_left:
            raise ValueError("the replay buffer has no transition to sample")

    def _observations(self, pointers: np.ndarray) -> np.ndarray:
        """Observations `[M, *observation_shape]` from slots of frames `[M, stack]`."""
        if self.spec.stack == 1:
            return self.frames.take(pointers[:, 0], axis=0)
        observations = np.empty((len(pointers), *self.spec.observation_shape), self.frames.dtype)
        for place, column in enumerate(pointers.T):  # four times faster than gathering and then transposing
            observations[..., place] = self.frames.take(column, axis=0)
        return observations


def check_memory(spec: ReplaySpec, shards: int, available: int | None = None) -> None:
    """Raise FeverError if `shards` buffers of this spec do not fit into `available` bytes (default: free memory).

    The message gives the transitions of all shards together.
    """
    available = free_memory() if available is None else available
    if available is None or shards * spec.bytes <= available:
        return
    low, high = 0, spec.capacity  # fits (or is nothing at all), does not fit
    while high - low > 1:
        middle = (low + high) // 2
        fits = shards * replace(spec, capacity=middle).bytes <= available
        low, high = (middle, high) if fits else (low, middle)
    fitting = shards * low
    digits = 10 ** max(len(str(fitting)) - 2, 0)
    advice = f"buffer={fitting // digits * digits} would fit" if fitting else "not even one transition would fit"
    raise FeverError(
        f"the replay buffer of {shards * spec.capacity:,} transitions needs "
        f"{math.ceil(shards * spec.bytes / 1e8) / 10:.1f} GB, but {available // 10**8 / 10:.1f} GB are free; {advice}"
    )
