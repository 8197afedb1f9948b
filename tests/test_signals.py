from __future__ import annotations

import os
import signal
import time

import pytest

from fever import signals
from fever.algos.base import Stopwatch
from fever.signals import Interrupts, uninterruptible
from tests.helpers import wait_for


def test_a_signal_interrupts_or_waits() -> None:
    said: list[str] = []
    with pytest.raises(KeyboardInterrupt), signals.signals_interrupt():  # noqa: PT012 - the signal comes in the body
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(5)
    with signals.signals_wait(said.append):
        os.kill(os.getpid(), signal.SIGINT)
        wait_for(lambda: said, "the sentence", 5)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_signals_cut_sampling_and_nothing_else() -> None:
    phases, done = Stopwatch(), []
    with Interrupts(held=True):
        with phases("learn"):
            signal.raise_signal(signal.SIGINT)
            done.append("learn")
        with pytest.raises(KeyboardInterrupt), phases("sample"):  # what has waited
            done.append("sample")
        with pytest.raises(KeyboardInterrupt), phases("wait"), uninterruptible():  # noqa: PT012 - the signal comes in the body
            signal.raise_signal(signal.SIGINT)
            done.append("uninterruptible")
        with pytest.raises(KeyboardInterrupt), phases("wait"):  # noqa: PT012
            signal.raise_signal(signal.SIGINT)
            done.append("wait")
        signal.raise_signal(signal.SIGINT)
    assert done == ["learn", "uninterruptible"]
