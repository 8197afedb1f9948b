"""The one driver: builds run, algorithm and workers, then logs, saves and stops. The same for every algorithm."""

from __future__ import annotations

import json
import logging
import os
import time
from collections import Counter, deque
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from fever import layout
from fever.config import RunConfig
from fever.envs.source import EnvSource
from fever.errors import FeverError
from fever.runs.checkpoint import WEIGHTS_PREFIX, stop_reason
from fever.runs.facts import facts
from fever.runs.run import Run, trust_word
from fever.sampling.ray_cluster import connect, is_elastic, try_everywhere
from fever.signals import Interrupts
from fever.training.display import Display, QuietDisplay
from fever.training.logs import log_to_file

if TYPE_CHECKING:
    from fever.algos.base import Iteration
    from fever.sampling.pool import Pool

REPLAY_SHARE = 0.05  # of the time may go into saving it


@dataclass(frozen=True)
class Result:
    """What a finished (or interrupted) training gives back."""

    run: Run
    summary: dict[str, Any]  # the object that `--json` prints

    @cached_property
    def curves(self) -> dict[str, np.ndarray]:
        """Metric -> one number per iteration."""
        return self.run.curves()

    @cached_property
    def policy(self) -> Any:
        """Of the last checkpoint: `policy.act(observation)`."""
        return self.run.checkpoint().policy()

    @property
    def stop_reason(self) -> str:
        return self.summary["stop_reason"]

    @property
    def return_mean(self) -> float | None:
        return self.summary["return_mean"]


def train(config: RunConfig, source: EnvSource | None = None, display: Display | None = None) -> Result:
    """Train from the beginning in a new run directory."""
    return Trainer(config, source, display or QuietDisplay()).run()


def resume(
    run: Run,
    config: RunConfig,
    which: str = "last",
    source: EnvSource | None = None,
    display: Display | None = None,
    trust: bool = False,
) -> Result:
    """Continue a run from a checkpoint, with its (possibly extended) configuration; one that holds pickles only if the
    caller trusts it."""
    run.checkpoint(which).require(trust)
    return Trainer(config, source, display or QuietDisplay(), run, which).run()


class Trainer:
    """One training session, from an empty directory or from a checkpoint to a stop rule."""

    def __init__(
        self, config: RunConfig, source: EnvSource | None, display: Display, run: Run | None = None, which: str = "last"
    ) -> None:
        self.born = time.perf_counter()
        self.display = display
        self.source = source or EnvSource(config.env, config.env_kwargs)
        self.resuming, self.which = run, which
        from fever.training.setup import prepare

        self.prepared = prepare(config, self.source, display.message)
        self.config, self.learner = self.prepared.config, self.prepared.learner
        self.pool: Pool | None = None

        self.iteration = self.episodes = self.generation = 0
        self.seconds_before = 0.0
        self.whole = True  # the learner's state, which an iteration that is not cut leaves only at its end
        self.replay_due = 0.0  # when the replay buffer is to be saved again
        self.begin: float | None = None  # when the loop began,
        self.end: float | None = None  # and when it ended
        self.closing = False
        self.interrupts = Interrupts(self._say_that_it_waits, held=True)
        self.seconds = {"setup": 0.0, "first_batch": 0.0, "iterations": 0.0, "checkpoints": 0.0, "stop": 0.0}
        self.steps_by_host: Counter[str] = Counter()
        window = self.config.stop.window
        self.returns: deque[float] = deque(maxlen=window)
        self.lengths: deque[int] = deque(maxlen=window)

    def _say_that_it_waits(self) -> None:
        """Called in the middle of anything, by a signal: not through the display, which may be at work."""
        if (self.prepared.uncut or self.closing) and not isinstance(self.display, QuietDisplay):
            iterating = "RLlib finishes its iteration, then the run is saved"
            what = "the environments are being closed" if self.closing else iterating
            os.write(2, f"\nfever: {what}; Ctrl-C again does not wait\n".encode())

    def run(self) -> Result:
        """Train until a stop rule is met, a signal comes or something fails; leave a complete run directory."""
        with self.interrupts:
            run = self.resuming or Run.create(self.config, facts())
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
                what = "saved" if self.iteration else "learned"
                raise KeyboardInterrupt(f"before anything was {what}; nothing is left behind")
            summary = self._summary(run, reason)
            run.write_summary(summary)
        self.display.finish(summary)
        return Result(run, summary)

    def _train(self, run: Run) -> str:
        """Start the workers and iterate; returns why it stopped, with the state saved."""
        run.lock()
        with log_to_file(run.path / layout.LOG):
            if self.resuming:
                self._restore(run)
            logging.info("training %s with %s", self.source.name, self.config.algo)
            with self.interrupts.open():
                pool = self._start(run)
            if self.resuming:  # nothing can be refused any more
                run.write_config(self.config)
            (run.path / layout.SUMMARY).unlink(missing_ok=True)
            self.display.start(self.config, run.path)
            try:
                return self._loop(run, pool)
            except Exception:
                logging.exception("training failed")
                raise
            finally:
                self.end = time.perf_counter()
                if self.iteration and self.whole:
                    self._save(run)
                    self._save_replay(run)

    def _start(self, run: Run) -> Pool:
        """Start what gathers experience, with what it had gathered before."""
        from fever.algos.base import Place

        count = self.config.workers
        assert isinstance(count, int)
        if count or self.prepared.on_ray:
            workers = f" and {count} worker{'s' if count > 1 else ''}" if count else ""
            self.display.message(f"starting Ray{workers}")
            if is_elastic():
                try_everywhere(connect(count), self.prepared.source)
        place = Place(self.source, run.path.resolve() / layout.WORK, self.generation, self.config.gpus_per_worker)
        self.pool = pool = self.learner.start(place)
        if self.prepared.all_cores is not None:
            pool.follow(self.prepared.all_cores)
        if pool.description:
            self.display.message(pool.description)
        if self.resuming and (run.path / layout.REPLAY).is_dir():
            pool.restore(run.path / layout.REPLAY)
        return pool

    def _close(self, run: Run) -> None:
        """Give back the terminal, close the environments, end the workers, let go of the files. What goes wrong with
        environments here is said, and changes nothing about how the run has ended."""
        began = time.perf_counter()
        self.display.stop()
        try:
            if self.pool is not None:
                with log_to_file(run.path / layout.LOG):
                    self._close_pool(self.pool)
        finally:
            run.close()
            self.seconds["stop"] = time.perf_counter() - began

    def _close_pool(self, pool: Pool) -> None:
        try:
            self.closing = self.interrupts.impatient = True
            try:
                pool.close()
            finally:
                self.interrupts.impatient = False
        except KeyboardInterrupt:
            self.display.message("not all environments were closed")
        except Exception as error:
            logging.exception("closing failed")
            self.display.message(f"not all environments were closed: {type(error).__name__}: {error}")

    def _note_failure(self, run: Run, error: Exception) -> None:
        """Leave nothing behind if nothing was learned; otherwise record the failure and say how to go on."""
        work = run.path / layout.WORK
        if self.resuming is None and self.iteration == 0:
            if any(path.is_file() for path in work.rglob("*")):  # logs of a simulator, perhaps: why it failed
                self.display.message(f"what the environments wrote is kept: {work}")
            else:
                run.discard()
        elif self.begin is not None:
            run.write_summary(self._summary(run, "failed") | {"error": str(error)})
            kept = f"the last good checkpoint is kept; resume with: fever resume {run.path}{trust_word(self.config)}"
            self.display.message(kept if run.checkpoints() else f"nothing was saved; what it wrote is in {run.path}")

    def _loop(self, run: Run, pool: Pool) -> str:
        """Iterate until a stop rule is met; returns its name."""
        self.begin = time.perf_counter()
        self.seconds["setup"] = self.begin - self.born
        saved = time.monotonic()
        iterations = self.learner.train(pool)
        interrupts, uncut = self.interrupts, self.prepared.uncut
        reason = ""
        while not reason:
            interrupts.check()
            began = time.perf_counter()
            self.whole, interrupts.impatient = not uncut, uncut
            iteration = next(iterations)
            self.whole, interrupts.impatient = True, False
            wall = time.perf_counter() - began
            self.seconds["iterations" if self.seconds["first_batch"] else "first_batch"] += wall
            row = self._record(run, iteration, wall, pool)
            self.display.update(row)
            reason = self._stop_reason()
            if time.monotonic() - saved >= self.config.checkpoint_seconds and not reason:
                self._save(run)
                if time.monotonic() >= self.replay_due:
                    self._save_replay(run)
                saved = time.monotonic()
        return reason

    def _record(self, run: Run, iteration: Iteration, wall: float, pool: Pool) -> dict[str, Any]:
        """Count, and write what an iteration did into the run directory."""
        self.iteration += 1
        rows = []
        for report in iteration.reports:
            self.steps_by_host[report.host] += report.steps
            for episode in report.episodes:
                self.episodes += 1
                if episode.counts:
                    self.returns.append(episode.total_reward)
                    self.lengths.append(episode.length)
                rows.append({
                    "episode": self.episodes, "steps": self.learner.steps, "return": episode.total_reward,
                    "length": episode.length, "worker": report.worker_index, "env": episode.env_index,
                    "info": episode.info,
                })  # fmt: skip
        if rows:
            run.log_episodes(rows)
        sampled = sum(report.steps for report in iteration.reports)
        row = {
            "iteration": self.iteration,
            "steps": self.learner.steps,
            "episodes": self.episodes,
            "seconds": round(self._seconds(), 4),
            "steps_per_second": round(sampled / wall, 1),
            **self._episode_statistics(),
            **phase_shares(iteration, wall, pool.count),
            "worker_restarts": pool.restarts,
            **iteration.metrics,
        }
        run.log(row)
        return row

    def _episode_statistics(self) -> dict[str, float]:
        if not self.returns:
            return {}
        returns = np.asarray(self.returns)
        return {
            "return_mean": float(returns.mean()),
            "return_min": float(returns.min()),
            "return_max": float(returns.max()),
            "length_mean": float(np.mean(self.lengths)),
        }

    def _seconds(self) -> float:
        if self.begin is None:
            return self.seconds_before
        return self.seconds_before + (self.end or time.perf_counter()) - self.begin

    def _stop_reason(self) -> str:
        """The name of the first stop rule that is met, or nothing."""
        return stop_reason(self.config.stop, self.returns, self.learner.steps, self.iteration, self._seconds())

    def _save(self, run: Run) -> None:
        began = time.perf_counter()
        state = self.learner.state()
        weights = {WEIGHTS_PREFIX + name: value for name, value in self.learner.weights().items()}
        score = float(np.mean(self.returns)) if len(self.returns) == self.returns.maxlen else None
        manifest = {
            "env": self.source.name,
            "algo": self.config.algo,
            "iteration": self.iteration,
            "steps": self.learner.steps,
            "score": score,
            "policy": self.prepared.policy,
            "algorithm": state.facts,
            "trainer": {
                "episodes": self.episodes, "seconds": self._seconds(), "generation": self.generation,
                "returns": list(self.returns), "lengths": list(self.lengths),
            },
        }  # fmt: skip
        files = self.prepared.files
        run.save({**state.arrays, **weights}, manifest, self.config.checkpoint_keep, files.save if files else None)
        self.seconds["checkpoints"] += time.perf_counter() - began

    def _save_replay(self, run: Run) -> None:
        """Keep what the pool has gathered, one copy, so rarely that it takes little of the time."""
        assert self.pool is not None
        began = time.monotonic()
        self.pool.save(run.path / layout.REPLAY)
        now = time.monotonic()
        self.replay_due = now + (now - began) / REPLAY_SHARE
        self.seconds["checkpoints"] += now - began

    def _restore(self, run: Run) -> None:
        """Continue counters, optimiser, schedules, statistics and the learner's random stream from a checkpoint."""
        from fever.algos.base import State

        checkpoint = run.checkpoint(self.which)
        kept, now = checkpoint.manifest["policy"], self.prepared.policy
        checkpoint.check_spaces(now["observation"], now["action"], self.source.name)
        if kept != json.loads(json.dumps(now)):
            raise FeverError(f"{checkpoint.path} has another network than the configuration of {run.path} asks for")
        arrays = checkpoint.arrays()
        weights = {k.removeprefix(WEIGHTS_PREFIX): arrays.pop(k) for k in [*arrays] if k.startswith(WEIGHTS_PREFIX)}
        self.learner.restore(State(arrays, checkpoint.manifest["algorithm"]), weights)
        if self.prepared.files is not None:
            self.prepared.files.restore(checkpoint.files)
        kept = checkpoint.manifest["trainer"]
        self.iteration, self.episodes = checkpoint.iteration, kept["episodes"]
        self.seconds_before, self.generation = kept["seconds"], kept["generation"] + 1
        self.returns.extend(kept["returns"])
        self.lengths.extend(kept["lengths"])
        reason = self._stop_reason()
        if reason:
            how = f"raise it with --stop-{reason}, or give another rule"
            raise FeverError(f"{run.path} has met its stop rule ({reason}) already; {how}")

    def _summary(self, run: Run, reason: str) -> dict[str, Any]:
        seconds = self._seconds()
        statistics = self._episode_statistics()
        return {
            "run": str(run.path),
            "env": self.source.name,
            "algo": self.config.algo,
            "workers": self.config.workers,
            "envs": self.config.envs,
            "seed": self.config.seed,
            "iterations": self.iteration,
            "steps": self.learner.steps,
            "episodes": self.episodes,
            "seconds": round(seconds, 3),
            "steps_per_second": round(self.learner.steps / seconds, 1) if seconds else 0.0,
            "return_mean": statistics.get("return_mean"),
            "length_mean": statistics.get("length_mean"),
            "stop_reason": reason,
            "hosts": dict(self.steps_by_host),  # steps by where they were taken, since this process began
            "breakdown": {name: round(value, 3) for name, value in self.seconds.items()},
        }


def phase_shares(iteration: Iteration, wall: float, workers: int) -> dict[str, float]:
    """Where an iteration's wall time went, as shares of it: environment, inference, transfer and learning.

    Workers that do not wait for the learner are busy while it is: their shares and its own are of the same time, and
    what the learner waits for them is its phase "wait".
    """
    if not iteration.seconds:  # not known
        return {}
    width = max(1, workers)
    env = sum(report.seconds["env"] for report in iteration.reports) / width
    busy = sum(report.seconds["total"] for report in iteration.reports) / width
    spent = iteration.seconds.get
    waiting = max(0.0, spent("sample", 0.0) - busy) + spent("wait", 0.0)
    shares = {
        "time_env": env,
        "time_inference": busy - env,
        "time_transfer": spent("transfer", 0.0) + waiting,
        "time_learn": spent("learn", 0.0),
    }
    return {name: round(seconds / wall, 4) for name, seconds in shares.items()}
