"""Distributed prioritised experience replay (Horgan et al. 2018): DQN whose many actors explore differently.

With `--workers`, actors, shards of the buffer and the learner run at the same time; without, by turns in one process.
"""

from __future__ import annotations

import numpy as np

from fever.algos.dqn import DQN, QLearningSettings
from fever.config import setting


class ApexConfig(QLearningSettings):
    """Settings of Ape-X."""

    epsilon_base: float = setting(
        0.4, "epsilon of explorer i of n: epsilon_base^(1 + epsilon_ladder i/(n-1))", "Horgan 2018", gt=0, le=1
    )
    epsilon_ladder: float = setting(7.0, "alpha in the exponent; one explorer: the middle", "Horgan 2018", ge=0)
    epsilon_steps: int = setting(8000, "environment steps in which epsilons fall from 1 to the ladder", "as DQN", gt=0)


class Apex(DQN):
    """DQN whose explorers come down from epsilon 1 to constant epsilons, each to another one."""

    Config = ApexConfig

    def epsilons(self) -> np.ndarray:
        config = self.config
        assert isinstance(config, ApexConfig)
        ladder = epsilon_ladder(config.epsilon_base, config.epsilon_ladder, self.explorers)
        return 1 + min(1.0, self.steps / config.epsilon_steps) * (ladder - 1)


def epsilon_ladder(base: float, alpha: float, explorers: int) -> np.ndarray:
    """base^(1 + alpha i / (n - 1)) for i = 0 .. n-1; for n = 1 the middle, base^(1 + alpha / 2)."""
    places = np.linspace(0, 1, explorers) if explorers > 1 else np.array([0.5])
    return base ** (1 + alpha * places)
