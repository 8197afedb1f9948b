"""The Ray cluster that workers run on: a private one on this machine, or that of a job."""

from __future__ import annotations

import atexit
import logging
import math
import os
import queue
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

from fever.envs.local_folder import LOCAL
from fever.errors import FeverError, RayLost, TrainingError
from fever.job import HEAD, JOB, LEFT, PLAN, JobFolder, autoscaled_machines, current_job, hosts_allowed
from fever.sampling.launched import await_launched
from fever.sampling.ray_folder import clear, make_folder
from fever.sampling.ray_settings import apply_settings, mpi_settings
from fever.sampling.ray_start import (
    PRIVATE,
    deaths_noticed,
    ending,
    lean,
    log_events,
    own_signals,
    processes_of,
    start_errors,
)
from fever.scratch import Scratch
from fever.signals import uninterruptible
from fever.system import STOPPED, process_state

REFRESH_SECONDS = 0.2  # for which the list of machines is reused
ANSWER_SECONDS = 60.0  # for Ray's head to answer a question
STOPPED_SECONDS = 2.0  # between two looks at whether a part of our own Ray is stopped
HEAD_SECONDS = 5.0  # between two looks at whether the head of somebody else's Ray is there
GONE_SECONDS = 30.0  # without that head until Ray counts as lost
SHUTDOWN_SECONDS = 60.0  # for a Ray that has lost a part of itself to end
SLICE_SECONDS = 0.5  # of every wait, after which Ray is checked, and signals are handled
STARTS = 2  # attempts to start a Ray of our own, whose parts have fixed times to start in: the machine may be busy
THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS")
WORKER_VARIABLES = dict.fromkeys(THREADS, "1")


class Machine(NamedTuple):
    """One of the machines that workers run on."""

    node: str  # Ray's name for it
    host: str
    cores: float


class Cluster:
    """The Ray cluster that this process is connected to."""

    def __init__(self, owned: bool, folder: Scratch | None = None) -> None:
        import ray

        self.ray = ray
        self.owned = owned  # started or joined by this process, which shuts it down or leaves it
        self.folder = folder  # of a private Ray
        self.elastic = is_elastic()  # machines may come and go
        context = ray.get_runtime_context()
        self.here, self.head = context.get_node_id(), context.gcs_address
        self.seen: list[Machine] = []
        self.asked = -REFRESH_SECONDS
        self.processes = own_processes()
        self.loss: RayLost | None = None  # with its traceback: freeing arrays of a dead Ray would end this process
        self.stopped: set[str] = set()  # parts of our own Ray that were stopped at the last look
        self.looked = self.answered = time.monotonic()  # for the head of somebody else's Ray, and saw it

    @property
    def private(self) -> bool:
        """Whether this process has started Ray for itself, and can start it anew."""
        return self.owned and bool(self.processes)

    def check(self) -> None:
        """Raise RayLost if Ray itself has died. To be called before anything that uses Ray's object store: without Ray,
        that ends this process. Takes microseconds."""
        if self.loss is None:
            dead = [name for name, process in self.processes.items() if process.poll() is not None]
            if dead:
                self.loss = RayLost(f"Ray's {dead[0]} died ({ending(self.processes[dead[0]].returncode)})")
            elif self.processes:
                self._look_for_stopped()
            elif time.monotonic() - self.looked > HEAD_SECONDS:
                self._look_for_head()
        if self.loss is not None:
            raise self.loss

    def _look_for_stopped(self) -> None:
        """Kill a part of our own Ray that is stopped (SIGSTOP): without it, nothing would ever answer."""
        if time.monotonic() - self.looked < STOPPED_SECONDS:
            return
        self.looked = time.monotonic()
        stopped = {name for name, process in self.processes.items() if process_state(process.pid) == STOPPED}
        for name in stopped & self.stopped:
            logging.warning("Ray's %s is stopped, and is killed", name)
            self.processes[name].kill()
        self.stopped = stopped

    def _look_for_head(self) -> None:
        self.looked = time.monotonic()
        if self.reachable():
            self.answered = self.looked
        elif self.looked - self.answered > GONE_SECONDS:
            self.loss = RayLost(f"Ray's head at {self.head} has not answered for {GONE_SECONDS:.0f} s")

    def wait(
        self, calls: list[Any], seconds: float | None = None, meanwhile: Callable[[], None] = lambda: None
    ) -> None:
        """Wait until all calls have ended. Between slices of the wait Ray is checked, signals are handled, and
        `meanwhile` is called. Raises RayLost, and Ray's GetTimeoutError after so many seconds."""
        deadline = math.inf if seconds is None else time.monotonic() + seconds
        self.check()
        while len(self.ray.wait(calls, num_returns=len(calls), timeout=SLICE_SECONDS)[0]) < len(calls):
            self.check()
            meanwhile()
            if time.monotonic() > deadline:
                raise self.ray.exceptions.GetTimeoutError(f"no answer within {seconds:.0f} s")

    def ask(self, question: Callable[[], Any]) -> Any:
        """What Ray's head answers to `question()`. In a thread: Ray itself would wait for ever for a dead head."""
        answers: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()

        def answer() -> None:
            try:
                answers.put((question(), None))
            except BaseException as error:  # noqa: BLE001 - raised below
                answers.put((None, error))

        threading.Thread(target=answer, name="question", daemon=True).start()
        deadline = time.monotonic() + ANSWER_SECONDS
        while True:
            self.check()
            try:
                value, error = answers.get(timeout=SLICE_SECONDS)
            except queue.Empty:
                if time.monotonic() > deadline:
                    self.loss = RayLost(f"Ray's head has not answered for {ANSWER_SECONDS:.0f} s")
                continue
            if error is not None:
                raise error
            return value

    @property
    def cores(self) -> float:
        """Cores of all machines that are alive."""
        return sum(machine.cores for machine in self.machines())

    def machines(self, now: bool = False) -> list[Machine]:
        """The machines that are alive, at most REFRESH_SECONDS ago; with `now`, at this moment. Of a cluster that
        outlives jobs, those that the job may use: the learner's and the first ones by name."""
        if now or time.monotonic() - self.asked > REFRESH_SECONDS:
            seen = [
                Machine(node["NodeID"], node["NodeManagerHostname"], node["Resources"].get("CPU", 0.0))
                for node in self.ask(self.ray.nodes)
                if node["Alive"]
            ]
            if self.limited:
                seen = sorted(seen, key=lambda machine: (machine.node != self.here, machine.host))[: hosts_allowed()]
            self.seen = seen
            self.asked = time.monotonic()
        return self.seen

    @property
    def limited(self) -> bool:
        """Whether the job may use only some of the machines."""
        return self.elastic and hosts_allowed() is not None

    def least_loaded(self, workers: Iterable[Machine | None]) -> Machine:
        """The machine for the next worker, given those of the others: fewest workers per core, and among equals not the
        learner's."""
        load = Counter(machine.node for machine in workers if machine is not None)

        def fullness(machine: Machine) -> tuple[float, bool]:
            return (load[machine.node] + 1) / max(machine.cores, 0.5), machine.node == self.here

        return min(self.machines(), key=fullness)

    def spread(self, index: int) -> Any:
        """Where Ray is to place the process of this number that is no worker: by turns on the job's machines."""
        if not self.limited:
            return "SPREAD"
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        machines = self.machines()
        return NodeAffinitySchedulingStrategy(machines[index % len(machines)].node, soft=True)

    def reachable(self) -> bool:
        """Whether Ray is there; a scheduler that cancels a job ends Ray together with the training."""
        if self.loss is not None or self.processes:
            return self.loss is None and all(process.poll() is None for process in self.processes.values())
        host, _, port = self.head.rpartition(":")
        try:
            with socket.create_connection((host, int(port)), timeout=1):
                return True
        except OSError:
            return False

    def require_gpus(self, count: float, share: float = 1.0) -> None:
        """Raise FeverError if the machines have fewer than `count` GPUs, or cannot give each worker its share."""
        available = self.ask(self.ray.cluster_resources).get("GPU", 0.0)
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

    @contextmanager
    def _ending_stopped(self) -> Iterator[None]:
        """A block that asks our own Ray for something in C, where a part of it that is stopped would be waited for for
        ever: another thread looks after its parts meanwhile."""
        over = threading.Event()

        def look() -> None:
            while not over.wait(SLICE_SECONDS):
                self._look_for_stopped()

        thread = threading.Thread(target=look, name="stopped", daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()

    def leave(self) -> None:
        """Disconnect from Ray; a private Ray is shut down, also what is left of one that died."""
        if PRIVATE.cluster is self:
            PRIVATE.cluster = None
        if (self.owned or self.elastic) and self.reachable():
            demand(0)
            with self._ending_stopped():
                self.ray.shutdown()
        elif self.private and self.ray.is_initialized():
            ending = threading.Thread(target=self.ray.shutdown, name="shutdown", daemon=True)
            ending.start()
            ending.join(SHUTDOWN_SECONDS)
            if ending.is_alive():
                raise TrainingError(f"Ray died and could not be ended within {SHUTDOWN_SECONDS:.0f} s")
        if self.folder is not None:
            self.folder.remove()


def own_processes() -> dict[str, Any]:
    """Ray's raylet and GCS as `subprocess.Popen`, if this process has started them; empty if Ray is somebody else's."""
    from ray._private import worker

    return processes_of(worker._global_node)


def is_elastic() -> bool:
    """Whether this process drives a job on a cluster that outlives jobs, where machines may join and leave."""
    job = current_job()
    return job is not None and job.read(PLAN) is None


def demand(machines: int) -> None:
    """Ask Ray's autoscaler, if there is one, for this many of its machines; 0 releases them."""
    if autoscaled_machines() is not None:
        from ray.autoscaler.sdk import request_resources

        request_resources(bundles=[{"fever_worker": 1}] * machines)


def release() -> None:
    """Ask for no machines any more, if there is still a Ray to ask."""
    import ray

    if ray.is_initialized():
        with suppress(Exception):  # Ray is lost, and its autoscaler with it
            demand(0)


def connect(workers: int) -> Cluster:
    """Connect to the job's Ray if this process drives a job, otherwise start a private one; reuse a connection."""
    job = current_job()
    apply_settings(job)
    import ray

    if ray.is_initialized():
        return Cluster(owned=False)
    logging.getLogger("ray.widgets").setLevel(logging.WARNING)  # in a notebook it recommends packages
    log_events()
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR, "configure_logging": False}
    variables = {**WORKER_VARIABLES, **mpi_settings()}
    if job is None:
        more = {"num_cpus": max(workers, os.cpu_count() or 1), **quiet}
        for _ in range(STARTS - 1):
            try:
                return _start_private_ray(variables, more)
            except Exception as error:  # noqa: BLE001 - raised by the last attempt
                logging.warning("Ray did not start, and is started once more: %s", error)
        with start_errors():
            return _start_private_ray(variables, more)
    plan, head = job.read(PLAN), job.read(HEAD)
    address = head["address"] if head else os.environ.get("RAY_ADDRESS")  # set by Ray on a cluster that outlives jobs
    if address is None:
        raise FeverError(f"{job.path} has no cluster (any more); {JOB} is for fever's own processes")
    runtime: dict[str, Any] = {"env_vars": variables}
    if plan is not None and plan["ship"]:
        runs = os.path.relpath(job.path.parents[1])
        runtime |= {"working_dir": os.getcwd(), "excludes": [".git", ".venv", *([] if runs[:2] == ".." else [runs])]}
    with own_signals(), start_errors():
        ray.init(address=address, runtime_env=runtime, **quiet)
    cluster = Cluster(owned=True)
    launched, allowed = autoscaled_machines() or 0, hosts_allowed()
    launched = launched if allowed is None else min(launched, allowed - 1)
    demand(launched)  # besides the head
    if launched:
        atexit.register(release)  # also if the run cannot begin
    if launched and (workers == 0 or workers > cluster.cores):  # 0: the machines are asked for
        await_launched(cluster, launched)
    if plan is not None:
        _await_machines(cluster, plan, job)
    return cluster


def _start_private_ray(variables: dict[str, str], options: dict[str, Any]) -> Cluster:
    """Start a Ray of our own on this machine, with these variables for its workers; if that fails, nothing is left."""
    import ray

    if PRIVATE.killed:
        raise RayLost("it was killed")
    PRIVATE.folder = folder = make_folder()
    runtime = {"env_vars": {**variables, LOCAL: str(folder.path)}}
    options = {**options, "runtime_env": runtime, "include_dashboard": False}
    try:
        with own_signals(), deaths_noticed(), lean():
            ray.init(address="local", _temp_dir=str(folder.ray), **options)
        PRIVATE.cluster = Cluster(owned=True, folder=folder)
    except BaseException:  # a signal that has waited, too
        with uninterruptible():
            ray.shutdown()  # what has started
            folder.remove()
        raise
    return PRIVATE.cluster


def leave_private_ray() -> None:
    """Shut a private Ray down that nobody has left, because what was to use it could not be made."""
    if PRIVATE.cluster is not None:
        PRIVATE.cluster.leave()


def kill_private_ray() -> None:
    """Kill the processes of a private Ray at once, if this process has one, or is starting one. This process ends, too:
    what Ray's threads in it raise about that is no news."""
    PRIVATE.killed = True
    threading.excepthook = lambda raised: None
    for started in [started for node in PRIVATE.nodes for started in [*node.all_processes.values()]]:
        for one in started:
            with suppress(OSError):
                one.process.kill()
    if PRIVATE.folder is not None:
        clear(PRIVATE.folder.path)


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
