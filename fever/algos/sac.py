"""Soft actor-critic (Haarnoja et al. 2018) with automatic temperature: continuous actions from replay.

The loop is in `off_policy.py`, the networks are in `actor_critic.py`; here is the gradient step.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from fever.algos.actor_critic import ActorCritic, ActorCriticSettings
from fever.algos.base import Task
from fever.algos.off_policy import METRICS
from fever.config import setting
from fever.policy import Params, SquashedGaussian, distribution_for
from fever.replay.buffer import Batch


class SACConfig(ActorCriticSettings):
    """Settings of SAC."""

    temperature: float | None = setting(None, "weight of the entropy; null: learned", "Haarnoja et al. 2018", gt=0)
    target_entropy: float | None = setting(
        None,
        "entropy that the temperature is learned for, in nats; null: minus the number of action dimensions",
        "Haarnoja et al. 2018",
    )


class SAC(ActorCritic):
    """Two critics, and an actor that maximises their lower value and its own entropy."""

    Config = SACConfig
    greedy = False
    metric_names = (*METRICS, "policy_entropy", "temperature")
    config: SACConfig

    def __init__(self, config: SACConfig, task: Task, critics: int = 2, outputs: int = 1) -> None:
        super().__init__(config, task, squashed=True, critics=critics, outputs=outputs)
        distribution = distribution_for(task.action, squashed=True)
        assert isinstance(distribution, SquashedGaussian)
        self.distribution = distribution
        self.target_entropy = -float(self.action_size) if config.target_entropy is None else config.target_entropy
        logarithm = jnp.asarray(jnp.log(config.temperature or 1.0), jnp.float32)[None]
        self.learned["temperature"] = logarithm
        self.learned["optimizers"]["temperature"] = self.optimizer.init(logarithm)
        if config.temperature is not None:
            self.fresh = (*self.fresh, "temperature")

    def inputs(self, batch: Batch) -> dict[str, Any]:
        """Noise for the actions of both observations, `[U, 2, B, D]`."""
        return {"noise": self.distribution.noise(self.rng, (self.config.updates, 2, self.config.batch))}

    def act(self, actor: Any, observations: Any, noise: Any) -> tuple[Any, Any]:
        """Actions `[B, D]` and their log probabilities `[B]`."""
        return self.distribution.sample_and_log_prob(self.policy(actor, observations), noise, jnp)

    def gradient_step(
        self, learned: dict[str, Any], batch: Params, learning_rate: Any
    ) -> tuple[dict[str, Any], tuple[Any, Any]]:
        """Critics, then the actor, then the temperature alpha, then the target critics.

        | loss | |
        |---|---|
        | critics | 0.5 E[(Q_i(s, a) - y)^2],  y = r + gamma (min_i Q'_i(s', a') - alpha log p(a'|s')) |
        | actor | E[alpha log p(a|s) - min_i Q_i(s, a)],  a drawn from the policy |
        | temperature | log alpha (H - target_entropy),  H the policy's entropy |
        """
        temperature = jnp.exp(learned["temperature"][0])
        following, log_prob = self.act(learned["actor"], batch["next_observations"], batch["noise"][0])
        value = self.values(learned["target"], batch["next_observations"], following).min(0) - temperature * log_prob
        td_targets = batch["rewards"] + batch["discounts"] * value  # [B]

        def critic_loss(critics: Any) -> tuple[Any, Any]:
            errors = self.values(critics, batch["observations"], batch["actions"]) - td_targets  # [2, B]
            return 0.5 * (errors**2).mean(1).sum(), errors.mean(0)

        def actor_loss(actor: Any) -> tuple[Any, Any]:
            actions, log_prob = self.act(actor, batch["observations"], batch["noise"][1])
            value = self.values(learned["critics"], batch["observations"], actions).min(0)
            return (temperature * log_prob - value).mean(), -log_prob.mean()

        (loss, errors), gradient = jax.value_and_grad(critic_loss, has_aux=True)(learned["critics"])
        learned = self.step(learned, "critics", gradient, learning_rate)
        norm = jnp.sqrt((gradient**2).sum())
        gradient, entropy = jax.grad(actor_loss, has_aux=True)(learned["actor"])
        learned = self.step(learned, "actor", gradient, learning_rate)
        learned = self.temperature_step(learned, entropy, learning_rate)
        learned = self.follow(learned, "target", "critics")
        metrics = jnp.stack([loss, td_targets.mean(), jnp.abs(errors).mean(), norm, entropy, temperature])
        return learned, (errors, metrics)

    def temperature_step(self, learned: dict[str, Any], entropy: Any, learning_rate: Any) -> dict[str, Any]:
        """`learned` with the temperature moved towards the target entropy; as it is, if the temperature is set.

        The gradient of log alpha (H - target_entropy) with respect to log alpha is the bracket.
        """
        if self.config.temperature is not None:
            return learned
        return self.step(learned, "temperature", (entropy - self.target_entropy)[None], learning_rate)
