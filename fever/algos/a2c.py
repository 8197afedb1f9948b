"""Advantage actor-critic (Mnih et al. 2016, synchronous): PPO with one gradient step on the whole batch.

The probability ratio is 1 in that step, and its gradient is that of the log probability: clipping has no effect, and
the gradient of PPO's loss is A2C's (Huang et al. 2022, "A2C is a special case of PPO"). What remains are defaults.
"""

from __future__ import annotations

from typing import Any

from pydantic import model_validator

from fever.algos.optimizer import OptimizerName
from fever.algos.ppo import PPO, PPOConfig
from fever.config import setting


class A2CConfig(PPOConfig):
    """Settings of A2C: those of PPO, with the defaults of SB3's A2C."""

    steps: int = setting(5, "steps of each environment in a batch (T)", "Mnih et al. 2016; SB3", gt=0)
    minibatch: int | None = setting(
        None, "steps in a gradient step; divides the batch; null, or more than the batch: all of it", "SB3", gt=0
    )
    epochs: int = setting(1, "passes over each batch", "SB3", gt=0)
    entropy_coefficient: float | None = setting(0.0, "weight of the entropy bonus; null: as PPO", "SB3", ge=0)
    gae_lambda: float | None = setting(1.0, "trace decay of the advantages", "SB3", ge=0, le=1)
    normalize_advantages: bool = setting(False, "zero mean and unit deviation within a minibatch or batch", "SB3")
    learning_rate: float = setting(7e-4, "of the optimizer", "SB3", gt=0)
    optimizer: OptimizerName = setting(
        "rmsprop", "one of optax's optimisers: adam, adamw, rmsprop, sgd, ...", "Mnih et al. 2016"
    )
    optimizer_kwargs: dict[str, bool | float] = setting(
        {"decay": 0.99, "eps": 1e-5}, "more arguments for it; another optimizer has none by default", "SB3"
    )

    @model_validator(mode="before")
    @classmethod
    def _arguments_of_rmsprop(cls, values: Any) -> Any:
        other = isinstance(values, dict) and values.get("optimizer", "rmsprop") != "rmsprop"
        return {"optimizer_kwargs": {}, **values} if other else values


class A2C(PPO):
    """PPO by another name, for its defaults."""

    Config = A2CConfig
