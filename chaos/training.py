"""One training as its user runs it: `fever train`, its rows as they appear, and `fever resume` after it was killed."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from chaos import envs
from chaos.processes import MARK, Process, marked
from fever import layout
from fever.runs.run import Run

ROOT = Path(__file__).parents[1]
FEVER = [sys.executable, "-m", "fever"]
NAME = "run"
TARGET = 70.0  # mean return that every training must end with; random actions have about 20, the highest is 100
CHECKPOINT_SECONDS = 5
STEP_TIMEOUT, RESET_TIMEOUT = 4, 8  # seconds
WINDOW = 15.0  # seconds over which the rate before a fault is measured


@dataclass(frozen=True)
class Recipe:
    """How one algorithm is trained: so that rows come about twice a second, and the target within a minute."""

    algo: str
    workers: int
    settings: str = ""
    continuous: bool = False

    @property
    def label(self) -> str:
        return self.algo if self.workers else f"{self.algo}, one process"


class Timed(NamedTuple):
    """A row of metrics and when it was seen."""

    time: float
    row: dict[str, Any]


@dataclass
class Training:
    """A training in a folder of its own: run directory, temporary files, Ray's sessions and home, all below it."""

    recipe: Recipe
    folder: Path
    seed: int
    rows: list[Timed] = field(default_factory=list)
    resumes: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.mark = f"{self.folder.parent.name}-{self.folder.name}-"  # of all commands; each adds its number
        self.commands = 0
        self.control, self.runs = self.folder / "control", self.folder / "runs"
        for path in (self.folder / "t", self.folder / "home", self.runs):
            path.mkdir(parents=True, exist_ok=True)
        envs.make_folder(self.control)
        self.offset = 0
        self.log = self.folder / "output.txt"
        self.process: subprocess.Popen[bytes] | None = None
        self.reader: Reader | None = None

    @property
    def path(self) -> Path:
        """The run directory."""
        return self.runs / NAME

    def start(self) -> None:
        """`fever train`, which ends when the file `stop` is made."""
        self._run("train", *self.words(), "--runs", str(self.runs), "--name", NAME)

    def words(self) -> list[str]:
        """The words of `fever train` that do not say where the files go."""
        recipe = self.recipe
        kwargs = {"folder": str(self.control), "continuous": recipe.continuous}
        words = ["chaos.envs:Balance", "--algo", recipe.algo, "--workers", str(recipe.workers)]
        words += ["--envs", str(4 * max(1, recipe.workers))]
        words += ["--env-kwargs", json.dumps(kwargs), "--seed", str(self.seed), "--stop-time", "1h"]
        words += ["--checkpoint-every", f"{CHECKPOINT_SECONDS}s", *recipe.settings.split()]
        words += ["--callback", f"chaos.envs:StopFile={json.dumps({'folder': str(self.control)})}"]
        return [*words, "--step-timeout", str(STEP_TIMEOUT), "--reset-timeout", str(RESET_TIMEOUT)]

    def resume(self) -> None:
        """`fever resume` after the process has ended."""
        self.resumes.append(time.monotonic())
        self._run("resume", str(self.path))

    def _run(self, *words: str) -> None:
        temporary = str(self.folder / "t")
        self.commands += 1
        variables = {
            **os.environ, MARK: f"{self.mark}{self.commands}.", "PYTHONPATH": str(ROOT), "COLUMNS": "120",
            "TMPDIR": temporary, "RAY_TMPDIR": temporary, "HOME": str(self.folder / "home"),
        }  # fmt: skip
        read, write = os.pipe()
        self.reader = Reader(read, self.log)
        self.process = subprocess.Popen(
            [*FEVER, *words], cwd=self.folder, env=variables, stdin=subprocess.DEVNULL, stdout=write, stderr=write,
            start_new_session=True,  # the kernel hangs up on a group that is orphaned while a process is stopped
        )  # fmt: skip
        os.close(write)

    def alive(self) -> bool:
        """Whether the command that was started last still runs."""
        return self.process is not None and self.process.poll() is None

    def why_ended(self) -> str:
        """The exit code of a command that has ended, and the last line that it printed."""
        assert self.process is not None
        lines = self.log.read_text(errors="replace").strip().splitlines() if self.log.exists() else []
        return f"exit code {self.process.returncode}: {lines[-1].strip() if lines else 'no output'}"[:200]

    def kill(self) -> None:
        """Kill all processes of the training."""
        while found := marked(self.mark):
            for process in found:
                process.signal(9)
            time.sleep(0.05)
        if self.process is not None:
            self.process.wait(30)

    def processes(self, kind: str) -> list[Process]:
        """Living processes, of one of processes.KINDS, of the command that was started last."""
        return [process for process in marked(f"{self.mark}{self.commands}.") if process.kind == kind]

    def follow(self) -> None:
        """Read the rows that were added since the last time."""
        path = self.path / layout.METRICS
        try:
            with open(path, "rb") as file:
                if os.fstat(file.fileno()).st_size < self.offset:  # written anew, with fewer rows
                    self.offset = os.fstat(file.fileno()).st_size
                file.seek(self.offset)
                data = file.read()
        except OSError:
            return
        end = data.rfind(b"\n") + 1
        self.offset += end
        now = time.monotonic()
        for line in data[:end].splitlines():
            try:
                self.rows.append(Timed(now, json.loads(line)))
            except ValueError:  # cut by a kill
                continue

    def rows_since(self, moment: float) -> int:
        """The number of rows that were seen after a moment."""
        return sum(timed.time > moment for timed in self.rows)

    def score(self) -> float:
        """The mean return of the last row; not a number before there is one."""
        value = self.rows[-1].row.get("return_mean") if self.rows else None
        return float("nan") if value is None else float(value)

    def rate(self, moment: float) -> float:
        """Steps per second of wall time in the seconds before a moment, since the last resume; 0 if not known."""
        begin = max([moment - WINDOW, *(resume for resume in self.resumes if resume < moment)])
        seen = [timed for timed in self.rows if begin <= timed.time <= moment]
        if len(seen) < 4 or seen[-1].time - seen[0].time < 2:
            return 0.0
        return (seen[-1].row["steps"] - seen[0].row["steps"]) / (seen[-1].time - seen[0].time)

    def runs_evenly(self) -> bool:
        """Whether there is a rate, that of the last seconds."""
        return self.rate(time.monotonic()) > 0

    def has_checkpoint(self) -> bool:
        return any((self.path / layout.CHECKPOINTS).glob("[0-9]*/" + layout.MANIFEST))

    def run(self) -> Run:
        return Run(self.path)


class Reader:
    """Copies what a training prints into a file, until it is told to stop reading."""

    def __init__(self, descriptor: int, log: Path) -> None:
        self.descriptor, self.log = descriptor, log
        self.stop, self.wake = os.pipe()
        self.thread = threading.Thread(target=self._copy, daemon=True)
        self.thread.start()

    def _copy(self) -> None:
        with open(self.log, "ab") as file:
            while self.stop not in (ready := select.select([self.descriptor, self.stop], [], [])[0]):
                data = os.read(self.descriptor, 1 << 16) if ready else b""
                if not data:
                    break
                file.write(data)
                file.flush()
        os.close(self.descriptor)

    def close(self) -> None:
        """Close the pipe: whoever writes into it is told that nobody reads."""
        os.write(self.wake, b"x")
        self.thread.join(10)
