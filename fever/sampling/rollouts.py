"""Whole episodes. Every rollout is one episode with a seed of its own, whoever makes it and whenever.

Rollouts are numbered for the whole run, and a batch is the shortest row of them that has enough steps. So the same
seed gives the same batch with any number of workers, after a worker has died, and after a run was resumed.
"""

from __future__ import annotations

import math
import socket
from collections import deque
from time import perf_counter
from typing import Any

import numpy as np

from fever.envs.loop import make_one
from fever.envs.source import EnvContext
from fever.errors import ContractError
from fever.policy import Params, distribution_for
from fever.policy.spaces import Description
from fever.sampling.sampler import Episode, Fragment, SamplerSpec, check_spaces, discount, pile, scalars
from fever.sampling.workers import Broadcasting, RayPool, WorkerActor

ROLLOUT_STREAM = 2**32 - 3  # of random numbers, where samplers have their worker's index
NOISE = 256  # steps for which random numbers are drawn at once
CALL_STEPS = 256  # of short episodes that a worker makes in one call


class EpisodeRunner:
    """One environment, and a policy that plays whole episodes in it; a feed-forward one."""

    def __init__(self, spec: SamplerSpec, observation: Description, action: Description, limit: int | None) -> None:
        """Episodes are truncated after `limit` steps; of `spec`, envs and steps do not matter."""
        self.spec, self.limit = spec, limit or math.inf
        self.envs = make_one(spec.source, EnvContext(spec.worker_index, spec.workdir))
        self.distribution = distribution_for(action, spec.network.squashed)
        self.spaces: tuple[Description, Description] | None = (observation, action)  # None once they are checked
        self.memory = spec.network.initial_state(1)  # of width 0
        self.host = socket.gethostname()

    def run(self, params: Params, version: int, numbers: list[int]) -> list[Fragment]:
        """Play the rollouts with these numbers."""
        return [self._play(params, version, number) for number in numbers]

    def _play(self, params: Params, version: int, number: int) -> Fragment:
        """One episode as a fragment `[L, 1, ...]`, whose last observation is the episode's last."""
        begin, env_seconds = perf_counter(), 0.0
        act, distribution = self.spec.network.actor(params), self.distribution
        streams = np.random.SeedSequence([self.spec.seed, ROLLOUT_STREAM, number])
        rng = np.random.default_rng(streams)
        observation = self.envs.reset([int(streams.spawn(1)[0].generate_state(1)[0])])
        if self.spaces is not None:
            check_spaces(self.envs, self.spec, *self.spaces)
            self.spaces = None
        env_seconds += perf_counter() - begin
        observations, outputs, actions = [observation], [], []
        rewards: list[np.ndarray] = []
        ended = False
        while not ended and len(rewards) < self.limit:
            t = len(rewards)
            if t % NOISE == 0:
                noise = distribution.noise(rng, (NOISE, 1))
            output, _ = act(observation, self.memory)
            action = distribution.sample(output, noise[t % NOISE])
            env_action = distribution.to_env(action)
            before = perf_counter()
            step = self.envs.step(env_action)
            env_seconds += perf_counter() - before
            ended = bool(step.terminated[0] or step.truncated[0])
            observation = step.final[0][None] if ended and step.final else step.observations
            observations.append(observation)
            outputs.append(output)
            actions.append(action)
            rewards.append(step.rewards)
        arrays = self._arrays(pile(observations), pile(outputs), pile(actions), pile(rewards), number)
        arrays["terminated"][-1] = terminated = bool(step.terminated[0])
        arrays["truncated"][-1] = not terminated
        if not terminated:
            arrays["bootstrap"][-1] = self.spec.network.values(params, observation, self.memory)
        episode = Episode(
            float(arrays["rewards"].sum(dtype=np.float64)), len(rewards), 0, scalars(step.infos.get(0, {}))
        )
        total = perf_counter() - begin
        seconds = {"env": env_seconds, "inference": total - env_seconds, "total": total}
        return Fragment(len(rewards), [episode], self.spec.worker_index, version, seconds, self.host, arrays)

    def _arrays(self, observations: Any, outputs: Any, actions: Any, rewards: Any, number: int) -> Params:
        for name, array in (("observation", observations), ("reward", rewards)):
            if array.dtype != np.uint8 and not np.isfinite(array).all():
                step = int(np.argwhere(~np.isfinite(array))[0][0]) + (name == "reward")
                raise ContractError(
                    f"{self.spec.source.name} breaks its contract at step {step} of rollout {number}: the {name} is "
                    "not finite"
                )
        shape = rewards.shape
        first = np.zeros((len(observations), 1), bool)
        first[0] = True
        arrays = {
            "observations": observations,
            "first": first,
            "actions": actions,
            "log_probs": self.distribution.log_prob(outputs, actions).astype(np.float32),
            "rewards": rewards,
            "terminated": np.zeros(shape, bool),
            "truncated": np.zeros(shape, bool),
            "valid": np.ones(shape, bool),
            "bootstrap": np.full(shape, np.nan, np.float32),
            "state": self.memory,
        }
        if self.spec.gamma is not None:
            arrays["discounted"] = discount(rewards, np.zeros(1, np.float32), np.zeros(shape, bool), self.spec.gamma)
        return arrays

    def close(self) -> None:
        """Close the environment."""
        self.envs.close()


class Rollouts(Broadcasting):
    """What an algorithm sees of those who play episodes."""

    def collect(self, first: int, steps: int) -> list[Fragment]:
        """The fewest rollouts, numbered from `first` on, that have this many steps together, in order."""
        raise NotImplementedError


class LocalRollouts(Rollouts):
    """One environment in this process."""

    def __init__(self, spec: SamplerSpec, observation: Description, action: Description, limit: int | None) -> None:
        self.runner = EpisodeRunner(spec, observation, action, limit)

    def collect(self, first: int, steps: int) -> list[Fragment]:
        made: list[Fragment] = []
        taken = 0
        while taken < steps:
            made += self.runner.run(self.params, self.version, [first + len(made)])
            taken += made[-1].steps
        return made

    def close(self) -> None:
        self.runner.close()


class RayRollouts(RayPool, Rollouts):
    """Players as Ray actors. Whoever is free gets the next numbers, so a long episode holds up nobody else."""

    def __init__(
        self, spec: SamplerSpec, observation: Description, action: Description, limit: int | None, count: int
    ) -> None:
        super().__init__(count, generation=0)
        self.spec, self.arguments = spec, (observation, action, limit)
        self.pending: dict[Any, tuple[int, list[int], int]] = {}  # call -> worker, rollouts, version
        self.idle: deque[int] = deque()
        self.lengths: deque[int] = deque(maxlen=100)  # of the last episodes: to foresee how many are needed
        self.start_all()
        self.idle.extend(self.at_work)

    def employ(self, index: int) -> None:
        super().employ(index)
        self.idle.append(index)

    def start(self, index: int) -> Any:
        spec = self.spec.for_worker(index, self.generations[index])
        return self.actor(EpisodeActor, EpisodeRunner, spec, *self.arguments)

    def collect(self, first: int, steps: int) -> list[Fragment]:
        self.fit()
        made: dict[int, Fragment] = {}
        missing = steps  # that nobody has made, whether their rollouts follow one another or not
        waiting: deque[int] = deque()  # rollouts of workers that died
        following = first  # the next number that nobody has
        while (whole := self._enough(made, first, steps)) is None:
            while self.idle and (numbers := self._next_numbers(missing, waiting, following, steps)):
                following = max(following, numbers[-1] + 1)
                worker = self.idle.popleft()
                call = self.actors[worker].play.remote(self.params, self.version, numbers)
                self.pending[call] = worker, numbers, self.version
            for call in self.finished(self.pending):
                worker, numbers, version = self.pending.pop(call)
                try:
                    parts = self.get(call)
                except self.lost as error:
                    self.replace(worker, error)
                    waiting.extend(numbers if version == self.version else [])
                    continue
                self.idle.append(worker)
                self.deaths[worker] = 0
                self.lengths.extend(part.steps for part in parts)
                if version == self.version:  # those of the batch before were not needed for it
                    made.update(zip(numbers, parts, strict=True))
                    missing -= sum(part.steps for part in parts)
        return whole

    def _enough(self, made: dict[int, Fragment], first: int, steps: int) -> list[Fragment] | None:
        """The batch, once all rollouts that belong to it are there."""
        taken = 0
        for number in range(first, first + len(made)):
            if number not in made:
                return None
            taken += made[number].steps
            if taken >= steps:
                return [made[one] for one in range(first, number + 1)]
        return None

    def _next_numbers(self, missing: int, waiting: deque[int], following: int, steps: int) -> list[int]:
        """The rollouts for the next free worker; none if those under way will probably have the missing steps."""
        if waiting:
            return [waiting.popleft()]
        under_way = sum(len(numbers) for _, numbers, version in self.pending.values() if version == self.version)
        length = sum(self.lengths) / len(self.lengths) if self.lengths else steps / self.count
        wanted = missing / length - under_way
        if wanted <= 0 and under_way:
            return []
        share = math.ceil(wanted / self.count)
        return list(range(following, following + max(1, min(share, int(CALL_STEPS / length)))))


class EpisodeActor(WorkerActor):
    """A worker that plays episodes."""

    def play(self, params: Params, version: int, numbers: list[int]) -> list[Fragment]:
        self.build()
        return self.runner.run(params, version, numbers)


def make_rollouts(
    spec: SamplerSpec, observation: Description, action: Description, limit: int | None, count: int
) -> Rollouts:
    """The pool for a number of workers; 0 means this process and no Ray."""
    if count == 0:
        return LocalRollouts(spec, observation, action, limit)
    return RayRollouts(spec, observation, action, limit, count)
