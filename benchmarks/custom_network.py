"""How fast samplers act with a network of the user's own. `python custom_network.py` prints JSON.

Both policies are perceptrons of 64, 64 units on CartPole-v1 with 8 environments: fever's own, in NumPy, and one of
Flax, on one thread as in a worker.
"""

import json
import os
import statistics
import sys
import time

from measuring import Measurer, Row

ENVS, STEPS, TURNS = 8, 128, 40


def custom_network(measure: Measurer) -> list[Row]:
    """Environment steps per second of one sampler with a Flax network, against fever's own network."""
    row = Row("custom-network", "steps/s of a sampler with a 64,64 network in Flax", 0.5, True, reference_name="NumPy")
    for _ in measure.rounds(3):
        measured, _ = measure.run([sys.executable, __file__])
        row.add(measured["flax"], measured["numpy"])
    return [row]


def make() -> object:
    """The network that `network=custom_network:make` names."""
    import flax.linen as nn

    class Perceptron(nn.Module):
        @nn.compact
        def __call__(self, x: object) -> object:
            return nn.tanh(nn.Dense(64)(nn.tanh(nn.Dense(64)(x))))

    return Perceptron()


def main() -> None:
    """Sample with both by turns."""
    os.environ["PJRT_NPROC"] = "1"
    import numpy as np

    from fever.envs.make import make_envs
    from fever.envs.source import EnvContext, EnvSource
    from fever.plugins.network import compute_at_once, custom_network
    from fever.policy.policy import network_for
    from fever.sampling.sampler import Sampler
    from fever.sampling.spec import SamplerSpec

    compute_at_once()
    source = EnvSource("CartPole-v1")
    probe = make_envs(source, 1, EnvContext())
    probe.reset([0])
    spaces = probe.observation, probe.action
    networks = {
        "numpy": network_for(*spaces, hidden=(64, 64)),
        "flax": custom_network(network_for(*spaces, hidden=()), "custom_network:make", {}, spaces[0]),
    }
    samplers = {
        name: Sampler(SamplerSpec(source, one, ENVS, STEPS, None, 0), *spaces) for name, one in networks.items()
    }
    weights = {name: one.init(np.random.default_rng(0)) for name, one in networks.items()}
    rates: dict[str, list[float]] = {name: [] for name in networks}
    for turn in range(TURNS):
        for name, sampler in samplers.items():
            began = time.perf_counter()
            steps = sampler.sample(weights[name]).steps
            if turn:  # the first compiles
                rates[name].append(steps / (time.perf_counter() - began))
    print(json.dumps({name: statistics.median(found) for name, found in rates.items()}))


if __name__ == "__main__":
    main()
