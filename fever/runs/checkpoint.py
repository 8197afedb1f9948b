"""One checkpoint of a run: arrays, a manifest with hashes of all files, and for RLlib its own files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from fever import layout
from fever.algos.registry import Provider, find_provider, needs_trust
from fever.config import Stop
from fever.errors import FeverError
from fever.files import sha256
from fever.job import current_job
from fever.plugins.network import load_policy
from fever.policy import Network
from fever.policy.spaces import Description, mismatch

EVALUATION, TRAINING = "evaluation", "training"  # what a score is of
WEIGHTS_PREFIX = "policy/"  # of the names of arrays that acting needs; the others are for resuming


@dataclass(frozen=True)
class Checkpoint:
    """One complete checkpoint on disk."""

    path: Path
    manifest: dict[str, Any]

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
        return self.manifest.get("score_of") or TRAINING

    @property
    def files(self) -> Path:
        """Folder of the files that a learner writes itself; most learners have none, and it does not exist."""
        return self.path / layout.FILES

    @property
    def provider(self) -> Provider | None:
        """The provider of the algorithm that wrote it; None for fever's own algorithms."""
        return find_provider(self.manifest["algo"])

    @property
    def env_changes(self) -> dict[str, Any]:
        """Arguments of the environment that callbacks had changed by then."""
        return self.manifest["trainer"].get("env_changes", {})

    def met(self, stop: Stop) -> str:
        """The name of the stop rule that is met at this checkpoint, or an empty string."""
        kept = self.manifest["trainer"]
        evaluated = kept.get("evaluation")
        reached = evaluated["return_mean"] if evaluated else window_mean(kept["returns"], stop.window)
        return stop_reason(stop, reached, self.manifest["steps"], self.iteration, kept["seconds"])

    def check_spaces(self, observation: Description, action: Description, name: str) -> None:
        """Raise `FeverError` if the environment of this name has other spaces than the policy was made for."""
        policy = self.manifest["policy"]
        if found := mismatch((policy["observation"], policy["action"]), (observation, action)):
            raise FeverError(f"the checkpoint {self.path} does not fit {name}, which has {found}")

    def require(self, trust: bool) -> None:
        """Raise `FeverError` if resuming reads pickles that the user does not trust. A requeued job trusts its own."""
        pickled = self.files.exists() or needs_trust(self.manifest["algo"])  # not only what the manifest lists
        if pickled and not trust and current_job() is None:
            raise FeverError(
                f"{self.files} holds pickles, which can run any program when they are read; "
                "if you know who wrote them, add --trust (in Python: trust=True)"
            )

    def verify(self) -> None:
        """Raise `FeverError` for a file that is missing, has changed, or is not listed in the manifest."""
        for path in self.files.rglob("*"):
            if path.is_file() and str(path.relative_to(self.path)) not in self.manifest["sha256"]:
                raise FeverError(f"the checkpoint is damaged: {path} does not belong to it")
        for name, digest in self.manifest["sha256"].items():
            file = self.path / name
            if not file.is_file():
                raise FeverError(f"the checkpoint is damaged: {file} is missing")
            if sha256(file) != digest:
                raise FeverError(
                    f"the checkpoint is damaged: {file} has changed since it was written; choose another one with "
                    "--checkpoint"
                )

    def arrays(self, prefix: str = "") -> dict[str, np.ndarray]:
        """The arrays whose names begin with `prefix`, by the rest of their names. Verifies all files first."""
        from safetensors import SafetensorError, safe_open

        self.verify()
        try:
            with safe_open(self.path / layout.ARRAYS, framework="numpy") as file:
                names = [name for name in file.keys() if name.startswith(prefix)]  # noqa: SIM118 - not a dictionary
                return {name.removeprefix(prefix): file.get_tensor(name) for name in names}
        except SafetensorError as error:
            raise FeverError(f"the checkpoint is damaged: {self.path / layout.ARRAYS}: {error}") from error

    def policy(self) -> Any:
        """The policy: a `Policy`, or for another provider's algorithm an object with the same methods for acting."""
        if self.provider is not None:
            return self.provider.load_policy(self)
        return load_policy(self.manifest["policy"], self.arrays(WEIGHTS_PREFIX))


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
