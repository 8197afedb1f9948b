"""The Ray cluster that workers run on: a private one on this machine, or that of a job."""

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

REFRESH_SECONDS = 0.2  # for which the list of machines is reused
RAY_SETTINGS = {  # quiet, and closed to processes without the token; Ray reads them once, on import
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
    """The Ray cluster that this process is connected to."""

    def __init__(self, owned: bool) -> None:
        import ray

        self.ray = ray
        self.owned = owned  # started or joined by this process, which shuts it down or leaves it
        self.elastic = is_elastic()  # machines may come and go
        context = ray.get_runtime_context()
        self.here, self.head = context.get_node_id(), context.gcs_address
        self.seen: list[Machine] = []
        self.asked = -REFRESH_SECONDS

    @property
    def cores(self) -> float:
        """Cores of all machines that are alive."""
        return sum(machine.cores for machine in self.machines())

    def machines(self, now: bool = False) -> list[Machine]:
        """The machines that are alive, at most REFRESH_SECONDS ago; with `now`, at this moment."""
        if now or time.monotonic() - self.asked > REFRESH_SECONDS:
            self.seen = [
                Machine(node["NodeID"], node["NodeManagerHostname"], node["Resources"].get("CPU", 0.0))
                for node in self.ray.nodes()
                if node["Alive"]
            ]
            self.asked = time.monotonic()
        return self.seen

    def least_loaded(self, workers: Iterable[Machine | None]) -> Machine:
        """The machine for the next worker, given those of the others: fewest workers per core, and among equals not the
        learner's."""
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
        """Raise FeverError if the machines have fewer than `count` GPUs, or cannot give each worker its share."""
        available = self.ray.cluster_resources().get("GPU", 0.0)
        if count > available:
            raise FeverError(
                f"the workers want {count:g} GPUs together, but there are {available:g}; lower gpus_per_worker"
            )
        if share < 1 and round(count / share) > available * math.floor(1 / share + 1e-9):  # a share is of one GPU
            raise FeverError(
                f"{round(count / share)} workers with {share:g} of a GPU each do not fit on {available:g} GPUs; "
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
        """Disconnect from Ray; a private Ray is shut down."""
        if (self.owned or self.elastic) and self.reachable():
            demand(0)
            self.ray.shutdown()


def is_elastic() -> bool:
    """Whether this process drives a job on a cluster that outlives jobs, where machines may join and leave."""
    job = current_job()
    return job is not None and job.read(PLAN) is None


def demand(machines: int) -> None:
    """Ask Ray's autoscaler, if there is one, for this many of its machines; 0 releases them."""
    if autoscaled_machines() is not None:
        from ray.autoscaler.sdk import request_resources

        request_resources(bundles=[{"fever_worker": 1}] * machines)


def connect(workers: int) -> Cluster:
    """Connect to the job's Ray if this process drives a job, otherwise start a private one; reuse a connection."""
    job = current_job()
    if "ray" not in sys.modules:
        settings = {**RAY_SETTINGS, **({} if job else {"RAY_AUTH_TOKEN": secrets.token_hex(32)})}
        if job and job.read(HEAD) is None:  # a cluster that outlives jobs has its own authentication, or none
            settings.pop("RAY_AUTH_MODE")
        for name, value in settings.items():
            os.environ.setdefault(name, value)
    import ray

    if ray.is_initialized():
        return Cluster(owned=False)
    logging.getLogger("ray.widgets").setLevel(logging.WARNING)  # in a notebook it recommends packages
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR, "configure_logging": False}
    runtime: dict[str, Any] = {"env_vars": WORKER_VARIABLES}
    if job is None:
        cores = max(workers, os.cpu_count() or 1)
        with _own_signals():
            ray.init(address="local", num_cpus=cores, include_dashboard=False, runtime_env=runtime, **quiet)
        return Cluster(owned=True)
    plan, head = job.read(PLAN), job.read(HEAD)
    address = head["address"] if head else os.environ.get("RAY_ADDRESS")  # set by Ray on a cluster that outlives jobs
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
    """Keep this process's handler of SIGTERM, which ray.init replaces by an immediate exit."""
    kept = signal.getsignal(signal.SIGTERM)
    yield
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, kept)


def _await_machines(cluster: Cluster, plan: dict[str, Any], folder: JobFolder) -> None:
    """Wait until every host of the plan has joined; after the deadline, raise FeverError with the missing hosts."""
    deadline = time.monotonic() + plan["connect_seconds"]
    while missing := set(plan["nodes"]) - {machine.host for machine in cluster.machines()}:
        left = folder.names(LEFT)
        gone = {host for host in missing if str(plan["nodes"][host]["rank"]) in left}  # they have given up
        if gone or time.monotonic() > deadline:
            hosts = sorted(gone or missing)
            words = "; ".join(f"{host} said last: {folder.last_words(host) or 'nothing'}" for host in hosts)
            raise FeverError(f"{', '.join(hosts)} did not join Ray; {words}")
        time.sleep(REFRESH_SECONDS / 2)


def try_everywhere(cluster: Cluster, source: Any) -> None:
    """Make an environment on every machine, in parallel; an error names the machine."""
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
        except cluster.ray.exceptions.RayError as error:  # the machine left; the others are enough
            logging.warning("%s was not checked: %s", machine.host, error)


def _try(places: list[str], packed: bytes) -> None:
    """The task of `try_everywhere` on one machine."""
    import ray.cloudpickle

    sys.path.extend(path for path in places if path not in sys.path)
    from fever.envs.source import EnvContext, make_any

    with tempfile.TemporaryDirectory(prefix="fever-") as folder:
        make_any(ray.cloudpickle.loads(packed), EnvContext(workdir=Path(folder))).close()


def cores_in_reach() -> int:
    """Number of cores for workers: of all machines of the job, or of this machine."""
    return int(sum(machines_in_reach()))


def machines_in_reach() -> list[float]:
    """Cores of each machine for workers: all of the job's, or this one."""
    job = current_job()
    if job is None:
        return [usable_cores()]
    plan = job.read(PLAN)
    if plan is not None:
        return [node["cores"] for node in plan["nodes"].values()]
    return [machine.cores for machine in connect(0).machines()]
