from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress

import pytest

from fever import signals, system
from fever.algos.base import Stopwatch
from fever.signals import OUTLIVED, Interrupts, uninterruptible
from tests.helpers import wait_for


def test_workers_of_a_job_outlive_its_signals_and_their_programs_do_not() -> None:
    code = """
import os, signal, subprocess, multiprocessing, time
from fever.signals import ignore_job_signals
print("blocked", signal.SIGTERM in signal.pthread_sigmask(signal.SIG_BLOCK, ()))
ignore_job_signals()
os.kill(os.getpid(), signal.SIGTERM)
os.kill(os.getpid(), signal.SIGUSR2)
program = subprocess.Popen(["sleep", "60"])
program.terminate()
print("program", program.wait(20))
child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))
child.start()
child.terminate()
child.join(20)
print("child", child.exitcode)
"""
    worker = system.start_deaf([sys.executable, "-c", code], os.environ, OUTLIVED, stdout=subprocess.PIPE, text=True)
    try:
        assert worker.communicate(timeout=60)[0].split() == ["blocked", "True", "program", "-15", "child", "-15"]
        assert worker.returncode == 0
    finally:
        system.end(worker, 0)


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


def test_handlers_that_an_environment_has_set_are_taken_back() -> None:
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    with Interrupts(held=True) as interrupts:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # as programs with Qt do, so that Ctrl-C ends them
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        interrupts.check()
        signal.raise_signal(signal.SIGTERM)
        with pytest.raises(KeyboardInterrupt):
            interrupts.check()
        assert signal.getsignal(signal.SIGINT) == interrupts._handle
    interrupts.check()  # no longer in force
    assert {number: signal.getsignal(number) for number in before} == before


def test_an_interrupt_that_a_library_swallows_comes_again_once() -> None:
    """JAX calls Python while garbage is collected, where an exception is printed and goes no further."""
    with Interrupts(held=True) as interrupts:
        with interrupts.allow(), suppress(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            interrupts.check()
        interrupts.check()


def test_a_second_interrupt_ends_what_is_done_after_the_first() -> None:
    """Saving a large replay buffer, for example, after a first Ctrl-C that had interrupted sampling."""
    with Interrupts(held=True) as interrupts:
        with pytest.raises(KeyboardInterrupt), interrupts.allow():
            signal.raise_signal(signal.SIGINT)
        interrupts.impatient = True
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
