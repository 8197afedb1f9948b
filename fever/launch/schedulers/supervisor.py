"""What a job's script ends in, on its first machine: start the ranks, pass on the scheduler's signals, end well.

Schedulers signal this process only (Slurm's `--signal=B:`), kill a launcher's ranks at once if the launcher is told to
end, and wait for ranks on machines that have died. So nothing is ever passed to the launcher: the ranks are told
through the meeting place, and once the driver has ended, so does this.
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
from fever.job import CONTINUED, JobFolder
from fever.launch.jobs import note, remember, resume_words
from fever.launch.rendezvous.member import LEAVE_SECONDS, POLL_SECONDS
from fever.launch.schedulers.scripts import lead_seconds
from fever.launch.targets import Scheduler, restore_target

LAUNCHER_SECONDS = 2.0  # for the launcher to end after rank 0


class Supervisor:
    """One attempt at a job."""

    def __init__(self, folder: JobFolder, launcher: list[str]) -> None:
        self.folder, self.launcher = folder, launcher
        self.job: dict[str, Any] = json.loads((folder.path / "job.json").read_text())
        target = restore_target(self.job["target"])
        assert isinstance(target, Scheduler)
        self.target = target
        self.began = time.time()

    def run(self) -> int:
        number = os.environ.get("SLURM_JOB_ID") or os.environ.get("PBS_JOBID")
        if number and not self.job["id"]:  # who submitted it was interrupted before it could note that
            self.job["id"] = number
            note(self.folder, id=number)
            remember(f"{self.target.kind}-{number}", self.folder.path.parent)
        self.folder.clear("stop" if self.folder.read_text("stop") == "cancelled" else "")  # meanwhile, by the user
        self.folder.write("started.json", {"began": self.began, "queued": self.began - self.job["submitted"]})
        signal.signal(signal.SIGUSR1, lambda number, frame: self._stop("limit"))
        for ending in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(ending, lambda number, frame: self._stop("terminated"))
        ranks = [*self.launcher, sys.executable, "-m", "fever.launch.rendezvous.rank", str(self.folder.path)]
        process = subprocess.Popen(ranks, start_new_session=True)
        code = self._wait(process)
        self.folder.tidy()  # if rank 0 could not
        if code == CONTINUED and self.target.requeue:
            self._requeue()
        return code

    def _stop(self, reason: str) -> None:
        if self.folder.read_text("stop") is None and self.folder.read("exit.json") is None:
            self.folder.write_text("stop", reason)

    def _wait(self, process: subprocess.Popen[bytes]) -> int:
        """Until the launcher ends, or should have: ranks on machines that died hold it up."""
        deadline = limit = float("inf")
        if self.target.kind != "slurm" and self.target.seconds is not None:  # Slurm sends a signal
            limit = time.monotonic() - system.age() + self.target.seconds - lead_seconds(self.target)
        while process.poll() is None and time.monotonic() < deadline:
            if self.folder.read("exit.json") is not None:
                tidied = self.folder.read_text("plan.json") is None  # by rank 0, as the last one
                deadline = min(deadline, time.monotonic() + (LAUNCHER_SECONDS if tidied else 2 * LEAVE_SECONDS))
            elif time.monotonic() > limit:
                self._stop("limit")
            time.sleep(POLL_SECONDS)
        ending = self.folder.read("exit.json")
        if process.poll() is None:
            self._end(process)
        if ending is not None:
            return int(ending["code"])
        return system.exit_code(process.returncode) or 1  # no driver has ended: it was no success

    def _end(self, process: subprocess.Popen[bytes]) -> None:
        process.terminate()
        try:
            process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def _requeue(self) -> None:
        """Back into the queue; the run goes on from its checkpoint when it is this job's turn again."""
        slurm = self.target.kind == "slurm"
        note(self.folder, submitted=time.time())
        command = ["scontrol", "requeue", os.environ["SLURM_JOB_ID"]] if slurm else ["qsub", str(script(self.folder))]
        print(f"the run goes on later: {' '.join(command)}", file=sys.stderr, flush=True)
        try:
            answer = subprocess.run(command, capture_output=True, text=True, check=True)
        except (OSError, subprocess.CalledProcessError) as error:
            reason = getattr(error, "stderr", "") or error
            how = resume_words(self.folder.path.parent)
            print(f"it did not work: {reason}; go on by hand with: {how}", file=sys.stderr, flush=True)
            return
        if not slurm:
            number = answer.stdout.strip()
            note(self.folder, submitted=time.time(), id=number)
            remember(f"{self.target.kind}-{number}", self.folder.path.parent)


def script(folder: JobFolder) -> Path:
    return folder.path / "script.sh"


def main() -> None:
    """`python -m fever.launch.schedulers.supervisor JOB LAUNCHER...`"""
    sys.exit(Supervisor(JobFolder(Path(sys.argv[1])), sys.argv[2:]).run())


if __name__ == "__main__":
    main()
