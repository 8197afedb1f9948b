"""Limits the time of every call of an environment: step, reset and close.

One thread of the process looks at what the environments are doing. In the main thread of this process a call that takes
too long is interrupted by a signal whose handler raises `EnvTimeout` inside it; the environment is then made anew, as
if it had raised. A worker process is ended instead, and the pool replaces it like one that died.
"""

from __future__ import annotations

import faulthandler
import logging
import math
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from time import monotonic
from typing import Any
from weakref import WeakSet

from fever import last_resort, system

WARN_SECONDS = 60.0  # in one call without a limit, until a limit is suggested
CLOSE_SECONDS = 5.0  # for close(), always
GRACE_SECONDS = 10.0  # beyond the limit, until a worker whose threads cannot run is ended
LONG_SECONDS = 600.0  # that such a worker has for a step or a reset if only the other one has a limit
FEWEST_SECONDS, MOST_SECONDS = 0.02, 1.0  # between two looks
IDLE = -1
TIMEOUT_HINT = "-timeout SECONDS"  # by which a worker's warning is known


class EnvTimeout(BaseException):
    """A call of an environment took longer than its limit. Not an Exception, which environments may catch."""


class Watch:
    """What some environments are doing, written by the thread that calls them: it must cost next to nothing.

    `index` is the environment whose method `call` runs, or IDLE. `serial` tells one call from the next.
    """

    __slots__ = (
        "__weakref__", "call", "expected", "index", "limits", "name", "seen", "serial", "since", "thread", "told",
        "warned", "where",
    )  # fmt: skip

    def __init__(self, name: str, where: str, step: float | None = None, reset: float | None = None) -> None:
        """`where` says whose environments these are, in messages; `step` and `reset` are limits in seconds."""
        self.name, self.where = name, where
        self.limits = {"step": step, "reset": reset, "close": CLOSE_SECONDS}
        self.thread = threading.get_ident()
        self.serial, self.index, self.call = 0, IDLE, "step"
        self.expected: Any = None  # the call that a signal is sent for
        self.seen: Any = None  # the watchdog's: the call that it saw last,
        self.since = 0.0  # when it saw that call first,
        self.warned = False  # whether a limit was suggested,
        self.told = 0.0  # and how long that call had taken when something was done about it

    def now(self) -> tuple[int, int, str] | None:
        """The call that runs at this moment."""
        return None if self.index == IDLE else (self.serial, self.index, self.call)

    @contextmanager
    def calling(self, call: str, index: int = 0) -> Iterator[None]:
        """One call of an environment, which may be within the call of another kind. What it does when it is
        interrupted is up to the caller: `EnvTimeout` is raised in here."""
        before = self.index, self.call
        self.serial, self.call, self.index = self.serial + 1, call, index
        try:
            yield
        finally:
            self.index, self.call = before

    def describe(self) -> str:
        """The call that runs, for messages."""
        return f"{self.name}'s {self.call}() (environment {max(0, self.index)}{self.where})"


class Watchdog:
    """Looks at all watches of this process."""

    def __init__(self) -> None:
        self.watches: WeakSet[Watch] = WeakSet()  # weak: environments may be dropped without being closed
        self.ends_process = False  # in a worker, which is replaced
        self.on_stuck: Callable[[str], None] = _to_stderr  # a call can neither be interrupted nor be replaced
        self.say: Callable[[str], None] = lambda text: None  # to a person; the log has it in any case
        self.thread: threading.Thread | None = None
        self.changed = threading.Event()
        self.lock = threading.Lock()
        self.previous: Any = None  # handler of the signal

    def add(self, watch: Watch) -> None:
        """Look at these environments from now on."""
        with self.lock:
            main = threading.current_thread() is threading.main_thread()
            if main and signal.getsignal(signal.SIGALRM) != self._interrupt:  # others may have set theirs since
                self.previous = signal.signal(signal.SIGALRM, self._interrupt)
            self.watches.add(watch)
            self.changed.set()
            if self.thread is None:
                self.thread = threading.Thread(target=self._run, name="watchdog", daemon=True)
                self.thread.start()

    def remove(self, watch: Watch) -> None:
        """Look at these environments no more; without any, nothing is left behind."""
        with self.lock:
            if watch not in self.watches:
                return
            self.watches.discard(watch)
            self.changed.set()
            ours = threading.current_thread() is threading.main_thread()
            if not self.watches and ours and signal.getsignal(signal.SIGALRM) == self._interrupt:
                signal.signal(signal.SIGALRM, self.previous or signal.SIG_DFL)

    @contextmanager
    def telling(self, say: Callable[[str], None]) -> Iterator[None]:
        """Tell a person in this way of calls that take long."""
        before, self.say = self.say, say
        try:
            yield
        finally:
            self.say = before

    def _interrupt(self, number: int, frame: Any) -> None:
        """Runs in the main thread, inside the call that takes too long, unless that has ended meanwhile."""
        for watch in [*self.watches]:
            expected, watch.expected = watch.expected, None
            if expected is not None and expected == watch.now():
                raise EnvTimeout(f"{watch.describe()} took longer than {watch.limits[watch.call]:g} s")

    def _run(self) -> None:
        while True:
            with self.lock:
                self.changed.clear()
                watches = [*self.watches]
                if not watches:
                    self.thread = None
                    self._arm(None)
                    return
            limits = [limit for watch in watches for limit in watch.limits.values() if limit is not None]
            self.changed.wait(min(MOST_SECONDS, max(FEWEST_SECONDS, min(limits) / 10)))
            for watch in watches:
                self._look(watch)
            del watches, watch

    def _look(self, watch: Watch) -> None:
        call, now = watch.now(), monotonic()
        if call is None or call != watch.seen:
            watch.seen, watch.since, watch.told = call, now, 0.0
        if self.ends_process and (watch.limits["step"] is not None or watch.limits["reset"] is not None):
            self._arm(None if call is None else longest(watch))
        if call is None:
            return
        limit = watch.limits[call[2]]
        taken = now - watch.since
        if limit is None:
            if taken > WARN_SECONDS and not watch.warned:
                watch.warned = True
                self._warn(watch)
        elif taken > limit:
            self._act(watch, call, limit, taken)

    def _arm(self, limit: float | None) -> None:
        """End this process by a timer of C if no thread of Python can run for this long, and longer. It cannot be set
        anew while none runs, so the limit has to do for whatever is called next."""
        if self.ends_process:
            if limit is None:
                faulthandler.cancel_dump_traceback_later()
            else:
                faulthandler.dump_traceback_later(limit + GRACE_SECONDS, exit=True, file=2)

    def _warn(self, watch: Watch) -> None:
        option = f"--{watch.call}"
        text = (
            f"{watch.describe()} has been running for {WARN_SECONDS:g} s; with {option}{TIMEOUT_HINT}, an environment "
            "that hangs is made anew"
        )
        logging.warning("%s", text)
        self.say(f"note: {text}")

    def _act(self, watch: Watch, call: tuple[int, int, str], limit: float, taken: float) -> None:
        """Do something about a call that has passed its limit: once, and once more if that has not helped."""
        stuck = 0 < watch.told < taken - limit
        if watch.told and not stuck:
            return
        watch.told = math.inf if stuck else taken
        sentence = f"{watch.describe()} took longer than {limit:g} s"
        if self.ends_process and (call[2] != "close" or stuck):
            self._end(watch, sentence)
        elif not stuck and watch.thread == threading.main_thread().ident:
            watch.expected = call
            signal.pthread_kill(watch.thread, signal.SIGALRM)
        elif stuck:
            self.on_stuck(
                f"{sentence} and cannot be interrupted; with --workers 1 or more it runs in a process of its own, "
                "which is replaced"
            )

    def _end(self, watch: Watch, sentence: str) -> None:
        """End this process and what it has started, such as the simulator that hangs, and leave the reason and the
        stack of the call in its output."""
        frame = sys._current_frames().get(watch.thread)
        stack = "".join(traceback.format_stack(frame)) if frame is not None else ""
        os.write(2, f"{stack}{LAST_WORDS}{sentence}\n".encode())
        with suppress(Exception):  # this process must end, whatever the others do
            system.end_orphans()
        os._exit(1)


LAST_WORDS = "fever: "  # what the line begins with that says why a worker ended itself


def last_words(output: str) -> str | None:
    """Why a worker ended itself, from what it wrote; None if it did not say so."""
    said = [line.removeprefix(LAST_WORDS) for line in output.splitlines() if line.startswith(LAST_WORDS)]
    return said[-1] if said else None


def _to_stderr(text: str) -> None:
    """Say it, and end the process if it is that of a command, which would wait for ever."""
    os.write(2, f"fever: {text}\n".encode())
    if last_resort.IN_FORCE is not None:
        os._exit(1)


def longest(watch: Watch) -> float:
    """The longest time that a call of these environments may take, for which one without a limit has LONG_SECONDS."""
    return max(LONG_SECONDS if limit is None else limit for limit in (watch.limits["step"], watch.limits["reset"]))


def close_within_limit(watch: Watch, close: Callable[[], None], index: int = 0) -> None:
    """Call an environment's close(). A TimeoutError is raised if that takes too long, and what it raises otherwise."""
    if threading.current_thread() is not threading.main_thread():  # which no signal interrupts
        _close_in_a_thread(watch, close)
        return
    watched = watch in WATCHDOG.watches
    if not watched:
        WATCHDOG.add(watch)
    try:
        with watch.calling("close", index):
            close()
    except EnvTimeout as error:
        raise TimeoutError(str(error)) from None
    except (Exception, KeyboardInterrupt):
        raise
    except BaseException as error:  # which would end the run without its summary
        raise _as_exception(watch, error) from error
    finally:
        watch.index = IDLE
        if not watched:
            WATCHDOG.remove(watch)


def _as_exception(watch: Watch, error: BaseException) -> RuntimeError:
    """What close() raised that is no Exception, as one."""
    exits = isinstance(error, SystemExit)
    what = f"called sys.exit({error})" if exits else f"raised {type(error).__name__}: {error}"
    return RuntimeError(f"{watch.name}'s close() {what}")


def close_before_replacing(watch: Watch, close: Callable[[], None], index: int = 0) -> None:
    """Close an environment that is made anew; what goes wrong is logged, and is no reason to end the run."""
    try:
        close_within_limit(watch, close, index)
    except Exception:  # a user's close() may raise anything
        logging.warning("%s: an environment that is made anew was not closed", watch.name, exc_info=True)


def close_quietly(name: str, close: Callable[[], None], limited: bool = False) -> None:
    """Close environments; what goes wrong is no reason to fail, and is logged. `limited`: their own close() has a
    limit, because they are `Envs`."""
    try:
        if limited:
            close()
        else:
            close_within_limit(Watch(name, ""), close)
    except Exception as error:
        logging.warning("closing %s failed: %s: %s", name, type(error).__name__, error, exc_info=True)


def _close_in_a_thread(watch: Watch, close: Callable[[], None]) -> None:
    failures: list[Exception] = []

    def run() -> None:
        try:
            close()
        except BaseException as error:  # noqa: BLE001 - a user's close() may raise anything
            failures.append(error if isinstance(error, Exception) else _as_exception(watch, error))

    thread = threading.Thread(target=run, name="close", daemon=True)
    thread.start()
    thread.join(CLOSE_SECONDS)
    if thread.is_alive():
        raise TimeoutError(f"{watch.name}'s close() took longer than {CLOSE_SECONDS:g} s")
    if failures:
        raise failures[0]


WATCHDOG = Watchdog()
