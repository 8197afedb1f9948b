"""The interfaces between algorithms and the trainer, and what every algorithm is built from."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any, ClassVar, NamedTuple, Protocol

import numpy as np

from fever.config import NetworkSettings
from fever.envs.source import EnvSource
from fever.errors import FeverError, TrainingError
from fever.policy import Network, Params
from fever.policy.policy import network_for
from fever.policy.spaces import Description
from fever.sampling.pool import Pool
from fever.sampling.spec import Report, SamplerSpec
from fever.signals import cuttable

LEARNER_STREAM = 2**32 - 1  # of random numbers, where samplers have their worker's index
INTERRUPTIBLE = ("sample", "wait")  # phases that change nothing in a learner

NATURE = ((32, 8, 4), (64, 4, 2), (64, 3, 1))  # Mnih et al. 2015
SMALL_IMAGES = ((16, 3, 1), (32, 3, 1))  # after Young & Tian 2019


@dataclass(frozen=True)
class Task:
    """What an algorithm is built for."""

    name: str  # of the environment, for messages
    observation: Description
    action: Description
    envs: int  # environments per worker
    workers: int  # 0: in this process
    seed: int
    total_steps: int | None  # where schedules end; None: the run has no limit of steps
    stack: int = 1  # frames in an image observation that follow one another, see `Envs.stack`

    def progress(self, steps: int) -> float:
        """The share of the run's steps that are done, 0 to 1; 0 for a run without a limit of steps."""
        return min(1.0, steps / self.total_steps) if self.total_steps else 0.0


@dataclass(frozen=True)
class Place:
    """Where experience is gathered."""

    source: EnvSource
    workdir: Path  # parent of the environments' private folders
    generation: int  # how often the run was resumed: every time gets fresh random streams
    gpus: float = 0.0  # share of a GPU for every worker


class State(NamedTuple):
    """What a checkpoint keeps of an algorithm besides its weights: arrays by name, and small facts as JSON."""

    arrays: dict[str, np.ndarray]
    facts: dict[str, Any]


@dataclass
class Iteration:
    """What one round of an algorithm's loop did."""

    reports: list[Report]  # of the workers, in a stable order
    metrics: dict[str, float]
    seconds: dict[str, float] = field(default_factory=dict)  # phase -> wall time


class Learner(Protocol):
    """What the trainer sees of an algorithm, whoever wrote it."""

    steps: int  # environment steps learned from so far

    def start(self, place: Place) -> Pool:
        """Start what gathers this algorithm's experience; the trainer closes it."""
        ...

    def train(self, pool: Any) -> Iterator[Iteration]:
        """The loop, for ever, on what `start` returned."""
        ...

    def weights(self) -> Params:
        """What a policy needs to act, as NumPy arrays."""
        ...

    def state(self) -> State:
        """What resuming needs besides `weights`."""
        ...

    def restore(self, state: State, weights: Params) -> None:
        """Continue from what `state` and `weights` returned."""
        ...


class Algorithm(Learner, Protocol):
    """One algorithm of fever's own. It never imports Ray, and learns the same from any workers."""

    Config: ClassVar[type[NetworkSettings]]
    overlaps: ClassVar[bool]  # workers go on while it learns
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
            with cuttable() if name in INTERRUPTIBLE else nullcontext():
                yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + perf_counter() - begin


def sampler_spec(place: Place, network: Network, task: Task, steps: int, gamma: float | None = None) -> SamplerSpec:
    """What gathers experience in calls of this many steps; `gamma` is for the returns that rewards are scaled by."""
    return SamplerSpec(
        place.source, network, task.envs, steps, gamma, task.seed, workdir=place.workdir, gpus=place.gpus
    )


def require_finite(metrics: Any, rate: str) -> np.ndarray:
    """The metrics of an update as NumPy's numbers; where they are none any more, a sentence that names the setting."""
    metrics = np.asarray(metrics, np.float64)
    if not np.isfinite(metrics).all():
        raise TrainingError(f"the loss is not a number any more; a smaller {rate} usually helps")
    return metrics


def build_network(config: NetworkSettings, task: Task, **more: Any) -> Network:
    """The network that fits a task's spaces, with the settings' sizes; `more` are further fields of it."""
    shape = task.observation["shape"] if task.observation["type"] == "image" else ()
    convolutions: tuple[tuple[int, int, int], ...] = ()
    if shape:
        convolutions = config.convolutions or (NATURE if min(shape[:2]) >= 36 else SMALL_IMAGES)
        _check_convolutions(convolutions, shape)
    try:
        return network_for(
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
