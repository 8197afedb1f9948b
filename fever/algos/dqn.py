"""Deep Q-learning (Mnih et al. 2015) with its usual extensions: double, dueling, n-step, prioritised replay.

The loop is in `off_policy.py`; here are the gradient step and the exploration schedule.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
import numpy as np

from fever.algos.base import Task, build_network
from fever.algos.flat_params import FlatParams
from fever.algos.off_policy import OffPolicyAlgorithm, OffPolicySettings
from fever.config import setting
from fever.errors import FeverError
from fever.policy import Network, Params, draw_uniform
from fever.replay.buffer import Batch

PIECE = 512  # observations whose values are computed at once: more do not stay in a CPU's cache


class QLearningSettings(OffPolicySettings):
    """Settings of DQN and Ape-X, which differ in how they explore, and of QR-DQN."""

    default_widths: ClassVar[tuple[int, ...]] = (64, 64)
    hidden: tuple[int, ...] | None = setting(
        None, "widths of each head's hidden layers; null: 64,64, none behind convolutions", "as PPO; rl-zoo has 256,256"
    )
    learning_rate: float = setting(1e-3, "of the optimizer", "between rl-zoo's for CartPole-v1 and Acrobot-v1", gt=0)
    updates: int = setting(
        32,
        "gradient steps in one compiled call, on transitions sampled together: more are faster, fewer are fresher",
        gt=0,
    )
    initial_weights: Literal["orthogonal", "uniform"] = setting(
        "orthogonal",
        "orthogonal, with biases of zero; or uniform: weights and biases within 1 / sqrt(inputs of a layer)",
        "as PPO; uniform: PyTorch, and so SB3",
    )
    double: bool = setting(
        True, "the online network chooses the next action, the target network values it", "van Hasselt 2016"
    )
    dueling: bool = setting(True, "state value and advantages from separate heads", "Wang et al. 2016")
    n_step: int = setting(5, "rewards summed up before bootstrapping", "Mnih et al. 2016; Hessel et al. 2018: 3", gt=0)
    prioritized: bool = setting(True, "sample in proportion to the TD error", "Schaul et al. 2016")
    priority_exponent: float = setting(0.6, "alpha: 0 samples uniformly", "Schaul et al. 2016", ge=0)
    importance: float = setting(0.4, "beta at the start; rises to 1 at stop.steps", "Schaul et al. 2016", ge=0, le=1)
    target: Literal["hard", "polyak"] = setting(
        "polyak",
        "polyak: the target network follows the online network slowly; hard: it is copied now and then",
        "Lillicrap 2016",
    )
    target_updates: int = setting(128, "gradient steps between hard copies", "rl-zoo, DQN CartPole-v1", gt=0)
    polyak: float = setting(0.01, "share of the way that a polyak target network moves in a gradient step", gt=0, le=1)
    loss: Literal["huber", "squared"] = setting("huber", "of the TD error; huber is linear beyond 1", "Mnih 2015")
    max_gradient_norm: float | None = setting(
        10.0, "gradients are scaled down to this norm; null: never", "Wang et al. 2016", gt=0
    )


class DQNConfig(QLearningSettings):
    """Settings of DQN."""

    epsilon_start: float = setting(1.0, "probability of a random action at the start", "Mnih 2015", ge=0, le=1)
    epsilon_end: float = setting(
        0.04, "probability of a random action at the end of the schedule", "rl-zoo, DQN CartPole-v1", ge=0, le=1
    )
    epsilon_steps: int = setting(8000, "environment steps of the linear schedule", "rl-zoo, DQN CartPole-v1", gt=0)


class DQN(OffPolicyAlgorithm):
    """Learns the values of actions, and acts greedily with random exploration."""

    Config: Any = DQNConfig
    acting = "online"
    config: QLearningSettings

    def __init__(self, config: QLearningSettings, task: Task) -> None:
        super().__init__(config, task, config.max_gradient_norm)
        if task.action["type"] != "discrete" or len(task.action["sizes"]) != 1:
            raise FeverError(
                f"{task.name} does not have a single Discrete action, which DQN needs; use sac for Box actions"
            )
        self.prioritized, self.n_step = config.prioritized, config.n_step
        self.network = self.build_network()
        params = self.network.init(self.rng)
        if config.initial_weights == "uniform":
            params = draw_uniform(self.rng, params)
        self.flat = FlatParams(params)
        online = jnp.asarray(self.flat.pack(params))  # [P]
        self.learned = {"online": online, "target": online, "optimizer": self.optimizer.init(online)}

    def build_network(self) -> Network:
        """The network of action values."""
        dueling = self.config.dueling
        return build_network(self.config, self.task, value_head=dueling, action_values=True, dueling=dueling)

    def epsilons(self) -> np.ndarray:
        """A linear schedule, the same for all explorers."""
        config = self.config
        assert isinstance(config, DQNConfig)
        done = min(1.0, self.steps / config.epsilon_steps)
        epsilon = config.epsilon_start + done * (config.epsilon_end - config.epsilon_start)
        return np.full(self.explorers, epsilon)

    def inputs(self, batch: Batch) -> dict[str, Any]:
        """Gradient steps so far, and importance weights P(i)^-beta `[U, B]`, scaled to a maximum of 1 in each batch."""
        config = self.config
        beta = config.importance + self.task.progress(self.steps) * (1 - config.importance)
        weights = (batch.relative_priorities.reshape(config.updates, config.batch) ** -beta).astype(np.float32)
        return {"count": self.updates, "weights": weights / weights.max(1, keepdims=True)}

    def values(self, flat: Any, observations: Any) -> Any:
        """Q(s, a) of all actions `[B, A]` for observations `[B, ...]` and the weights of a network `[P]`."""
        params = self.flat.unpack(flat)
        return self.network.policy(params, self.network.features(params, observations, jnp), jnp)

    def means(self, values: Any) -> Any:
        """The expected returns `[B, A]` of what `values` gives."""
        return values

    def pick(self, values: Any, chosen: Any) -> Any:
        """What `values` gives for the one action of every row that `chosen` `[B, A]` marks: `[B]`."""
        return (values * chosen).sum(-1)

    def update(
        self, learned: dict[str, Any], batches: Params, inputs: Params, learning_rate: Any
    ) -> tuple[dict[str, Any], Any, Any]:
        config = self.config
        batches = {**batches, "weights": inputs["weights"]}
        # If the target network stays the same for all these steps, its values are computed first, in larger pieces.
        frozen = config.target == "hard" and config.updates > 1 and config.target_updates % config.updates == 0
        if frozen:
            following = batches["next_observations"]
            pieces = (
                following.reshape(-1, PIECE, *following.shape[2:])
                if config.updates * config.batch % PIECE == 0
                else following
            )
            values = jax.lax.map(lambda piece: self.values(learned["target"], piece), pieces)
            batches["target_values"] = values.reshape(*following.shape[:2], *values.shape[2:])

        def gradient_step(carry: tuple[Any, ...], batch: Params) -> tuple[Any, Any]:
            online, target, optimizer_state, count = carry
            values = batch["target_values"] if frozen else self.values(target, batch["next_observations"])  # [B, A]
            chooser = self.means(self.values(online, batch["next_observations"]) if config.double else values)
            best = chooser.argmax(-1, keepdims=True) == np.arange(chooser.shape[-1])
            td_targets = batch["rewards"] + batch["discounts"] * self.pick(values, best)  # [B]
            (loss, (errors, value)), gradient = jax.value_and_grad(self.loss, has_aux=True)(online, batch, td_targets)
            online, optimizer_state = self.optimizer.step(online, optimizer_state, gradient, learning_rate)
            count = count + 1
            if not frozen:
                target = self.follow(target, online, count)
            metrics = jnp.stack([loss, value, jnp.abs(errors).mean(), jnp.sqrt((gradient**2).sum())])
            return (online, target, optimizer_state, count), (errors, metrics)

        carry = learned["online"], learned["target"], learned["optimizer"], inputs["count"]
        (online, target, optimizer_state, count), (errors, metrics) = jax.lax.scan(gradient_step, carry, batches)
        if frozen:
            target = self.follow(target, online, count)
        return {"online": online, "target": target, "optimizer": optimizer_state}, errors, metrics

    def follow(self, target: Any, online: Any, count: Any) -> Any:
        """The target network after `count` gradient steps."""
        if self.config.target == "polyak":
            return target + self.config.polyak * (online - target)
        return jnp.where(count % self.config.target_updates == 0, online, target)

    def loss(self, online: Any, batch: Params, td_targets: Any) -> tuple[Any, tuple[Any, Any]]:
        """Mean of w_i l_i over a batch, with importance weights w and the losses l of the actions' values; its TD
        errors `[B]` and the mean value of its actions."""
        values = self.values(online, batch["observations"])
        chosen = self.pick(values, batch["actions"] == np.arange(self.network.outputs))
        losses, errors = self.losses(chosen, td_targets)
        return (batch["weights"] * losses).mean(), (errors, chosen.mean())

    def losses(self, chosen: Any, td_targets: Any) -> tuple[Any, Any]:
        """The Huber or squared loss of each TD error, and the errors, `[B]` each, from values and TD targets `[B]`."""
        errors = chosen - td_targets
        return huber(errors) if self.config.loss == "huber" else 0.5 * errors**2, errors


def huber(errors: Any) -> Any:
    """0.5 x^2 up to a size of 1, |x| - 0.5 beyond."""
    size = jnp.abs(errors)
    return jnp.where(size < 1, 0.5 * errors**2, size - 0.5)
