"""Explorers of small environments, and their transitions with observations in full."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from fever.envs.make import make_envs
from fever.envs.source import EnvContext, EnvSource
from fever.policy.policy import network_for
from fever.replay.buffer import Transitions
from fever.replay.explorer import Exploration, Explorer
from fever.sampling.spec import Report, SamplerSpec
from tests.factories import random_weights


class Row(NamedTuple):
    """One transition with its observations in full."""

    observation: Any
    reward: float
    discount: float
    following: Any
    action: Any
    priority: float

    @property
    def facts(self) -> tuple[Any, ...]:
        """What does not depend on the policy, in plain numbers."""
        return tuple(self.observation.tolist()), self.reward, self.discount, tuple(self.following.tolist())


def make_explorer(target: Any, n_step: int = 3, envs: int = 2, steps: int = 5, **settings: Any) -> Explorer:
    kwargs = settings.pop("kwargs", {})
    plan: dict[str, Any] = {"greedy": True, "clip_rewards": False, "prioritized": True, "noise": 0.0}
    plan |= {"her": 0, "her_strategy": "future"}
    plan |= {name: settings.pop(name) for name in plan if name in settings}
    source = EnvSource(target, kwargs)
    probe = make_envs(source, 1, EnvContext())
    image = probe.observation["type"] == "image"
    network = network_for(
        probe.observation,
        probe.action,
        hidden=() if image else (8,),
        value_head=False,
        squashed=settings.pop("squashed", probe.action["type"] == "box"),
        convolutions=((4, 2, 1),) if image else (),
        convolution_features=8,
    )
    spec = SamplerSpec(source, network, envs, steps, None, **{"seed": 0, **settings})
    return Explorer(spec, probe.observation, probe.action, Exploration(n_step, 0.5, envs, **plan))


def explore(explorer: Explorer, calls: list[int], epsilons: Any = 0.0) -> tuple[list[Transitions], list[Report]]:
    """Blocks and reports of calls of so many steps."""
    count = explorer.spec.envs * (explorer.spec.worker_index + 1)
    epsilons = np.broadcast_to(np.asarray(epsilons, float), count) if np.ndim(epsilons) == 0 else np.asarray(epsilons)
    done = [explorer.explore(random_weights(explorer.spec.network), 0, epsilons, steps) for steps in calls]
    return [block for block, _ in done], [report for _, report in done]


def resolve(blocks: list[Transitions]) -> list[Row]:
    """All transitions in order; a block may name its own frames and those that the block before it kept."""
    frames: list[np.ndarray] = []
    rows, oldest = [], 0
    for block in blocks:
        assert block.first_frame == len(frames)
        frames += list(block.frames)
        named = np.concatenate([block.observations, block.next_observations]).ravel()
        assert (named >= oldest).all()
        assert (named < len(frames)).all()
        assert oldest <= block.oldest_frame <= len(frames)
        oldest = block.oldest_frame
        sides = [
            [
                frames[numbers[0]] if len(numbers) == 1 else np.stack([frames[i] for i in numbers], -1)
                for numbers in side
            ]
            for side in (block.observations, block.next_observations)
        ]
        numbers = (block.rewards.tolist(), block.discounts.tolist(), block.priorities.tolist())
        rows += [
            Row(here, reward, discount, there, action, priority)
            for here, there, action, reward, discount, priority in zip(*sides, block.actions, *numbers, strict=True)
        ]
    return rows


def transitions(explorer: Explorer, calls: list[int], epsilons: Any = 0.0) -> list[Row]:
    return resolve(explore(explorer, calls, epsilons)[0])


def of_env(rows: list[Row], index: int) -> list[Row]:
    return [row for row in rows if row.observation[0] == index]
