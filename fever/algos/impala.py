"""IMPALA (Espeholt et al. 2018): samplers that never wait, corrected by V-trace for their older weights; and APPO.

The loop is `Impala.train`, the loss is `Impala._loss`. A batch is the next K fragments from any workers: T steps of B
environments (B = K times the environments of a worker), learned from in minibatches of whole sequences. K is such that
B is closest to the environments of the whole run, whatever the number of workers.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fever.algos.base import Iteration, SamplingContext, Stopwatch, Task
from fever.algos.batch import fragments_of
from fever.algos.on_policy import (
    ActorCriticSettings,
    OnPolicyAlgorithm,
    following_values,
    join_fragments,
    shuffled_minibatches,
    unroll,
)
from fever.algos.returns import explained_variance, normalize_advantages, vtrace
from fever.config import setting
from fever.policy import Params
from fever.sampling.spec import Fragment
from fever.sampling.stream import AHEAD, LocalStream, RayStream, Stream

STEP_METRICS = (
    "policy_loss", "value_loss", "entropy", "kl", "clip_fraction", "explained_variance", "gradient_norm",
)  # fmt: skip
ROUNDING = 1e-4  # by which ratios of 1 differ between NumPy and XLA


class ImpalaConfig(ActorCriticSettings):
    """Settings of IMPALA."""

    steps: int = setting(20, "steps of each environment in a fragment (T)", "Espeholt et al. 2018; DMLab: 100", gt=0)
    fragments: int | None = setting(
        None, "fragments in a batch; null: as many as have the environments of the whole run", gt=0
    )
    minibatches: int = setting(
        4, "gradient steps per pass over a batch, at most: as many as divide its environments", gt=0
    )
    epochs: int = setting(1, "passes over each batch", "Espeholt et al. 2018", gt=0)
    queue: int = setting(
        4,
        "batches that wait, at most, or one fragment of every worker; beyond it the oldest fragments are dropped",
        gt=0,
    )
    max_lag: int = setting(64, "greatest age, in batches, of the weights that a fragment was sampled with", gt=0)
    learning_rate: float = setting(1e-3, "of the optimizer", gt=0)
    trace_decay: float = setting(0.95, "lambda of V-trace", "remark 2 of Espeholt et al. 2018, who have 1", ge=0, le=1)
    delta_limit: float = setting(1.0, "greatest weight of a temporal difference", "rho, Espeholt et al. 2018", gt=0)
    trace_limit: float = setting(1.0, "greatest weight of a trace", "c, Espeholt et al. 2018", gt=0)
    clip: float | None = setting(None, "range of the probability ratio, as in PPO; null: plain policy gradient", gt=0)
    entropy_coefficient: float = setting(0.01, "weight of the entropy bonus", "Espeholt et al. 2018", ge=0)

    def batch_fixed_by(self) -> str | None:
        return None if self.fragments is None else "fragments"

    def rows(self, envs: int) -> int:
        return super().rows(envs) // self.minibatches


class APPOConfig(ImpalaConfig):
    """Settings of APPO."""

    clip: float | None = setting(0.2, "range of the probability ratio; null: plain policy gradient", "as PPO", gt=0)
    epochs: int = setting(4, "passes over each batch", gt=0)


class Impala(OnPolicyAlgorithm):
    """Policy gradients on a stream of fragments, each sampled with weights a little older than the learner's."""

    Config: type[ImpalaConfig] = ImpalaConfig
    overlaps = True
    counters = ("steps", "version")
    config: ImpalaConfig

    def __init__(self, config: ImpalaConfig, task: Task) -> None:
        recurrent = {"recurrent": config.recurrent, "recurrent_size": config.recurrent_size}
        super().__init__(config, task, config.max_gradient_norm, **recurrent)
        self.fragments = config.fragments or fragments_of(task.total_envs, task.workers)
        self.fragment_steps = config.steps
        self.envs = self.fragments * task.envs  # in a batch
        self.minibatches = max(n for n in range(1, config.minibatches + 1) if self.envs % n == 0)
        self.version = 0  # batches learned from
        self._jitted_update = jax.jit(self._update)

    def start(self, place: SamplingContext) -> Stream:
        """Samplers that go on without waiting for the learner."""
        task, config, spec = self.task, self.config, self.sampler_spec(place)
        spaces = task.observation, task.action
        if not task.workers:
            return LocalStream(spec, *spaces, place.generation)
        room = max(config.queue * self.fragments, task.workers)  # workers of one speed send at the same time
        return RayStream(spec, *spaces, task.workers, place.generation, room, config.max_lag)

    def batch_note(self) -> str | None:
        workers, lag = self.task.workers, AHEAD * self.task.workers // self.fragments
        if lag <= self.config.max_lag:
            return None
        return (
            f"{workers} workers make {lag} batches at a time, and fragments older than max_lag={self.config.max_lag} "
            "batches are dropped; --scale-batch enlarges the batch"
        )

    def train(self, stream: Stream) -> Iterator[Iteration]:
        """The training loop: publish, take the next batch, learn, for ever."""
        while True:
            stopwatch = Stopwatch()
            with stopwatch("transfer"):
                stream.publish(self.weights(), self.version)
            with stopwatch("wait" if self.task.workers else "sample"):
                fragments = stream.next(self.fragments)
            lags = [self.version - fragment.version for fragment in fragments]
            with stopwatch("learn"):
                metrics = self.learn(fragments)
            facts = {
                "policy_lag": float(np.mean(lags)), "policy_lag_max": float(max(lags)),
                "queue": float(stream.waiting), "fragments_dropped": float(stream.dropped),
            }  # fmt: skip
            yield Iteration(list(fragments), metrics | facts, stopwatch.seconds)

    def learn(self, fragments: list[Fragment]) -> dict[str, float]:
        """The updates from one batch. Returns metrics."""
        config = self.config
        batch = join_fragments(fragments)
        self.normalizer.scale_rewards(batch)
        orders = shuffled_minibatches(self.rng, self.envs, self.envs // self.minibatches, config.epochs)
        learning_rate = self.scheduled(config.learning_rate, config.learning_rate_schedule)
        params, optimizer_state, history = self._jitted_update(
            self.params, self.optimizer_state, batch, self.normalizer.statistics(), orders, learning_rate
        )
        history = self.finish(params, optimizer_state, history, batch)
        self.version += 1
        return {**dict(zip(STEP_METRICS, history.mean(0).tolist(), strict=True)), "updates": float(len(orders))}

    def _update(
        self, params: Any, optimizer_state: Any, batch: Params, statistics: Params, orders: Any, learning_rate: Any
    ) -> tuple[Any, Any, jax.Array]:
        """Every epoch's minibatches; `orders` `[epochs * minibatches, b]` says which environments go into which.

        Returns the new weights and optimiser state, and STEP_METRICS of every gradient step.
        """
        state = batch["state"]
        rows = {name: value for name, value in batch.items() if name != "state"}

        def gradient_step(carry: Any, order: jax.Array) -> tuple[Any, jax.Array]:
            params, optimizer_state = carry
            minibatch = {name: value[:, order] for name, value in rows.items()} | {"state": state[order]}
            gradient, metrics = jax.grad(self._loss, has_aux=True)(params, statistics, minibatch)
            metrics = jnp.append(metrics, jnp.sqrt((gradient**2).sum()))
            return self.optimizer.step(params, optimizer_state, gradient, learning_rate), metrics

        (params, optimizer_state), history = jax.lax.scan(gradient_step, (params, optimizer_state), orders)
        return params, optimizer_state, history

    def _loss(self, params: Any, statistics: Params, batch: Params) -> tuple[jax.Array, jax.Array]:
        """Policy gradient + value_coefficient E[(v - V)^2] - entropy_coefficient E[H] over whole sequences `[T, b]`.

        v are V-trace's value targets; the policy gradient is -E[min(r, rho) A log p], or PPO's clipped one. Returns the
        loss and all of STEP_METRICS but the last.
        """
        config, network, distribution = self.config, self.network, self.distribution
        weights = {**self.flat.unpack(params), **statistics}
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
            advantages = normalize_advantages(advantages, valid)
        if config.clip is None:
            weighted = jax.lax.stop_gradient(jnp.minimum(ratio, config.delta_limit)) * advantages
            policy_loss, outside = -log_probs * weighted, ratio > config.delta_limit * (1 + ROUNDING)
        else:
            clipped = jnp.clip(ratio, 1 - config.clip, 1 + config.clip)
            policy_loss = -jnp.minimum(ratio * advantages, clipped * advantages)
            outside = jnp.abs(ratio - 1) > config.clip
        errors = trace.value_targets - values[:-1]
        terms = [
            policy_loss,
            errors**2,
            distribution.entropy(outputs, jnp),
            ratio - 1 - log_ratio,  # the low-variance estimate of the KL divergence, Schulman 2020
            outside.astype(jnp.float32),
        ]
        means = (jnp.stack(terms) * valid).sum((1, 2)) / total
        loss = config.total_loss(means[0], means[1], means[2])
        return loss, jnp.append(means, explained_variance(trace.value_targets, errors, valid))


class APPO(Impala):
    """IMPALA with PPO's clipped objective, which allows several passes over a batch."""

    Config = APPOConfig
