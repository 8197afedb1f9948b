"""What all algorithms that learn from replay share: settings, checkpoints, and the loop.

The loop publishes weights, samples transitions, and learns.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from time import perf_counter
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
    fitting,
    require_finite,
    sampler_spec,
)
from fever.algos.flat_params import FlatParams
from fever.algos.optimizer import (
    Optimizer,
    OptimizerSettings,
    from_named_arrays,
    named_arrays,
    require_end,
    scheduled,
)
from fever.config import setting
from fever.errors import FeverError
from fever.files import as_count
from fever.policy import Network, Params, distribution_for
from fever.policy.spaces import encoded_shape
from fever.replay.buffer import Batch, ReplaySpec
from fever.replay.experience import Experience, ExperienceSpec
from fever.replay.explorer import Exploration
from fever.replay.hindsight import Strategy, check_goals
from fever.replay.make import make_experience

ROW_SECONDS = 2.0  # longest iteration with workers, whose results depend on timing in any case
METRICS = ("loss", "value_mean", "td_error", "gradient_norm")  # the first columns of what `update` returns


class OffPolicySettings(OptimizerSettings):
    """Settings of every algorithm that learns from a replay buffer."""

    default_widths: ClassVar[tuple[int, ...]] = (256, 256)
    hidden: tuple[int, ...] | None = setting(
        None, "widths of each head's hidden layers; null: 256,256, none behind convolutions", "Haarnoja et al. 2018"
    )
    activation: Literal["tanh", "relu"] = setting("relu", "of the heads' hidden layers", "SB3")
    learning_rate: float = setting(1e-3, "of the optimizer", "rl-zoo, SAC Pendulum-v1", gt=0)
    gamma: float = setting(0.99, "discount per step", "Mnih et al. 2015", ge=0, le=1)
    batch: int = setting(64, "transitions in a gradient step", "rl-zoo, DQN CartPole-v1", gt=0)
    replay_ratio: float = setting(
        32.0, "transitions learned from for each one added, once the warm-up is over", "rl-zoo, DQN CartPole-v1", gt=0
    )
    updates: int = setting(
        8,
        "gradient steps in one compiled call, on transitions sampled together: more are faster, fewer are fresher",
        gt=0,
    )
    warmup: int = setting(1000, "transitions before learning begins", "rl-zoo, DQN CartPole-v1", ge=0)
    buffer: int = setting(100_000, "transitions in the buffer, all shards together", "rl-zoo, DQN CartPole-v1", gt=0)
    replay_shards: int = setting(
        1, "processes that share the buffer, with --workers; at most one for each worker", gt=0
    )
    save_replay: bool = setting(True, "save the buffer in the run directory, for resuming; its size is logged")
    explore_steps: int = setting(
        50, "steps of each environment between two fetches of weights, with --workers", "Horgan et al. 2018, B", gt=0
    )
    publish_updates: int = setting(
        16, "least number of gradient steps between two broadcasts of weights to the workers", gt=0
    )
    report_steps: int = setting(
        1000, "least number of environment steps in an iteration, which is one row of metrics", gt=0
    )
    clip_rewards: bool | None = setting(
        None, "learn from the sign of rewards (returns stay as they are); null: for ALE/ environments",
        "Mnih et al. 2015",
    )  # fmt: skip
    her: int = setting(
        0, "hindsight: copies of every transition with a goal that its episode reached; 0: none",
        "Andrychowicz et al. 2017: 4, with it", ge=0, strict=True,
    )  # fmt: skip
    her_strategy: Strategy = setting(
        "future", "goals of the copies: reached later in the episode (future) or at its end (final)",
        "Andrychowicz et al. 2017",
    )  # fmt: skip

    def rows(self, envs: int) -> int:
        return self.batch


class OffPolicyAlgorithm(ABC):
    """The loop and the checkpoints of algorithms that learn from a replay buffer.

    A subclass has a `Config`, the mathematics in `update`, and a constructor that sets `network`, `flat` and `learned`.
    """

    Config: Any  # a subclass of OffPolicySettings
    acting: ClassVar[str] = "actor"  # the entry of `learned` with the weights of the policy that acts, one vector
    network: Network  # of the policy that acts
    flat: FlatParams  # names and shapes of its weights
    fresh: tuple[str, ...] = ("optimizer", "optimizers")  # entries of `learned` that no other run's replace
    overlaps = True
    greedy = True  # explore around the best action, not by sampling from the policy
    prioritized = False
    noise = 0.0  # deviation of the noise that explorers add to continuous actions, whose bounds are -1 and 1
    n_step = 1  # rewards summed up before bootstrapping
    metric_names: tuple[str, ...] = METRICS  # of a gradient step; these first

    def __init__(self, config: OffPolicySettings, task: Task, max_gradient_norm: float | None = None) -> None:
        require_end(task, config.learning_rate_schedule)
        if config.her:
            check_goals(task.name, task.observation)
            if (n_step := getattr(config, "n_step", 1)) != 1:
                raise FeverError(f"her needs n_step=1, not {n_step}: a copy's goal changes the reward of every step")
        self.config, self.task = config, task
        self.optimizer = Optimizer(config, max_gradient_norm)
        self.rng = np.random.default_rng(np.random.SeedSequence([task.seed, LEARNER_STREAM]))
        self.explorers = task.envs * max(1, task.workers)
        self.steps = self.updates = 0
        self.learned: dict[str, Any] = {}  # what learning changes: weights, target networks, states of optimisers

    # what a subclass defines

    @abstractmethod
    def update(
        self, learned: dict[str, Any], batches: Params, inputs: Params, learning_rate: Any
    ) -> tuple[dict[str, Any], Any, Any]:
        """U = `config.updates` gradient steps, compiled once. `batches` are `[U, B, ...]`, `inputs` as from `inputs()`.

        Returns the new `learned`, TD errors `[U, B]`, and `metric_names` of each gradient step `[U, ...]`.
        """

    def epsilons(self) -> np.ndarray:
        """Probability of a random action for each explorer `[explorers]`: 1 during the warm-up, then 0."""
        return np.full(self.explorers, 1.0 if self.steps < self.config.warmup else 0.0)

    def inputs(self, batch: Batch) -> dict[str, Any]:
        """What `update` needs besides the transitions: counters, importance weights, noise."""
        return {}

    # the loop

    def start(self, place: SamplingContext) -> Experience:
        """Explorers and a replay buffer."""
        config, task = self.config, self.task
        draw, shards = config.updates * config.batch, max(1, min(config.replay_shards, task.workers))
        shape, dtype = encoded_shape(task.observation)
        distribution = distribution_for(task.action, self.network.squashed)
        clip = config.clip_rewards if config.clip_rewards is not None else task.name.startswith("ALE/")
        spec = ExperienceSpec(
            sampler=sampler_spec(place, self.network, task, config.explore_steps),
            observation=task.observation,
            action=task.action,
            exploration=Exploration(
                n_step=self.n_step,
                gamma=config.gamma,
                explorers=self.explorers,
                greedy=self.greedy,
                clip_rewards=clip,
                prioritized=self.prioritized,
                noise=self.noise,
                her=config.her,
                her_strategy=config.her_strategy,
            ),
            replay=ReplaySpec(
                capacity=-(-config.buffer // shards),
                frame_shape=shape if task.stack == 1 else shape[:-1],
                frame_dtype=str(dtype),
                stack=task.stack,
                action_shape=distribution.action_shape,
                action_dtype=str(np.dtype(distribution.action_dtype)),
                prioritized=self.prioritized,
                alpha=getattr(config, "priority_exponent", 0.0),
                her=config.her,
            ),
            shards=shards,
            keep=config.save_replay,
            draw=draw,
            ratio=config.replay_ratio,
            warmup=config.warmup,
        )
        self._update = jax.jit(self.update)
        return make_experience(spec, task.workers, place.generation)

    def train(self, experience: Experience) -> Iterator[Iteration]:
        """The training loop. Exploring goes on while JAX learns from a draw: in workers, or else within `draw`."""
        published, learning = -self.publish_every, None
        while True:
            stopwatch, began, reports, history = Stopwatch(), perf_counter(), [], []
            added, end = experience.added, self.steps + self.config.report_steps
            if self.task.total_steps is not None:
                end = max(self.steps + 1, min(end, self.task.total_steps))
            while self.steps < end and not (self.task.workers and perf_counter() - began > ROW_SECONDS):
                with stopwatch("transfer"):
                    if self.updates >= published + self.publish_every:
                        experience.publish(self.weights(), self.updates, self.epsilons())
                        published = self.updates
                with stopwatch("wait" if self.task.workers else "sample"):
                    draw = experience.draw()
                with stopwatch("learn"):
                    if learning is not None:
                        errors, metrics = self.finish(*learning[1])
                        history.append(metrics)
                with stopwatch("transfer"):
                    if learning is not None and self.prioritized:
                        experience.update(learning[0], errors)
                with stopwatch("learn"):
                    learning = None if draw is None else (draw, self.learn(draw.batch))
                fresh = experience.take_reports()
                reports += fresh
                self.steps += sum(report.steps for report in fresh)
            seconds = perf_counter() - began
            metrics = self._metrics(experience, reports, history, experience.added - added, seconds)
            yield Iteration(reports, metrics, stopwatch.seconds)

    @property
    def publish_every(self) -> int:
        """Gradient steps between two publications of weights; without workers, weights are published for every draw."""
        return self.config.publish_updates if self.task.workers else 0

    def learn(self, batch: Batch) -> tuple[dict[str, Any], Any, Any]:
        """Start the gradient steps of one draw, which JAX computes asynchronously; returns what `update` returns."""
        config, names = self.config, ("observations", "next_observations", "actions", "rewards", "discounts")
        rows = {name: getattr(batch, name) for name in names}
        rows = {name: rows[name].reshape(config.updates, config.batch, *rows[name].shape[1:]) for name in rows}
        learning_rate = scheduled(config.learning_rate, config.learning_rate_schedule, self.task.progress(self.steps))
        return self._update(self.learned, rows, self.inputs(batch), learning_rate)

    def finish(self, learned: dict[str, Any], errors: Any, metrics: Any) -> tuple[np.ndarray, np.ndarray]:
        """Wait for the gradient steps that `learn` started and keep their results.

        Returns the TD errors of the draw's transitions `[U * B]` and the metrics of each gradient step `[U, ...]`.
        """
        metrics = require_finite(metrics, "learning_rate")
        self.learned = learned
        self.updates += self.config.updates
        return np.asarray(errors).reshape(-1), metrics

    def _metrics(self, experience: Experience, reports: Any, history: Any, added: int, seconds: float) -> Any:
        """One row of metrics: losses, rates, and what is in the buffer."""
        config, epsilons = self.config, experience.epsilons.reshape(-1, self.task.envs).mean(1)
        updates = sum(len(metrics) for metrics in history)
        row: dict[str, Any] = {}
        if history:
            row |= dict(zip(self.metric_names, np.concatenate(history).mean(0).tolist(), strict=True))
        return row | {
            "updates": updates,
            "updates_per_second": round(updates / seconds, 1),
            "transitions_per_second": round(added / seconds, 1),
            "samples_per_second": round(updates * config.batch / seconds, 1),
            "replay_ratio": round(experience.drawn / max(1, experience.added - config.warmup), 3),
            **experience.measure(),
            "weights_age": float(np.mean([self.updates - report.version for report in reports])) if reports else 0.0,
            "epsilon": float(epsilons.mean()),
            "epsilons": [round(float(epsilon), 5) for epsilon in epsilons],
        }

    # for `update`

    def step(self, learned: dict[str, Any], name: str, gradient: Any, learning_rate: Any) -> dict[str, Any]:
        """`learned` after one step of the optimiser for its vector of this name. Traceable.

        The optimiser's state is `learned["optimizers"][name]`.
        """
        optimizers = learned["optimizers"]
        vector, state = self.optimizer.step(learned[name], optimizers[name], gradient, learning_rate)
        return {**learned, name: vector, "optimizers": {**optimizers, name: state}}

    # checkpoints; `Experience` saves the buffer

    def weights(self) -> Params:
        """The arrays that a policy needs to act, NumPy."""
        return self.flat.unpack(np.asarray(self.learned[self.acting]))

    def state(self) -> State:
        """What learning changes, except for the weights of the policy that acts; counters and random generator."""
        return State(
            named_arrays("learned", self._rest()),
            {"steps": self.steps, "updates": self.updates, "rng": self.rng.bit_generator.state},
        )

    def restore(self, state: State, weights: Params) -> None:
        """Continue from what `state` and `weights` returned."""
        rest = from_named_arrays("learned", self._rest(), state.arrays)
        self.learned = {**rest, self.acting: jnp.asarray(self.flat.pack(weights))}
        self.steps, self.updates = as_count(state.facts["steps"]), as_count(state.facts["updates"])
        self.rng.bit_generator.state = state.facts["rng"]

    def take_weights(self, weights: Params, arrays: dict[str, np.ndarray]) -> tuple[list[str], list[str]]:
        """Begin with another run's weights, as `TakesWeights` says: those of the policy that acts, and the entries of
        `learned` that are not in `fresh`. A target network that nothing fits stays a copy, as it was at the start."""
        own = self.flat.unpack(np.asarray(self.learned[self.acting]))
        taken = fitting(own, weights)
        learned = {self.acting: jnp.asarray(self.flat.pack({**own, **taken}))}
        names, left = [*taken], [name for name in own if name not in taken]
        for entry, value in self._rest().items():
            drawn = named_arrays("learned", {entry: value})
            same = [other for other in learned if self.learned[other] is value]
            if entry in self.fresh:
                learned[entry] = value
            elif len(fitting(drawn, arrays)) == len(drawn):
                learned[entry] = from_named_arrays("learned", {entry: value}, arrays)[entry]
                names.append(entry)
            else:
                learned[entry] = learned[same[0]] if same else value
                left += [] if same else [entry]
        self.learned = {name: learned[name] for name in self.learned}
        return names, left

    def _rest(self) -> dict[str, Any]:
        """All of `learned` but the weights of the policy that acts."""
        return {name: value for name, value in self.learned.items() if name != self.acting}
