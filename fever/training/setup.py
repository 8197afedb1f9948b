"""Prepares a run: probes the environment, completes the configuration, creates the learner. Writes no file."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from fever.algos.base import Learner, Task
from fever.algos.device import limit_learner_threads, prepare_jax
from fever.algos.registry import INTERFACE, config_of, find_algorithm, find_provider
from fever.config import DEFAULT_ENVS, RunConfig, validate
from fever.envs.contract import Envs
from fever.envs.make import make_envs
from fever.envs.source import EnvContext, EnvSource
from fever.envs.worker_count import choose_workers
from fever.errors import FeverError
from fever.plugins.network import compute_at_once
from fever.policy import Policy
from fever.policy.spaces import Description
from fever.sampling.ray_cluster import cores_in_reach

SMALL_WIDTH = 256  # units of a hidden layer up to which a learner on a CPU is fastest on one thread


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
    all_cores: int | None = None  # number of cores, if every one of them is to have a worker
    on_ray: bool = False  # needs Ray even without workers
    uninterruptible: bool = False  # an iteration cannot be interrupted: a signal waits for its end
    files: Files | None = None  # what checkpoints hold besides arrays


def prepare(config: RunConfig, source: EnvSource, say: Callable[[str], None]) -> Prepared:
    """Create the environment once, and a learner that fits it. Raises `FeverError` for what is wrong with either."""
    provider = find_provider(config.algo)
    if provider is not None:
        return provider.prepare(config, source, say)
    prepare_jax(config.device)  # before the first import of JAX, which an algorithm's module brings
    settings = validate(config_of(config.algo), config.settings, config.algo)
    envs = config.envs or DEFAULT_ENVS
    more = {"settings": settings.model_dump(mode="json"), "envs": envs, "workers": config.workers or 0}
    config = config.model_copy(update=more)
    (observation, action, stack), workers, all_cores = _probe(config, source, say)
    stop = config.stop.or_default(source.reward_threshold)
    config = config.model_copy(update={"workers": workers, "stop": stop, "env": source.name})
    image = observation["type"] == "image" or settings.network is not None  # of unknown size
    limit_learner_threads(not image and settings.widest(image) <= SMALL_WIDTH)
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
    )
    algorithm = find_algorithm(config.algo)(settings, task)
    for attribute in ("network", "steps"):
        if not hasattr(algorithm, attribute):
            raise FeverError(f"{config.algo} is not an algorithm: its __init__ sets no {attribute}; {INTERFACE}")
    policy = Policy(observation, action, algorithm.network, {}).describe()
    return Prepared(config, algorithm, policy, source, all_cores)


def _probe(
    config: RunConfig, source: EnvSource, say: Callable[[str], None]
) -> tuple[tuple[Description, Description, int], int, int | None]:
    """The environment's spaces and frame stack, the number of workers, and with `all` the number of cores."""
    with tempfile.TemporaryDirectory(prefix="fever-") as folder:
        envs = make_envs(source, 1, EnvContext(workdir=Path(folder)))
        try:
            workers, cores = config.workers, None
            if isinstance(workers, int):
                envs.reset([config.seed])  # some show only then that they have action masks
            else:
                workers, reason, cores = _choose_workers(config, envs)
                say(f"workers {workers}: {reason}")
            return (envs.observation, envs.action, envs.stack), workers, cores
        finally:
            envs.close()


def _choose_workers(config: RunConfig, envs: Envs) -> tuple[int, str, int | None]:
    """What `auto` or `all` means here: number of workers, the reason as text, and with `all` the number of cores."""
    cores = cores_in_reach()
    if config.workers == "auto":
        return *choose_workers(envs, cores), None
    envs.reset([config.seed])
    if find_algorithm(config.algo).overlaps and cores > 2:
        return cores - 1, f"one for each of {cores} cores except the learner's", cores
    return cores, f"one for each of {cores} cores; the learner uses them while the workers wait", cores
