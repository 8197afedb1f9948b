"""IBM Spectrum LSF: `bsub`, `bjobs`, `bkill`."""

from __future__ import annotations

import math
import os
import re
from pathlib import Path
from typing import ClassVar, Literal

from fever.config import setting
from fever.errors import FeverError
from fever.job import QUEUED, REPORT, RUNNING
from fever.launch.schedulers.base import MpiScheduler, call
from fever.launch.schedulers.times import LSF, TimeFormat
from fever.launch.script_text import Template


class Lsf(MpiScheduler):
    submit_program: ClassVar[str] = "bsub"
    cancel_program: ClassVar[str] = "bkill"
    ping: ClassVar[tuple[str, ...]] = ("lsid",)
    unknown_job: ClassVar[str] = "is not found"
    number_variable: ClassVar[str] = "LSB_JOBID"
    inside: ClassVar[str] = "mpiexec fever doctor --on mpi"
    time_format: ClassVar[TimeFormat] = LSF

    kind: Literal["lsf"] = "lsf"
    resources: Template | None = setting(
        None, "options that ask for the machines, such as -nnodes {nodes}; null: -n and -R span[ptile=CPUS]"
    )

    def directives(self, name: str, folder: Path) -> list[str]:
        if set('"$`\\') & set(str(folder)):  # which quotation marks would not protect
            raise FeverError(f'{folder} cannot be given to bsub; choose --runs without ", $, ` and \\')
        slots, short = self.cpus_per_node or 1, re.sub(r"[^\w.-]", "-", name)
        default = f'-n {self.nodes * slots} -R "span[ptile={slots}]"' + ("" if self.cpus_per_node else " -x")
        options = [
            f"-J {short}",
            f"-P {self.account}" if self.account else "",
            f"-q {self.partition}" if self.partition else "",
            (self.resources or default).replace("{nodes}", str(self.nodes)),
            f"-W {math.ceil(self.seconds / 60)}" if self.seconds else "",  # minutes
            f'-o "{folder / REPORT}"',
            "-r" if self.requeue else "-rn",
            *self.options,
        ]
        return [f"#BSUB {option}" for option in options if option]

    def submit_script(self, script: Path) -> str:
        """`bsub` reads directives from its standard input, and answers: Job <17> is submitted to queue <normal>."""
        answer = call("bsub", script=script)
        if (number := re.search(r"Job <(\d+)>", answer)) is None:
            raise FeverError(f"bsub did not say the job's number: {' '.join(answer.split())}")
        return number[1]

    def state_command(self, number: str) -> list[str]:
        return ["bjobs", "-noheader", "-o", "stat", number]

    def read_state(self, answer: str) -> tuple[str, str] | None:
        if answer in ("PEND", "PSUSP", "WAIT"):
            return QUEUED, "suspended" if answer == "PSUSP" else ""
        return None if answer in ("", "DONE", "EXIT") else (RUNNING, "suspended" if "SUSP" in answer else "")

    @classmethod
    def allocated_hosts(cls) -> list[str]:
        return os.environ.get("LSB_MCPU_HOSTS", "").split()[::2]  # host, number of slots, host, ...
