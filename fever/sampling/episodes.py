"""Plays whole episodes, each with a seed of its own. NumPy only: no JAX, no Ray."""

from __future__ import annotations

import math
import socket
from time import perf_counter
from typing import Any

import numpy as np

from fever.envs.make import make_one
from fever.envs.source import EnvContext
from fever.errors import ContractError
from fever.policy import Params, distribution_for
from fever.policy.spaces import Description
from fever.sampling.runner import check_spaces, pile, scalars
from fever.sampling.sampler import discount
from fever.sampling.spec import Episode, Fragment, SamplerSpec

ROLLOUT_STREAM = 2**32 - 3  # of random numbers, where samplers have their worker's index
NOISE = 256  # steps for which random numbers are drawn at once


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
