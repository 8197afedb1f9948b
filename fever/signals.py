"""When Ctrl-C, SIGTERM and SIGUSR1 interrupt at once, and when they are deferred."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any


class Interrupts:
    """Handles Ctrl-C, SIGTERM and SIGUSR1: they raise KeyboardInterrupt, at once or deferred.

    Inside `shield` they are deferred until it is left. With `held` they are deferred everywhere except inside `allow`,
    and raised by the next `allow` or `check`. `notice` is called at the first deferred signal; if `impatient` is set, a
    second Ctrl-C interrupts at once. The state is consistent between two iterations, so sampling may be interrupted.
    """

    def __init__(self, notice: Callable[[], None] = lambda: None, held: bool = False) -> None:
        self.notice = notice
        self.impatient = False  # whether a second Ctrl-C interrupts at once
        self.shielded = held
        self.pending = self.told = False
        self.reason = "interrupted"  # or "limit": SIGUSR1, with which schedulers announce the end of a job's time
        self.previous: dict[int, Any] = {}

    def __enter__(self) -> Interrupts:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
                self.previous[number] = signal.signal(number, self._handle)
        self.token = IN_FORCE.set(self)
        return self

    def __exit__(self, *error: object) -> None:
        IN_FORCE.reset(self.token)
        for number, handler in self.previous.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: Any) -> None:
        if self.told and number != signal.SIGINT:  # a repeat: scheduler and launcher may both send it
            return
        if not self.told:
            self.told, self.reason = True, "limit" if number == signal.SIGUSR1 else "interrupted"
        if self.shielded and not (self.pending and number == signal.SIGINT and self.impatient):
            if not self.pending:
                self.notice()
            self.pending = True
        else:
            raise KeyboardInterrupt

    def check(self) -> None:
        """Raise KeyboardInterrupt if a signal was deferred."""
        if self.pending:
            self.pending = False
            raise KeyboardInterrupt

    @contextmanager
    def shield(self) -> Iterator[None]:
        """Defer signals until the outermost shield is left."""
        outer, self.shielded = self.shielded, True
        try:
            yield
        finally:
            self.shielded = outer
        if not outer:
            self.check()

    @contextmanager
    def allow(self) -> Iterator[None]:
        """Let signals interrupt, including a deferred one."""
        outer, self.shielded = self.shielded, False
        try:
            self.check()
            yield
        finally:
            self.shielded = outer


IN_FORCE: ContextVar[Interrupts | None] = ContextVar("interrupts", default=None)  # those of this thread


def interruptible() -> AbstractContextManager[None]:
    """A block that signals may interrupt, although this thread's `Interrupts` defer them elsewhere."""
    interrupts = IN_FORCE.get()
    return nullcontext() if interrupts is None else interrupts.allow()


def uninterruptible() -> AbstractContextManager[None]:
    """A block inside `interruptible` that no signal interrupts."""
    interrupts = IN_FORCE.get()
    return nullcontext() if interrupts is None else interrupts.shield()


@contextmanager
def signals_interrupt() -> Iterator[None]:
    """Make SIGTERM and SIGHUP raise KeyboardInterrupt as Ctrl-C does, so that cleanup runs."""

    def interrupt(number: int, frame: Any) -> None:
        raise KeyboardInterrupt

    with _handling(interrupt, signal.SIGTERM, signal.SIGHUP):
        yield


@contextmanager
def signals_wait(say: Callable[[str], None]) -> Iterator[None]:
    """Defer all signals while resources that cost money are removed."""

    def wait(number: int, frame: Any) -> None:
        say("still cleaning up; please wait")

    with _handling(wait, signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        yield


@contextmanager
def _handling(handler: Callable[[int, Any], None], *numbers: signal.Signals) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)
