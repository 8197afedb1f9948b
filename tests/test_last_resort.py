from __future__ import annotations

import subprocess
import sys
import time

import pytest

from fever.last_resort import AGAIN, LastResort
from tests.helpers import ROOT, wait_for


def test_an_end_that_is_no_longer_expected_is_not_called_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The main thread ends in time while it is looked at what it does."""
    resort = LastResort(lambda at_once: None)
    calls: list[float] = []

    def call_end() -> None:
        calls.append(time.monotonic())
        resort.expect_end(None)

    monkeypatch.setattr(resort, "_call_end", call_end)
    resort.thread.start()
    try:
        resort.expect_end(0.0)
        wait_for(lambda: calls, "call")
        time.sleep(2 * AGAIN)
        assert len(calls) == 1
    finally:
        resort.stop()


def test_signals_of_forked_children_do_not_end_the_run() -> None:
    """A helper of an environment, which ends it with SIGTERM; a Ctrl-C in the terminal reaches both."""
    program = """
import os, signal, time
from fever.last_resort import last_resort
from fever.signals import Interrupts

signal.signal(signal.SIGHUP, signal.SIG_DFL)  # under nohup it is ignored
with Interrupts(held=True) as interrupts, last_resort(print) as resort, interrupts.allow():
    for number in (signal.SIGTERM, signal.SIGHUP) * 20:
        child = os.fork()
        if child == 0:
            time.sleep(60)
            os._exit(0)
        os.kill(child, number)  # perhaps before its first instruction
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -number
    time.sleep(0.3)
    assert not resort.heard
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
