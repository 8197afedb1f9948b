"""Twin delayed deep deterministic policy gradient (Fujimoto et al. 2018): continuous actions from replay.

The loop is in `off_policy.py`, the networks are in `actor_critic.py`; here is the gradient step.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fever.algos.actor_critic import ActorCritic, ActorCriticSettings
from fever.algos.base import Task
from fever.config import setting
from fever.policy import Params, distribution_for
from fever.replay.buffer import Batch


class TD3Config(ActorCriticSettings):
    """Settings of TD3. Noise is in units of half the range of an action: the bounds are -1 and 1."""

    learning_rate: float = setting(1e-3, "of the optimizer", "Fujimoto et al. 2018", gt=0)
    batch: int = setting(256, "transitions in a gradient step", "SB3; Fujimoto et al. 2018: 100", gt=0)
    exploration_noise: float = setting(
        0.1, "deviation of the noise on explorers' actions, whose bounds are -1 and 1", "Fujimoto et al. 2018", ge=0
    )
    target_noise: float = setting(
        0.2, "deviation of the noise on the target actor's actions", "Fujimoto et al. 2018", ge=0
    )
    target_noise_clip: float = setting(0.5, "largest noise on the target actor's actions", "Fujimoto et al. 2018", ge=0)
    policy_delay: int = setting(
        2, "gradient steps of the critics for each of the actor and the target networks", "Fujimoto et al. 2018", gt=0
    )


class TD3(ActorCritic):
    """Two critics, and an actor without randomness that maximises the first one's value."""

    Config = TD3Config
    config: TD3Config

    def __init__(self, config: TD3Config, task: Task) -> None:
        super().__init__(config, task, squashed="deterministic")
        self.distribution = distribution_for(task.action, self.network.squashed)
        self.noise = config.exploration_noise
        self.learned["target_actor"] = self.learned["actor"]

    def inputs(self, batch: Batch) -> dict[str, Any]:
        """The number of each gradient step `[U]`, counted from 1, and noise for the next actions `[U, B, D]`."""
        config = self.config
        noise = self.rng.standard_normal((config.updates, config.batch, self.action_size), np.float32)
        limit = config.target_noise_clip
        return {
            "count": np.arange(self.updates + 1, self.updates + 1 + config.updates),
            "noise": (config.target_noise * noise).clip(-limit, limit),
        }

    def act(self, actor: Any, observations: Any) -> Any:
        """Actions `[B, D]`."""
        return self.distribution.mode(self.policy(actor, observations), jnp)

    def gradient_step(
        self, learned: dict[str, Any], batch: Params, learning_rate: Any
    ) -> tuple[dict[str, Any], tuple[Any, Any]]:
        """Critics; and in every `policy_delay`-th step the actor, then the target critics and the target actor.

        | loss | |
        |---|---|
        | critics | E[(Q_i(s, a) - y)^2],  y = r + gamma min_i Q'_i(s', a'),  a' = clip(actor'(s') + noise, -1, 1) |
        | actor | -E[Q_1(s, actor(s))] |
        """
        following = (self.act(learned["target_actor"], batch["next_observations"]) + batch["noise"]).clip(-1, 1)
        value = self.values(learned["target"], batch["next_observations"], following).min(0)
        td_targets = batch["rewards"] + batch["discounts"] * value  # [B]

        def critic_loss(critics: Any) -> tuple[Any, Any]:
            errors = self.values(critics, batch["observations"], batch["actions"]) - td_targets  # [2, B]
            return (errors**2).mean(1).sum(), errors.mean(0)

        def delayed(learned: dict[str, Any]) -> dict[str, Any]:
            def actor_loss(actor: Any) -> Any:
                actions = self.act(actor, batch["observations"])
                return -self.values(learned["critics"], batch["observations"], actions, count=1).mean()

            learned = self.step(learned, "actor", jax.grad(actor_loss)(learned["actor"]), learning_rate)
            learned = self.follow(learned, "target", "critics")
            return self.follow(learned, "target_actor", "actor")

        (loss, errors), gradient = jax.value_and_grad(critic_loss, has_aux=True)(learned["critics"])
        learned = self.step(learned, "critics", gradient, learning_rate)
        due = batch["count"] % self.config.policy_delay == 0
        learned = jax.lax.cond(due, delayed, lambda learned: learned, learned)
        norm = jnp.sqrt((gradient**2).sum())
        return learned, (errors, jnp.stack([loss, td_targets.mean(), jnp.abs(errors).mean(), norm]))
