"""CrossQ (Bhatt et al. 2024): soft actor-critic without target networks, whose critics have batch renormalisation.

Both sides of the Bellman equation go through the critics in one batch, so that the same statistics normalise them.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from fever.algos.base import Task, build_network
from fever.algos.flat_params import FlatParams
from fever.algos.off_policy import METRICS, OffPolicyAlgorithm, OffPolicySettings
from fever.config import setting
from fever.errors import FeverError
from fever.policy import Params, distribution_for
from fever.policy.networks import init_perceptron
from fever.replay.buffer import Batch

from fever_crossq.renorm import normalise

CRITICS = ("critic_a", "critic_b")


class CrossQConfig(OffPolicySettings):
    """Settings of CrossQ."""

    critic_hidden: tuple[int, ...] = setting((2048, 2048), "widths of the critics' layers", "Bhatt et al. 2024")
    optimizer_kwargs: dict[str, bool | float] = setting(
        {"b1": 0.5}, "arguments of the optimizer; Adam's first moment decays fast", "Bhatt et al. 2024",
        validate_default=True,
    )  # fmt: skip
    batch: int = setting(256, "transitions in a gradient step", "Bhatt et al. 2024", gt=0)
    replay_ratio: float = setting(256.0, "transitions learned from for each one added", "Bhatt et al. 2024", gt=0)
    buffer: int = setting(1_000_000, "transitions kept, all shards together", "Bhatt et al. 2024", gt=0)
    policy_delay: int = setting(3, "gradient steps of the critics for one of the actor", "Bhatt et al. 2024", gt=0)
    renorm_warmup: int = setting(
        100_000, "gradient steps with plain batch normalisation, before running statistics count", "sb3-contrib", ge=0
    )
    target_entropy: float | None = setting(None, "in nats; null: minus the action's dimensions", "Haarnoja et al. 2018")

    def widest(self, image: bool) -> int:
        return max(super().widest(image), *self.critic_hidden)


class CrossQ(OffPolicyAlgorithm):
    """Two normalised critics that are their own targets, and an actor that maximises their lower value and entropy."""

    Config = CrossQConfig
    greedy = False
    metric_names = (*METRICS, "policy_entropy", "temperature")
    config: CrossQConfig

    def __init__(self, config: CrossQConfig, task: Task) -> None:
        super().__init__(config, task)
        if task.action["type"] != "box":
            raise FeverError(f"{task.name} has no Box action space, which CrossQ needs")
        self.network = build_network(config, task, value_head=False, squashed=True)
        self.distribution: Any = distribution_for(task.action, squashed=True)
        size = self.distribution.action_shape[0]
        self.target_entropy = -float(size) if config.target_entropy is None else config.target_entropy
        critics, features = self.network.init_features(self.rng)  # of images, or of a network of one's own
        sizes = [features + size, *config.critic_hidden]
        self.layers = [(f"{critic}{index}", width) for critic in CRITICS for index, width in enumerate(sizes)]
        for name in CRITICS:  # the last layer is called as the others, so that a loop can go through them
            critics |= init_perceptron(self.rng, name, [*sizes, 1], 1.0)
            for part in ("w", "b"):
                critics[f"{name}{len(sizes) - 1}/{part}"] = critics.pop(f"{name}/{part}")
        for layer, width in self.layers:
            critics |= {f"{layer}/scale": jnp.ones(width), f"{layer}/shift": jnp.zeros(width)}
        actor = self.network.init(self.rng)
        self.flat, self.critics = FlatParams(actor), FlatParams(critics)
        vectors = {
            "actor": jnp.asarray(self.flat.pack(actor)),
            "critics": jnp.asarray(self.critics.pack(critics)),
            "temperature": jnp.zeros(1),  # its logarithm
        }
        statistics = {layer: (jnp.zeros(width), jnp.ones(width)) for layer, width in self.layers}  # mean, variance
        states = {name: self.optimizer.init(vector) for name, vector in vectors.items()}
        self.learned = {**vectors, "statistics": statistics, "optimizers": states}

    def inputs(self, batch: Batch) -> dict[str, Any]:
        """The number of every gradient step `[U]`, and noise for the actions of both observations `[U, 2, B, D]`."""
        noise = self.distribution.noise(self.rng, (self.config.updates, 2, self.config.batch))
        return {"count": self.updates + 1 + jnp.arange(self.config.updates), "noise": noise}

    def update(
        self, learned: dict[str, Any], batches: Params, inputs: Params, learning_rate: Any
    ) -> tuple[dict[str, Any], Any, Any]:
        step = partial(self.gradient_step, learning_rate=learning_rate)
        learned, results = jax.lax.scan(step, learned, {**batches, **inputs})
        return learned, *results

    def act(self, actor: Any, observations: Any, noise: Any) -> tuple[Any, Any]:
        """Actions `[B, D]` and their log probabilities `[B]`."""
        params = self.flat.unpack(actor)
        outputs = self.network.policy(params, self.network.features(params, observations, jnp), jnp)
        return self.distribution.sample_and_log_prob(outputs, noise, jnp)

    def values(self, critics: Any, statistics: Params, observations: Any, actions: Any, warm: Any = None) -> Any:
        """Q_i(s, a) `[2, B]` and the new running statistics. Without `warm` they normalise, and do not change; with it,
        the batch is normalised by its own, and if it is true corrected towards the running ones."""
        params, new, values = self.critics.unpack(critics), dict(statistics), []
        inputs = jnp.concatenate([self.network.features(params, observations, jnp), actions], axis=-1)
        for critic in CRITICS:
            x = inputs
            for index in range(len(self.config.critic_hidden) + 1):
                layer = f"{critic}{index}"
                x = jax.nn.relu(x) if index else x
                x, new[layer] = normalise(x, statistics[layer], warm)
                x = x * params[f"{layer}/scale"] + params[f"{layer}/shift"]
                x = x @ params[f"{layer}/w"] + params[f"{layer}/b"]
            values.append(x[:, 0])
        return jnp.stack(values), new

    def gradient_step(
        self, learned: dict[str, Any], batch: Params, learning_rate: Any
    ) -> tuple[dict[str, Any], tuple[Any, Any]]:
        """The critics, and every `policy_delay` steps the actor and the temperature; the losses are those of SAC."""
        temperature = jnp.exp(learned["temperature"][0])
        size, warm = self.config.batch, batch["count"] > self.config.renorm_warmup
        following, log_prob = self.act(learned["actor"], batch["next_observations"], batch["noise"][0])
        observations = jnp.concatenate([batch["observations"], batch["next_observations"]])
        actions = jnp.concatenate([batch["actions"], following])

        def critic_loss(critics: Any) -> tuple[Any, Any]:
            values, statistics = self.values(critics, learned["statistics"], observations, actions, warm)  # [2, 2B]
            value = jax.lax.stop_gradient(values[:, size:].min(0)) - temperature * log_prob
            targets = batch["rewards"] + batch["discounts"] * value
            errors = values[:, :size] - targets
            return 0.5 * (errors**2).mean(1).sum(), (errors.mean(0), targets.mean(), statistics)

        def actor_loss(actor: Any, learned: dict[str, Any]) -> tuple[Any, Any]:
            actions, log_prob = self.act(actor, batch["observations"], batch["noise"][1])
            values, _ = self.values(learned["critics"], learned["statistics"], batch["observations"], actions)
            return (temperature * log_prob - values.min(0)).mean(), -log_prob.mean()

        def actor_step(learned: dict[str, Any]) -> dict[str, Any]:
            gradient, entropy = jax.grad(actor_loss, has_aux=True)(learned["actor"], learned)
            learned = self.step(learned, "actor", gradient, learning_rate)
            return self.step(learned, "temperature", (entropy - self.target_entropy)[None], learning_rate)

        (loss, more), gradient = jax.value_and_grad(critic_loss, has_aux=True)(learned["critics"])
        errors, target, statistics = more
        learned = self.step({**learned, "statistics": statistics}, "critics", gradient, learning_rate)
        learned = jax.lax.cond(batch["count"] % self.config.policy_delay == 0, actor_step, lambda same: same, learned)
        size_of_error, norm = jnp.abs(errors).mean(), jnp.sqrt((gradient**2).sum())
        return learned, (errors, jnp.stack([loss, target, size_of_error, norm, -log_prob.mean(), temperature]))
