from __future__ import annotations

import os
import signal
import time

import pytest

from fever import signals
from tests.helpers import wait_for


def test_signals() -> None:
    said: list[str] = []
    with pytest.raises(KeyboardInterrupt), signals.signals_interrupt():  # noqa: PT012 - the signal comes in the body
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(5)
    with signals.signals_wait(said.append):
        os.kill(os.getpid(), signal.SIGINT)
        wait_for(lambda: said, "the sentence", 5)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
