"""RLlib through fever against RLlib alone, and what a search finds: the parts `rllib` and `tune` of the benchmarks."""

import json
import sys
from pathlib import Path

from measuring import CORES, HERE, Measurer, Row, goal, steady_rate

PPO = {"train_batch_size_per_learner": 2000, "minibatch_size": 128, "num_epochs": 10, "lr": 3e-4}
SPACE = (
    "learning_rate=loguniform(1e-4,1e-2) steps=choice(32,64,128) epochs=choice(4,8,16) minibatch=choice(64,128,256) "
    "gae_lambda=choice(0.8,0.9,0.95) gamma=choice(0.97,0.98,0.99)"
)


def rllib(measure: Measurer) -> list[Row]:
    """RLlib's PPO on CartPole-v1 by `--algo rllib:PPO`, and the same settings driven by RLlib alone."""
    same = Row("rllib", "steps/s after the 1st iteration, one thread", 0.95, reference_name="RLlib, 1 thread")
    own = Row("rllib", "the same, RLlib with PyTorch's own threads", 0.95, reference_name="RLlib alone")
    iterations = 4 if measure.quick else 12
    for seed in measure.rounds(3):
        settings = [f"{name}={value}" for name, value in PPO.items()]
        words = ["--workers", "0", "--envs", "1", "--seed", str(seed), "--stop-iterations", str(iterations)]
        ours, _ = measure.fever("train", "CartPole-v1", "--algo", "rllib:PPO", *words, *settings, cores=len(CORES))
        command = [sys.executable, str(HERE / "rllib_side.py"), "--iterations", str(iterations), "--seed", str(seed)]
        one, _ = measure.run([*command, "--threads", "1", json.dumps(PPO)], cores=len(CORES))
        many, _ = measure.run([*command, json.dumps(PPO)], cores=len(CORES))
        same.add(steady_rate(ours), one["steps_per_second"])
        own.add(steady_rate(ours), many["steps_per_second"])
    return [same, own]


def tune(measure: Measurer) -> list[Row]:
    """20 trials of PPO on CartPole-v1: how busy the cores are, and the best settings against the defaults."""
    busy = Row("tune", "share of the cores that is busy", 0.85, reference_name="all of them")
    steps = Row("tune", "steps to 475, best settings (median of 5 seeds)", 1.0, False, "the defaults")
    for seed in measure.rounds(1):
        trials = "4" if measure.quick else "20"
        words = ["--trials", trials, "--search", "optuna", "--scheduler", "asha", "--seeds", "2", "--seed", str(seed)]
        stop = ["--stop-steps", "60000", "--stop-reward", "475"]
        found, _ = measure.fever("tune", "CartPole-v1", *SPACE.split(), *words, *stop, cores=len(CORES))
        busy.add(found["cores_busy"], 1.0)
        best = str(Path(found["run"]) / "best.yaml")
        for other in range(100, 102 if measure.quick else 105):
            rest = ["--seed", str(other), "--stop-steps", "200000", "--stop-reward", "475"]
            ours, _ = measure.fever("train", "-f", best, *rest)
            theirs, _ = measure.fever("train", "CartPole-v1", *rest)
            steps.add(
                goal(ours["steps"], ours["stop_reason"] == "reward"),
                goal(theirs["steps"], theirs["stop_reason"] == "reward"),
            )
    return [busy, steps]
