"""IMPALA (Espeholt et al. 2018): samplers that never wait, and V-trace for their old weights; APPO, clipped as PPO.

The loop is `Impala.train`; the mathematics is `Impala._update`. A batch is the next K fragments, whoever made them: T
steps of B environments (B = K times the environments of a worker). It is learned from once, in minibatches of whole
sequences.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from fever.algos.adam import AdamState
from fever.algos.base import Iteration, Phases, Place, Task, sampler_spec
from fever.algos.on_policy import GradientLearner, explained_variance, following_values, join, unroll
from fever.algos.returns import vtrace
from fever.config import NetworkSettings, setting
from fever.policy import Params
from fever.sampling.spec import Fragment
from fever.sampling.stream import LocalStream, RayStream, Stream

STEP_METRICS = (
    "policy_loss", "value_loss", "entropy", "kl", "clip_fraction", "explained_variance", "gradient_norm",
)  # fmt: skip
ROUNDING = 1e-4  # of ratios that are 1, as NumPy and XLA calculate them


class ImpalaConfig(NetworkSettings):
    """Settings of IMPALA."""

    recurrent: Literal["none", "lstm", "gru"] = setting("none", "memory between the observation and the heads")
    recurrent_size: int = setting(128, "units of the LSTM or GRU", gt=0)
    log_std: float = setting(0.0, "initial log standard deviation of continuous actions (in half action ranges)", "SB3")

    steps: int = setting(
        64, "steps of each environment in a fragment (T)", "Espeholt et al. 2018 have 20 and 100", gt=0
    )
    fragments: int | None = setting(None, "fragments in a batch; null: as many as workers", gt=0)
    minibatches: int = setting(
        4, "gradient steps per pass over a batch, at most: as many as divide its environments", gt=0
    )
    epochs: int = setting(1, "passes over each batch", "Espeholt et al. 2018", gt=0)
    queue: int = setting(4, "batches that wait at most; the oldest fragments are dropped", gt=0)
    max_lag: int = setting(64, "batches by which the weights that acted may be older than the learner's", gt=0)
    learning_rate: float = setting(1e-3, "of Adam", gt=0)
    gamma: float = setting(0.99, "discount per step", "Espeholt et al. 2018", ge=0, le=1)
    trace_decay: float = setting(0.95, "lambda of V-trace", "remark 2 of Espeholt et al. 2018, who have 1", ge=0, le=1)
    delta_limit: float = setting(1.0, "greatest weight of a temporal difference", "rho, Espeholt et al. 2018", gt=0)
    trace_limit: float = setting(1.0, "greatest weight of a trace", "c, Espeholt et al. 2018", gt=0)
    clip: float | None = setting(None, "range of the probability ratio, as in PPO; null: plain policy gradient", gt=0)
    value_coefficient: float = setting(0.5, "weight of the value loss", "Espeholt et al. 2018", ge=0)
    entropy_coefficient: float = setting(0.001, "weight of the entropy bonus", "Espeholt et al. 2018 have 0.01", ge=0)
    max_gradient_norm: float = setting(0.5, "gradients are scaled down to this norm", "as PPO", gt=0)
    normalize_advantages: bool = setting(True, "zero mean and unit deviation within a minibatch", "as PPO")
    normalize_observations: bool = setting(True, "by running mean and deviation (not images)", "as PPO")
    normalize_rewards: bool = setting(True, "by the running deviation of returns", "as PPO")


class APPOConfig(ImpalaConfig):
    """Settings of APPO."""

    clip: float | None = setting(0.2, "range of the probability ratio; null: plain policy gradient", "as PPO", gt=0)
    epochs: int = setting(4, "passes over each batch", gt=0)


class Impala(GradientLearner):
    """Policy gradients on a stream of fragments, each with weights a little older than the learner's."""

    Config: type[ImpalaConfig] = ImpalaConfig
    overlaps = True
    counters = ("steps", "version")

    def __init__(self, config: ImpalaConfig, task: Task) -> None:
        super().__init__(config, task)
        self.config = config
        self.fragments = config.fragments or max(1, task.workers)
        self.envs = self.fragments * task.envs  # in a batch
        self.minibatches = max(n for n in range(1, config.minibatches + 1) if self.envs % n == 0)
        self.version = 0  # batches learned from
        self._jitted_update = jax.jit(self._update)

    def start(self, place: Place) -> Stream:
        """Samplers that never wait."""
        task, config = self.task, self.config
        gamma = config.gamma if config.normalize_rewards else None
        spec = sampler_spec(place, self.network, task, config.steps, gamma)
        spaces = task.observation, task.action
        if not task.workers:
            return LocalStream(spec, *spaces, place.generation)
        room = config.queue * self.fragments
        return RayStream(spec, *spaces, task.workers, place.generation, room, config.max_lag)

    def train(self, stream: Stream) -> Iterator[Iteration]:
        """The training loop: publish, take the next batch, learn, for ever."""
        while True:
            phases = Phases()
            with phases("transfer"):
                stream.publish(self.weights(), self.version)
            with phases("wait" if self.task.workers else "sample"):
                fragments = stream.next(self.fragments)
            lags = [self.version - fragment.version for fragment in fragments]
            with phases("learn"):
                metrics = self.learn(fragments)
            facts = {
                "policy_lag": float(np.mean(lags)), "policy_lag_max": float(max(lags)),
                "queue": float(stream.waiting), "fragments_dropped": float(stream.dropped),
            }  # fmt: skip
            yield Iteration(list(fragments), metrics | facts, phases.seconds)

    def learn(self, fragments: list[Fragment]) -> dict[str, float]:
        """The updates of one batch."""
        batch = join(fragments)
        self.normalizer.scale_rewards(batch)
        orders = np.tile(np.arange(self.envs, dtype=np.int32), (self.config.epochs, 1))
        orders = self.rng.permuted(orders, axis=1).reshape(-1, self.envs // self.minibatches)
        params, optimizer_state, history = self._jitted_update(
            self.params, self.optimizer_state, batch, self.normalizer.statistics(), orders
        )
        history = self.finish(params, optimizer_state, history, batch)
        self.version += 1
        return {**dict(zip(STEP_METRICS, history.mean(0).tolist(), strict=True)), "updates": float(len(orders))}

    def _update(
        self, params: Any, optimizer_state: AdamState, batch: Params, statistics: Params, orders: Any
    ) -> tuple[Any, AdamState, jax.Array]:
        """Every epoch's minibatches; `orders` `[epochs * minibatches, b]` says which environments go into which.

        Returns the new weights and optimiser state, and STEP_METRICS of every gradient step.
        """
        state = batch["state"]
        rows = {name: value for name, value in batch.items() if name != "state"}

        def gradient_step(carry: Any, order: jax.Array) -> tuple[Any, jax.Array]:
            params, optimizer_state = carry
            minibatch = {name: value[:, order] for name, value in rows.items()} | {"state": state[order]}
            gradient, metrics = jax.grad(self._loss, has_aux=True)(params, statistics, minibatch)
            direction, optimizer_state = self.optimizer.update(gradient, optimizer_state)
            metrics = jnp.append(metrics, jnp.sqrt((gradient**2).sum()))
            return (params - self.config.learning_rate * direction, optimizer_state), metrics

        (params, optimizer_state), history = jax.lax.scan(gradient_step, (params, optimizer_state), orders)
        return params, optimizer_state, history

    def _loss(self, params: Any, statistics: Params, batch: Params) -> tuple[jax.Array, jax.Array]:
        """The objective of whole sequences `[T, b]`, and all of STEP_METRICS but the last."""
        config, network, distribution = self.config, self.network, self.distribution
        weights = {**self.vectorizer.unpack(params), **statistics}
        features = unroll(network, weights, batch["observations"], batch["state"], batch["first"])  # [T+1, b, F]
        values = network.value(weights, features, jnp)
        outputs = network.policy(weights, features[:-1], jnp)
        log_probs = distribution.log_prob(outputs, batch["actions"], jnp)
        log_ratio = log_probs - batch["log_probs"]
        ratio = jnp.exp(log_ratio)
        trace = vtrace(
            *jax.lax.stop_gradient((ratio, batch["rewards"], values[:-1], following_values(values, batch))),
            batch["terminated"], batch["truncated"],
            config.gamma, config.trace_decay, config.delta_limit, config.trace_limit,
        )  # fmt: skip
        valid = batch["valid"].astype(jnp.float32)
        total = jnp.maximum(valid.sum(), 1.0)
        advantages = trace.advantages
        if config.normalize_advantages:
            centred = advantages - (advantages * valid).sum() / total
            advantages = centred / (jnp.sqrt((centred**2 * valid).sum() / total) + 1e-8)
        if config.clip is None:
            weighted = jax.lax.stop_gradient(jnp.minimum(ratio, config.delta_limit)) * advantages
            policy_loss, outside = -log_probs * weighted, ratio > config.delta_limit * (1 + ROUNDING)
        else:
            clipped = jnp.clip(ratio, 1 - config.clip, 1 + config.clip)
            policy_loss = -jnp.minimum(ratio * advantages, clipped * advantages)
            outside = jnp.abs(ratio - 1) > config.clip
        errors = trace.goals - values[:-1]
        terms = [
            policy_loss,
            errors**2,
            distribution.entropy(outputs, jnp),
            ratio - 1 - log_ratio,  # the low-variance estimate of the KL divergence, Schulman 2020
            outside.astype(jnp.float32),
        ]
        means = (jnp.stack(terms) * valid).sum((1, 2)) / total
        loss = means[0] + config.value_coefficient * means[1] - config.entropy_coefficient * means[2]
        return loss, jnp.append(means, explained_variance(trace.goals, errors, valid))


class APPO(Impala):
    """IMPALA with PPO's clipped objective, and therefore several passes over a batch."""

    Config = APPOConfig
