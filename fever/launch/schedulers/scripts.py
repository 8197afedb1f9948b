"""The scripts that schedulers run: from a target's settings to text. Nothing here touches anything."""

from __future__ import annotations

import re
from pathlib import Path
from shlex import join, quote

from fever.launch.targets import Pbs, Scheduler, Slurm


def render(target: Scheduler, name: str, folder: Path, job: Path, python: str) -> str:
    """The whole script of a job: `folder` is where it was submitted, `job` its meeting place."""
    if isinstance(target, Slurm):
        directives, launcher = slurm_directives(target, name, job), slurm_launcher(target)
    else:
        assert isinstance(target, Pbs)
        directives, launcher = pbs_directives(target, name, job), target.launcher.replace("{nodes}", str(target.nodes))
    interpreter = "python" if target.venv or target.conda else quote(python)
    lines = ["#!/bin/bash", *directives, ""]
    if isinstance(target, Pbs):
        lines.append(f"exec >> {quote(str(job / 'log.txt'))} 2>&1  # PBS itself would show it only at the end")
    lines += preparation(target)
    lines += [
        f"cd {quote(str(folder))}",
        f"exec {interpreter} -m fever.launch.schedulers.supervisor {quote(str(job))} {launcher}",
    ]
    return "\n".join(lines) + "\n"


def preparation(target: Scheduler) -> list[str]:
    """What a site needs before Python starts."""
    lines = ["set -e"]
    if target.unset:
        lines.append(f"unset {' '.join(target.unset)}")
    lines += [f"module load {quote(module)}" for module in target.modules]
    if target.conda:
        lines += ['eval "$(conda shell.bash hook)"', f"conda activate {quote(target.conda)}"]
    if target.venv:
        lines += ["# shellcheck disable=SC1091", f". {quote(str(Path(target.venv).expanduser() / 'bin' / 'activate'))}"]
    lines += [f"export {name}={quote(value)}" for name, value in target.env.items()]
    return [*lines, *target.shell]


def lead_seconds(target: Scheduler) -> float:
    """How long before its limit the job saves; never more than a quarter of the time that it has."""
    return target.lead_seconds if target.seconds is None else min(target.lead_seconds, target.seconds / 4)


def clock(seconds: float) -> str:
    """`HH:MM:SS`, as schedulers write it."""
    whole = round(seconds)
    return f"{whole // 3600:02d}:{whole // 60 % 60:02d}:{whole % 60:02d}"


# Slurm


def slurm_directives(target: Slurm, name: str, job: Path) -> list[str]:
    shared = [f"--account={target.account}" if target.account else "", f"--qos={target.qos}" if target.qos else ""]
    shared.append(f"--time={clock(target.seconds)}" if target.seconds else "")
    samplers = [
        f"--nodes={target.nodes - (target.learner is not None)}",
        "--ntasks-per-node=1",
        f"--cpus-per-task={target.cpus_per_node}" if target.cpus_per_node else "--exclusive",
        f"--partition={target.partition}" if target.partition else "",
        *shared,
        *target.options,
    ]
    whole = [
        f"--job-name={quote(name)}",
        f"--output={quote(str(job / 'log.txt').replace('%', '%%'))}",
        "--open-mode=append",
        f"--signal=B:USR1@{round(lead_seconds(target))}",
        "--requeue" if target.requeue else "--no-requeue",
    ]
    if target.learner is None:
        return [f"#SBATCH {option}" for option in (*whole, *samplers) if option]
    learner = target.learner
    cpus, partition = learner.cpus or target.cpus_per_node, learner.partition or target.partition
    first = [
        "--nodes=1",
        "--ntasks-per-node=1",
        f"--cpus-per-task={cpus}" if cpus else "--exclusive",
        f"--gpus-per-node={learner.gpus}" if learner.gpus else "",
        f"--partition={partition}" if partition else "",
        *shared,
        *learner.options,
        *(target.options if target.nodes == 1 else ()),
    ]
    directives = [f"#SBATCH {option}" for option in (*whole, *first) if option]
    if target.nodes > 1:
        directives += ["#SBATCH hetjob", *(f"#SBATCH {option}" for option in samplers if option)]
    return directives


def slurm_launcher(target: Slurm) -> str:
    """One rank per machine; none is bound to a core, and one that dies does not take the others with it."""
    groups = ["--het-group=0,1"] if target.learner is not None and target.nodes > 1 else []
    count = (target.learner.cpus if target.learner else None) or target.cpus_per_node  # of one machine, the learner's
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


# PBS


def pbs_directives(target: Pbs, name: str, job: Path) -> list[str]:
    short = re.sub(r"[^\w.-]", "-", name)[:15]
    cpus = f":ncpus={target.cpus_per_node}" if target.cpus_per_node else ""
    resources = target.select or f"select={target.nodes}{cpus}"
    options = [
        f"-N {short}",
        f"-A {target.account}" if target.account else "",
        f"-q {target.partition}" if target.partition else "",
        f"-l {resources}",
        f"-l place=scatter{'' if target.cpus_per_node else ':excl'}" if not target.select else "",
        f"-l walltime={clock(target.seconds)}" if target.seconds else "",
        "-j oe",
        f"-o {quote(str(job / 'scheduler.txt'))}",
        f"-r {'y' if target.requeue else 'n'}",
        *target.options,
    ]
    return [f"#PBS {option}" for option in options if option]
