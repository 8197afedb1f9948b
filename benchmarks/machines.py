"""Jobs on machines made of namespaces, with a real Slurm; needs root and slurmd, slurmctld, munge, iproute2."""

import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tests.lab.machines import Lab, why_no_lab  # noqa: E402 - not installed, found by the path above


class Machines:
    """A lab with Slurm in which jobs are run and timed."""

    def __init__(self, folder: Path, count: int) -> None:
        if reason := why_no_lab("slurmctld", "slurmd", "munged"):
            raise RuntimeError(reason)
        self.folder = folder
        self.lab = Lab(folder / "lab", count)
        self.jobs = 0

    def __enter__(self) -> "Machines":
        self.lab.__enter__()
        self.lab.start_slurm()
        return self

    def __exit__(self, *error: object) -> None:
        self.lab.__exit__(*error)

    def job(self, nodes: int, *words: str) -> tuple[dict, dict]:
        """Train in a job to its end: the run's summary, and where the job's time went."""
        self.jobs += 1
        run = self.folder / "runs" / f"job{self.jobs}"
        command = [sys.executable, "-m", "fever", "train", *words, "--on", "slurm", "--nodes", str(nodes)]
        command += ["--time", "10m", "--runs", str(run.parent), "--name", run.name]
        variables = self.lab.variables(PYTHONPATH=str(ROOT), FEVER_HOME=str(self.folder / "home"))
        done = self.lab.login.run(command, cwd=self.folder, env=variables, timeout=300)
        if done.returncode:
            raise RuntimeError(done.stdout[-500:] + done.stderr[-500:])
        breakdown = json.loads((run / "job" / "breakdown.json").read_text())
        return json.loads((run / "summary.json").read_text()), breakdown
