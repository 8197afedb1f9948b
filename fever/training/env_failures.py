"""Failures of environments during a run: counted, logged, the first one shown, and too many of them end the run."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from fever import layout
from fever.config import RunConfig
from fever.envs.recovery import Failure, FailureRules
from fever.errors import TrainingError

if TYPE_CHECKING:
    from fever.sampling.spec import Report

HOUR = 3600.0


def failure_rules_of(config: RunConfig) -> FailureRules:
    """How failures of a run's environments are treated."""
    return FailureRules(config.max_env_failures > 0, config.step_timeout, config.reset_timeout)


class EnvFailures:
    """The failures of a run's environments, since this process began."""

    def __init__(self, limit: int, say: Callable[[str], None]) -> None:
        """More than `limit` failures within an hour are too many; `say` tells a person of the first one."""
        self.limit, self.say = limit, say
        self.total = 0
        self.times: deque[float] = deque()  # of the last hour
        self.last = ""

    def add(self, reports: Iterable[Report]) -> None:
        """Count what workers report."""
        self.note(failure for report in reports for failure in report.failures)

    def note(self, failures: Iterable[Failure]) -> None:
        """Count failures: the first one is logged with its traceback and shown, the others are a line in the log."""
        now = time.monotonic()
        for failure in failures:
            if not self.total:
                self.say(
                    f"note: {failure.sentence}; the environment was made anew; the traceback is in {layout.LOG}, and "
                    "failures are counted as env_failures"
                )
            logging.warning("%s", failure.sentence if self.total else f"{failure.sentence}\n{failure.traceback}")
            self.total += 1
            self.times.append(now)
            self.last = failure.sentence
        while self.times and now - self.times[0] > HOUR:
            self.times.popleft()

    def check(self) -> None:
        """Raise TrainingError if there were too many."""
        if len(self.times) > self.limit:
            raise TrainingError(
                f"environments failed {len(self.times)} times within an hour, and --max-env-failures allows "
                f"{self.limit}; the last one: {self.last}"
            )
