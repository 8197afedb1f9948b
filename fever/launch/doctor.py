"""`fever doctor`: what is installed on this machine, and settings of it that are known to cause trouble."""

from __future__ import annotations

import os
import platform
import resource
import shutil
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Literal, NamedTuple

REQUIRED = ("fever", "jax", "jaxlib", "numpy", "gymnasium", "ray", "pydantic", "safetensors")
OPTIONAL = {  # module -> fever's extra, what it is for
    "ale_py": ("atari", "Atari environments"),
    "Box2D": ("box2d", "Box2D environments"),
    "mujoco": ("mujoco", "MuJoCo environments"),
    "pygame": ("render", "drawing the classic environments"),
    "imageio_ffmpeg": ("render", "mp4 videos"),
    "torch": ("rllib", "RLlib's algorithms"),
    "optuna": ("tune", "fever tune --search optuna"),
    "boto3": ("aws", "clusters on AWS"),
    "onnx": ("onnx", "fever export --onnx"),
    "wandb": ("wandb", "--log wandb"),
    "mlflow": ("mlflow", "--log mlflow"),
}


class Finding(NamedTuple):
    mark: Literal["ok", "note", "problem"]
    topic: str
    text: str


def examine() -> list[Finding]:
    """All findings about this machine, in a fixed order."""
    return [*_software(), *_hardware(), *_accelerators(), *_options(), *_traps()]


def _software() -> list[Finding]:
    findings = [Finding("ok", "python", platform.python_version())]
    for name in REQUIRED:
        try:
            findings.append(Finding("ok", name, version(name)))
        except PackageNotFoundError:
            findings.append(Finding("problem", name, f"not installed; install it with: pip install {name}"))
    return findings


def _hardware() -> list[Finding]:
    from fever.sampling.cores import claimed_cores, core_list
    from fever.system import usable_cores

    cores, usable = os.cpu_count() or 1, usable_cores()
    claimed = claimed_cores()
    bound = f"; workers of runs (--cpus-per-worker) are bound to {core_list(claimed)}" if claimed else ""
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
    free = shutil.disk_usage(".").free / 2**30
    return [
        Finding("ok" if usable == cores else "note", "cores", f"{usable} usable of {cores}{bound}"),
        Finding("ok", "memory", f"{memory:.1f} GiB"),
        Finding("ok" if free > 2 else "problem", "disk", f"{free:.1f} GiB free here"),
    ]


def _accelerators() -> list[Finding]:
    from fever.algos.device import prepare_jax

    prepare_jax("auto")
    import jax

    devices = [device.device_kind for device in jax.devices()]
    if jax.default_backend() != "cpu":
        return [Finding("ok", "accelerator", ", ".join(devices))]
    if Path("/dev/nvidia0").exists():
        return [Finding("note", "accelerator", 'a GPU is there, but JAX cannot use it: pip install "jax[cuda12]"')]
    return [Finding("ok", "accelerator", "none; the learner uses the CPU")]


def _options() -> list[Finding]:
    findings = []
    for module, (extra, purpose) in OPTIONAL.items():
        if find_spec(module):
            findings.append(Finding("ok", module, purpose))
        else:
            findings.append(Finding("note", module, f'not installed ({purpose}): pip install "fever[{extra}]"'))
    return findings


def _traps() -> list[Finding]:
    findings = []
    if os.environ.get("LD_PRELOAD"):
        findings.append(Finding("note", "LD_PRELOAD", "is set; it is loaded into every process and may break Ray"))
    if os.environ.get("RAY_ADDRESS"):
        findings.append(Finding("note", "RAY_ADDRESS", "is set; fever starts a private Ray all the same"))
    if os.environ.get("OMP_NUM_THREADS", "1") != "1":
        findings.append(
            Finding("note", "OMP_NUM_THREADS", "is set; workers use one thread, or --cpus-per-worker, all the same")
        )
    shared = Path("/dev/shm")
    if shared.is_dir() and shutil.disk_usage(shared).total < 2**30:
        findings.append(Finding("note", "/dev/shm", "is under 1 GiB; Ray's object store will use the disk, slowly"))
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < 1024:
        findings.append(Finding("problem", "open files", f"limited to {soft}; Ray needs 1024: ulimit -n 4096"))
    if os.environ.get("http_proxy") or os.environ.get("HTTP_PROXY"):
        findings.append(Finding("note", "proxy", "http_proxy is set; Ray's own connections should be in no_proxy"))
    return findings or [Finding("ok", "known traps", "none found")]
