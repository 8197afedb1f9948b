"""One checkpoint of a run: arrays, a manifest with hashes of all files, and for RLlib its own files."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from fever import layout
from fever.algos.registry import Provider, find_provider, needs_trust
from fever.config import Stop
from fever.errors import DamagedError, FeverError, TrainingError
from fever.files import read_sealed, sha256, unreadable_tensors
from fever.job import current_job
from fever.plugins.network import load_policy
from fever.policy import Network
from fever.policy.spaces import Description, mismatch
from fever.runs.trust import TRUST_HINT, require
from fever.text import one_line

FORMAT = 2  # version of the manifest; raised when older readers would misread a new one
LARGEST = 1 << 63  # of whole numbers in a manifest
EVALUATION, TRAINING = "evaluation", "training"  # what a score is of
WEIGHTS_PREFIX = "policy/"  # of the names of arrays that acting needs; the others are for resuming


@dataclass(frozen=True)
class Checkpoint:
    """One complete checkpoint on disk."""

    path: Path
    manifest: dict[str, Any]
    trusted: bool = False  # as the run
    note: str = ""  # which others are damaged, if this one was chosen in their place

    @property
    def name(self) -> str:
        """The name of its folder."""
        return f"{self.iteration:08d}"

    def __post_init__(self) -> None:
        self.field("iteration", int)
        self.field("score", int, float, type(None))

    def field(self, name: str, *kinds: type, within: dict[str, Any] | None = None) -> Any:
        """A field of the manifest, or of a part of it; raises `DamagedError` if it is missing, not of these kinds, or a
        number that no computation has. A manifest may be anybody's."""
        value = (self.manifest if within is None else within).get(name, self)
        if not isinstance(value, kinds) or (isinstance(value, int) and abs(value) > LARGEST):
            raise DamagedError(
                f"the checkpoint is damaged: {self.path / layout.MANIFEST} has no {name} that can be used"
            )
        return value

    @property
    def iteration(self) -> int:
        return int(self.manifest["iteration"])

    @property
    def score(self) -> float | None:
        """How good the policy is, for the choice of the best checkpoint; None if that is not known."""
        return self.manifest["score"]

    @property
    def score_of(self) -> str:
        """What the score is of: "evaluation" or "training"."""
        return self.field("score_of", str)

    @property
    def files(self) -> Path:
        """Folder of the files that a learner writes itself; most learners have none, and it does not exist."""
        return self.path / layout.FILES

    @property
    def provider(self) -> Provider | None:
        """The provider of the algorithm that wrote it; None for fever's own algorithms."""
        return find_provider(self.field("algo", str))

    @property
    def env_changes(self) -> dict[str, Any]:
        """Arguments of the environment that callbacks had changed by then."""
        return self.field("env_changes", dict, within={"env_changes": {}, **self.field("trainer", dict)})

    def met(self, stop: Stop) -> str:
        """The name of the stop rule that is met at this checkpoint, or an empty string."""
        kept = self.field("trainer", dict)
        evaluated = kept.get("evaluation")
        if evaluated:
            reached = self.field("return_mean", int, float, within=self.field("evaluation", dict, within=kept))
        else:
            reached = window_mean(self.field("returns", list, within=kept), stop.window)
        seconds = self.field("seconds", int, float, within=kept)
        return stop_reason(stop, reached, self.field("steps", int), self.iteration, seconds)

    def check_spaces(self, observation: Description, action: Description, name: str) -> None:
        """Raise `FeverError` if the environment of this name has other spaces than the policy was made for."""
        policy = self.field("policy", dict)
        own = tuple(self.field(name, dict, str, within=policy) for name in ("observation", "action"))
        if found := mismatch(own, (observation, action)):
            raise FeverError(f"the checkpoint {self.path} does not fit {name}, which has {found}")

    @property
    def names(self) -> list[str]:
        """What acting with the policy imports, as `module:Name`, besides what a provider's algorithm does."""
        policy = self.field("policy", dict)
        custom = self.field("network", dict, within={"network": {}, **policy}).get("custom")
        return [str(custom)] if custom else []

    def require(self, trust: bool) -> None:
        """Raise `FeverError` if resuming reads pickles that the user does not trust. A requeued job trusts its own."""
        pickled = self.files.exists() or needs_trust(self.field("algo", str))  # not only what the manifest lists
        if pickled and not trust and current_job() is None:
            raise FeverError(f"{self.files} holds pickles, which can run any program when they are read; {TRUST_HINT}")

    def damage(self) -> str:
        """What is wrong with its files: one is missing, has changed, or is not listed in the manifest; or nothing."""
        hashes = self.field("sha256", dict)
        for path in self.files.rglob("*"):
            if path.is_file() and str(path.relative_to(self.path)) not in hashes:
                return f"{path.relative_to(self.path)} does not belong to it"
        if layout.ARRAYS not in hashes:
            return f"{layout.ARRAYS} is not listed in its manifest"
        for name, digest in hashes.items():
            try:
                if not self._holds(name):
                    return f"{name!r} is not a file of its own"
                if sha256(self.path / name) != digest:
                    return f"{name} has changed since it was written"
            except FileNotFoundError:
                return f"{name} is missing"
            except OSError as error:
                return f"{name} cannot be read: {error.strerror}"
        return ""

    def _holds(self, name: str) -> bool:
        """Whether a name out of the manifest is that of a file in this folder, or of none. A manifest may be anybody's,
        and its names could lead anywhere."""
        parts = Path(name).parts
        if Path(name).is_absolute() or ".." in parts or "\0" in name:
            return False
        path = self.path / name
        return not path.is_symlink() and (path.is_file() or not path.exists())

    def verify(self) -> None:
        """Raise `DamagedError` if a file is not as it was written."""
        if found := self.damage():
            raise DamagedError(f"the checkpoint {self.path} is damaged: {found}; choose another one with --checkpoint")

    def arrays(self, prefix: str = "") -> dict[str, np.ndarray]:
        """The arrays whose names begin with `prefix`, by the rest of their names. Verifies all files first."""
        from safetensors import safe_open

        self.verify()
        try:
            with safe_open(self.path / layout.ARRAYS, framework="numpy") as file:
                names = [name for name in file.keys() if name.startswith(prefix)]  # noqa: SIM118 - not a dictionary
                return {name.removeprefix(prefix): file.get_tensor(name) for name in names}
        except unreadable_tensors() as error:
            raise DamagedError(f"the checkpoint is damaged: {self.path / layout.ARRAYS}: {error}") from error

    @contextmanager
    def reading(self, use: str) -> Iterator[None]:
        """A block that makes something of the manifest and the arrays, to `use` them: an exception of
        another kind than fever's becomes a `DamagedError`."""
        try:
            yield
        except (FeverError, TrainingError):
            raise
        except Exception as error:
            what = one_line(f"{type(error).__name__}: {error}")[:200]
            raise DamagedError(
                f"the checkpoint {self.path} is damaged: it cannot be {use} ({what}); choose another one with "
                "--checkpoint"
            ) from error

    def policy(self) -> Any:
        """The policy: a `Policy`, or for another provider's algorithm an object with the same methods for acting."""
        if self.provider is not None:
            return self.provider.load_policy(self)
        require(self.path.parents[1], self.names, self.trusted)
        arrays = self.arrays(WEIGHTS_PREFIX)
        try:
            return load_policy(self.field("policy", dict), arrays)
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            if self.names:
                raise  # it may be in the user's own network
            raise DamagedError(
                f"the checkpoint is damaged: its arrays are not those of its policy: {error!r}"
            ) from error


def read_checkpoint(path: Path) -> Checkpoint:
    """The checkpoint in a folder, whatever version of fever wrote it. Raises `DamagedError` if its manifest is missing
    or has changed, and `FeverError` if it is of a later version. The other files are not looked at."""
    manifest = read_sealed(path / layout.MANIFEST, unsealed=(1,))
    number = manifest.get("format")
    if not isinstance(number, int) or number not in READERS:
        raise FeverError(f"{path} was written by a later version of fever (format {number}; this one knows {FORMAT})")
    return Checkpoint(path, READERS[number](manifest))


def _read_format_1(manifest: dict[str, Any]) -> dict[str, Any]:
    """Format 1 had no hash of the manifest, and its first version neither kinds of scores nor changed arguments."""
    return {**manifest, "score_of": manifest.get("score_of") or TRAINING}


READERS: dict[Any, Callable[[dict[str, Any]], dict[str, Any]]] = {1: _read_format_1, FORMAT: lambda manifest: manifest}


def best_of(checkpoints: list[Checkpoint]) -> Checkpoint | None:
    """The checkpoint with the highest score, the latest of equals; None if none has a score. Scores of evaluations and
    of training are not compared: those of the kind that the latest one has count."""
    scored = [one for one in checkpoints if one.score is not None]
    same = [one for one in scored if one.score_of == scored[-1].score_of]
    return max(same, key=lambda one: (one.score, one.iteration)) if same else None


def window_mean(returns: Sequence[float], window: int) -> float | None:
    """The mean of the last `window` returns; None if there are fewer."""
    last = list(returns)[-window:]
    return float(np.mean(last)) if len(last) == window else None


def stop_reason(stop: Stop, reached: float | None, steps: int, iteration: int, seconds: float) -> str:
    """The name of the first stop rule that is met, or an empty string. `reached` is the mean return that counts."""
    if stop.reward is not None and reached is not None and reached >= stop.reward:
        return "reward"
    if stop.steps is not None and steps >= stop.steps:
        return "steps"
    if stop.iterations is not None and iteration >= stop.iterations:
        return "iterations"
    if stop.seconds is not None and seconds >= stop.seconds:
        return "time"
    return ""


def same_network(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether two policies, as checkpoints describe them, differ in nothing but their spaces.

    A field of the network that the first one lacks, because it is older, has its default.
    """
    rest = {*one, *other} - {"observation", "action", "network"}
    old, new = one.get("network", {}), other.get("network", {})
    later = {field.name: field.default for field in fields(Network) if field.name not in old}
    return {**later, **old} == {**later, **new} and all(one.get(name) == other.get(name) for name in rest)
