"""What RLlib's env runners fail with, and when that ends a run.

RLlib restarts a failed env runner and goes on without its steps; the exception stays in a log file of the runner's
machine. So every runner writes its exceptions to Ray's key-value store, where this process finds them.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable
from typing import Any

from fever.errors import FeverError, TrainingError
from fever.plugins.user_code import sentence_of

LOGGER = "ray.rllib.utils.actor_manager"  # logs an exception of a runner just before it ends the runner's process
NAMESPACE = b"fever"
PATIENCE = 3  # failures of every runner in a row that are borne; before the first step none is
RESTART_SECONDS = 10.0  # that RLlib waits before it starts a failed runner anew; its own default is 60


def report(run: str, error: BaseException) -> None:
    """Write an exception of an env runner of a run where `EnvRunnerFailures` finds it."""
    from ray.experimental import internal_kv

    if internal_kv._internal_kv_initialized():  # not in processes that a runner started
        text = sentence_of(root_cause(error))
        internal_kv._internal_kv_put(f"{run}/{uuid.uuid4().hex}", text, namespace=NAMESPACE)


def report_exceptions(run: str) -> None:
    """From now on, report the exceptions that end this process, which is that of an env runner."""
    logger = logging.getLogger(LOGGER)
    if not any(isinstance(handler, _Reporter) for handler in logger.handlers):
        logger.addHandler(_Reporter(run))


class _Reporter(logging.Handler):
    """Reports the exceptions in log records."""

    def __init__(self, run: str) -> None:
        super().__init__(logging.ERROR)
        self.run = run

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        if error is not None:
            report(self.run, error)


class EnvRunnerFailures:
    """Ends a run whose env runners all fail without sampling anything, and tells of samples that RLlib drops."""

    def __init__(self, run: str, algorithm: Any, steps: Callable[[], int], say: Callable[[str], None]) -> None:
        """`steps` counts the environment steps so far. From now on, `check` is called after every training step: RLlib
        may repeat them within one iteration for ever."""
        self.run, self.algorithm, self.steps, self.say = run, algorithm, steps, say
        self.group = algorithm.env_runner_group
        self.first = self.before = steps()
        self.failed = self.counted = 0  # failures when the last step was sampled; failures now
        self.logged: set[bytes] = set()
        self.noted = False
        step = algorithm.training_step

        def checked_step() -> Any:
            result = step()
            self.check()
            return result

        algorithm.training_step = checked_step

    def check(self) -> None:
        """Raise TrainingError if no env runner is left and all have failed too often since the last step."""
        steps = self.steps()
        if steps > self.before:
            self.before, self.failed = steps, self.counted
            return
        if self.group is None or not (runners := self.group.num_remote_workers()):
            return  # runs in this process, where exceptions arrive by themselves
        texts = self._log_new()
        self.counted = max(len(self.logged), self.group.num_remote_worker_restarts())
        if self.group.num_healthy_remote_workers():
            self._note_dropped()
            return
        borne = PATIENCE if steps > self.first else 1
        if self.counted - self.failed >= borne * runners:
            last = texts[-1] if texts else "their processes end without an exception; Ray's logs may say why"
            raise TrainingError(f"RLlib's workers fail before they have sampled anything: {last}")

    def _log_new(self) -> list[str]:
        """Read the reports, and write new ones to the log; returns those that are new, or one of before."""
        found = reports(self.run)
        new = [text for key, text in found.items() if key not in self.logged]
        for text in new:
            logging.warning("a worker of RLlib's failed: %s", text)
        self.logged |= found.keys()
        return new or list(found.values())[-1:]

    def _note_dropped(self) -> None:
        """Say once that RLlib drops all samples because the environment is slow."""
        if self.group.num_env_runners_dropped_lifetime() and not self.noted:
            self.noted = True
            limit = self.algorithm.config.sample_timeout_s
            self.say(
                f"note: no worker sampled a fragment within {limit:g} s, and RLlib drops what takes longer; "
                "raise sample_timeout_s or lower rollout_fragment_length"
            )


def reports(run: str) -> dict[bytes, str]:
    """All reports of a run's env runners, by key."""
    from ray.experimental import internal_kv

    keys = internal_kv._internal_kv_list(f"{run}/", namespace=NAMESPACE)
    values = {key: internal_kv._internal_kv_get(key, namespace=NAMESPACE) for key in keys}
    return {key: value.decode() for key, value in values.items() if value is not None}


def forget(run: str) -> None:
    """Remove the reports of a run."""
    from ray.experimental import internal_kv

    internal_kv._internal_kv_del(f"{run}/", del_by_prefix=True, namespace=NAMESPACE)


def root_cause(error: BaseException) -> BaseException:
    """The first FeverError in a chain of causes, or its last exception; it may be from another process."""
    deeper = getattr(error, "cause", None) or error.__cause__
    return error if deeper is None or isinstance(error, FeverError) else root_cause(deeper)
