"""Slurm: `sbatch`, `squeue`, `scancel`, and `srun` to start ranks."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from shlex import join, quote, split
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import field_validator

from fever.config import setting
from fever.errors import FeverError
from fever.job import LOG, QUEUED, RUNNING, current_job
from fever.launch.doctor import Finding
from fever.launch.rendezvous.launchers import find_rank, granted_cores
from fever.launch.schedulers.base import Scheduler, ask, call, clock
from fever.launch.schedulers.inside import run_inside
from fever.launch.schedulers.slurm_words import (
    PARTITION,
    ROW,
    chosen_partition,
    free_machines,
    how_it_ended,
    never_starts,
    partitions_for,
    read_partitions,
    read_rows,
    why_it_waits,
)
from fever.launch.schedulers.times import SLURM, TimeFormat
from fever.launch.script_text import Option, ScriptSettings, Word, quote_words

if TYPE_CHECKING:
    from fever.launch.dispatch import Order

WAITING = ("PENDING", "REQUEUED", "CONFIGURING", "REQUEUE_HOLD")
PLACING = re.compile(r"--(partition|nodes|time|reservation|clusters?)\b|-[pNtM]")
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


class LearnerMachine(ScriptSettings):
    """A machine for the learner that differs from the samplers' (Slurm's heterogeneous jobs)."""

    gpus: int = setting(0, "GPUs of the learner's machine", ge=0)
    cpus: int | None = setting(None, "its cores; null: as the samplers' machines", gt=0)
    partition: Word | None = setting(None, "its partition; null: the same")
    options: tuple[str, ...] = setting((), "further options of its own, such as --constraint=a100")


class Slurm(Scheduler):
    submit_program: ClassVar[str] = "sbatch"
    cancel_program: ClassVar[str] = "scancel"
    ping: ClassVar[tuple[str, ...]] = ("scontrol", "ping")
    unknown_job: ClassVar[str] = "Invalid job id"
    number_variable: ClassVar[str] = "SLURM_JOB_ID"
    inside: ClassVar[str] = "salloc --nodes 2 fever doctor --on slurm"
    signals_limit: ClassVar[bool] = True
    time_format: ClassVar[TimeFormat] = SLURM

    kind: Literal["slurm"] = "slurm"
    qos: Word | None = setting(None, "quality of service")
    mem: Word | None = setting(None, "memory of each machine, such as 200G; 0: all of it; null: Slurm's default")
    exclusive: bool | None = setting(None, "nobody else on the machines; null: if cpus_per_node is not given")
    srun_options: tuple[Option, ...] = setting(
        (), "further options for srun, which starts the ranks, such as --distribution=cyclic"
    )
    no_kill: bool = setting(True, "a machine that dies does not end the job, which goes on with the others")
    learner: LearnerMachine | None = setting(None, "the learner's machine, if it differs; makes the job heterogeneous")

    @field_validator("mem", mode="before")
    @classmethod
    def _number(cls, value: Any) -> Any:
        return str(value) if type(value) is int else value

    def directives(self, name: str, folder: Path) -> list[str]:
        shared = [f"--account={self.account}" if self.account else "", f"--qos={self.qos}" if self.qos else ""]
        shared += [f"--time={clock(self.seconds)}" if self.seconds else "", "--no-kill" if self.no_kill else ""]
        shared += [f"--mem={self.mem}" if self.mem else ""]
        samplers = [
            f"--nodes={self.nodes - (self.learner is not None)}",
            "--ntasks-per-node=1",
            *self._cores(self.cpus_per_node),
            f"--partition={self.partition}" if self.partition else "",
            *shared,
            *self.options,
        ]
        whole = [
            f"--job-name={quote(name)}",
            f"--output={quote(str(folder / LOG).replace('%', '%%'))}",
            "--open-mode=append",
            f"--signal=B:USR1@{max(1, round(self.lead))}",
            "--requeue" if self.requeue else "--no-requeue",
        ]
        if self.learner is None:
            return [f"#SBATCH {option}" for option in (*whole, *samplers) if option]
        learner = self.learner
        cpus, partition = learner.cpus or self.cpus_per_node, learner.partition or self.partition
        first = [
            "--nodes=1",
            "--ntasks-per-node=1",
            *self._cores(cpus),
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

    def _cores(self, cpus: int | None) -> list[str]:
        """Options that ask for these cores of a machine, or for the whole machine."""
        alone = cpus is None if self.exclusive is None else self.exclusive
        return [*([f"--cpus-per-task={cpus}"] if cpus else []), *(["--exclusive"] if alone else [])]

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
            *(["--no-kill"] if self.no_kill else []),
            "--wait=0",
            "--mpi=none",
            "--export=ALL",
        ]
        return " ".join([join(["srun", *groups, *options]), *map(quote_words, self.srun_options)])

    def run(self, order: Order) -> int:
        """Inside an allocation of the user's, run there; else submit a job."""
        if order.dry_run or not os.environ.get(self.number_variable) or current_job() is not None:
            return super().run(order)
        if self.container is not None:
            raise FeverError(
                "inside an allocation, start fever in its container, or submit from outside with container"
            )
        if ranks_here() > 1:
            raise FeverError("srun has started several of this command; start one without srun, or use --on mpi")
        machines = len(self.allocated_hosts())
        if "nodes" in order.options and self.nodes > machines:
            raise FeverError(f"--nodes {self.nodes}: this allocation has {machines} machine{'s' * (machines != 1)}")
        nodes = self.nodes if "nodes" in order.options else machines
        target = self.model_copy(update={"nodes": nodes, "cpus_per_node": self.cpus_per_node or granted_cores()})
        only = [f"--nodes={nodes}", f"--ntasks={nodes}", "--overlap"]
        return run_inside(target, order, [*split(target.launcher_command()), *only])

    def end_without(self, host: str) -> bool:
        """With `--no-kill`, Slurm takes a machine that died out of the list of a job's machines, and leaves the job to
        run until its time limit though its script is gone. (Without, Slurm itself ends the job or requeues it.)"""
        if not self.no_kill:
            return True
        number = os.environ.get("SLURM_HET_JOB_ID") or os.environ[self.number_variable]
        listed = call("squeue", "--noheader", "--jobs", number, "--format", "%N").split()
        if host.partition(".")[0] in expand(",".join(listed)):
            return False
        call("scontrol", "requeue", number) if self.requeue else call("scancel", number)
        return True

    def cores_of(self, rank: int) -> int | None:
        own = self.learner.cpus if self.learner is not None and rank == 0 else None
        return own or self.cpus_per_node

    def refuse_impossible(self, script: Path) -> None:
        """Slurm lets a job that fits nowhere wait for ever. Neither a job that its own options place elsewhere, nor a
        heterogeneous one, whose parts differ, is compared with a partition."""
        if self.learner is not None or any(PLACING.match(option) for option in self.options):
            return
        every = read_partitions(ask("sinfo", "--noheader", "--format", PARTITION))
        said = ask("sbatch", "--test-only", str(script), errors=True)
        here = partitions_for(chosen_partition(said) or self.partition, every)
        if why := never_starts(here, self.nodes, self.cpus_per_node, self.seconds, said):
            raise FeverError(f"this job could never start: {why}")

    def submit_script(self, script: Path) -> str:
        return call("sbatch", "--parsable", str(script)).strip().partition(";")[0]

    def put_back(self, script: Path, number: str) -> str:
        call("scontrol", "requeue", number)
        return number

    def state_command(self, number: str) -> list[str]:
        return ["squeue", "--noheader", "--jobs", number, "--format", ROW]

    def read_state(self, answer: str) -> tuple[str, str] | None:
        rows = read_rows(answer)
        if not rows or rows[0].state in OVER:
            return None
        if rows[0].state not in WAITING:
            return RUNNING, ""
        partitions = ",".join(dict.fromkeys(row.partition for row in rows))
        free = free_machines(ask("sinfo", "--noheader", "--partition", partitions, "--format", "%F"))
        return QUEUED, why_it_waits(rows, free, datetime.now())

    def how_it_ended(self, number: str) -> str:
        said = how_it_ended(ask("scontrol", "--oneliner", "show", "job", number))
        return f"Slurm: {said}" if said else ""

    @classmethod
    def allocated_hosts(cls) -> list[str]:
        groups = [name for name in os.environ if name.startswith("SLURM_JOB_NODELIST_HET_GROUP_")]
        listed = ",".join(os.environ[name] for name in groups or ["SLURM_JOB_NODELIST"] if os.environ.get(name))
        with suppress(FeverError):
            return expand(listed)
        return []

    def examine_from_outside(self, on: str, runs: Path) -> list[Finding]:
        """Inside an allocation, start ranks that examine its machines; they print what they find."""
        if not os.environ.get(self.number_variable):
            return super().examine_from_outside(on, runs)
        words = [*split(self.launcher_command()), sys.executable, "-m", "fever", "doctor", "--on", on]
        done = subprocess.run([*words, "--runs", str(runs)])
        return [Finding("ok" if done.returncode == 0 else "problem", "machines", "as printed above")]


def ranks_here() -> int:
    """How many processes a launcher has started together with this one."""
    try:
        return find_rank().size or 1
    except FeverError:
        return 1


def expand(listed: str) -> list[str]:
    """The host names in a list of Slurm's, such as `node[1-3,5]`."""
    return call("scontrol", "show", "hostnames", listed).split() if listed else []
