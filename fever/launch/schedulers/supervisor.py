"""The last line of a job's script, on its first machine: start the ranks, handle the scheduler's signals, exit.

Schedulers signal this process only (Slurm's `--signal=B:`), kill the ranks at once if their launcher is told to end,
and wait for ranks on machines that have died. So the launcher gets no signals: the ranks are told through the job's
folder, and this process exits once the driver has ended.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from fever import system
from fever.errors import FeverError
from fever.job import CONTINUED, EXIT, PLAN, RECORD, SCRIPT, STARTED, STOP, JobFolder
from fever.launch.jobs import remember, resume_words
from fever.launch.rendezvous.member import LEAVE_SECONDS, POLL_SECONDS
from fever.launch.schedulers.base import Scheduler
from fever.launch.targets import restore_target
from fever.text import say

LAUNCHER_SECONDS = 2.0  # for the launcher to end after rank 0


class Supervisor:
    """One attempt at a job."""

    def __init__(self, folder: JobFolder, launcher: list[str]) -> None:
        self.folder, self.launcher = folder, launcher
        self.job: dict[str, Any] = json.loads((folder.path / RECORD).read_text())
        target = restore_target(self.job["target"])
        self.scheduler = target if isinstance(target, Scheduler) else None  # None inside an allocation of the user's
        variable = self.scheduler.number_variable if self.scheduler else ""
        self.number = os.environ.get(variable) or self.job["id"]
        self.began = time.time()

    def run(self) -> int:
        """Run the ranks to their end; returns the driver's exit code."""
        if self.number and not self.job["id"]:  # the submitting process was interrupted before it could note it
            self._remember(self.number)
        user_stops = self.folder.read_text(STOP) == "cancelled"  # `fever stop` came before this process
        self.folder.clear(STOP if user_stops else "")
        self.folder.write(STARTED, {"began": self.began, "queued": self.began - self.job["submitted"]})
        for limit in (signal.SIGUSR1, signal.SIGUSR2):  # Slurm's, if asked for, and LSF's
            signal.signal(limit, lambda number, frame: self._stop("limit"))
        for ending in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(ending, lambda number, frame: self._stop("terminated" if self.scheduler else "cancelled"))
        container = self.scheduler.container if self.scheduler else None
        python = container.python if container else sys.executable
        ranks = [*self.launcher, python, "-m", "fever.launch.rendezvous.rank", str(self.folder.path)]
        process = subprocess.Popen(ranks, start_new_session=True)
        code = self._wait(process)
        self.folder.tidy()  # if rank 0 could not
        if code == CONTINUED and self.scheduler and self.scheduler.requeue:
            self._requeue(self.scheduler)
        return code

    def _remember(self, number: str) -> None:
        self.folder.note(id=number)
        remember(f"{self.job['kind']}-{number}", self.folder.run)

    def _stop(self, reason: str) -> None:
        if self.folder.read_text(STOP) is None and self.folder.read(EXIT) is None:
            self.folder.write_text(STOP, reason)

    def _wait(self, process: subprocess.Popen[bytes]) -> int:
        """Wait until the launcher ends, or should have: ranks on machines that died hold it up."""
        deadline = limit = float("inf")
        if self.scheduler and not self.scheduler.signals_limit and self.scheduler.seconds is not None:
            limit = time.monotonic() - system.age() + self.scheduler.seconds - self.scheduler.lead
        while process.poll() is None and time.monotonic() < deadline:
            if self.folder.read(EXIT) is not None:
                tidied = self.folder.read_text(PLAN) is None  # by rank 0, as the last one
                deadline = min(deadline, time.monotonic() + (LAUNCHER_SECONDS if tidied else 2 * LEAVE_SECONDS))
            elif time.monotonic() > limit:
                self._stop("limit")
            time.sleep(POLL_SECONDS)
        ending = self.folder.read(EXIT)
        if process.poll() is None:
            self._end(process)
        if ending is not None:
            return int(ending["code"])
        return system.exit_code(process.returncode) or 1  # without a driver's exit code it was no success

    def _end(self, process: subprocess.Popen[bytes]) -> None:
        process.terminate()
        try:
            process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def _requeue(self, scheduler: Scheduler) -> None:
        """Put the job back into the queue; the run continues from its checkpoint when its turn comes."""
        self.folder.note(submitted=time.time())
        say("requeueing; the run continues from its checkpoint", sys.stderr)
        try:
            number = scheduler.put_back(self.folder.path / SCRIPT, self.number)
        except FeverError as error:
            how = resume_words(self.folder.run)
            say(f"requeueing failed: {error}; resume the run with: {how}", sys.stderr)
            return
        if number != self.number:
            self._remember(number)


def main() -> None:
    """`python -m fever.launch.schedulers.supervisor JOB LAUNCHER...`"""
    sys.exit(Supervisor(JobFolder(Path(sys.argv[1])), sys.argv[2:]).run())


if __name__ == "__main__":
    main()
