"""`python -m chaos`: train, break, and say what became of it. Exit code 1 if a bar is missed."""

from __future__ import annotations

import argparse
import os
import queue
import shutil
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path

from chaos import report
from chaos.case import CLEAN_SECONDS, Drill, Outcome, Result
from chaos.lab import LabDrill, why_no_machines
from chaos.schedule import KINDS, RECIPES, Case, schedule

PRIVATE = "FEVER_CHAOS_MOUNTS"  # set once this process has mounts of its own, which end with it
END_MINUTES = 2.0  # of the whole time, kept for what comes after the last fault


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m chaos", description=__doc__)
    parser.add_argument("--seed", type=int, default=0, help="of the schedule")
    parser.add_argument("--faults", type=int, default=100)
    parser.add_argument("--minutes", type=float, default=25.0, help="for all of it; what does not fit has failed")
    parser.add_argument("--parallel", type=int, default=2, help="trainings at the same time")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS, help="only these faults")
    parser.add_argument("--algos", nargs="+", choices=sorted({one.algo for one in RECIPES}), default=())
    parser.add_argument("--out", type=Path, default=Path("chaos-report"), help="folder of report.md and report.json")
    parser.add_argument("--keep", action="store_true", help="keep the trainings' folders")
    parser.add_argument("--plan", action="store_true", help="print the schedule and do nothing")
    return parser.parse_args()


class Chaos:
    """All cases of a schedule, some at the same time."""

    def __init__(self, cases: list[Case], folder: Path, deadline: float) -> None:
        self.folder, self.deadline, self.began = folder, deadline, time.monotonic()
        self.waiting: queue.SimpleQueue[tuple[int, Case]] = queue.SimpleQueue()
        for number, case in enumerate(cases):
            self.waiting.put((number, case))
        self.drills: list[Drill] = []
        self.results: list[Result] = []

    def run(self, parallel: int) -> list[Result]:
        threads = [threading.Thread(target=self._work) for _ in range(parallel)]
        try:
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            limit = time.monotonic() + CLEAN_SECONDS
            for drill in self.drills:
                drill.sweep(max(limit, drill.orphans_until))
        finally:
            self.deadline = 0.0
            for drill in self.drills:
                drill.deadline = 0.0
                drill.training.kill()
        return self.results

    def _work(self) -> None:
        while True:
            try:
                number, case = self.waiting.get_nowait()
            except queue.Empty:
                return
            if case.recipe is None and (reason := why_no_machines()):
                skipped = [Outcome("lab", kind, reason, skipped=True) for kind in case.kinds]
                self.results.append(Result("lab", skipped))
                continue
            make = Drill if case.recipe is not None else LabDrill
            drill = make(case, self.folder / f"{number:02d}", self.deadline, self.say)
            self.drills.append(drill)
            self.results.append(drill.result)
            drill.run()
            self.say(f"{drill.result.case}: {'finished' if drill.result.finished else drill.result.reason}")

    def say(self, line: str) -> None:
        print(f"{time.monotonic() - self.began:6.0f} s  {line}", flush=True)


def enter_own_mounts() -> None:
    """Start again with mounts of its own, if that is allowed: they end with this process, however it ends."""
    if os.geteuid() == 0 and PRIVATE not in os.environ and (program := shutil.which("unshare")):
        os.environ[PRIVATE] = "1"
        words = ["unshare", "--mount", "--propagation", "private", sys.executable, "-m", "chaos", *sys.argv[1:]]
        os.execv(program, words)


def main() -> int:
    options = arguments()
    cases = schedule(options.seed, options.faults, options.kinds, options.algos)
    if options.plan:
        for case in cases:
            print(case.recipe.label if case.recipe else "lab", *case.kinds)
        return 0
    enter_own_mounts()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    began = time.monotonic()
    folder = Path(tempfile.mkdtemp(prefix="fc-", dir="/tmp"))  # short: Ray has sockets below it
    try:
        chaos = Chaos(cases, folder, began + 60 * max(0.1, options.minutes - END_MINUTES))
        results = chaos.run(options.parallel)
    finally:
        if options.keep:
            print(f"kept: {folder}")
        else:
            shutil.rmtree(folder, ignore_errors=True)
    seconds = time.monotonic() - began
    report.write(options.out, results, options.faults, options.seed, seconds)
    print("\n" + report.text(results, options.faults, options.seed, seconds))
    return 0 if all(met for _, met in report.bars(results, options.faults)) else 1


if __name__ == "__main__":
    sys.exit(main())
