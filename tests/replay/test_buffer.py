"""The tree against plain sums, the buffer against a list of dictionaries that keeps whole observations."""

from __future__ import annotations

import pickle
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fever.errors import FeverError
from fever.replay.buffer import Batch, ReplayBuffer, ReplaySpec, Transitions, check_memory
from fever.replay.sum_tree import SumTree
from fever.system import free_memory

settings.register_profile("replay", deadline=None, derandomize=True, max_examples=40)
settings.load_profile("replay")
VECTOR = ReplaySpec(40, (3,), "float32", 1, (2,), "float32", True, 0.6)
STACKED = ReplaySpec(40, (2, 3), "uint8", 4, (), "int32", True, 0.6)
SPECS = [VECTOR, STACKED, replace(VECTOR, prioritized=False), replace(STACKED, prioritized=False)]
KINDS = pytest.mark.parametrize("spec", SPECS, ids=["vector", "stacked", "vector-uniform", "stacked-uniform"])


class DeepTree(SumTree):
    """Has several levels at a handful of slots."""

    FAN_OUT = 3
    TOP = 2


class SmallBuffer(ReplayBuffer):
    """Has few frames, so that transitions die long before their slots are taken."""

    def __init__(self, spec: ReplaySpec) -> None:
        frames = type("Spec", (ReplaySpec,), {"frame_capacity": property(lambda self: self.capacity // 2 + 15)})
        super().__init__(frames(**vars(spec)))


class Actor:
    """Makes blocks of a stream, and remembers every transition with its observations in full."""

    def __init__(self, spec: ReplaySpec, stream: int, seed: int = 0) -> None:
        self.spec, self.stream, self.rng = spec, stream, np.random.default_rng([seed, stream])
        self.all_frames = np.zeros((0, *spec.frame_shape), spec.frame_dtype)

    def observation(self, numbers: np.ndarray) -> np.ndarray:
        frames = [self.all_frames[number] for number in numbers]
        return frames[0] if self.spec.stack == 1 else np.stack(frames, axis=-1)

    def block(self, frames: int, count: int, reach: int = 6) -> tuple[Transitions, list[dict[str, Any]]]:
        """Some new frames, and transitions between any of those and the last few that came before."""
        first = len(self.all_frames)
        new = self.rng.integers(0, 255, (frames, *self.spec.frame_shape)).astype(self.spec.frame_dtype)
        self.all_frames = np.concatenate([self.all_frames, new])
        end, low = first + frames, max(0, first - reach)
        pointers = np.sort(self.rng.integers(low, end, (2, count, self.spec.stack)), axis=-1)
        actions = self.rng.integers(0, 9, (count, *self.spec.action_shape)).astype(self.spec.action_dtype)
        rewards, discounts, errors = self.rng.random((3, count), np.float32)
        rest = (actions, rewards, discounts, errors - np.float32(0.5))
        block = Transitions(self.stream, first, max(0, end - reach), new, *pointers, *rest)
        names = ("actions", "rewards", "discounts", "priority", "observations", "next_observations", "frames")
        whole = [[self.observation(numbers) for numbers in side] for side in pointers]
        priorities = (np.abs(block.priorities.astype(float)) + 1e-6) ** self.spec.alpha
        named = [[(self.stream, int(number)) for number in pointers[:, row].flat] for row in range(count)]
        rows = zip(actions, rewards, discounts, priorities, *whole, named, strict=True)
        return block, [dict(zip(names, row, strict=True)) for row in rows]


class Naive:
    """A list of all transitions ever added and one of all frames, in the order of their arrival."""

    def __init__(self, buffer: ReplayBuffer) -> None:
        self.capacity, self.frame_capacity = buffer.spec.capacity, buffer.spec.frame_capacity
        self.rows: list[dict[str, Any]] = []
        self.frames: list[tuple[int, int]] = []

    def add(self, block: Transitions, rows: list[dict[str, Any]]) -> int:
        self.frames += [(block.stream, block.first_frame + row) for row in range(len(block.frames))]
        held = set(self.frames[-self.frame_capacity :])
        known = [row for row in rows if held.issuperset(row["frames"])]
        self.rows += known
        return len(known)

    def living(self) -> list[int]:
        held = set(self.frames[-self.frame_capacity :])
        first = max(0, len(self.rows) - self.capacity)
        return [place for place in range(first, len(self.rows)) if held.issuperset(self.rows[place]["frames"])]


def check_rows(batch: Batch, rows: list[dict[str, Any]]) -> None:
    assert (batch.serials.dtype, batch.relative_priorities.dtype) == (np.int64, np.float32)
    for name in ("observations", "next_observations", "actions", "rewards", "discounts"):
        array, expected = getattr(batch, name), np.stack([rows[serial][name] for serial in batch.serials])
        assert (array.dtype, array.flags.c_contiguous) == (expected.dtype, True)
        np.testing.assert_array_equal(array, expected, err_msg=name)


def filled(spec: ReplaySpec, counts: tuple[int, ...] = (30, 30), kind: Any = ReplayBuffer) -> Any:
    buffer, actor = kind(spec), Actor(spec, 0)
    naive = Naive(buffer)
    for count in counts:
        block, rows = actor.block(count + 1, count)
        assert buffer.add(block) == naive.add(block, rows)
    return buffer, naive


def same(one: Batch, other: Batch) -> None:
    for name, array in vars(one).items():
        np.testing.assert_array_equal(array, getattr(other, name), err_msg=name)


# The tree.


@given(st.data())
@pytest.mark.parametrize("kind", [DeepTree, SumTree])
def test_the_tree_agrees_with_plain_sums(kind: type[SumTree], data: st.DataObject) -> None:
    capacity = data.draw(st.integers(1, 100) if kind is DeepTree else st.sampled_from([5, 2048, 2049, 20_000]))
    tree, naive = kind(capacity), np.zeros(capacity)
    priority = st.one_of(st.just(0.0), st.floats(1e-4, 1e4), st.floats(0, 1e-300))
    for _ in range(data.draw(st.integers(1, 6))):
        values = np.array(data.draw(st.lists(priority, min_size=1, max_size=min(capacity, 40))))
        start = data.draw(st.integers(0, capacity - 1))
        if data.draw(st.booleans()):
            slots = (start + np.arange(len(values))) % capacity
            tree.set_range(start, values)
        else:
            slots = np.array(
                data.draw(st.lists(st.integers(0, capacity - 1), min_size=len(values), max_size=len(values)))
            )
            tree.set(slots, values)
        for slot, value in zip(slots, values, strict=True):
            naive[slot] = value
        np.testing.assert_array_equal(tree.get(np.arange(capacity)), naive)
        assert tree.total == pytest.approx(naive.sum(), rel=1e-12, abs=0)
        if not naive.any():
            continue
        shares = np.array([*data.draw(st.lists(st.floats(0, 1), max_size=20)), 0, 0.5, 1 - 2**-53, 1])
        found, ends = tree.find(shares * tree.total), naive.cumsum()
        assert (naive[found] > 0).all()
        slack = 1e-12 * ends[-1]
        assert (shares * ends[-1] <= ends[found] + slack).all()
        assert (shares * ends[-1] >= ends[found] - naive[found] - slack).all()


def test_no_error_builds_up_and_zeros_are_zero_again() -> None:
    tree, rng = SumTree(5000), np.random.default_rng(0)
    for _ in range(200):
        tree.set(rng.integers(0, 5000, 500), rng.random(500) * 10.0 ** rng.integers(-8, 8))
    tree.set(np.arange(5000), 0.0)
    assert tree.total == 0
    tree.set(np.array([4999, 17, 17]), np.array([1.0, 5.0, 3.0]))  # the last of two counts
    assert tree.total == 4
    assert tree.find(np.array([0, 2.9, 3.0, 3.9])).tolist() == [17, 17, 4999, 4999]


@pytest.mark.parametrize("kind", [DeepTree, SumTree])
def test_rounding_at_the_right_edge_never_reaches_a_zero(kind: type[SumTree]) -> None:
    rng = np.random.default_rng(0)
    for capacity in (7, 3000):
        for _ in range(30):
            tree, last = kind(capacity), int(rng.integers(0, capacity))
            tree.set(rng.integers(0, last + 1, 50), rng.random(50) ** 20)
            tree.set(np.array([last]), np.array([1e-18]))
            ends = tree.get(np.arange(capacity)).cumsum()
            edges = np.concatenate([ends, np.nextafter(ends, 0), np.nextafter(ends, np.inf), [tree.total * 2]])
            assert (tree.get(tree.find(edges)) > 0).all()


def test_samples_are_proportional_and_one_from_each_part() -> None:
    tree, rng = SumTree(10_000), np.random.default_rng(0)
    priorities = rng.random(10_000) ** 3
    priorities[::7] = 0
    tree.set_range(0, priorities)
    counts = sum(np.bincount(tree.sample(rng, 500), minlength=10_000).reshape(20, 500).sum(1) for _ in range(200))
    np.testing.assert_allclose(counts / counts.sum(), priorities.reshape(20, 500).sum(1) / priorities.sum(), rtol=0.01)
    tree.set_range(0, np.ones(10_000))
    np.testing.assert_array_equal(np.sort(tree.sample(rng, 100)) // 100, np.arange(100))


def test_every_minibatch_of_a_draw_has_samples_of_all_ages() -> None:
    tree = SumTree(10_000)
    tree.set_range(0, np.ones(10_000))
    minibatches = tree.sample(np.random.default_rng(0), 32 * 64).reshape(32, 64)
    np.testing.assert_allclose(minibatches.mean(1), 5000, atol=1500)  # four deviations of a mean of 64


# The buffer.


@KINDS
@pytest.mark.parametrize("kind", [ReplayBuffer, SmallBuffer])
@settings(max_examples=15)
@given(data=st.data())
def test_the_buffer_agrees_with_a_plain_list(spec: ReplaySpec, kind: Any, data: st.DataObject) -> None:
    buffer, rng = kind(spec), np.random.default_rng(0)
    naive, actors = Naive(buffer), [Actor(spec, stream) for stream in range(3)]
    for _ in range(data.draw(st.integers(1, 12))):
        actor = actors[data.draw(st.integers(0, 2))]
        block, rows = actor.block(data.draw(st.integers(1, 30)), data.draw(st.integers(0, spec.capacity)))
        if data.draw(st.integers(0, 5)):  # else it is lost on the way
            assert buffer.add(block) == naive.add(block, rows)
        assert (buffer.added, buffer.size) == (len(naive.rows), min(len(naive.rows), spec.capacity))
        assert buffer.frames_added == len(naive.frames)  # every frame is stored once
        living = naive.living()
        if not living:
            with pytest.raises(ValueError, match="no transition to sample"):
                buffer.sample(rng, 4)
            continue
        batch = buffer.sample(rng, 300)
        assert set(batch.serials) <= set(living)
        check_rows(batch, naive.rows)
        if not spec.prioritized:
            assert (batch.relative_priorities == 1).all()
            assert buffer.priority_mean == 1
            continue
        priorities = {serial: naive.rows[serial]["priority"] for serial in living}
        assert buffer.priority_mean == pytest.approx(np.mean(list(priorities.values())))
        # Of the dead, only those that were drawn have lost their priorities, so the masses agree up to a factor.
        expected = np.array([priorities[serial] for serial in batch.serials])
        np.testing.assert_allclose(
            batch.relative_priorities / batch.relative_priorities[0], expected / expected[0], rtol=1e-5
        )
        for serial, error in zip(batch.serials, errors := rng.normal(size=300), strict=True):
            naive.rows[serial]["priority"] = (abs(error) + 1e-6) ** spec.alpha
        buffer.update(batch.serials, errors)


@KINDS
def test_every_living_transition_is_sampled(spec: ReplaySpec) -> None:
    for kind in (ReplayBuffer, SmallBuffer):
        buffer, naive = filled(spec, (30, 30, 15), kind)
        assert set(buffer.sample(np.random.default_rng(0), 20_000).serials) == set(naive.living())


def test_the_mass_by_hand() -> None:
    buffer, actor = ReplayBuffer(replace(VECTOR, alpha=0.5)), Actor(VECTOR, 0)
    block, _ = actor.block(5, 4)
    block.priorities = np.array([4, -9, 16, 49], np.float32)  # roots 2, 3, 4, 7 of 16
    assert buffer.add(block) == 4
    assert buffer.priority_mean == pytest.approx(4)
    batch = buffer.sample(np.random.default_rng(0), 1600)
    np.testing.assert_allclose(batch.relative_priorities, np.array([0.5, 0.75, 1, 1.75])[batch.serials], rtol=1e-5)
    np.testing.assert_allclose(np.bincount(batch.serials), [200, 300, 400, 700], atol=1)
    buffer.update(np.array([3, 1, 1, -1, 4, 40]), np.array([-1, 0, 64, 1e9, 1e9, 1e9]))  # roots 2, 8, 4, 1 of 15
    batch = buffer.sample(np.random.default_rng(0), 1500)
    np.testing.assert_allclose(np.bincount(batch.serials), [200, 800, 400, 100], atol=1)


def test_stale_serials_are_ignored() -> None:
    buffer, _ = filled(VECTOR, (30, 30))  # 0 to 19 are gone, 20 to 59 are here
    before = buffer.tree.levels[0].copy()
    buffer.update(np.array([0, 19, 60]), np.array([5.0, 5.0, 5.0]))
    np.testing.assert_array_equal(buffer.tree.levels[0], before)
    buffer.update(np.array([19, 20, 59]), np.array([5.0, 2.0, 3.0]))
    assert np.flatnonzero(buffer.tree.levels[0] != before).tolist() == [19, 20]  # slots of 59 and of 20
    np.testing.assert_allclose(buffer.tree.get(np.array([20, 19])), np.array([2, 3]) ** 0.6, rtol=1e-5)


def test_the_dead_get_no_new_priorities() -> None:
    buffer, naive = filled(VECTOR, (15, 15, 9), SmallBuffer)
    assert naive.living()[0] > 0
    before = buffer.tree.levels[0].copy()
    buffer.update(np.arange(naive.living()[0]), np.full(naive.living()[0], 9.0))
    np.testing.assert_array_equal(buffer.tree.levels[0], before)


def test_a_stream_without_its_beginning_is_used_as_far_as_it_is_known() -> None:
    actor, buffer = Actor(STACKED, 7), ReplayBuffer(STACKED)
    actor.block(10, 5)
    block, rows = actor.block(10, 40)
    known = [row for row in rows if all(number >= 10 for _, number in row["frames"])]
    assert buffer.add(block) == len(known) > 0
    assert buffer.frames_added == 10
    check_rows(buffer.sample(np.random.default_rng(0), 50), known)
    assert buffer.add(actor.block(10, 40)[0]) == 40


def test_streams_remember_no_more_than_they_may_name() -> None:
    buffer, actor = ReplayBuffer(VECTOR), Actor(VECTOR, 0)
    for _ in range(20):
        buffer.add(actor.block(30, 30)[0])
        assert len(buffer.streams[0][1]) == 6
    for stream in range(1, 200):  # 1,044 frames are held
        buffer.add(Actor(VECTOR, stream).block(30, 30)[0])
    assert len(buffer.streams) < 40


def test_blocks_that_cannot_be_stored_are_refused() -> None:
    buffer, actor = ReplayBuffer(VECTOR), Actor(VECTOR, 0)
    with pytest.raises(FeverError, match="a block of 41 transitions and 3 frames does not fit"):
        buffer.add(actor.block(3, 41)[0])
    block, _ = Actor(VECTOR, 1).block(3, 2)
    block.priorities[1] = np.nan
    with pytest.raises(ValueError, match="not a finite number"):
        buffer.add(block)
    assert buffer.added == buffer.frames_added == 0


# Checkpoints and memory.


@KINDS
@pytest.mark.parametrize("counts", [(15,), (30, 30), (40,) * 40], ids=["part", "full", "wrapped"])
def test_a_restored_buffer_samples_identically(spec: ReplaySpec, counts: tuple[int, ...]) -> None:
    buffer = filled(spec, counts)[0]
    for seed in range(3):
        buffer.update(buffer.sample(np.random.default_rng(seed), 20).serials, np.linspace(0.1, 9, 20))
    arrays = {name: array.copy() for name, array in buffer.arrays().items()}
    assert {len(array) for name, array in arrays.items() if name not in ("frames", "counters")} == {buffer.size}
    other = filled(spec, (7,))[0]
    other.restore(arrays)
    assert (other.size, other.added, other.fill) == (buffer.size, buffer.added, buffer.fill)
    for seed in range(3):
        same(buffer.sample(np.random.default_rng(seed), 64), other.sample(np.random.default_rng(seed), 64))
    block, _ = Actor(spec, 9).block(20, 20)  # a new stream
    assert buffer.add(block) == other.add(block) == 20
    same(buffer.sample(np.random.default_rng(5), 64), other.sample(np.random.default_rng(5), 64))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"frame_shape": (4,)}, "has frames of shape (3,) and type float32, this one of shape (4,) and type float32"),
        ({"stack": 2}, "has pointers of shape (2, 1)"),
        (
            {"action_dtype": "int32"},
            "has actions of shape (2,) and type float32, this one of shape (2,) and type int32",
        ),
        ({"capacity": 41}, "holds 40 transitions, this one holds 41"),
    ],
)
def test_restoring_into_another_shape_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(FeverError, match=re.escape(message)):
        ReplayBuffer(replace(VECTOR, **change)).restore(filled(VECTOR)[0].arrays())


def test_restoring_without_priorities_is_refused_where_they_are_needed() -> None:
    with pytest.raises(FeverError, match="has no priorities, which this one needs"):
        ReplayBuffer(VECTOR).restore(filled(SPECS[2])[0].arrays())


@KINDS
@pytest.mark.parametrize("capacity", [1, 2048, 2049, 33_333])
def test_the_memory_figure_is_exact(spec: ReplaySpec, capacity: int) -> None:
    spec = pickle.loads(pickle.dumps(replace(spec, capacity=capacity)))
    buffer = ReplayBuffer(spec)
    owners = [buffer, *([buffer.tree] if buffer.tree else [])]
    arrays = [array for owner in owners for array in vars(owner).values() if isinstance(array, np.ndarray)]
    assert spec.bytes == sum(array.nbytes for array in [*arrays, *(buffer.tree.levels if buffer.tree else [])])
    assert spec.frame_capacity == len(buffer.frames) == int(capacity * 1.1) + 1000


def test_a_buffer_that_does_not_fit_is_refused() -> None:
    spec = replace(STACKED, capacity=500_000, frame_shape=(84, 84))
    check_memory(spec, 2, available=2 * spec.bytes)
    # In each shard 551,000 frames, 500,000 times 8 pointers and 5 numbers, and a tree: 3.92 GB.
    said = r"^the replay buffer of 1,000,000 transitions needs 7.9 GB, but 3.1 GB are free; buffer=\d+ would fit$"
    with pytest.raises(FeverError, match=said) as error:
        check_memory(spec, 2, available=3_190_000_000)
    fitting = int(re.search(r"buffer=(\d+)", str(error.value))[1]) // 2
    check_memory(replace(spec, capacity=fitting), 2, available=3_190_000_000)
    with pytest.raises(FeverError):
        check_memory(replace(spec, capacity=int(fitting * 1.1)), 2, available=3_190_000_000)
    with pytest.raises(FeverError, match="not even one transition would fit"):
        check_memory(spec, 2, available=1000)


def test_free_memory_is_what_machine_and_control_group_allow(tmp_path: Path) -> None:
    def write(path: str, text: str) -> None:
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)

    assert free_memory(tmp_path) is None
    write("proc/meminfo", "MemTotal: 9000 kB\nMemAvailable:    8000 kB\n")
    write("proc/self/cgroup", "0::/job/step\n")
    for name, text in {"max": "max", "current": "5000000", "stat": "anon 1\ninactive_file 1000000\n"}.items():
        write(f"sys/fs/cgroup/job/step/memory.{name}", text)
        write(f"sys/fs/cgroup/job/memory.{name}", text)
    assert free_memory(tmp_path) == 8000 * 1024
    write("sys/fs/cgroup/job/memory.max", "6000000\n")
    assert free_memory(tmp_path) == 2_000_000
    assert (free_memory() or 1) > 0
