"""Soft actor-critic (Haarnoja et al. 2018) with automatic temperature: continuous actions from replay.

The loop is in `replay.py`; here is the mathematics of a gradient step.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fever.algos.adam import Adam, AdamState
from fever.algos.base import Task, build_network
from fever.algos.flat_params import Vectorizer
from fever.algos.off_policy import METRICS, ReplayAlgorithm
from fever.config import setting
from fever.errors import FeverError
from fever.policy import Params, SquashedGaussian, distribution_for
from fever.policy.networks import init_perceptron, perceptron
from fever.replay.buffer import Batch
from fever.replay.experience import ReplaySettings

CRITICS = ("critic_a", "critic_b")


class SACConfig(ReplaySettings):
    """Settings of SAC."""

    learning_rate: float = setting(1e-3, "of Adam, for actor, critics and temperature", "rl-zoo, SAC Pendulum-v1", gt=0)
    batch: int = setting(256, "transitions in a gradient step", "Haarnoja et al. 2018", gt=0)
    replay_ratio: float = setting(
        256.0, "transitions learned from for each one added: a gradient step per step", "Haarnoja et al. 2018", gt=0
    )
    buffer: int = setting(1_000_000, "transitions kept, all shards together", "Haarnoja et al. 2018", gt=0)
    warmup: int = setting(1000, "transitions with random actions before learning begins", "Haarnoja et al. 2018", ge=0)
    n_step: int = setting(1, "rewards summed up before bootstrapping", "Haarnoja et al. 2018", gt=0)
    polyak: float = setting(0.005, "share of the way that target critics move", "Haarnoja et al. 2018", gt=0, le=1)
    temperature: float | None = setting(None, "weight of the entropy; null: learned", "Haarnoja et al. 2018", gt=0)
    target_entropy: float | None = setting(
        None, "that the temperature is learned for, in nats; null: minus the size of the action", "Haarnoja et al. 2018"
    )


class SAC(ReplayAlgorithm):
    """Two critics, and an actor that maximises their lower value and its own entropy."""

    Config = SACConfig
    acting = "actor"
    greedy = False
    metric_names = (*METRICS, "policy_entropy", "temperature")

    def __init__(self, config: SACConfig, task: Task) -> None:
        super().__init__(config, task)
        self.config: SACConfig = config
        if task.action["type"] != "box":
            raise FeverError(f"{task.name} has no Box of actions, which SAC needs; dqn takes a Discrete one")
        if task.observation["type"] == "image":
            raise FeverError(f"{task.name} has images, which SAC does not learn from here; ppo does")
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
        self.vectorizer, self.critics = Vectorizer(actor), Vectorizer(critics)
        self.optimizer = Adam()
        start = jnp.log(config.temperature or 1.0)
        vectors = {
            "actor": jnp.asarray(self.vectorizer.pack(actor)),
            "critics": jnp.asarray(self.critics.pack(critics)),
            "temperature": jnp.asarray(start, jnp.float32)[None],  # its logarithm
        }
        self.learned = {**vectors, "target": vectors["critics"]}
        for name, vector in vectors.items():
            self.learned |= self.optimizer.init(vector).arrays(f"adam_{name}")

    def epsilons(self) -> np.ndarray:
        """Nothing but random actions during the warm-up, then what the policy draws."""
        return np.full(self.explorers, 1.0 if self.steps < self.config.warmup else 0.0)

    def facts(self, batch: Batch) -> dict[str, Any]:
        """Noise for the actions of both observations, `[U, 2, B, D]`."""
        return {"noise": self.distribution.noise(self.rng, (self.config.updates, 2, self.config.batch))}

    def act(self, actor: Any, observations: Any, noise: Any) -> tuple[Any, Any]:
        """Actions `[B, D]` and their log probabilities `[B]`."""
        params = self.vectorizer.unpack(actor)
        outputs = self.network.policy(params, self.network.features(params, observations, jnp), jnp)
        return self.distribution.sample_and_log_prob(outputs, noise, jnp)

    def values(self, critics: Any, observations: Any, actions: Any) -> Any:
        """What either critic says of actions, `[2, B]`."""
        params = self.critics.unpack(critics)
        x = jnp.concatenate([self.network.features({}, observations, jnp), actions], axis=-1)
        layers = len(self.network.hidden)
        return jnp.stack([perceptron(params, name, layers, self.config.activation, x, jnp)[:, 0] for name in CRITICS])

    def update(self, learned: dict[str, Any], batches: Params, facts: Params) -> tuple[dict[str, Any], Any, Any]:
        learned, (errors, metrics) = jax.lax.scan(self.gradient_step, learned, {**batches, **facts})
        return learned, errors, metrics

    def gradient_step(self, learned: Params, batch: Params) -> tuple[Params, tuple[Any, Any]]:
        """Critics, then the actor, then the temperature, then the target critics."""
        config = self.config
        temperature = jnp.exp(learned["temperature"][0])
        following, log_prob = self.act(learned["actor"], batch["next_observations"], batch["noise"][0])
        value = self.values(learned["target"], batch["next_observations"], following).min(0) - temperature * log_prob
        goals = batch["rewards"] + batch["discounts"] * value  # [B]

        def critic_loss(critics: Any) -> tuple[Any, Any]:
            errors = self.values(critics, batch["observations"], batch["actions"]) - goals  # [2, B]
            return 0.5 * (errors**2).mean(1).sum(), errors.mean(0)

        def actor_loss(actor: Any) -> tuple[Any, Any]:
            actions, log_prob = self.act(actor, batch["observations"], batch["noise"][1])
            value = self.values(learned["critics"], batch["observations"], actions).min(0)
            return (temperature * log_prob - value).mean(), -log_prob.mean()

        def temperature_loss(log_temperature: Any) -> Any:
            return log_temperature[0] * jax.lax.stop_gradient(entropy - self.target_entropy)

        (loss, errors), gradient = jax.value_and_grad(critic_loss, has_aux=True)(learned["critics"])
        learned = self.step(learned, "critics", gradient)
        norm = jnp.sqrt((gradient**2).sum())
        gradient, entropy = jax.grad(actor_loss, has_aux=True)(learned["actor"])
        learned = self.step(learned, "actor", gradient)
        if config.temperature is None:
            learned = self.step(learned, "temperature", jax.grad(temperature_loss)(learned["temperature"]))
        learned = {**learned, "target": learned["target"] + config.polyak * (learned["critics"] - learned["target"])}
        metrics = jnp.stack([loss, goals.mean(), jnp.abs(errors).mean(), norm, entropy, temperature])
        return learned, (errors, metrics)

    def step(self, learned: Params, name: str, gradient: Any) -> Params:
        """One step of Adam for one of the vectors."""
        direction, adam = self.optimizer.update(gradient, AdamState.from_arrays(f"adam_{name}", learned))
        vector = learned[name] - self.config.learning_rate * direction
        return {**learned, name: vector, **adam.arrays(f"adam_{name}")}
