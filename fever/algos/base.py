"""The interfaces between algorithms and the trainer, and what every algorithm is built from."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from time import perf_counter
from typing import Any, ClassVar, NamedTuple, Protocol, runtime_checkable

import numpy as np

from fever.config import NetworkSettings
from fever.envs.recovery import RAISE_AT_ONCE, FailureRules
from fever.envs.source import EnvSource
from fever.errors import FeverError, TrainingError
from fever.plugins.network import custom_network
from fever.policy import Network, Params
from fever.policy.policy import network_for
from fever.policy.spaces import Description
from fever.sampling.pool import Pool
from fever.sampling.spec import Report, SamplerSpec
from fever.signals import interruptible

LEARNER_STREAM = 2**32 - 1  # seeds the learner's random numbers; samplers have their worker index in its place
INTERRUPTIBLE = ("sample", "wait")  # phases of an iteration that do not change the learner

NATURE = ((32, 8, 4), (64, 4, 2), (64, 3, 1))  # Mnih et al. 2015
SMALL_IMAGES = ((16, 3, 1), (32, 3, 1))  # after Young & Tian 2019


@dataclass(frozen=True)
class Task:
    """What an algorithm is built for: the spaces of an environment, and the size of the run."""

    name: str  # of the environment, for messages
    observation: Description
    action: Description
    envs: int  # environments of each worker (N), which it steps together
    workers: int  # 0: sample in this process
    seed: int
    total_steps: int | None  # environment steps after which schedules end; None: the run has no limit of steps
    stack: int = 1  # frames in an image observation that follow one another, see `Envs.stack`
    total_envs: int = field(kw_only=True)  # environments of the whole run, as stated: sizes of batches follow from it

    def progress(self, steps: int) -> float:
        """The share of the run's steps that are done, 0 to 1; 0 for a run without a limit of steps."""
        return min(1.0, steps / self.total_steps) if self.total_steps else 0.0


@dataclass(frozen=True)
class SamplingContext:
    """Where workers sample."""

    source: EnvSource
    workdir: Path  # parent of the environments' private folders
    generation: int  # how often the run was resumed; seeds the workers' random streams
    cpus: int | None = None  # cores of its own for every worker; None: workers share them
    starts_at_once: int = 64  # workers that make their environments at the same time
    gpus: float = 0.0  # share of a GPU for every worker
    failure_rules: FailureRules = RAISE_AT_ONCE  # how failures of environments are treated


class State(NamedTuple):
    """What a checkpoint keeps of an algorithm besides its weights: arrays by name, and values that are JSON."""

    arrays: dict[str, np.ndarray]
    facts: dict[str, Any]


@dataclass
class Iteration:
    """Results of one iteration of an algorithm's loop."""

    reports: list[Report]  # of the workers, in a stable order
    metrics: dict[str, float]
    seconds: dict[str, float] = field(default_factory=dict)  # phase -> wall time


class Learner(Protocol):
    """The trainer's view of an algorithm, of fever or of another library."""

    steps: int  # environment steps learned from so far

    def start(self, place: SamplingContext) -> Pool:
        """Start the workers that sample for this algorithm. The trainer closes the pool."""
        ...

    def train(self, pool: Any) -> Iterator[Iteration]:
        """The endless training loop on the pool that `start` returned; one `Iteration` after the other."""
        ...

    def weights(self) -> Params:
        """The arrays that a policy needs to act, NumPy."""
        ...

    def state(self) -> State:
        """What resuming needs besides `weights`."""
        ...

    def restore(self, state: State, weights: Params) -> None:
        """Continue from what `state` and `weights` returned."""
        ...


@runtime_checkable
class TakesWeights(Protocol):
    """A learner that can begin with the weights of another run (`--from`)."""

    def take_weights(self, weights: Params, arrays: dict[str, np.ndarray]) -> tuple[list[str], list[str]]:
        """Take those of another learner's `weights()`, and of the arrays of its `state()`, whose names and shapes fit.

        Optimiser, counters and random generator stay fresh. Returns the names of what was taken, and of what fits
        nothing and stays as it was drawn.
        """
        ...


class Algorithm(Learner, Protocol):
    """An algorithm of fever, or of the user's: docs/algorithms.md. It does not import Ray, and does not depend on where
    its workers run. Both of fever's bases are `TakesWeights`, too."""

    Config: ClassVar[type[NetworkSettings]]
    overlaps: ClassVar[bool]  # whether workers sample while it learns
    network: Network

    def __init__(self, config: Any, task: Task) -> None: ...


class Stopwatch:
    """Wall time of the phases of one iteration: `with stopwatch("learn"): ...`.

    A signal interrupts the phases in INTERRUPTIBLE at once. It waits for the end of any other phase, so that a run is
    never saved in the middle of an update.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        begin = perf_counter()
        try:
            with interruptible() if name in INTERRUPTIBLE else nullcontext():
                yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + perf_counter() - begin


def fitting(own: Params, others: Params) -> Params:
    """Those of another network's arrays that have the name and shape of one of `own`."""
    return {name: others[name] for name in own if name in others and others[name].shape == own[name].shape}


def sampler_spec(
    place: SamplingContext, network: Network, task: Task, steps: int, gamma: float | None = None
) -> SamplerSpec:
    """How a worker samples `steps` steps per call. `gamma` discounts the returns that rewards are normalised by; None:
    rewards are not normalised."""
    spec = SamplerSpec(place.source, network, task.envs, steps, gamma, task.seed)
    spec = replace(spec, workdir=place.workdir, failure_rules=place.failure_rules)
    return replace(spec, cpus=place.cpus, gpus=place.gpus, starts_at_once=place.starts_at_once)


def require_finite(metrics: Any, rate: str) -> np.ndarray:
    """The metrics of an update, float64. Raises TrainingError, which names the setting `rate`, if one is NaN or inf."""
    metrics = np.asarray(metrics, np.float64)
    if not np.isfinite(metrics).all():
        raise TrainingError(f"the loss became NaN or infinite; a smaller {rate} usually helps")
    return metrics


def build_network(config: NetworkSettings, task: Task, **more: Any) -> Network:
    """The network for a task's spaces, sized by the settings; `more` has further fields of `Network`."""
    shape = task.observation["shape"] if task.observation["type"] == "image" else ()
    convolutions: tuple[tuple[int, int, int], ...] = ()
    if shape and config.network is None:
        convolutions = config.convolutions or (NATURE if min(shape[:2]) >= 36 else SMALL_IMAGES)
        _check_convolutions(convolutions, shape)
    try:
        network = network_for(
            task.observation,
            task.action,
            hidden=config.widths(bool(convolutions)),
            activation=config.activation,
            convolutions=convolutions,
            convolution_features=config.convolution_features,
            **more,
        )
    except ValueError as error:
        raise FeverError(f"{task.name} cannot be trained on: {error}") from error
    if config.network is None:
        return network
    made = custom_network(network, config.network, config.network_kwargs, task.observation)
    if made.own_state and "recurrent" not in more:
        raise FeverError(
            f"network={config.network} has a state, and this algorithm learns no sequences; use ppo or impala"
        )
    return made


def _check_convolutions(layers: tuple[tuple[int, int, int], ...], shape: list[int]) -> None:
    height, width = shape[:2]
    for filters, kernel, stride in layers:
        if min(filters, kernel, stride) < 1 or kernel % stride:
            raise FeverError(
                f"convolution [{filters}, {kernel}, {stride}]: the kernel must be a multiple of the stride"
            )
        height, width = (height - kernel) // stride + 1, (width - kernel) // stride + 1
        if min(height, width) < 1:
            raise FeverError(
                f"the convolutions {list(map(list, layers))} leave nothing of a {shape[0]}x{shape[1]} image"
            )
