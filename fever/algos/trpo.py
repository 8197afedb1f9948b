"""Trust region policy optimisation (Schulman et al. 2015), one jitted call per iteration.

The loop is `TRPO.train`. `TRPO._update` is the mathematics: `_policy_step` finds the natural gradient by conjugate
gradients on Fisher-vector products and searches along it for a step within the trust region; `_fit_values` fits the
values to the returns. A batch is T steps of B environments, or whole episodes (`timesteps_per_batch`), which are the
same for any number of workers.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fever.algos.base import Iteration, SamplingContext, Stopwatch, Task
from fever.algos.flat_params import FlatParams
from fever.algos.on_policy import (
    OnPolicyAlgorithm,
    OnPolicySettings,
    advantages_of,
    join_episodes,
    join_fragments,
    shuffled_minibatches,
    values_of,
)
from fever.algos.returns import explained_variance, normalize_advantages
from fever.config import setting
from fever.errors import FeverError
from fever.policy import Params
from fever.sampling.rollouts import Rollouts, make_rollouts
from fever.sampling.spec import Fragment
from fever.sampling.workers import Workers, make_workers

METRICS = (
    "surrogate_before", "surrogate", "kl_before", "kl", "entropy_before", "entropy", "value_loss_before", "value_loss",
    "explained_variance", "explained_variance_after", "step_fraction", "gradient_norm",
)  # fmt: skip
SPARE = 0.25  # share of a batch of episodes that is room for the steps beyond timesteps_per_batch


class TRPOConfig(OnPolicySettings):
    """Settings of TRPO."""

    steps: int = setting(256, "steps of each environment in a batch (T); not with timesteps_per_batch", gt=0)
    timesteps_per_batch: int | None = setting(
        None, "learn from whole episodes that have at least this many steps together; each worker then has one "
        "environment. null: from `steps` steps of all environments", gt=0,
    )  # fmt: skip
    timestep_limit: int | None = setting(None, "steps after which an episode is cut; with timesteps_per_batch", gt=0)

    max_kl: float = setting(0.01, "radius of the trust region: mean KL divergence", "Schulman et al. 2015", gt=0)
    cg_iterations: int = setting(10, "conjugate gradients' steps", "Schulman et al. 2015, appendix C", gt=0)
    cg_damping: float = setting(0.1, "added to the diagonal of the Fisher matrix", "Schulman et al. 2015's code", ge=0)
    line_search_steps: int = setting(10, "step lengths that are tried", "Schulman et al. 2015's code", gt=0)
    line_search_shrink: float = setting(0.8, "ratio of one step length to the one before", "sb3-contrib", gt=0, lt=1)
    accept_ratio: float = setting(
        0.1,
        "least improvement of the surrogate, as a share of the linear forecast",
        "Schulman et al. 2015's code",
        ge=0,
    )
    value_epochs: int = setting(10, "passes over each batch that fit the values", "sb3-contrib", ge=0)
    value_minibatch: int = setting(128, "steps in a gradient step of the values", "sb3-contrib", gt=0)
    value_learning_rate: float = setting(1e-3, "of the optimizer, which fits the values alone", "sb3-contrib", gt=0)
    gae_lambda: float = setting(0.95, "trace decay of the advantages", "Schulman et al. 2016", ge=0, le=1)

    def batch_fixed_by(self) -> str | None:
        return None if self.timesteps_per_batch is None else "timesteps_per_batch"

    def rows(self, envs: int) -> int:
        return self.timesteps_per_batch or super().rows(envs)


class TRPO(OnPolicyAlgorithm):
    """Natural policy gradients with a step as long as the trust region allows."""

    Config = TRPOConfig
    counters = ("steps", "rollouts", "refused", "rows")
    adam_epsilon = 1e-8
    learning_rate_name = "value_learning_rate"
    config: TRPOConfig

    def __init__(self, config: TRPOConfig, task: Task) -> None:
        if config.timestep_limit is not None and config.timesteps_per_batch is None:
            raise FeverError(
                "timestep_limit goes with timesteps_per_batch; registered environments also take "
                """--env-kwargs '{"max_episode_steps": N}'"""
            )
        super().__init__(config, task)
        # The optimiser fits the weights of the values alone; features of images belong to the policy.
        params = self.flat.unpack(np.asarray(self.params))
        self.policy_flat = FlatParams({name: value for name, value in params.items() if not name.startswith("value")})
        self.value_flat = FlatParams({name: value for name, value in params.items() if name.startswith("value")})
        self.optimizer_state = self.optimizer.init(jnp.asarray(self.value_flat.pack(params)))
        self.rollouts = self.refused = 0  # episodes played, policy steps refused
        self.rows = 0  # in a batch of episodes, so far
        if config.timesteps_per_batch is not None:
            self.fragment_steps = config.steps  # not used: whole episodes are played
        self._jitted_update = jax.jit(self._update)

    def start(self, place: SamplingContext) -> Workers | Rollouts:
        """Samplers of fragments, or players of episodes."""
        task, config, spec = self.task, self.config, self.sampler_spec(place)
        if config.timesteps_per_batch is not None:
            return make_rollouts(spec, task.observation, task.action, config.timestep_limit, task.workers)
        return make_workers(spec, task.observation, task.action, task.workers, place.generation)

    def train(self, pool: Workers | Rollouts) -> Iterator[Iteration]:
        """The training loop: broadcast, collect, learn, for ever."""
        while True:
            stopwatch = Stopwatch()
            with stopwatch("transfer"):
                pool.broadcast(self.weights())
            with stopwatch("sample"):
                parts = self.collect(pool)
            with stopwatch("learn"):
                metrics = self.learn(parts)
            seconds = stopwatch.seconds
            times = {"rollout_seconds": seconds["sample"], "optimization_seconds": seconds["learn"]}
            yield Iteration(list(parts), metrics | times | episode_statistics(parts), seconds)

    def collect(self, pool: Workers | Rollouts) -> list[Fragment]:
        """One batch: a fragment from each worker, or the next whole episodes."""
        if isinstance(pool, Workers):
            return pool.collect(self.fragments)
        assert self.config.timesteps_per_batch is not None
        return pool.collect(self.rollouts, self.config.timesteps_per_batch)

    def learn(self, parts: list[Fragment]) -> dict[str, float]:
        """One iteration's updates from what `collect` returned. Returns metrics."""
        config = self.config
        batch = self._batch(parts)
        self.normalizer.scale_rewards(batch)
        orders = self._orders(batch)
        learning_rate = self.scheduled(config.value_learning_rate, config.learning_rate_schedule)
        params, optimizer_state, metrics = self._jitted_update(
            self.params, self.optimizer_state, batch, self.normalizer.statistics(), orders, learning_rate
        )
        row = dict(zip(METRICS, self.finish(params, optimizer_state, metrics, batch).tolist(), strict=True))
        if row["step_fraction"] == 0:
            self.refused += 1
            logging.warning("no step within the trust region improves the policy, which stays as it was")
        self.rollouts += len(parts) if config.timesteps_per_batch is not None else 0
        return row | {"steps_refused": float(self.refused), "updates": float(len(orders))}

    def _batch(self, parts: list[Fragment]) -> Params:
        """Fragments side by side, or episodes one after the other, filled up to a constant number of rows: shapes stay
        the same from batch to batch, and the update is compiled once."""
        wanted = self.config.timesteps_per_batch
        if wanted is None:
            return join_fragments(parts)
        taken = sum(part.steps for part in parts)
        if taken > self.rows:  # the first batch, or one far larger than all before: compiled again
            self.rows = int(max(wanted * (1 + SPARE), taken * (1 + 2 * SPARE) if self.rows else taken))
        return join_episodes(parts, self.rows)

    def _orders(self, batch: Params) -> np.ndarray:
        """Which rows go into which gradient step of the values: int32 `[epochs * minibatches, M]`."""
        config, rows = self.config, batch["rewards"].size
        stated = config.steps * self.task.total_envs if config.timesteps_per_batch is None else rows
        size = min(config.value_minibatch, stated)
        return shuffled_minibatches(self.rng, rows, size, config.value_epochs, stated // size)

    def _update(
        self, params: Any, optimizer_state: Any, batch: Params, statistics: Params, orders: Any, learning_rate: Any
    ) -> tuple[Any, Any, jax.Array]:
        """The step of the policy, then the fit of the values. Compiled once, as long as shapes stay the same.

        Returns the new weights, the state of the optimiser, and METRICS.
        """
        config, network = self.config, self.network
        weights = {**self.flat.unpack(params), **statistics}
        values = values_of(network, weights, batch)  # [T+1, B]
        advantages = advantages_of(values, batch, config.gamma, config.gae_lambda).reshape(-1)  # [R], as all below
        values = values[:-1].reshape(-1)
        returns = advantages + values
        rows = {name: batch[name].reshape(-1, *batch[name].shape[2:]) for name in ("actions", "log_probs", "valid")}
        rows["observations"] = batch["observations"][:-1].reshape(-1, *batch["observations"].shape[2:])
        rows["valid"] = rows["valid"].astype(jnp.float32)
        rows["advantages"] = (
            normalize_advantages(advantages, rows["valid"]) if config.normalize_advantages else advantages
        )

        policy, step_metrics = self._policy_step(self.policy_flat.pack(weights, jnp), rows, statistics)
        weights |= self.policy_flat.unpack(policy)
        features = jax.lax.stop_gradient(network.features(weights, rows["observations"], jnp))
        value, optimizer_state = self._fit_values(
            self.value_flat.pack(weights, jnp), optimizer_state, features, returns, rows["valid"], orders, learning_rate
        )
        weights |= self.value_flat.unpack(value)
        fitted = network.value(weights, features, jnp)
        weight = rows["valid"] / rows["valid"].sum()
        metrics = step_metrics | {
            "value_loss_before": ((returns - values) ** 2 * weight).sum(),
            "value_loss": ((returns - fitted) ** 2 * weight).sum(),
            "explained_variance": explained_variance(returns, returns - values, rows["valid"]),
            "explained_variance_after": explained_variance(returns, returns - fitted, rows["valid"]),
        }
        return self.flat.pack(weights, jnp), optimizer_state, jnp.stack([metrics[name] for name in METRICS])

    def _policy_step(self, policy: Any, rows: Params, statistics: Params) -> tuple[Any, dict[str, Any]]:
        """Maximise the surrogate E[r A], where r is the probability ratio to the old policy, within the trust region
        E[KL(old, new)] <= max_kl.

        `policy` are the policy's weights `[P]`, `rows` the batch, all `[R, ...]`. Returns new weights and metrics.
        """
        config, distribution, network = self.config, self.distribution, self.network
        weight = rows["valid"] / rows["valid"].sum()

        def outputs_of(policy: Any) -> Any:
            params = {**self.policy_flat.unpack(policy), **statistics}
            return network.policy(params, network.features(params, rows["observations"], jnp), jnp)

        old, push = jax.linearize(outputs_of, policy)  # [R, outputs]; push: a change of weights to one of outputs
        pull = jax.linear_transpose(push, policy)  # and back: the transposed map
        old_log_probs = distribution.log_prob(old, rows["actions"], jnp)

        def surrogate(outputs: Any) -> Any:
            ratio = jnp.exp(distribution.log_prob(outputs, rows["actions"], jnp) - old_log_probs)
            return (ratio * rows["advantages"] * weight).sum()

        def divergence(outputs: Any) -> Any:
            return (distribution.kl(old, outputs, jnp) * weight).sum()

        def entropy(outputs: Any) -> Any:
            return (distribution.entropy(outputs, jnp) * weight).sum()

        def fisher(vector: Any) -> Any:
            """The damped Fisher matrix times a vector: the curvature of the divergence with respect to the weights."""
            curved = jax.jvp(jax.grad(divergence), (old,), (push(vector),))[1]
            return pull(curved)[0] + config.cg_damping * vector

        gradient = pull(jax.grad(surrogate)(old))[0]
        direction, image = conjugate_gradients(fisher, gradient, config.cg_iterations)
        length = jnp.sqrt(2 * config.max_kl / jnp.maximum(direction @ image, 1e-20))
        before, forecast = surrogate(old), length * (gradient @ direction)

        def acceptable(fraction: Any) -> tuple[Any, Any]:
            """Whether this fraction of the step improves the surrogate enough and stays within the trust region, and
            the outputs of the network after it."""
            outputs = outputs_of(policy + fraction * length * direction)
            gain = surrogate(outputs) - before
            good = (gain > 0) & (gain >= config.accept_ratio * fraction * forecast)
            return good & (divergence(outputs) <= config.max_kl), outputs  # false for NaN

        fraction, new = line_search(acceptable, old, config.line_search_steps, config.line_search_shrink)
        policy = jnp.where(fraction > 0, policy + fraction * length * direction, policy)
        log_ratio = old_log_probs - rows["log_probs"]  # of the old policy to the one that sampled: rounding errors
        return policy, {
            "surrogate_before": before,
            "surrogate": surrogate(new),
            "kl_before": ((jnp.exp(log_ratio) - 1 - log_ratio) * weight).sum(),
            "kl": divergence(new),
            "entropy_before": entropy(old),
            "entropy": entropy(new),
            "step_fraction": fraction,
            "gradient_norm": jnp.sqrt(gradient @ gradient),
        }

    def _fit_values(
        self, value: Any, state: Any, features: Any, returns: Any, valid: Any, orders: Any, learning_rate: Any
    ) -> tuple[Any, Any]:
        """Gradient steps on the squared error of the values, by the minibatches `orders`. Returns the values' weights
        and the state of the optimiser."""

        def loss(value: Any, order: Any) -> Any:
            errors = self.network.value(self.value_flat.unpack(value), features[order], jnp) - returns[order]
            return (errors**2 * valid[order]).sum() / jnp.maximum(valid[order].sum(), 1.0)

        def step(carry: Any, order: Any) -> tuple[Any, None]:
            value, state = carry
            return self.optimizer.step(value, state, jax.grad(loss)(value, order), learning_rate), None

        return jax.lax.scan(step, (value, state), orders)[0]


def conjugate_gradients(
    product: Callable[[Any], Any], target: Any, iterations: int, tolerance: float = 1e-10
) -> tuple[Any, Any]:
    """Solve `product(x) = target` for x `[P]`, where `product` is linear, symmetric and positive definite.

    Returns x and `product(x)`, which is `target` when the iterations have converged. Traceable.
    """
    size = target @ target

    def proceed(carry: tuple[Any, ...]) -> Any:
        done, _, _, _, square = carry
        return (done < iterations) & (square > tolerance * size)

    def step(carry: tuple[Any, ...]) -> tuple[Any, ...]:
        done, solution, residual, direction, square = carry
        image = product(direction)
        rate = square / (direction @ image)
        residual = residual - rate * image
        following = residual @ residual
        return done + 1, solution + rate * direction, residual, residual + following / square * direction, following

    start = jnp.asarray(0), jnp.zeros_like(target), target, target, size
    _, solution, residual, _, _ = jax.lax.while_loop(proceed, step, start)
    return solution, target - residual


def line_search(accept: Callable[[Any], tuple[Any, Any]], start: Any, steps: int, shrink: float) -> tuple[Any, Any]:
    """Backtracking line search over the fractions 1, shrink, shrink^2, ..., `steps` of them.

    `accept(fraction)` returns whether a fraction is accepted, and a result. Returns the first fraction that is, and its
    result; 0 and `start` if none is.
    """

    def further(carry: tuple[Any, ...]) -> Any:
        tried, good, _ = carry
        return (tried < steps) & ~good

    def attempt(carry: tuple[Any, ...]) -> tuple[Any, ...]:
        tried, _, _ = carry
        return tried + 1, *accept(shrink**tried)

    tried, good, found = jax.lax.while_loop(further, attempt, (jnp.asarray(0), jnp.asarray(False), start))
    return jnp.where(good, shrink ** (tried - 1.0), 0.0), jnp.where(good, found, start)


def episode_statistics(parts: list[Fragment]) -> dict[str, float]:
    """Number, return and length of the episodes that ended in this batch."""
    episodes = [episode for part in parts for episode in part.episodes]
    row: dict[str, float] = {"batch_episodes": float(len(episodes))}
    if not episodes:
        return row
    returns = np.array([episode.total_reward for episode in episodes])
    lengths = np.array([episode.length for episode in episodes])
    return row | {
        "batch_return_mean": float(returns.mean()),
        "batch_return_sem": float(returns.std() / np.sqrt(len(returns))),
        "batch_return_max": float(returns.max()),
        "batch_length_mean": float(lengths.mean()),
        "batch_length_max": float(lengths.max()),
    }
