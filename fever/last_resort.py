"""Ends the process when its main thread does not: a thread that hears signals while the main thread is in C code.

Only commands use it, in their own process. A program that calls `fever.train` keeps its process.
"""

from __future__ import annotations

import os
import select
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from fever.signals import in_forked_children

PATIENCE = 7.0  # seconds that the main thread has to end after the first signal
AGAIN = 0.3  # seconds until `end` is called again after it has decided to wait


class LastResort:
    """Calls `end(at_once)` when the main thread has not ended some time after a signal, and at once (True) after a
    second Ctrl-C. `end` ends the process; it may return, and is called again. Every call has a thread of its own: a
    disk that hangs must not keep a second Ctrl-C from being heard."""

    def __init__(self, end: Callable[[bool], None]) -> None:
        self.end = end
        self.report: Callable[[dict[str, Any]], None] | None = None  # what a command does with a run's summary
        self.calls: dict[bool, threading.Thread] = {}  # the last call of `end` by its argument
        self.due: float | None = None  # when `end` is called
        self.heard = self.at_once = self.over = False
        self.reader, self.writer = os.pipe()
        os.set_blocking(self.writer, False)  # as Python demands of it
        self.thread = threading.Thread(target=self._run, name="signals", daemon=True)

    def expect_end(self, seconds: float | None) -> None:
        """Have the main thread end within so many seconds, even without a signal; None: only after a signal."""
        if not self.heard:
            self.due = None if seconds is None else time.monotonic() + seconds
            self._wake()

    def _wake(self) -> None:
        with suppress(OSError):
            os.write(self.writer, b"\0")

    def _run(self) -> None:
        while not self.over:
            timeout = None if self.due is None else max(0.0, self.due - time.monotonic())
            if select.select([self.reader], [], [], timeout)[0]:
                for number in os.read(self.reader, 64):
                    self._hear(number)
            elif self.due is not None and not self.over:
                self.due = time.monotonic() + AGAIN  # before the call, while which `expect_end` may say otherwise
                self._call_end()

    def _call_end(self) -> None:
        last = self.calls.get(self.at_once)
        if last is None or not last.is_alive():
            self.calls[self.at_once] = call = threading.Thread(target=self.end, args=(self.at_once,), daemon=True)
            call.start()

    def _hear(self, number: int) -> None:
        if number not in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            return
        if signal.getsignal(number) is signal.SIG_IGN:
            return
        now = time.monotonic()
        if not self.heard:
            self.heard, self.due = True, min(now + PATIENCE, self.due or now + PATIENCE)
        elif number == signal.SIGINT:
            self.at_once, self.due = True, now

    def stop(self) -> None:
        """Hear nothing more."""
        self.over = True
        self._wake()
        for thread in (self.thread, *self.calls.values()):
            thread.join(timeout=1)


@contextmanager
def last_resort(end: Callable[[bool], None]) -> Iterator[LastResort | None]:
    """Have `end` called if the main thread does not end soon after a signal; None in another thread, which has no
    signals."""
    global IN_FORCE
    if threading.current_thread() is not threading.main_thread():
        yield None
        return
    IN_FORCE = resort = LastResort(end)
    before = signal.set_wakeup_fd(resort.writer, warn_on_full_buffer=False)  # written to by C, whatever Python does
    resort.thread.start()
    try:
        yield resort
    finally:
        signal.set_wakeup_fd(before)
        IN_FORCE = None
        resort.stop()


IN_FORCE: LastResort | None = None  # of this process


def _hear_nothing() -> None:
    """In a forked child: the pipe is its parent's, whose run its signals would end."""
    global IN_FORCE
    if IN_FORCE is not None:
        IN_FORCE = None
        signal.set_wakeup_fd(-1)


in_forked_children.append(_hear_nothing)
