"""The sampler: environments and a policy in, fixed-shape fragments of experience out. NumPy only: no JAX, no Ray."""

from __future__ import annotations

from time import perf_counter

import numpy as np

from fever.policy import Params
from fever.policy.spaces import Description
from fever.sampling.runner import Runner, Trajectory
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
        trajectory = self._take_steps(params, steps, lambda t, outputs: distribution.sample(outputs, noise[t]))
        arrays = {
            "observations": trajectory.observations,
            "first": trajectory.first,
            "actions": trajectory.actions,
            "log_probs": distribution.log_prob(trajectory.outputs, trajectory.actions).astype(np.float32),
            "rewards": trajectory.rewards,
            "terminated": trajectory.terminated,
            "truncated": trajectory.truncated,
            "valid": trajectory.valid,
            "bootstrap": self._bootstrap(params, trajectory),
            "state": state,
        }
        if self.spec.gamma is not None:
            over = trajectory.ended[2:] | trajectory.failed[1:]
            arrays["discounted"] = discount(trajectory.rewards, self.discounted, over, self.spec.gamma)
        episodes = self._episodes(trajectory)
        seconds = {**trajectory.seconds, "total": perf_counter() - begin}
        taken, failures = int(trajectory.valid.sum()), self.envs.recovery.take()
        of = self.spec.worker_index, version, seconds, self.host
        return Fragment(taken, episodes, *of, arrays, cores=self.cores, failures=failures)

    def _bootstrap(self, params: Params, trajectory: Trajectory) -> np.ndarray:
        """Values `[T, N]` of the last observations of episodes that were truncated and already reset; NaN elsewhere."""
        values = np.full(trajectory.rewards.shape, np.nan, np.float32)
        for t, infos in trajectory.endings:
            step, state = trajectory.steps[t], trajectory.states[t] if trajectory.states else self.state
            for index in infos:
                if step.terminated[index] or index not in step.final:
                    continue
                last = step.final[index][None]
                values[t, index] = self.spec.network.values(params, last, state[index : index + 1])[0]
        return values


def discount(rewards: np.ndarray, running: np.ndarray, ended: np.ndarray, gamma: float) -> np.ndarray:
    """Running discounted returns `[T, N]` of rewards `[T, N]`, reset to zero after steps in which an episode `ended`.

    `running` `[N]` holds the returns before the first step and is updated in place.
    """
    discounted = np.empty_like(rewards)
    for t in range(len(rewards)):
        discounted[t] = running * np.float32(gamma) + rewards[t]
        np.multiply(discounted[t], ~ended[t], out=running)
    return discounted
