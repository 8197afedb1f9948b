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
        self.levels = (np.arange(config.quantiles, dtype=np.float32) + 0.5) / config.quantiles  # tau_m [M]

    def gradient_step(
        self, learned: dict[str, Any], batch: Params, learning_rate: Any
    ) -> tuple[dict[str, Any], tuple[Any, Any]]:
        """Critics, then the actor, then the temperature alpha, then the target critics.

        Z_j is one of all critics' quantiles, tau_j its level. Z'_k is one of the target critics' that is kept, and the
        target is y_k = r + gamma (Z'_k(s', a') - alpha log p(a'|s')).

        | loss | |
        |---|---|
        | critics | E_jk[abs(tau_j - [y_k < Z_j]) huber(y_k - Z_j)] |
        | actor | E[alpha log p(a|s) - mean_j Z_j(s, a)],  a drawn from the policy |
        | temperature | as SAC's |
        """
        temperature = jnp.exp(learned["temperature"][0])
        following, log_prob = self.act(learned["actor"], batch["next_observations"], batch["noise"][0])
        pooled = self.critic_outputs(learned["target"], batch["next_observations"], following)  # [C, B, M]
        pooled = pooled.transpose(0, 2, 1).reshape(-1, len(log_prob))  # Z' [K, B]
        kept = keep_smallest(pooled, self.config.critics * self.config.drop_quantiles)
        targets = batch["rewards"] + batch["discounts"] * (pooled - temperature * log_prob)  # y [K, B]
        target_means = (targets * kept).sum(0) / kept.sum(0)  # [B]

        def predict(critics: Any) -> Any:
            return self.critic_outputs(critics, batch["observations"], batch["actions"])  # Z [C, B, M]

        def actor_loss(actor: Any) -> tuple[Any, Any]:
            actions, log_prob = self.act(actor, batch["observations"], batch["noise"][1])
            value = self.critic_outputs(learned["critics"], batch["observations"], actions).mean((0, 2))
            return (temperature * log_prob - value).mean(), -log_prob.mean()

        quantiles, differentiate = jax.vjp(predict, learned["critics"])
        loss, slopes = quantile_huber_loss(quantiles, targets, kept, self.levels)
        (gradient,) = differentiate(slopes)
        learned = self.step(learned, "critics", gradient, learning_rate)
        errors, norm = quantiles.mean((0, 2)) - target_means, jnp.sqrt((gradient**2).sum())
        gradient, entropy = jax.grad(actor_loss, has_aux=True)(learned["actor"])
        learned = self.step(learned, "actor", gradient, learning_rate)
        learned = self.temperature_step(learned, entropy, learning_rate)
        learned = self.follow(learned, "target", "critics")
        metrics = jnp.stack([loss, target_means.mean(), jnp.abs(errors).mean(), norm, entropy, temperature])
        return learned, (errors, metrics)


def keep_smallest(values: Any, dropped: int) -> Any:
    """1 for the values `[K, B]` that are kept, 0 for the `dropped` largest of each column, of equal ones the first.

    The largest are taken away one after the other, which a CPU does faster for a few than a sort.
    """
    places = np.arange(len(values))[:, None]

    def drop(_: Any, left: Any) -> Any:
        largest = jnp.where(left == left.max(0), places, len(values)).min(0)
        return jnp.where(places == largest, -jnp.inf, left)

    return (jax.lax.fori_loop(0, dropped, drop, values) > -jnp.inf).astype(np.float32)


def quantile_huber_loss(quantiles: Any, targets: Any, kept: Any, levels: Any) -> tuple[Any, Any]:
    """The mean loss over all pairs of quantiles `[C, B, M]`, with levels `[M]`, and targets `[K, B]`; its derivatives
    `[C, B, M]`. `kept` `[K, B]` is 1 for targets that count, otherwise 0.

    It goes through the targets one by one: all pairs `[C, B, M, K]` at once do not stay in a CPU's cache, which takes
    six times as long for two critics, and forty times for five.
    """
    weights = kept / (kept.sum() * quantiles.size / quantiles.shape[1])

    def add(sums: tuple[Any, Any], target: tuple[Any, Any]) -> tuple[tuple[Any, Any], None]:
        value, weight = target  # [B]
        errors = value[:, None] - quantiles
        clipped = errors.clip(-1, 1)  # the slope of huber(e), which is clipped (e - clipped / 2)
        slopes = weight[:, None] * jnp.where(errors < 0, 1 - levels, levels) * clipped
        return (sums[0] + slopes * (errors - 0.5 * clipped), sums[1] - slopes), None

    (losses, derivatives), _ = jax.lax.scan(
        add, (jnp.zeros_like(quantiles), jnp.zeros_like(quantiles)), (targets, weights)
    )
    return losses.sum(), derivatives
