"""The sampler: environments and a policy in, fixed-shape fragments of experience out. NumPy only: no JAX, no Ray."""

from __future__ import annotations

import socket
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

from fever.envs import EnvContext, EnvSource, make_envs
from fever.errors import ContractError
from fever.policy import Network, Params, distribution_for
from fever.policy.spaces import Description


@dataclass(frozen=True)
class SamplerSpec:
    """All that a sampler needs, small enough to send to another machine."""

    source: EnvSource
    network: Network
    envs: int  # N, environments stepped together
    steps: int  # T, steps of each environment in a fragment
    gamma: float  # discount of the running returns that reward normalisation looks at
    seed: int
    worker_index: int = 0
    generation: int = 0  # how often this worker was started before: every start gets fresh random streams
    workdir: Path | None = None  # parent of the environments' private folders

    def for_worker(self, index: int, generation: int) -> SamplerSpec:
        return replace(self, worker_index=index, generation=generation)


@dataclass(frozen=True)
class Episode:
    """One finished episode."""

    total_reward: float
    length: int
    env_index: int
    info: dict[str, float]  # the scalars in the environment's last info


@dataclass
class Fragment:
    """T steps of N environments, time-major.

    | array | shape | meaning |
    |---|---|---|
    | observations | `[T+1, N, ...]` | encoded; the last row is what the next fragment begins with |
    | first | `[T+1, N]` bool | an episode begins with this observation |
    | actions | `[T, N, ...]` | as the distribution stores them |
    | log_probs | `[T, N]` | of the actions, under the policy that chose them |
    | rewards | `[T, N]` | as the environment gave them |
    | terminated, truncated | `[T, N]` bool | the episode ended here, by its own rules or by a time limit |
    | valid | `[T, N]` bool | false for the phantom step of next-step autoreset: never learn from it |
    | bootstrap | `[T, N]` | value of the state reached, where `observations[t+1]` is already the next episode's and the
    |           |          | episode was truncated; NaN elsewhere |
    | discounted | `[T, N]` | running discounted return of the episode so far |
    | state | `[N, S]` | recurrent state before the first row |
    """

    arrays: dict[str, np.ndarray]
    episodes: list[Episode]
    worker_index: int
    version: int  # of the weights that acted
    seconds: dict[str, float]  # spent in "env", "inference" and altogether ("total")
    host: str

    @property
    def steps(self) -> int:
        """Environment steps taken, phantom steps left out."""
        return int(self.arrays["valid"].sum())


class Sampler:
    """Steps N environments with a policy and cuts the stream into fragments of T steps."""

    def __init__(self, spec: SamplerSpec, observation: Description, action: Description) -> None:
        self.spec = spec
        context = EnvContext(spec.worker_index, spec.workdir)
        self.envs = make_envs(spec.source, spec.envs, context)
        try:
            if (self.envs.observation, self.envs.action) != (observation, action):
                raise ContractError(
                    f"{spec.source.name} has other spaces in worker {spec.worker_index} than it had at first"
                )
            self.distribution = distribution_for(action)
            streams = np.random.SeedSequence([spec.seed, spec.worker_index, spec.generation])
            self.rng = np.random.default_rng(streams)
            seeds = [int(seed) for seed in streams.spawn(1)[0].generate_state(spec.envs)]
            self.observation = self.envs.reset(seeds)
        except BaseException:
            self.envs.close()
            raise
        self.host = socket.gethostname()
        self.first = np.ones(spec.envs, bool)
        self.phantom = np.zeros(spec.envs, bool)
        self.state = spec.network.initial_state(spec.envs)
        self.returns = np.zeros(spec.envs)
        self.lengths = np.zeros(spec.envs, np.int64)
        self.discounted = np.zeros(spec.envs, np.float32)
        self.steps_taken = 0

    def sample(self, params: Params, version: int = 0) -> Fragment:
        """Take T steps in every environment with these weights."""
        begin = perf_counter()
        steps, count, network, distribution = self.spec.steps, self.spec.envs, self.spec.network, self.distribution
        observations = np.empty((steps + 1, *self.observation.shape), self.observation.dtype)
        first = np.empty((steps + 1, count), bool)
        actions = np.empty((steps, count, *distribution.action_shape), distribution.action_dtype)
        outputs = np.empty((steps, count, distribution.outputs), np.float32)
        rewards = np.empty((steps, count), np.float32)
        terminated, truncated, valid = (np.empty((steps, count), bool) for _ in range(3))
        bootstrap = np.full((steps, count), np.nan, np.float32)
        state = self.state
        noise = distribution.noise(self.rng, (steps, count))
        episodes: list[Episode] = []
        env_seconds = inference_seconds = 0.0
        for t in range(steps):
            observations[t], first[t], valid[t] = self.observation, self.first, ~self.phantom
            before = perf_counter()
            if network.state_size:
                self.state = np.where(self.first[:, None], np.float32(0), self.state)
            outputs[t], self.state = network.act(params, self.observation, self.state)
            actions[t] = distribution.sample(outputs[t], noise[t])
            env_actions = distribution.to_env(actions[t])
            between = perf_counter()
            step = self.envs.step(env_actions)
            env_seconds += perf_counter() - between
            inference_seconds += between - before

            rewards[t], terminated[t], truncated[t] = step.rewards, step.terminated, step.truncated
            self.observation = step.observations
            self.returns += step.rewards
            self.lengths += valid[t]
            ended = step.terminated | step.truncated
            if ended.any():
                episodes += self._finish(np.flatnonzero(ended).tolist(), step.infos)
                for index in np.flatnonzero(step.truncated & ~step.terminated).tolist():
                    if index in step.final:
                        last = step.final[index][None]
                        if not np.isfinite(last).all():
                            raise self._broken("observation", last.sum(), self.steps_taken + t + 1, index)
                        bootstrap[t, index] = network.values(params, last, self.state[index : index + 1])[0]
            self.first, self.phantom = (self.phantom, ended) if self.envs.next_step else (ended, self.phantom)
        observations[steps], first[steps] = self.observation, self.first
        self._check(observations, rewards)
        self.steps_taken += steps
        arrays = {
            "observations": observations,
            "first": first,
            "actions": actions,
            "log_probs": distribution.log_prob(outputs, actions).astype(np.float32),
            "rewards": rewards,
            "terminated": terminated,
            "truncated": truncated,
            "valid": valid,
            "bootstrap": bootstrap,
            "discounted": self._discount(rewards, terminated | truncated),
            "state": state,
        }
        seconds = {"env": env_seconds, "inference": inference_seconds, "total": perf_counter() - begin}
        return Fragment(arrays, episodes, self.spec.worker_index, version, seconds, self.host)

    def _finish(self, indices: list[int], infos: dict[int, dict[str, Any]]) -> list[Episode]:
        """Close the books of the episodes that just ended."""
        episodes = []
        for index in indices:
            info = scalars(infos.get(index, {}))
            episodes.append(Episode(float(self.returns[index]), int(self.lengths[index]), index, info))
            self.returns[index] = self.lengths[index] = 0
        return episodes

    def _discount(self, rewards: np.ndarray, ended: np.ndarray) -> np.ndarray:
        """Running discounted returns `[T, N]`, carried over fragment borders and cut where episodes end."""
        discounted = np.empty_like(rewards)
        for t in range(len(rewards)):
            self.discounted = discounted[t] = self.discounted * np.float32(self.spec.gamma) + rewards[t]
            self.discounted = np.where(ended[t], np.float32(0), self.discounted)
        return discounted

    def _check(self, observations: np.ndarray, rewards: np.ndarray) -> None:
        """Refuse a fragment with numbers that are not finite, and say where they came from."""
        for name, array in (("reward", rewards), ("observation", observations)):
            finite = np.isfinite(array)
            if not finite.all():
                place = np.argwhere(~finite)[0].tolist()
                row, index = place[:2]
                raise self._broken(name, array[tuple(place)], self.steps_taken + row + (name == "reward"), index)

    def _broken(self, name: str, value: float, step: int, index: int) -> ContractError:
        return ContractError(
            f"{self.spec.source.name} breaks its contract at step {step} of environment {index} of worker "
            f"{self.spec.worker_index}: the {name} is {'NaN' if np.isnan(value) else 'infinite'}"
        )

    def close(self) -> None:
        """Close the environments."""
        self.envs.close()


def scalars(info: dict[str, Any]) -> dict[str, float]:
    """The entries of an info dictionary that are single numbers."""
    found = {}
    for key, value in info.items():
        if isinstance(value, (bool, int, float, np.number, np.bool_)) or (
            isinstance(value, np.ndarray) and value.shape == () and value.dtype.kind in "biuf"
        ):
            found[str(key)] = float(value)
    return found
