"""fever: trains deep-reinforcement-learning agents with one command, on one machine or many."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from fever.policy import Policy
    from fever.rllib.play import RllibPolicy
    from fever.training.callbacks import Callback
    from fever.training.trainer import Result

__version__ = "0.1.0"
__all__ = ["__version__", "load", "train"]


def train(
    env: str | Callable[..., Any],
    algo: str = "ppo",
    *,
    env_kwargs: dict[str, Any] | None = None,
    workers: int | str | None = None,
    envs: int | None = None,
    seed: int = 0,
    stop: dict[str, Any] | None = None,
    runs: str | Path = "runs",
    name: str | None = None,
    device: str = "auto",
    start_from: str | Path | None = None,
    progress: bool = False,
    callbacks: Sequence[Callback] = (),
    **settings: Any,
) -> Result:
    """Train an agent and return its run, policy and learning curves.

    `env` is a Gymnasium id, `"module:Name"`, a class or a factory function. `stop` has any of `reward`, `steps`, `time`
    (`"10m"`), `iterations` and `window`; without it, training ends at the environment's reward threshold or after a
    million steps. The defaults of `workers` and `envs` are 0 (sample in this process) and 8, or RLlib's for
    `rllib:NAME`. `start_from` is a run, or `RUN:CHECKPOINT`, whose weights this one begins with. `callbacks` are called
    during training: see `fever.training.callbacks`. `settings` are the algorithm's, as listed by `fever config ALGO`.

    Raises `fever.errors.FeverError` for wrong input, and leaves nothing on disk then; `fever.errors.TrainingError` if
    training fails.
    """
    from fever.config import RunConfig, validate
    from fever.envs.source import EnvSource
    from fever.training import trainer
    from fever.training.display import make_display

    source = EnvSource(env, env_kwargs or {})
    values = {
        "env": source.name, "env_kwargs": source.kwargs, "algo": algo, "settings": settings, "seed": seed,
        "stop": stop or {}, "runs": str(runs), "name": name, "device": device,
        "start_from": None if start_from is None else str(start_from),
    }  # fmt: skip
    values |= {key: value for key, value in {"workers": workers, "envs": envs}.items() if value is not None}
    config = validate(RunConfig, values, "the run")
    return trainer.train(config, source, make_display("auto" if progress else "quiet"), callbacks)


def load(run: str | Path, checkpoint: str = "best", runs: str | Path = "runs") -> Policy | RllibPolicy:
    """Load the policy of a run, for `load(run).act(observation)`. `checkpoint` is `best`, `last` or the number of an
    iteration. Raises `fever.errors.FeverError` if there is no such run or checkpoint."""
    from fever.runs.run import Run

    return Run.open(run, runs).checkpoint(checkpoint).policy()
