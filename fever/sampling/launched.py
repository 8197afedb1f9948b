"""A run's wait for the machines that an autoscaler launches for it."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING

from fever.text import format_duration, say

if TYPE_CHECKING:
    from fever.sampling.ray_cluster import Cluster

LAUNCH_SECONDS = 600.0  # for them to join
LOOK_SECONDS = 0.5


def await_launched(cluster: Cluster, wanted: int) -> None:
    """Wait until so many machines besides this one have joined: the number of workers, and the batch of on-policy
    algorithms, are those of the start. After LAUNCH_SECONDS the run begins with the machines that are there."""
    began, here, told = time.monotonic(), 0, False
    while (here := len(cluster.machines()) - 1) < wanted and time.monotonic() - began < LAUNCH_SECONDS:
        if not told:
            told, limit = True, format_duration(LAUNCH_SECONDS)
            what = f"{wanted - here} of {wanted} machines are being launched"
            say(f"{what}; the run begins when they are there, or after {limit} without them", sys.stderr)
        time.sleep(LOOK_SECONDS)
    if here < wanted:
        say(f"only {here} of {wanted} machines are there; workers are started on the others when they join", sys.stderr)
    elif told:
        say(f"all {wanted} machines are there after {format_duration(time.monotonic() - began)}", sys.stderr)
