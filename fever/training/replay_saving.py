"""Saves the replay buffer of a training, so rarely that it takes little of the time, and restores it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from fever import layout
from fever.errors import DamagedError
from fever.signals import Interrupts

if TYPE_CHECKING:
    from fever.runs.run import Run
    from fever.sampling.pool import Pool

SHARE = 0.05  # of the time may go into saving the replay buffer


class ReplaySaving:
    """When the replay buffer is to be saved again, and whether it is being saved."""

    def __init__(self, interrupts: Interrupts, say: Callable[[str], None]) -> None:
        self.interrupts, self.say = interrupts, say
        self.busy = False
        self.due_at = 0.0  # of time.monotonic()

    @property
    def due(self) -> bool:
        return time.monotonic() >= self.due_at

    def save(self, run: Run, pool: Pool | None) -> None:
        """Save the replay buffer. If that takes long, a second Ctrl-C ends it; the set that was saved before stays."""
        before = time.monotonic()
        self.busy = self.interrupts.impatient = True
        try:
            self.write(run, pool)
        except KeyboardInterrupt:
            self.say("the replay buffer is not saved: interrupted twice")
        finally:
            self.busy = self.interrupts.impatient = False
        now = time.monotonic()
        self.due_at = now + (now - before) / SHARE

    def write(self, run: Run, pool: Pool | None) -> None:
        """Write the replay buffer, if there is one and room for it."""
        if pool is not None:
            with run.disk.writing("the replay buffer"):
                pool.save(run.path / layout.REPLAY)

    def restore(self, run: Run, pool: Pool) -> None:
        """Fill a new pool with the replay buffer that was saved, or say why it begins with an empty one."""
        from fever.replay.experience import Experience

        if not isinstance(pool, Experience):
            return
        try:
            if not (run.path / layout.REPLAY).is_dir():
                raise DamagedError("no replay buffer was saved")
            pool.restore(run.path / layout.REPLAY)
        except DamagedError as error:
            logging.warning("%s", error)
            self.say(f"{error}; the run goes on with an empty one")
