"""Soft actor-critic (Haarnoja et al. 2018) with automatic temperature: continuous actions from replay.

The loop is in `off_policy.py`; here is the gradient step.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fever.algos.base import Task, build_network
from fever.algos.flat_params import FlatParams
from fever.algos.off_policy import METRICS, OffPolicyAlgorithm, OffPolicySettings
from fever.config import setting
from fever.errors import FeverError
from fever.policy import Params, SquashedGaussian, distribution_for
from fever.policy.networks import init_perceptron, perceptron
from fever.replay.buffer import Batch

CRITICS = ("critic_a", "critic_b")


class SACConfig(OffPolicySettings):
    """Settings of SAC."""

    batch: int = setting(256, "transitions in a gradient step", "Haarnoja et al. 2018", gt=0)
    replay_ratio: float = setting(
        256.0, "transitions learned from for each one added: a gradient step per step", "Haarnoja et al. 2018", gt=0
    )
    buffer: int = setting(1_000_000, "transitions kept, all shards together", "Haarnoja et al. 2018", gt=0)
    warmup: int = setting(1000, "transitions with random actions before learning begins", "Haarnoja et al. 2018", ge=0)
    n_step: int = setting(1, "rewards summed up before bootstrapping", "Haarnoja et al. 2018", gt=0)
    polyak: float = setting(
        0.005, "share of the way that target critics move in a gradient step", "Haarnoja et al. 2018", gt=0, le=1
    )
    temperature: float | None = setting(None, "weight of the entropy; null: learned", "Haarnoja et al. 2018", gt=0)
    target_entropy: float | None = setting(
        None,
        "entropy that the temperature is learned for, in nats; null: minus the number of action dimensions",
        "Haarnoja et al. 2018",
    )


class SAC(OffPolicyAlgorithm):
    """Two critics, and an actor that maximises their lower value and its own entropy."""

    Config = SACConfig
    acting = "actor"
    greedy = False
    metric_names = (*METRICS, "policy_entropy", "temperature")
    config: SACConfig

    def __init__(self, config: SACConfig, task: Task) -> None:
        super().__init__(config, task)
        if task.action["type"] != "box":
            raise FeverError(f"{task.name} has no Box action space, which SAC needs; use dqn for a Discrete one")
        if task.observation["type"] == "image":
            raise FeverError(f"{task.name} has image observations, which SAC does not support; use ppo")
        self.n_step = config.n_step
        self.network = build_network(config, task, value_head=False, squashed=True)
        distribution = distribution_for(task.action, squashed=True)
        assert isinstance(distribution, SquashedGaussian)
        self.distribution = distribution
        self.action_size = distribution.action_shape[0]
        self.target_entropy = -float(self.action_size) if config.target_entropy is None else config.target_entropy

        sizes = [self.network.input_shape[0] + self.action_size, *self.network.hidden, 1]
        critics: Params = {}
        for name in CRITICS:
            critics |= init_perceptron(self.rng, name, sizes, 1.0)
        actor = self.network.init(self.rng)
        self.flat, self.critics = FlatParams(actor), FlatParams(critics)
        start = jnp.log(config.temperature or 1.0)
        self.fresh = self.fresh if config.temperature is None else (*self.fresh, "temperature")
        vectors = {
            "actor": jnp.asarray(self.flat.pack(actor)),
            "critics": jnp.asarray(self.critics.pack(critics)),
            "temperature": jnp.asarray(start, jnp.float32)[None],  # its logarithm
        }
        optimizers = {name: self.optimizer.init(vector) for name, vector in vectors.items()}
        self.learned = {**vectors, "target": vectors["critics"], "optimizers": optimizers}

    def epsilons(self) -> np.ndarray:
        """1 during the warm-up, whose actions are all random, then 0: the policy samples its actions."""
        return np.full(self.explorers, 1.0 if self.steps < self.config.warmup else 0.0)

    def inputs(self, batch: Batch) -> dict[str, Any]:
        """Noise for the actions of both observations, `[U, 2, B, D]`."""
        return {"noise": self.distribution.noise(self.rng, (self.config.updates, 2, self.config.batch))}

    def act(self, actor: Any, observations: Any, noise: Any) -> tuple[Any, Any]:
        """Actions `[B, D]` and their log probabilities `[B]`."""
        params = self.flat.unpack(actor)
        outputs = self.network.policy(params, self.network.features(params, observations, jnp), jnp)
        return self.distribution.sample_and_log_prob(outputs, noise, jnp)

    def values(self, critics: Any, observations: Any, actions: Any) -> Any:
        """Q_i(s, a) of both critics `[2, B]`."""
        params = self.critics.unpack(critics)
        x = jnp.concatenate([self.network.features({}, observations, jnp), actions], axis=-1)
        layers = len(self.network.hidden)
        return jnp.stack([perceptron(params, name, layers, self.config.activation, x, jnp)[:, 0] for name in CRITICS])

    def update(
        self, learned: dict[str, Any], batches: Params, inputs: Params, learning_rate: Any
    ) -> tuple[dict[str, Any], Any, Any]:
        step = partial(self.gradient_step, learning_rate=learning_rate)
        learned, (errors, metrics) = jax.lax.scan(step, learned, {**batches, **inputs})
        return learned, errors, metrics

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
        config = self.config
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

        def temperature_loss(log_temperature: Any) -> Any:
            return log_temperature[0] * jax.lax.stop_gradient(entropy - self.target_entropy)

        (loss, errors), gradient = jax.value_and_grad(critic_loss, has_aux=True)(learned["critics"])
        learned = self.step(learned, "critics", gradient, learning_rate)
        norm = jnp.sqrt((gradient**2).sum())
        gradient, entropy = jax.grad(actor_loss, has_aux=True)(learned["actor"])
        learned = self.step(learned, "actor", gradient, learning_rate)
        if config.temperature is None:
            gradient = jax.grad(temperature_loss)(learned["temperature"])
            learned = self.step(learned, "temperature", gradient, learning_rate)
        learned = {**learned, "target": learned["target"] + config.polyak * (learned["critics"] - learned["target"])}
        metrics = jnp.stack([loss, td_targets.mean(), jnp.abs(errors).mean(), norm, entropy, temperature])
        return learned, (errors, metrics)

    def step(self, learned: dict[str, Any], name: str, gradient: Any, learning_rate: Any) -> dict[str, Any]:
        """`learned` after one step of the optimiser for one of its vectors."""
        optimizers = learned["optimizers"]
        vector, state = self.optimizer.step(learned[name], optimizers[name], gradient, learning_rate)
        return {**learned, name: vector, "optimizers": {**optimizers, name: state}}
