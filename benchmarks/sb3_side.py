"""The side of stable-baselines3 and SBX in the benchmarks.

Runs in a virtualenv of its own (requirements.txt, torch==2.13.0). Each subcommand does one measurement and prints one
JSON object as its last line of standard output:

    python sb3_side.py cartpole --steps 100000 --target 475 --seed 0
    python sb3_side.py dqn --steps 20000 --library sbx
    python sb3_side.py halfcheetah --steps 20480 --threads 1
    python sb3_side.py cnn-step --frames 256 --repeats 20

Options follow the subcommand. Everything runs on the CPU.
"""

import argparse
import json
import os
import statistics
import time
import warnings
from collections import deque
from collections.abc import Callable
from pathlib import Path

import gymnasium
import numpy as np
import stable_baselines3
import torch
from stable_baselines3.common.base_class import BaseAlgorithm
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.policies import ActorCriticCnnPolicy
from stable_baselines3.common.utils import LinearSchedule, set_random_seed

Result = dict[str, object]

DQN_EXPLORATION_STEPS = 8000  # exploration_fraction 0.16 of 50,000
CNN_LEARNING_RATE = 2.5e-4
CNN_CLIP_RANGE = 0.1
CNN_ENTROPY_COEFFICIENT = 0.01
CNN_VALUE_COEFFICIENT = 0.5
CNN_WARM_UPS = 2
EVALUATION_EPISODES = 10
EVALUATION_SEED_OFFSET = 10_000


class ReturnTracker(BaseCallback):
    """Keeps the returns of the last finished episodes and stops learning at a target mean.

    The model's own episode buffer is filled only after the callback has run, so it would be a step late.
    """

    def __init__(self, window: int, target: float | None = None) -> None:
        """Remember the last `window` returns; without a target learning runs to its end."""
        super().__init__()
        self.returns: deque[float] = deque(maxlen=window)
        self.target = target
        self.reached = False

    def mean(self) -> float | None:
        """Mean return over the window, or None before any episode has finished."""
        return float(np.mean(self.returns)) if self.returns else None

    def _on_step(self) -> bool:
        """Record episodes that finished in this step; False tells the model to stop."""
        finished = [info["episode"]["r"] for info in self.locals["infos"] if "episode" in info]
        if finished:
            self.returns.extend(finished)
            if self.target is not None and len(self.returns) == self.returns.maxlen:
                self.reached = self.mean() >= self.target
        return not self.reached


def process_age() -> float:
    """Seconds since this process was started, interpreter start-up and imports included (Linux)."""
    fields_after_name = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start_ticks = int(fields_after_name[19])  # field 22 of the whole line, counted from boot
    return time.clock_gettime(time.CLOCK_BOOTTIME) - start_ticks / os.sysconf("SC_CLK_TCK")


def learn(model: BaseAlgorithm, steps: int, tracker: ReturnTracker) -> Result:
    """Train the model and time learn() alone."""
    started = time.perf_counter()
    model.learn(total_timesteps=steps, callback=tracker)
    seconds = time.perf_counter() - started
    return {
        "steps": model.num_timesteps,
        "seconds": seconds,
        "steps_per_second": model.num_timesteps / seconds,
        "process_seconds": process_age(),
        "return_mean": tracker.mean(),
    }


def learn_from_replay(model: BaseAlgorithm, steps: int) -> Result:
    """Train the model and count its gradient steps."""
    result = learn(model, steps, ReturnTracker(window=20))
    updates = model._n_updates
    return {**result, "updates": updates, "updates_per_second": updates / result["seconds"]}


def run_cartpole(arguments: argparse.Namespace) -> Result:
    """PPO on CartPole-v1 at rl-zoo's tuned settings, optionally until a target return."""
    model = arguments.library.PPO(
        "MlpPolicy",
        make_vec_env("CartPole-v1", n_envs=8, seed=arguments.seed),
        n_steps=32,
        batch_size=256,
        n_epochs=20,
        learning_rate=LinearSchedule(1e-3, 0.0, 1.0),
        clip_range=LinearSchedule(0.2, 0.0, 1.0),
        gamma=0.98,
        gae_lambda=0.8,
        ent_coef=0.0,
        device="cpu",
        verbose=0,
        seed=arguments.seed,
    )
    tracker = ReturnTracker(arguments.window, arguments.target)
    result = learn(model, arguments.steps, tracker)
    return {**result, "reached": tracker.reached}


def run_dqn(arguments: argparse.Namespace) -> Result:
    """DQN on CartPole-v1 at rl-zoo's tuned settings; the exploration ends where it does in rl-zoo's 50,000 steps."""
    model = arguments.library.DQN(
        "MlpPolicy",
        make_vec_env("CartPole-v1", n_envs=1, seed=arguments.seed),
        learning_rate=2.3e-3,
        batch_size=64,
        buffer_size=100_000,
        learning_starts=1000,
        gamma=0.99,
        target_update_interval=10,
        train_freq=256,
        gradient_steps=128,
        exploration_fraction=min(1.0, DQN_EXPLORATION_STEPS / arguments.steps),
        exploration_final_eps=0.04,
        policy_kwargs={"net_arch": [256, 256]},
        device="cpu",
        verbose=0,
        seed=arguments.seed,
    )
    return learn_from_replay(model, arguments.steps)


def run_sac(arguments: argparse.Namespace) -> Result:
    """SAC on Pendulum-v1 at rl-zoo's settings, a gradient step for each step of an environment."""
    model = arguments.library.SAC(
        "MlpPolicy",
        make_vec_env("Pendulum-v1", n_envs=arguments.envs, seed=arguments.seed),
        learning_rate=1e-3,
        batch_size=256,
        buffer_size=1_000_000,
        learning_starts=100,
        gamma=0.99,
        tau=0.005,
        train_freq=1,
        gradient_steps=arguments.envs,
        policy_kwargs={"net_arch": [256, 256]},
        device="cpu",
        verbose=0,
        seed=arguments.seed,
    )
    return learn_from_replay(model, arguments.steps)


def run_trpo(arguments: argparse.Namespace) -> Result:
    """TRPO on Pong's RAM at the library's defaults, 5,120 steps of 8 environments an iteration."""
    import ale_py  # noqa: F401 - registers the games
    from sb3_contrib import TRPO

    environments = make_vec_env("ALE/Pong-v5", n_envs=8, seed=arguments.seed, env_kwargs={"obs_type": "ram"})
    model = TRPO("MlpPolicy", environments, n_steps=640, device="cpu", verbose=0, seed=arguments.seed)
    result = learn(model, arguments.iterations * 5120, ReturnTracker(window=20))
    return {**result, "seconds_per_iteration": result["seconds"] / arguments.iterations}


def run_halfcheetah(arguments: argparse.Namespace) -> Result:
    """PPO on HalfCheetah-v5 at the library's defaults, then a deterministic evaluation."""
    import mujoco  # here, so that the other measurements do not pay for it

    mujoco.set_mju_user_warning(lambda _: None)  # otherwise printed and written to MUJOCO_LOG.TXT
    model = arguments.library.PPO("MlpPolicy", "HalfCheetah-v5", device="cpu", verbose=0, seed=arguments.seed)
    result = learn(model, arguments.steps, ReturnTracker(window=20))
    evaluation_environment = make_vec_env("HalfCheetah-v5", seed=arguments.seed + EVALUATION_SEED_OFFSET)
    return_eval, _ = evaluate_policy(
        model, evaluation_environment, n_eval_episodes=EVALUATION_EPISODES, deterministic=True
    )
    return {**result, "return_eval": float(return_eval)}


def make_cnn_step(frames: int) -> Callable[[], None]:
    """Build the Nature CNN policy and a random batch; return the function that does one learner step."""
    observation_space = gymnasium.spaces.Box(0, 255, (4, 84, 84), np.uint8)
    action_space = gymnasium.spaces.Discrete(6)
    policy = ActorCriticCnnPolicy(observation_space, action_space, lambda _: CNN_LEARNING_RATE)
    policy.set_training_mode(True)
    observations = torch.randint(0, 256, (frames, *observation_space.shape), dtype=torch.uint8)
    actions = torch.randint(0, int(action_space.n), (frames,))
    advantages, returns = torch.randn(frames), torch.randn(frames)
    with torch.no_grad():
        old_log_probability = policy.evaluate_actions(observations, actions)[1]

    def step() -> None:
        """Forward, clipped PPO loss with value and entropy terms, backward, gradient clipping and Adam."""
        values, log_probability, entropy = policy.evaluate_actions(observations, actions)
        normalized = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
        ratio = torch.exp(log_probability - old_log_probability)
        clipped_ratio = torch.clamp(ratio, 1 - CNN_CLIP_RANGE, 1 + CNN_CLIP_RANGE)
        policy_loss = -torch.min(normalized * ratio, normalized * clipped_ratio).mean()
        value_loss = torch.nn.functional.mse_loss(returns, values.flatten())
        loss = policy_loss + CNN_VALUE_COEFFICIENT * value_loss - CNN_ENTROPY_COEFFICIENT * entropy.mean()
        policy.optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(policy.parameters(), 0.5)
        policy.optimizer.step()

    return step


def run_cnn_step(arguments: argparse.Namespace) -> Result:
    """Time learner steps of the Nature CNN one by one, after a few warm-ups."""
    step = make_cnn_step(arguments.frames)
    milliseconds: list[float] = []
    for _ in range(CNN_WARM_UPS + arguments.repeats):
        started = time.perf_counter()
        step()
        milliseconds.append((time.perf_counter() - started) * 1e3)
    measured = milliseconds[CNN_WARM_UPS:]
    return {
        "frames": arguments.frames,
        "milliseconds": statistics.median(measured),
        "milliseconds_all": measured,
    }


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    common.add_argument("--seed", type=int, default=0)
    common.add_argument("--library", choices=("sb3", "sbx"), default="sb3", help="stable-baselines3, or SBX in JAX")
    parser = argparse.ArgumentParser(description="The stable-baselines3 side of the benchmarks.")
    commands = parser.add_subparsers(required=True)

    cartpole = commands.add_parser("cartpole", parents=[common], help=run_cartpole.__doc__)
    cartpole.add_argument("--steps", type=int, default=100_000, help="the schedules end here")
    cartpole.add_argument("--target", type=float, nargs="?", const=475.0, help="stop at this mean return")
    cartpole.add_argument("--window", type=int, default=20, help="episodes in the mean return")
    cartpole.set_defaults(run=run_cartpole)

    dqn = commands.add_parser("dqn", parents=[common], help=run_dqn.__doc__)
    dqn.add_argument("--steps", type=int, default=20_000)
    dqn.set_defaults(run=run_dqn)

    sac = commands.add_parser("sac", parents=[common], help=run_sac.__doc__)
    sac.add_argument("--steps", type=int, default=3000)
    sac.add_argument("--envs", type=int, default=1)
    sac.set_defaults(run=run_sac)

    trpo = commands.add_parser("trpo", parents=[common], help=run_trpo.__doc__)
    trpo.add_argument("--iterations", type=int, default=6)
    trpo.set_defaults(run=run_trpo)

    halfcheetah = commands.add_parser("halfcheetah", parents=[common], help=run_halfcheetah.__doc__)
    halfcheetah.add_argument("--steps", type=int, required=True)
    halfcheetah.set_defaults(run=run_halfcheetah)

    cnn_step = commands.add_parser("cnn-step", parents=[common], help=run_cnn_step.__doc__)
    cnn_step.add_argument("--frames", type=int, default=256)
    cnn_step.add_argument("--repeats", type=int, default=20)
    cnn_step.set_defaults(run=run_cnn_step)
    return parser.parse_args()


def main() -> None:
    """Run one measurement and print it as JSON."""
    warnings.filterwarnings("ignore")
    arguments = parse_arguments()
    torch.set_num_threads(arguments.threads)
    set_random_seed(arguments.seed)
    facts = {"threads": arguments.threads, "seed": arguments.seed, "library": arguments.library}
    if arguments.library == "sbx":
        import sbx  # here, so that stable-baselines3 does not pay for JAX

        arguments.library = sbx
    else:
        arguments.library = stable_baselines3
    print(json.dumps({**arguments.run(arguments), **facts}))


if __name__ == "__main__":
    main()
