"""Trust region policy optimisation (Schulman et al. 2015), one jitted call per iteration.

The loop is `TRPO.train`; the mathematics is `TRPO._update`: the gradient of the surrogate, the natural direction by
conjugate gradients on Fisher-vector products, a line search that keeps to the trust region, and a fit of the values.
A batch is T steps of B environments, or whole episodes (`timesteps_per_batch`), which are the same batch with any
number of workers.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fever.algos.adam import Adam, AdamState
from fever.algos.base import (
    LEARNER_STREAM,
    Iteration,
    Phases,
    Place,
    State,
    Task,
    build_network,
    require_finite,
    sampler_spec,
)
from fever.algos.flat_params import Vectorizer
from fever.algos.normalize import Normalizer
from fever.algos.on_policy import advantages_of, chain, explained_variance, join, values_of
from fever.config import NetworkSettings, setting
from fever.errors import FeverError
from fever.policy import Params, distribution_for
from fever.sampling.rollouts import Rollouts, make_rollouts
from fever.sampling.spec import Fragment
from fever.sampling.workers import Workers, make_workers

METRICS = (
    "surrogate_before", "surrogate", "kl_before", "kl", "entropy_before", "entropy", "value_loss_before", "value_loss",
    "explained_variance", "explained_variance_after", "step_fraction", "gradient_norm",
)  # fmt: skip
SPARE = 0.25  # of a batch of episodes, for what the last one has too much


class TRPOConfig(NetworkSettings):
    """Settings of TRPO."""

    log_std: float = setting(0.0, "initial log standard deviation of continuous actions (in half action ranges)", "SB3")
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
    value_learning_rate: float = setting(1e-3, "of Adam, for the values", "sb3-contrib", gt=0)
    gamma: float = setting(0.99, "discount per step", "Schulman et al. 2015", ge=0, le=1)
    gae_lambda: float = setting(0.95, "trace decay of the advantages", "Schulman et al. 2016", ge=0, le=1)
    normalize_advantages: bool = setting(True, "zero mean and unit deviation within a batch", "Schulman 2015's code")
    normalize_observations: bool = setting(True, "by running mean and deviation (not images)", "Schulman 2015's code")
    normalize_rewards: bool = setting(True, "by the running deviation of returns", "SB3's VecNormalize")


class TRPO:
    """Natural policy gradients with a step as long as the trust region allows."""

    Config = TRPOConfig
    overlaps = False

    def __init__(self, config: TRPOConfig, task: Task) -> None:
        self.config, self.task = config, task
        if config.timestep_limit is not None and config.timesteps_per_batch is None:
            raise FeverError(
                "timestep_limit goes with timesteps_per_batch; registered environments also take "
                """--env-kwargs '{"max_episode_steps": N}'"""
            )
        log_std = config.log_std if task.action["type"] == "box" else None
        self.network = build_network(config, task, log_std=log_std)
        self.distribution = distribution_for(task.action)
        self.rng = np.random.default_rng(np.random.SeedSequence([task.seed, LEARNER_STREAM]))
        params = self.network.init(self.rng)
        # The policy's weights and the values' are learned apart; features of images belong to the policy.
        self.policies = Vectorizer({name: value for name, value in params.items() if not name.startswith("value")})
        self.values = Vectorizer({name: value for name, value in params.items() if name.startswith("value")})
        self.policy, self.value = jnp.asarray(self.policies.pack(params)), jnp.asarray(self.values.pack(params))
        self.optimizer = Adam()
        self.optimizer_state = self.optimizer.init(self.value)
        self.normalizer = Normalizer(self.network, config.normalize_observations, config.normalize_rewards)
        self.steps = self.rollouts = self.refused = 0
        self.rows = 0  # of a batch of episodes, so far
        self._jitted_update = jax.jit(self._update)

    def start(self, place: Place) -> Workers | Rollouts:
        """Samplers of fragments, or players of episodes."""
        task, config = self.task, self.config
        gamma = config.gamma if config.normalize_rewards else None
        spec = sampler_spec(place, self.network, task, config.steps, gamma)
        if config.timesteps_per_batch is not None:
            return make_rollouts(spec, task.observation, task.action, config.timestep_limit, task.workers)
        return make_workers(spec, task.observation, task.action, task.workers, place.generation)

    def train(self, pool: Workers | Rollouts) -> Iterator[Iteration]:
        """The training loop: broadcast, collect, learn, for ever."""
        while True:
            phases = Phases()
            with phases("transfer"):
                pool.broadcast(self.weights())
            with phases("sample"):
                parts = self.collect(pool)
            with phases("learn"):
                metrics = self.learn(parts)
            times = {"rollout_seconds": phases.seconds["sample"], "optimization_seconds": phases.seconds["learn"]}
            yield Iteration(list(parts), metrics | times | episode_statistics(parts), phases.seconds)

    def collect(self, pool: Workers | Rollouts) -> list[Fragment]:
        """One batch: a fragment of each worker, or rollouts of the next numbers."""
        if isinstance(pool, Workers):
            return pool.collect(max(1, self.task.workers))
        assert self.config.timesteps_per_batch is not None
        return pool.collect(self.rollouts, self.config.timesteps_per_batch)

    def weights(self) -> Params:
        """The network's weights, with the observation statistics that it normalises by."""
        return {**self._params(np.asarray(self.policy), np.asarray(self.value)), **self.normalizer.statistics()}

    def _params(self, policy: Any, value: Any) -> Params:
        return {**self.policies.unpack(policy), **self.values.unpack(value)}

    def learn(self, parts: list[Fragment]) -> dict[str, float]:
        """One iteration's updates from what `collect` gave."""
        batch = self._batch(parts)
        self.normalizer.scale_rewards(batch)
        orders = self._orders(batch)
        policy, value, optimizer_state, metrics = self._jitted_update(
            self.policy, self.value, self.optimizer_state, batch, self.normalizer.statistics(), orders
        )
        row = dict(zip(METRICS, require_finite(metrics, "value_learning_rate").tolist(), strict=True))
        if row["step_fraction"] == 0:
            self.refused += 1
            logging.warning("no step within the trust region improves the policy; it stays as it was")
        self.policy, self.value, self.optimizer_state = policy, value, optimizer_state
        self.normalizer.look(batch)
        self.steps += int(batch["valid"].sum())
        self.rollouts += len(parts) if self.config.timesteps_per_batch is not None else 0
        return row | {"steps_refused": float(self.refused), "updates": float(len(orders))}

    def _batch(self, parts: list[Fragment]) -> Params:
        """Fragments side by side, or episodes one after the other in as many rows as ever: the same shapes, no matter
        how long they are."""
        wanted = self.config.timesteps_per_batch
        if wanted is None:
            return join(parts)
        taken = sum(part.steps for part in parts)
        if taken > self.rows:  # the first time, or far more than ever: compiled anew
            self.rows = int(max(wanted * (1 + SPARE), taken * (1 + 2 * SPARE) if self.rows else taken))
        return chain(parts, self.rows)

    def _orders(self, batch: Params) -> np.ndarray:
        """Which rows go into which gradient step of the values: int32 `[epochs * minibatches, M]`."""
        rows, epochs = batch["rewards"].size, self.config.value_epochs
        size = min(self.config.value_minibatch, rows)
        orders = np.tile(np.arange(rows, dtype=np.int32), (epochs, 1))
        return self.rng.permuted(orders, axis=1)[:, : rows // size * size].reshape(-1, size)

    def _update(
        self, policy: Any, value: Any, optimizer_state: AdamState, batch: Params, statistics: Params, orders: Any
    ) -> tuple[Any, Any, AdamState, jax.Array]:
        """The policy's step, then the values' fit. Compiled once, as long as shapes stay the same.

        Returns the new weights of both, the state of the values' optimiser, and METRICS.
        """
        config, distribution, network = self.config, self.distribution, self.network
        values = values_of(network, {**self._params(policy, value), **statistics}, batch)  # [T+1, B]
        advantages = advantages_of(values, batch, config.gamma, config.gae_lambda).reshape(-1)  # [R], as all below
        values = values[:-1].reshape(-1)
        returns = advantages + values
        rows = {name: batch[name].reshape(-1, *batch[name].shape[2:]) for name in ("actions", "log_probs", "valid")}
        observations = batch["observations"][:-1].reshape(-1, *batch["observations"].shape[2:])
        valid = rows["valid"].astype(jnp.float32)
        weight = valid / valid.sum()
        if config.normalize_advantages:
            centred = advantages - (advantages * weight).sum()
            advantages = centred / (jnp.sqrt((centred**2 * weight).sum()) + 1e-8)

        def outputs_of(policy: Any) -> Any:
            params = {**self.policies.unpack(policy), **statistics}
            return network.policy(params, network.features(params, observations, jnp), jnp)

        old, push = jax.linearize(outputs_of, policy)  # [R, outputs]; push: a change of weights to one of outputs
        pull = jax.linear_transpose(push, policy)  # and back: the transposed map
        old_log_probs = distribution.log_prob(old, rows["actions"], jnp)

        def surrogate(outputs: Any) -> Any:
            ratio = jnp.exp(distribution.log_prob(outputs, rows["actions"], jnp) - old_log_probs)
            return (ratio * advantages * weight).sum()

        def divergence(outputs: Any) -> Any:
            return (distribution.kl(old, outputs, jnp) * weight).sum()

        def fisher(vector: Any) -> Any:
            """The damped Fisher matrix times a vector: the curvature of the divergence, seen from the weights."""
            curved = jax.jvp(jax.grad(divergence), (old,), (push(vector),))[1]
            return pull(curved)[0] + config.cg_damping * vector

        gradient = pull(jax.grad(surrogate)(old))[0]
        direction, image = conjugate_gradients(fisher, gradient, config.cg_iterations)
        length = jnp.sqrt(2 * config.max_kl / jnp.maximum(direction @ image, 1e-20))
        before, forecast = surrogate(old), length * (gradient @ direction)

        def quality(fraction: Any) -> tuple[Any, Any]:
            """Whether this fraction of the step improves the surrogate as it should and stays within the region, and
            the outputs that it leads to."""
            outputs = outputs_of(policy + fraction * length * direction)
            gain = surrogate(outputs) - before
            good = (gain > 0) & (gain >= config.accept_ratio * fraction * forecast)
            return good & (divergence(outputs) <= config.max_kl), outputs  # false for NaN

        fraction, new = line_search(quality, old, config.line_search_steps, config.line_search_shrink)
        policy = jnp.where(fraction > 0, policy + fraction * length * direction, policy)
        log_ratio = old_log_probs - rows["log_probs"]  # of this policy to the one that sampled: rounding, no more
        before_kl = ((jnp.exp(log_ratio) - 1 - log_ratio) * weight).sum()

        params = {**self._params(policy, value), **statistics}
        features = jax.lax.stop_gradient(network.features(params, observations, jnp))
        value, optimizer_state = self._fit_values(value, optimizer_state, features, returns, valid, orders)
        fitted = network.value(self.values.unpack(value), features, jnp)
        metrics = [
            before, surrogate(new), before_kl, divergence(new),
            (distribution.entropy(old, jnp) * weight).sum(), (distribution.entropy(new, jnp) * weight).sum(),
            ((returns - values) ** 2 * weight).sum(), ((returns - fitted) ** 2 * weight).sum(),
            explained_variance(returns, returns - values, valid), explained_variance(returns, returns - fitted, valid),
            fraction, jnp.sqrt(gradient @ gradient),
        ]  # fmt: skip
        return policy, value, optimizer_state, jnp.stack(metrics)

    def _fit_values(
        self, value: Any, optimizer_state: AdamState, features: Any, returns: Any, valid: Any, orders: Any
    ) -> tuple[Any, AdamState]:
        """Gradient steps on the squared error of the values, by minibatches."""

        def loss(value: Any, order: Any) -> Any:
            errors = self.network.value(self.values.unpack(value), features[order], jnp) - returns[order]
            return (errors**2 * valid[order]).sum() / jnp.maximum(valid[order].sum(), 1.0)

        def step(carry: Any, order: Any) -> tuple[Any, None]:
            value, state = carry
            direction, state = self.optimizer.update(jax.grad(loss)(value, order), state)
            return (value - self.config.value_learning_rate * direction, state), None

        return jax.lax.scan(step, (value, optimizer_state), orders)[0]

    def state(self) -> State:
        """Optimiser, statistics, counters and the random generator."""
        arrays = {name: np.asarray(array) for name, array in self.optimizer_state.arrays("optimizer").items()}
        counters = {"steps": self.steps, "rollouts": self.rollouts, "refused": self.refused, "rows": self.rows}
        return State(arrays | self.normalizer.arrays(), {**counters, "rng": self.rng.bit_generator.state})

    def restore(self, state: State, weights: Params) -> None:
        """Continue from what `state` and `weights` returned."""
        arrays, facts = state.arrays, state.facts
        self.policy, self.value = jnp.asarray(self.policies.pack(weights)), jnp.asarray(self.values.pack(weights))
        self.optimizer_state = AdamState.from_arrays("optimizer", arrays)
        self.normalizer.restore(arrays)
        self.steps, self.rollouts, self.refused = facts["steps"], facts["rollouts"], facts["refused"]
        self.rows = facts["rows"]
        self.rng.bit_generator.state = facts["rng"]


def conjugate_gradients(
    product: Callable[[Any], Any], goal: Any, iterations: int, tolerance: float = 1e-10
) -> tuple[Any, Any]:
    """Solve `product(x) = goal` for x `[P]`, with `product` linear, symmetric and positive; JAX, traceable.

    Returns x and `product(x)`, which is `goal` once it has converged.
    """
    size = goal @ goal

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

    start = jnp.asarray(0), jnp.zeros_like(goal), goal, goal, size
    _, solution, residual, _, _ = jax.lax.while_loop(proceed, step, start)
    return solution, goal - residual


def line_search(quality: Callable[[Any], tuple[Any, Any]], start: Any, steps: int, shrink: float) -> tuple[Any, Any]:
    """The largest of the fractions 1, shrink, shrink^2, ... for which `quality(fraction)` is true, and what else it
    gave there; 0 and `start` if there is none among the first `steps`."""

    def further(carry: tuple[Any, ...]) -> Any:
        tried, good, _ = carry
        return (tried < steps) & ~good

    def attempt(carry: tuple[Any, ...]) -> tuple[Any, ...]:
        tried, _, _ = carry
        return tried + 1, *quality(shrink**tried)

    tried, good, found = jax.lax.while_loop(further, attempt, (jnp.asarray(0), jnp.asarray(False), start))
    return jnp.where(good, shrink ** (tried - 1.0), 0.0), jnp.where(good, found, start)


def episode_statistics(parts: list[Fragment]) -> dict[str, float]:
    """Of the episodes that ended in this batch; nothing if none did."""
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
