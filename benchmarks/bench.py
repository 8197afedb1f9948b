"""The benchmarks: fever against stable-baselines3 and SBX, by turns, each measurement in a process of its own.

    .venv/bin/python benchmarks/bench.py --sb3 .venv-bench/bin/python [--only NAME...] [--rounds N] [--quick]

Both sides get the same hyperparameters, the same cores, as many threads as cores, and no GPU. Each run of fever pays
for its own compilation. Measure on an idle machine: on a busy one torch's threads wait for one another, which flatters
fever. stable-baselines3 gains little from a second thread with small networks; `--threads 1` gives both sides one core.

Replay buffers are compared with cpprb's and tianshou's, Ape-X with the figures of its paper and with linear growth.

A round is one seed. The table at the end shows medians over the rounds, where a wanted bar is met or not, and last
where fever loses. A bar that is not met is no error: the exit code is 1 only if something could not be measured.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from actor_critics import actor_critic_step
from custom_network import custom_network
from measuring import CORES, Measurer, Row, metrics_of, print_table, rate_after, steady_rate
from searching import rllib, tune
from training_speed import cartpole_475, cartpole_speed, dqn_speed, halfcheetah, overlap, sac_speed

MEMORY_LIMIT = 150.0  # megabytes

SB3_TRPO = (  # sb3-contrib's defaults; 640 steps of 8 environments are 5,120
    "steps=640 max_kl=0.01 cg_iterations=15 cg_damping=0.1 line_search_steps=10 line_search_shrink=0.8 accept_ratio=0 "
    "value_epochs=10 value_minibatch=128 value_learning_rate=1e-3 gamma=0.99 gae_lambda=0.95 hidden=[64,64] "
    "normalize_observations=false normalize_rewards=false"
)

CYCLE_LIMIT, ADD_LIMIT = 0.5, 0.1  # milliseconds
PAPER_TRANSITIONS, PAPER_BATCHES = 12_500, 19  # per second: Horgan et al. 2018, 360 actors and one GPU
PAPER_RATIO = 0.78  # transitions learned from for each one added: 19 * 512 / 12,500
APEX_WARM_UP = 5.0  # seconds that are left out
WAIT = 0.01  # seconds that a step of benchmarks.environments:Waiting takes
EXPLORE_STEPS = 50  # of an explorer's call


def workers(measure: Measurer) -> list[Row]:
    """An environment of 1 ms of CPU per step: 16 environments in two sampler processes against none."""
    if len(CORES) < 2:
        raise RuntimeError("two workers need two cores")
    row = Row("workers", "steps/s, 2 workers, after 1st iteration", 1.85, reference_name="0 workers")
    options = ["--stop-steps", "8000" if measure.quick else "20000"]
    for seed in measure.rounds(3):
        command = ["train", "benchmarks.environments:Busy", *options, "--seed", str(seed)]
        two, _ = measure.fever(*command, "--workers", "2", "--envs", "16", cores=2)
        none, _ = measure.fever(*command, "--workers", "0", "--envs", "16", cores=2)
        row.add(steady_rate(two), steady_rate(none))
    return [row]


def cnn_step(measure: Measurer) -> list[Row]:
    """One gradient step of PPO with the Nature CNN on 256 frames, on the CPU."""
    row = Row("cnn-step", "milliseconds", 1.0, more_is_better=False)
    repeats = "3" if measure.quick else "8"
    for _ in measure.rounds(3):
        ours = measure.fever_side("cnn-step", "--repeats", repeats)
        theirs, _ = measure.sb3("cnn-step", "--repeats", repeats)
        row.add(ours["milliseconds"], theirs["milliseconds"])
    return [row]


def sampler_memory(measure: Measurer) -> list[Row]:
    """Peak resident memory of a process that samples CartPole-v1."""
    row = Row("sampler-memory", "megabytes at the peak", 1.0, more_is_better=False, reference_name="limit")
    for _ in measure.rounds(1):
        row.add(measure.fever_side("sampler-memory")["megabytes"], MEMORY_LIMIT)
    return [row]


def sum_tree(measure: Measurer) -> list[Row]:
    """Replay of 1,000,000 transitions with priorities, in batches of 512: the tree alone, and the whole buffer."""
    cycle, add = "ms, tree: sample + update of 512 of 1M", "ms, tree: add of 512"
    buffer_cycle, buffer_add = "ms, buffer: sample + update of 512 of 1M", "ms, buffer: add of 512"

    def row(figure: str, reference: str, wanted: float | None = None) -> Row:
        return Row("sum-tree", figure, wanted, more_is_better=False, reference_name=reference)

    limits = row(cycle, "limit", 1.0), row(add, "limit", 1.0)
    against = {  # library -> rows and the field that both sides measure; cpprb does not show its tree
        "cpprb": [
            (row(cycle, "cpprb's buffer"), "cycle_milliseconds"),
            (row(buffer_cycle, "cpprb"), "buffer_cycle_milliseconds"),
            (row(buffer_add, "cpprb"), "add_milliseconds"),
        ],
        "tianshou": [
            (row(cycle, "tianshou"), "cycle_milliseconds"),
            (row(add, "tianshou"), "tree_add_milliseconds"),
            (row(buffer_cycle, "tianshou"), "buffer_cycle_milliseconds"),
            (row(buffer_add, "tianshou"), "add_milliseconds"),
        ],
    }
    for seed in measure.rounds(3):
        options = ["--seed", str(seed), "--repeats", "100" if measure.quick else "500"]
        ours = measure.replay("fever", *options)
        limits[0].add(ours["cycle_milliseconds"], CYCLE_LIMIT)
        limits[1].add(ours["tree_add_milliseconds"], ADD_LIMIT)
        for library, rows in against.items():
            theirs = measure.replay(library, *options)
            for each, field in rows:
                each.add(ours[field], theirs[field])
    return [*limits, *(each for rows in against.values() for each, _ in rows)]


def apex_throughput(measure: Measurer) -> list[Row]:
    """Ape-X on CartPole-v1, two explorers of 16 environments, one shard: transitions in and batches of 512 out."""
    incoming = Row("apex-throughput", "transitions/s into the shard", 1.0, reference_name="paper")
    outgoing = Row("apex-throughput", "batches of 512/s out of it", 1.0, reference_name="paper")
    options = ["--workers", "2", "--envs", "32", "--stop-time", "10s" if measure.quick else "30s"]
    settings = ["batch=512", "updates=1", "replay_shards=1", f"replay_ratio={PAPER_RATIO}"]
    for seed in measure.rounds(3):
        ours, _ = measure.fever("train", "CartPole-v1", "--algo", "apex", *options, "--seed", str(seed), *settings)
        transitions, batches = rate_after(metrics_of(ours), APEX_WARM_UP)  # every step becomes one transition
        incoming.add(transitions, PAPER_TRANSITIONS)
        outgoing.add(batches, PAPER_BATCHES)
    return [incoming, outgoing]


def apex_scaling(measure: Measurer) -> list[Row]:
    """Ape-X with more and more explorers of one environment that only waits 10 ms a step, and a light learner."""
    counts, seconds = ((2, 8), 10) if measure.quick else ((2, 8, 32, 64), 30)
    figures = {count: f"transitions/s, {count} explorers" for count in counts}
    rows = {count: Row("apex-scaling", figures[count], 0.9, reference_name="linear") for count in counts}
    options = ["--algo", "apex", "--stop-time", f"{seconds}s"]
    light = ["hidden=[16]", "batch=32", "replay_ratio=0.1", f"explore_steps={EXPLORE_STEPS}", "save_replay=false"]
    for seed in measure.rounds(1):
        for count, row in rows.items():
            scale = ["--workers", str(count), "--envs", str(count), "--seed", str(seed)]
            settings = [*light, f"report_steps={count * EXPLORE_STEPS}"]  # a row of metrics for each explorer's call
            ours, _ = measure.fever("train", "benchmarks.environments:Waiting", *options, *scale, *settings)
            row.add(rate_after(metrics_of(ours), seconds / 2)[0], count / WAIT)
    return list(rows.values())


def trpo_pong(measure: Measurer) -> list[Row]:
    """TRPO on Pong's RAM, 5,120 steps an iteration: against sb3-contrib, and 8 environments in two workers."""
    serial = Row("trpo-pong", "seconds an iteration, fever compiled", 0.5, more_is_better=False, reference_name="sb3")
    two = Row("trpo-pong", "steps/s, 2 workers, after 1st iteration", 1.8, reference_name="0 workers")
    iterations = 3 if measure.quick else 8
    command = ["train", "ALE/Pong-v5", "--no-preset", "--algo", "trpo", "--env-kwargs", '{"obs_type": "ram"}']
    command += SB3_TRPO.split()
    for seed in measure.rounds(3):
        options = ["--stop-iterations", str(iterations), "--seed", str(seed)]
        none, _ = measure.fever(*command, *options, "--envs", "8")
        theirs, _ = measure.sb3("trpo", "--iterations", str(iterations), "--seed", str(seed))
        parallel, _ = measure.fever(*command, *options, "--envs", "8", "--workers", "2", cores=2)
        serial.add(5120 / steady_rate(none), theirs["seconds_per_iteration"])
        two.add(steady_rate(parallel), steady_rate(none))
    return [serial, two]


def waiting(measure: Measurer) -> list[Row]:
    """TRPO and IMPALA with workers of one environment that only waits 10 ms a step: many against one."""
    count = 8 if measure.quick else 64
    light = {
        "trpo": ["steps=1000", "value_epochs=1", "value_minibatch=1024", "cg_iterations=5"],
        "impala": ["steps=400", f"fragments={count // 2}", "minibatches=1"],
    }
    rows = []
    for algo, settings in light.items():
        row = Row("waiting", f"steps/s, {algo}, {count} workers", 58 / 64, reference_name=f"{count} x one")
        rows.append(row)
        command = ["train", "benchmarks.environments:Waiting", "--algo", algo, "hidden=[16]", *settings]
        alone = ["fragments=1" if word.startswith("fragments") else word for word in command]
        for seed in measure.rounds(1):
            options = ["--seed", str(seed), "--stop-time", "30s" if measure.quick else "45s"]
            many, _ = measure.fever(*command, *options, "--workers", str(count), "--envs", str(count))
            one, _ = measure.fever(*alone, *options, "--workers", "1", "--envs", "1")
            row.add(rate_after(metrics_of(many), 8.0)[0], count * rate_after(metrics_of(one), 8.0)[0])
    return rows


def uneven(measure: Measurer) -> list[Row]:
    """Eight workers whose environments wait 5 ms a step, the first one of them 50: what is left of the throughput."""
    workers, share = 8, 1 - 1 / 8
    rows = []
    for algo, settings in {"impala": ["steps=100", "fragments=2"], "ppo": ["steps=100", "minibatch=100"]}.items():
        wanted = share if algo == "impala" else None
        row = Row("uneven", f"steps/s, {algo}, one worker 10x slower", wanted, reference_name="all equal")
        rows.append(row)
        command = ["train", "benchmarks.environments:Uneven", "--algo", algo, "--workers", str(workers)]
        command += ["--envs", str(workers)]
        for seed in measure.rounds(1):
            options = ["--seed", str(seed), "--stop-time", "25s", "hidden=[16]", *settings]
            rates = []
            for slower in (10.0, 1.0):
                arguments = json.dumps({"milliseconds": 5.0, "slower": slower})
                ours, _ = measure.fever(*command, "--env-kwargs", arguments, *options)
                rates.append(rate_after(metrics_of(ours), 8.0)[0])
            row.add(*rates)
    return rows


def machines(measure: Measurer) -> list[Row]:
    """Jobs of a real Slurm on fake machines of this one: seconds to connect and to stop; samplers that only wait."""
    from machines import Machines

    connect = Row("machines", "s from the job's start until 3 machines are connected", 1.0, False, "12 s")
    stop = Row("machines", "s from the driver's end until nothing is left", 1.0, False, "5 s")
    eight = Row("machines", "s until 8 machines are connected", 3.0, False, "3 machines")
    samples = Row("machines", "steps/s, 3 machines x 2 workers that wait", 5.5 / 6, reference_name="6 x one worker")
    settings = ["benchmarks.environments:Waiting", "--algo", "impala", "hidden=[16]", "steps=100"]
    for seed in measure.rounds(2):
        options = ["--seed", str(seed), "minibatches=1"]
        with Machines(measure.folder / f"three{seed}", 3) as three:
            run, spent = three.job(
                3, *settings, *options, "fragments=3", "--workers", "6", "--envs", "6", "--stop-time", "20s"
            )
            alone, _ = three.job(
                1, *settings, *options, "fragments=1", "--workers", "1", "--envs", "1", "--stop-time", "20s"
            )
        with Machines(measure.folder / f"eight{seed}", 8) as many:
            _, wide = many.job(8, *settings, *options, "fragments=3", "--envs", "1", "--stop-time", "5s")
        connect.add(spent["start"] + spent["connect"], 12.0)
        stop.add(spent["leave"], 5.0)
        eight.add(wide["start"] + wide["connect"], spent["start"] + spent["connect"])
        samples.add(rate_after(metrics_of(run), 8.0)[0], 6 * rate_after(metrics_of(alone), 8.0)[0])
    return [connect, stop, eight, samples]


def hosts(measure: Measurer) -> list[Row]:
    """A cluster of hosts that ssh reaches: up, down, attach, fetch, and what the live panel costs."""
    from hosts import Hosts

    up = Row("hosts", "s, fever up on 3 hosts, environment present", 1.0, False, "15 s")
    again = Row("hosts", "s, fever up again", None, False, "15 s")
    attach = Row("hosts", "s, fever attach until the live panel shows", 1.0, False, "3 s")
    fetch = Row("hosts", "MB moved to fetch 100 MB", 1.01, False, "100 MB")
    down = Row("hosts", "s, fever down", 1.0, False, "6 s")
    panel = Row("hosts", "steps/s on the head, live panel here", 0.95, reference_name="detached")
    for seed in measure.rounds(2):
        with Hosts(measure.folder / f"hosts{seed}") as cluster:
            up.add(cluster.fever("up", "lab.yaml")[1], 15.0)
            again.add(cluster.fever("up", "lab.yaml")[1], 15.0)
            order = (True, False) if seed % 2 else (False, True)
            rates = {shown: cluster.train(f"shown-{shown}", 40, shown)["steps_per_second"] for shown in order}
            panel.add(rates[True], rates[False])
            cluster.fever("train", "CartPole-v1", "--on", "lab.yaml", "--name", "long", "--stop-time", "5m", "--detach")
            while not (found := list(cluster.there.glob("*/long/metrics.jsonl"))):
                time.sleep(0.2)
            attach.add(cluster.seconds_until_shown("steps/s", "attach", "long"), 3.0)
            cluster.fever("stop", "long")
            found[0].with_name("large.bin").write_bytes(os.urandom(100_000_000))
            fetch.add(cluster.fetch("long") + cluster.fetch("long"), 100.0)
            down.add(cluster.fever("down", "lab.yaml")[1], 6.0)
    return [up, again, attach, fetch, down, panel]


BENCHMARKS: dict[str, Callable[[Measurer], list[Row]]] = {
    "cartpole-speed": cartpole_speed,
    "overlap": overlap,
    "cartpole-475": cartpole_475,
    "halfcheetah": halfcheetah,
    "workers": workers,
    "cnn-step": cnn_step,
    "actor-critic-step": actor_critic_step,
    "custom-network": custom_network,
    "sampler-memory": sampler_memory,
    "sum-tree": sum_tree,
    "dqn-speed": dqn_speed,
    "sac-speed": sac_speed,
    "apex-throughput": apex_throughput,
    "apex-scaling": apex_scaling,
    "trpo-pong": trpo_pong,
    "waiting": waiting,
    "uneven": uneven,
    "machines": machines,
    "hosts": hosts,
    "rllib": rllib,
    "tune": tune,
}


def main() -> None:
    """Measure what is asked for and print the table."""
    parser = argparse.ArgumentParser(description="fever against other libraries, by turns.")
    parser.add_argument("--sb3", required=True, help="Python of the virtualenv with requirements.txt")
    parser.add_argument("--only", nargs="+", choices=BENCHMARKS, default=list(BENCHMARKS), metavar="NAME",
                        help=f"of: {', '.join(BENCHMARKS)}")  # fmt: skip
    parser.add_argument("--rounds", type=int, help="rounds of each benchmark; default: its own number, 1 to 5")
    parser.add_argument(
        "--quick", action="store_true", help="one round, fewer steps, no return of HalfCheetah, 8 explorers at most"
    )
    parser.add_argument("--steps", type=int, help="of HalfCheetah; default 200000, quick 20000")
    parser.add_argument("--threads", type=int, default=len(CORES), choices=range(1, len(CORES) + 1),
                        help="cores and threads of both sides; default: all cores")  # fmt: skip
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all measurements there")
    arguments = parser.parse_args()
    if not Path(arguments.sb3).is_file():
        parser.error(f"there is no {arguments.sb3}")

    load = os.getloadavg()[0]
    print(f"{arguments.threads} thread(s) on each side, {len(CORES)} cores, load average {load:.2f} at the start")
    rows: list[Row] = []
    failures: dict[str, str] = {}
    with tempfile.TemporaryDirectory(prefix="fever-bench-") as folder:
        measure = Measurer(arguments, Path(folder))
        for name in arguments.only:
            print(f"{name}: {BENCHMARKS[name].__doc__}", file=sys.stderr)
            try:
                rows += BENCHMARKS[name](measure)
            except (RuntimeError, subprocess.TimeoutExpired, OSError, ValueError, KeyError) as error:
                failures[name] = f"{type(error).__name__}: {error}"
    if rows:
        print_table(rows)
    for name, reason in failures.items():
        print(f"{name} could not be measured: {reason}")
    if arguments.json:
        facts = {"threads": arguments.threads, "cores": len(CORES), "load": load, "quick": arguments.quick}
        document = {**facts, "rows": [row.as_json() for row in rows], "failures": failures}
        arguments.json.write_text(json.dumps(document, indent=1) + "\n")
    sys.exit(1 if failures else 0)


if __name__ == "__main__":
    main()
