"""Which rank this process is, from the variables that launchers of MPI programs set."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from fever.errors import FeverError

LAUNCHERS = {  # name -> variables of: the rank, the number of ranks, and those that together name a launch
    "OpenMPI": (
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        ("OMPI_MCA_orte_precondition_transports", "PMIX_NAMESPACE"),
    ),
    "jsrun": ("JSM_NAMESPACE_RANK", "JSM_NAMESPACE_SIZE", ("LSB_JOBID", "JSM_NAMESPACE_ID")),
    "PALS": ("PALS_RANKID", "PALS_SIZE", ("PALS_APID",)),
    "ALPS": ("ALPS_APP_PE", "ALPS_APP_SIZE", ("ALPS_APP_ID",)),
    "PMI": ("PMI_RANK", "PMI_SIZE", ("PMI_JOBID",)),
    "Slurm": ("SLURM_PROCID", "SLURM_NTASKS", ()),
}
STEP = (
    "SLURM_JOB_ID",
    "SLURM_STEP_ID",
)  # the variables of a job step; a batch script has SLURM_PROCID without being a step
INTERACTIVE = 0xFFFFFFF0  # steps from here on are Slurm's own: the shell of salloc, the batch script
PREFIXES = ("OMPI_", "PMIX_", "PMI_", "HYDI_", "HYDRA_", "MPI_LOCAL", "PALS_", "ALPS_", "JSM_", "PRTE_")
BINDING = ("OpenMPI", "PMI")  # these bind ranks to cores by default, on machines that are all the user's


@dataclass(frozen=True)
class Rank:
    """One of the processes that a launcher has started together."""

    launcher: str
    number: int
    size: int | None  # None: the launcher does not say
    launch: str | None  # a name that the ranks of this launch share, and no other launch has


def find_rank(environ: Mapping[str, str] = os.environ) -> Rank:
    """Which rank this process is; raises FeverError if no launcher has started it."""
    step = "-".join(environ[name] for name in STEP) if all(environ.get(name) for name in STEP) else None
    if step and int(environ["SLURM_STEP_ID"]) >= INTERACTIVE:
        step = None
    for launcher, (number, size, names) in LAUNCHERS.items():
        if environ.get(number, "").isdecimal() and (launcher != "Slurm" or step):
            count = environ.get("FEVER_RANKS") or environ.get(size)
            launch = "-".join(environ[name] for name in names if environ.get(name))
            if not launch and launcher in ("PMI", "Slurm"):
                launch = _hydra() or step or ""
                if launch == step:  # srun's own PMI: only Slurm has bound the ranks
                    launcher = "Slurm"
            if count and not (count.isdecimal() and int(count)):
                raise FeverError(f"the number of ranks is {count!r}; FEVER_RANKS takes a number from 1 on")
            return Rank(launcher, int(environ[number]), int(count) if count else None, _short(launch))
    raise FeverError(
        "--on mpi is for processes that a launcher has started: mpirun -np 4 fever train ... --on mpi "
        f"(none of {', '.join(rank for rank, _, _ in LAUNCHERS.values())} is set)"
    )


def _short(launch: str) -> str | None:
    """A short name of a launch, for folders; None if it is empty."""
    if len(launch) > 20 or ":" in launch:
        return hashlib.sha256(launch.encode()).hexdigest()[:8]
    return re.sub(r"[^\w.]+", "-", launch).strip("-") or None


def _hydra() -> str | None:
    """A name for MPICH's launch: the address of mpiexec, from the command line of its proxy, the ranks' ancestor."""
    process = os.getppid()
    for _ in range(4):  # there may be a shell in between
        try:
            words = Path(f"/proc/{process}/cmdline").read_text().split("\0")
            process = int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            return None
        if "--control-port" in words[:-1]:
            return words[words.index("--control-port") + 1]
    return None


def without_launcher(environ: Mapping[str, str]) -> dict[str, str]:
    """An environment without the launcher's variables: with them, a simulator that uses MPI thinks it is a rank."""
    return {name: value for name, value in environ.items() if not name.startswith(PREFIXES)}
