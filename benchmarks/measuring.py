"""What the benchmarks are made of: rows of the table, the processes that are measured, and the table itself."""

import argparse
import json
import math
import os
import signal
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

HERE = Path(__file__).resolve().parent
TIMEOUT = 1800  # seconds, for one process
CORES = sorted(os.sched_getaffinity(0))


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

    def run(self, command: list[str], cores: int | None = None, cache: Path | None = None) -> tuple[dict, float]:
        """Run one process; its last line of output as JSON, and its wall time in seconds seen from outside. It compiles
        everything anew, unless it has a cache folder."""
        threads = str(self.threads)
        environment = {
            **os.environ,
            "PYTHONPATH": str(HERE.parent),
            "FEVER_RUNS": str(self.folder / "runs"),
            "JAX_ENABLE_COMPILATION_CACHE": "true" if cache else "false",
            "XDG_CACHE_HOME": str(cache or self.folder / "cache"),
            "JAX_PLATFORMS": "cpu",
            "OMP_NUM_THREADS": threads,
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

    def fever(self, *words: str, cores: int | None = None, cache: Path | None = None) -> tuple[dict, float]:
        """A command of fever's command line."""
        return self.run([str(Path(sys.executable).with_name("fever")), *words, "--json"], cores, cache)

    def fever_side(self, *words: str) -> dict:
        """A measurement of fever_side.py."""
        return self.run([sys.executable, str(HERE / "fever_side.py"), *words])[0]

    def sb3(self, *words: str, library: str = "sb3") -> tuple[dict, float]:
        """A measurement of sb3_side.py, with this one of its libraries."""
        options = ["--threads", str(self.threads), "--library", library]
        return self.run([self.sb3_python, str(HERE / "sb3_side.py"), *words, *options])

    def replay(self, library: str, *words: str) -> dict:
        """A measurement of replay_side.py: fever's here, the other libraries' where stable-baselines3 is."""
        python = sys.executable if library == "fever" else self.sb3_python
        return self.run([python, str(HERE / "replay_side.py"), library, *words])[0]


def metrics_of(summary: dict) -> list[dict]:
    """The rows that a run of fever wrote, one for each iteration."""
    return [json.loads(line) for line in (Path(summary["run"]) / "metrics.jsonl").read_text().splitlines()]


def rate_after(rows: list[dict], since: float) -> tuple[float, float]:
    """Environment steps and gradient steps per second from the first row on that ends `since` seconds or later."""
    rows = [row for row in rows if row["seconds"] >= since]
    if len(rows) < 2:
        raise RuntimeError(f"the run wrote fewer than two rows of metrics after {since:.1f} s")
    seconds = rows[-1]["seconds"] - rows[0]["seconds"]
    return (rows[-1]["steps"] - rows[0]["steps"]) / seconds, sum(row.get("updates", 0) for row in rows[1:]) / seconds


def steady_rate(summary: dict) -> float:
    """Steps per second of a run of fever without its first iteration, in which it compiles."""
    return rate_after(metrics_of(summary), 0.0)[0]


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
