"""The machines that workers can run on: how many cores they have, and whether the environment can be made on each."""

from __future__ import annotations

import logging
import sys
import tempfile
from pathlib import Path
from typing import Any

from fever.errors import FeverError
from fever.job import PLAN, current_job
from fever.sampling.ray_cluster import ANSWER_SECONDS, Cluster, connect
from fever.system import absolute_sys_path, usable_cores


def try_everywhere(cluster: Cluster, source: Any) -> None:
    """Make an environment on every machine, in parallel; an error names the machine."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    packed, places = cluster.ray.cloudpickle.dumps(source), absolute_sys_path()
    trials = {}
    for machine in cluster.machines():
        where = NodeAffinitySchedulingStrategy(machine.node, soft=False)
        trial = cluster.ray.remote(_try).options(num_cpus=0.001, max_retries=0, scheduling_strategy=where)
        trials[machine] = trial.remote(places, packed)
    for machine, call in trials.items():
        try:
            cluster.wait([call])
            cluster.ray.get(call, timeout=ANSWER_SECONDS)
        except cluster.ray.exceptions.RayTaskError as error:
            cause = error.cause if error.cause is not None else error
            text = str(cause) if isinstance(cause, FeverError) else f"{type(cause).__name__}: {cause}"
            raise FeverError(f"on {machine.host}: {text}") from None
        except cluster.ray.exceptions.RayError as error:  # the machine left; the others are enough
            logging.warning("%s was not checked: %s", machine.host, error)


def _try(places: list[str], packed: bytes) -> None:
    """The task of `try_everywhere` on one machine."""
    import ray.cloudpickle

    sys.path.extend(path for path in places if path not in sys.path)
    from fever.envs.source import EnvContext, make_any
    from fever.envs.watchdog import close_quietly

    source = ray.cloudpickle.loads(packed)
    with tempfile.TemporaryDirectory(prefix="fever-") as folder:
        close_quietly(source.name, make_any(source, EnvContext(workdir=Path(folder))).close)


def cores_in_reach() -> int:
    """Number of cores for workers: of all machines of the job, or of this machine."""
    return int(sum(machines_in_reach()))


def ranks_in_reach() -> int | None:
    """The number of the job's ranks; None without a job that has some."""
    job = current_job()
    plan = None if job is None else job.read(PLAN)
    return None if plan is None else len(plan["members"])


def require_ranks() -> int:
    """The number of the job's ranks. Raises FeverError if there are none."""
    ranks = ranks_in_reach()
    if ranks is None:
        raise FeverError("--workers ranks is one worker for each rank of --on mpi or a scheduler; here are no ranks")
    return ranks


def places_on(machines: list[float], cpus: int | None) -> int:
    """How many workers with so many cores each fit on machines with these numbers of cores."""
    return sum(int(cores) // (cpus or 1) for cores in machines)


def require_processes(workers: Any, cpus: int | None) -> None:
    """Raise FeverError if there are no worker processes that could have cores of their own."""
    if cpus is not None and workers == 0:
        raise FeverError(f"--cpus-per-worker {cpus} is for worker processes, and --workers 0 has none")


def require_room(machines: list[float], cpus: int) -> None:
    """Raise FeverError if no machine has so many cores for a worker."""
    if not places_on(machines, cpus):
        cores = f"the largest machine has {max(machines):g}" if len(machines) > 1 else f"there are {machines[0]:g}"
        raise FeverError(f"--cpus-per-worker {cpus}: {cores} cores")


def machines_in_reach() -> list[float]:
    """Cores of each machine for workers: all of the job's, or this one."""
    job = current_job()
    if job is None:
        return [usable_cores()]
    plan = job.read(PLAN)
    if plan is not None:
        return [node["cores"] for node in plan["nodes"].values()]
    return [machine.cores for machine in connect(0).machines()]
