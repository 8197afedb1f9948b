"""Small SAC, TD3 and TQC, their batches, and their critics with NumPy."""

from __future__ import annotations

from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from fever.algos.actor_critic import ActorCritic
from fever.envs.source import EnvSource
from fever.policy.networks import perceptron
from fever.replay.buffer import Batch
from tests.environments import IdentityEnv
from tests.factories import make_task

Kind = TypeVar("Kind", bound=ActorCritic)
COMPILED: dict[str, Any] = {}  # one update for all algorithms whose update is the same program


def make_algorithm(kind: type[Kind], seed: int = 0, **settings: Any) -> Kind:
    """An algorithm for two observed numbers and two actions, with random weights."""
    config = kind.Config(**{"hidden": (6,), "activation": "tanh", "batch": 8, "updates": 1, **settings})
    made = kind(config, make_task(EnvSource(IdentityEnv, {"action_space": "box"}), seed=seed))
    rng = np.random.default_rng(seed + 1)
    for name in ("actor", "critics", "target", "target_actor"):
        if name in made.learned:
            made.learned[name] = jnp.asarray(rng.normal(0, 0.5, len(made.learned[name])).astype(np.float32))
    made._update = COMPILED.setdefault(repr((kind, config)), jax.jit(made.update))
    return made


def draw(updates: int = 1, seed: int = 0) -> Batch:
    rng, count = np.random.default_rng(seed), updates * 8
    return Batch(
        observations=rng.normal(size=(count, 2)).astype(np.float32),
        next_observations=rng.normal(size=(count, 2)).astype(np.float32),
        actions=rng.uniform(-1, 1, (count, 2)).astype(np.float32),
        rewards=rng.normal(0, 1.5, count).astype(np.float32),
        discounts=rng.choice(np.array([0, 0.5, 0.9], np.float32), count),
        serials=np.arange(count),
        relative_priorities=np.ones(count, np.float32),
    )


def learn(algorithm: ActorCritic, batch: Batch) -> tuple[np.ndarray, dict[str, float]]:
    """TD errors, and the metrics of the last gradient step."""
    errors, metrics = algorithm.finish(*algorithm.learn(batch))
    return errors, dict(zip(algorithm.metric_names, metrics[-1], strict=True))


def critic_outputs(algorithm: ActorCritic, name: str, observations: np.ndarray, actions: np.ndarray) -> np.ndarray:
    """All critics with NumPy, `[C, B, outputs]`."""
    params = algorithm.critics.unpack(np.asarray(algorithm.learned[name]))
    x = np.concatenate([observations, actions], axis=1)
    return np.stack([perceptron(params, critic, 1, "tanh", x) for critic in algorithm.critic_names])


def vectors(algorithm: ActorCritic) -> dict[str, np.ndarray]:
    """All weights that are learned or follow, by name."""
    return {name: np.asarray(array) for name, array in algorithm.learned.items() if name != "optimizers"}
