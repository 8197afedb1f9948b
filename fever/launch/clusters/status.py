"""The state of a cluster, for `fever status`."""

from __future__ import annotations

import time
from typing import Any

from fever.launch.clusters.jobs import jobs_of
from fever.launch.clusters.record import ClusterRecord


def describe(record: ClusterRecord) -> dict[str, Any]:
    """Hosts with their cores in use, jobs, hours since it came up, and cost."""
    return {
        "name": record.name,
        "hours": (time.time() - record.began) / 3600,
        "hosts": record.target.describe_hosts(record),
        "jobs": [job.describe() for job in jobs_of(record)],
        "cost": record.target.describe_cost(record),
    }
