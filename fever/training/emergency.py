"""Saves a run and ends the process in the place of a main thread that is stuck, or was interrupted twice.

Between two updates the learner does not change, so another thread can save it while the main thread waits for an
environment, for Ray, or for JAX.
"""

from __future__ import annotations

import logging
import math
import os
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from fever import last_resort, layout
from fever.errors import FeverError, TrainingError
from fever.plugins.user_code import sentence_of
from fever.runs.run import trust_word
from fever.sampling.ray_cluster import kill_private_ray
from fever.text import clean
from fever.training.display import closing_lines
from fever.training.result import EXIT_CODES

if TYPE_CHECKING:
    from fever.runs.run import Run
    from fever.training.trainer import Trainer

SAVE_SECONDS = 60.0  # for the main thread to end what it is saving
AT_ONCE_SECONDS = 2.0  # the same, if the user has asked twice: a disk may hang
REPLAY_SECONDS = 20.0  # to save the replay buffer
CALLBACK_SECONDS = 10.0  # that a callback may take when only the time is over
LAST_SECONDS = 1.5  # for callbacks to stop and output to be written, once everything is saved: Ctrl-C has ten in all,
KILL_SECONDS = 1.0  # and for a private Ray to be killed
ATTEMPTS = 3  # to save a state that did not change meanwhile


class Emergency:
    """What `LastResort` calls while a run is trained."""

    def __init__(self, trainer: Trainer, run: Run) -> None:
        self.trainer, self.run = trainer, run
        self.due = math.inf  # of time.monotonic(), when the process must end, once everything is saved

    def __call__(self, at_once: bool) -> None:
        """Save, say how the run ended, and end the process; returns if the main thread is saving already, or if what it
        does must not be cut and the user has not asked twice."""
        if self._waits() and not at_once:
            return
        if self.trainer.saving.acquire(timeout=AT_ONCE_SECONDS if at_once else 0):
            self._exit(*self._leave(at_once))
        elif at_once:
            self._exit(["fever: ended while the run was being saved; the checkpoint before that is kept"], 130)

    def _waits(self) -> bool:
        """Whether the main thread is doing what must not be cut."""
        trainer, callbacks = self.trainer, self.trainer.callbacks
        heard = last_resort.IN_FORCE is not None and last_resort.IN_FORCE.heard  # else it is only that the time is over
        since = callbacks.busy_since
        calls = not heard and since is not None and time.monotonic() - since < CALLBACK_SECONDS
        return calls or trainer.replay.busy or (trainer.prepared.uninterruptible and not trainer.closing)

    def _exit(self, lines: list[str], code: int, summary: dict[str, Any] | None = None) -> None:
        """Say these lines, report a summary, end a private Ray, and end the process."""
        report = last_resort.IN_FORCE.report if last_resort.IN_FORCE is not None else None
        below = ["", *lines] if os.isatty(2) else lines  # the live panel may be there
        tasks: list[Callable[[], object]] = [
            lambda: os.write(2, "".join(f"{clean(line)}\n" for line in below).encode())
        ]
        if summary is not None and report is not None:
            tasks.append(partial(report, summary))
        for thread in [_begin(task) for task in tasks]:  # each may block: a terminal that is stopped, a full pipe
            self._await(thread)
        _begin(kill_private_ray).join(KILL_SECONDS)  # at last: the main thread may be starting one
        os._exit(code)

    def _await(self, thread: threading.Thread) -> None:
        """Wait for one of the last things, which share LAST_SECONDS: any of them may block."""
        self.due = min(self.due, time.monotonic() + LAST_SECONDS)
        thread.join(max(0.0, self.due - time.monotonic()))

    def give_up(self, text: str) -> None:
        """Save and end the process because an environment is stuck in a call that nothing can interrupt."""
        trainer, run = self.trainer, self.run
        if not trainer.saving.acquire(timeout=SAVE_SECONDS):
            return
        if trainer.closing:  # the training itself is over, and how it has ended is known
            self._exit(*self._leave(at_once=True))
        lines = [f"fever: {text}"]
        try:
            self._save(at_once=False)
            if run.saved:
                trainer.write_summary(run, "failed", error=text)
                lines.append(f"what it has learned is saved; resume with: fever resume {run.path}")
            else:
                lines.append(self._discard())
        except Exception as error:
            logging.exception("saving failed")
            lines.append(f"the run could not be saved: {error}")
        self._exit(lines, 1)

    def _save(self, at_once: bool) -> None:
        """Write a checkpoint if something was learned; then, unless it has to end at once, the replay buffer as far as
        the time allows: the set that was saved before stays if it is cut."""
        trainer = self.trainer
        begun = trainer.progress.begin is not None and trainer.progress.iteration
        if not begun or not trainer.consistent or trainer.closing or trainer.all_saved:
            return
        written = self._write_whole()
        self._log_last_row()
        if written and not at_once:
            _begin(partial(trainer.replay.write, self.run, trainer.pool)).join(REPLAY_SECONDS)

    def _log_last_row(self) -> None:
        """Write the row of the iteration that was saved. The main thread may have begun to count it only just now."""
        trainer, row = self.trainer, self.trainer.info.metrics
        if row["iteration"] != trainer.progress.iteration:
            row = trainer.progress.counters(trainer.learner.steps)
        elif trainer.logged:
            return
        self.run.log(row)

    def _write_whole(self) -> bool:
        """Write a checkpoint; again if the main thread finished an update meanwhile, half of which may be in it.
        Returns whether the disk had room."""
        learner, path = self.trainer.learner, None
        for _ in range(ATTEMPTS):
            before = self.trainer.progress.iteration, learner.steps, learner.state().facts
            path = self.trainer.write_checkpoint(self.run)
            if before == (self.trainer.progress.iteration, learner.steps, learner.state().facts):
                break
        return path is not None

    def _discard(self) -> str:
        """Remove the directory of a run that has saved nothing, if nothing in it is of use; says what became of it."""
        if self.trainer.resuming is not None:
            return f"{self.run.path} is as it was"
        if self.run.disk.unsaved:
            return f"nothing could be saved; what it wrote is in {self.run.path}"
        self.run.discard()
        return "nothing is left behind"

    def _leave(self, at_once: bool) -> tuple[list[str], int, dict[str, Any] | None]:
        """Leave a complete run directory; returns what to say, the exit code, and the summary if there is one."""
        trainer, run = self.trainer, self.run
        if trainer.failure is not None:
            return self._leave_failed(trainer.failure)
        reason = trainer.reason or trainer.interrupts.reason
        cut = "the environments were not closed" if trainer.closing else "an iteration was cut"
        cut = cut if trainer.callbacks.busy_since is None else "a callback was cut"
        try:
            self._save(at_once)
            if not run.saved:
                why = "the time limit was reached" if reason == "time" else "interrupted"
                what = "saved" if trainer.progress.iteration else "learned"
                return [f"fever: {why} before anything was {what}; {self._discard()}"], EXIT_CODES.get(reason, 1), None
            if trainer.progress.begin is None:  # of a run that was being resumed
                return [f"fever: interrupted before anything was learned; {run.path} is as it was"], 130, None
            summary = trainer.write_summary(run, reason)
            if not at_once:
                self._await(_begin(lambda: trainer.callbacks.stop(leave_out=trainer.display)))
            run.close()  # rows may wait for a disk that was full
            run.disk.require_saved()
        except TrainingError as error:
            return [f"fever: {error}"], 1, None
        except Exception as error:
            logging.exception("saving failed")
            return [f"fever: the run could not be saved at its end: {error}"], 1, None
        return [f"fever: {cut}", *closing_lines(summary)], EXIT_CODES.get(reason, 0), summary

    def _leave_failed(self, error: Exception) -> tuple[list[str], int, None]:
        """As `_leave`, for a run that has failed and whose environments do not close."""
        lines = [f"fever: {sentence_of(error) if not isinstance(error, TrainingError) else error}"]
        try:
            lines += note_failure(self.trainer, self.run, error)
        except Exception as other:
            logging.exception("saving failed")
            lines.append(f"fever: how it ended could not be saved: {other}")
        return lines, 2 if isinstance(error, FeverError) else 1, None


def note_failure(trainer: Trainer, run: Run, error: Exception) -> list[str]:
    """Remove the directory of a run that has failed if nothing was learned; otherwise record the failure. Returns what
    a person needs to know: what was kept, and how to continue."""
    work = run.path / layout.WORK
    if trainer.resuming is None and trainer.progress.iteration == 0:
        if any(path.is_file() for path in work.rglob("*")):  # logs of a simulator, perhaps: why it failed
            return [f"what the environments wrote is kept: {work}"]
        run.discard()
    elif trainer.progress.begin is not None:
        trainer.write_summary(run, "failed", error=str(error))
        kept = f"the last good checkpoint is kept; resume with: fever resume {run.path}{trust_word(trainer.config)}"
        return [kept if run.checkpoints() else f"nothing was saved; what it wrote is in {run.path}"]
    return []


def _begin(task: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=task, daemon=True)
    thread.start()
    return thread
