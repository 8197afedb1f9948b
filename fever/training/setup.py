"""From a configuration to a learner: everything that is known before a run directory is made."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from fever.algos.base import Learner, Task
from fever.algos.device import limit_learner_threads, prepare_jax
from fever.algos.registry import config_of, find_algorithm, find_provider
from fever.config import DEFAULT_ENVS, RunConfig, validate
from fever.envs.contract import Envs
from fever.envs.make import make_envs
from fever.envs.source import EnvContext, EnvSource
from fever.envs.worker_count import choose_workers
from fever.policy import Policy
from fever.policy.spaces import Description
from fever.sampling.ray_cluster import cores_in_reach

SMALL_WIDTH = 256  # units of a hidden layer up to which a learner on a CPU is fastest on one thread


class Files(Protocol):
    """What a learner keeps in files of its own."""

    def save(self, folder: Path) -> None:
        """Write them into a folder that is there and empty."""
        ...

    def restore(self, folder: Path) -> None:
        """Read what `save` wrote. These may be pickles: only for what the user trusts."""
        ...


@dataclass(frozen=True)
class Prepared:
    """A run that can be started."""

    config: RunConfig  # with every setting, the number of workers and the stop rules
    learner: Learner
    policy: dict[str, Any]  # what checkpoints say of the policy: what it takes and gives, and how it is built
    source: EnvSource  # of environments, with the arguments that they are made with
    all_cores: int | None = None  # in reach, if there is to be a worker for every one
    on_ray: bool = False  # it needs Ray even without workers
    uncut: bool = False  # an iteration cannot be cut short: a signal waits for its end
    files: Files | None = None  # what checkpoints have of it besides arrays


def prepare(config: RunConfig, source: EnvSource, say: Callable[[str], None]) -> Prepared:
    """Make the environment once, and the learner that fits it. What is wrong with either is said now."""
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
    image = observation["type"] == "image"
    recurrent = getattr(settings, "recurrent", "none") != "none"
    widths = (*settings.widths(image), getattr(settings, "recurrent_size", 0) if recurrent else 0)
    limit_learner_threads(not image and max(widths) <= SMALL_WIDTH)
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
    policy = Policy(observation, action, algorithm.network, {}).describe()
    return Prepared(config, algorithm, policy, source, all_cores)


def _probe(
    config: RunConfig, source: EnvSource, say: Callable[[str], None]
) -> tuple[tuple[Description, Description, int], int, int | None]:
    """The environment's spaces, how many workers there will be, and the cores if there is one for each."""
    with tempfile.TemporaryDirectory(prefix="fever-") as folder:
        envs = make_envs(source, 1, EnvContext(workdir=Path(folder)))
        try:
            workers, cores = config.workers, None
            if isinstance(workers, int):
                envs.reset([config.seed])  # some say only then that they have masks of actions
            else:
                workers, reason, cores = _choose_workers(config, envs)
                say(f"workers {workers}: {reason}")
            return (envs.observation, envs.action, envs.stack), workers, cores
        finally:
            envs.close()


def _choose_workers(config: RunConfig, envs: Envs) -> tuple[int, str, int | None]:
    """How many workers `auto` or `all` means here, why, and with `all` the cores that this depends on."""
    cores = cores_in_reach()
    if config.workers == "auto":
        return *choose_workers(envs, cores), None
    envs.reset([config.seed])
    if find_algorithm(config.algo).overlaps and cores > 2:
        return cores - 1, f"one for each of {cores} cores but the learner's", cores
    return cores, f"one for each of {cores} cores; the learner has its turn while they wait", cores
