"""`--from RUN[:CHECKPOINT]`: a run that begins with the weights of another one, and with nothing else of it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from fever.algos.base import TakesWeights
from fever.algos.registry import find_provider
from fever.config import RunConfig
from fever.errors import FeverError
from fever.job import START, JobFolder, current_job
from fever.runs.checkpoint import WEIGHTS_PREFIX, Checkpoint, read_checkpoint
from fever.runs.run import Run
from fever.training.setup import Prepared
from fever.zoo.preset import blames, find_preset

HEADS = (  # what algorithms choose themselves
    "outputs", "log_std", "value_head", "action_values", "dueling", "squashed", "quantiles",
)  # fmt: skip
MEANING = {"policy": ("action_values", "squashed", "quantiles"), "value": ("dueling", "quantiles")}  # of outputs
NORMALISED = "observation/mean"  # among the weights of a policy that normalises observations


def resolve(config: RunConfig) -> RunConfig:
    """The configuration with the absolute path and the number of the checkpoint to begin with, so that it means the
    same in other folders, and later. Raises FeverError if there is none, or if it cannot be used."""
    text = str(config.start_from)
    if find_provider(config.algo) is not None:
        raise FeverError(f"--from {text}: {config.algo} cannot begin with the weights of another run")
    if _sent() is not None:
        return config
    name, colon, which = text.rpartition(":")
    try:
        run, which = Run.open(text, config.runs), "last"
    except FeverError:
        if not colon:
            raise
        run = Run.open(name, config.runs)
    checkpoint = run.checkpoint(which)
    if checkpoint.provider is not None:
        raise FeverError(
            f"--from {text}: the weights of {checkpoint.manifest['algo']} fit only the network of its library"
        )
    return config.model_copy(update={"start_from": f"{run.path.resolve()}:{checkpoint.iteration}"})


def _find(config: RunConfig) -> Checkpoint:
    """The checkpoint that a resolved configuration names; in a job on a cluster, the copy that was sent along."""
    sent = _sent()
    if sent is not None:
        return read_checkpoint(sent)
    path, _, which = str(config.start_from).rpartition(":")
    return Run(Path(path)).checkpoint(which)


def _sent() -> Path | None:
    """The checkpoint that was sent with this job, if it was."""
    job = current_job()
    return job.path / START if job is not None and (job.path / START).is_dir() else None


def pack_start(config: RunConfig, folder: JobFolder) -> None:
    """Put a copy of the checkpoint to begin with into a job's folder, which is sent to another machine."""
    shutil.rmtree(folder.path / START, ignore_errors=True)
    shutil.copytree(_find(config).path, folder.path / START, symlinks=True)  # a checkpoint has none of its own


def take_weights(prepared: Prepared, say: Callable[[str], None]) -> Prepared:
    """Give a learner the weights that its configuration says it begins with, and say which ones they were.

    Raises FeverError if spaces or networks differ. Returns `prepared` with the resolved configuration.
    """
    config = resolve(prepared.config)
    checkpoint, learner = _find(config), prepared.learner
    policy, here = checkpoint.field("policy", dict), json.loads(json.dumps(prepared.policy))
    network = checkpoint.field("network", dict, within=policy)
    checkpoint.check_spaces(here["observation"], here["action"], config.env)
    if not isinstance(learner, TakesWeights):
        raise FeverError(
            f"--from {config.start_from}: {config.algo} has no method take_weights; see docs/algorithms.md"
        )
    same = checkpoint.field("algo", str) == config.algo
    arrays = checkpoint.arrays()
    weights = {k.removeprefix(WEIGHTS_PREFIX): arrays.pop(k) for k in [*arrays] if k.startswith(WEIGHTS_PREFIX)}
    with blames(find_preset(config, prepared.source.name, prepared.source.kwargs), config):
        _check_network(network, here["network"], ("log_std",) if same else HEADS, config)
        _check_normalisation(NORMALISED in weights, NORMALISED in learner.weights(), config)
    weights = _with_same_meaning(weights, network, here["network"])
    names = learner.take_weights(weights, arrays)
    taken, left = (list(dict.fromkeys(name.partition("/")[0] for name in some)) for some in names)
    if not taken or (same and left):
        what = ", ".join(left)
        raise FeverError(f"--from {config.start_from}: {what} have other names or sizes there than in this run")
    rest = f"; drawn anew: {', '.join(left)}" if left else ""
    say(f"weights of {config.start_from}: {', '.join(taken)}{rest}")
    return replace(prepared, config=config)


def _with_same_meaning(weights: dict[str, Any], there: dict[str, Any], here: dict[str, Any]) -> dict[str, Any]:
    """The weights without last layers whose outputs mean something else here: action values are no logits."""
    other = [head for head, fields in MEANING.items() if any(there.get(one) != here.get(one) for one in fields)]
    return {name: value for name, value in weights.items() if name.partition("/")[0] not in other}


def _check_network(there: dict[str, Any], here: dict[str, Any], free: tuple[str, ...], config: RunConfig) -> None:
    """Raise FeverError if two networks differ in something that is not `free`."""
    for name in dict.fromkeys([*there, *here]):
        old, new = there.get(name), here.get(name)
        if name not in free and old != new:
            raise FeverError(
                f"--from {config.start_from}: its network has {name}={json.dumps(old)} and this run's "
                f"{json.dumps(new)}; the networks must be the same"
            )


def _check_normalisation(there: bool, here: bool, config: RunConfig) -> None:
    if there != here:
        one, other = ("normalises observations", "does not") if there else ("does not normalise observations", "does")
        raise FeverError(
            f"--from {config.start_from}: its policy {one} and this run's {other}; set normalize_observations alike"
        )
