"""Settings of JAX: memory, device, number of threads, and where it keeps compiled programs."""

from __future__ import annotations

import hashlib
import os
import platform
import sys
import warnings
from itertools import takewhile
from pathlib import Path

from fever.errors import FeverError

CACHE = "jax_compilation_cache_dir"  # a setting of JAX
COMPILED_BYTES = 200_000_000  # of compiled programs that are kept; an update has some 100 kB


def prepare_jax(device: str) -> None:
    """Set what JAX reads when it is first imported: no preallocation of GPU memory, and the device.

    Raises FeverError if `device` is "gpu" and JAX has none.
    """
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # XLA's own lines; what concerns a run is raised as well
    if device == "cpu" or (device == "auto" and not Path("/dev/nvidia0").exists() and not Path("/dev/kfd").exists()):
        os.environ.setdefault("JAX_PLATFORMS", "cpu")
    import jax

    if device == "gpu" and jax.default_backend() == "cpu":
        raise FeverError('JAX sees no GPU here; install it with: pip install "jax[cuda12]", or leave --device out')


def keep_compiled_programs() -> None:
    """Have JAX keep what it compiles in the user's cache folder: the next run with the same settings need not compile.

    Has no effect if the user has set JAX's own folder, or if there is no folder that can be written to. Programs hold
    machine code, so every kind of CPU and every version of JAX has a folder of its own, that only this user can write
    to. Only on Linux: reading them back crashed other systems (JAX 0.9 on macOS).
    """
    import jax

    if sys.platform != "linux" or getattr(jax.config, CACHE):
        return
    try:
        folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fever" / f"compiled-{_machine()}"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        usable = os.access(folder, os.W_OK) and folder.stat().st_uid == os.getuid()
    except (OSError, RuntimeError):  # no home folder
        return
    if usable:
        warnings.filterwarnings("ignore", "Error (reading|writing) persistent compilation cache")  # it compiles then
        jax.config.update(CACHE, str(folder))
        jax.config.update("jax_compilation_cache_max_size", COMPILED_BYTES)  # the oldest go; with a lock
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)


def _machine() -> str:
    """A short name for what machine code depends on: the CPU's kind and abilities, and JAX's version."""
    import jaxlib.version

    with open("/proc/cpuinfo", errors="replace") as file:  # the first core's part, up to an empty line
        lines = takewhile(str.strip, file)
        cpu = [
            line
            for line in lines
            if line.startswith(("model name", "flags", "Features", "CPU implementer", "CPU part"))
        ]
    words = [platform.machine(), jaxlib.version.__version__, *cpu]
    return hashlib.sha256("\n".join(words).encode()).hexdigest()[:16]


def limit_learner_threads(small: bool) -> None:
    """Let XLA compute on one thread if the network is small: distributing such short operations over threads costs more
    than it saves.

    Has an effect before JAX computes for the first time in this process. Compilation still uses all cores.
    """
    if small:
        os.environ.setdefault("PJRT_NPROC", "1")
