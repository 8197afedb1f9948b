"""What all kinds of clusters have in common: machines of the user's own, on which a Ray stays up between jobs."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import field_validator

from fever.algos.registry import find_provider, without_prefix
from fever.config import setting
from fever.errors import FeverError
from fever.files import user_path
from fever.job import JobFolder
from fever.launch.clusters import jobs
from fever.launch.clusters.link import ClusterDown, Link, SshLink, record_of
from fever.launch.clusters.package import pack
from fever.launch.clusters.record import (
    CLUSTER_NAME,
    ID,
    TOKEN,
    ClusterRecord,
    changing,
    find_record,
    forget,
    may_run,
    record_folder,
    require_record,
)
from fever.launch.clusters.watch import ClusterWatch, fetch
from fever.launch.targets import Target
from fever.text import say

if TYPE_CHECKING:
    from fever.launch.dispatch import Order
    from fever.launch.doctor import Finding
    from fever.launch.jobs import Job

Say = Callable[[str], None]


class ClusterTarget(Target):
    """Settings of every cluster, and what can be done with it."""

    named_by_file: ClassVar[bool] = True
    is_remote: ClassVar[bool] = True
    starts_ray: ClassVar[bool] = True  # by `fever up`; False: its Ray runs already
    keeps_runs: ClassVar[bool] = True  # its machines keep copies of run directories after `fever down`

    name: str | None = setting(None, "the cluster's name; null: the file's")
    python: str | None = setting(
        None, "an interpreter on its machines that has fever's dependencies; null: one is set up"
    )
    packages: tuple[str, ...] = setting((), "further packages for the interpreter that is set up")
    extras: tuple[str, ...] | None = setting(
        None, "fever's extras that it has: render, mujoco, box2d, atari, rllib, tune; null: those installed here"
    )
    max_hosts: int | None = setting(None, "hosts that a job uses, the head among them; null: all", gt=0)
    runs: str = setting("~/.fever/runs", "folder of run directories on its head", min_length=1)

    @field_validator("name")
    @classmethod
    def _plain_name(cls, value: str | None) -> str | None:
        if value is not None and not CLUSTER_NAME.fullmatch(value):
            raise ValueError("a cluster's name has letters, digits, dots and underscores only")
        return value

    # what a kind of cluster implements

    def bring_up(self, file: str, record: ClusterRecord | None, folder: Path, say: Say) -> ClusterRecord:
        """Start what is missing of the cluster and write its record; `record`: the one it has if it is up already.

        `folder`: the record folder, with Ray's token. If the cluster cannot be brought up, nothing of it remains.
        """
        raise NotImplementedError

    def take_down(self, cluster_id: str, hosts: set[str], folder: Path, say: Say) -> dict[str, list[str]]:
        """End everything of a cluster; returns what is left, by host."""
        raise NotImplementedError

    def describe_hosts(self, record: ClusterRecord) -> list[dict[str, Any]]:
        """A row for every machine, with host, state, reason, busy and cores."""
        raise NotImplementedError

    def describe_cost(self, record: ClusterRecord) -> dict[str, Any]:
        """What the cluster costs; empty if nothing is known of that."""
        return {}

    def describe_remains(self, record: ClusterRecord, hosts: list[str]) -> dict[str, list[str]]:
        """What stays on machines that were shut down, by host."""
        return {}

    def purge(self, record: ClusterRecord | None, say: Say) -> list[str]:
        """Remove what stays on its machines, of a cluster that is down; returns what could not be removed."""
        return []

    def plan(self, record_folder: Path) -> list[str]:
        """What `up` would make, line by line; nothing is changed."""
        raise FeverError(f"up --dry-run is for kind: aws; to check the machines of kind: {self.kind}, use fever doctor")

    @property
    def possible_hosts(self) -> set[str]:
        """The hosts on which an `up` that was killed may have started something."""
        return set()

    @property
    def job_variables(self) -> dict[str, str]:
        """Environment variables of the process that drives a job, besides those of Ray."""
        return {}

    # up and down

    def up(self, file: str, say: Say) -> ClusterRecord:
        """Bring the cluster up, or what is missing of it; says a line for every host."""
        with changing(str(self.name)) as folder:
            record = find_record(str(self.name))
            if record is not None:
                record.require_file(file)
                record.require_settings(self)
            elif not (may_run(folder) and (folder / TOKEN).exists()):
                JobFolder(folder).write_token()  # one that an `up` left which was killed is of no cluster
            return self.bring_up(str(user_path(file).resolve()), record, folder, say)

    def down_unfinished(self, say: Say, force: bool = False) -> dict[str, list[str]] | None:
        """Remove what a killed `up` left behind; None if there is nothing."""
        folder = record_folder(str(self.name))
        if not may_run(folder):
            return None
        with changing(str(self.name)):
            left = self.take_down(JobFolder(folder).read_text(ID) or "", self.possible_hosts, folder, say)
            if force or not any(left.values()):
                forget(folder)
        return left

    # jobs

    def require_up(self, file: str) -> None:
        """Refuse to send jobs to a cluster that is not up."""
        require_record(self, file)

    def open_link(self, file: str) -> Link:
        """A connection for a new job."""
        return SshLink(require_record(self, file))

    def connect(self, job: Job) -> Link:
        """A connection to the cluster that a job was submitted to; raises ClusterDown if that is no longer up."""
        if (record := record_of(job)) is None:
            raise ClusterDown(f"the cluster of {job.name} is down; what was fetched is in {job.run}")
        return SshLink(record)

    def run(self, order: Order) -> int:
        """Send the code and the run directory, and have them trained; Ctrl-C detaches, the run continues."""
        if others := [name for name in order.options if name != "hosts"]:
            first = f"--{others[0].replace('_', '-')}"
            raise FeverError(f"{first} works for schedulers and MPI only; for {order.on}, set it in the file")
        if self.max_hosts is not None and (order.config.search is not None or find_provider(order.config.algo)):
            raise FeverError("--hosts: searches and RLlib's algorithms place their processes on all hosts; omit it")
        if order.dry_run:
            raise FeverError("--dry-run prints a scheduler's script, and a cluster has none")
        if order.config.start_from is not None and order.config.search is not None:
            raise FeverError(
                "--from: the machines of a cluster do not share the weights; search on this machine instead"
            )
        self.require_up(order.on)
        run = order.run_directory()
        order.reserve(run)
        order.check(environment=True)
        package = pack(without_prefix(order.config.algo), *order.config.names(), skip=run.parent)
        with self.open_link(order.on) as link:
            link.prepare()
            say(f"sending {package.what}", sys.stderr)
            job = jobs.submit(order.config, self, link, run, order.flags, package)
        return order.follow(job)

    def state(self, job: Job) -> tuple[str, str]:
        return jobs.state(job)

    def stop(self, job: Job, state: str, now: bool) -> str:
        if now:
            raise FeverError(f"a job on a cluster saves before it stops, within {jobs.STOP_SECONDS} s; omit --now")
        return jobs.stop(job)

    def watch(self, job: Job) -> ClusterWatch:
        return ClusterWatch(job)

    def fetch(self, job: Job) -> None:
        fetch(job)

    def examine(self, on: str, runs: Path) -> list[Finding]:
        raise FeverError("fever doctor --on checks schedulers, MPI and ssh hosts; for others use: fever status")


def down(record: ClusterRecord, say: Say, force: bool = False) -> dict[str, list[str]]:
    """End a cluster and forget it, with `force` even if something is left; returns what is left, by host."""
    with changing(record.name):
        left = record.target.take_down(record.id, set(record.hosts), record.folder, say)
        if force or not any(left.values()):
            forget(record.folder)
        else:
            replace(record, hosts={host: 0 for host, things in left.items() if things}).write()
    return left
