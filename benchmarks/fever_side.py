"""Measurements of fever that its command line does not make, one subcommand each.

Each prints one JSON object as its last line of standard output:

    python fever_side.py cnn-step --frames 256 --repeats 20
    python fever_side.py sampler-memory

The number of threads is the number of cores that the process may run on.
"""

import argparse
import json
import statistics
import time

import jax
import numpy as np

from fever.algos.base import Task
from fever.algos.ppo import PPO, PPOConfig
from fever.envs.make import make_envs
from fever.envs.source import EnvContext, EnvSource
from fever.sampling.spec import SamplerSpec
from fever.sampling.workers import RayWorkers

Result = dict[str, object]

EPOCHS = (2, 12)  # the value pass and the advantages are in both, so they cancel
FRAGMENTS = 20


def run_cnn_step(arguments: argparse.Namespace) -> Result:
    """Time gradient steps of the Nature CNN inside PPO's own update: 12 epochs of one minibatch less 2 epochs of it."""
    frames, shape = arguments.frames, (84, 84, 4)
    config = PPOConfig(steps=1, minibatch=frames, learning_rate=2.5e-4, clip=0.1, entropy_coefficient=0.01)
    task = Task(
        name="frames",
        observation={"type": "image", "shape": list(shape), "order": "hwc"},
        action={"type": "discrete", "sizes": [6], "starts": [0], "shape": []},
        envs=frames,
        workers=0,
        seed=0,
        total_steps=None,
    )
    ppo = PPO(config, task)
    rng = np.random.default_rng(0)
    row = (1, frames)
    actions_shape = (*row, *ppo.distribution.action_shape)
    batch = jax.device_put({
        "observations": rng.integers(0, 256, (2, frames, *shape), np.uint8),
        "first": np.zeros((2, frames), bool),
        "actions": rng.integers(0, 6, actions_shape).astype(ppo.distribution.action_dtype),
        "log_probs": np.full(row, -np.log(6), np.float32),
        "rewards": rng.standard_normal(row, np.float32),
        "terminated": np.zeros(row, bool),
        "truncated": np.zeros(row, bool),
        "valid": np.ones(row, bool),
        "bootstrap": np.full(row, np.nan, np.float32),
        "discounted": np.zeros(row, np.float32),
        "state": np.zeros((frames, 0), np.float32),
    })  # fmt: skip

    def seconds(epochs: int) -> float:
        orders = np.tile(np.arange(frames, dtype=np.int32), (epochs, 1))
        began = time.perf_counter()
        updated = ppo._jitted_update(
            ppo.params, ppo.optimizer_state, batch, {}, orders, config.learning_rate, config.clip
        )
        jax.block_until_ready(updated)
        return time.perf_counter() - began

    few, many = EPOCHS
    for epochs in EPOCHS:
        seconds(epochs)  # compiles
    measured = [(seconds(many) - seconds(few)) / (many - few) * 1e3 for _ in range(arguments.repeats)]
    return {"frames": frames, "milliseconds": statistics.median(measured), "milliseconds_all": measured}


def run_sampler_memory(arguments: argparse.Namespace) -> Result:
    """Peak resident memory of a worker that samples CartPole-v1 with the default network."""
    source = EnvSource("CartPole-v1", {})
    envs = make_envs(source, 1, EnvContext())
    observation, action = envs.observation, envs.action
    envs.close()
    task = Task("CartPole-v1", observation, action, envs=8, total_envs=8, workers=1, seed=0, total_steps=None)
    ppo = PPO(PPOConfig(), task)
    spec = SamplerSpec(source, ppo.network, envs=8, steps=ppo.config.steps, gamma=None, seed=0)
    workers = RayWorkers(spec, observation, action, count=1)
    try:
        workers.broadcast(ppo.weights())
        workers.collect(FRAGMENTS)
        facts = workers.ray.get(workers.actors[0].facts.remote())
    finally:
        workers.close()
    return {"megabytes": facts["megabytes"], "modules": len(facts["modules"])}


def main() -> None:
    """Run one measurement and print it as JSON."""
    parser = argparse.ArgumentParser(description="Measurements of fever that its command line does not make.")
    commands = parser.add_subparsers(required=True)
    cnn_step = commands.add_parser("cnn-step", help=run_cnn_step.__doc__)
    cnn_step.add_argument("--frames", type=int, default=256)
    cnn_step.add_argument("--repeats", type=int, default=20)
    cnn_step.set_defaults(run=run_cnn_step)
    commands.add_parser("sampler-memory", help=run_sampler_memory.__doc__).set_defaults(run=run_sampler_memory)
    arguments = parser.parse_args()
    print(json.dumps(arguments.run(arguments)))


if __name__ == "__main__":
    main()
