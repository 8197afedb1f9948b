"""The trainer: starts learner and workers, then logs, saves and stops. The same for every algorithm."""

from __future__ import annotations

import logging
import math
import os
import threading
import time
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fever import last_resort, layout, signals
from fever.config import RunConfig
from fever.envs.source import EnvSource
from fever.envs.watchdog import WATCHDOG
from fever.errors import FeverError, TrainingError
from fever.plugins.user_code import as_exception
from fever.runs.checkpoint import Checkpoint
from fever.runs.facts import facts
from fever.runs.player import alike_sentence
from fever.runs.run import Run
from fever.sampling.ray_cluster import connect, is_elastic, leave_private_ray
from fever.sampling.ray_machines import try_everywhere
from fever.signals import Interrupts
from fever.training.callbacks import Callback, Callbacks, TensorBoard, TrainingInfo, check_callbacks
from fever.training.display import Display
from fever.training.emergency import Emergency, note_failure
from fever.training.env_arguments import EnvArguments, kept_changes
from fever.training.env_failures import EnvFailures
from fever.training.evaluation import METRICS, Best, Evaluation, check_own_loop
from fever.training.logs import log_to_file
from fever.training.named import make_callbacks, make_loggers
from fever.training.progress import Progress, phase_shares
from fever.training.ray_recovery import RayRecovery
from fever.training.replay_saving import ReplaySaving
from fever.training.result import Result, summarize
from fever.training.state import TrainingState
from fever.training.videos import make_videos
from fever.training.worker_table import WorkerFile

if TYPE_CHECKING:
    from fever.algos.base import Iteration
    from fever.sampling.pool import Pool

TIME_GRACE = 0.7  # seconds by which an iteration may exceed the limit of time before it is cut
CUT_SECONDS = 0.9  # for the main thread to react to that, before another one saves the run in its place


def train(
    config: RunConfig,
    source: EnvSource | None = None,
    display: Display | None = None,
    callbacks: Sequence[Callback] = (),
) -> Result:
    """Train from the beginning in a new run directory."""
    return Trainer(config, source, display, callbacks).run()


class Trainer:
    """One training, from the beginning or from a checkpoint to a stop rule. With a run, in its directory."""

    def __init__(
        self,
        config: RunConfig,
        source: EnvSource | None = None,
        display: Display | None = None,
        callbacks: Sequence[Callback] = (),
        run: Run | None = None,
        checkpoint: Checkpoint | None = None,
    ) -> None:
        self.created = time.perf_counter()
        self.display = display or Display()
        check_callbacks(callbacks)
        changes = kept_changes(config, run, checkpoint) if run is not None and checkpoint is not None else {}
        self.env = EnvArguments(source or EnvSource(config.env, config.env_kwargs), changes)
        self.resuming, self.checkpoint = run, checkpoint
        check_own_loop(config)
        from fever.training.setup import prepare

        named, loggers = make_callbacks(config), make_loggers(config)
        self.prepared = prepare(config, self.source, self.display.message, resumed=run is not None)
        if config.start_from is not None and checkpoint is None:  # a resumed run has its own weights
            from fever.training.start_from import take_weights

            self.prepared = take_weights(self.prepared, self.display.message)
        self.config, self.learner = self.prepared.config, self.prepared.learner
        seeing_all = *make_videos(self), *loggers, TensorBoard(), WorkerFile(self), self.display  # metrics of others
        self.listeners = (*named, *callbacks, *seeing_all)
        self.progress = Progress(self.config.stop)
        self.progress.evaluates = self.config.eval_every is not None
        self.env_failures = EnvFailures(self.config.max_env_failures, self.display.message)
        self.pool: Pool | None = None
        self.evaluation: Evaluation | None = None
        self.best = Best(self.config)
        self.state = TrainingState(self.prepared, self.env, self.progress, self.best)
        self.closing = False
        self.failure: Exception | None = None  # what has ended the loop
        self.logged = True  # whether the row of the last iteration is written
        self.all_saved = False  # whether nothing was learned since the last checkpoint and replay buffer were saved
        self.consistent = True  # whether the learner's state can be saved; not within an uninterruptible iteration
        self.saving = threading.Lock()  # held while a checkpoint is written
        self.reason = ""  # why the loop has ended
        self.saved = -math.inf  # when the last checkpoint was written: the first iteration is saved
        self.interrupts = Interrupts(self._say_that_it_waits, held=True)
        self.replay = ReplaySaving(self.interrupts, self.display.message)
        self.seconds = {"setup": 0.0, "first_batch": 0.0, "iterations": 0.0}
        self.seconds |= {"evaluation": 0.0, "videos": 0.0, "checkpoints": 0.0, "stop": 0.0}

    @property
    def source(self) -> EnvSource:
        """The environment with the arguments in force."""
        return self.env.source

    def _change_env(self, changes: dict[str, Any]) -> None:
        """What `TrainingInfo.set_env_kwargs` does."""
        if self.pool is None or self.closing:
            raise FeverError("the environment's arguments cannot be changed after the training has ended")
        if self.env.change(changes, self.pool, self.prepared.policy):
            self.info.env_kwargs = self.source.kwargs

    def _say_that_it_waits(self) -> None:
        """Called from the signal handler; writes to stderr itself, because the display may be drawing."""
        if (self.prepared.uninterruptible or self.closing) and not self.display.silent:
            iterating = f"{self.config.algo} finishes its iteration, then the run is saved"
            what = "the environments are being closed" if self.closing else iterating
            os.write(2, f"\nfever: {what}; press Ctrl-C again to stop at once\n".encode())

    def run(self) -> Result:
        """Train until a stop rule is met, a callback or a signal asks to stop, or something fails; leave a complete
        run directory."""
        signals.check()  # those that came while learner and environment were made
        with self.interrupts:
            run = self.resuming or Run.create(self.config, facts())
            run.disk.say = self.display.message
            self.info = TrainingInfo(self.config, run, env_kwargs=self.source.kwargs, change_env=self._change_env)
            self.callbacks = Callbacks(self.listeners, self.info)
            resort = last_resort.IN_FORCE
            if resort is not None:
                resort.end = emergency = Emergency(self, run)
                WATCHDOG.on_stuck = emergency.give_up
            try:
                summary = self._run(run)
            except BaseException:
                with suppress(Exception):  # the first error counts
                    self._stop_callbacks(run)
                raise
            self._stop_callbacks(run)
        run.disk.require_saved()
        return Result(run, summary)

    def _stop_callbacks(self, run: Run) -> None:
        """Tell the callbacks that the training is over; what they log goes to the run's log, if there is still one."""
        with log_to_file(run.path / layout.LOG, run.disk) if run.path.is_dir() else nullcontext():
            self.callbacks.stop()

    def _run(self, run: Run) -> dict[str, Any]:
        """Train and close everything; returns the summary, which is written."""
        try:
            try:
                reason = self.reason = self._train(run)
            except Exception as error:
                self.failure = error
                raise
            finally:
                if last_resort.IN_FORCE is not None:
                    last_resort.IN_FORCE.expect_end(None)
                self._close(run)
        except KeyboardInterrupt:
            reason = self.reason or self.interrupts.reason
        except Exception as error:
            for line in note_failure(self, run, error):
                self.display.message(line)
            raise
        if not run.saved and not run.disk.unsaved:
            ending = f"before anything was {'saved' if self.progress.iteration else 'learned'}; "
            if self.resuming:
                ending += f"{run.path} is as it was"
            else:
                run.discard()
                ending += "nothing is left behind"
            if reason == "time":
                raise TrainingError(f"the time limit was reached {ending}")
            raise KeyboardInterrupt(ending)
        return self.write_summary(run, reason)

    def _train(self, run: Run) -> str:
        """Start the workers and iterate; returns why it stopped, with the state saved."""
        run.lock()
        with log_to_file(run.path / layout.LOG, run.disk), WATCHDOG.telling(self.display.message):
            if self.checkpoint is not None:
                self.state.restore(run, self.checkpoint)
                self.saved = time.monotonic()
            elif run.saved:
                raise FeverError(f"{run.path} has got a checkpoint just now; resume it again")
            logging.info("training %s with %s", self.source.name, self.config.algo)
            with self.interrupts.allow():
                pool = self._start(run)
            if self.resuming:  # all checks have passed
                run.write_config(self.config)
            (run.path / layout.SUMMARY).unlink(missing_ok=True)
            self.info.metrics = self.progress.counters(self.learner.steps)
            try:
                self.callbacks.start()
                self.progress.begin = time.perf_counter()
                self.seconds["setup"] = self.progress.begin - self.created
                self._limit_time()
                return self._recovery(run).run(pool)
            except KeyboardInterrupt:
                raise
            except BaseException as error:
                logging.exception("training failed")
                raise as_exception(error)  # noqa: B904 - itself, or its cause is set; a network may call sys.exit()
            finally:
                self.progress.end = time.perf_counter()
                if self.progress.iteration and self.consistent:
                    run.disk.try_now()
                    self._save(run, with_replay=True)

    def _start(self, run: Run) -> Pool:
        """Start what gathers experience, with the replay buffer that a resumed or restarted run had saved."""
        from fever.training.setup import sampling_context

        count, workdir = self.config.workers, run.path.resolve() / layout.WORK
        assert isinstance(count, int)
        if self.config.eval_every is not None and self.evaluation is None:
            self.evaluation = Evaluation(self.config, self.env.first, self.prepared.policy, workdir / "evaluation")
        if count or self.prepared.on_ray:
            workers = f" and {count} worker{'s' if count > 1 else ''}" if count else ""
            self.display.message(f"starting Ray{workers}")
            if is_elastic():
                try_everywhere(connect(count or 1), self.prepared.source)
        place = sampling_context(self.config, self.source, workdir, self.progress.generation)
        try:
            pool = self.learner.start(place)
        except BaseException:
            leave_private_ray()
            raise
        try:
            self._fill(run, pool)
        except BaseException:
            pool.close()
            raise
        self.pool = pool  # only now: a pool that was not filled must never replace what is saved
        return pool

    def _fill(self, run: Run, pool: Pool) -> None:
        """Say what a new pool is, and give it the replay buffer that was saved."""
        if self.prepared.places is not None:
            pool.track_machines(self.prepared.places)
        if pool.description:
            self.display.message(pool.description)
        if pool.starts_alike() and not self.progress.generation:
            self.display.message(f"note: {alike_sentence(self.source.name, 1, 'the environments')}")
        if self.checkpoint is not None or self.progress.generation:
            self.replay.restore(run, pool)

    def _recovery(self, run: Run) -> RayRecovery:
        """Training that goes on after Ray has died."""
        return RayRecovery(
            train=lambda pool: self._loop(run, pool),
            save=lambda: self._save(run, with_replay=False) if self.consistent else None,
            restart=lambda: self._restart(run),
            iteration=lambda: self.progress.iteration,
            say=self.display.message,
        )

    def _restart(self, run: Run) -> Pool:
        """Close the pool of a Ray that died, and start Ray and another pool; its random streams are new ones."""
        from fever.replay.experience import Experience

        assert self.pool is not None
        restarts = self.pool.restarts
        with self.interrupts.allow():
            self.pool.close()
            self.progress.generation += 1
            pool = self._start(run)
        pool.restarts += restarts + pool.count
        if isinstance(pool, Experience):
            self.display.message(
                f"the replay buffer is the one saved last: {pool.added:,} transitions were added to it"
            )
        return pool

    def _close(self, run: Run) -> None:
        """Give the terminal back, close the environments, end the workers, close the files. An error while environments
        close is reported and does not change how the run has ended."""
        began = time.perf_counter()
        try:
            self.display.stop()
        except Exception:
            logging.exception("the display failed")  # which does not change how the run has ended, either
        try:
            with log_to_file(run.path / layout.LOG, run.disk):
                for opened in (self.pool, self.evaluation):
                    if opened is not None:
                        self._close_envs(opened)
        finally:
            run.close()
            self.seconds["stop"] = time.perf_counter() - began

    def _close_envs(self, opened: Pool | Evaluation) -> None:
        try:
            self.closing = self.interrupts.impatient = True
            try:
                opened.close()
            finally:
                self.interrupts.impatient = False
        except KeyboardInterrupt:
            self.display.message("not all environments were closed")
        except Exception as error:
            logging.exception("closing failed")
            self.display.message(f"not all environments were closed: {type(error).__name__}: {error}")

    def _loop(self, run: Run, pool: Pool) -> str:
        """Iterate until a stop rule is met or a callback asks to stop; returns the reason."""
        iterations = self.learner.train(pool)
        interrupts, uninterruptible = self.interrupts, self.prepared.uninterruptible
        reason = ""
        while not reason:
            interrupts.check()
            self.all_saved = False
            began = time.perf_counter()
            self.consistent, interrupts.impatient = not uninterruptible, uninterruptible
            iteration = next(iterations)
            self.consistent, interrupts.impatient = True, False
            wall = time.perf_counter() - began
            self.seconds["iterations" if self.seconds["first_batch"] else "first_batch"] += wall
            self._record(run, iteration, wall, pool)
            self.env_failures.check()
            reason = self.progress.stop_reason(self.learner.steps) or self.info.stop_requested
            better = self.best.is_beaten(self.score) or self.info.checkpoint_requested
            due = better or time.monotonic() - self.saved >= self.config.checkpoint_seconds
            if due and not reason and run.disk.ready():
                self._save(run, with_replay=self.replay.due)
                reason = self.info.stop_requested
        return reason

    def _limit_time(self) -> None:
        """Cut the iteration in which the stop rule by time is met; one that cannot be interrupted is waited for."""
        if self.config.stop.seconds is None or self.prepared.uninterruptible:
            return
        left = self.config.stop.seconds - self.progress.seconds + TIME_GRACE
        self.interrupts.limit_time(left)
        if last_resort.IN_FORCE is not None:
            last_resort.IN_FORCE.expect_end(left + CUT_SECONDS)

    def _record(self, run: Run, iteration: Iteration, wall: float, pool: Pool) -> None:
        """Count an iteration, call the callbacks, and write its row and those of its episodes."""
        episodes = self.progress.count(iteration, self.learner.steps)
        self.env_failures.add(iteration.reports)
        sampled = sum(report.steps for report in iteration.reports)
        self.info.metrics = {
            **self.progress.counters(self.learner.steps),
            "steps_per_second": round(sampled / wall, 1),
            **self.progress.statistics(),
            **phase_shares(iteration, wall, pool.count),
            "worker_restarts": pool.restarts,
            "env_failures": self.env_failures.total,
            **self.env.metrics(),
            **iteration.metrics,
            **self.progress.info_means(episodes),
        }
        self.logged = False
        for notice in pool.take_notices():
            self.display.message(notice)
        if episodes:
            run.log_episodes(episodes)
        try:
            interrupted = not self._evaluate(run)
            self.callbacks.episodes(episodes)
            if self.evaluation is not None and self.evaluation.row:
                self.callbacks.evaluation(self.evaluation.row)
            self.callbacks.iteration()
        finally:
            run.log(self.info.metrics)
            self.logged = True
        if interrupted:
            raise KeyboardInterrupt

    def _evaluate(self, run: Run) -> bool:
        """Evaluate the policy if it is time to, and add the metrics of that; False if a signal has interrupted it."""
        steps, progress, evaluation = self.learner.steps, self.progress, self.evaluation
        if evaluation is None:
            return True
        evaluation.row = {}
        if not evaluation.due(steps, progress.evaluation["steps"] if progress.evaluation else 0):
            return True
        began = time.perf_counter()
        try:
            with self.interrupts.allow():
                found = evaluation.run(self.learner.weights())
        except KeyboardInterrupt:
            return False
        finally:
            seconds = time.perf_counter() - began
            self.seconds["evaluation"] += seconds
            progress.evaluation_seconds += seconds
            self.env_failures.note(evaluation.take_failures())
        evaluation.row = {"iteration": progress.iteration, "steps": steps, **found}
        progress.evaluation = {"steps": steps, "return_mean": found["return_mean"]}
        self.info.metrics |= {metric: found[name] for metric, name in METRICS.items()}
        run.log_evaluation(evaluation.row)
        return True

    @property
    def score(self) -> float | None:
        """The score of a checkpoint that is saved now: the mean of its evaluation, or the score of training if the run
        is not evaluated."""
        return self.progress.score if self.evaluation is None else self.evaluation.score

    def _save(self, run: Run, with_replay: bool) -> bool:
        """Write a checkpoint, and with it the replay buffer. Returns whether the disk had room for the checkpoint."""
        began = time.perf_counter()
        with self.saving:
            path = self.write_checkpoint(run)
        if with_replay and path is not None:
            self.replay.save(run, self.pool)
        self.seconds["checkpoints"] += time.perf_counter() - began
        if path is None:
            return False
        self.saved = time.monotonic()
        self.all_saved = with_replay
        self.info.checkpoint_requested = False
        self.callbacks.checkpoint(path)
        return True

    def write_checkpoint(self, run: Run) -> Path | None:
        """Write the learner's state; the caller holds `saving`. Returns the checkpoint's folder, or None if the disk
        has no room for it.

        An iteration that a signal has cut is counted if the policy has learned in it since its evaluation: the
        evaluated policy's checkpoint is not replaced then, and its score is not that of another one.
        """
        if self.evaluation is not None and self.evaluation.drop_if_outdated(self.learner.weights()):
            self.progress.iteration += 1
        return self.state.write(run, self.score)

    def write_summary(self, run: Run, reason: str, **more: Any) -> dict[str, Any]:
        """Write how the run ended, and return it."""
        summary = summarize(run, self.config, self.source.name, self.progress, self.learner.steps, self.prepared.preset)
        summary |= {"env_failures": self.env_failures.total, "stop_reason": reason}
        other = time.perf_counter() - self.created - sum(self.seconds.values())  # rows, callbacks, cut iterations
        spent = {**self.seconds, "other": other}
        summary |= {"breakdown": {name: round(seconds, 3) for name, seconds in spent.items()}, **more}
        self.info.summary = summary
        run.write_summary(summary)
        return summary
