"""For all tests, those of the examples included."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile

import pytest

COMPILED = "JAX_COMPILATION_CACHE_DIR"  # read by JAX


def pytest_configure(config: pytest.Config) -> None:
    """Compile no program twice in all the processes of the tests: trainings of seconds compile for seconds.

    And have Ctrl-C mean what it means: a shell's background job, which this may be, and all that it starts ignore it.
    """
    if COMPILED not in os.environ:  # pytest-xdist's workers have it from the process that started them
        os.environ[COMPILED] = tempfile.mkdtemp(prefix="fever-compiled-")
        os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.2"
        config.add_cleanup(lambda: shutil.rmtree(os.environ.pop(COMPILED), ignore_errors=True))
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
