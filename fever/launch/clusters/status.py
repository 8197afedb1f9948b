"""How a cluster stands, for `fever status`."""

from __future__ import annotations

import time
from typing import Any

from fever.errors import FeverError
from fever.launch.clusters import ssh_up as clusters
from fever.launch.clusters.jobs import jobs_of
from fever.launch.clusters.link import Connection
from fever.launch.clusters.ssh_up import Record
from fever.launch.targets import Aws


def describe(record: Record) -> dict[str, Any]:
    """Hosts with the cores in use, jobs, hours."""
    cost: dict[str, Any] = {}
    if isinstance(record.target, Aws):
        from fever.launch import aws

        cost = aws.status(record.target, record.name, record.folder)
        try:
            with Connection(record) as connection:
                hosts = [_describe_node(node) for node in connection.jobs.nodes()]
        except FeverError as error:  # what it costs is known all the same
            hosts = [{"host": record.head, "state": "lost", "reason": str(error), "busy": 0.0, "cores": 0}]
    else:
        hosts = [_describe_host(host, facts) for host, facts in clusters.look_at(record).items()]
    rows = [job.describe() for job in jobs_of(record)]
    hours = (time.time() - record.began) / 3600
    return {"name": record.name, "hours": hours, "hosts": hosts, "jobs": rows, "cost": cost}


def _describe_host(host: str, facts: Any) -> dict[str, Any]:
    """One host, by what it says of itself, or by the reason why it says nothing."""
    if isinstance(facts, FeverError):
        return {"host": host, "state": "lost", "reason": str(facts), "busy": 0.0, "cores": 0}
    row = {"host": host, "state": "up", "reason": "", "busy": facts["busy"], "cores": facts["cores"]}
    if facts["node"] is None:
        return {**row, "state": "down", "reason": "no node of Ray runs on it; fever up starts one"}
    return {**row, "cores": facts["node"].get("cores", facts["cores"])}


def _describe_node(node: dict[str, Any]) -> dict[str, Any]:
    """One machine, by what Ray says of it."""
    cores = (node.get("cpus") or [0, 0])[0]
    raylet = node.get("raylet") or {}
    state = "up" if raylet.get("state") == "ALIVE" else "lost"
    busy = round((node.get("cpu") or 0.0) / 100 * cores, 1)
    return {
        "host": node.get("hostname", ""),
        "state": state,
        "reason": raylet.get("stateMessage") or "",
        "busy": busy,
        "cores": cores,
    }
