"""PBS Pro, OpenPBS and Torque: `qsub`, `qstat`, `qdel`."""

from __future__ import annotations

import os
import re
from contextlib import suppress
from pathlib import Path
from shlex import quote
from typing import ClassVar, Literal

from fever.config import setting
from fever.job import QUEUED, REPORT, RUNNING
from fever.launch.schedulers.base import MpiScheduler, clock


class Pbs(MpiScheduler):
    submit_program: ClassVar[str] = "qsub"
    cancel_program: ClassVar[str] = "qdel"
    ping: ClassVar[tuple[str, ...]] = ("qstat", "-B")
    unknown_job: ClassVar[str] = "Unknown Job|has finished"
    number_variable: ClassVar[str] = "PBS_JOBID"
    inside: ClassVar[str] = "mpiexec fever doctor --on mpi"

    kind: Literal["pbs"] = "pbs"
    select: str | None = setting(None, "resources that are asked for with -l; null: select=NODES:ncpus=CPUS, scattered")

    def directives(self, name: str, folder: Path) -> list[str]:
        short = re.sub(r"[^\w.-]", "-", name)[:15]
        cpus = f":ncpus={self.cpus_per_node}" if self.cpus_per_node else ""
        resources = self.select or f"select={self.nodes}{cpus}"
        options = [
            f"-N {short}",
            f"-A {self.account}" if self.account else "",
            f"-q {self.partition}" if self.partition else "",
            f"-l {resources}",
            f"-l place=scatter{'' if self.cpus_per_node else ':excl'}" if not self.select else "",
            f"-l walltime={clock(self.seconds)}" if self.seconds else "",
            "-j oe",
            f"-o {quote(str(folder / REPORT))}",
            f"-r {'y' if self.requeue else 'n'}",
            *self.options,
        ]
        return [f"#PBS {option}" for option in options if option]

    def state_command(self, number: str) -> list[str]:
        return ["qstat", "-f", number]

    def read_state(self, answer: str) -> tuple[str, str] | None:
        state = re.search(r"job_state = (\w)", answer)
        if state is None or state[1] in "FCX":
            return None
        return (RUNNING, "") if state[1] in "RE" else (QUEUED, "")

    @classmethod
    def allocated_hosts(cls) -> list[str]:
        with suppress(OSError):
            if path := os.environ.get("PBS_NODEFILE"):
                return Path(path).read_text().split()
        return []
