"""The Python interface: every function here is `fever.NAME`. docs/python.md has an example of each.

`run` is a path, a name below the folder `runs`, the word `last`, a `Run`, or what `train` returned. All functions raise
`fever.errors.FeverError` for wrong input; its message says what to do.
"""

from __future__ import annotations

import difflib
import inspect
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fever.algos.registry import config_of, find_provider
from fever.config import COMMON_NAMES, RunConfig, validate
from fever.envs.source import EnvSource
from fever.errors import FeverError
from fever.files import user_path
from fever.runs.evaluate import EVAL_SEED, source_of
from fever.runs.evaluate import evaluate as play
from fever.runs.run import Run, list_runs
from fever.runs.trust import names_to_train
from fever.text import clean

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from fever.policy import Policy
    from fever.rllib.play import RllibPolicy
    from fever.runs.checkpoint import Checkpoint
    from fever.runs.player import Scores
    from fever.training.callbacks import Callback
    from fever.training.result import Result
    from fever.tune.result import SearchResult

Env = str | Callable[..., Any]  # an id, "module:Name", a class or a factory function


def train(
    env: Env,
    algo: str = "ppo",
    *,
    env_kwargs: dict[str, Any] | None = None,
    workers: int | str | None = None,
    cpus_per_worker: int | None = None,
    envs: int | None = None,
    scale_batch: bool = False,
    preset: bool = True,
    seed: int = 0,
    stop: dict[str, Any] | None = None,
    runs: str | Path = "runs",
    name: str | None = None,
    device: str = "auto",
    start_from: str | Path | Run | Result | None = None,
    eval_every: int | str | None = None,
    eval_episodes: int = 10,
    eval_env_kwargs: dict[str, Any] | None = None,
    video_every: int | str | None = None,
    step_timeout: float | str | None = None,
    reset_timeout: float | str | None = None,
    max_env_failures: int = 100,
    progress: bool = False,
    callbacks: Sequence[Callback] = (),
    loggers: Sequence[str] = (),
    **settings: Any,
) -> Result:
    """Train an agent and return its run, policy and learning curves.

    `env` is a Gymnasium id, `"module:Name"`, a class or a factory function. `stop` has any of `reward`, `steps`, `time`
    (`"10m"`), `iterations` and `window`; without it, training ends at the environment's reward threshold or after a
    million steps. The defaults of `workers` and `envs` are 0 (sample in this process) and 8, or RLlib's for
    `rllib:NAME`; workers share the environments, and with `scale_batch` every one has so many, and learns from larger
    batches. With `cpus_per_worker`, every worker has so many cores of its own. `preset` takes the zoo's settings,
    `envs` and number of steps for this environment and algorithm, where the zoo has a row and you give none: see
    docs/zoo.md. `start_from` is a run, or
    `RUN:CHECKPOINT`, whose weights this one begins with. `eval_every` (`20_000`, `"20k"`) is the number of steps
    between evaluations, in environments of their own, whose arguments `eval_env_kwargs` changes; `video_every` is that
    between videos of the policy, in the run's folder `videos`. An environment that raises, or whose step or reset
    takes longer than `step_timeout` or `reset_timeout` (seconds, or `"1m"`), is made anew; `max_env_failures` in an
    hour are allowed. `progress` shows a live panel, also in a notebook. `callbacks` are called during training: see
    `fever.training.callbacks`. `loggers` are experiment trackers, `"wandb"` and `"mlflow"`. `settings` are the
    algorithm's, as listed by `fever config ALGO`.

    Ctrl-C, or a notebook's interrupt, saves and returns; `result.stop_reason` is `interrupted` then. Raises
    `fever.errors.FeverError` for wrong input, and leaves nothing on disk then; `fever.errors.TrainingError` if
    training fails.
    """
    from fever.training import trainer
    from fever.training.display import make_display

    source = EnvSource(env, env_kwargs or {})
    values = _values(source, algo, settings, seed, stop, runs, name, device, workers=workers, envs=envs)
    values |= {"cpus_per_worker": cpus_per_worker, "scale_batch": scale_batch, "preset": preset}
    values |= {"start_from": None if start_from is None else _where(start_from), "loggers": tuple(loggers)}
    values |= {"eval_every": eval_every, "eval_episodes": eval_episodes, "eval_env_kwargs": eval_env_kwargs or {}}
    values |= {"video_every": video_every}
    values |= {"step_timeout": step_timeout, "reset_timeout": reset_timeout, "max_env_failures": max_env_failures}
    config = validate(RunConfig, values, "the run")
    _check_names(train, config)
    return trainer.train(config, source, make_display("auto" if progress else "quiet"), callbacks)


def resume(
    run: str | Path | Run | Result,
    *,
    stop: dict[str, Any] | None = None,
    workers: int | str | None = None,
    step_timeout: float | str | None = None,
    reset_timeout: float | str | None = None,
    max_env_failures: int | None = None,
    checkpoint: str = "last",
    env: Env | None = None,
    env_kwargs: dict[str, Any] | None = None,
    callbacks: Sequence[Callback] = (),
    progress: bool = False,
    trust: bool = False,
    runs: str | Path = "runs",
) -> Result:
    """Continue a run from its checkpoint, which is `last`, `best` or the number of an iteration.

    Rules in `stop` replace the run's; an old rule that the run has met already is dropped if a new one is given.
    `workers` and the limits of environments (see `train`) are as before by default. `env` is needed if the environment
    was a lambda or a function inside another one, which no name leads to: pass it again. `env_kwargs` are the run's own
    by default. `trust` allows reading the pickles of an RLlib run, and importing what a run names that was not made on
    this account: both can run any program.

    Raises `FeverError` for wrong input, and if the run's stop rule is met; `TrainingError` if training fails.
    """
    from fever.launch.dispatch import open_to_resume
    from fever.training.display import make_display
    from fever.training.resume import resume, resumed_config

    found = open_to_resume(_where(run), str(runs))
    found.trusted = trust or _is_trusted(run)
    given = {"workers": workers, "step_timeout": step_timeout, "reset_timeout": reset_timeout}
    given["max_env_failures"] = max_env_failures
    changes = {name: value for name, value in given.items() if value is not None}
    config, dropped = resumed_config(found, stop or {}, changes, checkpoint, "fever.resume")
    if config.search is not None:
        raise FeverError(f"{found.path} is a search; continue it with: fever resume {found.path} --trust")
    found.require_trust(name for name in names_to_train(found.config) if env is None or name != found.config.env)
    source = source_of(found, env, env_kwargs)
    config = config.model_copy(update={"env": source.name, "env_kwargs": source.kwargs})
    display = make_display("auto" if progress else "quiet")
    if dropped:
        display.message(f"the stop rule that ended the run ({', '.join(dropped)}) is dropped")
    return resume(found, config, checkpoint, source, display, callbacks, trust)


def evaluate(
    run: str | Path | Run | Result,
    *,
    episodes: int = 20,
    seed: int = EVAL_SEED,
    checkpoint: str = "best",
    env: Env | None = None,
    env_kwargs: dict[str, Any] | None = None,
    stochastic: bool = False,
    max_steps: int | None = None,
    trust: bool = False,
    runs: str | Path = "runs",
) -> Scores:
    """Play episodes with a run's policy; returns their returns and lengths, and `summary()` of them.

    `env` is the run's own by default; pass it again if it was a lambda or a function inside another one. `env_kwargs`
    replace some of its arguments. Episodes are cut off after `max_steps` steps. With `stochastic`, actions are sampled
    instead of the most likely ones taken. `trust` allows importing what a run names that was not made on this account.
    Raises `FeverError` if there is no such run or checkpoint, or if the environment has other spaces than the policy
    was made for.
    """
    _require(episodes=(episodes, 1), seed=(seed, 0), max_steps=(1 if max_steps is None else max_steps, 1))
    found = _open(run, runs, trust)
    chosen = _choose(found, checkpoint)
    source = source_of(found, env, env_kwargs, chosen)
    return play(chosen, source, episodes, seed, not stochastic, max_steps)


def watch(
    run: str | Path | Run | Result,
    to: str | Path | None = None,
    *,
    episodes: int = 1,
    steps: int = 1000,
    seed: int = EVAL_SEED,
    checkpoint: str = "best",
    env: Env | None = None,
    env_kwargs: dict[str, Any] | None = None,
    stochastic: bool = False,
    trust: bool = False,
    runs: str | Path = "runs",
) -> tuple[Path, float]:
    """Film the first episodes that `evaluate` plays, each of at most `steps` steps; returns the file and their mean
    return.

    `to` ends in .mp4 or .gif; by default the file is in the run's folder `videos`. `env`, `env_kwargs`,
    `stochastic` and `trust` are as in `evaluate`. Raises `FeverError` if the environment cannot be drawn or the file
    not be written.
    """
    from fever.runs.film import film

    _require(episodes=(episodes, 1), steps=(steps, 1), seed=(seed, 0))
    found = _open(run, runs, trust)
    chosen = _choose(found, checkpoint)
    source = source_of(found, env, env_kwargs, chosen)
    path, rows = film(found, chosen, source, to, steps, seed, not stochastic, episodes)
    return path, sum(row["return"] for row in rows) / episodes


def tune(
    env: Env,
    space: Mapping[str, str | Sequence[Any]],
    algo: str = "ppo",
    *,
    trials: int = 20,
    method: str = "random",
    scheduler: str = "none",
    seeds: int = 1,
    parallel: int | None = None,
    env_kwargs: dict[str, Any] | None = None,
    workers: int | None = None,
    envs: int | None = None,
    preset: bool = True,
    seed: int = 0,
    stop: dict[str, Any] | None = None,
    runs: str | Path = "runs",
    name: str | None = None,
    device: str = "auto",
    progress: bool = False,
    **settings: Any,
) -> SearchResult:
    """Search for the best settings with many runs; returns the table of trials and the best configuration.

    `space` has for every setting that is searched its values: a list, or text such as `"loguniform(1e-5,1e-2)"`
    (docs/search.md). `method` is `random`, `grid` or `optuna`; `scheduler` is `none`, `asha` or `pbt`. Every trial is
    run with `seeds` seeds. `parallel` trials run at the same time, by default as many as there are cores for. The
    rest is as in `train`.

    Raises `FeverError` for wrong input, `TrainingError` if every trial fails.
    """
    from fever.tune import search
    from fever.tune.result import SearchResult
    from fever.tune.space import as_expression
    from fever.tune.table import make_table

    if not isinstance(space, Mapping):
        raise FeverError('space must be a mapping such as {"learning_rate": "loguniform(1e-5,1e-2)"}')
    source = EnvSource(env, env_kwargs or {})
    values = _values(source, algo, settings, seed, stop, runs, name, device, workers=workers, envs=envs)
    values["preset"] = preset
    values["search"] = {
        "space": {key: as_expression(value) for key, value in space.items()}, "trials": trials, "method": method,
        "scheduler": scheduler, "seeds": seeds, "parallel": parallel,
    }  # fmt: skip
    config = validate(RunConfig, values, "the search")
    _check_names(tune, config)
    summary = search(config, source, make_table("auto" if progress else "quiet"))
    return SearchResult(Run(Path(summary["run"])), summary)


def load(
    run: str | Path | Run | Result, checkpoint: str = "best", runs: str | Path = "runs", *, trust: bool = False
) -> Policy | RllibPolicy:
    """Load the policy of a run, for `load(run).act(observation)`. `checkpoint` is `best`, `last` or the number of an
    iteration. `trust` is as in `evaluate`. Raises `FeverError` if there is no such run or checkpoint."""
    return _choose(_open(run, runs, trust), checkpoint).policy()


def runs(folder: str | Path = "runs") -> list[Run]:
    """All runs in a folder, the oldest first; none if there is no such folder. A run has `path`, `status`, `config`,
    `summary`, `curves()` and `checkpoint()`."""
    return list_runs(user_path(folder))


def plot(
    runs: str | Path | Run | Result | Sequence[str | Path | Run | Result],
    to: str | Path | None = None,
    *,
    folder: str | Path = "runs",
) -> Figure:
    """Draw the learning curves of one run, or of several in one figure, which a notebook shows.

    With `to`, the figure is also written to that file (.png, .svg, .pdf). `folder` is where names of runs are looked
    up. Raises `FeverError` if a run has no metrics yet, or the file cannot be written.
    """
    from fever.runs.plot import draw, save

    several = runs if isinstance(runs, Sequence) and not isinstance(runs, str) else [runs]
    figure = draw([_open(one, folder) for one in several])
    if to is not None:
        save(figure, Path(to))
    return figure


def _require(**numbers: tuple[int, int]) -> None:
    """Raise `FeverError` for a number that is less than the least one allowed: `name=(number, least)`."""
    for name, (number, least) in numbers.items():
        if not isinstance(number, int) or number < least:
            raise FeverError(f"{name}={number!r} cannot be used: must be a whole number, {least} or more")


def _where(run: Any) -> str:
    """The path, name or word that leads to a run."""
    found = getattr(run, "run", run)  # a result has the run
    return str(found.path if isinstance(found, Run) else found)


def _open(run: Any, runs: str | Path, trust: bool = False) -> Run:
    """The run; one that is given as an object is trusted if that object is: this process has made it."""
    return Run.open(_where(run), runs, trust or _is_trusted(run))


def _is_trusted(run: Any) -> bool:
    """Whether a run that is given as an object, or as a result, is trusted."""
    found = getattr(run, "run", run)
    return isinstance(found, Run) and found.trusted


def _choose(run: Run, which: str) -> Checkpoint:
    """A checkpoint; warns if another one than the one meant is taken, because that is damaged."""
    chosen = run.checkpoint(which)
    if chosen.note:
        warnings.warn(clean(f"{chosen.note}; using {chosen.name}"), stacklevel=3)
    return chosen


def _values(
    source: EnvSource,
    algo: str,
    settings: dict[str, Any],
    seed: int,
    stop: dict[str, Any] | None,
    runs: str | Path,
    name: str | None,
    device: str,
    **optional: Any,
) -> dict[str, Any]:
    """Arguments as values of a `RunConfig`; those of `optional` that are None are left out."""
    values = {
        "env": source.name, "env_kwargs": source.kwargs, "algo": algo, "settings": settings, "seed": seed,
        "stop": stop or {}, "runs": str(runs), "name": name, "device": device,
    }  # fmt: skip
    return values | {key: value for key, value in optional.items() if value is not None}


def _check_names(function: Callable[..., Any], config: RunConfig) -> None:
    """Raise `FeverError` for a setting that is rather a misspelt argument of this function. Settings that are like
    others of the algorithm are refused later."""
    if not config.settings or find_provider(config.algo) is not None:
        return
    from fever.algos.device import prepare_jax

    prepare_jax(config.device)  # before the first import of JAX, which an algorithm's module brings
    known = config_of(config.algo).model_fields
    own = [name for name in inspect.signature(function).parameters if name != "settings"]
    for name in config.settings.keys() - known.keys():
        word = COMMON_NAMES.get(name, "").removeprefix("--")
        likely = [word] if word in own else difflib.get_close_matches(name, [*known, *own], n=1)
        if word.startswith("stop-"):
            likely = [f'stop={{"{word.removeprefix("stop-")}": ...}}']
        if likely and likely[0] not in known:
            raise FeverError(f"fever.{function.__name__} has no argument {name}; did you mean {likely[0]}?")
