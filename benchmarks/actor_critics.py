"""What a gradient step of SAC, TD3 and TQC costs for the arithmetic in it. `python actor_critics.py` prints JSON.

The arithmetic is what XLA counts in the compiled step. TD3's is the mean of a step with and one without its actor's.
"""

import functools
import json
import os
import statistics
import sys
import time
from collections.abc import Callable

from measuring import Measurer, Row

OBSERVATION, ACTION = 17, 6  # HalfCheetah-v5's sizes
TURNS, CALLS = 20, 5


def actor_critic_step(measure: Measurer) -> list[Row]:
    """CPU time of a gradient step of TD3 and TQC for a million floating-point operations, against SAC's."""
    rows = {
        name: Row("actor-critic-step", f"CPU microseconds per MFlop, {name}", 1.1, False, reference_name="SAC")
        for name in ("td3", "tqc")
    }
    for _ in measure.rounds(3):
        measured, _ = measure.run([sys.executable, __file__])
        for name, row in rows.items():
            row.add(measured[name]["per_megaflop"], measured["sac"]["per_megaflop"])
    return list(rows.values())


def main() -> None:
    """Measure the three by turns, at their default settings and on one thread."""
    os.environ["PJRT_NPROC"] = "1"
    import jax
    import numpy as np

    from fever.algos.actor_critic import ActorCritic
    from fever.algos.base import Task
    from fever.algos.registry import find_algorithm
    from fever.algos.tqc import quantile_huber_loss
    from fever.replay.buffer import Batch

    def count(function: Callable, *arguments: object) -> float:
        """Floating-point operations of a compiled function."""
        return jax.jit(function).lower(*arguments).compile().cost_analysis()["flops"]

    def box(size: int) -> dict:
        return {"type": "box", "low": [-1.0] * size, "high": [1.0] * size, "shape": [size], "dtype": "float32"}

    rng = np.random.default_rng(0)
    task = Task("numbers", box(OBSERVATION), box(ACTION), envs=1, workers=0, seed=0, total_steps=None)
    learners, operations, seconds = {}, {}, {}
    for name in ("sac", "td3", "tqc"):
        kind = find_algorithm(name)
        algorithm = kind(kind.Config(), task)
        config = algorithm.config
        rows = config.updates * config.batch
        batch = Batch(
            observations=rng.standard_normal((rows, OBSERVATION), np.float32),
            next_observations=rng.standard_normal((rows, OBSERVATION), np.float32),
            actions=rng.uniform(-1, 1, (rows, ACTION)).astype(np.float32),
            rewards=rng.standard_normal(rows, np.float32),
            discounts=np.full(rows, 0.99, np.float32),
            serials=np.arange(rows),
            relative_priorities=np.ones(rows, np.float32),
        )
        names = ("observations", "next_observations", "actions", "rewards", "discounts")
        one = {field: getattr(batch, field)[: config.batch] for field in names}
        one["noise"] = algorithm.inputs(batch)["noise"][0]

        def step(number: int, learned: dict, inputs: dict, algorithm: ActorCritic = algorithm) -> tuple:
            return algorithm.gradient_step(learned, {**inputs, "count": number}, 1e-3)

        numbers = range(1, 1 + getattr(config, "policy_delay", 1))
        operations[name] = statistics.mean(
            count(functools.partial(step, number), algorithm.learned, one) for number in numbers
        )
        if name == "tqc":  # XLA counts a loop once; this one goes through the targets
            quantiles, targets = np.zeros((config.critics, config.batch, config.quantiles)), np.ones((1, config.batch))
            body = count(quantile_huber_loss, quantiles, targets, targets, algorithm.levels)
            operations[name] += (config.critics * config.quantiles - 1) * body
        algorithm._update = jax.jit(algorithm.update)
        algorithm.finish(*algorithm.learn(batch))  # compiles
        learners[name], seconds[name] = (algorithm, batch), []
    for _ in range(TURNS):
        for name, (algorithm, batch) in learners.items():
            began = time.process_time()
            for _ in range(CALLS):
                algorithm.finish(*algorithm.learn(batch))
            seconds[name].append((time.process_time() - began) / (CALLS * algorithm.config.updates))
    result = {
        name: {
            "milliseconds": statistics.median(seconds[name]) * 1e3,
            "megaflop": operations[name] / 1e6,
            "per_megaflop": statistics.median(seconds[name]) * 1e12 / operations[name],
        }
        for name in learners
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
