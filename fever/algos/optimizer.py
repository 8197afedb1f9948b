"""Optax's optimisers by name, for weights that are one vector (`fever.algos.flat_params`), and schedules by name."""

from __future__ import annotations

import inspect
import math
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax
from pydantic import ValidationInfo, field_validator

from fever.algos.base import Task
from fever.config import NetworkSettings, setting
from fever.errors import FeverError

# Optimisers that treat every weight by itself. Those that scale layers (LAMB, LARS, ...) would take the vector of all
# weights for one layer.
OptimizerName = Literal[
    "adabelief", "adadelta", "adagrad", "adam", "adamax", "adamaxw", "adamw", "adan", "amsgrad", "lion", "nadam",
    "nadamw", "radam", "rmsprop", "sgd", "sign_sgd", "signum", "yogi",
]  # fmt: skip
Schedule = Literal["constant", "linear", "cosine", "exponential"]
EXPONENTIAL_END = 0.01  # of the value at the start, at the end of an exponential schedule


class OptimizerSettings(NetworkSettings):
    """How gradients become new weights; shared by all algorithms."""

    optimizer: OptimizerName = setting("adam", "one of optax's optimisers: adam, adamw, rmsprop, sgd, ...", "SB3")
    optimizer_kwargs: dict[str, bool | float] = setting({}, "more arguments for it, for example {weight_decay: 0.01}")
    learning_rate_schedule: Schedule = setting(
        "constant", "linear, cosine: to 0 at stop.steps; exponential: to 1% of it", "SB3"
    )

    @field_validator("optimizer_kwargs")
    @classmethod
    def _known_arguments(cls, value: dict[str, Any], info: ValidationInfo) -> dict[str, Any]:
        name = info.data.get("optimizer")
        if name is not None:  # None: it was refused
            known = [*inspect.signature(getattr(optax, name)).parameters][1:]  # the first is the learning rate
            if unknown := [argument for argument in value if argument not in known]:
                raise ValueError(f"{name} has no argument {unknown[0]}; it has {', '.join(known) or 'none'}")
        return value


class Optimizer:
    """One of optax's optimisers for a vector of weights `[P]`.

    `max_norm`: a gradient with a larger Euclidean norm is scaled down to this norm first.
    `adam_epsilon`: eps of adam, unless the settings have one.
    """

    def __init__(self, settings: OptimizerSettings, max_norm: float | None = None, adam_epsilon: float = 1e-8) -> None:
        self.name, self.max_norm = settings.optimizer, max_norm
        defaults = {"eps": adam_epsilon} if self.name == "adam" else {}
        self.kwargs = defaults | settings.optimizer_kwargs

    def init(self, params: Any) -> optax.OptState:
        """The state before the first step."""
        return self._transformation(0.0).init(params)

    def step(self, params: Any, state: optax.OptState, gradient: Any, learning_rate: Any) -> tuple[Any, optax.OptState]:
        """Weights `[P]` and state after one step along a gradient `[P]`. Traceable."""
        if self.max_norm is not None:  # one division of numbers, where optax.clip_by_global_norm divides vectors
            norm = jnp.sqrt((gradient**2).sum())
            gradient = gradient * (self.max_norm / jnp.maximum(norm, self.max_norm))
        updates, state = self._transformation(learning_rate).update(gradient, state, params)
        return optax.apply_updates(params, updates), state

    def _transformation(self, learning_rate: Any) -> optax.GradientTransformation:
        """Optax's optimiser with this learning rate, which may be traced: the state does not depend on it."""
        return getattr(optax, self.name)(learning_rate, **self.kwargs)


def scheduled(value: float, schedule: Schedule, progress: float) -> float:
    """The value of a setting when the share `progress` of the run's steps is done, 0 to 1.

    | schedule | value at progress p |
    |---|---|
    | constant | value |
    | linear | value (1 - p) |
    | cosine | value (1 + cos(pi p)) / 2 |
    | exponential | value 0.01^p |
    """
    factors = {
        "constant": 1.0,
        "linear": 1 - progress,
        "cosine": (1 + math.cos(math.pi * progress)) / 2,
        "exponential": EXPONENTIAL_END**progress,
    }
    return value * factors[schedule]


def require_end(task: Task, *schedules: Schedule) -> None:
    """Refuse schedules for a run that has no number of steps at which they end."""
    for schedule in schedules:
        if schedule != "constant" and task.total_steps is None:
            raise FeverError(f"a {schedule} schedule needs an end; give --stop-steps")


def named_arrays(name: str, tree: Any) -> dict[str, np.ndarray]:
    """The arrays of a pytree for a checkpoint: `name/path/in/the/tree` -> array."""
    return {_name(name, path): np.asarray(leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def from_named_arrays(name: str, tree: Any, arrays: dict[str, np.ndarray]) -> Any:
    """A pytree with the structure and shapes of `tree` and the arrays that `named_arrays` made.

    Raises FeverError if an array is missing or has another shape.
    """

    def find(path: Any, leaf: Any) -> Any:
        array = arrays.get(_name(name, path))
        if array is None or array.shape != leaf.shape:
            raise FeverError(
                f"the checkpoint has no array {_name(name, path)} of the right shape: it was written by another "
                "version of fever or with another optimizer, and cannot be resumed"
            )
        return jnp.asarray(array)

    return jax.tree_util.tree_map_with_path(find, tree)


def _name(name: str, path: Any) -> str:
    return "/".join([name, jax.tree_util.keystr(path, simple=True, separator="/")])
