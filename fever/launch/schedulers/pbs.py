"""PBS Pro, OpenPBS and Torque: `qsub`, `qstat`, `qdel`."""

from __future__ import annotations

import os
import re
from contextlib import suppress
from pathlib import Path
from shlex import quote
from typing import Any, ClassVar, Literal

from pydantic import ValidationInfo, field_validator, model_validator

from fever.config import setting
from fever.job import QUEUED, REPORT, RUNNING
from fever.launch.schedulers.base import MpiScheduler, clock
from fever.launch.schedulers.times import PBS, TimeFormat
from fever.launch.script_text import Template, Word

CHUNKS = re.compile(r"(?:select=|nodes=)?((?:\d+|\{nodes\})(?=[:+,\s]|$)[^,\s]*)")  # 2:ncpus=64+1:ngpus=4


class Pbs(MpiScheduler):
    submit_program: ClassVar[str] = "qsub"
    cancel_program: ClassVar[str] = "qdel"
    ping: ClassVar[tuple[str, ...]] = ("qstat", "-B")
    unknown_job: ClassVar[str] = "Unknown Job|has finished"
    number_variable: ClassVar[str] = "PBS_JOBID"
    inside: ClassVar[str] = "mpiexec fever doctor --on mpi"
    time_format: ClassVar[TimeFormat] = PBS

    kind: Literal["pbs"] = "pbs"
    place: Word | None = setting("scatter", "how machines are chosen (-l place=); scatter: every chunk another machine")
    select: Template | None = setting(
        None, "the machines, one chunk each, such as {nodes}:ncpus=64:system=crux (-l select=); null: by cpus_per_node"
    )
    filesystems: Word | None = setting(None, "file systems that the job needs, such as home:eagle, where a site asks")

    @model_validator(mode="before")
    @classmethod
    def _nodes_of_select(cls, values: Any) -> Any:
        """Without `nodes`, as many as `select` asks for."""
        if not isinstance(values, dict) or "nodes" in values:
            return values
        count = count_machines(values.get("select"), values.get("place", "scatter"))
        return {**values, "nodes": count} if count else values

    @field_validator("select")
    @classmethod
    def _same_number(cls, value: str | None, info: ValidationInfo) -> str | None:
        nodes = info.data.get("nodes")
        count = count_machines((value or "").replace("{nodes}", str(nodes)), info.data.get("place"))
        if count and nodes and count != nodes:
            raise ValueError(f"asks for {count} machines, but nodes is {nodes}; write {{nodes}} for that number")
        return value

    def directives(self, name: str, folder: Path) -> list[str]:
        short = re.sub(r"[^\w.-]", "-", name)[:15]
        options = [
            f"-N {short}",
            f"-A {self.account}" if self.account else "",
            f"-q {self.partition}" if self.partition else "",
            *self._resources(),
            f"-l filesystems={self.filesystems}" if self.filesystems else "",
            f"-l walltime={clock(self.seconds)}" if self.seconds else "",
            "-j oe",
            f"-o {quote(str(folder / REPORT))}",
            f"-r {'y' if self.requeue else 'n'}",
            *self.options,
        ]
        return [f"#PBS {option}" for option in options if option]

    def _resources(self) -> list[str]:
        """The machines, and that each of them is another one; Torque's `nodes=` has no place."""
        select = self.select or "{nodes}" + (f":ncpus={self.cpus_per_node}" if self.cpus_per_node else "")
        select = ("select=" if CHUNKS.match(select) and not select.startswith(("select=", "nodes=")) else "") + select
        whole = ":excl" if self.place == "scatter" and not self.select and not self.cpus_per_node else ""
        placed = self.place is None or "place=" in select or not select.startswith("select=")
        machines = f"-l {select.replace('{nodes}', str(self.nodes))}"
        return [machines] if placed else [machines, f"-l place={self.place}{whole}"]

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


def count_machines(select: Any, place: Any) -> int | None:
    """How many machines `select` asks for, if each chunk is on another one; None if it does not say."""
    if not isinstance(select, str) or not str(place).startswith("scatter") or not (found := CHUNKS.match(select)):
        return None
    counts = [chunk.split(":")[0] for chunk in found[1].split("+")]
    return None if "{nodes}" in counts else sum(int(count) if count.isdecimal() else 1 for count in counts)
