"""The Ray that workers run on: a private one on this machine, or the one that a job's machines have formed."""

from __future__ import annotations

import logging
import math
import os
import secrets
import signal
import socket
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from fever.errors import FeverError
from fever.job import HEAD, JOB, LEFT, PLAN, JobFolder, autoscaled_machines, current_job
from fever.system import usable_cores

AGAIN_SECONDS = 0.2  # for which an answer about the machines is good
RAY_SETTINGS = {  # quiet, and closed to everybody without the token; Ray reads them once, when it is imported
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_SCHEDULER_EVENTS": "0",
    "RAY_IGNORE_UNHANDLED_ERRORS": "1",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_AUTH_MODE": "token",
}
WORKER_VARIABLES = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}


class Machine(NamedTuple):
    """One of the machines that workers run on."""

    node: str  # Ray's name for it
    host: str
    cores: float


class Cluster:
    """A Ray that this process is connected to."""

    def __init__(self, owned: bool) -> None:
        import ray

        self.ray = ray
        self.owned = owned  # started or joined by us: ours to leave
        self.elastic = is_elastic()  # machines may come and go
        context = ray.get_runtime_context()
        self.here, self.head = context.get_node_id(), context.gcs_address
        self.seen: list[Machine] = []
        self.asked = -AGAIN_SECONDS

    @property
    def cores(self) -> float:
        """Of all machines that are alive."""
        return sum(machine.cores for machine in self.machines())

    def machines(self, now: bool = False) -> list[Machine]:
        """Those that are alive, as of a moment ago."""
        if now or time.monotonic() - self.asked > AGAIN_SECONDS:
            self.seen = [
                Machine(node["NodeID"], node["NodeManagerHostname"], node["Resources"].get("CPU", 0.0))
                for node in self.ray.nodes()
                if node["Alive"]
            ]
            self.asked = time.monotonic()
        return self.seen

    def roomiest(self, workers: Iterable[Machine | None]) -> Machine:
        """Where the next worker goes, if these are where the others are: fewest workers per core, the learner's machine
        last of equals."""
        load = Counter(machine.node for machine in workers if machine is not None)

        def fullness(machine: Machine) -> tuple[float, bool]:
            return (load[machine.node] + 1) / max(machine.cores, 0.5), machine.node == self.here

        return min(self.machines(), key=fullness)

    def reachable(self) -> bool:
        """Whether Ray's head answers; a scheduler that cancels a job ends Ray together with the training."""
        host, _, port = self.head.rpartition(":")
        try:
            with socket.create_connection((host, int(port)), timeout=1):
                return True
        except OSError:
            return False

    def require_gpus(self, count: float, share: float = 1.0) -> None:
        """Refuse to wait for ever for GPUs that no machine has: so many together, a share of one for every worker."""
        there = self.ray.cluster_resources().get("GPU", 0.0)
        if count > there:
            raise FeverError(
                f"the workers want {count:g} GPUs together, but there are {there:g}; lower gpus_per_worker"
            )
        if share < 1 and round(count / share) > there * math.floor(1 / share + 1e-9):  # a share is of one GPU
            raise FeverError(
                f"{round(count / share)} workers with {share:g} of a GPU each do not fit on {there:g} GPUs; "
                "lower gpus_per_worker"
            )

    def require_cores(self, who: str, bundles: list[dict[str, float]]) -> None:
        """Refuse processes that would wait for ever for cores: all need more than there are, or one more than any
        machine has."""
        wanted = [bundle.get("CPU", 0.0) for bundle in bundles]
        if sum(wanted) > self.cores:
            raise FeverError(
                f"{who} needs {sum(wanted):g} cores for its processes, but there are {self.cores:g}; "
                "lower --workers or num_learners"
            )
        largest = max((machine.cores for machine in self.machines()), default=0.0)
        if max(wanted, default=0.0) > largest:
            raise FeverError(
                f"{who} needs {max(wanted):g} cores for one process, but no machine has more than {largest:g}; "
                "lower num_cpus_per_env_runner or num_cpus_per_learner"
            )

    def leave(self) -> None:
        """End this process's part in Ray, and a private Ray as a whole."""
        if (self.owned or self.elastic) and self.reachable():
            demand(0)
            self.ray.shutdown()


def is_elastic() -> bool:
    """Whether this process drives a job on a cluster that stays up, so that its machines may come and go."""
    job = current_job()
    return job is not None and job.read(PLAN) is None


def demand(machines: int) -> None:
    """Ask Ray's autoscaler for so many of the machines that it may launch, if there is one; 0: they may go."""
    if autoscaled_machines() is not None:
        from ray.autoscaler.sdk import request_resources

        request_resources(bundles=[{"fever_worker": 1}] * machines)


def connect(workers: int) -> Cluster:
    """The job's Ray if this process drives a job, otherwise a private one on this machine; or what there is already."""
    job = current_job()
    if "ray" not in sys.modules:
        settings = {**RAY_SETTINGS, **({} if job else {"RAY_AUTH_TOKEN": secrets.token_hex(32)})}
        if job and job.read(HEAD) is None:  # a Ray that stays up has its own way, or none
            settings.pop("RAY_AUTH_MODE")
        for name, value in settings.items():
            os.environ.setdefault(name, value)
    import ray

    if ray.is_initialized():
        return Cluster(owned=False)
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR, "configure_logging": False}
    runtime: dict[str, Any] = {"env_vars": WORKER_VARIABLES}
    if job is None:
        cores = max(workers, os.cpu_count() or 1)
        with _own_signals():
            ray.init(address="local", num_cpus=cores, include_dashboard=False, runtime_env=runtime, **quiet)
        return Cluster(owned=True)
    plan, head = job.read(PLAN), job.read(HEAD)
    address = head["address"] if head else os.environ.get("RAY_ADDRESS")  # by Ray, on a cluster that stays up
    if address is None:
        raise FeverError(f"{job.path} has no cluster (any more); {JOB} is for fever's own processes")
    if plan is not None and plan["ship"]:
        runs = os.path.relpath(job.path.parents[1])
        runtime |= {"working_dir": os.getcwd(), "excludes": [".git", ".venv", *([] if runs[:2] == ".." else [runs])]}
    with _own_signals():
        ray.init(address=address, runtime_env=runtime, **quiet)
    cluster = Cluster(owned=True)
    demand(autoscaled_machines() or 0)
    if plan is not None:
        _await_machines(cluster, plan, job)
    return cluster


@contextmanager
def _own_signals() -> Iterator[None]:
    """Keep this process's way of handling SIGTERM, which Ray replaces by an immediate exit."""
    kept = signal.getsignal(signal.SIGTERM)
    yield
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, kept)


def _await_machines(cluster: Cluster, plan: dict[str, Any], folder: JobFolder) -> None:
    """Ask Ray until every host of the plan has joined; too late is a sentence that names those that have not."""
    deadline = time.monotonic() + plan["connect_seconds"]
    while missing := set(plan["nodes"]) - {machine.host for machine in cluster.machines()}:
        left = folder.names(LEFT)
        gone = {host for host in missing if str(plan["nodes"][host]["rank"]) in left}  # they have given up
        if gone or time.monotonic() > deadline:
            hosts = sorted(gone or missing)
            words = "; ".join(f"{host} said last: {folder.last_words(host) or 'nothing'}" for host in hosts)
            raise FeverError(f"{', '.join(hosts)} did not join Ray; {words}")
        time.sleep(AGAIN_SECONDS / 2)


def try_everywhere(cluster: Cluster, source: Any) -> None:
    """Make an environment once on every machine, all at once; what one of them lacks is said with its name."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    packed, places = cluster.ray.cloudpickle.dumps(source), [path or os.getcwd() for path in sys.path]
    trials = {}
    for machine in cluster.machines():
        where = NodeAffinitySchedulingStrategy(machine.node, soft=False)
        trial = cluster.ray.remote(_try).options(num_cpus=0.001, max_retries=0, scheduling_strategy=where)
        trials[machine] = trial.remote(places, packed)
    for machine, call in trials.items():
        try:
            cluster.ray.get(call)
        except cluster.ray.exceptions.RayTaskError as error:
            cause = error.cause if error.cause is not None else error
            text = str(cause) if isinstance(cause, FeverError) else f"{type(cause).__name__}: {cause}"
            raise FeverError(f"on {machine.host}: {text}") from None
        except cluster.ray.exceptions.RayError as error:  # it went meanwhile; the others can do without it
            logging.warning("%s was not tried: %s", machine.host, error)


def _try(places: list[str], packed: bytes) -> None:
    """What `try_everywhere` does on one machine."""
    import ray.cloudpickle

    sys.path.extend(path for path in places if path not in sys.path)
    from fever.envs.source import EnvContext, make_any

    with tempfile.TemporaryDirectory(prefix="fever-") as folder:
        make_any(ray.cloudpickle.loads(packed), EnvContext(workdir=Path(folder))).close()


def cores_in_reach() -> int:
    """Cores that workers may use: of all the job's machines, or of this one."""
    return int(sum(machines_in_reach()))


def machines_in_reach() -> list[float]:
    """The cores of every machine that workers may be on: of all the job's, or of this one."""
    job = current_job()
    if job is None:
        return [usable_cores()]
    plan = job.read(PLAN)
    if plan is not None:
        return [node["cores"] for node in plan["nodes"].values()]
    return [machine.cores for machine in connect(0).machines()]
