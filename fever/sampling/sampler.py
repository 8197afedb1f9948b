"""The sampler: environments and a policy in, fixed-shape fragments of experience out. NumPy only: no JAX, no Ray."""

from __future__ import annotations

from time import perf_counter

import numpy as np

from fever.policy import Params
from fever.policy.spaces import Description
from fever.sampling.runner import Roll, Runner
from fever.sampling.spec import Fragment, SamplerSpec


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
            "observations": roll.observations,
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
