"""The loop that every algorithm on replay shares: publish weights, draw transitions, learn, send priorities back."""

from __future__ import annotations

from collections.abc import Iterator
from time import perf_counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fever.algos.base import LEARNER_STREAM, Iteration, Phases, Place, State, Task, require_finite, sampler_spec
from fever.algos.flat_params import Vectorizer
from fever.policy import Network, Params, distribution_for
from fever.policy.spaces import encoded_shape
from fever.replay.buffer import Batch, ReplaySpec
from fever.replay.experience import Experience, ExperienceSpec, ReplaySettings, make_experience
from fever.replay.explorer import Exploration

ROW_SECONDS = 2.0  # after which an iteration ends at the latest, where workers make it depend on time anyway
METRICS = ("loss", "value_mean", "td_error", "gradient_norm")  # the first columns of what `update` returns


class ReplayAlgorithm:
    """What DQN, Ape-X and SAC have in common. A subclass has the mathematics: `update`, `learned`."""

    network: Network
    acting: str  # the entry of `learned` that holds the weights of the policy that acts, as one vector
    vectorizer: Vectorizer  # of these weights
    overlaps = True
    greedy = True  # explore around the best action, not by sampling from the policy
    prioritized = False
    n_step = 1
    metric_names: tuple[str, ...] = METRICS

    def __init__(self, config: ReplaySettings, task: Task) -> None:
        self.config, self.task = config, task
        self.rng = np.random.default_rng(np.random.SeedSequence([task.seed, LEARNER_STREAM]))
        self.explorers = task.envs * max(1, task.workers)
        self.steps = self.updates = 0
        self.learned: dict[str, Any] = {}  # arrays that learning changes: weights, targets, optimisers

    # what a subclass defines

    def update(self, learned: dict[str, Any], batches: Params, facts: Params) -> tuple[dict[str, Any], Any, Any]:
        """`updates` gradient steps, compiled once: batches are `[U, B, ...]`. Returns what was learned, TD errors
        `[U, B]`, and `metric_names` of each gradient step `[U, ...]`."""
        raise NotImplementedError

    def epsilons(self) -> np.ndarray:
        """Probability of a random action for each explorer."""
        raise NotImplementedError

    def facts(self, batch: Batch) -> dict[str, Any]:
        """More arguments for `update`: counters, rates, noise; drawn for this batch."""
        raise NotImplementedError

    # the loop

    def start(self, place: Place) -> Experience:
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
            exploration=Exploration(self.n_step, config.gamma, self.explorers, self.greedy, clip, self.prioritized),
            replay=ReplaySpec(
                capacity=-(-config.buffer // shards),
                frame_shape=shape if task.stack == 1 else shape[:-1],
                frame_dtype=str(dtype),
                stack=task.stack,
                action_shape=distribution.action_shape,
                action_dtype=str(np.dtype(distribution.action_dtype)),
                prioritized=self.prioritized,
                alpha=getattr(config, "priority_exponent", 0.0),
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
        """The training loop. Exploring goes on while a draw is learned from: in workers, or else in `draw`."""
        published, learning = -self.publish_every, None
        while True:
            phases, began, reports, history = Phases(), perf_counter(), [], []
            added, goal = experience.added, self.steps + self.config.report_steps
            if self.task.total_steps is not None:
                goal = max(self.steps + 1, min(goal, self.task.total_steps))
            while self.steps < goal and not (self.task.workers and perf_counter() - began > ROW_SECONDS):
                with phases("transfer"):
                    if self.updates >= published + self.publish_every:
                        experience.publish(self.weights(), self.updates, self.epsilons())
                        published = self.updates
                with phases("wait" if self.task.workers else "sample"):
                    draw = experience.draw()
                with phases("learn"):
                    if learning is not None:
                        errors, metrics = self.finish(*learning[1])
                        history.append(metrics)
                with phases("transfer"):
                    if learning is not None and self.prioritized:
                        experience.update(learning[0], errors)
                with phases("learn"):
                    learning = None if draw is None else (draw, self.learn(draw.batch))
                fresh = experience.take_reports()
                reports += fresh
                self.steps += sum(report.steps for report in fresh)
            seconds = perf_counter() - began
            metrics = self._metrics(experience, reports, history, experience.added - added, seconds)
            yield Iteration(reports, metrics, phases.seconds)

    @property
    def publish_every(self) -> int:
        """Gradient steps between two publications; in this process they cost nothing."""
        return self.config.publish_updates if self.task.workers else 0

    def learn(self, batch: Batch) -> tuple[dict[str, Any], Any, Any]:
        """Begin the gradient steps of one draw; JAX computes them while other things go on."""
        config, names = self.config, ("observations", "next_observations", "actions", "rewards", "discounts")
        rows = {name: getattr(batch, name) for name in names}
        rows = {name: rows[name].reshape(config.updates, config.batch, *rows[name].shape[1:]) for name in rows}
        return self._update(self.learned, rows, self.facts(batch))

    def finish(self, learned: dict[str, Any], errors: Any, metrics: Any) -> tuple[np.ndarray, np.ndarray]:
        """Take over what was learned: TD errors of the draw's transitions, metrics of each gradient step `[U, ...]`."""
        metrics = require_finite(metrics, "learning_rate")
        self.learned = learned
        self.updates += self.config.updates
        return np.asarray(errors).reshape(-1), metrics

    def _metrics(self, experience: Experience, reports: Any, history: Any, added: int, seconds: float) -> Any:
        """One row: how learning goes, and what goes into the buffer and out of it."""
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

    # checkpoints; the buffer is saved by the experience

    def weights(self) -> Params:
        """What a policy needs to act, as NumPy arrays."""
        return self.vectorizer.unpack(np.asarray(self.learned[self.acting]))

    def state(self) -> State:
        """All that learning changes, except for the weights of the policy that acts; counters and random generator."""
        kept = {name: array for name, array in self.learned.items() if name != self.acting}
        arrays = {f"learned/{name}": np.asarray(array) for name, array in kept.items()}
        return State(arrays, {"steps": self.steps, "updates": self.updates, "rng": self.rng.bit_generator.state})

    def restore(self, state: State, weights: Params) -> None:
        """Continue from what `state` and `weights` returned."""
        arrays = {f"learned/{self.acting}": self.vectorizer.pack(weights), **state.arrays}
        self.learned = {name: jnp.asarray(arrays[f"learned/{name}"]) for name in self.learned}
        self.steps, self.updates = state.facts["steps"], state.facts["updates"]
        self.rng.bit_generator.state = state.facts["rng"]
