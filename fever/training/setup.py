"""Prepares a run: probes the environment, completes the configuration, creates the learner. Writes no file."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from fever.algos.base import Algorithm, Learner, SamplingContext, Task
from fever.algos.batch import check_batch, environments, require_scalable, scaled
from fever.algos.device import keep_compiled_programs, limit_learner_threads, prepare_jax
from fever.algos.registry import INTERFACE, config_of, find_algorithm, find_provider, overlaps
from fever.config import DEFAULT_ENVS, DEFAULT_STEPS, RunConfig, validate
from fever.envs.contract import Envs
from fever.envs.make import make_envs
from fever.envs.source import EnvContext, EnvSource
from fever.envs.watchdog import close_quietly
from fever.envs.worker_count import choose_workers
from fever.errors import FeverError
from fever.files import user_path
from fever.job import autoscaled_machines, current_job
from fever.plugins.network import compute_at_once
from fever.plugins.user_code import user_code
from fever.policy import Policy
from fever.policy.spaces import Description
from fever.sampling.ray_machines import (
    cores_in_reach,
    machines_in_reach,
    places_on,
    ranks_in_reach,
    require_processes,
    require_ranks,
    require_room,
)
from fever.sampling.ray_settings import apply_settings
from fever.signals import interruptible
from fever.training.env_failures import failure_rules_of
from fever.zoo.preset import blames, find_preset, line, with_preset

WORKERS_PER_CORE = 64  # at most: every worker is a process of some 100 MB
# Multiplications of the largest matrix product in a gradient step up to which a learner on a CPU is fastest on one
# thread: DQN on rl-zoo's settings for CartPole-v1 has 4 million and SAC 17.
SMALL_PRODUCT = 12_000_000


class Files(Protocol):
    """The part of a learner's state that it writes to files itself."""

    def save(self, folder: Path) -> None:
        """Write the files into an existing, empty folder."""
        ...

    def restore(self, folder: Path) -> None:
        """Read what `save` wrote. It may hold pickles, so the caller has checked that the user trusts it."""
        ...


@dataclass(frozen=True)
class Prepared:
    """A run that is ready to start."""

    config: RunConfig  # with every setting, the number of workers and the stop rules
    learner: Learner
    policy: dict[str, Any]  # the policy in checkpoints: spaces and network, as JSON
    source: EnvSource  # the environment and its arguments
    places: int | None = None  # how many workers fit on the machines, if as many as fit are wanted
    on_ray: bool = False  # needs Ray even without workers
    uninterruptible: bool = False  # an iteration cannot be interrupted: a signal waits for its end
    files: Files | None = None  # what checkpoints hold besides arrays
    preset: bool = False  # values of the zoo are among the settings


def prepare(config: RunConfig, source: EnvSource, say: Callable[[str], None], resumed: bool = False) -> Prepared:
    """Create the environment once, and a learner that fits it. A run that is `resumed` has its preset's values already:
    nothing is added to them. Raises `FeverError` for what is wrong with either."""
    folder = Path.cwd()
    prepared = _prepare(config, source, say, resumed)
    if not _has_left(folder):
        return prepared
    runs = str(folder / user_path(config.runs))  # no longer below the working folder
    return replace(prepared, config=prepared.config.model_copy(update={"runs": runs}))


def _prepare(config: RunConfig, source: EnvSource, say: Callable[[str], None], resumed: bool) -> Prepared:
    apply_settings(current_job())  # the environment's module may import Ray
    config = with_worker_count(config, say)
    provider = find_provider(config.algo)
    if provider is not None:
        return provider.prepare(config, source, say)
    prepare_jax(config.device)  # before the first import of JAX, which an algorithm's module brings
    if current_job() is None:  # a job takes long in any case, and its machines may share a home folder
        keep_compiled_programs()
    row = find_preset(config, source.name, source.kwargs)
    told = None if resumed else line(config, row, source.name)
    if not resumed:
        config = with_preset(config, row)
    settings = validate(config_of(config.algo), config.settings, config.algo)
    stated = config.envs or DEFAULT_ENVS
    if config.scale_batch:
        require_scalable(config.algo, settings)
    more = {"settings": settings.model_dump(mode="json"), "envs": stated, "workers": config.workers or 0}
    config = config.model_copy(update=more)
    (observation, action, stack), workers, places = _probe(config, source, say)
    if told is not None:
        say(told)
    stop = config.stop.or_default(source.reward_threshold, row.steps if row is not None else DEFAULT_STEPS)
    cpus = config.cpus_per_worker if workers else None  # `auto` may have chosen none
    config = config.model_copy(update={"workers": workers, "cpus_per_worker": cpus, "stop": stop, "env": source.name})
    image = observation["type"] == "image" or settings.network is not None  # of unknown size
    total, envs = environments(stated, workers, config.scale_batch)
    limit_learner_threads(not image and settings.rows(total) * settings.widest(image) ** 2 <= SMALL_PRODUCT)
    if settings.network is not None and not workers:  # this process acts with it
        compute_at_once()
    task = Task(
        name=source.name,
        observation=observation,
        action=action,
        envs=envs,
        workers=workers,
        seed=config.seed,
        total_steps=stop.steps,
        stack=stack,
        total_envs=total,
    )
    with blames(row, config):
        algorithm = _make_algorithm(config, settings, task, say)
    for attribute in ("network", "steps"):
        if not hasattr(algorithm, attribute):
            raise FeverError(f"{config.algo} is not an algorithm: its __init__ sets no {attribute}; {INTERFACE}")
    policy = Policy(observation, action, algorithm.network, {}).describe()
    return Prepared(config, algorithm, policy, source, places, preset=row is not None)


def _make_algorithm(config: RunConfig, settings: Any, task: Task, say: Callable[[str], None]) -> Algorithm:
    """The algorithm for a task, and a line where the number of workers shows in its batches."""
    kind = find_algorithm(config.algo)
    if config.scale_batch:
        check_batch(kind, settings, task.envs)  # as stated: its sentence has the numbers that the user gave
        settings, line = scaled(settings, task.workers)
        say(line)
    algorithm = kind(settings, task)
    note = getattr(algorithm, "batch_note", None)  # algorithms of the user's own need not have it
    if note is not None and (line := note()) is not None:
        say(f"note: {line}")
    return algorithm


def _has_left(folder: Path) -> bool:
    """Whether the environment has changed this process's working folder, as simulators do. If it has removed the one
    that it went to, go back."""
    try:
        return Path.cwd() != folder
    except FileNotFoundError:
        os.chdir(folder)
        return True


def sampling_context(config: RunConfig, source: EnvSource, workdir: Path, generation: int) -> SamplingContext:
    """Where the workers of a run sample."""
    return SamplingContext(
        source,
        workdir,
        generation,
        cpus=config.cpus_per_worker,
        starts_at_once=config.starts_at_once,
        gpus=config.gpus_per_worker,
        failure_rules=failure_rules_of(config),
    )


def with_worker_count(config: RunConfig, say: Callable[[str], None]) -> RunConfig:
    """The configuration with `all` workers if they have cores of their own and their number is not said. Raises
    FeverError for numbers that the machines in reach have no room for."""
    cpus = config.cpus_per_worker
    require_processes(config.workers, cpus)
    if cpus is not None:
        with interruptible():  # they may have to be launched
            machines = machines_in_reach()
        if autoscaled_machines() is None:  # else larger ones may come
            require_room(machines, cpus)
        room = places_on(machines, cpus)
        if isinstance(config.workers, int) and config.workers > room:
            shared = f"{config.workers} workers of {cpus} cores share {sum(machines):g}"
            say(f"note: {shared}; {room} of them are bound to theirs")
        config = config.model_copy(update={"workers": config.workers or "all"})
    check_worker_count(config.workers)
    return config


def check_worker_count(workers: int | str | None) -> None:
    """Raise FeverError for more worker processes than the machines in reach can run."""
    if not isinstance(workers, int) or workers <= WORKERS_PER_CORE:
        return  # it fits whatever the machines are, which need not be asked
    cores = cores_in_reach()
    if workers > WORKERS_PER_CORE * cores:
        raise FeverError(
            f"--workers {workers}: every worker is a process, and with {cores} cores at most "
            f"{WORKERS_PER_CORE * cores} can work ({WORKERS_PER_CORE} per core); for more environments, raise --envs"
        )


def _probe(
    config: RunConfig, source: EnvSource, say: Callable[[str], None]
) -> tuple[tuple[Description, Description, int], int, int | None]:
    """The environment's spaces and frame stack, the number of workers, and with `all` how many fit."""
    with tempfile.TemporaryDirectory(prefix="fever-") as folder, interruptible():
        envs = make_envs(source, 1, EnvContext(workdir=Path(folder), failure_rules=failure_rules_of(config)))
        try:
            workers, places = config.workers, None
            if isinstance(workers, int):
                _warn_of_crowd(workers, say)
                with user_code(f"{source.name} cannot be reset"):
                    envs.reset([config.seed])  # some show only then that they have action masks
            else:
                with user_code(f"{source.name} cannot be tried"):
                    workers, reason, places = _choose_workers(config, envs)
                say(f"workers {workers}: {reason}")
            return (envs.observation, envs.action, envs.stack), workers, places
        finally:
            close_quietly(source.name, envs.close, limited=True)


def _warn_of_crowd(workers: int, say: Callable[[str], None]) -> None:
    """Say that workers share cores, which is faster only if the steps of their environments mostly wait."""
    if current_job() is None and workers > max(1, cores := cores_in_reach()):
        say(f"--workers {workers} are more processes than the {cores} cores; if steps compute, fewer are as fast")


def _choose_workers(config: RunConfig, envs: Envs) -> tuple[int, str, int | None]:
    """What `auto`, `all` or `ranks` means here: number of workers, the reason as text, and with `all` how many fit."""
    machines, each = machines_in_reach(), config.cpus_per_worker
    cores, places = int(sum(machines)), max(1, places_on(machines, each))
    if config.workers == "auto":
        return *choose_workers(envs, cores, places if each else None), None
    envs.reset([config.seed])
    if config.workers == "ranks":
        return (ranks := require_ranks()), f"one for each of {ranks} ranks, on {cores} cores", None
    share = f"one for each of {cores} cores" if each in (None, 1) else f"one for every {each} of {cores} cores"
    if (ranks := ranks_in_reach() or 0) > places:
        share += f", which is all that {ranks} ranks have (--workers ranks: one for each of them)"
    spare = cores > places * (each or 1)  # cores that are no worker's
    if overlaps(config) and places > 2 and not spare:
        return places - 1, f"{share} except the learner's", places
    return places, f"{share}; the learner uses them while the workers wait", places
