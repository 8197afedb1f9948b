"""What PPO, TRPO and IMPALA share: settings, weights and checkpoints, batches of fragments, values and advantages."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
import numpy as np

from fever.algos.base import (
    LEARNER_STREAM,
    Iteration,
    SamplingContext,
    State,
    Stopwatch,
    Task,
    build_network,
    fitting,
    require_finite,
    sampler_spec,
)
from fever.algos.batch import fragment_steps, note_of
from fever.algos.flat_params import FlatParams
from fever.algos.normalize import Normalizer
from fever.algos.optimizer import (
    Optimizer,
    OptimizerSettings,
    Schedule,
    from_named_arrays,
    named_arrays,
    require_end,
    scheduled,
)
from fever.algos.returns import gae
from fever.config import setting
from fever.files import as_count
from fever.policy import Network, Params, distribution_for
from fever.sampling.spec import Fragment, SamplerSpec
from fever.sampling.workers import make_workers

IMAGE_CHUNK = 32  # rows of images whose patches stay in a CPU's cache


class OnPolicySettings(OptimizerSettings):
    """Settings of every on-policy algorithm."""

    log_std: float = setting(0.0, "initial log standard deviation of continuous actions (in half action ranges)", "SB3")
    steps: int = setting(128, "steps of each environment in a batch (T)", "Schulman et al. 2017, table 5", gt=0)
    gamma: float = setting(0.99, "discount per step", "Schulman et al. 2017, table 3", ge=0, le=1)
    normalize_advantages: bool = setting(True, "zero mean and unit deviation within a minibatch or batch", "SB3")
    normalize_observations: bool = setting(True, "by running mean and deviation (not images)", "SB3's VecNormalize")
    normalize_rewards: bool = setting(True, "by the running deviation of returns", "SB3's VecNormalize")

    def rows(self, envs: int) -> int:
        return self.steps * envs

    def batch_fixed_by(self) -> str | None:
        """The setting that gives batches a size of their own, whatever the environments; None if there is none."""
        return None


class ActorCriticSettings(OnPolicySettings):
    """Settings of algorithms that take gradient steps on one loss of policy, values and entropy: PPO and IMPALA."""

    recurrent: Literal["none", "lstm", "gru"] = setting("none", "recurrent layer between the observation and the heads")
    recurrent_size: int = setting(128, "units of the LSTM or GRU", gt=0)
    learning_rate: float = setting(3e-4, "of the optimizer", "Schulman et al. 2017, table 3", gt=0)
    max_gradient_norm: float = setting(0.5, "gradients are scaled down to this norm", "SB3", gt=0)
    value_coefficient: float = setting(0.5, "weight of the value loss", "SB3", ge=0)
    entropy_coefficient: float = setting(0.0, "weight of the entropy bonus", "SB3", ge=0)

    def widest(self, image: bool) -> int:
        return max(super().widest(image), self.recurrent_size if self.recurrent != "none" else 0)

    def total_loss(self, policy_loss: Any, value_loss: Any, entropy: Any) -> Any:
        """policy_loss + value_coefficient value_loss - entropy_coefficient entropy"""
        return policy_loss + self.value_coefficient * value_loss - self.entropy_coefficient * entropy


class OnPolicyAlgorithm(ABC):
    """A network whose weights are one vector, its optimiser, and running statistics of observations and returns.

    A subclass has a `Config` and the mathematics in `learn`. The loop takes one fragment of every worker; one that
    samples in another way has its own `start` and `train`.
    """

    Config: Any  # a subclass of OnPolicySettings
    overlaps = False  # whether workers sample while it learns
    counters: ClassVar[tuple[str, ...]] = ("steps",)  # attributes that a checkpoint keeps
    adam_epsilon: ClassVar[float] = 1e-5  # SB3
    learning_rate_name: ClassVar[str] = "learning_rate"  # the setting that an error message names
    steps = 0  # environment steps learned from so far

    def __init__(
        self, config: OnPolicySettings, task: Task, max_gradient_norm: float | None = None, **network: Any
    ) -> None:
        """`network` has more fields of the network, for example `recurrent`."""
        require_end(task, config.learning_rate_schedule)
        self.config, self.task = config, task
        self.fragments = max(1, task.workers)  # in a batch (K)
        self.fragment_steps = fragment_steps(config.steps, task.total_envs, task.workers)
        log_std = config.log_std if task.action["type"] == "box" else None
        self.network = build_network(config, task, log_std=log_std, **network)
        self.distribution = distribution_for(task.action)
        self.rng = np.random.default_rng(np.random.SeedSequence([task.seed, LEARNER_STREAM]))
        params = self.network.init(self.rng)
        self.flat = FlatParams(params)
        self.params = jnp.asarray(self.flat.pack(params))  # [P]
        self.optimizer = Optimizer(config, max_gradient_norm, self.adam_epsilon)
        self.optimizer_state = self.optimizer.init(self.params)
        self.normalizer = Normalizer(self.network, config.normalize_observations, config.normalize_rewards)

    @abstractmethod
    def learn(self, fragments: list[Fragment]) -> dict[str, float]:
        """The updates of one iteration from `self.fragments` fragments; ends with `finish`. Returns metrics."""

    def start(self, place: SamplingContext) -> Any:
        """Samplers of fragments."""
        task = self.task
        return make_workers(self.sampler_spec(place), task.observation, task.action, task.workers, place.generation)

    def train(self, pool: Any) -> Iterator[Iteration]:
        """The training loop: broadcast, collect, learn, for ever."""
        while True:
            stopwatch = Stopwatch()
            with stopwatch("transfer"):
                pool.broadcast(self.weights())
            with stopwatch("sample"):
                fragments = pool.collect(self.fragments)
            with stopwatch("learn"):
                metrics = self.learn(fragments)
            yield Iteration(list(fragments), metrics, stopwatch.seconds)

    def sampler_spec(self, place: SamplingContext) -> SamplerSpec:
        """How workers sample fragments of `fragment_steps` steps."""
        config = self.config
        gamma = config.gamma if config.normalize_rewards else None
        return sampler_spec(place, self.network, self.task, self.fragment_steps, gamma)

    def batch_note(self) -> str | None:
        """What the user should know before the training, of batches from so many workers."""
        return note_of(self.config.steps, self.fragment_steps, self.task.workers)

    def scheduled(self, value: float, schedule: Schedule) -> float:
        """The value of a setting at this point of the run."""
        return scheduled(value, schedule, self.task.progress(self.steps))

    def weights(self) -> Params:
        """The network's weights, and the mean and deviation by which it normalises observations."""
        return {**self.flat.unpack(np.asarray(self.params)), **self.normalizer.statistics()}

    def finish(self, params: Any, optimizer_state: Any, metrics: Any, batch: Params) -> np.ndarray:
        """Keep the results of an update, and add the batch to the running statistics. Returns the metrics as NumPy
        array; raises TrainingError, and keeps nothing, if one of them is not finite."""
        metrics = require_finite(metrics, self.learning_rate_name)
        self.params, self.optimizer_state = params, optimizer_state
        self.normalizer.add(batch)
        self.steps += int(batch["valid"].sum())
        return metrics

    def state(self) -> State:
        """Optimiser, running statistics, counters and random generator."""
        arrays = named_arrays("optimizer", self.optimizer_state) | self.normalizer.arrays()
        counters = {name: getattr(self, name) for name in self.counters}
        return State(arrays, {**counters, "rng": self.rng.bit_generator.state})

    def restore(self, state: State, weights: Params) -> None:
        """Continue from what `state` and `weights` returned."""
        self.optimizer_state = from_named_arrays("optimizer", self.optimizer_state, state.arrays)
        self.params = jnp.asarray(self.flat.pack(weights))
        self.normalizer.restore(state.arrays)
        for name in self.counters:
            setattr(self, name, as_count(state.facts[name]))
        self.rng.bit_generator.state = state.facts["rng"]

    def take_weights(self, weights: Params, arrays: dict[str, np.ndarray]) -> tuple[list[str], list[str]]:
        """Begin with another run's weights, as `TakesWeights` says, and with its running statistics: of observations,
        which the policy needs, and of returns, whose deviation is the unit of the values."""
        own = self.flat.unpack(np.asarray(self.params))
        taken = fitting(own, weights)
        self.params = jnp.asarray(self.flat.pack({**own, **taken}))
        if "returns/count" in arrays:
            self.normalizer.restore(arrays)
        return [*taken], [name for name in own if name not in taken]


def shuffled_minibatches(
    rng: np.random.Generator, rows: int, size: int, epochs: int, count: int | None = None
) -> np.ndarray:
    """Which rows go into which gradient step: int32 `[epochs * count, size]`, shuffled anew for every epoch.

    `count` minibatches are taken in an epoch, by default all that are whole. The rows beyond are left out of it.
    """
    orders = rng.permuted(np.tile(np.arange(rows, dtype=np.int32), (epochs, 1)), axis=1)
    count = rows // size if count is None else count
    return orders[:, : count * size].reshape(-1, size)


def join_fragments(fragments: list[Fragment]) -> dict[str, np.ndarray]:
    """One batch `[T, B, ...]` of fragments `[T, N, ...]`, side by side."""
    names = fragments[0].arrays
    if len(fragments) == 1:
        return dict(names)
    axis = {name: 0 if name == "state" else 1 for name in names}
    return {name: np.concatenate([part.arrays[name] for part in fragments], axis[name]) for name in names}


def join_episodes(episodes: list[Fragment], rows: int) -> dict[str, np.ndarray]:
    """One batch `[rows, 1, ...]` of whole episodes `[L, 1, ...]`, one after the other.

    Rows that are left over repeat the last step and are not valid: they are observations that do occur, for which the
    network's outputs are finite.
    """
    batch = {}
    taken = sum(len(part.arrays["rewards"]) for part in episodes)
    filling = {
        "valid": False, "terminated": True, "truncated": False, "first": False, "rewards": 0, "bootstrap": np.nan,
    }  # fmt: skip
    for name, example in episodes[0].arrays.items():
        if name == "state":
            batch[name] = example
            continue
        longer = len(example) - len(episodes[0].arrays["rewards"])  # 1 for arrays [L+1, ...], with the last observation
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
    """Values `[T, B]` of the states that the steps led to, from the values `[T+1, B]` of all observations.

    Where the next row already belongs to the next episode, it is the value that the sampler computed (`bootstrap`).
    """
    return jnp.where(jnp.isnan(batch["bootstrap"]), values[1:], batch["bootstrap"])


def advantages_of(values: jax.Array, batch: Params, gamma: float, lam: float) -> jax.Array:
    """Generalised advantages `[T, B]` of a batch whose observations have these values `[T+1, B]`."""
    ends = batch["terminated"], batch["truncated"]
    return gae(batch["rewards"], values[:-1], following_values(values, batch), *ends, gamma, lam)
