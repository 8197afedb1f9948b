"""`--workers auto`: time the environment and choose the number of worker processes."""

from __future__ import annotations

import os
import resource
import sys
import time
from contextlib import suppress
from pathlib import Path

import numpy as np

from fever.envs.contract import Envs
from fever.errors import FeverError
from fever.job import current_job
from fever.policy import distribution_for
from fever.policy.networks import FORBIDDEN
from fever.policy.spaces import mask_width
from fever.system import descendants

PROBE_SECONDS = 0.5
PROBE_SLICES = 5
CHEAP_STEP = 200e-6  # seconds; below it one process is fastest: the learner and the transfer cost more than the steps
WAITING_SHARE = 0.5  # of a step's time spent computing, below which an environment counts as mostly waiting
MOST_PER_CORE = 8  # workers per core, for environments that mostly wait


def choose_workers(envs: Envs, cores: int, places: int | None = None) -> tuple[int, str]:
    """The number of workers for this environment on this many cores, and the reason as a sentence. `places`: how many
    workers fit there, if each gets cores of its own."""
    step, computing = time_steps(envs)
    cost = f"a step takes {step * 1e6:.0f} us" if step < 1e-3 else f"a step takes {step * 1e3:.1f} ms"
    if step < CHEAP_STEP:
        return 0, f"{cost}, so one process is fastest"
    if places is not None:
        return places, f"{cost}, and {places} fit on {cores} cores"
    if computing < WAITING_SHARE:
        workers = min(MOST_PER_CORE, max(1, round(1 / max(computing, 1e-3)))) * cores
        return workers, f"{cost} and waits {1 - computing:.0%} of that, so {workers} workers share {cores} cores"
    if cores == 1:
        return 0, f"{cost}, but there is only one core"
    return cores, f"{cost}, so each of the {cores} cores gets a worker"


def time_steps(envs: Envs) -> tuple[float, float]:
    """Seconds per step of one environment with random actions, and the share of them spent computing.

    The fastest of a few slices counts, without the time in which other programs had the core: on a busy machine an
    environment must look neither slow nor waiting.
    """
    observations = envs.reset([0] * envs.count)
    try:
        distribution = distribution_for(envs.action)
    except ValueError as error:
        raise FeverError(f"{envs.name} cannot be trained on: {error}") from error
    mask = mask_width(envs.observation)
    noise = distribution.noise(np.random.default_rng(0), (64, envs.count))
    parameters = np.zeros((envs.count, distribution.outputs), np.float32)
    slices = []
    for _ in range(PROBE_SLICES):
        others, own, queued, steps = _others_seconds(), time.process_time(), _queued_seconds(), 0
        start = time.perf_counter()
        while not steps or (time.perf_counter() - start < PROBE_SECONDS / PROBE_SLICES and steps < 500):
            if mask:
                parameters = np.where(observations[:, -mask:] > 0, np.float32(0), np.float32(FORBIDDEN))
            actions = distribution.sample(parameters, noise[steps // envs.count % len(noise)])
            observations = envs.step(distribution.to_env(actions)).observations
            steps += envs.count
        elapsed = max(time.perf_counter() - start - (_queued_seconds() - queued), 1e-9)
        computed = time.process_time() - own + _others_seconds() - others
        slices.append((elapsed / steps, min(1.0, computed / elapsed)))
    return min(slices)


def _others_seconds() -> float:
    """CPU seconds of this process's descendants (simulators); only of finished ones while a private Ray runs, whose own
    processes must not count."""
    ended, ticks = resource.getrusage(resource.RUSAGE_CHILDREN), 0
    ray = sys.modules.get("ray")
    if ray is None or not ray.is_initialized() or current_job() is not None:
        for pid in descendants(os.getpid()):
            with suppress(OSError):  # it just ended
                fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
                ticks += sum(map(int, fields[11:15]))  # its own and that of its finished children
    return ended.ru_utime + ended.ru_stime + ticks / os.sysconf("SC_CLK_TCK")


def _queued_seconds() -> float:
    """Seconds in which this thread was ready but another program had the core; 0 if the system does not report it."""
    try:
        with open("/proc/thread-self/schedstat") as file:
            return int(file.read().split()[1]) / 1e9
    except (OSError, IndexError, ValueError):
        return 0.0
