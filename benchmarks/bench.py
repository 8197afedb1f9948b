"""The benchmarks: fever against stable-baselines3, by turns, each measurement in a process of its own.

    .venv/bin/python benchmarks/bench.py --sb3 .venv-bench/bin/python [--only NAME...] [--rounds N] [--quick]

Both sides get the same hyperparameters, the same cores, as many threads as cores, and no GPU. Each run of fever pays
for its own compilation. Measure on an idle machine: on a busy one torch's threads wait for one another, which flatters
fever. stable-baselines3 gains little from a second thread with small networks; `--threads 1` gives both sides one core.

A round is one seed. The table at the end shows medians over the rounds, where a wanted bar is met or not, and last
where fever loses. A bar that is not met is no error: the exit code is 1 only if something could not be measured.
"""

import argparse
import json
import math
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

HERE = Path(__file__).resolve().parent
TIMEOUT = 1800  # seconds, for one process
CORES = sorted(os.sched_getaffinity(0))
MEMORY_LIMIT = 150.0  # megabytes
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


@dataclass
class Row:
    """One figure of both sides, measured once per round. A time to a goal that was never reached is infinite."""

    benchmark: str
    figure: str
    wanted: float | None  # bar for fever's median divided by the reference's; None: reported without a bar
    more_is_better: bool = True
    reference_name: str = "sb3"
    fever: list[float] = field(default_factory=list)
    reference: list[float] = field(default_factory=list)

    def add(self, fever: float, reference: float) -> None:
        """Note one round."""
        self.fever.append(fever)
        self.reference.append(reference)

    @property
    def medians(self) -> tuple[float, float]:
        """Of fever and of the reference."""
        return statistics.median(self.fever), statistics.median(self.reference)

    @property
    def ratio(self) -> float | None:
        """fever's median divided by the reference's, where that means anything."""
        fever, reference = self.medians
        return fever / reference if math.isfinite(fever) and 0 < reference < math.inf and fever >= 0 else None

    def reaches(self, wanted: float) -> bool:
        """Whether fever's median is at least (or at most) this many times the reference's."""
        fever, reference = self.medians
        if self.more_is_better:
            return fever >= wanted * reference
        return math.isfinite(fever) and fever <= wanted * reference

    @property
    def verdict(self) -> str:
        """Against the bar, or plainly against the reference if there is none."""
        if self.wanted is None:
            return "ahead" if self.reaches(1.0) else "behind"
        return "met" if self.reaches(self.wanted) else "NOT met"

    def cells(self) -> list[str]:
        """This row of the printed table."""
        fever, reference = map(number, self.medians)
        bar = "-" if self.wanted is None else f"{'>=' if self.more_is_better else '<='} {self.wanted:.2f}x"
        ratio = "-" if self.ratio is None else f"{self.ratio:.2f}x"
        rounds = str(len(self.fever))
        return [self.benchmark, self.figure, rounds, fever, reference, self.reference_name, ratio, bar, self.verdict]

    def as_json(self) -> dict[str, object]:
        """Everything, with null for what is infinite."""
        fever, reference = self.medians
        keys = ("benchmark", "figure", "more_is_better", "reference_name", "wanted")
        medians = {"fever_median": finite(fever), "reference_median": finite(reference)}
        measured = {name: [finite(value) for value in getattr(self, name)] for name in ("fever", "reference")}
        described = {key: getattr(self, key) for key in keys}
        return {**described, **medians, "ratio": self.ratio, "verdict": self.verdict, **measured}


class Measurer:
    """Starts the processes of both sides, one at a time, on the same cores."""

    def __init__(self, arguments: argparse.Namespace, folder: Path) -> None:
        self.sb3_python = str(Path(arguments.sb3).absolute())
        self.quick, self.threads, self.rounds_asked = arguments.quick, arguments.threads, arguments.rounds
        self.halfcheetah_steps = arguments.steps or (20_000 if arguments.quick else 200_000)
        self.folder = folder

    def rounds(self, default: int) -> range:
        """The seeds to measure with."""
        return range(self.rounds_asked or (1 if self.quick else default))

    def run(self, command: list[str], cores: int | None = None) -> tuple[dict, float]:
        """Run one process; its last line of output as JSON, and its wall time in seconds seen from outside."""
        threads = str(self.threads)
        environment = {
            **os.environ,
            "PYTHONPATH": str(HERE.parent),
            "FEVER_RUNS": str(self.folder / "runs"),
            "JAX_ENABLE_COMPILATION_CACHE": "false",
            "JAX_PLATFORMS": "cpu",
            "OMP_NUM_THREADS": threads,
            "OPENBLAS_NUM_THREADS": threads,
        }
        os.sched_setaffinity(0, CORES[: cores or self.threads])  # inherited
        began = time.perf_counter()
        process = subprocess.Popen(
            command, cwd=self.folder, env=environment, text=True, start_new_session=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip
        try:
            output, errors = process.communicate(timeout=TIMEOUT)
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            raise
        seconds = time.perf_counter() - began
        if process.returncode:
            raise RuntimeError(f"{' '.join(command)} failed: {' '.join(errors.split()[-40:])}")
        print(f"  {seconds:7.1f} s  {' '.join([Path(command[0]).name, *command[1:]])[:100]}", file=sys.stderr)
        return json.loads(output.splitlines()[-1]), seconds

    def fever(self, *words: str, cores: int | None = None) -> tuple[dict, float]:
        """A command of fever's command line."""
        return self.run([str(Path(sys.executable).with_name("fever")), *words, "--json"], cores)

    def fever_side(self, *words: str) -> dict:
        """A measurement of fever_side.py."""
        return self.run([sys.executable, str(HERE / "fever_side.py"), *words])[0]

    def sb3(self, *words: str) -> tuple[dict, float]:
        """A measurement of sb3_side.py."""
        return self.run([self.sb3_python, str(HERE / "sb3_side.py"), *words, "--threads", str(self.threads)])


def steady_rate(summary: dict) -> float:
    """Steps per second of a run of fever without its first iteration, in which it compiles."""
    lines = (Path(summary["run"]) / "metrics.jsonl").read_text().splitlines()
    first, last = json.loads(lines[0]), json.loads(lines[-1])
    return (last["steps"] - first["steps"]) / (last["seconds"] - first["seconds"])


def cartpole_speed(measure: Measurer) -> list[Row]:
    """CartPole-v1 at rl-zoo's settings for 100,000 steps: steps per second of training."""
    whole = Row("cartpole-speed", "steps/s, whole run", 5.0)
    steady = Row("cartpole-speed", "steps/s, fever without 1st iteration", None)
    process = Row("cartpole-speed", "seconds, whole process", None, more_is_better=False)
    for seed in measure.rounds(3):
        options = ["--stop-steps", "100000", "--seed", str(seed)]
        ours, our_seconds = measure.fever("train", "CartPole-v1", *options, *ZOO_CARTPOLE.split())
        theirs, their_seconds = measure.sb3("cartpole", "--steps", "100000", "--seed", str(seed))
        whole.add(ours["steps_per_second"], theirs["steps_per_second"])
        steady.add(steady_rate(ours), theirs["steps_per_second"])
        process.add(our_seconds, their_seconds)
    return [whole, steady, process]


def cartpole_475(measure: Measurer) -> list[Row]:
    """From shell command to a mean return of 475 on CartPole-v1, imports and compilation included."""
    rows = {}
    for variant in ("same settings", "fever's defaults"):
        rows[variant] = (
            Row("cartpole-475", f"seconds, {variant}", 1 / 3, more_is_better=False),
            Row("cartpole-475", f"steps, {variant}", None, more_is_better=False),
        )
    for seed in measure.rounds(5):
        seeds = ["--seed", str(seed)]
        stop = ["--stop-steps", "100000", "--stop-reward", "475", "--stop-window", "20"]
        ours = measure.fever("train", "CartPole-v1", *seeds, *stop, *ZOO_CARTPOLE.split())
        target = ["--steps", "100000", "--target", "475", "--window", "20"]
        theirs, their_seconds = measure.sb3("cartpole", *seeds, *target)
        defaults = measure.fever("train", "CartPole-v1", *seeds)
        for (summary, seconds), (time_row, steps_row) in zip((ours, defaults), rows.values(), strict=True):
            reached = summary["stop_reason"] == "reward"
            time_row.add(goal(seconds, reached), goal(their_seconds, theirs["reached"]))
            steps_row.add(goal(summary["steps"], reached), goal(theirs["steps"], theirs["reached"]))
    return [row for pair in rows.values() for row in pair]


def halfcheetah(measure: Measurer) -> list[Row]:
    """HalfCheetah-v5 at stable-baselines3's defaults: speed, and the last policy's deterministic return."""
    steps = str(measure.halfcheetah_steps)
    speed = Row("halfcheetah", "steps/s, whole run", 4.0)
    steady = Row("halfcheetah", "steps/s, fever without 1st iteration", None)
    score = Row("halfcheetah", f"return after {measure.halfcheetah_steps:,} steps", 1.0)
    for seed in measure.rounds(3):
        options = ["--envs", "1", "--stop-steps", steps, "--seed", str(seed)]
        ours, _ = measure.fever("train", "HalfCheetah-v5", *options, *SB3_DEFAULTS.split())
        theirs, _ = measure.sb3("halfcheetah", "--steps", steps, "--seed", str(seed))
        speed.add(ours["steps_per_second"], theirs["steps_per_second"])
        steady.add(steady_rate(ours), theirs["steps_per_second"])
        if not measure.quick:
            episodes = ["--checkpoint", "last", "--episodes", str(EVALUATION_EPISODES)]
            scores, _ = measure.fever("eval", ours["run"], *episodes)
            score.add(scores["return_mean"], theirs["return_eval"])
    return [speed, steady] if measure.quick else [speed, steady, score]


def workers(measure: Measurer) -> list[Row]:
    """An environment of 1 ms of CPU per step: two sampler processes of 8 environments against none with 16."""
    if len(CORES) < 2:
        raise RuntimeError("two workers need two cores")
    row = Row("workers", "steps/s, 2 workers, after 1st iteration", 1.85, reference_name="0 workers")
    options = ["--stop-steps", "8000" if measure.quick else "20000"]
    for seed in measure.rounds(3):
        command = ["train", "benchmarks.environments:Busy", *options, "--seed", str(seed)]
        two, _ = measure.fever(*command, "--workers", "2", "--envs", "8", cores=2)
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


BENCHMARKS: dict[str, Callable[[Measurer], list[Row]]] = {
    "cartpole-speed": cartpole_speed,
    "cartpole-475": cartpole_475,
    "halfcheetah": halfcheetah,
    "workers": workers,
    "cnn-step": cnn_step,
    "sampler-memory": sampler_memory,
}


def goal(value: float, reached: bool) -> float:
    """What a goal took, infinite if it was not reached."""
    return value if reached else math.inf


def finite(value: float) -> float | None:
    """JSON has no infinity."""
    return value if math.isfinite(value) else None


def number(value: float) -> str:
    """For people, with four significant digits."""
    if not math.isfinite(value):
        return "never"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def print_table(rows: list[Row]) -> None:
    """The one table, and then the losses."""
    heads = ["benchmark", "figure", "rounds", "fever", "reference", "", "ratio", "wanted", "verdict"]
    cells = [heads, *(row.cells() for row in rows)]
    widths = [max(len(line[column]) for line in cells) for column in range(len(heads))]
    rights = (2, 3, 4, 6, 7)
    print()
    for line in cells:
        padded = (text.rjust if column in rights else text.ljust for column, text in enumerate(line))
        print("  ".join(pad(width) for pad, width in zip(padded, widths, strict=True)).rstrip())
    lost = [row for row in rows if row.verdict in ("NOT met", "behind")]
    print("\nwhere fever loses:" if lost else "\nfever loses nowhere in this table")
    for row in lost:
        print(f"  {row.benchmark}: {row.figure}: {' against '.join(map(number, row.medians))} ({row.verdict})")


def main() -> None:
    """Measure what is asked for and print the table."""
    parser = argparse.ArgumentParser(description="fever against stable-baselines3, by turns.")
    parser.add_argument("--sb3", required=True, help="Python of the virtualenv with stable-baselines3")
    parser.add_argument("--only", nargs="+", choices=BENCHMARKS, default=list(BENCHMARKS), metavar="NAME",
                        help=f"of: {', '.join(BENCHMARKS)}")  # fmt: skip
    parser.add_argument("--rounds", type=int, help="rounds of each benchmark; default: its own number, 1 to 5")
    parser.add_argument("--quick", action="store_true", help="one round, fewer steps, no return of HalfCheetah")
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
