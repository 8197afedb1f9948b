"""Training at the same settings as stable-baselines3 (PyTorch) and SBX (the same interface, in JAX)."""

from measuring import Measurer, Row, goal, metrics_of, rate_after, steady_rate

LIBRARIES = ("sb3", "sbx")
EVALUATION_EPISODES = 10

ZOO_CARTPOLE = (  # rl-zoo's tuned settings; they are written out in sb3_side.py too
    "steps=32 minibatch=256 epochs=20 learning_rate=1e-3 learning_rate_schedule=linear clip=0.2 clip_schedule=linear "
    "gamma=0.98 gae_lambda=0.8 entropy_coefficient=0 normalize_observations=false normalize_rewards=false"
)
SB3_DEFAULTS = (  # PPO's in stable-baselines3
    "steps=2048 minibatch=64 epochs=10 learning_rate=3e-4 gamma=0.99 gae_lambda=0.95 clip=0.2 value_coefficient=0.5 "
    "entropy_coefficient=0 max_gradient_norm=0.5 log_std=0 hidden=[64,64] activation=tanh "
    "normalize_observations=false normalize_rewards=false"
)
# rl-zoo's for DQN on CartPole-v1, in sb3_side.py too. There the target is copied every 10 steps of the environment, so
# it stays the same for all 128 gradient steps between two collections of 256 steps: that is target_updates=128 here.
ZOO_DQN = (
    "double=false dueling=false n_step=1 prioritized=false target=hard target_updates=128 activation=relu "
    "learning_rate=2.3e-3 batch=64 updates=128 replay_ratio=32 buffer=100000 warmup=1000 gamma=0.99 epsilon_steps=8000 "
    "epsilon_end=0.04 hidden=[256,256] initial_weights=uniform"
)
# rl-zoo's for SAC on Pendulum-v1, with a gradient step for each step of an environment.
ZOO_SAC = (
    "learning_rate=1e-3 batch=256 buffer=1000000 warmup=100 gamma=0.99 polyak=0.005 replay_ratio=256 hidden=[256,256] "
    "save_replay=false"
)
SAC_STEPS = 3000


def rows_of(name: str, figure: str, wanted: dict[str, float] | None = None, more_is_better: bool = True) -> list[Row]:
    """A row for each library, with its bar if it has one."""
    return [Row(name, figure, (wanted or {}).get(one), more_is_better, one) for one in LIBRARIES]


def cartpole_speed(measure: Measurer) -> list[Row]:
    """CartPole-v1 at rl-zoo's settings for 100,000 steps: steps per second of training."""
    whole = rows_of("cartpole-speed", "steps/s, whole run", {"sb3": 8.0, "sbx": 5.0})
    steady = rows_of("cartpole-speed", "steps/s, fever without 1st iteration")
    process = rows_of("cartpole-speed", "seconds, whole process", more_is_better=False)
    for seed in measure.rounds(3):
        options = ["--stop-steps", "100000", "--seed", str(seed)]
        ours, our_seconds = measure.fever("train", "CartPole-v1", *options, *ZOO_CARTPOLE.split())
        for place, library in enumerate(LIBRARIES):
            theirs, their_seconds = measure.sb3("cartpole", "--steps", "100000", "--seed", str(seed), library=library)
            whole[place].add(ours["steps_per_second"], theirs["steps_per_second"])
            steady[place].add(steady_rate(ours), theirs["steps_per_second"])
            process[place].add(our_seconds, their_seconds)
    return [*whole, *steady, *process]


def cartpole_475(measure: Measurer) -> list[Row]:
    """From shell command to a mean return of 475 on CartPole-v1, imports and compilation included.

    The bare command is run twice: the second run finds the compiled program of the first, as it would for a user.
    """
    variants = ("same settings", "bare command, first time", "bare command, again")
    seconds = {one: rows_of("cartpole-475", f"seconds, {one}", {"sb3": 0.18, "sbx": 0.18}, False) for one in variants}
    steps = {one: rows_of("cartpole-475", f"steps, {one}", None, False) for one in variants}
    for seed in measure.rounds(5):
        seeds = ["--seed", str(seed)]
        stop = ["--stop-steps", "100000", "--stop-reward", "475", "--stop-window", "20"]
        ours = [measure.fever("train", "CartPole-v1", *seeds, *stop, *ZOO_CARTPOLE.split())]
        cache = measure.folder / f"cache-{seed}"
        ours += [measure.fever("train", "CartPole-v1", *seeds, cache=cache) for _ in range(2)]
        for place, library in enumerate(LIBRARIES):
            target = ["--steps", "100000", "--target", "475", "--window", "20"]
            theirs, their_seconds = measure.sb3("cartpole", *seeds, *target, library=library)
            for variant, (summary, spent) in zip(variants, ours, strict=True):
                reached = summary["stop_reason"] == "reward"
                seconds[variant][place].add(goal(spent, reached), goal(their_seconds, theirs["reached"]))
                steps[variant][place].add(goal(summary["steps"], reached), goal(theirs["steps"], theirs["reached"]))
    return [row for variant in variants for row in (*seconds[variant], *steps[variant])]


def halfcheetah(measure: Measurer) -> list[Row]:
    """HalfCheetah-v5 at stable-baselines3's defaults: speed, and the last policy's deterministic return."""
    steps = str(measure.halfcheetah_steps)
    speed = rows_of("halfcheetah", "steps/s, whole run", {"sb3": 6.0, "sbx": 6.0})
    steady = rows_of("halfcheetah", "steps/s, fever without 1st iteration")
    score = rows_of("halfcheetah", f"return after {measure.halfcheetah_steps:,} steps", {"sb3": 1.0})
    for seed in measure.rounds(3):
        options = ["--envs", "1", "--stop-steps", steps, "--seed", str(seed)]
        ours, _ = measure.fever("train", "HalfCheetah-v5", "--no-preset", *options, *SB3_DEFAULTS.split())
        episodes = ["--checkpoint", "last", "--episodes", str(EVALUATION_EPISODES)]
        scores = None if measure.quick else measure.fever("eval", ours["run"], *episodes)[0]
        for place, library in enumerate(LIBRARIES):
            theirs, _ = measure.sb3("halfcheetah", "--steps", steps, "--seed", str(seed), library=library)
            speed[place].add(ours["steps_per_second"], theirs["steps_per_second"])
            steady[place].add(steady_rate(ours), theirs["steps_per_second"])
            if scores is not None:
                score[place].add(scores["return_mean"], theirs["return_eval"])
    return [*speed, *steady] if measure.quick else [*speed, *steady, *score]


def overlap(measure: Measurer) -> list[Row]:
    """PPO that samples while it learns against PPO that does so in turns, both in one process on two cores."""
    rows = []
    for env, envs, steps, settings in (
        ("CartPole-v1", "8", 100_000, ZOO_CARTPOLE), ("HalfCheetah-v5", "1", 60_000, SB3_DEFAULTS)
    ):  # fmt: skip
        row = Row("overlap", f"steps/s, {env}, after 1st iteration", None, reference_name="in turns")
        options = ["--no-preset", "--envs", envs, "--stop-steps", str(steps // 3 if measure.quick else steps)]
        for seed in measure.rounds(3):
            command = ["train", env, *options, "--seed", str(seed), *settings.split()]
            both, _ = measure.fever(*command, "overlap=true", cores=2)
            turns, _ = measure.fever(*command, cores=2)
            row.add(steady_rate(both), steady_rate(turns))
        rows.append(row)
    return rows


def update_rates(summary: dict) -> tuple[float, float]:
    """Gradient steps per second of a run that learns from replay: of the whole run, and without what comes before its
    first gradient step, when it compiles."""
    rows = metrics_of(summary)
    begun = next(row["seconds"] for row in rows if row["updates"])
    return sum(row["updates"] for row in rows) / summary["seconds"], rate_after(rows, begun)[1]


def dqn_speed(measure: Measurer) -> list[Row]:
    """DQN on CartPole-v1 at rl-zoo's settings for 20,000 steps: gradient steps per second of training."""
    whole = rows_of("dqn-speed", "gradient steps/s, whole run", {"sb3": 4.0, "sbx": 2.2})
    steady = rows_of("dqn-speed", "gradient steps/s, fever compiled")
    process = rows_of("dqn-speed", "seconds, whole process", more_is_better=False)
    for seed in measure.rounds(3):
        options = ["--algo", "dqn", "--envs", "1", "--stop-steps", "20000", "--seed", str(seed)]
        ours, our_seconds = measure.fever("train", "CartPole-v1", *options, *ZOO_DQN.split())
        rate, compiled = update_rates(ours)
        for place, library in enumerate(LIBRARIES):
            theirs, their_seconds = measure.sb3("dqn", "--steps", "20000", "--seed", str(seed), library=library)
            whole[place].add(rate, theirs["updates_per_second"])
            steady[place].add(compiled, theirs["updates_per_second"])
            process[place].add(our_seconds, their_seconds)
    return [*whole, *steady, *process]


def sac_speed(measure: Measurer) -> list[Row]:
    """SAC on Pendulum-v1, a gradient step for each step, with one environment and with eight: gradient steps per
    second of training."""
    rows = []
    for envs in ("1", "8"):
        whole = rows_of("sac-speed", f"gradient steps/s, {envs} env, whole run", {"sbx": 1.2})
        steady = rows_of("sac-speed", f"gradient steps/s, {envs} env, fever compiled")
        rows += [*whole, *steady]
        steps = str(SAC_STEPS // 3 if measure.quick else SAC_STEPS)
        for seed in measure.rounds(3):
            options = ["--algo", "sac", "--envs", envs, "--stop-steps", steps, "--seed", str(seed)]
            ours, _ = measure.fever("train", "Pendulum-v1", "--no-preset", *options, *ZOO_SAC.split())
            rate, compiled = update_rates(ours)
            for place, library in enumerate(LIBRARIES):
                words = ["--steps", steps, "--envs", envs, "--seed", str(seed)]
                theirs, _ = measure.sb3("sac", *words, library=library)
                whole[place].add(rate, theirs["updates_per_second"])
                steady[place].add(compiled, theirs["updates_per_second"])
    return rows
