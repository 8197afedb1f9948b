"""The one driver: builds run, algorithm and workers, then logs, saves and stops. The same for every algorithm."""

from __future__ import annotations

import logging
import tempfile
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fever.config import NetworkSettings, RunConfig, validate
from fever.display import Display, QuietDisplay
from fever.envs import make_envs
from fever.errors import FeverError
from fever.layout import choose_workers
from fever.policy import Policy
from fever.policy.spaces import Description
from fever.process import Interrupts, facts, limit_learner_threads, log_to_file, prepare_jax
from fever.run import WEIGHTS_PREFIX, Run
from fever.sources import EnvContext, EnvSource

if TYPE_CHECKING:
    from fever.algos import Algorithm, Iteration
    from fever.workers import Pool

REPLAY = "replay"  # folder of the replay buffer in a run directory
REPLAY_SHARE = 0.05  # of the time may go into saving it
SMALL_WIDTH = 256  # units of a hidden layer up to which a learner on a CPU is fastest on one thread


@dataclass(frozen=True)
class Result:
    """What a finished (or interrupted) training gives back."""

    run: Run
    policy: Policy
    summary: dict[str, Any]  # the object that `--json` prints
    curves: dict[str, np.ndarray]  # metric -> one number per iteration

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
    run: Run, config: RunConfig, which: str = "last", source: EnvSource | None = None, display: Display | None = None
) -> Result:
    """Continue a run from a checkpoint, with its (possibly extended) configuration."""
    return Trainer(config, source, display or QuietDisplay(), run, which).run()


class Trainer:
    """One training session, from an empty directory or from a checkpoint to a stop rule."""

    def __init__(
        self, config: RunConfig, source: EnvSource | None, display: Display, run: Run | None = None, which: str = "last"
    ) -> None:
        self.display = display
        self.source = source or EnvSource(config.env, config.env_kwargs)
        self.resuming, self.which = run, which
        prepare_jax(config.device)  # before the first import of JAX, which an algorithm's module brings
        from fever.algos import config_of

        self.settings: NetworkSettings = validate(config_of(config.algo), config.settings, config.algo)
        config = config.model_copy(update={"settings": self.settings.model_dump(mode="json")})
        self.observation, self.action, self.stack, self.config = self._probe(config)
        self.algorithm = self._build()
        self.pool: Pool | None = None

        self.iteration = self.episodes = self.generation = 0
        self.seconds_before = 0.0
        self.replay_due = 0.0  # when the replay buffer is to be saved again
        self.begin: float | None = None  # when the loop began,
        self.end: float | None = None  # and when it ended
        window = config.stop.window
        self.returns: deque[float] = deque(maxlen=window)
        self.lengths: deque[int] = deque(maxlen=window)

    def _probe(self, config: RunConfig) -> tuple[Description, Description, int, RunConfig]:
        """Make the environment once: learn its spaces, and its cost if the layout is to be chosen."""
        with tempfile.TemporaryDirectory(prefix="fever-") as folder:
            envs = make_envs(self.source, 1, EnvContext(workdir=Path(folder)))
            try:
                if config.workers == "auto":
                    workers, reason = choose_workers(envs)
                    config = config.model_copy(update={"workers": workers})
                    self.display.message(f"workers {workers}: {reason}")
                else:
                    envs.reset([config.seed])  # some say only then that they have masks of actions
                spaces = envs.observation, envs.action, envs.stack
            finally:
                envs.close()
        stop = config.stop.or_default(self.source.reward_threshold)
        return *spaces, config.model_copy(update={"stop": stop, "env": self.source.name})

    def _build(self) -> Algorithm:
        """Build the algorithm for the environment that was probed."""
        from fever.algos import Task, find_algorithm

        config = self.config
        image = self.observation["type"] == "image"
        limit_learner_threads(not image and max(self.settings.widths(image), default=0) <= SMALL_WIDTH)
        assert isinstance(config.workers, int)
        task = Task(
            name=self.source.name,
            observation=self.observation,
            action=self.action,
            envs=config.envs,
            workers=config.workers,
            seed=config.seed,
            total_steps=config.stop.steps,
            stack=self.stack,
        )
        return find_algorithm(config.algo)(self.settings, task)

    def run(self) -> Result:
        """Train until a stop rule is met, a signal comes or something fails; leave a complete run directory."""
        run = self.resuming or Run.create(self.config, facts())
        try:
            try:
                reason = self._train(run)
            finally:
                self._close(run)
        except KeyboardInterrupt:
            reason = "interrupted"
        except Exception as error:
            self._note_failure(run, error)
            raise
        if not run.checkpoints():
            run.discard()
            raise KeyboardInterrupt("before anything was learned; nothing is left behind")
        summary = self._summary(run, reason)
        run.write_summary(summary)
        self.display.finish(summary)
        return Result(run, run.checkpoint().policy(), summary, run.curves())

    def _train(self, run: Run) -> str:
        """Start the workers and iterate; returns why it stopped, with the state saved."""
        from fever.algos import Place

        run.lock()
        with log_to_file(run.path / "log.txt"), Interrupts() as interrupts:
            if self.resuming:
                self._restore(run)
                run.write_config(self.config)
            logging.info("training %s with %s", self.source.name, self.config.algo)
            count = self.config.workers
            assert isinstance(count, int)
            if count:
                self.display.message(f"starting Ray and {count} worker{'s' if count > 1 else ''}")
            self.pool = self.algorithm.start(Place(self.source, run.path.resolve() / "work", self.generation))
            if self.pool.description:
                self.display.message(self.pool.description)
            if self.resuming and (run.path / REPLAY).is_dir():
                self.pool.restore(run.path / REPLAY)
            (run.path / "summary.json").unlink(missing_ok=True)
            self.display.start(self.config, run.path)
            try:
                return self._loop(run, self.pool, interrupts)
            except Exception:
                logging.exception("training failed")
                raise
            finally:
                self.end = time.perf_counter()
                if self.iteration:
                    with interrupts.shield():
                        self._save(run)
                        self._save_replay(run)

    def _close(self, run: Run) -> None:
        """Give back the terminal, close the environments, end the workers, let go of the files."""
        self.display.stop()
        try:
            if self.pool is not None:
                self.pool.close()
        finally:
            run.close()

    def _note_failure(self, run: Run, error: Exception) -> None:
        """Leave nothing behind if nothing was learned; otherwise record the failure and say how to go on."""
        work = run.path / "work"
        if self.resuming is None and self.iteration == 0:
            if any(path.is_file() for path in work.rglob("*")):  # logs of a simulator, perhaps: why it failed
                self.display.message(f"what the environments wrote is kept: {work}")
            else:
                run.discard()
        elif self.begin is not None:
            run.write_summary(self._summary(run, "failed") | {"error": str(error)})
            self.display.message(f"the last good checkpoint is kept; resume with: fever resume {run.path}")

    def _loop(self, run: Run, pool: Pool, interrupts: Interrupts) -> str:
        """Iterate until a stop rule is met; returns its name."""
        self.begin = time.perf_counter()
        saved = time.monotonic()
        iterations = self.algorithm.train(pool)
        reason = ""
        while not reason:
            began = time.perf_counter()
            iteration = next(iterations)
            with interrupts.shield():
                row = self._record(run, iteration, time.perf_counter() - began, pool)
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
            for episode in report.episodes:
                self.episodes += 1
                if episode.counts:
                    self.returns.append(episode.total_reward)
                    self.lengths.append(episode.length)
                rows.append({
                    "episode": self.episodes, "steps": self.algorithm.steps, "return": episode.total_reward,
                    "length": episode.length, "worker": report.worker_index, "env": episode.env_index,
                    "info": episode.info,
                })  # fmt: skip
        if rows:
            run.log_episodes(rows)
        sampled = sum(report.steps for report in iteration.reports)
        row = {
            "iteration": self.iteration,
            "steps": self.algorithm.steps,
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
        stop = self.config.stop
        full = len(self.returns) == stop.window
        if stop.reward is not None and full and np.mean(self.returns) >= stop.reward:
            return "reward"
        if stop.steps is not None and self.algorithm.steps >= stop.steps:
            return "steps"
        if stop.iterations is not None and self.iteration >= stop.iterations:
            return "iterations"
        if stop.seconds is not None and self._seconds() >= stop.seconds:
            return "time"
        return ""

    def _save(self, run: Run) -> None:
        state = self.algorithm.state()
        weights = {WEIGHTS_PREFIX + name: value for name, value in self.algorithm.weights().items()}
        policy = Policy(self.observation, self.action, self.algorithm.network, {})
        score = float(np.mean(self.returns)) if len(self.returns) == self.returns.maxlen else None
        manifest = {
            "env": self.source.name,
            "algo": self.config.algo,
            "iteration": self.iteration,
            "steps": self.algorithm.steps,
            "score": score,
            "policy": policy.describe(),
            "algorithm": state.facts,
            "trainer": {
                "episodes": self.episodes, "seconds": self._seconds(), "generation": self.generation,
                "returns": list(self.returns), "lengths": list(self.lengths),
            },
        }  # fmt: skip
        run.save({**state.arrays, **weights}, manifest, self.config.checkpoint_keep)

    def _save_replay(self, run: Run) -> None:
        """Keep what the pool has gathered, one copy, so rarely that it takes little of the time."""
        assert self.pool is not None
        began = time.monotonic()
        self.pool.save(run.path / REPLAY)
        now = time.monotonic()
        self.replay_due = now + (now - began) / REPLAY_SHARE

    def _restore(self, run: Run) -> None:
        """Continue counters, optimiser, schedules, statistics and the learner's random stream from a checkpoint."""
        from fever.algos import State

        checkpoint = run.checkpoint(self.which)
        check_spaces(checkpoint.manifest["policy"], self.observation, self.action, self.source.name, checkpoint.path)
        network = Policy.from_description(checkpoint.manifest["policy"], {}).network
        if network != self.algorithm.network:
            raise FeverError(f"{checkpoint.path} has another network than the configuration of {run.path} asks for")
        arrays = {k: v for k, v in checkpoint.arrays().items() if not k.startswith(WEIGHTS_PREFIX)}
        self.algorithm.restore(State(arrays, checkpoint.manifest["algorithm"]))
        kept = checkpoint.manifest["trainer"]
        self.iteration, self.episodes = checkpoint.iteration, kept["episodes"]
        self.seconds_before, self.generation = kept["seconds"], kept["generation"] + 1
        self.returns.extend(kept["returns"])
        self.lengths.extend(kept["lengths"])
        reason = self._stop_reason()
        if reason:
            raise FeverError(f"{run.path} has met its stop rule ({reason}) already; raise it, for example --stop-steps")

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
            "steps": self.algorithm.steps,
            "episodes": self.episodes,
            "seconds": round(seconds, 3),
            "steps_per_second": round(self.algorithm.steps / seconds, 1) if seconds else 0.0,
            "return_mean": statistics.get("return_mean"),
            "length_mean": statistics.get("length_mean"),
            "stop_reason": reason,
        }


def phase_shares(iteration: Iteration, wall: float, workers: int) -> dict[str, float]:
    """Where an iteration's wall time went, as shares of it: environment, inference, transfer and learning.

    Workers that do not wait for the learner are busy while it is: their shares and its own are of the same time, and
    what the learner waits for them is its phase "wait".
    """
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


def check_spaces(policy: dict[str, Any], observation: Description, action: Description, name: str, path: Path) -> None:
    """Refuse a checkpoint that was made for other spaces than this environment's."""
    for which, has, wants in (
        ("observation", policy["observation"], observation),
        ("action", policy["action"], action),
    ):
        if has != wants:
            raise FeverError(f"the checkpoint {path} was made for another {which} space than {name} has")
