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
    "PALS": ("PALS_RANKID", "PMI_SIZE", ("PALS_APID",)),  # HPE Cray EX; under Slurm, its plugin mpi/cray_shasta
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
BINDING = ("OpenMPI", "PMI", "PALS")  # these bind ranks to cores by default, on machines that are all the user's
UNBOUND = {  # launcher -> how its ranks are not bound to cores
    "OpenMPI": "mpirun --bind-to none",
    "jsrun": "jsrun -b none -c ALL_CPUS",
    "PALS": "mpiexec --cpu-bind none",
    "ALPS": "aprun -cc none",
    "PMI": "mpiexec -bind-to none (Intel MPI: I_MPI_PIN=0)",
    "Slurm": "srun --cpu-bind=none --cpus-per-task=CORES",
}


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
            if step and launch.replace(".", "-") == step:  # srun with Cray's PMI
                launcher, launch = "Slurm", ""
                count = count or environ.get("SLURM_NTASKS")  # older releases of its plugin set no PMI_SIZE
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


def note_binding(launcher: str, bound: list[int], available: int, used: int) -> str | None:
    """A sentence about ranks that their launcher has bound to much fewer cores of a host than they could have.

    `bound`: the cores of all ranks of the host; `available`: how many the job has there; `used`: how many the training
    uses, all of them if it could undo the binding.
    """
    if 2 * len(bound) > available:
        return None
    what = f"the ranks of this host are bound to {len(bound)} of {available} cores ({_ranges(bound)})"
    so = "the training undoes that and uses all" if used >= available else "the training has no more"
    return f"{what}; {so}; unbound they start with: {UNBOUND[launcher]}"


def _ranges(numbers: list[int]) -> str:
    """`0-3,8` for 0, 1, 2, 3, 8."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][-1] + 1:
            parts[-1].append(number)
        else:
            parts.append([number])
    return ",".join(f"{part[0]}-{part[-1]}" if len(part) > 1 else str(part[0]) for part in parts)


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


def granted_cores(environ: Mapping[str, str] = os.environ) -> int | None:
    """How many cores of a machine Slurm gave to the job, of which a step may have fewer; of the smallest machine. None
    outside of a job."""
    counts = re.findall(r"(?:^|,)(\d+)", environ.get("SLURM_JOB_CPUS_PER_NODE", ""))
    return min(map(int, counts), default=None)


def without_launcher(environ: Mapping[str, str]) -> dict[str, str]:
    """An environment without the launcher's variables: with them, a simulator that uses MPI thinks it is a rank."""
    return {name: value for name, value in environ.items() if not name.startswith(PREFIXES)}
