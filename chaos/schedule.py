"""Which faults hit which training: a function of the seed and of the number of faults alone."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field
from random import Random

from chaos.training import Recipe

REPLAY = "buffer=20000 hidden=64,64 report_steps=500"
RECIPES = (
    Recipe("ppo", 2, "steps=64"),
    Recipe("trpo", 2, "steps=64"),
    Recipe("impala", 2, "steps=64"),
    Recipe("dqn", 2, f"{REPLAY} replay_ratio=16 epsilon_steps=4000"),
    Recipe("apex", 2, f"{REPLAY} replay_ratio=16 replay_shards=2"),
    Recipe("sac", 2, f"{REPLAY} replay_ratio=32 batch=64", continuous=True),
    Recipe("ppo", 0, "steps=128"),
    Recipe("trpo", 0, "steps=128"),
    Recipe("dqn", 0, f"{REPLAY} replay_ratio=16 epsilon_steps=4000"),
    Recipe("sac", 0, f"{REPLAY} replay_ratio=32 batch=64", continuous=True),
)
ANYWHERE = ("raise", "nan", "leak", "block", "full_disk", "closed_output")
ON_RAY = ("kill_sampler", "stop_sampler", "hang", "exit", "kill_raylet", "stop_raylet", "kill_gcs", "stop_gcs")
WITH_SHARDS = ("kill_shard", "stop_shard")
SHARDED = ("dqn", "apex", "sac")
IN_LAB = ("kill_machine", "cut_link")
KINDS = (*ON_RAY, *WITH_SHARDS, *ANYWHERE, "kill_driver", *IN_LAB)
DRIVER_KILLS = 0.2  # share of all faults


@dataclass
class Case:
    """One training and the kinds of its faults, in their order. Without a recipe it is the training in the lab."""

    recipe: Recipe | None
    seed: int
    kinds: list[str] = field(default_factory=list)


def possible(recipe: Recipe | None) -> tuple[str, ...]:
    """The kinds of faults that a training can have, besides killed drivers."""
    if recipe is None:
        return IN_LAB
    shards = WITH_SHARDS if recipe.algo in SHARDED else ()
    return (*ANYWHERE, *ON_RAY, *shards) if recipe.workers else ANYWHERE


def schedule(seed: int, count: int, kinds: Collection[str] = KINDS, algos: Collection[str] = ()) -> list[Case]:
    """Cases with `count` faults together. Every kind is there before any is there twice in the same training, as far as
    the count allows. `algos`: only these algorithms."""
    rng = Random(seed)
    recipes: list[Recipe | None] = [recipe for recipe in RECIPES if not algos or recipe.algo in algos]
    if not algos and set(IN_LAB) & set(kinds):
        recipes.append(None)
    cases = [Case(recipe, rng.randrange(1 << 16)) for recipe in recipes]
    alone = [case for case in cases if case.recipe is not None and not case.recipe.workers]
    drivers = [*alone, *(case for case in cases if case.recipe is not None and case.recipe.workers)]
    kills = round(count * DRIVER_KILLS) if set(kinds) != {"kill_driver"} else count
    for case in itertools.islice(itertools.cycle(drivers), kills if "kill_driver" in kinds else 0):
        case.kinds.append("kill_driver")
    others = count - sum(len(case.kinds) for case in cases)
    pairs = [(case, kind) for case in cases for kind in possible(case.recipe) if kind in kinds]
    for case, kind in itertools.islice(itertools.cycle(_spread(rng, pairs)), others if pairs else 0):
        case.kinds.append(kind)
    for case in cases:
        rng.shuffle(case.kinds)
    return sorted((case for case in cases if case.kinds), key=lambda case: -len(case.kinds))


def _spread(rng: Random, pairs: list[tuple[Case, str]]) -> list[tuple[Case, str]]:
    """The pairs in random order, but the first of every kind before the second of any."""
    rng.shuffle(pairs)
    seen: Counter[str] = Counter()
    turns = []
    for _, kind in pairs:
        turns.append(seen[kind])
        seen[kind] += 1
    return [pair for _, pair in sorted(zip(turns, pairs, strict=True), key=lambda row: row[0])]
