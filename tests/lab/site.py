"""A user who works on the login machine of a lab: commands, their jobs and runs."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.helpers import ROOT, wait_for
from tests.lab.machines import Lab

FEVER = [sys.executable, "-m", "fever"]
FOREVER = ("--stop-steps", "100000000", "--stop-time", "10m")


class Site:
    """A lab, and the folder on its login machine in which a user works."""

    def __init__(self, lab: Lab, folder: Path) -> None:
        self.lab, self.folder = lab, folder
        self.variables = lab.variables(PYTHONPATH=str(ROOT), FEVER_HOME=str(folder / "home"), COLUMNS="120")

    def fever(self, *words: str, timeout: float = 300) -> subprocess.CompletedProcess[str]:
        """A command that a user types on the login machine."""
        return self.lab.login.run([*FEVER, *words], cwd=self.folder, env=self.variables, timeout=timeout)

    def submit(self, *words: str, nodes: int = 3) -> str:
        """Train in a job that is not followed; returns its number."""
        options = ("--on", "slurm", "--nodes", str(nodes), "--time", "10m", "--detach")
        done = self.fever("train", *words, *options)
        assert done.returncode == 0, done.stderr
        found = re.search(r"submitted slurm-(\d+)", done.stderr)
        assert found is not None
        return found[1]

    def run(self, name: str) -> Path:
        return self.folder / "runs" / name

    def slurm(self, *words: str) -> str:
        return self.lab.login.run([*words], env=self.variables, check=True).stdout

    def job(self, number: str) -> dict[str, str]:
        """What Slurm knows of a job."""
        return dict(
            pair.split("=", 1) for pair in self.slurm("scontrol", "-o", "show", "job", number).split() if "=" in pair
        )

    def wait_for_end(self, number: str, seconds: float = 300) -> dict[str, str]:
        """Wait until Slurm has nothing more to do for a job."""
        ends = ("COMPLETED", "FAILED", "CANCELLED", "NODE_FAIL", "TIMEOUT")
        wait_for(lambda: self.job(number)["JobState"] in ends, f"end of job {number}", seconds)
        return self.job(number)

    def wait_for_steps(self, name: str, steps: int = 1, seconds: float = 300) -> None:
        """Wait until a run learns."""
        wait_for(lambda: metrics(self.run(name)) and metrics(self.run(name))[-1]["steps"] >= steps, "training", seconds)

    def processes(self) -> list[str]:
        return [line[:100] for line in self.lab.leftovers()]

    def connect(self, address: str, token: Path) -> str:
        """What somebody on the first machine is told who connects to a job's Ray with this token."""
        code = f"import ray; ray.init('{address}', log_to_driver=False); print('connected')"
        variables = {**self.variables, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token)}
        done = self.lab["node1"].run([sys.executable, "-c", code], env=variables)
        return done.stdout + done.stderr

    def log(self, name: str) -> str:
        return (self.run(name) / "job" / "log.txt").read_text()

    def assert_nothing_left(self, name: str, crashed: int = 0) -> None:
        """No process on any machine, no temporary folder but those of crashed machines, no token."""
        wait_for(lambda: not self.processes(), "end of all processes")
        assert len(list(Path("/tmp").glob("fever-ray-*"))) == crashed
        job = self.run(name) / "job"
        names = {path.name.partition(".")[0] for path in job.iterdir()}
        assert not {"token", "plan", "plans", "meeting", "alive", "stop", "ranks", "left"} & names


def metrics(run: Path) -> list[dict[str, Any]]:
    path = run / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")] if path.exists() else []


def summary(run: Path) -> dict[str, Any]:
    return json.loads((run / "summary.json").read_text())
