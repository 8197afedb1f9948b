"""Truncated quantile critics (Kuznetsov et al. 2020): SAC whose critics predict quantiles of the return.

The actor, the temperature and their settings are SAC's; here is the gradient step.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from pydantic import ValidationInfo, field_validator

from fever.algos.base import Task
from fever.algos.sac import SAC, SACConfig
from fever.config import setting
from fever.policy import Params


class TQCConfig(SACConfig):
    """Settings of TQC."""

    critics: int = setting(2, "number of critics", "sb3-contrib; Kuznetsov et al. 2020: 5", gt=0)
    quantiles: int = setting(25, "quantiles of the return that each critic predicts", "Kuznetsov et al. 2020", gt=0)
    drop_quantiles: int = setting(
        2, "quantiles dropped for each critic: the largest of all critics together", "Kuznetsov et al. 2020", ge=0
    )

    @field_validator("drop_quantiles")
    @classmethod
    def _some_are_left(cls, value: int, info: ValidationInfo) -> int:
        if value >= info.data.get("quantiles", value + 1):  # absent: it was refused
            raise ValueError(f"must be less than quantiles={info.data['quantiles']}")
        return value


class TQC(SAC):
    """Critics of quantiles, whose largest are left out of the target, and SAC's actor."""

    Config = TQCConfig
    config: TQCConfig

    def __init__(self, config: TQCConfig, task: Task) -> None:
        super().__init__(config, task, critics=config.critics, outputs=config.quantiles)
        self.kept = config.critics * (config.quantiles - config.drop_quantiles)
        self.levels = (np.arange(config.quantiles, dtype=np.float32) + 0.5) / config.quantiles  # tau_m [M]

    def gradient_step(
        self, learned: dict[str, Any], batch: Params, learning_rate: Any
    ) -> tuple[dict[str, Any], tuple[Any, Any]]:
        """Critics, then the actor, then the temperature alpha, then the target critics.

        Z'_k are the `kept` smallest of all target critics' quantiles. Z_im is quantile m of critic i, tau_m its level.

        | loss | |
        |---|---|
        | critics | mean over i, m, k of abs(tau_m - [y_k < Z_im]) huber(y_k - Z_im),  y_k = r + gamma (Z'_k(s', a') - alpha log p(a'|s')) |
        | actor | E[alpha log p(a|s) - mean_im Z_im(s, a)],  a drawn from the policy |
        | temperature | as SAC's |
        """
        temperature = jnp.exp(learned["temperature"][0])
        following, log_prob = self.act(learned["actor"], batch["next_observations"], batch["noise"][0])
        pooled = self.critic_outputs(learned["target"], batch["next_observations"], following)  # [C, B, M]
        pooled = pooled.transpose(1, 0, 2).reshape(len(log_prob), -1)
        smallest = jnp.sort(pooled, axis=-1)[:, : self.kept] - temperature * log_prob[:, None]
        targets = batch["rewards"][:, None] + batch["discounts"][:, None] * smallest  # y [B, K]

        def critic_loss(critics: Any) -> tuple[Any, Any]:
            quantiles = self.critic_outputs(critics, batch["observations"], batch["actions"])  # [C, B, M]
            errors = quantiles.mean((0, 2)) - targets.mean(1)
            return quantile_huber_loss(quantiles, targets, self.levels), errors

        def actor_loss(actor: Any) -> tuple[Any, Any]:
            actions, log_prob = self.act(actor, batch["observations"], batch["noise"][1])
            value = self.critic_outputs(learned["critics"], batch["observations"], actions).mean((0, 2))
            return (temperature * log_prob - value).mean(), -log_prob.mean()

        (loss, errors), gradient = jax.value_and_grad(critic_loss, has_aux=True)(learned["critics"])
        learned = self.step(learned, "critics", gradient, learning_rate)
        norm = jnp.sqrt((gradient**2).sum())
        gradient, entropy = jax.grad(actor_loss, has_aux=True)(learned["actor"])
        learned = self.step(learned, "actor", gradient, learning_rate)
        learned = self.temperature_step(learned, entropy, learning_rate)
        learned = self.follow(learned, "target", "critics")
        metrics = jnp.stack([loss, targets.mean(), jnp.abs(errors).mean(), norm, entropy, temperature])
        return learned, (errors, metrics)


def quantile_huber_loss(quantiles: Any, targets: Any, levels: Any) -> Any:
    """Mean over all pairs of quantiles `[C, B, M]`, with levels `[M]`, and targets `[B, K]`."""
    errors = targets[:, None, :] - quantiles[..., None]  # [C, B, M, K]
    size = jnp.abs(errors)
    huber = jnp.where(size < 1, 0.5 * errors**2, size - 0.5)
    return (jnp.abs(levels[:, None] - (errors < 0)) * huber).mean()
