"""Slurm: `sbatch`, `squeue`, `scancel`, and `srun` to start ranks."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from shlex import join, quote
from typing import ClassVar, Literal

from fever.config import Settings, setting
from fever.job import LOG, QUEUED, RUNNING
from fever.launch.doctor import Finding
from fever.launch.schedulers.base import Scheduler, call, clock

WAITING = ("PENDING", "REQUEUED", "CONFIGURING", "REQUEUE_HOLD")
OVER = (
    "COMPLETED",
    "FAILED",
    "CANCELLED",
    "TIMEOUT",
    "NODE_FAIL",
    "PREEMPTED",
    "BOOT_FAIL",
    "DEADLINE",
    "OUT_OF_MEMORY",
)


class LearnerMachine(Settings):
    """A machine for the learner that differs from the samplers' (Slurm's heterogeneous jobs)."""

    gpus: int = setting(0, "GPUs of the learner's machine", ge=0)
    cpus: int | None = setting(None, "its cores; null: as the samplers' machines", gt=0)
    partition: str | None = setting(None, "its partition; null: the same")
    options: tuple[str, ...] = setting((), "further options of its own, such as --constraint=a100")


class Slurm(Scheduler):
    submit_program: ClassVar[str] = "sbatch"
    cancel_program: ClassVar[str] = "scancel"
    ping: ClassVar[tuple[str, ...]] = ("scontrol", "ping")
    unknown_job: ClassVar[str] = "Invalid job id"
    number_variable: ClassVar[str] = "SLURM_JOB_ID"
    inside: ClassVar[str] = "salloc --nodes 2 fever doctor --on slurm"
    signals_limit: ClassVar[bool] = True

    kind: Literal["slurm"] = "slurm"
    qos: str | None = setting(None, "quality of service")
    learner: LearnerMachine | None = setting(None, "the learner's machine, if it differs; makes the job heterogeneous")

    def directives(self, name: str, folder: Path) -> list[str]:
        shared = [f"--account={self.account}" if self.account else "", f"--qos={self.qos}" if self.qos else ""]
        shared.append(f"--time={clock(self.seconds)}" if self.seconds else "")
        samplers = [
            f"--nodes={self.nodes - (self.learner is not None)}",
            "--ntasks-per-node=1",
            f"--cpus-per-task={self.cpus_per_node}" if self.cpus_per_node else "--exclusive",
            f"--partition={self.partition}" if self.partition else "",
            *shared,
            *self.options,
        ]
        whole = [
            f"--job-name={quote(name)}",
            f"--output={quote(str(folder / LOG).replace('%', '%%'))}",
            "--open-mode=append",
            f"--signal=B:USR1@{round(self.lead)}",
            "--requeue" if self.requeue else "--no-requeue",
        ]
        if self.learner is None:
            return [f"#SBATCH {option}" for option in (*whole, *samplers) if option]
        learner = self.learner
        cpus, partition = learner.cpus or self.cpus_per_node, learner.partition or self.partition
        first = [
            "--nodes=1",
            "--ntasks-per-node=1",
            f"--cpus-per-task={cpus}" if cpus else "--exclusive",
            f"--gpus-per-node={learner.gpus}" if learner.gpus else "",
            f"--partition={partition}" if partition else "",
            *shared,
            *learner.options,
            *(self.options if self.nodes == 1 else ()),
        ]
        directives = [f"#SBATCH {option}" for option in (*whole, *first) if option]
        if self.nodes > 1:
            directives += ["#SBATCH hetjob", *(f"#SBATCH {option}" for option in samplers if option)]
        return directives

    def launcher_command(self) -> str:
        """One rank per machine; none is bound to a core, and one that dies does not take the others with it."""
        groups = ["--het-group=0,1"] if self.learner is not None and self.nodes > 1 else []
        count = self.cores_of(0)  # of one machine, the learner's
        cpus = [f"--cpus-per-task={count}"] if count and not groups else []
        options = [
            "--ntasks-per-node=1",
            *cpus,
            "--cpu-bind=none",
            "--kill-on-bad-exit=0",
            "--wait=0",
            "--mpi=none",
            "--export=ALL",
        ]
        return join(["srun", *groups, *options])

    def cores_of(self, rank: int) -> int | None:
        own = self.learner.cpus if self.learner is not None and rank == 0 else None
        return own or self.cpus_per_node

    def submit_script(self, script: Path) -> str:
        return call("sbatch", "--parsable", str(script)).strip().partition(";")[0]

    def put_back(self, script: Path, number: str) -> str:
        call("scontrol", "requeue", number)
        return number

    def state_command(self, number: str) -> list[str]:
        return ["squeue", "--noheader", "--jobs", number, "--format", "%T %r"]

    def read_state(self, answer: str) -> tuple[str, str] | None:
        state, _, reason = answer.partition("\n")[0].partition(" ")
        if state in WAITING:
            return QUEUED, reason if reason != "None" else "starting"
        return None if state in ("", *OVER) else (RUNNING, "")

    @classmethod
    def allocated_hosts(cls) -> list[str]:
        groups = [name for name in os.environ if name.startswith("SLURM_JOB_NODELIST_HET_GROUP_")]
        listed = ",".join(os.environ[name] for name in groups or ["SLURM_JOB_NODELIST"] if os.environ.get(name))
        with suppress(OSError, subprocess.SubprocessError):
            if listed:
                command = ["scontrol", "show", "hostnames", listed]
                return subprocess.run(command, capture_output=True, text=True, timeout=10).stdout.split()
        return []

    def examine_from_outside(self, on: str, runs: Path) -> list[Finding]:
        """Inside an allocation, start ranks that examine its machines; they print what they find."""
        if not os.environ.get(self.number_variable):
            return super().examine_from_outside(on, runs)
        words = [*self.launcher_command().split(), sys.executable, "-m", "fever", "doctor", "--on", on]
        done = subprocess.run([*words, "--runs", str(runs)])
        return [Finding("ok" if done.returncode == 0 else "problem", "machines", "as printed above")]
