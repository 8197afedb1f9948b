"""Worker processes as Ray actors: started, replaced when they die, adjusted to the machines, kept busy, closed."""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace
from typing import Any, NamedTuple

from fever.envs.source import EnvSource
from fever.errors import FeverError, TrainingError
from fever.policy import Params
from fever.sampling.pool import Pool
from fever.sampling.ray_cluster import Machine, connect
from fever.sampling.spec import SamplerSpec

ADJUST_SECONDS = 1.0  # between two checks of whether machines joined or left
RETRY_SECONDS = 60.0  # until the next check after a worker could not be started on a new machine
DEATHS_ALLOWED = 5  # of one worker without a result in between, before the run gives up
CLOSE_SECONDS = 10  # for environments to close before their worker is killed
OUTPUT_BYTES = 10_000  # of a worker's output that one call returns at most, of each file


class RayPool(Pool):
    """Worker processes as Ray actors, on this machine or on a cluster; a worker that dies is replaced.

    On an elastic cluster the number of workers follows the machines: workers of a machine that left are not moved to
    the others, and a machine that joins gets new ones (`adjust_to_machines`). `active` lists the workers that may be
    given work.
    """

    def __init__(
        self,
        make_runner: Callable[..., Any],
        spec: SamplerSpec,
        arguments: tuple[Any, ...],
        count: int,
        generation: int,
    ) -> None:
        """Each worker calls the methods of `make_runner(spec, *arguments)`, made in its own process."""
        self.make_runner, self.sampler_spec, self.arguments = make_runner, spec, arguments
        self.cluster = connect(count)
        self.ray = self.cluster.ray
        self.count, self.restarts = count, 0
        self.placement: list[Machine | None] = [None] * count  # of each worker
        self.generations = [generation] * count
        self.sources: dict[int, EnvSource] = {}  # worker -> the environment, with the arguments that it was told
        self.deaths: Counter[int] = Counter()  # of each worker since its last result
        self.actors: list[Any] = []  # None: its machine left
        self.output_positions: dict[int, dict[str, int]] = {}  # worker -> how far its output files were read
        self.active: list[int] = []
        self.building: dict[Any, int] = {}  # call -> worker whose environments are being made
        self.planned, self.planned_cores = count, max(1.0, self.cluster.cores)
        self.tracks_cores = self.alike = False
        self.adjusted = 0.0  # time of the last `adjust_to_machines`

    def start(self, index: int) -> Any:
        """Start the actor of one worker on the least loaded machine; returns before it is ready."""
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        spec = self.sampler_spec.for_worker(index, self.generations[index])
        self.sources[index] = spec.source
        if spec.gpus:
            self.cluster.require_gpus(spec.gpus * self.count, spec.gpus)
        self.placement[index] = None
        self.placement[index] = machine = self.cluster.least_loaded(self.placement)
        where = NodeAffinitySchedulingStrategy(machine.node, soft=True)  # another one, if it has died meanwhile
        packed = self.ray.cloudpickle.dumps((self.make_runner, (spec, *self.arguments)))
        options = {"num_cpus": 0.001, "num_gpus": spec.gpus, "max_restarts": 0, "scheduling_strategy": where}
        return self.ray.remote(WorkerActor).options(**options).remote(absolute_sys_path(), packed)

    def call(self, index: int, method: str, *arguments: Any) -> Any:
        """Have a worker call a method of its runner; returns Ray's reference, for `result`. If the environment's
        arguments have changed since its last call, the worker is told first: Ray keeps the order of calls."""
        source = self.sampler_spec.source
        if self.sources[index] is not source:
            self.sources[index] = source
            self.actors[index].change_env.remote(source.kwargs)
        return self.actors[index].call.remote(method, *arguments)

    def change_env(self, kwargs: dict[str, Any]) -> None:
        """As `Pool`. One assignment, because another thread may be calling workers."""
        self.sampler_spec = replace(self.sampler_spec, source=replace(self.sampler_spec.source, kwargs=kwargs))

    def result(self, call: Any, index: int) -> Any:
        """What a worker's call returned, with the worker's output logged; None if it died, and was replaced."""
        try:
            value, output = self.get(call)
        except self.lost as error:
            self.replace(index, error)
            return None
        self.log_output(index, output)
        self.deaths[index] = 0
        return value

    def log_output(self, index: int, output: Output) -> None:
        """Write into the run's log what the environments of a worker wrote to standard output and error."""
        self.output_positions[index] = output.positions
        for line in output.text.splitlines():
            logging.getLogger(f"worker {index}").info("%s", line)

    def start_all(self) -> None:
        """Start every worker and wait until their environments are made."""
        try:
            self.actors = [self.start(index) for index in range(self.count)]
            self._await_builds()
            self.alike = self._ask_starts()
            self.active = list(range(self.count))
        except BaseException:
            self.close()
            raise

    def _await_builds(self) -> None:
        """Wait until all environments are made; with several machines, an error names the machine."""
        calls = {actor.build.remote(): index for index, actor in enumerate(self.actors)}
        for call, index in calls.items():
            try:
                self.log_output(index, self.get(call))
            except FeverError as error:
                if not (where := self._where(index)):
                    raise
                raise FeverError(f"{where}{error}") from error
            except self.lost as error:
                died = f"{self._where(index)}worker {index} died while its environments were made"
                raise TrainingError(f"{died}: {reason_of(error)}") from error

    def starts_alike(self) -> bool:
        return self.alike

    def _ask_starts(self) -> bool:
        """What the first worker says of how its environments began."""
        if not self.actors:
            return False
        try:
            alike, output = self.get(self.call(0, "starts_alike"))
        except self.lost:
            return False  # it is replaced when it is given work
        self.log_output(0, output)
        return alike

    def _where(self, index: int) -> str:
        """ "on HOST: " for a worker on one of several machines, to begin a sentence with; empty with one machine."""
        machine = self.placement[index]
        return "" if machine is None or len(self.cluster.machines()) == 1 else f"on {machine.host}: "

    def store(self, params: Params) -> Any:
        return self.ray.put(params)

    def get(self, references: Any) -> Any:
        """`ray.get`, but a FeverError is raised as itself instead of inside a RayTaskError."""
        try:
            return self.ray.get(references)
        except self.ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, FeverError):
                raise error.cause from None
            raise

    @property
    def lost(self) -> tuple[type[Exception], ...]:
        """What `get` raises when a process or its machine died."""
        return loss_errors()

    def finished(self, calls: Iterable[Any], timeout: float | None = None) -> list[Any]:
        """All calls that have ended; waits up to `timeout` seconds for the first one."""
        pending = list(calls)
        if not self.ray.wait(pending, num_returns=1, timeout=timeout)[0]:
            return []
        return self.ray.wait(pending, num_returns=len(pending), timeout=0)[0]

    def replace(self, index: int, error: Exception) -> None:
        """Start another actor in the place of one that died."""
        output = Output.read(self.output_positions.pop(index, {}))  # its last words, if it was on this machine
        self.log_output(index, output)
        self.restarts += 1
        self.deaths[index] += 1
        self.generations[index] += 1
        if self.deaths[index] > DEATHS_ALLOWED:
            times = f"{self.deaths[index]} times in a row"
            raise TrainingError(f"worker {index} died {times}; the last reason: {reason_of(error)}")
        self.active.remove(index)
        crowded = sum(actor is not None for actor in self.actors) > self.wanted(now=True)
        if self.cluster.elastic and crowded and self.active:
            logging.info("worker %d left with its machine", index)
            self.actors[index] = self.placement[index] = None
            self.count = len(self.active)
        else:
            self.actors[index] = self.start(index)
            self.activate(index)

    def activate(self, index: int) -> None:
        """Let a worker be given work."""
        self.active.append(index)
        self.count = len(self.active)

    # machines that join and leave

    def track_cores(self, cores: int) -> None:
        self.tracks_cores, self.planned_cores = True, cores

    def wanted(self, now: bool = False) -> int:
        """The number of workers for the machines that are alive, at least one."""
        cores = sum(machine.cores for machine in self.cluster.machines(now))
        if self.tracks_cores:
            return max(1, self.planned + int(cores - self.planned_cores))
        share = round(self.planned * cores / self.planned_cores)  # there may be several workers per core
        return max(1, min(self.planned, max(int(cores), share)))

    def adjust_to_machines(self) -> None:
        """Start workers on machines that joined, and activate them once their environments are made; kill those that
        were moved to other machines before it was known that theirs had left."""
        if not self.cluster.elastic or time.monotonic() - self.adjusted < ADJUST_SECONDS:
            return
        self.adjusted = time.monotonic()
        for call in self.finished(self.building, timeout=0) if self.building else ():
            self._activate_built(self.building.pop(call), call)
        if self.adjusted > time.monotonic():
            return
        vacant = [index for index, actor in enumerate(self.actors) if actor is None]
        missing = self.wanted() - (len(self.actors) - len(vacant))
        self.kill(*(self.actors[index] for index in self.active[1:][missing:] if missing < 0))  # for `replace`
        for _ in range(missing):
            index = vacant.pop(0) if vacant else self._add_slot()
            self.generations[index] += 1
            self.actors[index] = self.start(index)
            self.building[self.actors[index].build.remote()] = index

    def _add_slot(self) -> int:
        self.actors.append(None)
        self.placement.append(None)
        self.generations.append(self.generations[0])
        return len(self.actors) - 1

    def _activate_built(self, index: int, call: Any) -> None:
        """Activate a worker on a new machine; if its environments cannot be made, the run goes on without it."""
        machine = self.placement[index]
        where = machine.host if machine else "a new machine"
        try:
            self.log_output(index, self.get(call))
        except Exception as error:  # noqa: BLE001 - whatever a new machine lacks is no reason to end the run
            logging.warning("worker %d cannot work on %s: %s", index, where, error)
            self.kill(self.actors[index])
            self.actors[index] = self.placement[index] = None
            self.adjusted = time.monotonic() + RETRY_SECONDS
        else:
            logging.info("worker %d joins on %s", index, where)
            self.activate(index)

    def close(self) -> None:
        try:
            actors = {index: actor for index, actor in enumerate(self.actors) if actor is not None}
            closing = {actor.close.remote(): index for index, actor in actors.items()}
            deadline = time.monotonic() + CLOSE_SECONDS
            while closing and time.monotonic() < deadline and self.cluster.reachable():
                for call in self.ray.wait(list(closing), num_returns=len(closing), timeout=0.5)[0]:
                    with suppress(Exception):  # its environments could not be closed, or it died: it ends either way
                        self.log_output(closing.pop(call), self.get(call))
            self.kill(*actors.values())
            self.actors = []
        finally:
            self.cluster.leave()

    def kill(self, *actors: Any) -> None:
        """Kill these actors, unless Ray itself is gone."""
        for actor in actors:
            if self.cluster.reachable():
                self.ray.kill(actor)


class ThreadedPool(RayPool):
    """A pool whose workers are kept busy by a thread of this process, also while the learner computes."""

    def __init__(self, *arguments: Any) -> None:
        """As `RayPool`."""
        super().__init__(*arguments)
        self.failure: BaseException | None = None  # what ended the thread
        self.closing = threading.Event()
        self.thread = threading.Thread(target=self._run, name="submit", daemon=True)

    def calls(self) -> list[Any]:
        """All calls that have not been received."""
        raise NotImplementedError

    def submit(self) -> None:
        """Submit calls to workers that have too few; runs in the thread."""
        raise NotImplementedError

    def receive(self, call: Any) -> None:
        """Handle the result of a call, or the death of its worker; runs in the thread."""
        raise NotImplementedError

    def start_thread(self) -> None:
        """Start the thread, unless it runs."""
        if self.thread.ident is None:
            self.thread.start()

    def check(self) -> None:
        """Raise the error that ended the thread, in the learner."""
        if self.failure is not None:
            raise self.failure

    def _run(self) -> None:
        try:
            while not self.closing.is_set():
                self.adjust_to_machines()
                self.submit()
                calls = self.calls()
                if not calls:
                    self.closing.wait(0.005)
                for call in self.finished(calls, timeout=0.1) if calls else ():
                    self.receive(call)
        except BaseException as error:
            logging.debug("the thread that submits calls ended", exc_info=True)
            self.failure = error

    def stop_thread(self) -> None:
        """Submit no more calls; those submitted go on."""
        self.closing.set()
        if self.thread.ident is not None:
            self.thread.join(timeout=5)

    def close(self) -> None:
        self.stop_thread()
        super().close()


class Output(NamedTuple):
    """What a worker process wrote to its standard output and error since the last time."""

    text: str
    positions: dict[str, int]  # file -> bytes read so far

    @classmethod
    def read(cls, positions: dict[str, int]) -> Output:
        """Read what was added to these files, of each the last `OUTPUT_BYTES`; files that are not here are skipped."""
        texts, sizes = [], dict(positions)
        for path, position in positions.items():
            with suppress(OSError):
                if (size := os.stat(path).st_size) == position:
                    continue
                with open(path, "rb") as file:
                    file.seek(max(position, size - OUTPUT_BYTES))
                    text = file.read(OUTPUT_BYTES).decode(errors="replace")
                skipped = max(0, size - OUTPUT_BYTES - position)
                texts.append(f"({skipped} bytes are left out)\n{text}" if skipped else text)
                sizes[path] = size
        return cls("".join(text if text.endswith("\n") else f"{text}\n" for text in texts), sizes)

    @classmethod
    def start(cls) -> Output:
        """Nothing yet, of this process. Ray sends standard output and error of a worker to two files."""
        paths = [os.path.realpath(f"/proc/self/fd/{number}") for number in (1, 2)]
        return cls("", {path: os.stat(path).st_size for path in paths if os.path.isfile(path)})


class WorkerActor:
    """What runs in a worker process. Made a Ray actor where it is started, so that this module need not import Ray."""

    def __init__(self, search_path: list[str], packed: bytes) -> None:
        """`packed` is a pickle of the runner's class and arguments, which may need modules on the search path."""
        sys.path.extend(path for path in search_path if path not in sys.path)
        self.packed = packed
        self.runner: Any = None
        self.output = Output.start()

    def build(self) -> Output:
        """Make the environments; not in the constructor, so that an error arrives as itself."""
        if self.runner is None:
            import ray.cloudpickle

            make_runner, arguments = ray.cloudpickle.loads(self.packed)
            self.runner = make_runner(*arguments)
        return self._new_output()

    def call(self, method: str, *arguments: Any) -> tuple[Any, Output]:
        """Call a method of the runner; returns what it returned, and what the process wrote since the last call."""
        self.build()
        value = getattr(self.runner, method)(*arguments)
        return value, self._new_output()

    def change_env(self, kwargs: dict[str, Any]) -> None:
        """Make environments anew with these arguments when their episodes end."""
        self.build()
        self.runner.change_env(kwargs)

    def _new_output(self) -> Output:
        sys.stdout.flush()
        sys.stderr.flush()
        self.output = Output.read(self.output.positions)
        return self.output

    def facts(self) -> dict[str, Any]:
        """Process id, modules, memory and placement of this process, for tests and benchmarks."""
        import resource

        import ray

        kilobytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        context = ray.get_runtime_context()
        place = {"node": context.get_node_id(), "resources": context.get_assigned_resources()}
        return {"pid": os.getpid(), "modules": sorted(sys.modules), "megabytes": kilobytes / 1024, **place}

    def close(self) -> Output:
        """Close the environments."""
        if self.runner is not None:
            self.runner.close()
        return self._new_output()


def loss_errors() -> tuple[type[Exception], ...]:
    """What `ray.get` raises when a process or its machine died, or was killed because memory ran short."""
    from ray import exceptions

    return exceptions.RayActorError, exceptions.ObjectLostError, exceptions.OutOfMemoryError, exceptions.NodeDiedError


def reason_of(error: Exception) -> str:
    """Why a process died: the last line of Ray's message."""
    from ray.exceptions import OutOfMemoryError

    short = isinstance(error, OutOfMemoryError)
    return "its machine ran short of memory" if short else str(error).strip().splitlines()[-1]


def absolute_sys_path() -> list[str]:
    """`sys.path` with absolute entries, so that workers find the same modules."""
    return [path or os.getcwd() for path in sys.path]
