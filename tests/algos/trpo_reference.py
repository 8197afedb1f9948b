"""Small TRPO learners, and TRPO's mathematics in NumPy, for comparison."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from fever.algos.trpo import TRPO, TRPOConfig
from fever.policy import Params
from fever.sampling.sampler import Sampler
from fever.sampling.spec import Fragment
from tests.environments import CounterEnv
from tests.factories import make_sampler, make_task, share_compiled

OUTSIDE = {"steps", "timesteps_per_batch", "timestep_limit", "value_epochs", "value_minibatch", "normalize_rewards"}


def make(target: Any = CounterEnv, envs: int = 4, seed: int = 0, **settings: Any) -> TRPO:
    """TRPO with batches of 16 steps of 4 environments, unless the settings say otherwise."""
    settings = {"steps": 16, "hidden": (4,), "cg_iterations": 50, "value_minibatch": 16, "value_epochs": 2, **settings}
    return share_compiled(TRPO(TRPOConfig(**settings), make_task(target, envs, seed=seed)), OUTSIDE)


def sampler(trpo: TRPO, target: Any = CounterEnv, seed: int = 0) -> Sampler:
    return make_sampler(trpo, target, trpo.task.envs, trpo.config.gamma, seed)


def collect(trpo: TRPO, target: Any = CounterEnv, seed: int = 0) -> Fragment:
    return sampler(trpo, target, seed).sample(trpo.weights())


def policy_of(trpo: TRPO) -> np.ndarray:
    """The policy's weights as one vector."""
    return trpo.policy_flat.pack(trpo.weights())


def value_of(trpo: TRPO) -> np.ndarray:
    """The weights of the values as one vector."""
    return trpo.value_flat.pack(trpo.weights())


def set_weights(trpo: TRPO, weights: Params) -> None:
    """Replace the weights with these names."""
    trpo.params = jnp.asarray(trpo.flat.pack({**trpo.weights(), **weights}))


def enlarge(trpo: TRPO, factor: float = 30) -> None:
    """A policy that is far from even, so that the Fisher matrix has something to say."""
    weights = {name: value * (factor if name == "policy/w" else 1) for name, value in trpo.weights().items()}
    set_weights(trpo, weights)


def assert_same(here: TRPO, there: TRPO) -> None:
    for name, value in here.weights().items():
        np.testing.assert_array_equal(value, there.weights()[name], err_msg=name)


class Batch:
    """A fragment by hand, with float64 and NumPy: rows that are valid, as the policy `before` saw them."""

    def __init__(self, trpo: TRPO, fragment: Fragment) -> None:
        """Rewards are taken as they are; call it before the learner learns."""
        config, arrays, self.trpo = trpo.config, fragment.arrays, trpo
        self.before = trpo.weights()
        observations = arrays["observations"]
        time, count = arrays["rewards"].shape
        values = self.values(self.before, observations.reshape(-1, *observations.shape[2:])).reshape(time + 1, count)
        following = np.where(np.isnan(arrays["bootstrap"]), values[1:], arrays["bootstrap"]) * ~arrays["terminated"]
        advantages = np.zeros((time + 1, count))
        for t in reversed(range(time)):
            delta = arrays["rewards"][t] + config.gamma * following[t] - values[t]
            goes_on = ~(arrays["terminated"] | arrays["truncated"])[t]
            advantages[t] = delta + config.gamma * config.gae_lambda * goes_on * advantages[t + 1]
        valid = arrays["valid"]
        self.rows, self.actions = observations[:-1][valid], arrays["actions"][valid]
        self.advantages, self.old_values = advantages[:-1][valid], values[:-1][valid]
        self.returns = self.advantages + self.old_values
        if config.normalize_advantages:
            self.advantages = (self.advantages - self.advantages.mean()) / self.advantages.std()
        self.old = self.outputs(policy_of(trpo))

    def _weights(self, weights: Any) -> Any:
        return {**self.before, **{name: np.asarray(value, np.float64) for name, value in weights.items()}}

    def outputs(self, policy: Any) -> np.ndarray:
        """Of another policy, with the statistics that this batch was sampled with."""
        params = self._weights(self.trpo.policy_flat.unpack(np.asarray(policy, np.float64)))
        return self.trpo.network.act(params, self.rows.astype(np.float64), np.zeros((len(self.rows), 0)))[0]

    def values(self, weights: Any, rows: np.ndarray) -> np.ndarray:
        return self.trpo.network.values(self._weights(weights), rows.astype(np.float64), np.zeros((len(rows), 0)))

    def kl(self, policy: Any) -> float:
        return float(self.trpo.distribution.kl(self.old, self.outputs(policy)).mean())

    def surrogate(self, policy: Any) -> float:
        now, before = (self.trpo.distribution.log_prob(out, self.actions) for out in (self.outputs(policy), self.old))
        return float((np.exp(now - before) * self.advantages).mean())

    def entropy(self, policy: Any) -> float:
        return float(self.trpo.distribution.entropy(self.outputs(policy)).mean())

    def explained(self, values: np.ndarray) -> float:
        return float(1 - (self.returns - values).var() / self.returns.var())

    def natural_step(self) -> tuple[np.ndarray, np.ndarray]:
        """The gradient, and the whole step: with the explicit Fisher matrix, solved directly. By central differences;
        nothing here is JAX's."""
        distribution, start = self.trpo.distribution, np.asarray(policy_of(self.trpo), np.float64)
        nudges = 1e-5 * np.eye(len(start))
        gradient = np.array([self.surrogate(start + nudge) - self.surrogate(start - nudge) for nudge in nudges]) / 2e-5
        pairs = [(self.outputs(start + nudge), self.outputs(start - nudge)) for nudge in nudges]
        jacobian = np.stack([(up - down) / 2e-5 for up, down in pairs], -1)  # [R, outputs, P]

        def kl(change: np.ndarray) -> np.ndarray:
            return distribution.kl(self.old, self.old + change)

        moves = 1e-3 * np.eye(self.old.shape[1])
        curvature = (
            np.array([[kl(a + b) - kl(a - b) - kl(b - a) + kl(-a - b) for a in moves] for b in moves]) / 4e-6
        )  # [outputs, outputs, R]
        fisher = np.einsum("rip,ijr,rjq->pq", jacobian, curvature, jacobian) / len(self.rows)
        for direction in np.random.default_rng(0).normal(size=(5, len(start))):  # it is the divergence's curvature
            assert self.kl(start + 1e-3 * direction) == pytest.approx(5e-7 * direction @ fisher @ direction, rel=0.02)
        damped = fisher + self.trpo.config.cg_damping * np.eye(len(start))
        direction = np.linalg.solve(damped, gradient)
        return gradient, direction * np.sqrt(2 * self.trpo.config.max_kl / (direction @ damped @ direction))
