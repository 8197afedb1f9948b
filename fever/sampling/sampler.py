"""The sampler: environments and a policy in, fixed-shape fragments of experience out. NumPy only: no JAX, no Ray.

`Runner` is what every kind of sampler has: N environments, their random streams, and the books of their episodes.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

from fever.envs.loop import Envs, Step, make_envs
from fever.envs.source import EnvContext, EnvSource
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
    gpus: float = 0.0  # share of a GPU that its environments use

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


@dataclass
class Roll:
    """T steps of N environments as they were taken."""

    taken: list[Step]
    observations: list[np.ndarray]  # T + 1 times [N, ...]
    outputs: np.ndarray  # of the network, [T, N, ...]
    actions: np.ndarray  # [T, N, ...]
    ended_before: np.ndarray  # [2, N] bool: which episodes ended in the two steps before
    next_step: bool  # see `Envs.next_step`
    states: list[np.ndarray]  # recurrent state [N, S] after each step's observation; empty for a policy without memory
    seconds: dict[str, float]

    @cached_property
    def rewards(self) -> np.ndarray:
        """`[T, N]`, as are the next two."""
        return pile([step.rewards for step in self.taken])

    @cached_property
    def terminated(self) -> np.ndarray:
        return pile([step.terminated for step in self.taken])

    @cached_property
    def truncated(self) -> np.ndarray:
        return pile([step.truncated for step in self.taken])

    @cached_property
    def ended(self) -> np.ndarray:
        """`[2 + T, N]` bool: row t + 2 is step t."""
        return np.concatenate([self.ended_before, self.terminated | self.truncated])

    @cached_property
    def valid(self) -> np.ndarray:
        """`[T, N]` bool, false for phantom steps."""
        return ~self.ended[1:-1] if self.next_step else np.ones_like(self.terminated)

    @cached_property
    def endings(self) -> list[tuple[int, dict[int, dict[str, Any]]]]:
        """The last infos of episodes, and in which step they ended."""
        return [(t, step.infos) for t, step in enumerate(self.taken) if step.infos]


class Runner:
    """N environments with their random streams and the books of their episodes."""

    def __init__(self, spec: SamplerSpec, observation: Description, action: Description) -> None:
        self.spec = spec
        self.envs = make_envs(spec.source, spec.envs, EnvContext(spec.worker_index, spec.workdir))
        try:
            streams = np.random.SeedSequence([spec.seed, spec.worker_index, spec.generation])
            self.rng = np.random.default_rng(streams)
            seeds = [int(seed) for seed in streams.spawn(1)[0].generate_state(spec.envs)]
            self.observation = self.envs.reset(seeds)
            check_spaces(self.envs, spec, observation, action)
        except BaseException:
            self.envs.close()
            raise
        self.distribution = distribution_for(action, spec.network.squashed)
        self.host = socket.gethostname()
        # Which episodes ended in the last two steps: from it follow where episodes begin and which steps are phantoms.
        begins = [True, False] if self.envs.next_step else [False, True]
        self.ended = np.repeat(np.array(begins)[:, None], spec.envs, axis=1)  # [2, N]
        self.state = spec.network.initial_state(spec.envs)
        self.returns = np.zeros(spec.envs)  # of the running episodes, as are the next two
        self.lengths = np.zeros(spec.envs, np.int64)
        self.steps_taken = 0

    def _roll(self, params: Params, steps: int, choose: Callable[[int, np.ndarray], np.ndarray]) -> Roll:
        """Take T steps. `choose(t, outputs)` makes actions `[N, ...]` of the network's outputs `[N, ...]`.

        The loop acts, steps, and does nothing else: while an environment waits, caches grow cold, and every line here
        costs several times of what it costs otherwise.
        """
        act, to_env, step_all = self.spec.network.actor(params), self.distribution.to_env, self.envs.step
        recurrent, delay = self.spec.network.state_size > 0, 0 if self.envs.next_step else 1
        observation, state, ended = self.observation, self.state, [*self.ended]
        observations, outputs, actions, taken, states = [observation], [], [], [], []
        env_seconds, begin = 0.0, perf_counter()
        for t in range(steps):
            if recurrent:
                state = np.where(ended[t + delay][:, None], np.float32(0), state)
            output, state = act(observation, state)
            action = choose(t, output)
            env_action = to_env(action)
            before = perf_counter()
            step = step_all(env_action)
            env_seconds += perf_counter() - before
            if recurrent:
                states.append(state)
                ended.append(step.terminated | step.truncated)
            observation = step.observations
            observations.append(observation)
            outputs.append(output)
            actions.append(action)
            taken.append(step)
        seconds = {"env": env_seconds, "inference": perf_counter() - begin - env_seconds}
        roll = Roll(taken, observations, pile(outputs), pile(actions), self.ended, self.envs.next_step, states, seconds)
        self._check(observations, roll.rewards)
        self.observation, self.state, self.ended = observation, state, roll.ended[-2:]
        self.steps_taken += steps
        return roll

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

    def _check(self, observations: list[np.ndarray], rewards: np.ndarray) -> None:
        """Refuse observations, T + 1 times `[N, ...]`, and rewards `[T, N]` that are not finite; say where they are."""
        arrays = {"reward": rewards}
        if observations[0].dtype != np.uint8:
            arrays["observation"] = pile(observations)
        for name, array in arrays.items():
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
        self.discounted = np.zeros(spec.envs, np.float32)  # running returns of the episodes

    def sample(self, params: Params, version: int = 0) -> Fragment:
        """Take T steps in every environment with these weights."""
        begin = perf_counter()
        steps, distribution, state = self.spec.steps, self.distribution, self.state
        noise = distribution.noise(self.rng, (steps, self.spec.envs))
        before = self.steps_taken
        roll = self._roll(params, steps, lambda t, outputs: distribution.sample(outputs, noise[t]))
        arrays = {
            "observations": pile(roll.observations),
            "first": roll.ended[: steps + 1] if self.envs.next_step else roll.ended[1:],
            "actions": roll.actions,
            "log_probs": distribution.log_prob(roll.outputs, roll.actions).astype(np.float32),
            "rewards": roll.rewards,
            "terminated": roll.terminated,
            "truncated": roll.truncated,
            "valid": roll.valid,
            "bootstrap": self._bootstrap(params, roll, before),
            "state": state,
        }
        if self.spec.gamma is not None:
            arrays["discounted"] = discount(roll.rewards, self.discounted, roll.ended[2:], self.spec.gamma)
        episodes = self._episodes(roll.rewards * roll.valid, roll.valid, roll.endings)
        seconds = {**roll.seconds, "total": perf_counter() - begin}
        taken = int(roll.valid.sum())
        return Fragment(taken, episodes, self.spec.worker_index, version, seconds, self.host, arrays)

    def _bootstrap(self, params: Params, roll: Roll, before: int) -> np.ndarray:
        """Values `[T, N]` of the last observations of episodes that were truncated and already reset; NaN elsewhere."""
        values = np.full(roll.rewards.shape, np.nan, np.float32)
        for t, infos in roll.endings:
            step, state = roll.taken[t], roll.states[t] if roll.states else self.state
            for index in infos:
                if step.terminated[index] or index not in step.final:
                    continue
                last = step.final[index]
                if not np.isfinite(last).all():
                    raise self._broken("observation", last.sum(), before + t + 1, index)
                values[t, index] = self.spec.network.values(params, last[None], state[index : index + 1])[0]
        return values


def discount(rewards: np.ndarray, running: np.ndarray, ended: np.ndarray, gamma: float) -> np.ndarray:
    """Running discounted returns `[T, N]` of rewards `[T, N]`, beginning with those before `[N]`, which are moved on;
    cut where episodes `ended` `[T, N]`."""
    discounted = np.empty_like(rewards)
    for t in range(len(rewards)):
        discounted[t] = running * np.float32(gamma) + rewards[t]
        np.multiply(discounted[t], ~ended[t], out=running)
    return discounted


def check_spaces(envs: Envs, spec: SamplerSpec, observation: Description, action: Description) -> None:
    """Refuse environments whose spaces differ from those that the network was made for."""
    if (envs.observation, envs.action) != (observation, action):
        raise ContractError(f"{spec.source.name} has other spaces in worker {spec.worker_index} than it had at first")


def pile(rows: list[np.ndarray]) -> np.ndarray:
    """T arrays `[N, ...]` to one `[T, N, ...]`; as `np.stack`, in a third of its time for small ones."""
    return np.concatenate(rows).reshape(len(rows), *rows[0].shape)


def scalars(info: dict[str, Any]) -> dict[str, float]:
    """The entries of an info dictionary that are single numbers."""
    found = {}
    for key, value in info.items():
        if isinstance(value, (bool, int, float, np.number, np.bool_)) or (
            isinstance(value, np.ndarray) and value.shape == () and value.dtype.kind in "biuf"
        ):
            found[str(key)] = float(value)
    return found
