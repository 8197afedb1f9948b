"""The sampler: environments and a policy in, fixed-shape fragments of experience out. NumPy only: no JAX, no Ray.

`Runner` is what every kind of sampler has: N environments, their random streams, and the books of their episodes.
"""

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
    gamma: float | None  # discount of the running returns that reward normalisation looks at; None: nobody does
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
    counts: bool = True  # in the mean return; false for those that explored more than most


@dataclass
class Report:
    """What a worker did in one call, besides the experience it gathered."""

    steps: int  # environment steps taken, phantom steps left out
    episodes: list[Episode]  # that ended
    worker_index: int
    version: int  # of the weights that acted
    seconds: dict[str, float]  # spent in "env", "inference" and altogether ("total")
    host: str


@dataclass
class Fragment(Report):
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
    | discounted | `[T, N]` | running discounted return of the episode so far (if the sampler has a gamma) |
    | state | `[N, S]` | recurrent state before the first row |
    """

    arrays: dict[str, np.ndarray]


class Runner:
    """N environments with their random streams and the books of their episodes."""

    def __init__(self, spec: SamplerSpec, observation: Description, action: Description) -> None:
        self.spec = spec
        context = EnvContext(spec.worker_index, spec.workdir)
        self.envs = make_envs(spec.source, spec.envs, context)
        try:
            if (self.envs.observation, self.envs.action) != (observation, action):
                raise ContractError(
                    f"{spec.source.name} has other spaces in worker {spec.worker_index} than it had at first"
                )
            self.distribution = distribution_for(action, spec.network.squashed)
            streams = np.random.SeedSequence([spec.seed, spec.worker_index, spec.generation])
            self.rng = np.random.default_rng(streams)
            seeds = [int(seed) for seed in streams.spawn(1)[0].generate_state(spec.envs)]
            self.observation = self.envs.reset(seeds)
        except BaseException:
            self.envs.close()
            raise
        self.host = socket.gethostname()
        # Which episodes ended in the last two steps: from it follow where episodes begin and which steps are phantoms.
        begins = [True, False] if self.envs.next_step else [False, True]
        self.ended = np.repeat(np.array(begins)[:, None], spec.envs, axis=1)  # [2, N]
        self.returns = np.zeros(spec.envs)  # of the running episodes, as are the next two
        self.lengths = np.zeros(spec.envs, np.int64)
        self.steps_taken = 0

    def _episodes(self, rewards: np.ndarray, valid: np.ndarray, endings: list[tuple[int, Any]]) -> list[Episode]:
        """The episodes that ended in this fragment, and the books of those that go on."""
        totals = self.returns + np.cumsum(rewards, axis=0, dtype=np.float64)  # [T, N], as if no episode had ended
        lengths = self.lengths + np.cumsum(valid, axis=0)
        counted, taken = np.zeros_like(totals[0]), np.zeros_like(lengths[0])  # of the episodes that did end
        episodes = []
        for t, infos in endings:
            for index, info in infos.items():
                total, length = float(totals[t, index] - counted[index]), int(lengths[t, index] - taken[index])
                episodes.append(Episode(total, length, index, scalars(info)))
                counted[index], taken[index] = totals[t, index], lengths[t, index]
        self.returns, self.lengths = totals[-1] - counted, lengths[-1] - taken
        return episodes

    def _check(self, observations: np.ndarray, rewards: np.ndarray) -> None:
        """Refuse observations `[T+1, N, ...]` and rewards `[T, N]` that are not finite, and say where they are."""
        for name, array in (("reward", rewards), ("observation", observations)):
            if array.dtype == np.uint8:
                continue
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


class Sampler(Runner):
    """Steps N environments with a policy and cuts the stream into fragments of T steps."""

    def __init__(self, spec: SamplerSpec, observation: Description, action: Description) -> None:
        super().__init__(spec, observation, action)
        self.state = spec.network.initial_state(spec.envs)
        self.discounted = np.zeros(spec.envs, np.float32)

    def sample(self, params: Params, version: int = 0) -> Fragment:
        """Take T steps in every environment with these weights."""
        begin = perf_counter()
        steps, count, network, distribution = self.spec.steps, self.spec.envs, self.spec.network, self.distribution
        observations = np.empty((steps + 1, *self.observation.shape), self.observation.dtype)
        actions = np.empty((steps, count, *distribution.action_shape), distribution.action_dtype)
        outputs = np.empty((steps, count, distribution.outputs), np.float32)
        rewards = np.empty((steps, count), np.float32)
        terminated, truncated = np.empty((steps, count), bool), np.empty((steps, count), bool)
        bootstrap = np.full((steps, count), np.nan, np.float32)
        ended = np.concatenate([self.ended, np.empty((steps, count), bool)])  # [2 + T, N]: row t + 2 is step t
        first = ended[: steps + 1] if self.envs.next_step else ended[1:]  # [T + 1, N]
        state = self.state
        noise = distribution.noise(self.rng, (steps, count))
        endings: list[tuple[int, dict[int, dict[str, Any]]]] = []
        env_seconds = inference_seconds = 0.0
        for t in range(steps):
            before = perf_counter()
            observations[t] = self.observation
            if network.state_size:
                self.state = np.where(first[t][:, None], np.float32(0), self.state)
            outputs[t], self.state = network.act(params, self.observation, self.state)
            action = actions[t] = distribution.sample(outputs[t], noise[t])
            env_actions = distribution.to_env(action)
            between = perf_counter()
            step = self.envs.step(env_actions)
            env_seconds += perf_counter() - between
            inference_seconds += between - before

            rewards[t], terminated[t], truncated[t] = step.rewards, step.terminated, step.truncated
            np.logical_or(step.terminated, step.truncated, out=ended[t + 2])
            self.observation = step.observations
            if step.infos:
                endings.append((t, step.infos))
                for index in np.flatnonzero(step.truncated & ~step.terminated).tolist():
                    if index in step.final:
                        bootstrap[t, index] = self._value_of_last(params, step.final[index], index, t)
        observations[steps] = self.observation
        valid = ~ended[1:-1] if self.envs.next_step else np.ones((steps, count), bool)
        self._check(observations, rewards)
        self.steps_taken += steps
        self.ended = ended[-2:]
        arrays = {
            "observations": observations,
            "first": first.copy(),
            "actions": actions,
            "log_probs": distribution.log_prob(outputs, actions).astype(np.float32),
            "rewards": rewards,
            "terminated": terminated,
            "truncated": truncated,
            "valid": valid,
            "bootstrap": bootstrap,
            "state": state,
        }
        if self.spec.gamma is not None:
            arrays["discounted"] = self._discount(rewards, ended[2:], self.spec.gamma)
        episodes = self._episodes(rewards * valid, valid, endings)
        seconds = {"env": env_seconds, "inference": inference_seconds, "total": perf_counter() - begin}
        taken = int(valid.sum())
        return Fragment(taken, episodes, self.spec.worker_index, version, seconds, self.host, arrays)

    def _value_of_last(self, params: Params, observation: np.ndarray, index: int, t: int) -> float:
        """Value of the last observation of an episode that was truncated and already reset, step t of the fragment."""
        if not np.isfinite(observation).all():
            raise self._broken("observation", observation.sum(), self.steps_taken + t + 1, index)
        return self.spec.network.values(params, observation[None], self.state[index : index + 1])[0]

    def _discount(self, rewards: np.ndarray, ended: np.ndarray, gamma: float) -> np.ndarray:
        """Running discounted returns `[T, N]`, carried over fragment borders and cut where episodes end."""
        discounted = np.empty_like(rewards)
        for t in range(len(rewards)):
            self.discounted = discounted[t] = self.discounted * np.float32(gamma) + rewards[t]
            self.discounted = np.where(ended[t], np.float32(0), self.discounted)
        return discounted


def scalars(info: dict[str, Any]) -> dict[str, float]:
    """The entries of an info dictionary that are single numbers."""
    found = {}
    for key, value in info.items():
        if isinstance(value, (bool, int, float, np.number, np.bool_)) or (
            isinstance(value, np.ndarray) and value.shape == () and value.dtype.kind in "biuf"
        ):
            found[str(key)] = float(value)
    return found
