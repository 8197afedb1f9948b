"""What learners on fragments share: weights and their checkpoints, batches, values of observations, advantages."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fever.algos.adam import Adam, AdamState
from fever.algos.base import LEARNER_STREAM, State, Task, build_network, require_finite
from fever.algos.flat_params import Vectorizer
from fever.algos.normalize import Normalizer
from fever.algos.returns import gae
from fever.policy import Network, Params, distribution_for
from fever.sampling.spec import Fragment

IMAGE_CHUNK = 32  # rows of images whose patches stay in a CPU's cache


class GradientLearner:
    """One vector of weights that Adam moves, with statistics of observations and rewards: PPO and IMPALA."""

    counters: tuple[str, ...] = ("steps",)  # that a checkpoint keeps
    steps = 0  # environment steps learned from so far

    def __init__(self, config: Any, task: Task) -> None:
        """`config` has recurrent, recurrent_size, log_std, max_gradient_norm, normalize_observations and _rewards."""
        self.task = task
        self.network = build_network(
            config,
            task,
            log_std=config.log_std if task.action["type"] == "box" else None,
            recurrent=config.recurrent,
            recurrent_size=config.recurrent_size,
        )
        self.distribution = distribution_for(task.action)
        self.rng = np.random.default_rng(np.random.SeedSequence([task.seed, LEARNER_STREAM]))
        params = self.network.init(self.rng)
        self.vectorizer = Vectorizer(params)
        self.params = jnp.asarray(self.vectorizer.pack(params))  # [P]
        self.optimizer = Adam(epsilon=1e-5, max_norm=config.max_gradient_norm)
        self.optimizer_state = self.optimizer.init(self.params)
        self.normalizer = Normalizer(self.network, config.normalize_observations, config.normalize_rewards)

    def weights(self) -> Params:
        """The network's weights, with the observation statistics that it normalises by."""
        return {**self.vectorizer.unpack(np.asarray(self.params)), **self.normalizer.statistics()}

    def finish(self, params: Any, optimizer_state: AdamState, history: Any, batch: Params) -> np.ndarray:
        """Take over what was learned from a batch, unless it is not a number any more; returns the metrics of every
        gradient step `[U, ...]`."""
        history = require_finite(history, "learning_rate")
        self.params, self.optimizer_state = params, optimizer_state
        self.normalizer.look(batch)
        self.steps += int(batch["valid"].sum())
        return history

    def state(self) -> State:
        """Optimiser, statistics, counters and the random generator."""
        arrays = {name: np.asarray(array) for name, array in self.optimizer_state.arrays("optimizer").items()}
        counters = {name: getattr(self, name) for name in self.counters}
        return State(arrays | self.normalizer.arrays(), {**counters, "rng": self.rng.bit_generator.state})

    def restore(self, state: State, weights: Params) -> None:
        """Continue from what `state` and `weights` returned."""
        self.params = jnp.asarray(self.vectorizer.pack(weights))
        self.optimizer_state = AdamState.from_arrays("optimizer", state.arrays)
        self.normalizer.restore(state.arrays)
        for name in self.counters:
            setattr(self, name, state.facts[name])
        self.rng.bit_generator.state = state.facts["rng"]


def join(fragments: list[Fragment]) -> dict[str, np.ndarray]:
    """One batch `[T, B, ...]` out of fragments `[T, N, ...]`, side by side."""
    names = fragments[0].arrays
    if len(fragments) == 1:
        return dict(names)
    axis = {name: 0 if name == "state" else 1 for name in names}
    return {name: np.concatenate([part.arrays[name] for part in fragments], axis[name]) for name in names}


def chain(episodes: list[Fragment], rows: int) -> dict[str, np.ndarray]:
    """One batch `[rows, 1, ...]` out of whole episodes `[L, 1, ...]`, one after the other; what is left over is filled
    with rows that are not valid: the last step again, because a policy may say anything of observations that never
    occur."""
    batch = {}
    taken = sum(len(part.arrays["rewards"]) for part in episodes)
    filling = {
        "valid": False,
        "terminated": True,
        "truncated": False,
        "first": False,
        "rewards": 0,
        "bootstrap": np.nan,
    }
    for name, example in episodes[0].arrays.items():
        if name == "state":
            batch[name] = example
            continue
        longer = len(example) - len(episodes[0].arrays["rewards"])  # 1 where the last observation is in it, too
        parts = [part.arrays[name][: len(part.arrays[name]) - longer] for part in episodes]
        spare = np.repeat(parts[-1][-1:], rows + longer - taken, axis=0)
        if name in filling:
            spare[:] = filling[name]
        batch[name] = np.concatenate([*parts, spare])
    return batch


def unroll(network: Network, params: Params, observations: Any, state: Any, first: Any) -> jax.Array:
    """Features `[T, N, F]` of whole sequences of observations `[T, N, ...]`.

    `state` `[N, S]` is the recurrent state before the first row; where `first` `[T, N]` is true an episode begins, and
    the state is reset to zeros.
    """
    time, count = observations.shape[:2]
    features = network.features(params, observations.reshape(time * count, *observations.shape[2:]), jnp)
    features = features.reshape(time, count, -1)
    if network.recurrent == "none":
        return features

    def step(state: Any, row: Any) -> Any:
        features, first = row
        features, state = network.step(params, features, jnp.where(first[:, None], 0.0, state), jnp)
        return state, features

    return jax.lax.scan(step, state, (features, first))[1]


def values_of(network: Network, weights: Params, batch: Params) -> jax.Array:
    """Values `[T+1, B]` of every observation in a batch."""
    observations = batch["observations"]
    if network.convolutions and network.recurrent == "none":
        flat = observations.reshape(-1, *observations.shape[2:])
        features = jax.lax.map(lambda row: network.features(weights, row[None], jnp)[0], flat, batch_size=IMAGE_CHUNK)
        features = features.reshape(*observations.shape[:2], -1)
    else:
        features = unroll(network, weights, observations, batch["state"], batch["first"])
    return network.value(weights, features, jnp)


def following_values(values: jax.Array, batch: Params) -> jax.Array:
    """Values `[T, B]` of the states that steps led to, out of those `[T+1, B]` of all observations: where the next row
    begins another episode already, the sampler's own."""
    return jnp.where(jnp.isnan(batch["bootstrap"]), values[1:], batch["bootstrap"])


def advantages_of(values: jax.Array, batch: Params, gamma: float, lam: float) -> jax.Array:
    """Generalised advantages `[T, B]` of a batch whose observations have these values `[T+1, B]`."""
    ends = batch["terminated"], batch["truncated"]
    return gae(batch["rewards"], values[:-1], following_values(values, batch), *ends, gamma, lam)


def explained_variance(returns: Any, errors: Any, valid: Any) -> jax.Array:
    """The share of the returns' variance that the values foresaw; `errors` are returns minus values, all one shape."""
    weight = valid / jnp.maximum(valid.sum(), 1)
    pair = jnp.stack([returns, errors])
    axes = tuple(range(1, pair.ndim))
    centred = pair - (pair * weight).sum(axes, keepdims=True)
    spread, unexplained = (centred**2 * weight).sum(axes)
    return 1 - unexplained / (spread + 1e-8)
