"""A network of the user's own, `network=module:Name`, in the place of the layers between an observation and the heads.

What `Name` makes has two methods, those of a `flax.linen.Module`:

    init(key, observation) -> params          a pytree of float arrays; `key` is JAX's, `observation` a batch of one
    apply(params, observation) -> features    [N, F]; traceable by JAX

`observation` is a batch: arrays `[N, ...]` in the structure of the environment's space, Dict and Tuple included
(`fever.policy.spaces.unflatten` says which types). fever's policy head and value head follow; their outputs fit every
algorithm and every action space. They are linear unless `hidden` says otherwise, but SAC, TD3 and TQC have hidden
layers, because their critics take the action there. docs/networks.md has examples.

A recurrent network has an attribute `state_size`, S; `init` and `apply` then take a state `[N, S]` as well, and
`apply` returns features and the next state. Its zeros begin an episode. Samplers call `apply` jitted on the CPU, or
`apply_numpy`, the same with NumPy, if the network has that.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from functools import cached_property, partial
from typing import Any

import numpy as np

from fever.errors import FeverError
from fever.plugins.names import import_name
from fever.policy import Network, Params, Policy
from fever.policy.networks import normalise
from fever.policy.spaces import Description, encoded_shape, unflatten

PREFIX = "network/"  # of the names of its weights
SMALL_BATCH = 64  # rows up to which zeros cost nothing
learner = {"here": False}  # whether this process learns: then its own settings of JAX count


@dataclass(frozen=True)
class CustomNetwork(Network):
    """fever's heads on the features of a network that the user has written. `recurrent` is "custom" if it has a state.

    Only the fields are pickled: what they stand for is made again in every process.
    """

    custom: str = ""  # module:Name
    custom_kwargs: dict[str, Any] = field(default_factory=dict, hash=False)
    observation: Description = field(default_factory=dict, hash=False)  # without the action mask and bounds

    @cached_property
    def module(self) -> Any:
        """What the user's class or function has made. Raises FeverError if it does not fit."""
        load_jax()  # before the user's module does
        make = import_name(self.custom)
        try:
            module = make(**self.custom_kwargs)
        except TypeError as error:
            raise FeverError(f"network={self.custom} cannot be made with {self.custom_kwargs}: {error}") from error
        for method in ("init", "apply"):
            if not callable(getattr(module, method, None)):
                raise FeverError(f"network={self.custom} made a {type(module).__name__}, which has no method {method}")
        return module

    @property
    def own_state(self) -> int:
        """S of the user's network; 0 if it keeps no state."""
        return int(getattr(self.module, "state_size", 0))

    @property
    def state_size(self) -> int:
        return self.own_state if self.recurrent == "custom" else super().state_size

    @property
    def normalizable(self) -> bool:
        """Parts of a Dict or Tuple reach the network as they are: masks and ids among them must keep their values."""
        return super().normalizable and self.observation["type"] == "box"

    @property
    def on_numpy(self) -> bool:
        """Whether samplers act with NumPy."""
        return hasattr(self.module, "apply_numpy")

    @cached_property
    def structure(self) -> tuple[list[str], Any, int]:
        """Names of the network's weights, their tree, and the width of the features. Raises FeverError if it fails."""
        jax = load_jax()
        inputs = self._inputs(self._example())
        try:
            shapes = jax.eval_shape(self.module.init, jax.random.key(0), *inputs)
            made = jax.eval_shape(self.module.apply, shapes, *inputs)
        except Exception as error:
            sizes = jax.tree.map(lambda part: part.shape, inputs[0])
            what = f"{type(error).__name__}: {error}"
            raise FeverError(f"network={self.custom} failed on observations of shape {sizes}: {what}") from error
        paths, tree = jax.tree_util.tree_flatten_with_path(shapes)
        names = [PREFIX + jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in paths]
        if wrong := next((name for name, (_, leaf) in zip(names, paths, strict=True) if leaf.dtype.kind != "f"), None):
            raise FeverError(f"network={self.custom} has weights that are no floats: {wrong.removeprefix(PREFIX)}")
        return names, tree, self._width(made)

    def _width(self, made: Any) -> int:
        """The width of the features, from the shapes of what `apply` returned."""
        if self.own_state:
            if not isinstance(made, tuple) or len(made) != 2 or made[1].shape != (1, self.own_state):
                raise FeverError(f"network={self.custom} must return features and a state [N, {self.own_state}]")
            made = made[0]
        if not hasattr(made, "shape") or len(made.shape) != 2 or made.shape[0] != 1:
            got = f"shape {made.shape}" if hasattr(made, "shape") else type(made).__name__
            raise FeverError(f"network={self.custom} must return features [N, F], and returned {got} for N = 1")
        return int(made.shape[1])

    def _example(self) -> np.ndarray:
        """One encoded observation of zeros, without the action mask."""
        shape, dtype = encoded_shape(self.observation)
        return np.zeros((1, *shape), dtype)

    def _inputs(self, x: Any, state: Any = None) -> tuple[Any, ...]:
        """Arguments of `init` and `apply` after the first, for encoded observations `[N, ...]`."""
        observation = unflatten(self.observation, x)
        if not self.own_state:
            return (observation,)
        return observation, np.zeros((len(x), self.own_state), np.float32) if state is None else state

    # what Network calls

    def _init_encoder(self, rng: np.random.Generator) -> tuple[Params, int]:
        jax = load_jax()
        names, _, width = self.structure
        params = self.module.init(jax.random.key(int(rng.integers(2**31))), *self._inputs(self._example()))
        leaves = [np.asarray(leaf, np.float32) for leaf in jax.tree.leaves(params)]
        return dict(zip(names, leaves, strict=True)), width

    def _apply(self, params: Params, x: Any, state: Any, xp: Any) -> Any:
        names, tree, _ = self.structure
        own = tree.unflatten([params[name] for name in names])
        apply = self.module.apply_numpy if xp is np and self.on_numpy else self.module.apply
        return apply(own, *self._inputs(x, state))

    def _features(self, params: Params, x: Any, xp: Any) -> Any:
        x = normalise(params, x)
        if self.recurrent == "custom":
            return x.reshape(len(x), -1)  # `_core` applies the network, one time step after the other
        return self._apply(params, x, None, xp)

    def _core(self, params: Params, features: Any, state: Any, xp: Any) -> tuple[Any, Any]:
        if self.recurrent != "custom":
            return super()._core(params, features, state, xp)
        shape, _ = encoded_shape(self.observation)
        return self._apply(params, features.reshape(len(features), *shape), state, xp)

    def actor(self, params: Params) -> Callable[[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]:
        if self.on_numpy:
            return partial(super().act, params)
        placed, jitted, recurrent = self._place(params), self._jitted_act, self.state_size > 0

        def act(observations: np.ndarray, state: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
            count = len(observations)
            if count not in self._compiled:
                observations, state = self._padded(observations), self._padded(state)
            if not recurrent:
                return np.asarray(jitted(placed, observations))[:count], state[:count]
            outputs, state = jitted(placed, observations, state)
            return np.asarray(outputs)[:count], np.asarray(state)[:count]

        return act

    @cached_property
    def _compiled(self) -> set[int]:
        """Numbers of rows that acting was compiled for."""
        return set()

    def _padded(self, rows: np.ndarray) -> np.ndarray:
        """Rows `[N, ...]` with zeros behind them, up to a number that acting was or will be compiled for: the first one
        as it is, later ones a power of two, so that changing numbers are compiled a few times only."""
        count = len(rows)
        fitting = [size for size in self._compiled if count <= size <= max(2 * count, SMALL_BATCH)]
        size = min(fitting) if fitting else count if not self._compiled else 1 << (count - 1).bit_length()
        self._compiled.add(size)
        return np.concatenate([rows, np.zeros((size - count, *rows.shape[1:]), rows.dtype)])

    def act(self, params: Params, observations: np.ndarray, state: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return self.actor(params)(observations, state)

    def values(self, params: Params, observations: np.ndarray, state: np.ndarray) -> np.ndarray:
        if self.on_numpy:
            return super().values(params, observations, state)
        return np.asarray(self._jitted_values(self._place(params), observations, state))

    def _place(self, params: Params) -> Any:
        """Weights on the CPU, where samplers compute even if the learner has a GPU."""
        jax = load_jax()
        return jax.device_put(params, jax.local_devices(backend="cpu")[0])

    @cached_property
    def _jitted_act(self) -> Any:
        """Outputs of the policy head, and with a state the next one; without, it is left out, which is faster."""
        jax = load_jax()
        xp = jax.numpy

        def act(params: Params, observations: Any, state: Any = None) -> Any:
            features, state = self.step(params, self.features(params, observations, xp), state, xp)
            outputs = self.policy(params, features, xp)
            return (outputs, state) if self.state_size else outputs

        return jax.jit(act)

    @cached_property
    def _jitted_values(self) -> Any:
        jax = load_jax()
        xp = jax.numpy

        def values(params: Params, observations: Any, state: Any) -> Any:
            return self.value(params, self.step(params, self.features(params, observations, xp), state, xp)[0], xp)

        return jax.jit(values)

    def __getstate__(self) -> dict[str, Any]:
        return {one.name: getattr(self, one.name) for one in fields(self)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)


def load_jax() -> Any:
    """JAX, for acting. A worker of Ray's that has not imported it gets one thread of the CPU."""
    if "jax" not in sys.modules and "ray" in sys.modules:
        for name, value in {"JAX_PLATFORMS": "cpu", "PJRT_NPROC": "1", "TF_CPP_MIN_LOG_LEVEL": "2"}.items():
            os.environ.setdefault(name, value)
    import jax

    if not learner["here"]:
        compute_at_once()
    return jax


def compute_at_once() -> None:
    """Compute in the thread that calls, not in another one: handing over takes seven times as long as a small policy.

    Has an effect before JAX computes for the first time in this process.
    """
    import jax

    jax.config.update("jax_cpu_enable_async_dispatch", False)


def custom_network(network: Network, name: str, kwargs: dict[str, Any], observation: Description) -> CustomNetwork:
    """This network with the user's in the place of the layers before its heads, for a learner in this process.

    Raises FeverError if it does not fit.
    """
    learner["here"] = True
    inner = without_bounds(observation["observation"] if observation["type"] == "masked" else observation)
    try:
        kwargs = json.loads(json.dumps(kwargs))
    except (TypeError, ValueError) as error:
        raise FeverError(f"network_kwargs must be what JSON can hold: {error}") from error
    common = {one.name: getattr(network, one.name) for one in fields(Network)}
    made = CustomNetwork(**common | {"custom": name, "custom_kwargs": kwargs, "observation": inner})
    if made.own_state:
        if made.recurrent != "none":
            raise FeverError(f"network={name} is recurrent itself; leave out recurrent={made.recurrent}")
        made = CustomNetwork(**{one.name: getattr(made, one.name) for one in fields(made)} | {"recurrent": "custom"})
    _ = made.structure  # fails now, in one sentence, rather than in a worker
    return made


def without_bounds(description: Description) -> Description:
    """A description of observations without what no network depends on."""
    kept = {name: value for name, value in description.items() if name not in ("low", "high")}
    if description["type"] == "dict":
        kept["spaces"] = {key: without_bounds(part) for key, part in description["spaces"].items()}
    elif description["type"] == "tuple":
        kept["spaces"] = [without_bounds(part) for part in description["spaces"]]
    return kept


def load_policy(description: dict[str, Any], params: Params) -> Policy:
    """The policy of a checkpoint, with fever's own network or the user's."""
    if "custom" not in description["network"]:
        return Policy.from_description(description, params)
    return Policy.from_description(description, params, CustomNetwork)
