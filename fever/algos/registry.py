"""Algorithms by name: fever's own, the user's as `module:Class`, and other libraries' with a prefix, `rllib:PPO`.

What a name stands for is imported when it is asked for, so that commands start without JAX, Ray and PyTorch.
"""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from fever.errors import FeverError

if TYPE_CHECKING:  # shell completion reads the names below, and must answer at once
    import numpy as np

    from fever.algos.base import Algorithm
    from fever.config import NetworkSettings, RunConfig
    from fever.envs.source import EnvSource
    from fever.runs.checkpoint import Checkpoint
    from fever.runs.player import Scores
    from fever.training.setup import Prepared

ALGORITHMS = {
    "ppo": "fever.algos.ppo:PPO",
    "a2c": "fever.algos.a2c:A2C",
    "trpo": "fever.algos.trpo:TRPO",
    "impala": "fever.algos.impala:Impala",
    "appo": "fever.algos.impala:APPO",
    "dqn": "fever.algos.dqn:DQN",
    "qrdqn": "fever.algos.qrdqn:QRDQN",
    "apex": "fever.algos.apex:Apex",
    "sac": "fever.algos.sac:SAC",
    "td3": "fever.algos.td3:TD3",
    "tqc": "fever.algos.tqc:TQC",
}
PROVIDERS = {"rllib": "fever.rllib.provider:RllibProvider"}  # prefix of the names -> the class that serves them

METHODS = ("start", "train", "weights", "state", "restore")  # of an algorithm
INTERFACE = "docs/algorithms.md shows what an algorithm has"


class Provider(Protocol):
    """Another library's algorithms. The module that defines a provider imports the library only when it is used."""

    pickles: ClassVar[bool]  # whether resuming reads pickles, which the user has to allow with --trust
    network_settings: ClassVar[frozenset[str]]  # settings that change the network: a checkpoint fits one of its values

    def names(self) -> list[str]:
        """Every algorithm, with the prefix. Raises FeverError if the library is not installed."""
        ...

    def describe_settings(self, algo: str) -> list[tuple[str, str, str, str]]:
        """Name, default, meaning and source of every setting of an algorithm, for `fever config`."""
        ...

    def check_settings(self, algo: str, settings: dict[str, Any]) -> None:
        """Raise FeverError for an algorithm or a setting that does not exist, or a value that cannot be used."""
        ...

    def check_sizes(self, config: RunConfig) -> None:
        """Raise FeverError for settings that do not go together, such as sizes of batches, before a run begins."""
        ...

    def run_field(self, setting: str) -> str | None:
        """The field of RunConfig that a setting is the library's name for, if it is one: `workers`."""
        ...

    def resolve(self, config: RunConfig) -> RunConfig:
        """The configuration with the settings by their present names, and with those moved that are run fields."""
        ...

    def prepare(self, config: RunConfig, source: EnvSource, say: Callable[[str], None]) -> Prepared:
        """What `fever.training.setup.prepare` does for fever's own algorithms."""
        ...

    def env_source(self, source: EnvSource) -> EnvSource:
        """The environment with its arguments as the library passes them to the constructor."""
        ...

    def trial_bundles(self, config: RunConfig, source: EnvSource) -> list[dict[str, float]]:
        """Ray resources that a run needs for each of its processes, the one that calls the trainer first."""
        ...

    def load_policy(self, checkpoint: Checkpoint) -> Any:
        """A policy with `act(observation)` and `reset()`, like `fever.policy.Policy`. Reads no pickles."""
        ...

    def play(
        self,
        checkpoint: Checkpoint,
        source: EnvSource,
        seeds: list[int],
        deterministic: bool,
        max_steps: int | None = None,
    ) -> Scores:
        """Play one episode for each of these seeds; it is cut off after `max_steps` steps."""
        ...

    def film(
        self, checkpoint: Checkpoint, source: EnvSource, steps: int, seed: int, deterministic: bool = True
    ) -> tuple[list[np.ndarray], float, float]:
        """Frames, frames per second and return of one episode of at most `steps` steps."""
        ...


def find_provider(algo: str) -> Provider | None:
    """The provider of an algorithm by the prefix of its name; None for fever's own algorithms."""
    prefix, colon, _ = algo.partition(":")
    return _load(PROVIDERS[prefix])() if colon and prefix in PROVIDERS else None


def without_prefix(algo: str) -> str:
    """The name that an algorithm has for its provider: `rllib:PPO` to `PPO`."""
    prefix, colon, name = algo.partition(":")
    return name if colon and prefix in PROVIDERS else algo


def find_algorithm(name: str) -> type[Algorithm]:
    """The class of one of fever's own algorithms, or the user's that `module:Class` names.

    Raises FeverError if there is none, if its module cannot be imported, or if the class is not an `Algorithm`.
    """
    if name in ALGORITHMS:
        return _load(ALGORITHMS[name])
    module, colon, _ = name.rpartition(":")
    if not colon or difflib.get_close_matches(module, PROVIDERS, cutoff=0.8):  # rlib:PPO
        raise FeverError(_unknown(name))
    from fever.plugins.names import import_name

    found = import_name(name)
    if not isinstance(found, type):
        raise FeverError(f"{name} is not a class; {INTERFACE}")
    if missing := missing_parts(found):
        raise FeverError(f"{name} is not an algorithm: it lacks {', '.join(missing)}; {INTERFACE}")
    return found


def missing_parts(found: type) -> list[str]:
    """What a class lacks of `fever.algos.base.Algorithm`, in words. Whether its objects have the attributes `network`
    and `steps` is seen when one is made."""
    from fever.config import NetworkSettings

    config = getattr(found, "Config", None)
    fits = isinstance(config, type) and issubclass(config, NetworkSettings)
    missing = [] if fits else ["Config (a subclass of fever.config.NetworkSettings)"]
    missing += [f"{name}()" for name in METHODS if not callable(getattr(found, name, None))]
    missing += [] if isinstance(getattr(found, "overlaps", None), bool) else ["overlaps (True or False)"]
    return missing + [f"{name}()" for name in sorted(getattr(found, "__abstractmethods__", ()))]


def _unknown(name: str) -> str:
    close = difflib.get_close_matches(name, ALGORITHMS, n=1)
    hint = f"did you mean {close[0]}? Choose" if close else "choose"
    others = "one of RLlib's such as rllib:PPO, or your own as module:Class"
    return f"{name} is not a known algorithm; {hint} one of {', '.join(ALGORITHMS)}, {others}"


def config_of(name: str) -> type[NetworkSettings]:
    """The settings of an algorithm that no provider has."""
    return find_algorithm(name).Config


def overlaps(config: RunConfig) -> bool:
    """Whether workers sample while the learner learns: as the algorithm says, or PPO's setting `overlap`."""
    return find_algorithm(config.algo).overlaps or config.settings.get("overlap") is True


def list_algorithms() -> Iterator[str]:
    """The names of all algorithms, fever's own first. For a library that is not installed, how to install it."""
    yield from ALGORITHMS
    for prefix, target in PROVIDERS.items():
        try:
            yield from _load(target)().names()
        except FeverError as error:
            yield f"{prefix}:NAME ({error})"


def check_settings(algo: str, settings: dict[str, Any]) -> None:
    """Raise FeverError for an algorithm or a setting that does not exist, or a value that cannot be used."""
    from fever.config import validate

    provider = find_provider(algo)
    if provider is not None:
        provider.check_settings(algo, settings)
    else:
        validate(config_of(algo), settings, algo)


def needs_trust(algo: str) -> bool:
    """Whether resuming a run of this algorithm reads pickles, which the user has to allow with --trust."""
    provider = find_provider(algo)
    return provider is not None and provider.pickles


def _load(target: str) -> Any:
    """The class that `module:Name` stands for."""
    module, _, name = target.partition(":")
    return getattr(importlib.import_module(module), name)
