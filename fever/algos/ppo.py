"""Proximal policy optimisation (Schulman et al. 2017), one jitted call per iteration.

The loop is `OnPolicyAlgorithm.train`, or with `overlap` `PPO._train_overlapped`. The loss is `PPO._loss`; `PPO._update`
computes advantages and runs all epochs and minibatches on the learner's device. A batch is T steps of B environments:
`steps` steps of all environments of the run, whatever the number of workers, and a few more where they cannot be shared
evenly.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fever.algos.base import Iteration, Stopwatch, Task
from fever.algos.on_policy import (
    IMAGE_CHUNK,
    ActorCriticSettings,
    OnPolicyAlgorithm,
    advantages_of,
    join_fragments,
    shuffled_minibatches,
    unroll,
    values_of,
)
from fever.algos.optimizer import Schedule, require_end
from fever.algos.returns import explained_variance, normalize_advantages
from fever.config import setting
from fever.errors import FeverError
from fever.policy import Params
from fever.sampling.spec import Fragment

STEP_METRICS = ("policy_loss", "value_loss", "entropy", "kl", "clip_fraction", "gradient_norm", "updates")
KL = STEP_METRICS.index("kl")


class PPOConfig(ActorCriticSettings):
    """Settings of PPO."""

    hidden: tuple[int, ...] | None = setting(
        None, "widths of each head's hidden layers; null: 64,64, or 64 behind an LSTM or GRU, none behind convolutions",
        "Schulman et al. 2017, table 3",
    )  # fmt: skip
    minibatch: int | None = setting(
        256, "steps in a gradient step; divides the batch; null, or more than the batch: all of it",
        "Schulman et al. 2017, table 5", gt=0,
    )  # fmt: skip
    epochs: int = setting(10, "passes over each batch", "Schulman et al. 2017, table 3", gt=0)
    entropy_coefficient: float | None = setting(  # type: ignore[assignment]
        None, "weight of the entropy bonus; null: 0.01 where actions are discrete, otherwise 0",
        "Schulman et al. 2017, tables 5 and 3", ge=0,
    )  # fmt: skip
    gae_lambda: float | None = setting(
        None,
        "trace decay of the advantages; null: 0.98 where actions are discrete and observations no images, else 0.95",
        "rl-zoo, LunarLander-v3; Schulman et al. 2017, table 3", ge=0, le=1,
    )  # fmt: skip
    clip: float = setting(0.2, "range of the probability ratio", "Schulman et al. 2017, table 3", gt=0)
    clip_schedule: Schedule = setting("constant", "of clip, as learning_rate_schedule", "SB3")
    value_clip: float | None = setting(None, "range of change of a value prediction; null: none", "SB3", gt=0)
    target_kl: float | None = setting(
        None, "ends an iteration's updates at 1.5 times this KL; null: never", "SB3", gt=0
    )
    overlap: bool = setting(
        False, "sample the next batch while one is learned from, which takes another core; its weights are then one "
        "update older",
    )  # fmt: skip

    def for_task(self, task: Task) -> PPOConfig:
        """These settings, with numbers in the place of null for `gae_lambda` and `entropy_coefficient`."""
        continuous, image = task.action["type"] == "box", task.observation["type"] == "image"
        numbers = {
            "gae_lambda": 0.95 if continuous or image else 0.98,
            "entropy_coefficient": 0.0 if continuous else 0.01,
        }
        return self.model_copy(update={name: one for name, one in numbers.items() if getattr(self, name) is None})

    def rows(self, envs: int) -> int:
        return min(self.minibatch or self.steps * envs, self.steps * envs)

    def widths(self, image: bool) -> tuple[int, ...]:
        if self.hidden is None and self.recurrent != "none" and not image and self.network is None:
            return (64,)
        return super().widths(image)


class Update(NamedTuple):
    """An iteration's updates, which JAX may still be computing."""

    batch: Params
    results: tuple[Any, Any, jax.Array, jax.Array]  # what `PPO._update` returns
    scheduled: dict[str, float]  # values of settings with a schedule


class PPO(OnPolicyAlgorithm):
    """Clipped policy gradients on batches of fragments."""

    Config = PPOConfig
    config: PPOConfig

    def __init__(self, config: PPOConfig, task: Task) -> None:
        config = config.for_task(task)
        recurrent = {"recurrent": config.recurrent, "recurrent_size": config.recurrent_size}
        super().__init__(config, task, config.max_gradient_norm, **recurrent)
        require_end(task, config.clip_schedule)
        recurs = self.network.recurrent != "none"
        self.minibatch = self.check_batch(config, task.total_envs, recurs)  # steps, as stated
        quick = jax.default_backend() == "cpu" and not self.network.convolutions
        options = {"xla_backend_optimization_level": 1} if quick else None  # compiles a seventh faster, runs as fast
        self._jitted_update = jax.jit(self._update, compiler_options=options)

    @classmethod
    def check_batch(cls, config: PPOConfig, envs: int, recurrent: bool | None = None) -> int:
        """The steps in a minibatch of a batch from so many environments, those of the whole run. Raises FeverError if
        the minibatch does not fit. `recurrent`: the network is; None: if the settings say so."""
        batch = config.steps * envs
        size = min(config.minibatch or batch, batch)
        if config.recurrent != "none" if recurrent is None else recurrent:
            if size % config.steps or envs % (size // config.steps):
                raise FeverError(
                    f"a recurrent policy learns whole sequences: minibatch={size} must be steps="
                    f"{config.steps} times a divisor of the {envs} environments"
                )
        elif batch % size:
            fitting = max(smaller for smaller in range(1, size + 1) if batch % smaller == 0)
            raise FeverError(
                f"minibatch={size} does not divide the batch of {envs} environments x {config.steps} steps"
                f" = {batch}; minibatch={fitting} does"
            )
        return size

    def train(self, pool: Any) -> Iterator[Iteration]:
        return self._train_overlapped(pool) if self.config.overlap else super().train(pool)

    def _train_overlapped(self, pool: Any) -> Iterator[Iteration]:
        """The training loop that samples while JAX learns. Where it ends, the batch that was sampled ahead is lost."""
        pool.broadcast(self.weights())
        with Stopwatch()("sample"):
            ahead = pool.collect(self.fragments)
        while True:
            stopwatch, fragments = Stopwatch(), ahead
            with stopwatch("learn"):
                update = self._begin(fragments)
            with stopwatch("transfer"):
                pool.broadcast(self.weights())  # those before the update
            with stopwatch("sample"):
                ahead = pool.collect(self.fragments)
            with stopwatch("learn"):
                metrics = self._end(update)
            yield Iteration(list(fragments), metrics, stopwatch.seconds)

    def learn(self, fragments: list[Fragment]) -> dict[str, float]:
        """One iteration's updates from exactly `self.fragments` fragments. Returns metrics."""
        return self._end(self._begin(fragments))

    def _begin(self, fragments: list[Fragment]) -> Update:
        """Start one iteration's updates, which JAX computes asynchronously. Nothing is kept before `_end`."""
        config = self.config
        batch = join_fragments(fragments)
        self.normalizer.scale_rewards(batch)
        learning_rate = self.scheduled(config.learning_rate, config.learning_rate_schedule)
        clip = self.scheduled(config.clip, config.clip_schedule)
        statistics, orders = self.normalizer.statistics(), self._orders()
        results = self._jitted_update(self.params, self.optimizer_state, batch, statistics, orders, learning_rate, clip)
        return Update(batch, results, {"learning_rate": learning_rate, "clip": clip})

    def _end(self, update: Update) -> dict[str, float]:
        """Wait for the updates and keep their results. Returns metrics."""
        params, optimizer_state, history, explained = update.results
        rows = self.finish(params, optimizer_state, history, update.batch)
        return {
            **dict(zip(STEP_METRICS, rows.mean(0).tolist(), strict=True)),
            "kl": float(rows[-1, KL]),
            "updates": float(rows[:, -1].sum()),
            "explained_variance": float(explained),
            **update.scheduled,
        }

    def _orders(self) -> np.ndarray:
        """Which columns of `_rows` go into which gradient step: int32 `[epochs * minibatches, columns]`."""
        config, task, columns = self.config, self.task, self.task.envs * self.fragments
        if self.network.recurrent != "none":  # whole sequences
            return shuffled_minibatches(self.rng, columns, self.minibatch // self.fragment_steps, config.epochs)
        count = config.steps * task.total_envs // self.minibatch
        return shuffled_minibatches(self.rng, self.fragment_steps * columns, self.minibatch, config.epochs, count)

    def _update(
        self,
        params: Any,
        optimizer_state: Any,
        batch: Params,
        statistics: Params,
        orders: Any,
        learning_rate: Any,
        clip: Any,
    ) -> tuple[Any, Any, jax.Array, jax.Array]:
        """Advantages, then the minibatches `orders` of every epoch. Compiled once: all shapes are fixed for a run.

        Returns the new weights and optimiser state, STEP_METRICS of every gradient step, and the explained variance.
        """
        config, recurrent = self.config, self.network.recurrent != "none"
        rows = self._rows({**self.flat.unpack(params), **statistics}, batch)

        def loss(params: Params, minibatch: Params, state: Any, total: Any) -> tuple[jax.Array, jax.Array]:
            return self._loss({**params, **statistics}, minibatch, state, total, clip)

        def gradient_step(carry: Any, order: jax.Array) -> tuple[Any, jax.Array]:
            params, optimizer_state, active = carry
            minibatch = {name: value[:, order] for name, value in rows.items()}
            valid = minibatch["valid"]
            total = jnp.maximum(valid.sum(), 1.0)
            if config.normalize_advantages:
                minibatch["advantages"] = normalize_advantages(minibatch["advantages"], valid)
            state = batch["state"][order] if recurrent else batch["state"]
            gradients, means = self._gradients(loss, self.flat.unpack(params), minibatch, state, total)
            gradient = self.flat.pack(gradients, jnp)  # [P]
            new_params, new_state = self.optimizer.step(params, optimizer_state, gradient, learning_rate)
            if config.target_kl is not None:
                active = active & (means[KL] <= 1.5 * config.target_kl)
                new_params, new_state = jax.tree.map(
                    lambda new, old: jnp.where(active, new, old), (new_params, new_state), (params, optimizer_state)
                )
            norm = jnp.sqrt((gradient**2).sum())
            return (new_params, new_state, active), jnp.stack([*means, norm, active.astype(jnp.float32)])

        carry = (params, optimizer_state, jnp.asarray(True))
        (params, optimizer_state, _), history = jax.lax.scan(gradient_step, carry, orders)
        explained = explained_variance(rows["returns"], rows["advantages"], rows["valid"])
        return params, optimizer_state, history, explained

    def _rows(self, weights: Params, batch: Params) -> Params:
        """The arrays that minibatches are drawn from, `[L, columns, ...]`: whole sequences (L = T) for a recurrent
        policy, single steps (L = 1) otherwise."""
        config = self.config
        assert config.gae_lambda is not None  # see `for_task`
        values = values_of(self.network, weights, batch)  # [T+1, B]
        advantages = advantages_of(values, batch, config.gamma, config.gae_lambda)
        rows = {
            "observations": batch["observations"][:-1],
            "first": batch["first"][:-1],
            "actions": batch["actions"],
            "log_probs": batch["log_probs"],
            "valid": batch["valid"].astype(jnp.float32),
            "values": values[:-1],
            "advantages": advantages,
            "returns": advantages + values[:-1],
        }
        if self.network.recurrent != "none":
            return rows
        return {name: value.reshape(1, -1, *value.shape[2:]) for name, value in rows.items()}

    def _loss(self, weights: Params, rows: Params, state: Any, total: Any, clip: Any) -> tuple[jax.Array, jax.Array]:
        """-E[min(r A, clip(r, 1 - clip, 1 + clip) A)] + value_coefficient E[(V - R)^2] - entropy_coefficient E[H]

        Expectations are sums over valid rows `[L, columns]` divided by `total`, so that the losses of chunks add up.
        Returns the loss and the first of STEP_METRICS.
        """
        config, network, distribution = self.config, self.network, self.distribution
        features = unroll(network, weights, rows["observations"], state, rows["first"])
        outputs, values = network.policy(weights, features, jnp), network.value(weights, features, jnp)
        log_ratio = distribution.log_prob(outputs, rows["actions"], jnp) - rows["log_probs"]
        ratio = jnp.exp(log_ratio)
        clipped = jnp.clip(ratio, 1 - clip, 1 + clip)
        value_error = (values - rows["returns"]) ** 2
        if config.value_clip is not None:
            near = rows["values"] + jnp.clip(values - rows["values"], -config.value_clip, config.value_clip)
            value_error = jnp.maximum(value_error, (near - rows["returns"]) ** 2)
        terms = [  # the first of STEP_METRICS
            -jnp.minimum(ratio * rows["advantages"], clipped * rows["advantages"]),
            value_error,
            distribution.entropy(outputs, jnp),
            ratio - 1 - log_ratio,  # the low-variance estimate of the KL divergence, Schulman 2020
            (jnp.abs(ratio - 1) > clip).astype(jnp.float32),
        ]
        means = (jnp.stack(terms) * rows["valid"]).sum((1, 2)) / total  # one reduction: quick to compile
        return config.total_loss(means[0], means[1], means[2]), means

    def _gradients(self, loss: Any, params: Params, rows: Params, state: Any, total: Any) -> tuple[Params, jax.Array]:
        """Gradients and metrics of one minibatch. Images are split into chunks that stay in a CPU's cache."""
        differentiate = jax.grad(loss, has_aux=True)
        columns = rows["valid"].shape[1]
        if not self.network.convolutions or self.network.recurrent != "none" or columns % IMAGE_CHUNK:
            return differentiate(params, rows, state, total)
        chunks = {
            name: value.reshape(1, -1, IMAGE_CHUNK, *value.shape[2:]).swapaxes(0, 1) for name, value in rows.items()
        }

        def add(sums: Any, chunk: Params) -> tuple[Any, None]:
            return jax.tree.map(jnp.add, sums, differentiate(params, chunk, state, total)), None

        zeros = jax.tree.map(jnp.zeros_like, params), jnp.zeros(len(STEP_METRICS) - 2)
        return jax.lax.scan(add, zeros, chunks)[0]
