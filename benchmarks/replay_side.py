"""Replay buffers with priorities, side by side: Fever's, cpprb's and tianshou's.

Each subcommand needs only its own library, so that each runs in a virtualenv of its own (cpprb==11.0.0,
tianshou==2.0.1), and prints one JSON object as its last line of standard output:

    python replay_side.py fever
    python replay_side.py cpprb
    python replay_side.py tianshou --repeats 200

A buffer of 1,000,000 transitions like CartPole's (four floats, an action, a reward) is filled with random priorities.
Then four things are measured in batches of 512, the median of many repeats of each:

- cycle_milliseconds: draw 512 in proportion to their priorities, and give those new ones. Of Fever and of tianshou
  this is the tree alone (`SumTree`, `SegmentTree`); cpprb does not show its tree, so it is the whole buffer's there.
- tree_add_milliseconds: give 512 slots in a row their priorities. The tree alone again, and nothing of cpprb.
- buffer_cycle_milliseconds: the same with the whole transitions and their importance weights.
- add_milliseconds: add 512 with priorities, each library in the way that suits it best. Fever and cpprb take them as
  one block; tianshou takes one from each of 512 environments in one call (its `PrioritizedVectorReplayBuffer`), and
  gives new transitions the highest priority so far, where the others are told it.
"""

import argparse
import itertools
import json
import statistics
import time
from collections.abc import Callable

import numpy as np

Result = dict[str, float]

CAPACITY = 1_000_000
BATCH = 512
ALPHA, BETA = 0.6, 0.4
WARM_UPS = 20


def median_milliseconds(work: Callable[[], object], repeats: int) -> float:
    """Median time of one call, after a few that are not counted."""
    milliseconds = []
    for _ in range(WARM_UPS + repeats):
        started = time.perf_counter()
        work()
        milliseconds.append((time.perf_counter() - started) * 1e3)
    return statistics.median(milliseconds[WARM_UPS:])


def columns(rng: np.random.Generator, count: int) -> dict[str, np.ndarray]:
    """Random transitions like CartPole's."""
    return {
        "obs": rng.normal(size=(count, 4)).astype(np.float32),
        "act": rng.integers(0, 2, count).astype(np.int32),
        "rew": np.ones(count, np.float32),
        "next_obs": rng.normal(size=(count, 4)).astype(np.float32),
        "done": rng.random(count) < 0.01,
    }


def run_fever(arguments: argparse.Namespace) -> Result:
    """Fever's SumTree and ReplayBuffer."""
    from fever.replay.buffer import ReplayBuffer, ReplaySpec, Transitions
    from fever.replay.sum_tree import SumTree

    rng = np.random.default_rng(arguments.seed)
    tree = SumTree(CAPACITY)
    tree.set_range(0, rng.random(CAPACITY))
    fresh = rng.random(BATCH)

    def cycle() -> None:
        tree.set(tree.sample(rng, BATCH), fresh)

    starts = itertools.cycle(range(0, CAPACITY, BATCH))

    def tree_add() -> None:
        tree.set_range(next(starts), fresh)

    buffer = ReplayBuffer(ReplaySpec(CAPACITY, (4,), "float32", 1, (), "int32", True, ALPHA))
    rows, errors = columns(rng, BATCH + 1), rng.random(BATCH, np.float32)
    numbers = np.arange(BATCH)[:, None]

    def add() -> None:
        start = buffer.frames_added  # the first block has one frame more: the observation it begins with
        first, frames = (start - 1, rows["obs"][1:]) if start else (0, rows["obs"])
        discounts = np.where(rows["done"][1:], np.float32(0), np.float32(0.99))
        names = (first + numbers, first + numbers + 1)
        rest = (rows["act"][1:], rows["rew"][1:], discounts, errors)
        added = buffer.add(Transitions(0, start, first + BATCH, frames, *names, *rest))
        assert added == BATCH

    while buffer.fill < 1:
        add()

    def buffer_cycle() -> None:
        batch = buffer.sample(rng, BATCH)
        weights = batch.relative_priorities**-BETA
        weights /= weights.max()
        buffer.update(batch.serials, fresh)

    return {
        "cycle_milliseconds": median_milliseconds(cycle, arguments.repeats),
        "tree_add_milliseconds": median_milliseconds(tree_add, arguments.repeats),
        "buffer_cycle_milliseconds": median_milliseconds(buffer_cycle, arguments.repeats),
        "add_milliseconds": median_milliseconds(add, arguments.repeats),
    }


def run_cpprb(arguments: argparse.Namespace) -> Result:
    """cpprb's PrioritizedReplayBuffer."""
    from cpprb import PrioritizedReplayBuffer

    rng = np.random.default_rng(arguments.seed)
    np.random.seed(arguments.seed)
    shapes = {"obs": {"shape": 4}, "act": {"dtype": np.int32}, "rew": {}, "next_obs": {"shape": 4}, "done": {}}
    buffer = PrioritizedReplayBuffer(CAPACITY, shapes, alpha=ALPHA)
    rows, errors, fresh = columns(rng, BATCH), rng.random(BATCH), rng.random(BATCH)

    def add() -> None:
        buffer.add(**rows, priorities=errors)

    while buffer.get_stored_size() < CAPACITY:
        add()

    def cycle() -> None:
        batch = buffer.sample(BATCH, beta=BETA)
        buffer.update_priorities(batch["indexes"], fresh)

    milliseconds = median_milliseconds(cycle, arguments.repeats)
    return {
        "cycle_milliseconds": milliseconds,
        "buffer_cycle_milliseconds": milliseconds,
        "add_milliseconds": median_milliseconds(add, arguments.repeats),
    }


def run_tianshou(arguments: argparse.Namespace) -> Result:
    """tianshou's SegmentTree and PrioritizedVectorReplayBuffer."""
    from tianshou.data import Batch, PrioritizedVectorReplayBuffer, SegmentTree

    rng = np.random.default_rng(arguments.seed)
    np.random.seed(arguments.seed)
    tree = SegmentTree(CAPACITY)
    tree[np.arange(CAPACITY)] = rng.random(CAPACITY)
    fresh = rng.random(BATCH)

    def cycle() -> None:
        found = tree.get_prefix_sum_idx(rng.random(BATCH) * tree.reduce())
        tree[found] = fresh

    starts = itertools.cycle(range(0, CAPACITY - BATCH, BATCH))

    def tree_add() -> None:
        start = next(starts)
        tree[np.arange(start, start + BATCH)] = fresh

    buffer = PrioritizedVectorReplayBuffer(CAPACITY, BATCH, alpha=ALPHA, beta=BETA)
    rows = columns(rng, BATCH)
    ends = {"terminated": rows["done"], "truncated": np.zeros(BATCH, bool)}
    batch = Batch(obs=rows["obs"], act=rows["act"], rew=rows["rew"], obs_next=rows["next_obs"], info={}, **ends)
    places = np.arange(BATCH)

    def add() -> None:
        buffer.add(batch, buffer_ids=places)

    while len(buffer) < CAPACITY:
        add()
    everything = np.arange(len(buffer))
    buffer.update_weight(everything, rng.random(len(everything)))

    def buffer_cycle() -> None:
        _, found = buffer.sample(BATCH)
        buffer.update_weight(found, fresh)

    return {
        "cycle_milliseconds": median_milliseconds(cycle, arguments.repeats),
        "tree_add_milliseconds": median_milliseconds(tree_add, arguments.repeats),
        "buffer_cycle_milliseconds": median_milliseconds(buffer_cycle, arguments.repeats),
        "add_milliseconds": median_milliseconds(add, arguments.repeats),
    }


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--repeats", type=int, default=500)
    common.add_argument("--seed", type=int, default=0)
    parser = argparse.ArgumentParser(description="Replay buffers with priorities, side by side.")
    commands = parser.add_subparsers(required=True)
    for name, run in {"fever": run_fever, "cpprb": run_cpprb, "tianshou": run_tianshou}.items():
        commands.add_parser(name, parents=[common], help=run.__doc__).set_defaults(run=run)
    return parser.parse_args()


def main() -> None:
    """Run one side and print it as JSON."""
    arguments = parse_arguments()
    result = arguments.run(arguments)
    print(json.dumps({**result, "capacity": CAPACITY, "batch": BATCH, "repeats": arguments.repeats}))


if __name__ == "__main__":
    main()
