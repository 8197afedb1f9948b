"""Clusters of EC2 instances: their settings, and what can be done with them."""

from __future__ import annotations

import ipaddress
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import field_validator, model_validator

from fever.config import setting
from fever.errors import FeverError
from fever.job import AUTOSCALED
from fever.launch.aws import cluster
from fever.launch.clusters.base import ClusterTarget, Say
from fever.launch.clusters.link import SshLink
from fever.launch.clusters.record import TOKEN, ClusterRecord
from fever.launch.clusters.ssh import ask
from fever.launch.clusters.ssh_up import absolute_path
from fever.launch.script_text import ScriptSettings, Word


class AwsWorkers(ScriptSettings):
    """The instances besides the head."""

    type: str = setting("m5.large", "instance type")
    count: int = setting(2, "the largest number of workers", ge=0)
    least: int | None = setting(None, "the number that stays when nothing runs; null: count", ge=0)
    spot: bool = setting(True, "spot instances: cheaper, and AWS may take them back")

    @model_validator(mode="after")
    def _ordered(self) -> AwsWorkers:
        if self.least is not None and self.least > self.count:
            raise ValueError(f"least={self.least} is more than count={self.count}")
        return self


class Aws(ClusterTarget):
    """A head and workers on EC2. Jobs reach the head over ssh, like the head of any other cluster."""

    keeps_runs: ClassVar[bool] = False

    kind: Literal["aws"] = "aws"
    region: str = setting(..., "region, such as us-west-2")
    head: str = setting("m5.large", "instance type of the head, where the learner runs")
    workers: AwsWorkers = setting(AwsWorkers(), "the other instances")
    image: str | None = setting(None, "image (ami-...); null: the newest Ubuntu 24.04 of Canonical")
    user: Word = setting("ubuntu", "user of that image")
    disk: int = setting(50, "disk of every instance in GB", gt=0)
    idle_minutes: float = setting(10.0, "after which workers beyond `least` that do nothing are ended", gt=0)
    allow: str | None = setting(None, "addresses that may use ssh, such as 1.2.3.4/32; null: the caller's own")

    @field_validator("allow")
    @classmethod
    def _network(cls, value: str | None) -> str | None:
        return None if value is None else str(ipaddress.ip_network(value))

    @field_validator("interface")
    @classmethod
    def _no_interface(cls, value: str | None) -> str | None:
        if value is not None:
            raise ValueError("instances have one network interface")
        return value

    @property
    def job_variables(self) -> dict[str, str]:
        return {AUTOSCALED: str(self.workers.count)}

    def bring_up(self, file: str, record: ClusterRecord | None, folder: Path, say: Say) -> ClusterRecord:
        name, python = str(self.name), self.python or "python3"
        request = {"action": "look", "cluster": "", "scratch": self.scratch, "python": python}
        head = cluster.up(self, name, folder, folder / TOKEN, say, lambda ssh: ask(ssh, request, python))
        made = ClusterRecord(
            name=name, id=head["id"], file=file, target=self, began=head["began"], ssh_command=head["ssh"],
            python=self.python or f"{head['home']}/.fever/env/bin/python", dashboard=head["dashboard"],
            address=head["address"], head=head["ssh"][-1].rpartition("@")[2],
            logs=f"{self.scratch}/ray/session_latest/logs", environment="",
            runs=absolute_path(self.runs, head["home"]), hosts={},
        )  # fmt: skip
        made.write()
        return made

    def take_down(self, cluster_id: str, hosts: set[str], folder: Path, say: Say) -> dict[str, list[str]]:
        return {"AWS": cluster.down(self, str(self.name), folder, say)}

    def describe_hosts(self, record: ClusterRecord) -> list[dict[str, Any]]:
        try:
            with SshLink(record) as link:
                return [_describe(node) for node in link.jobs.nodes()]
        except FeverError as error:  # what it costs is known all the same
            return [{"host": record.head, "state": "lost", "reason": str(error), "busy": 0.0, "cores": 0}]

    def describe_cost(self, record: ClusterRecord) -> dict[str, Any]:
        return cluster.status(self, record.folder)

    def plan(self, record_folder: Path) -> list[str]:
        return cluster.plan(self, str(self.name), record_folder)


def _describe(node: dict[str, Any]) -> dict[str, Any]:
    """One row of `fever status`, from what Ray says of a machine."""
    cores = (node.get("cpus") or [0, 0])[0]
    raylet = node.get("raylet") or {}
    return {
        "host": node.get("hostname", ""),
        "state": "up" if raylet.get("state") == "ALIVE" else "lost",
        "reason": raylet.get("stateMessage") or "",
        "busy": round((node.get("cpu") or 0.0) / 100 * cores, 1),
        "cores": cores,
    }
