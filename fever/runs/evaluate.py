"""Play episodes with a trained policy, to score it."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from fever.envs.recovery import FailureRules
from fever.envs.source import EnvContext, EnvSource
from fever.plugins.user_code import user_code
from fever.runs.checkpoint import Checkpoint
from fever.runs.player import Player, Scores, episode_seeds
from fever.runs.run import Run
from fever.runs.trust import names_in

CHEAP_SECONDS = 5.0  # that greedy episodes take at most for sampled ones to be played as well
EVAL_SEED = 1_000_000  # of the episodes; training evaluates with other ones


def source_of(
    run: Run,
    env: str | Callable[..., Any] | None = None,
    env_kwargs: dict[str, Any] | None = None,
    checkpoint: Checkpoint | None = None,
) -> EnvSource:
    """The environment that a run was trained on, or another one.

    The run's own has the arguments in force when the checkpoint was written, or those that the run began with, and
    `env_kwargs` replace some of them; so has a class or factory, which may be the run's own again: a lambda cannot be
    found by its name. Another environment, by name, has `env_kwargs` alone.

    Raises `FeverError` if playing would import what the run names and the user does not trust it.
    """
    config = run.config
    names = [config.env] if env is None and ":" in config.env else []
    if checkpoint is not None:
        library = [name for name in names_in(config) if name != config.env] if checkpoint.provider is not None else []
        names += [*checkpoint.names, *library]
    run.require_trust(names)
    given = EnvSource(config.env if env is None else env, env_kwargs or {})
    if isinstance(given.target, str) and given.name != config.env:
        return given
    changed = checkpoint.env_changes if checkpoint is not None else {}
    source = EnvSource(given.target, {**config.env_kwargs, **changed, **given.kwargs})
    if config.env.startswith("__main__:") and env is None:  # workers have another main module: send the object
        factory, _ = source.resolve()
        assert factory is not None
        return EnvSource(factory, source.kwargs)
    return source


def evaluate(
    checkpoint: Checkpoint,
    source: EnvSource,
    episodes: int = 20,
    seed: int = EVAL_SEED,
    deterministic: bool = True,
    max_steps: int | None = None,
    tell: Callable[[int], None] = lambda done: None,
) -> Scores:
    """Play episodes with frozen normalisation, each with a seed of its own; they are cut off after `max_steps` steps.

    `source` may be the factory that the run was trained with, or another environment with the same spaces. `tell` is
    called with the number of episodes that have ended.
    """
    if checkpoint.provider is not None:
        return checkpoint.provider.play(checkpoint, source, episode_seeds(seed, episodes), deterministic, max_steps)
    policy = checkpoint.policy()
    policy.rng = np.random.default_rng(seed)
    with tempfile.TemporaryDirectory(prefix="fever-") as folder, user_code(f"{source.name} cannot be played"):
        context = EnvContext(workdir=Path(folder), failure_rules=FailureRules(rebuild=True))
        player = Player(source, episodes, seed, context, max_steps, anew=True)
        try:
            return player.play(
                policy,
                deterministic,
                lambda envs: checkpoint.check_spaces(envs.observation, envs.action, source.name),
                tell,
            )
        finally:
            if failures := player.take_failures():
                again = "1 episode was" if len(failures) == 1 else f"{len(failures)} episodes were"
                logging.warning("%s played again: %s", again, failures[-1].sentence)
            player.close()


def compare_sampled(
    checkpoint: Checkpoint,
    source: EnvSource,
    greedy: Scores,
    seed: int = EVAL_SEED,
    max_steps: int | None = None,
    wanted: bool | None = None,
) -> Scores | None:
    """Play half of the episodes (at least 5) again with sampled actions; None if the policy does not sample.

    Unless it is `wanted` or not, that is done only if the greedy episodes took few seconds.
    """
    if wanted is False or (wanted is None and (checkpoint.provider is not None or greedy.seconds > CHEAP_SECONDS)):
        return None
    network = checkpoint.policy().network if checkpoint.provider is None else None
    if network is not None and (network.action_values or network.squashed == "deterministic"):
        return None
    count = len(greedy.returns)
    return evaluate(checkpoint, source, min(count, max(5, count // 2)), seed, False, max_steps)
