"""Callbacks: your own code at fixed moments of a training.

    from fever.training.callbacks import Callback, TrainingInfo

    class StopOnPlateau(Callback):
        def on_start(self, info: TrainingInfo) -> None:
            self.best, self.best_at = float("-inf"), 0

        def on_iteration(self, info: TrainingInfo) -> dict[str, float]:
            value = info.metrics.get("return_mean", float("-inf"))
            if value > self.best:
                self.best, self.best_at = value, info.iteration
            if info.iteration - self.best_at >= 50:
                info.request_stop("plateau")
            return {"plateau/best": self.best}  # one more metric

    fever.train("CartPole-v1", callbacks=[StopOnPlateau()])

| method | when it is called |
|---|---|
| `on_start(info)` | once, when the workers have started and before the first iteration |
| `on_episode(info, episode)` | for every episode that ended in an iteration, before `on_iteration` |
| `on_evaluation(info, row)` | after an evaluation, before `on_iteration`; `row` is that of `evaluations.jsonl` |
| `on_iteration(info)` | after every iteration, before its row is written; returns further metrics, or None |
| `on_checkpoint(info, path)` | when a checkpoint has been written; `path` is its folder |
| `on_stop(info)` | once if `on_start` was called, however the training ended; the environments are closed by then |

A run has any number of callbacks. They are called in the order given, in the process of the learner, which waits for
them; nothing is called per environment step. `episode` is the row that `episodes.jsonl` gets.

Metrics that `on_iteration` returns are added to `info.metrics`, where the next callbacks find them, and are written to
`metrics.jsonl` and TensorBoard. A name that the row has already is refused; your own prefix ("plateau/") avoids that.

A callback that raises an exception ends the run: it is saved, and the error names the callback. Ctrl-C waits until a
callback has returned. To act or evaluate with the current policy, use `info.run.checkpoint().policy()` in
`on_checkpoint`; `info.request_checkpoint()` asks for one. `info.set_env_kwargs(size=9)` makes the environment harder.
docs/callbacks.md has more examples.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fever.errors import FeverError, TrainingError
from fever.plugins.user_code import message_of
from fever.runs.events import EventWriter, settings_of
from fever.runs.groups import experiment_of
from fever.runs.rows import stride

if TYPE_CHECKING:
    from fever.config import RunConfig
    from fever.runs.run import Run

ALL_EVENTS = 20_000  # first iterations that TensorBoard gets all of
HOOKS = ("on_start", "on_episode", "on_evaluation", "on_iteration", "on_checkpoint", "on_stop")


@dataclass
class TrainingInfo:
    """What a callback may read, and ask for. Only the trainer changes the fields."""

    config: RunConfig  # complete: every setting, the number of workers, the stop rules
    run: Run  # the run directory
    metrics: dict[str, Any] = field(default_factory=dict)  # the latest row; counters alone before the first iteration
    summary: dict[str, Any] | None = None  # in `on_stop`: the content of summary.json; None if there is none
    stop_requested: str = ""  # the reason given to `request_stop`
    checkpoint_requested: bool = False
    env_kwargs: dict[str, Any] = field(default_factory=dict)  # the environment's arguments in force
    change_env: Callable[[dict[str, Any]], None] | None = None  # the trainer's; `set_env_kwargs` calls it

    @property
    def iteration(self) -> int:
        """Training iterations so far."""
        return self.metrics["iteration"]

    @property
    def steps(self) -> int:
        """Environment steps so far, of all workers."""
        return self.metrics["steps"]

    def request_stop(self, reason: str = "callback") -> None:
        """Stop the run, saved, when this iteration is over. The reason, one word, becomes the run's `stop_reason`
        unless a stop rule is met at the same time."""
        self.stop_requested = reason

    def request_checkpoint(self) -> None:
        """Write a checkpoint when this iteration is over."""
        self.checkpoint_requested = True

    def set_env_kwargs(self, **changes: Any) -> None:
        """Change arguments of the environment's constructor. Each environment, on whatever machine, is made anew with
        them when its episode ends; the spaces must stay the same. Raises FeverError if it cannot be made with them, or
        is natively vectorised. Arguments that have these values already change nothing."""
        assert self.change_env is not None
        self.change_env(changes)


class Callback:
    """Base class of callbacks; override what you need."""

    def on_start(self, info: TrainingInfo) -> None: ...
    def on_episode(self, info: TrainingInfo, episode: dict[str, Any]) -> None: ...
    def on_evaluation(self, info: TrainingInfo, row: dict[str, Any]) -> None: ...
    def on_iteration(self, info: TrainingInfo) -> dict[str, float] | None: ...
    def on_checkpoint(self, info: TrainingInfo, path: Path) -> None: ...
    def on_stop(self, info: TrainingInfo) -> None: ...


def check_callbacks(callbacks: Any) -> None:
    """Raise FeverError if these are not objects of Callback."""
    if not isinstance(callbacks, Sequence) or isinstance(callbacks, str):
        raise FeverError(f"callbacks={callbacks!r} cannot be used: give a list of callbacks")
    for one in callbacks:
        if not isinstance(one, Callback):
            hint = "; call it to make one" if isinstance(one, type) and issubclass(one, Callback) else ""
            raise FeverError(f"callbacks: {one!r} is no object of fever.training.callbacks.Callback{hint}")


class Callbacks:
    """Calls the callbacks of one training, skipping methods that they do not override."""

    def __init__(self, callbacks: Sequence[Callback], info: TrainingInfo) -> None:
        self.info = info
        self.started = False
        self.busy_since: float | None = None  # of time.monotonic(), while one is being called
        self.overriding = {
            hook: [one for one in callbacks if getattr(type(one), hook) is not getattr(Callback, hook)]
            for hook in HOOKS
        }

    def start(self) -> None:
        self.started = True
        self._call("on_start")

    def episodes(self, rows: list[dict[str, Any]]) -> None:
        for callback in self.overriding["on_episode"]:
            for row in rows:
                self._named(callback, "on_episode", row)

    def evaluation(self, row: dict[str, Any]) -> None:
        self._call("on_evaluation", row)

    def iteration(self) -> None:
        """Call `on_iteration` and add the metrics that it returns."""
        for callback in self.overriding["on_iteration"]:
            for name, value in (self._named(callback, "on_iteration") or {}).items():
                if name in self.info.metrics:
                    raise TrainingError(f"{_name(callback)} returned the metric {name}, which the row has already")
                try:
                    self.info.metrics[name] = float(value)
                except (TypeError, ValueError):
                    what = f"returned {name}={value!r} as a metric, which is not a number"
                    raise TrainingError(f"{_name(callback)} {what}") from None

    def checkpoint(self, path: Path) -> None:
        self._call("on_checkpoint", path)

    def stop(self, leave_out: Callback | None = None) -> None:
        """Call `on_stop` of all once, also if one of them fails; the first error is raised."""
        if self.started:
            self.started = False
            self.overriding["on_stop"] = [one for one in self.overriding["on_stop"] if one is not leave_out]
            self._call("on_stop")

    def _call(self, hook: str, *more: Any) -> None:
        errors = []
        for callback in self.overriding[hook]:
            try:
                self._named(callback, hook, *more)
            except Exception as error:  # noqa: BLE001 - raised below
                errors.append(error)
        if errors:
            raise errors[0]

    def _named(self, callback: Callback, hook: str, *arguments: Any) -> Any:
        """Call one method; the error of a callback that is not fever's own names it."""
        self.busy_since = time.monotonic()
        try:
            return getattr(callback, hook)(self.info, *arguments)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # sys.exit(), for example
            if type(callback).__module__.startswith("fever."):
                raise
            what = str(error) if isinstance(error, FeverError) else f"{type(error).__name__}: {message_of(error)}"
            raise TrainingError(f"{_name(callback)} failed in {hook}: {what}") from error
        finally:
            self.busy_since = None


def _name(callback: Callback) -> str:
    return f"the callback {type(callback).__module__}:{type(callback).__qualname__}"


class TensorBoard(Callback):
    """Writes the run's settings and rows of metrics as TensorBoard's events; lists such as `epsilons` are left out.

    The first 20,000 iterations are all written, of the next 20,000 every second, of the next 40,000 every fourth, and
    so on; besides, those with an evaluation, and the last one.
    """

    writer: EventWriter | None = None  # opened with the first row
    left_out = False  # whether the last row was

    def on_iteration(self, info: TrainingInfo) -> None:
        evaluated = "eval/return_mean" in info.metrics
        self.left_out = not evaluated and info.iteration % stride(info.iteration, ALL_EVENTS) != 0
        if not self.left_out:
            self._write(info)

    def _write(self, info: TrainingInfo) -> None:
        row = info.metrics
        scalars = {name: value for name, value in row.items() if isinstance(value, (int, float)) and name != "steps"}
        if self.writer is None:
            self.writer = EventWriter(info.run.path, info.run.disk)
            self.writer.begin(settings_of(info.config), experiment_of(info.config))
        self.writer.write(info.steps, scalars)

    def on_stop(self, info: TrainingInfo) -> None:
        if self.left_out:
            self._write(info)
        if self.writer is not None:
            self.writer.end(info.summary is not None and info.summary["stop_reason"] != "failed")
            self.writer.close()
