"""The pool of samplers: one in this process, or many as Ray actors. Both give the same contract.

An on-policy algorithm calls `broadcast` once and `collect(K)` once per iteration, and gets exactly K fragments made
with those weights, whoever made them. A worker that dies is replaced and its fragment is made by whoever is free.
"""

from __future__ import annotations

import logging
import os
import secrets
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from fever.errors import FeverError, TrainingError
from fever.policy import Params
from fever.policy.spaces import Description
from fever.sampler import Fragment, Sampler, SamplerSpec

DEATHS_ALLOWED = 5  # of one worker without a fragment in between, before the run gives up
CLOSE_SECONDS = 10  # for environments to close in, before their worker is ended


class Pool:
    """What the trainer sees of the processes that gather experience."""

    count = 0  # workers; 0: in this process
    restarts = 0  # processes replaced so far
    description = ""  # of what it keeps, for people

    def close(self) -> None:
        """Close all environments and end all processes."""

    def save(self, folder: Path) -> None:
        """Write what was gathered and must survive a stop; nothing, unless the pool has a replay buffer."""

    def restore(self, folder: Path) -> None:
        """Read what `save` wrote."""


class Broadcasting(Pool):
    """A pool whose workers all act with the weights that were broadcast last."""

    params: Any = None
    version = 0

    def broadcast(self, params: Params) -> int:
        """Make these the weights that act from now on; returns their version."""
        self.params = self.put(params)
        self.version += 1
        return self.version

    def put(self, params: Params) -> Any:
        """What a worker is given for these weights: themselves, or one copy for all of a cluster."""
        return params


class Workers(Broadcasting):
    """What an on-policy algorithm sees of the samplers."""

    def collect(self, fragments: int) -> list[Fragment]:
        """Exactly this many fragments, all made with the weights broadcast last, in a stable order."""
        raise NotImplementedError


class LocalWorkers(Workers):
    """One sampler in this process."""

    def __init__(self, spec: SamplerSpec, observation: Description, action: Description, generation: int = 0) -> None:
        self.sampler = Sampler(spec.for_worker(0, generation), observation, action)

    def collect(self, fragments: int) -> list[Fragment]:
        return [self.sampler.sample(self.params, self.version) for _ in range(fragments)]

    def close(self) -> None:
        self.sampler.close()


class RayPool(Pool):
    """Worker processes as Ray actors, on this machine or all over a cluster; one that dies is replaced."""

    def __init__(self, count: int, generation: int) -> None:
        self.started_ray = start_ray(count)
        import ray

        self.ray = ray
        self.count, self.restarts = count, 0
        self.generations = [generation] * count
        self.deaths: Counter[int] = Counter()
        self.actors: list[Any] = []

    def start(self, index: int) -> Any:
        """Start the actor of one worker; returns before it is ready."""
        raise NotImplementedError

    def actor(self, kind: type[WorkerActor], make_runner: Callable[..., Any], *arguments: Any) -> Any:
        """A worker process of this kind; what it runs is made of the arguments when it builds."""
        packed = self.ray.cloudpickle.dumps((make_runner, arguments))
        return self.ray.remote(kind).options(num_cpus=1, max_restarts=0).remote(search_path(), packed)

    def start_all(self) -> None:
        """Start every worker and wait until their environments are made."""
        try:
            self.actors = [self.start(index) for index in range(self.count)]
            self.get([actor.build.remote() for actor in self.actors])
        except BaseException:
            self.close()
            raise

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
        return self.ray.exceptions.RayActorError, self.ray.exceptions.ObjectLostError

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
            reason = str(error).strip().splitlines()[-1]
            raise TrainingError(f"worker {index} died {self.deaths[index]} times in a row; the last reason: {reason}")
        self.actors[index] = self.start(index)

    def close(self) -> None:
        ray = self.ray
        closing = [actor.close.remote() for actor in self.actors]
        if closing:
            ray.wait(closing, num_returns=len(closing), timeout=CLOSE_SECONDS)
        for actor in self.actors:
            ray.kill(actor)
        self.actors = []
        if self.started_ray:
            ray.shutdown()


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


class RayWorkers(RayPool, Workers):
    """Samplers as Ray actors."""

    def __init__(
        self, spec: SamplerSpec, observation: Description, action: Description, count: int, generation: int = 0
    ) -> None:
        super().__init__(count, generation)
        self.spec, self.spaces = spec, (observation, action)
        self.start_all()

    def start(self, index: int) -> Any:
        return self.actor(SamplerActor, Sampler, self.spec.for_worker(index, self.generations[index]), *self.spaces)

    def collect(self, fragments: int) -> list[Fragment]:
        made: list[tuple[int, int, Fragment]] = []  # worker, its how-manieth, fragment
        pending: dict[Any, int] = {}
        idle = list(range(self.count))
        share: Counter[int] = Counter()
        while len(made) < fragments:
            while idle and len(made) + len(pending) < fragments:
                index = idle.pop(0)
                pending[self.actors[index].sample.remote(self.params, self.version)] = index
            for reference in self.finished(pending):
                index = pending.pop(reference)
                try:
                    fragment = self.get(reference)
                except self.lost as error:
                    self.replace(index, error)
                else:
                    self.deaths[index] = 0
                    made.append((index, share[index], fragment))
                    share[index] += 1
                idle.append(index)
        made.sort(key=lambda row: row[:2])
        return [fragment for _, _, fragment in made]


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

        kilobytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return {"pid": os.getpid(), "modules": sorted(sys.modules), "megabytes": kilobytes / 1024}

    def close(self) -> None:
        if self.runner is not None:
            self.runner.close()


class SamplerActor(WorkerActor):
    """A worker that makes fragments."""

    def sample(self, params: Params, version: int) -> Fragment:
        self.build()
        return self.runner.sample(params, version)


def search_path() -> list[str]:
    """Where this process finds modules, for its workers to find the same."""
    return [path for path in sys.path if path]


def start_ray(workers: int) -> bool:
    """Start a private Ray on this machine, quiet and with a token of its own; False if one was started already."""
    if "ray" not in sys.modules:  # Ray reads these once, when it is imported
        for name, value in {
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_SCHEDULER_EVENTS": "0",
            "RAY_IGNORE_UNHANDLED_ERRORS": "1",
            "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": secrets.token_hex(32),
        }.items():
            os.environ.setdefault(name, value)
    import ray

    if ray.is_initialized():
        return False
    ray.init(
        address="local",
        num_cpus=max(workers, os.cpu_count() or 1),
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.ERROR,
        configure_logging=False,
        runtime_env={"env_vars": {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}},
    )
    return True


def make_workers(
    spec: SamplerSpec, observation: Description, action: Description, count: int, generation: int = 0
) -> Workers:
    """The pool for a number of workers; 0 means this process and no Ray."""
    if count == 0:
        return LocalWorkers(spec, observation, action, generation)
    return RayWorkers(spec, observation, action, count, generation)
