"""What SAC, TD3 and TQC share: an actor for continuous actions, and critics that value them; both learn from replay.

Actor and critics have features of their own (`Network.init_features`); the critics share theirs. All weights of the
actor are one vector in `learned`, all of the critics another one.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from fever.algos.base import Task, build_network
from fever.algos.flat_params import FlatParams
from fever.algos.off_policy import OffPolicyAlgorithm, OffPolicySettings
from fever.config import setting
from fever.errors import FeverError
from fever.policy import Params
from fever.policy.networks import init_perceptron, perceptron


class ActorCriticSettings(OffPolicySettings):
    """Settings of SAC, TD3 and TQC."""

    hidden: tuple[int, ...] | None = setting(
        None, "widths of the hidden layers of the actor and of each critic; null: 256,256", "Haarnoja et al. 2018; SB3"
    )
    batch: int = setting(256, "transitions in a gradient step", "Haarnoja et al. 2018", gt=0)
    replay_ratio: float = setting(
        256.0, "transitions learned from for each one added: a gradient step per step", "Haarnoja et al. 2018", gt=0
    )
    buffer: int = setting(1_000_000, "transitions kept, all shards together", "Haarnoja et al. 2018", gt=0)
    warmup: int = setting(1000, "transitions with random actions before learning begins", "Haarnoja et al. 2018", ge=0)
    n_step: int = setting(1, "rewards summed up before bootstrapping", "Haarnoja et al. 2018", gt=0)
    polyak: float = setting(
        0.005, "share of the way that target networks move when they are updated", "Haarnoja et al. 2018", gt=0, le=1
    )

    def widths(self, image: bool) -> tuple[int, ...]:
        """Hidden layers behind every kind of features: without one, critics would be linear in the action."""
        return self.hidden if self.hidden is not None else self.default_widths


class ActorCritic(OffPolicyAlgorithm):
    """The networks, and the parts of a gradient step. A subclass has the losses: `gradient_step` and `inputs`."""

    config: ActorCriticSettings

    def __init__(
        self, config: ActorCriticSettings, task: Task, squashed: bool | str = True, critics: int = 2, outputs: int = 1
    ) -> None:
        """`squashed` is the network's: the distribution of actions. `outputs` is the width of each critic's output."""
        super().__init__(config, task)
        if task.action["type"] != "box":
            name = type(self).__name__
            raise FeverError(f"{task.name} has no Box action space, which {name} needs; use dqn for a Discrete one")
        self.n_step = config.n_step
        self.network = build_network(config, task, value_head=False, squashed=squashed)
        self.action_size = self.network.outputs // (1 if squashed == "deterministic" else 2)
        self.critic_names = [f"critic{index}/q" for index in range(critics)]

        params, width = self.network.init_features(self.rng)
        for name in self.critic_names:
            sizes = [width + self.action_size, *self.network.hidden, outputs]
            params |= init_perceptron(self.rng, name, sizes, 1.0)
        actor = self.network.init(self.rng)
        self.flat, self.critics = FlatParams(actor), FlatParams(params)
        vectors = {"actor": jnp.asarray(self.flat.pack(actor)), "critics": jnp.asarray(self.critics.pack(params))}
        optimizers = {name: self.optimizer.init(vector) for name, vector in vectors.items()}
        self.learned = {**vectors, "target": vectors["critics"], "optimizers": optimizers}

    def gradient_step(
        self, learned: dict[str, Any], batch: Params, learning_rate: Any
    ) -> tuple[dict[str, Any], tuple[Any, Any]]:
        """One gradient step on a batch `[B, ...]`, with its part of `inputs()`.

        Returns the new `learned`, TD errors `[B]`, and `metric_names`.
        """
        raise NotImplementedError

    def update(
        self, learned: dict[str, Any], batches: Params, inputs: Params, learning_rate: Any
    ) -> tuple[dict[str, Any], Any, Any]:
        step = partial(self.gradient_step, learning_rate=learning_rate)
        learned, (errors, metrics) = jax.lax.scan(step, learned, {**batches, **inputs})
        return learned, errors, metrics

    # the parts of a gradient step

    def policy(self, actor: Any, observations: Any) -> Any:
        """Parameters of the distribution of actions `[B, outputs]`."""
        params = self.flat.unpack(actor)
        return self.network.policy(params, self.network.features(params, observations, jnp), jnp)

    def critic_outputs(self, critics: Any, observations: Any, actions: Any, count: int | None = None) -> Any:
        """What the first `count` critics (None: all) say of state and action, `[C, B, outputs]`."""
        params = self.critics.unpack(critics)
        x = jnp.concatenate([self.network.features(params, observations, jnp), actions], axis=-1)
        layers, activation = len(self.network.hidden), self.network.activation
        names = self.critic_names[:count]
        return jnp.stack([perceptron(params, name, layers, activation, x, jnp) for name in names])

    def values(self, critics: Any, observations: Any, actions: Any, count: int | None = None) -> Any:
        """Q_i(s, a) `[C, B]` of critics with one output."""
        return self.critic_outputs(critics, observations, actions, count)[..., 0]

    def follow(self, learned: dict[str, Any], target: str, name: str) -> dict[str, Any]:
        """`learned` with a target network moved towards the network that it follows."""
        return {**learned, target: learned[target] + self.config.polyak * (learned[name] - learned[target])}
