"""Functions that the tests of several rooms use."""

from __future__ import annotations

import contextlib
import copy
import io
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fever.runs.run import Run
from fever.sampling.spec import Fragment

ROOT = Path(__file__).parent.parent
SEEDS = [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2))]  # of trainings that must reach a return


def run_fever(*words: str, cwd: Path, timeout: float = 300, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run the command line in a subprocess, as a user would, with the tests' environments importable."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "120", **variables}
    command = [sys.executable, "-m", "fever", *words]
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=timeout)


def call_fever(*words: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """As `run_fever`, in this process: a second sooner, for commands that train nothing."""
    from fever.cli.main import _run

    out, err, before = io.StringIO(), io.StringIO(), sys.argv
    sys.argv = ["fever", *words]
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), contextlib.chdir(cwd or "."):
            code = _run()
    finally:
        sys.argv = before
    return subprocess.CompletedProcess(words, code, out.getvalue(), err.getvalue())


def split(fragment: Fragment, count: int) -> list[Fragment]:
    """Split a fragment into `count` fragments, each with a part of its environments."""
    parts = [copy.copy(fragment) for _ in range(count)]
    for index, part in enumerate(parts):
        part.arrays = {
            name: np.split(array, count, 0 if name == "state" else 1)[index] for name, array in fragment.arrays.items()
        }
    return parts


def changed(fragment: Fragment, **arrays: np.ndarray) -> Fragment:
    """A copy of a fragment with some arrays replaced."""
    other = copy.copy(fragment)
    other.arrays = {**fragment.arrays, **arrays}
    return other


def with_other_phantoms(fragment: Fragment) -> Fragment:
    """A copy of a fragment whose invalid rows have random rewards, log probabilities and actions."""
    rng, arrays, valid = np.random.default_rng(5), fragment.arrays, fragment.arrays["valid"]
    return changed(
        fragment,
        rewards=np.where(valid, arrays["rewards"], rng.normal(0, 100, valid.shape).astype(np.float32)),
        log_probs=np.where(valid, arrays["log_probs"], rng.normal(-5, 3, valid.shape).astype(np.float32)),
        actions=np.where(valid[..., None], arrays["actions"], 1 - arrays["actions"]),
    )


def same_arrays(here: dict[str, np.ndarray], there: dict[str, np.ndarray]) -> bool:
    """Whether both have the same names and, bit by bit, the same arrays."""
    return here.keys() == there.keys() and all(np.array_equal(here[name], there[name]) for name in here)


def wait_for(condition: Callable[[], Any], what: str, seconds: float = 120, pause: float = 0.02) -> Any:
    """Wait until `condition()` is true, and return its value. Fails after `seconds`."""
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline, f"no {what} within {seconds} s"
        time.sleep(pause)
    return found


def processes_with(variable: str) -> list[str]:
    """Command lines of the processes with this NAME=VALUE in their environment."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if variable.encode() in (folder / "environ").read_bytes():
                found.append((folder / "cmdline").read_text().replace("\0", " "))
        except OSError:
            continue
    return found


def without_ray(text: str) -> str:
    """The text without log lines of Ray's own processes, which may appear at any time on a busy machine."""
    own = re.compile(r"\[\d{4}-\d\d-\d\d .* [EW] \d+|\S*\(raylet\)")
    return "".join(line for line in text.splitlines(keepends=True) if not own.match(line))


def has_helped(run: Path, host: str) -> bool:
    """Whether a run has episodes of workers that joined it on this host while it trained."""
    log = (run / "log.txt").read_text() if (run / "log.txt").is_file() else ""
    joined = {int(index) for index in re.findall(rf"worker (\d+) joins on {host}\b", log)}
    return any(row["worker"] in joined for row in Run(run).episodes())


# A user's environment in a project that is not installed on the hosts. Its steps wait; on the hosts in %r it cannot be
# imported.
WAREHOUSE = '''
import socket, time
import gymnasium as gym
import numpy as np

if socket.gethostname() in %r:
    raise ImportError("libwarehouse.so is not here")

class Warehouse(gym.Env):
    """Steps of 2 ms, episodes of 20 steps."""
    observation_space = gym.spaces.Box(-1, 1, (2,))
    action_space = gym.spaces.Discrete(2)
    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.left = 20
        return np.zeros(2, np.float32), {}
    def step(self, action):
        time.sleep(0.002)
        self.left -= 1
        return np.zeros(2, np.float32), float(action), False, self.left == 0, {}
'''


def child(parent: int, name: str) -> int:
    """The process id of a program that a process has started."""
    for status in Path("/proc").glob("[0-9]*/status"):
        try:
            fields = dict(line.split(":\t", 1) for line in status.read_text().splitlines() if ":\t" in line)
        except OSError:
            continue
        if fields["Name"] == name and int(fields["PPid"]) == parent:
            return int(fields["Pid"])
    raise AssertionError(f"no {name}")
