"""RLlib driven by itself, as its documentation shows: the same algorithm and settings as fever's side, one process.

    python benchmarks/rllib_side.py --iterations 10 --seed 0 --threads 1 SETTINGS

SETTINGS is a JSON object of arguments for `training()`. The last line of output is a JSON object.
"""

import argparse
import json
import logging
import time
import warnings


def main() -> None:
    """Train, and print environment steps per second after the first iteration."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--iterations", type=int, required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--threads", type=int, help="PyTorch's; default: its own choice")
    parser.add_argument("settings", type=json.loads)
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    import ray
    import torch
    from ray.rllib.algorithms.ppo import PPOConfig

    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    ray.init(address="local", include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    config = PPOConfig().environment("CartPole-v1").env_runners(num_env_runners=0).debugging(seed=arguments.seed)
    algorithm = config.training(**arguments.settings).build_algo()
    points = []
    for _ in range(arguments.iterations):
        result = algorithm.train()
        points.append((time.perf_counter(), result["env_runners"]["num_env_steps_sampled_lifetime"]))
    algorithm.stop()
    (began, before), (ended, after) = points[0], points[-1]
    print(json.dumps({"steps_per_second": (after - before) / (ended - began)}))


if __name__ == "__main__":
    main()
