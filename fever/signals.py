"""When Ctrl-C, SIGTERM, SIGHUP and SIGUSR1 interrupt at once, and when they are deferred; and a limit of time.

A handler of Python runs in the main thread, between two of its instructions. While that thread waits in C code, no
signal has an effect: `fever/last_resort.py` is for that.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)  # signals that end a run
_replaced: list[
    dict[int, Any]
] = []  # signal -> its handler before, of every block below that is entered, inner ones last


class Interrupts:
    """Handles the signals in ENDING: they raise KeyboardInterrupt, at once or deferred.

    Inside `shield` they are deferred until it is left. With `held` they are deferred everywhere except inside `allow`,
    and raised by the next `allow` or `check`. `notice` is called at the first deferred signal; if `impatient` is set, a
    second Ctrl-C interrupts at once. The state is consistent between two iterations, so sampling may be interrupted.
    """

    def __init__(self, notice: Callable[[], None] = lambda: None, held: bool = False) -> None:
        self.notice = notice
        self.impatient = False  # whether a second Ctrl-C interrupts at once
        self.shielded = held
        self.pending = self.told = False
        self.raised = False  # a KeyboardInterrupt, which a library's callback may have swallowed
        self.timer: threading.Timer | None = None
        # Why the run ends: "interrupted", "time" (see `limit_time`), or "limit": SIGUSR1, by which schedulers announce
        # the end of a job's time.
        self.reason = "interrupted"
        self.previous: dict[int, Any] = {}

    def __enter__(self) -> Interrupts:
        if threading.current_thread() is threading.main_thread():
            for number in ENDING:
                if not _outlives(number):
                    self.previous[number] = signal.signal(number, self._handle)
            _replaced.append(self.previous)
        self.token = IN_FORCE.set(self)
        return self

    def __exit__(self, *error: object) -> None:
        IN_FORCE.reset(self.token)
        if self.timer is not None:
            self.timer.cancel()
        previous, self.previous = self.previous, {}
        _put_back(previous)

    def limit_time(self, seconds: float) -> None:
        """Interrupt with the reason "time" after so many seconds, as SIGTERM would. Without signals of its own, in
        another than the main thread, there is no such limit."""
        if signal.SIGUSR1 in self.previous:
            self.timer = threading.Timer(max(0.0, seconds), self._end_time)
            self.timer.daemon = True
            self.timer.start()

    def _end_time(self) -> None:
        if not self.told:
            self.reason = "time"
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)  # also ends a sleep, or a read

    def _handle(self, number: int, frame: Any) -> None:
        if self.told and number != signal.SIGINT:  # a repeat: scheduler and launcher may both send it
            return
        again = self.told
        if not again:
            self.told = True
            if self.reason != "time":
                self.reason = "limit" if number == signal.SIGUSR1 else "interrupted"
        if self.shielded and not (again and number == signal.SIGINT and self.impatient):
            if not self.pending and self.reason != "time":
                self.notice()
            self.pending = True
        else:
            self.raised = True
            raise KeyboardInterrupt

    def check(self) -> None:
        """Raise KeyboardInterrupt if a signal was deferred, or if what it raised was swallowed (JAX calls back into
        Python while garbage is collected, where Python can only print an exception)."""
        self._take_back()
        if self.pending or self.raised:
            self.pending = self.raised = False
            raise KeyboardInterrupt

    def _take_back(self) -> None:
        """Handle the signals again of which an environment has set handlers of its own, as simulators do."""
        for number in self.previous:
            if signal.getsignal(number) != self._handle:
                signal.signal(number, self._handle)

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


def check() -> None:
    """Raise KeyboardInterrupt if a signal was deferred by this thread's `Interrupts`."""
    interrupts = IN_FORCE.get()
    if interrupts is not None:
        interrupts.check()


def postpone() -> None:
    """Have an interrupt that was raised, and caught, come again at the next `check`."""
    interrupts = IN_FORCE.get()
    if interrupts is not None:
        interrupts.pending = True


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
    before: dict[int, Any] = {number: signal.signal(number, handler) for number in numbers if not _outlives(number)}
    _replaced.append(before)
    try:
        yield
    finally:
        _put_back(before)


def _outlives(number: int) -> bool:
    """Whether this is SIGHUP and the process was started by nohup: it outlives the terminal."""
    return number == signal.SIGHUP and signal.getsignal(number) is signal.SIG_IGN


def _put_back(handlers: dict[int, Any]) -> None:
    """Leave a block: signals have their handlers from before."""
    _replaced[:] = [other for other in _replaced if other is not handlers]
    for number, handler in handlers.items():
        signal.signal(number, handler)


def _put_all_back() -> None:
    for handlers in _replaced[::-1]:
        _put_back(handlers)


OUTLIVED = frozenset(
    (*ENDING, signal.SIGUSR2)
)  # signals that Ray's processes in a job block: the driver reacts to them


def ignore_job_signals() -> None:
    """Called in a worker process of Ray: ignore the signals that it was started with as blocked, instead of leaving
    them blocked for programs that the environments start, which could not be ended by SIGTERM."""
    held = signal.pthread_sigmask(signal.SIG_BLOCK, ()) & OUTLIVED - {signal.SIGINT}  # SIGINT is always blocked by Ray
    if held and threading.current_thread() is threading.main_thread():
        _replaced.append({number: signal.signal(number, lambda number, frame: None) for number in held})
        signal.pthread_sigmask(signal.SIG_UNBLOCK, held)


# A forked child, such as a helper of an environment, is no run: it ends by signals as it would without fever, and what
# it is sent is not heard by its parent. Signals that come while it is made wait until it is told so.

in_forked_children: list[Callable[[], object]] = [_put_all_back]  # what is called there, in this order
_forking = threading.local()


def _hold_signals() -> None:
    _forking.mask = signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)


def _let_signals_in() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _forking.mask)


def _begin_child() -> None:
    for task in in_forked_children:
        task()
    _let_signals_in()


os.register_at_fork(before=_hold_signals, after_in_parent=_let_signals_in, after_in_child=_begin_child)
