"""The faults: how each is caused, what must have happened for it to be over, and what puts things back."""

from __future__ import annotations

import itertools
import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from random import Random

from chaos.envs import CLAIMED, TOKENS
from chaos.processes import Process
from chaos.training import Training
from fever import layout

ROWS, SECONDS = 3, 3.0  # after a fault, before it may be over: what it broke shows in the next rows
DISK_BYTES = 48 << 20
serial = itertools.count()


class NoVictimError(Exception):
    """There is nothing to break, for the reason given."""


class Fault:
    """One fault: `strike` it once, ask `pending` until that says None, and `clean` up in any case."""

    def __init__(self, kind: str, rng: Random, limit: float = 60.0) -> None:
        self.kind, self.rng, self.limit = kind, rng, limit
        self.struck = 0.0

    def strike(self, training: Training) -> None:
        """Cause it. Raises NoVictimError."""
        self.struck = time.monotonic()

    def pending(self, training: Training) -> str | None:
        """What the fault still waits for; None if the training has got over it."""
        if training.rows_since(self.struck) < ROWS:
            return "new rows"
        return None if time.monotonic() - self.struck > SECONDS else "some seconds"

    def clean(self, training: Training) -> None:
        """Put back what the fault took from the training."""


class Signal(Fault):
    """A signal to one process, which must be gone and replaced."""

    def __init__(self, kind: str, rng: Random, victims: str, number: int, limit: float = 60.0) -> None:
        super().__init__(kind, rng, limit)
        self.victims, self.number, self.count = victims, number, 0
        self.victim: Process | None = None
        self.replaced = False

    def strike(self, training: Training) -> None:
        found = training.processes(self.victims)
        if not found:
            raise NoVictimError(f"there is no {self.victims}")
        self.victim, self.count = self.rng.choice(sorted(found)), len(found)
        super().strike(training)
        self.victim.signal(self.number)

    def pending(self, training: Training) -> str | None:
        assert self.victim is not None
        if self.victim.alive():
            return f"the end of {self.victims} {self.victim.pid}"
        if len(training.processes(self.victims)) < self.count:
            return f"another {self.victims}"
        if not self.replaced:  # rows until now may be from before the process was missed
            self.replaced, self.struck = True, time.monotonic()
        return super().pending(training)

    def clean(self, training: Training) -> None:
        assert self.victim is not None
        self.victim.signal(signal.SIGCONT)


class RayStop(Signal):
    """A raylet or GCS that is stopped: it is replaced, or the training goes on without it until it continues."""

    PATIENCE = 25.0  # seconds

    def pending(self, training: Training) -> str | None:
        waited = time.monotonic() - self.struck
        if waited > self.PATIENCE and training.rows and training.rows[-1].time > time.monotonic() - SECONDS:
            return None
        return super().pending(training)


class Token(Fault):
    """What one environment is told to do."""

    ENDS_PROCESS = ("hang", "exit")

    def strike(self, training: Training) -> None:
        self.name = f"{self.kind}.{next(serial)}"
        (training.control / TOKENS / self.name).touch()
        super().strike(training)
        self.where: int | None = None

    def pending(self, training: Training) -> str | None:
        if self.where is None:
            claimed = list((training.control / CLAIMED).glob(f"{self.name}.*"))
            if not claimed:
                return "an environment that takes the token"
            self.where, self.struck = int(claimed[0].suffix[1:]), time.monotonic()
        if self.kind in self.ENDS_PROCESS and os.path.exists(f"/proc/{self.where}"):
            return f"the end of process {self.where}, whose environment is broken"
        return super().pending(training)

    def clean(self, training: Training) -> None:
        (training.control / TOKENS / self.name).unlink(missing_ok=True)


class FullDisk(Fault):
    """No room on the disk of the run directory for some seconds; a checkpoint must follow once there is."""

    HOLD = 6.0

    def strike(self, training: Training) -> None:
        self.ballast = training.runs / "ballast"
        self.emptied: float | None = None
        super().strike(training)
        self._fill()

    def _fill(self) -> None:
        with open(self.ballast, "ab", buffering=0) as file:
            for size in (1 << 20, 1 << 12, 1):
                with suppress(OSError):
                    while file.tell() < DISK_BYTES:
                        file.write(b"x" * size)

    def pending(self, training: Training) -> str | None:
        if self.emptied is None:
            if time.monotonic() - self.struck < self.HOLD:
                self._fill()  # an old checkpoint may have made room
                return "room on the disk"
            self.clean(training)
        assert self.emptied is not None
        newest = max((path.stat().st_mtime for path in (training.path / layout.CHECKPOINTS).glob("[0-9]*")), default=0)
        if newest < self.emptied:
            return "a checkpoint, now that there is room"
        return super().pending(training)

    def clean(self, training: Training) -> None:
        if self.emptied is None:
            self.ballast.unlink(missing_ok=True)
            self.emptied, self.struck = time.time(), time.monotonic()


class ClosedOutput(Fault):
    """Nobody reads any more what the training prints. It prints a line every few seconds."""

    PRINTS = 7.0  # seconds until it has certainly printed

    def strike(self, training: Training) -> None:
        assert training.reader is not None
        if not training.reader.thread.is_alive():
            raise NoVictimError("the output is closed already")
        super().strike(training)
        training.reader.close()

    def pending(self, training: Training) -> str | None:
        return super().pending(training) if time.monotonic() - self.struck > self.PRINTS else "something printed"


class DriverKill(Fault):
    """kill -9 of the command, and `fever resume`."""

    def strike(self, training: Training) -> None:
        assert training.process is not None
        training.follow()
        super().strike(training)
        training.process.kill()
        training.process.wait(30)
        training.follow()
        training.resume()

    def pending(self, training: Training) -> str | None:
        if not training.alive():
            return None  # the case sees that, and says how it ended
        return super().pending(training)


MAKERS: dict[str, Callable[[str, Random], Fault]] = {
    "kill_sampler": lambda kind, rng: Signal(kind, rng, "sampler", signal.SIGKILL),
    "stop_sampler": lambda kind, rng: Signal(kind, rng, "sampler", signal.SIGSTOP),
    "kill_shard": lambda kind, rng: Signal(kind, rng, "shard", signal.SIGKILL),
    "stop_shard": lambda kind, rng: Signal(kind, rng, "shard", signal.SIGSTOP, limit=90),
    "kill_raylet": lambda kind, rng: Signal(kind, rng, "raylet", signal.SIGKILL, limit=90),
    "stop_raylet": lambda kind, rng: RayStop(kind, rng, "raylet", signal.SIGSTOP, limit=90),
    "kill_gcs": lambda kind, rng: Signal(kind, rng, "gcs", signal.SIGKILL, limit=90),
    "stop_gcs": lambda kind, rng: RayStop(kind, rng, "gcs", signal.SIGSTOP, limit=90),
    "raise": Token,
    "hang": Token,
    "nan": Token,
    "exit": Token,
    "leak": Token,
    "block": Token,
    "full_disk": FullDisk,
    "closed_output": ClosedOutput,
    "kill_driver": DriverKill,
}
