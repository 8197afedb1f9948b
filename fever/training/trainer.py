"""The trainer: starts learner and workers, then logs, saves and stops. The same for every algorithm."""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from typing import TYPE_CHECKING, Any

import numpy as np

from fever import layout
from fever.config import RunConfig
from fever.envs.source import EnvSource
from fever.errors import FeverError
from fever.runs.checkpoint import WEIGHTS_PREFIX, same_network
from fever.runs.facts import facts
from fever.runs.player import alike_sentence
from fever.runs.run import Run, trust_word
from fever.sampling.ray_cluster import connect, is_elastic, try_everywhere
from fever.signals import Interrupts
from fever.training.callbacks import Callback, Callbacks, TensorBoard, TrainingInfo, check_callbacks
from fever.training.display import Display
from fever.training.env_arguments import EnvArguments, kept_changes
from fever.training.evaluation import METRICS, Best, Evaluation, check_can_evaluate
from fever.training.logs import log_to_file
from fever.training.named import make_callbacks, make_loggers
from fever.training.progress import Progress, phase_shares
from fever.training.result import Result

if TYPE_CHECKING:
    from fever.algos.base import Iteration
    from fever.sampling.pool import Pool

REPLAY_SHARE = 0.05  # of the time may go into saving the replay buffer


def train(
    config: RunConfig,
    source: EnvSource | None = None,
    display: Display | None = None,
    callbacks: Sequence[Callback] = (),
) -> Result:
    """Train from the beginning in a new run directory."""
    return Trainer(config, source, display, callbacks).run()


def resume(
    run: Run,
    config: RunConfig,
    which: str = "last",
    source: EnvSource | None = None,
    display: Display | None = None,
    callbacks: Sequence[Callback] = (),
    trust: bool = False,
) -> Result:
    """Continue a run from a checkpoint with its configuration, whose stop rules may have changed. A checkpoint that
    holds pickles is read only if `trust` is set."""
    run.checkpoint(which).require(trust)
    return Trainer(config, source, display, callbacks, run, which).run()


class Trainer:
    """One training, from an empty directory or from a checkpoint to a stop rule."""

    def __init__(
        self,
        config: RunConfig,
        source: EnvSource | None = None,
        display: Display | None = None,
        callbacks: Sequence[Callback] = (),
        run: Run | None = None,
        which: str = "last",
    ) -> None:
        self.created = time.perf_counter()
        self.display = display or Display()
        check_callbacks(callbacks)
        changes = kept_changes(config, run, which) if run is not None else {}
        self.env = EnvArguments(source or EnvSource(config.env, config.env_kwargs), changes)
        self.resuming, self.which = run, which
        check_can_evaluate(config)
        from fever.training.setup import prepare

        named, loggers = make_callbacks(config), make_loggers(config)
        self.prepared = prepare(config, self.source, self.display.message)
        if config.start_from is not None and run is None:  # a resumed run has its own weights
            from fever.training.start_from import take_weights

            self.prepared = take_weights(self.prepared, self.display.message)
        self.config, self.learner = self.prepared.config, self.prepared.learner
        own = (*loggers, TensorBoard(), self.display)  # see the metrics of all others
        self.listeners = (*named, *callbacks, *own)
        self.progress = Progress(self.config.stop)
        self.progress.evaluates = self.config.eval_every is not None
        self.pool: Pool | None = None
        self.evaluation: Evaluation | None = None
        self.best = Best(self.config)
        self.evaluated: dict[str, Any] = {}  # the row of this iteration's evaluation, if there was one
        self.evaluated_weights: dict[str, Any] = {}
        self.closing = False
        self.consistent = True  # whether the learner's state can be saved; not within an uninterruptible iteration
        self.replay_due = 0.0  # when the replay buffer is to be saved again
        self.interrupts = Interrupts(self._say_that_it_waits, held=True)
        self.seconds = {"setup": 0.0, "first_batch": 0.0, "iterations": 0.0}
        self.seconds |= {"evaluation": 0.0, "checkpoints": 0.0, "stop": 0.0}

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
        with self.interrupts:
            run = self.resuming or Run.create(self.config, facts())
            self.info = TrainingInfo(self.config, run, env_kwargs=self.source.kwargs, change_env=self._change_env)
            self.callbacks = Callbacks(self.listeners, self.info)
            try:
                summary = self._run(run)
            except BaseException:
                with suppress(Exception):  # the first error counts
                    self._stop_callbacks(run)
                raise
            self._stop_callbacks(run)
        return Result(run, summary)

    def _stop_callbacks(self, run: Run) -> None:
        """Tell the callbacks that the training is over; what they log goes to the run's log, if there is still one."""
        with log_to_file(run.path / layout.LOG) if run.path.is_dir() else nullcontext():
            self.callbacks.stop()

    def _run(self, run: Run) -> dict[str, Any]:
        """Train and close everything; returns the summary, which is written."""
        try:
            try:
                reason = self._train(run)
            finally:
                self._close(run)
        except KeyboardInterrupt:
            reason = self.interrupts.reason
        except Exception as error:
            self._note_failure(run, error)
            raise
        if not run.checkpoints():
            run.discard()
            what = "saved" if self.progress.iteration else "learned"
            raise KeyboardInterrupt(f"before anything was {what}; nothing is left behind")
        return self._write_summary(run, reason)

    def _train(self, run: Run) -> str:
        """Start the workers and iterate; returns why it stopped, with the state saved."""
        run.lock()
        with log_to_file(run.path / layout.LOG):
            if self.resuming:
                self._restore(run)
            logging.info("training %s with %s", self.source.name, self.config.algo)
            with self.interrupts.allow():
                pool = self._start(run)
            if self.resuming:  # all checks have passed
                run.write_config(self.config)
            (run.path / layout.SUMMARY).unlink(missing_ok=True)
            self.info.metrics = self.progress.counters(self.learner.steps)
            try:
                self.callbacks.start()
                return self._loop(run, pool)
            except Exception:
                logging.exception("training failed")
                raise
            finally:
                self.progress.end = time.perf_counter()
                if self.progress.iteration and self.consistent:
                    self._leave_evaluated_policy()
                    self._save(run, with_replay=True)

    def _start(self, run: Run) -> Pool:
        """Start what gathers experience, with the replay buffer that a resumed run had saved."""
        from fever.algos.base import SamplingContext

        count, workdir = self.config.workers, run.path.resolve() / layout.WORK
        assert isinstance(count, int)
        if self.config.eval_every is not None:
            self.evaluation = Evaluation(self.config, self.env.first, self.prepared.policy, workdir / "evaluation")
        if count or self.prepared.on_ray:
            workers = f" and {count} worker{'s' if count > 1 else ''}" if count else ""
            self.display.message(f"starting Ray{workers}")
            if is_elastic():
                try_everywhere(connect(count), self.prepared.source)
        place = SamplingContext(self.source, workdir, self.progress.generation, self.config.gpus_per_worker)
        self.pool = pool = self.learner.start(place)
        if self.prepared.all_cores is not None:
            pool.track_cores(self.prepared.all_cores)
        if pool.description:
            self.display.message(pool.description)
        if pool.starts_alike() and not self.resuming:
            self.display.message(f"note: {alike_sentence(self.source.name, 1, f'{self.config.envs} environments')}")
        if self.resuming and (run.path / layout.REPLAY).is_dir():
            pool.restore(run.path / layout.REPLAY)
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
            with log_to_file(run.path / layout.LOG):
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

    def _note_failure(self, run: Run, error: Exception) -> None:
        """Remove the directory if nothing was learned; otherwise record the failure and say how to continue."""
        work = run.path / layout.WORK
        if self.resuming is None and self.progress.iteration == 0:
            if any(path.is_file() for path in work.rglob("*")):  # logs of a simulator, perhaps: why it failed
                self.display.message(f"what the environments wrote is kept: {work}")
            else:
                run.discard()
        elif self.progress.begin is not None:
            self._write_summary(run, "failed", error=str(error))
            kept = f"the last good checkpoint is kept; resume with: fever resume {run.path}{trust_word(self.config)}"
            self.display.message(kept if run.checkpoints() else f"nothing was saved; what it wrote is in {run.path}")

    def _loop(self, run: Run, pool: Pool) -> str:
        """Iterate until a stop rule is met or a callback asks to stop; returns the reason."""
        self.progress.begin = time.perf_counter()
        self.seconds["setup"] = self.progress.begin - self.created
        saved = time.monotonic()
        iterations = self.learner.train(pool)
        interrupts, uninterruptible = self.interrupts, self.prepared.uninterruptible
        reason = ""
        while not reason:
            interrupts.check()
            began = time.perf_counter()
            self.consistent, interrupts.impatient = not uninterruptible, uninterruptible
            iteration = next(iterations)
            self.consistent, interrupts.impatient = True, False
            wall = time.perf_counter() - began
            self.seconds["iterations" if self.seconds["first_batch"] else "first_batch"] += wall
            self._record(run, iteration, wall, pool)
            reason = self.progress.stop_reason(self.learner.steps) or self.info.stop_requested
            better = self.best.is_beaten(self.score) or self.info.checkpoint_requested
            due = better or time.monotonic() - saved >= self.config.checkpoint_seconds
            if due and not reason:
                self._save(run, with_replay=time.monotonic() >= self.replay_due)
                saved = time.monotonic()
                reason = self.info.stop_requested
        return reason

    def _record(self, run: Run, iteration: Iteration, wall: float, pool: Pool) -> None:
        """Count an iteration, call the callbacks, and write its row and those of its episodes."""
        episodes = self.progress.count(iteration, self.learner.steps)
        sampled = sum(report.steps for report in iteration.reports)
        self.info.metrics = {
            **self.progress.counters(self.learner.steps),
            "steps_per_second": round(sampled / wall, 1),
            **self.progress.statistics(),
            **phase_shares(iteration, wall, pool.count),
            "worker_restarts": pool.restarts,
            **self.env.metrics(),
            **iteration.metrics,
            **self.progress.info_means(episodes),
        }
        if episodes:
            run.log_episodes(episodes)
        try:
            interrupted = not self._evaluate(run)
            self.callbacks.episodes(episodes)
            if self.evaluated:
                self.callbacks.evaluation(self.evaluated)
            self.callbacks.iteration()
        finally:
            run.log(self.info.metrics)
        if interrupted:
            raise KeyboardInterrupt

    def _evaluate(self, run: Run) -> bool:
        """Evaluate the policy if it is time to, and add the metrics of that; False if a signal has interrupted it."""
        steps, progress = self.learner.steps, self.progress
        self.evaluated = {}
        before = progress.evaluation["steps"] if progress.evaluation else 0
        if self.evaluation is None or not self.evaluation.due(steps, before):
            return True
        began = time.perf_counter()
        try:
            with self.interrupts.allow():
                self.evaluated_weights = self.learner.weights()
                found = self.evaluation.run(self.evaluated_weights)
        except KeyboardInterrupt:
            return False
        finally:
            seconds = time.perf_counter() - began
            self.seconds["evaluation"] += seconds
            progress.evaluation_seconds += seconds
        self.evaluated = {"iteration": progress.iteration, "steps": steps, **found}
        progress.evaluation = {"steps": steps, "return_mean": found["return_mean"]}
        self.info.metrics |= {metric: found[name] for metric, name in METRICS.items()}
        run.log_evaluation(self.evaluated)
        return True

    def _leave_evaluated_policy(self) -> None:
        """Count an iteration that a signal has cut, if the policy has learned in it since its evaluation: the evaluated
        policy's checkpoint is not replaced then, and its score is not that of another one."""
        if self.evaluated:
            now, then = self.learner.weights(), self.evaluated_weights
            if any(not np.array_equal(now[name], then[name]) for name in then):
                self.evaluated = {}
                self.progress.iteration += 1

    @property
    def score(self) -> float | None:
        """The score of a checkpoint that is saved now: the mean of its evaluation, or the score of training if the run
        is not evaluated."""
        if self.evaluation is not None:
            return self.evaluated["return_mean"] if self.evaluated else None
        return self.progress.score

    def _save(self, run: Run, with_replay: bool) -> None:
        """Write a checkpoint, and the replay buffer so rarely that it takes little of the time."""
        assert self.pool is not None
        began = time.perf_counter()
        state = self.learner.state()
        weights = {WEIGHTS_PREFIX + name: value for name, value in self.learner.weights().items()}
        manifest = {
            "env": self.source.name,
            "algo": self.config.algo,
            "iteration": self.progress.iteration,
            "steps": self.learner.steps,
            "score": self.score,
            "score_of": self.best.kind,
            "policy": self.prepared.policy,
            "algorithm": state.facts,
            "trainer": {**self.progress.state(), "env_changes": self.env.changes},
        }
        files = self.prepared.files
        keep = self.config.checkpoint_keep
        path = run.save_checkpoint({**state.arrays, **weights}, manifest, keep, files.save if files else None)
        self.best.saved(self.score, time.perf_counter() - began)
        if with_replay:
            before = time.monotonic()
            self.pool.save(run.path / layout.REPLAY)
            now = time.monotonic()
            self.replay_due = now + (now - before) / REPLAY_SHARE
        self.seconds["checkpoints"] += time.perf_counter() - began
        self.info.checkpoint_requested = False
        self.callbacks.checkpoint(path)

    def _restore(self, run: Run) -> None:
        """Continue counters, optimiser, schedules, statistics and the learner's random stream from a checkpoint."""
        from fever.algos.base import State

        checkpoint = run.checkpoint(self.which)
        kept, now = checkpoint.manifest["policy"], self.prepared.policy
        checkpoint.check_spaces(now["observation"], now["action"], self.source.name)
        if not same_network(kept, json.loads(json.dumps(now))):
            where = run.path / layout.CONFIG
            raise FeverError(f"{checkpoint.path} has another network; restore the network settings in {where}")
        arrays = checkpoint.arrays()
        weights = {k.removeprefix(WEIGHTS_PREFIX): arrays.pop(k) for k in [*arrays] if k.startswith(WEIGHTS_PREFIX)}
        self.learner.restore(State(arrays, checkpoint.manifest["algorithm"]), weights)
        if self.prepared.files is not None:
            self.prepared.files.restore(checkpoint.files)
        self.progress.restore(checkpoint.iteration, checkpoint.manifest["trainer"])
        self.best.restore([one for one in run.checkpoints() if one.iteration <= checkpoint.iteration])
        reason = self.progress.stop_reason(self.learner.steps)
        if reason:
            how = f"raise it with --stop-{reason}, or give another rule"
            raise FeverError(f"{run.path} has met its stop rule ({reason}) already; {how}")

    def _write_summary(self, run: Run, reason: str, **more: Any) -> dict[str, Any]:
        """Write how the run ended, and return it."""
        seconds, steps = self.progress.seconds, self.learner.steps
        statistics, sampling = self.progress.statistics(), seconds - self.progress.evaluation_seconds
        self.info.summary = summary = {
            "run": str(run.path),
            "env": self.source.name,
            "algo": self.config.algo,
            "workers": self.config.workers,
            "envs": self.config.envs,
            "seed": self.config.seed,
            "iterations": self.progress.iteration,
            "steps": steps,
            "episodes": self.progress.episodes,
            "seconds": round(seconds, 3),
            "steps_per_second": round(steps / sampling, 1) if sampling > 0 else 0.0,
            "return_mean": statistics.get("return_mean"),
            "length_mean": statistics.get("length_mean"),
            "evaluation": self.progress.evaluation,
            "stop_reason": reason,
            "hosts": dict(self.progress.steps_by_host),  # steps by where they were taken, since this process began
            "breakdown": {name: round(value, 3) for name, value in self.seconds.items()},
            **more,
        }
        run.write_summary(summary)
        return summary
