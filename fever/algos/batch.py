"""How large an on-policy batch is, with any number of workers: functions of numbers and settings, without JAX.

Workers share the `envs` environments of the whole run, and a batch is `steps` steps of each of them: its size is that
of one process. With `--scale-batch` every worker has so many environments, and the batch is as many times larger.
"""

from __future__ import annotations

import math
from typing import Any, TypeVar

from fever.algos.registry import config_of, find_algorithm, find_provider
from fever.config import DEFAULT_ENVS, RunConfig, validate
from fever.errors import FeverError

Config = TypeVar("Config", bound=Any)

SHORT = 16  # steps of a fragment below which advantages rest on values rather than on rewards
SIZES = ("minibatch", "value_minibatch")  # settings that grow with a batch
RATES = ("learning_rate", "value_learning_rate")  # settings that follow a minibatch's size


def share(envs: int, workers: int) -> int:
    """The environments of each worker (N) if `workers` workers share `envs`; 0 workers: of this process."""
    return math.ceil(envs / max(1, workers))


def environments(envs: int, workers: int, scale: bool) -> tuple[int, int]:
    """The environments of the whole run and of each worker, from those that are stated; with `scale`, every worker has
    as many as stated."""
    return (envs * max(1, workers), envs) if scale else (envs, share(envs, workers))


def fragment_steps(steps: int, envs: int, workers: int) -> int:
    """The steps (T) of a fragment of which one from each worker makes a batch: at least `steps` times the whole run's
    `envs`, and fewer than one step of all environments beyond."""
    return math.ceil(steps * envs / (max(1, workers) * share(envs, workers)))


def fragments_of(envs: int, workers: int) -> int:
    """How many fragments of a worker's environments come closest to all `envs` of the run, for batches from any
    workers."""
    return max(1, round(envs / share(envs, workers)))


def check_batch(algorithm: Any, settings: Any, envs: int) -> None:
    """Raise FeverError for a minibatch that does not go with a batch from so many environments.

    Algorithms without such a rule have no method `check_batch`; a network of the user's may be recurrent, which is
    known when it is made.
    """
    check = getattr(algorithm, "check_batch", None)
    if check is not None and settings.network is None:
        check(settings, envs)


def check_sizes(config: RunConfig) -> None:
    """Refuse sizes of batches that do not go with the environments, or with `--scale-batch`, before a run begins."""
    provider = find_provider(config.algo)
    if config.scale_batch:
        require_scalable(config.algo, _settings_of(config) if provider is None else None)
    if config.search is None and provider is None:
        check_batch(find_algorithm(config.algo), _settings_of(config), config.envs or DEFAULT_ENVS)
    elif config.search is None and provider is not None:
        provider.check_sizes(config)


def _settings_of(config: RunConfig) -> Any:
    return validate(config_of(config.algo), config.settings, config.algo)


def require_scalable(algo: str, settings: Any) -> None:
    """Raise FeverError for `--scale-batch` with an algorithm, or with a setting, whose batches are of a size of their
    own. `settings` are None for another library's algorithm."""
    fixed_by = getattr(settings, "batch_fixed_by", None)
    if fixed_by is None:
        raise FeverError(
            f"--scale-batch is for algorithms that learn from one fragment of every worker; the batches of {algo} do "
            "not depend on workers"
        )
    if name := fixed_by():
        raise FeverError(f"--scale-batch enlarges batches, and {name}={getattr(settings, name)} sets their size")


def scaled(settings: Config, workers: int) -> tuple[Config, str]:
    """The settings for batches of `--scale-batch`, and a line that says how they differ from those stated.

    Minibatches grow like the batch, so there are as many gradient steps; learning rates grow by the square root of that
    (Malladi et al. 2022, for adaptive optimisers), or for sgd like the batch (Goyal et al. 2017).
    """
    factor = max(1, workers)
    if factor == 1:
        return settings, "--scale-batch changes nothing: it takes two workers or more"
    rate = float(factor) if settings.optimizer == "sgd" else math.sqrt(factor)
    changes = {name: value * factor for name in SIZES if (value := getattr(settings, name, None)) is not None}
    changes |= {name: value * rate for name in RATES if (value := getattr(settings, name, None)) is not None}
    words = ", ".join(f"{name}={value:.4g}" if name in RATES else f"{name}={value}" for name, value in changes.items())
    return settings.model_copy(update=changes), f"--scale-batch: {factor} times the batch, so {words}"


def note_of(stated: int, steps: int, workers: int) -> str | None:
    """What the user should know of fragments of `steps` steps that were to have `stated`; None if they are long
    enough."""
    if not steps < SHORT <= stated:
        return None
    return (
        f"{workers} workers share a batch: the fragment of each has {steps} step{'s' * (steps > 1)}; --scale-batch "
        "enlarges the batch"
    )
