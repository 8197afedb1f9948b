"""What a run does when Ray itself dies: it saves, starts Ray and its workers anew, and goes on."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from fever.errors import RayLost, TrainingError

if TYPE_CHECKING:
    from fever.sampling.pool import Pool

ATTEMPTS, ATTEMPT_SECONDS = 3, 1.0  # to start Ray anew, and between two of them
LOSSES = 3  # of Ray in a row that a run survives
ITERATIONS = 10  # after which a loss is the first in a row again


class RayRecovery:
    """Trains through losses of Ray. The learner is in this process, so nothing that it has learned is lost."""

    def __init__(
        self,
        train: Callable[[Pool], str],
        save: Callable[[], object],
        restart: Callable[[], Pool],
        iteration: Callable[[], int],
        say: Callable[[str], None],
    ) -> None:
        """`train(pool)` iterates and returns why it stopped; `save()` writes a checkpoint without what Ray held;
        `restart()` ends what is left of Ray and returns a new pool; `iteration()` counts iterations so far."""
        self.train, self.save, self.restart, self.iteration, self.say = train, save, restart, iteration, say
        self.losses = self.last = 0

    def run(self, pool: Pool) -> str:
        """Train until something else than Ray ends it; returns why it stopped. Raises TrainingError if Ray is not ours,
        or dies again and again."""
        current: Pool | None = pool
        while True:
            try:
                return self.train(current or self._restart())
            except RayLost as error:  # kept until Ray is shut down: see `Cluster.loss`
                self._prepare(error, pool.can_restart)
                current = None

    def _restart(self) -> Pool:
        """Start Ray and the workers anew, in up to ATTEMPTS attempts: what is left of the old may be in the way."""
        for _ in range(ATTEMPTS - 1):
            try:
                return self.restart()
            except TrainingError as error:
                logging.warning("%s", error)
                time.sleep(ATTEMPT_SECONDS)
        return self.restart()

    def _prepare(self, error: RayLost, can_restart: bool) -> None:
        """Save, and say what happened."""
        began, iteration = time.perf_counter(), self.iteration()
        logging.warning("%s", error)
        self.losses = 1 if iteration >= self.last + ITERATIONS else self.losses + 1
        self.last = iteration
        if iteration:
            self.save()
            logging.info("saved after the loss of Ray in %.2f s", time.perf_counter() - began)
        if not can_restart:
            raise TrainingError(f"{error}; the workers are lost with it") from error
        if self.losses > LOSSES:
            raise TrainingError(f"{error}, {self.losses} times within a few iterations") from error
        self.say(f"{error}: Ray and the workers are started anew")
