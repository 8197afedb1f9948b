"""Worker processes as Ray actors: started, replaced when they die, fitted to the machines, kept busy, closed."""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

from fever.errors import FeverError, TrainingError
from fever.policy import Params
from fever.sampling.pool import Pool
from fever.sampling.ray_cluster import Machine, connect
from fever.sampling.spec import SamplerSpec

FIT_SECONDS = 1.0  # between two looks at whether machines came or went,
FAIL_SECONDS = 60.0  # and after a worker could not be started on one that came
DEATHS_ALLOWED = 5  # of one worker without a fragment in between, before the run gives up
CLOSE_SECONDS = 10  # for environments to close in, before their worker is ended


class RayPool(Pool):
    """Worker processes as Ray actors, on this machine or all over a cluster; one that dies is replaced.

    Where machines may come and go, the workers of one that went are not crowded onto the others, and one that comes
    gets some: `fit` follows the machines, and `at_work` are those to whom work may be given.
    """

    def __init__(self, count: int, generation: int) -> None:
        self.cluster = connect(count)
        self.ray = self.cluster.ray
        self.count, self.restarts = count, 0
        self.homes: list[Machine | None] = [None] * count
        self.generations = [generation] * count
        self.deaths: Counter[int] = Counter()
        self.actors: list[Any] = []  # None: of a machine that went
        self.at_work: list[int] = []
        self.building: dict[Any, int] = {}  # call -> worker whose environments are being made
        self.planned, self.planned_cores = count, max(1.0, self.cluster.cores)
        self.grows = False
        self.fitted = 0.0  # when `fit` looked last

    def start(self, index: int) -> Any:
        """Start the actor of one worker; returns before it is ready."""
        raise NotImplementedError

    def actor(self, kind: type[WorkerActor], make_runner: Callable[..., Any], spec: SamplerSpec, *more: Any) -> Any:
        """The process of one worker, on the machine with the most room; what it runs is made of the last arguments when
        it builds."""
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        if spec.gpus:
            self.cluster.require_gpus(spec.gpus * self.count, spec.gpus)
        self.homes[spec.worker_index] = None
        self.homes[spec.worker_index] = home = self.cluster.least_loaded(self.homes)
        where = NodeAffinitySchedulingStrategy(home.node, soft=True)  # elsewhere, if it has died meanwhile
        packed = self.ray.cloudpickle.dumps((make_runner, (spec, *more)))
        options = {"num_cpus": 0.001, "num_gpus": spec.gpus, "max_restarts": 0, "scheduling_strategy": where}
        return self.ray.remote(kind).options(**options).remote(search_path(), packed)

    def start_all(self) -> None:
        """Start every worker and wait until their environments are made."""
        try:
            self.actors = [self.start(index) for index in range(self.count)]
            self._await_builds()
            self.at_work = list(range(self.count))
        except BaseException:
            self.close()
            raise

    def _await_builds(self) -> None:
        """Wait until all environments are made; what goes wrong on one of several machines says on which."""
        calls = {actor.build.remote(): index for index, actor in enumerate(self.actors)}
        for call, index in calls.items():
            try:
                self.get(call)
            except FeverError as error:
                if not (where := self._where(index)):
                    raise
                raise FeverError(f"{where}{error}") from error
            except self.lost as error:
                died = f"{self._where(index)}worker {index} died while its environments were made"
                raise TrainingError(f"{died}: {reason_of(error)}") from error

    def _where(self, index: int) -> str:
        """On which of several machines a worker is, to begin a sentence with; nothing where there is one."""
        home = self.homes[index]
        return "" if home is None or len(self.cluster.machines()) == 1 else f"on {home.host}: "

    def put(self, params: Params) -> Any:
        return self.ray.put(params)

    def get(self, references: Any) -> Any:
        """`ray.get`, with a mistake of the user's as it was raised instead of a remote traceback."""
        try:
            return self.ray.get(references)
        except self.ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, FeverError):
                raise error.cause from None
            raise

    @property
    def lost(self) -> tuple[type[Exception], ...]:
        """What `get` raises when a process died, or its machine."""
        return losses()

    def finished(self, calls: Iterable[Any], timeout: float | None = None) -> list[Any]:
        """All calls that have ended; waits for the first one, if need be so long."""
        pending = list(calls)
        if not self.ray.wait(pending, num_returns=1, timeout=timeout)[0]:
            return []
        return self.ray.wait(pending, num_returns=len(pending), timeout=0)[0]

    def replace(self, index: int, error: Exception) -> None:
        """Start another actor in the place of one that died."""
        self.restarts += 1
        self.deaths[index] += 1
        self.generations[index] += 1
        if self.deaths[index] > DEATHS_ALLOWED:
            times = f"{self.deaths[index]} times in a row"
            raise TrainingError(f"worker {index} died {times}; the last reason: {reason_of(error)}")
        self.at_work.remove(index)
        crowded = sum(actor is not None for actor in self.actors) > self.wanted(now=True)
        if self.cluster.elastic and crowded and self.at_work:
            logging.info("worker %d went with its machine", index)
            self.actors[index] = self.homes[index] = None
            self.count = len(self.at_work)
        else:
            self.actors[index] = self.start(index)
            self.employ(index)

    def employ(self, index: int) -> None:
        """Let a worker be given work from now on."""
        self.at_work.append(index)
        self.count = len(self.at_work)

    # machines that come and go

    def follow(self, cores: int) -> None:
        self.grows, self.planned_cores = True, cores

    def wanted(self, now: bool = False) -> int:
        """As many workers as the machines of this moment are for, at least one."""
        cores = sum(machine.cores for machine in self.cluster.machines(now))
        if self.grows:
            return max(1, self.planned + int(cores - self.planned_cores))
        share = round(self.planned * cores / self.planned_cores)  # there may have been several to a core
        return max(1, min(self.planned, max(int(cores), share)))

    def fit(self) -> None:
        """Start workers on machines that have come, who are given work once their environments are made; end those that
        were crowded onto others before it was known that their machine is gone."""
        if not self.cluster.elastic or time.monotonic() - self.fitted < FIT_SECONDS:
            return
        self.fitted = time.monotonic()
        for call in self.finished(self.building, timeout=0) if self.building else ():
            self._welcome(self.building.pop(call), call)
        if self.fitted > time.monotonic():
            return
        vacant = [index for index, actor in enumerate(self.actors) if actor is None]
        missing = self.wanted() - (len(self.actors) - len(vacant))
        self.kill(*(self.actors[index] for index in self.at_work[1:][missing:] if missing < 0))  # `replace` sees to it
        for _ in range(missing):
            index = vacant.pop(0) if vacant else self._add_place()
            self.generations[index] += 1
            self.actors[index] = self.start(index)
            self.building[self.actors[index].build.remote()] = index

    def _add_place(self) -> int:
        self.actors.append(None)
        self.homes.append(None)
        self.generations.append(self.generations[0])
        return len(self.actors) - 1

    def _welcome(self, index: int, call: Any) -> None:
        """Take in a worker that has come, unless it could not be built: then the run goes on without it."""
        home = self.homes[index]
        where = home.host if home else "a machine that has come"
        try:
            self.get(call)
        except Exception as error:  # noqa: BLE001 - whatever a new machine lacks is no reason to end the run
            logging.warning("worker %d cannot work on %s: %s", index, where, error)
            self.kill(self.actors[index])
            self.actors[index] = self.homes[index] = None
            self.fitted = time.monotonic() + FAIL_SECONDS
        else:
            logging.info("worker %d joins on %s", index, where)
            self.employ(index)

    def close(self) -> None:
        try:
            self.actors = [actor for actor in self.actors if actor is not None]
            closing = [actor.close.remote() for actor in self.actors]
            deadline = time.monotonic() + CLOSE_SECONDS
            while closing and time.monotonic() < deadline and self.cluster.reachable():
                closing = self.ray.wait(closing, num_returns=len(closing), timeout=0.5)[1]
            self.kill(*self.actors)
            self.actors = []
        finally:
            self.cluster.leave()

    def kill(self, *actors: Any) -> None:
        """End these processes, unless they ended together with all of Ray."""
        for actor in actors:
            if self.cluster.reachable():
                self.ray.kill(actor)


class BusyPool(RayPool):
    """Workers that a thread of this process keeps busy, so that they do not wait while the learner learns."""

    def __init__(self, count: int, generation: int) -> None:
        super().__init__(count, generation)
        self.failure: BaseException | None = None  # of the thread
        self.closing = threading.Event()
        self.thread = threading.Thread(target=self._run, name="hand-out", daemon=True)

    def calls(self) -> list[Any]:
        """Everything that is under way."""
        raise NotImplementedError

    def hand_out(self) -> None:
        """Give work to those that have too little; called by the thread."""
        raise NotImplementedError

    def take(self, call: Any) -> None:
        """Take what a call brought, or replace who died of it; called by the thread."""
        raise NotImplementedError

    def start_thread(self) -> None:
        """Begin to hand out work, if that has not begun."""
        if self.thread.ident is None:
            self.thread.start()

    def check(self) -> None:
        """Raise in the learner what went wrong in the thread."""
        if self.failure is not None:
            raise self.failure

    def _run(self) -> None:
        try:
            while not self.closing.is_set():
                self.fit()
                self.hand_out()
                calls = self.calls()
                if not calls:
                    self.closing.wait(0.005)
                for call in self.finished(calls, timeout=0.1) if calls else ():
                    self.take(call)
        except BaseException as error:
            logging.debug("the thread that hands out work ended", exc_info=True)
            self.failure = error

    def stop_thread(self) -> None:
        """Hand out nothing more; what is under way goes on."""
        self.closing.set()
        if self.thread.ident is not None:
            self.thread.join(timeout=5)

    def close(self) -> None:
        self.stop_thread()
        super().close()


class WorkerActor:
    """What runs in a worker process. Made a Ray actor where it is started, so that this module need not import Ray."""

    def __init__(self, search_path: list[str], packed: bytes) -> None:
        """`packed` names modules of the user's, which are found only once the search path is known."""
        sys.path.extend(path for path in search_path if path not in sys.path)
        self.packed = packed
        self.runner: Any = None

    def build(self) -> Any:
        """Make the environments; not in the constructor, so that what goes wrong arrives as the error that it is."""
        if self.runner is None:
            import ray.cloudpickle

            make_runner, arguments = ray.cloudpickle.loads(self.packed)
            self.runner = make_runner(*arguments)

    def facts(self) -> dict[str, Any]:
        """What this process is, for tests and benchmarks."""
        import resource

        import ray

        kilobytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        context = ray.get_runtime_context()
        place = {"node": context.get_node_id(), "resources": context.get_assigned_resources()}
        return {"pid": os.getpid(), "modules": sorted(sys.modules), "megabytes": kilobytes / 1024, **place}

    def close(self) -> None:
        if self.runner is not None:
            self.runner.close()


def losses() -> tuple[type[Exception], ...]:
    """What `ray.get` raises when a process died, or its machine; or was ended because memory ran short."""
    from ray import exceptions

    return exceptions.RayActorError, exceptions.ObjectLostError, exceptions.OutOfMemoryError, exceptions.NodeDiedError


def reason_of(error: Exception) -> str:
    """Why a process died, in one line out of Ray's many."""
    from ray.exceptions import OutOfMemoryError

    short = isinstance(error, OutOfMemoryError)
    return "its machine ran short of memory" if short else str(error).strip().splitlines()[-1]


def search_path() -> list[str]:
    """Where this process finds modules, for its workers to find the same."""
    return [path or os.getcwd() for path in sys.path]
