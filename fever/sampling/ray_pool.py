"""Worker processes as Ray actors: started, replaced when they die, adjusted to the machines, kept busy, closed."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace
from typing import Any

from fever.envs.source import EnvSource
from fever.envs.watchdog import TIMEOUT_HINT, WARN_SECONDS, WATCHDOG, last_words
from fever.errors import FeverError, TrainingError
from fever.policy import Params
from fever.sampling.object_store import array_bytes, outside_store
from fever.sampling.pool import Pool
from fever.sampling.ray_cluster import SLICE_SECONDS, THREADS, Machine, connect
from fever.sampling.ray_machines import places_on
from fever.sampling.spec import SamplerSpec
from fever.sampling.stopped import StoppedProcesses
from fever.sampling.worker_actor import Output, WorkerActor, output_since
from fever.system import absolute_sys_path

ADJUST_SECONDS = 1.0  # between two checks of whether machines joined or left
RETRY_SECONDS = 60.0  # until the next check after a worker could not be started on a new machine
DEATHS_ALLOWED = 5  # of one worker without a result in between, before the run gives up
CLOSE_SECONDS = 10  # for environments to close before their worker is killed
STOPPED_SECONDS = 5.0  # without a result, after which it is looked at whether a worker's process is stopped
LOOK_SECONDS = 1.0  # between two such looks
TRANSFER_SECONDS = 60.0  # for the result of a finished call to arrive from its machine
STARTS_PER_GENERATION = 1_000_000  # of one worker, until the run is resumed or Ray started anew: no seed comes twice
WEIGHTS_BYTES = 1_000_000  # of weights that are sent with every call instead of through Ray's object store


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
        self.can_restart = self.cluster.private
        self.count, self.restarts = count, 0
        self.placement: list[Machine | None] = [None] * count  # of each worker
        self.generations = [generation * STARTS_PER_GENERATION] * count
        self.sources: dict[int, EnvSource] = {}  # worker -> the environment, with the arguments that it was told
        self.deaths: Counter[int] = Counter()  # of each worker since its last result
        self.said: dict[int, str] = {}  # worker -> why it ended itself, if it did since its last result
        self.actors: list[Any] = []  # None: its machine left
        self.output_positions: dict[int, dict[str, int]] = {}  # worker -> how far its output files were read
        self.warned: set[int] = set()  # workers of whose slow environments a person was told
        self.active: list[int] = []
        self.building: dict[Any, int] = {}  # call -> worker whose environments are being made
        self.planned, self.planned_places = count, max(1, self.places())
        self.tracks_machines = self.alike = False
        self.adjusted = 0.0  # time of the last `adjust_to_machines`
        self.stopped = StoppedProcesses(self.cluster)
        self.heard: dict[int, float] = {}  # worker -> when it was given work, or had done some
        self.looked = 0.0  # time of the last `look`

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
        if spec.cpus is not None:
            options["runtime_env"] = {"env_vars": dict.fromkeys(THREADS, str(spec.cpus))}
        self.cluster.check()
        actor = self.ray.remote(WorkerActor).options(**options).remote(absolute_sys_path(), packed, spec.cpus)
        self.stopped.follow(index, actor)
        self.heard[index] = time.monotonic()
        return actor

    def call(self, index: int, method: str, *arguments: Any) -> Any:
        """Have a worker call a method of its runner; returns Ray's reference, for `result`. If the environment's
        arguments have changed since its last call, the worker is told first: Ray keeps the order of calls."""
        self.cluster.check()
        self.heard[index] = time.monotonic()
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
            value, output = self.fetch(call)
        except self.lost as error:
            self.replace(index, error)
            return None
        self.heard[index] = time.monotonic()
        self.log_output(index, output)
        self.deaths[index] = 0
        self.said.pop(index, None)
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
        """Have the environments made, those of `starts_at_once` workers at a time, and wait for them: hundreds of
        simulators that start together can stop a file system. With several machines, an error names the machine."""
        waiting = list(enumerate(self.actors))
        building: dict[Any, int] = {}
        while waiting or building:
            while waiting and len(building) < self.sampler_spec.starts_at_once:
                index, actor = waiting.pop(0)
                building[actor.build.remote()] = index
            for call in self.finished(building):
                index = building.pop(call)
                self._await_build(index, call)

    def _await_build(self, index: int, call: Any) -> None:
        """Take the result of a worker's `build`; an error names its machine."""
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
        """As `Broadcasting`; small weights are sent with every call, see `object_store`."""
        self.cluster.check()
        small = self.cluster.private and array_bytes(params) <= WEIGHTS_BYTES
        return params if small else self.ray.put(params)

    # every wait is through one of these; Ray and signals are looked after while it lasts

    def get(self, references: Any, seconds: float | None = None) -> Any:
        """What calls return: a list for a list. Raises what `fetch` raises; GetTimeoutError after so many seconds."""
        self.cluster.wait(references if isinstance(references, list) else [references], seconds, self.look_meanwhile)
        return self.fetch(references)

    def fetch(self, references: Any) -> Any:
        """What calls that have ended returned, out of Ray's object store. A FeverError is raised as itself instead of
        inside a RayTaskError."""
        self.cluster.check()
        try:
            return outside_store(self.ray.get(references, timeout=TRANSFER_SECONDS))
        except self.ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, FeverError):
                raise error.cause from None
            raise

    @property
    def lost(self) -> tuple[type[Exception], ...]:
        """What `get` raises when a process or its machine died, or does not answer."""
        return loss_errors()

    def finished(self, calls: Iterable[Any], timeout: float | None = None) -> list[Any]:
        """All calls that have ended; waits up to `timeout` seconds for the first one."""
        pending, left = list(calls), timeout
        while True:
            self.cluster.check()
            self.look_after()
            wait = SLICE_SECONDS if left is None else min(left, SLICE_SECONDS)
            if self.ray.wait(pending, num_returns=1, timeout=wait)[0]:
                return self.ray.wait(pending, num_returns=len(pending), timeout=0)[0]
            if left is not None and (left := left - wait) <= 0:
                return []

    def look_meanwhile(self) -> None:
        """What is done between the slices of every other wait than `finished`."""
        self.look_after()

    def look_after(self) -> None:
        """Look at processes that have been silent for long, every LOOK_SECONDS."""
        now = time.monotonic()
        if now - self.looked >= LOOK_SECONDS:
            self.looked = now
            self.look(now)

    def look(self, now: float) -> None:
        """Kill workers whose process is stopped: their calls fail then, and they are replaced as if they had died."""
        for index in self.active or range(len(self.actors)):  # none is active before all environments are made
            if now - self.heard[index] > STOPPED_SECONDS and self.stopped.look(index):
                logging.warning("%sworker %d is stopped and is replaced", self._where(index), index)
                self.heard[index] = now
                self.kill(self.actors[index])
            elif now - self.heard[index] > WARN_SECONDS and index not in self.warned:
                self._pass_warning_on(index)

    def _pass_warning_on(self, index: int) -> None:
        """Tell a person what a worker has written about a call of its environment that takes long."""
        written = self.stopped.ask(index, output_since, self.output_positions.get(index, {}))
        for line in (written or "").splitlines():
            if TIMEOUT_HINT in line:
                self.warned.add(index)
                WATCHDOG.say(f"note: {self._where(index)}worker {index}: {line.rpartition('WARNING:root:')[2]}")
                return

    def replaced(self, index: int) -> int:
        return self.generations[index] % STARTS_PER_GENERATION if index < len(self.generations) else 0

    def replace(self, index: int, error: Exception) -> None:
        """Start another actor in the place of one that died."""
        output = Output.read(self.output_positions.pop(index, {}))  # its last words, if it was on this machine
        self.log_output(index, output)
        if said := last_words(output.text):
            self.said[index] = said
        self.restarts += 1
        self.deaths[index] += 1
        self.generations[index] += 1
        if self.deaths[index] > DEATHS_ALLOWED:
            times, reason = f"{self.deaths[index]} times in a row", self.said.get(index) or reason_of(error)
            raise TrainingError(f"worker {index} died {times}; the last reason: {reason}")
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

    def track_machines(self, places: int) -> None:
        self.tracks_machines, self.planned_places = True, places

    def places(self, now: bool = False) -> int:
        """How many workers fit on the machines that are alive."""
        return places_on([machine.cores for machine in self.cluster.machines(now)], self.sampler_spec.cpus)

    def wanted(self, now: bool = False) -> int:
        """The number of workers for the machines that are alive, at least one."""
        places = self.places(now)
        if self.tracks_machines:
            return max(1, self.planned + places - self.planned_places)
        share = round(self.planned * places / self.planned_places)  # there may be more workers than fit
        return max(1, min(self.planned, max(places, share)))

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
        for _ in range(min(missing, self.sampler_spec.starts_at_once - len(self.building))):
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
            closing = (
                {actor.close.remote(): index for index, actor in actors.items()} if self.cluster.reachable() else {}
            )
            deadline = time.monotonic() + CLOSE_SECONDS
            while closing and time.monotonic() < deadline and self.cluster.reachable():
                for call in self.ray.wait(list(closing), num_returns=len(closing), timeout=0.5)[0]:
                    with suppress(Exception):  # its environments could not be closed, or it died: it ends either way
                        self.log_output(closing.pop(call), self.fetch(call))
            self.kill(*actors.values())
            self.actors = []
        finally:
            self.cluster.leave()

    def kill(self, *actors: Any) -> None:
        """Kill these actors, unless Ray itself is gone."""
        for actor in actors:
            if self.cluster.reachable():
                self.ray.kill(actor)


def loss_errors() -> tuple[type[Exception], ...]:
    """What `ray.get` raises when a process or its machine died, was killed because memory ran short, or is silent."""
    from ray import exceptions

    died = exceptions.RayActorError, exceptions.ObjectLostError, exceptions.NodeDiedError
    return *died, exceptions.OutOfMemoryError, exceptions.GetTimeoutError


def reason_of(error: Exception) -> str:
    """Why a process died: the last line of Ray's message."""
    from ray.exceptions import OutOfMemoryError

    short = isinstance(error, OutOfMemoryError)
    return "its machine ran short of memory" if short else str(error).strip().splitlines()[-1]
