"""Plays whole episodes, each with a seed of its own. NumPy only: no JAX, no Ray."""

from __future__ import annotations

import itertools
import sys
from dataclasses import replace
from time import perf_counter

import numpy as np

from fever.envs.make import make_one
from fever.policy import Params
from fever.policy.spaces import Description
from fever.sampling.runner import EnvRunner, Trajectory, check_spaces, scalars
from fever.sampling.sampler import discount
from fever.sampling.spec import Episode, Fragment, SamplerSpec

ROLLOUT_STREAM = 2**32 - 3  # random stream of rollouts, in the place of a worker's index
NOISE = 256  # steps for which random numbers are drawn at once


class EpisodeRunner(EnvRunner):
    """Plays whole episodes in one environment with a feed-forward policy."""

    def __init__(self, spec: SamplerSpec, observation: Description, action: Description, limit: int | None) -> None:
        """Episodes are truncated after `limit` steps; `spec.envs` and `spec.steps` are not used."""
        super().__init__(spec, make_one(spec.source, spec.context), action)
        self.limit = limit or sys.maxsize
        self.spaces: tuple[Description, Description] | None = (observation, action)  # None once they are checked
        self.ended = np.array([[False], [True]])
        self.number = 0  # of the current rollout

    def play(self, params: Params, version: int, numbers: list[int]) -> list[Fragment]:
        """Play the rollouts with these numbers, one fragment for each."""
        return [self._play(params, version, number) for number in numbers]

    def _play(self, params: Params, version: int, number: int) -> Fragment:
        """One episode as a fragment `[L, 1, ...]`, whose last observation is the episode's last.

        An episode in which the environment fails is cut before that step. One that fails in its first step is played
        again, with another seed.
        """
        begin, env_seconds, self.number = perf_counter(), 0.0, number
        for attempt in itertools.count():
            parts = [self.spec.seed, ROLLOUT_STREAM, number] + [attempt] * bool(attempt)
            trajectory, seconds = self._attempt(params, np.random.SeedSequence(parts))
            env_seconds += seconds
            failed = [t for t, step in enumerate(trajectory.steps) if step.failed]
            if failed:
                trajectory = trajectory.until(failed[0])
            if trajectory.steps:
                break
        last = trajectory.steps[-1]
        if last.final:  # the environment may have been reset already
            last = last._replace(observations=last.final[0][None])
            trajectory = replace(trajectory, steps=[*trajectory.steps[:-1], last])
        arrays = self._arrays(trajectory)
        if not last.terminated[0]:
            arrays["bootstrap"][-1] = self.spec.network.values(params, last.observations, self.state)
        total_reward, length = float(trajectory.rewards.sum(dtype=np.float64)), len(trajectory.steps)
        episodes = [] if failed else [Episode(total_reward, length, 0, scalars(last.infos.get(0, {})))]
        total = perf_counter() - begin
        spent = {"env": env_seconds, "inference": total - env_seconds, "total": total}
        of = self.spec.worker_index, version, spent, self.host
        return Fragment(length, episodes, *of, arrays, cores=self.cores, failures=self.envs.recovery.take())

    def _attempt(self, params: Params, streams: np.random.SeedSequence) -> tuple[Trajectory, float]:
        """Play an episode with these random streams; returns it, and the seconds spent in the environment."""
        begin, distribution, self.steps_taken = perf_counter(), self.distribution, 0
        rng = np.random.default_rng(streams)
        self.observation = self._finite_start(self.envs.reset([int(streams.spawn(1)[0].generate_state(1)[0])]))
        if self.spaces is not None:
            check_spaces(self.envs, self.spec, *self.spaces)
            self.spaces = None
        reset_seconds = perf_counter() - begin
        noise = np.empty(0)

        def choose(t: int, outputs: np.ndarray) -> np.ndarray:
            nonlocal noise
            if t % NOISE == 0:
                noise = distribution.noise(rng, (NOISE, 1))
            return distribution.sample(outputs, noise[t % NOISE])

        trajectory = self._take_steps(params, self.limit, choose, until_end=True)
        return trajectory, reset_seconds + trajectory.seconds["env"]

    def _arrays(self, trajectory: Trajectory) -> Params:
        """The arrays of a fragment; the last step is truncated if it did not terminate."""
        rewards, actions = trajectory.rewards, trajectory.actions
        first = np.zeros((len(rewards) + 1, 1), bool)
        first[0] = True
        truncated = np.zeros(rewards.shape, bool)
        truncated[-1] = not trajectory.terminated[-1, 0]
        arrays = {
            "observations": trajectory.observations,
            "first": first,
            "actions": actions,
            "log_probs": self.distribution.log_prob(trajectory.outputs, actions).astype(np.float32),
            "rewards": rewards,
            "terminated": trajectory.terminated,
            "truncated": truncated,
            "valid": np.ones(rewards.shape, bool),
            "bootstrap": np.full(rewards.shape, np.nan, np.float32),
            "state": self.state,
        }
        if self.spec.gamma is not None:
            running, ended = np.zeros(1, np.float32), np.zeros(rewards.shape, bool)
            arrays["discounted"] = discount(rewards, running, ended, self.spec.gamma)
        return arrays

    def _describe_env(self, index: int) -> str:
        return f"rollout {self.number}"
