"""Environment variables for JAX: memory, device and number of threads."""

from __future__ import annotations

import os
from pathlib import Path

from fever.errors import FeverError


def prepare_jax(device: str) -> None:
    """Set what JAX reads when it is first imported: no preallocation of GPU memory, and the device.

    Raises FeverError if `device` is "gpu" and JAX has none.
    """
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    if device == "cpu" or (device == "auto" and not Path("/dev/nvidia0").exists() and not Path("/dev/kfd").exists()):
        os.environ.setdefault("JAX_PLATFORMS", "cpu")
    import jax

    if device == "gpu" and jax.default_backend() == "cpu":
        raise FeverError('JAX sees no GPU here; install it with: pip install "jax[cuda12]", or leave --device out')


def limit_learner_threads(small: bool) -> None:
    """Let XLA compute on one thread if the network is small: distributing such short operations over threads costs more
    than it saves.

    Has an effect before JAX computes for the first time in this process. Compilation still uses all cores.
    """
    if small:
        os.environ.setdefault("PJRT_NPROC", "1")
