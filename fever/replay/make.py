"""Makes experience for a number of workers, after checking that the replay buffer fits into memory."""

from __future__ import annotations

import math

from fever.errors import FeverError
from fever.replay.buffer import ReplaySpec, check_memory
from fever.replay.experience import Experience, ExperienceSpec, LocalExperience
from fever.replay.shards import RayExperience
from fever.sampling.ray_machines import machines_in_reach
from fever.system import free_memory


def _check_shards(spec: ReplaySpec, shards: int) -> None:
    """Raise FeverError if the shards do not fit into memory, spread over machines like this one."""
    fullest = math.ceil(shards / len(machines_in_reach()))  # most shards on one machine
    free = free_memory() if fullest < shards else None
    check_memory(spec, shards, None if free is None else free * shards // fullest)


def make_experience(spec: ExperienceSpec, workers: int, generation: int) -> Experience:
    """Experience from this process (0 workers), or from explorers and shards as Ray actors."""
    if workers:
        _check_shards(spec.replay, spec.shards)
    else:
        check_memory(spec.replay, 1)
    steps = spec.sampler.steps if workers else spec.steps_between_draws
    least = (steps + spec.exploration.n_step) * spec.sampler.envs * (1 + spec.exploration.her)
    if spec.replay.capacity < least:
        raise FeverError(f"buffer={spec.replay.capacity * spec.shards} is too small: {least} transitions come at once")
    if workers == 0:
        return LocalExperience(spec, generation)
    return RayExperience(spec, workers, generation)
