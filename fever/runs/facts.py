"""Versions, machine and git state: what a run directory records about where the run was started."""

from __future__ import annotations

import os
import sys
import time
from typing import Any


def facts() -> dict[str, Any]:
    """Versions, machine and git state, for the run directory."""
    import platform
    from importlib.metadata import version

    from fever import __version__

    packages = ("jax", "jaxlib", "numpy", "gymnasium", "ray", *(("torch",) if "torch" in sys.modules else ()))
    return {
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "command": sys.argv,
        "fever": __version__,
        "python": platform.python_version(),
        "packages": {name: version(name) for name in packages},
        "system": platform.platform(),
        "cores": os.cpu_count(),
        "git": git_state(),
    }


def git_state() -> dict[str, Any] | None:
    """Commit and whether there were changes, of the folder where training was started."""
    import subprocess

    def git(*words: str) -> str:
        command = ["git", *words]
        return subprocess.run(command, capture_output=True, text=True, timeout=5, check=True).stdout.strip()

    try:
        return {"commit": git("rev-parse", "HEAD"), "changed": bool(git("status", "--porcelain"))}
    except (OSError, subprocess.SubprocessError):
        return None
