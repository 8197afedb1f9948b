"""What signals mean while something is brought up that must not be left behind."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def signals_interrupt() -> Iterator[None]:
    """A closed terminal or `kill` interrupts as Ctrl-C does, so that nothing is left running."""

    def interrupt(number: int, frame: Any) -> None:
        raise KeyboardInterrupt

    with _handling(interrupt, signal.SIGTERM, signal.SIGHUP):
        yield


@contextmanager
def signals_wait(say: Callable[[str], None]) -> Iterator[None]:
    """Nothing interrupts what removes things that cost money."""

    def wait(number: int, frame: Any) -> None:
        say("still removing what was made; please wait")

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
