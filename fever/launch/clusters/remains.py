"""What `fever down` leaves on hosts that ssh reaches, and `--purge` removes: environments, and copies of runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fever.errors import FeverError
from fever.launch.clusters.host_packages import describe_environment
from fever.launch.clusters.record import ClusterRecord
from fever.launch.clusters.ssh_up import ask_hosts
from fever.launch.jobs import list_jobs
from fever.text import format_bytes

if TYPE_CHECKING:
    from fever.launch.clusters.ssh_cluster import Ssh

LOOK_SECONDS = 60.0  # for a host to find out how large that is
PURGE_SECONDS = 300.0  # for a host to remove what it has
UNUSED_DAYS = 30  # after which an environment is said to be unused, and removed by `--purge` of any cluster


def describe_remains(target: Ssh, record: ClusterRecord, hosts: Iterable[str]) -> dict[str, list[str]]:
    """What stays on hosts whose nodes have ended, by host; empty where nothing does."""
    more = {"name": record.name, "runs": record.runs, "seconds": LOOK_SECONDS}
    found = {}
    for host, reply in ask_hosts(target, "remains", hosts, **more).items():
        if isinstance(reply, FeverError):
            found[host] = [f"perhaps environments and copies of runs ({reply})"]
            continue
        found[host] = [describe_environment_row(row) for row in reply["environments"]]
        if (runs := reply["runs"])["count"]:
            what = "the copy of a run" if runs["count"] == 1 else f"the copies of {runs['count']} runs"
            found[host].append(f"{what} in {record.runs} ({format_bytes(runs['bytes'])})")
    return found


def describe_environment_row(row: dict[str, Any]) -> str:
    """One environment of a host."""
    use = ""
    if row["users"]:
        use = f", used by {', '.join(row['users'])}"
    elif is_unused(row):
        use = f", unused for {row['days']:.0f} days"
    return f"environment {row['name']} ({format_bytes(row['bytes'])}{use})"


def is_unused(row: dict[str, Any]) -> bool:
    """Whether nothing has used an environment for a long time."""
    return row["days"] > UNUSED_DAYS and not row["users"]


def purge(target: Ssh, record: ClusterRecord | None, say: Callable[[str], None]) -> list[str]:
    """Remove from its hosts a cluster's environments, those unused for UNUSED_DAYS, and copies of runs that are here;
    returns what could not be removed, and hosts that did not answer."""
    names = set() if target.python else {describe_environment(target.packages, target.extras).name}
    names |= {record.environment} if record and not target.python else set()
    hosts = list(dict.fromkeys([*target.hosts, *(record.hosts if record else ())]))
    request = {"environments": sorted(names), "days": UNUSED_DAYS, "jobs": sorted(_jobs_here(str(target.name)))}
    request |= {"name": str(target.name), "runs": record.runs if record else target.runs}
    left = []
    for host, reply in ask_hosts(target, "purge", hosts, seconds=PURGE_SECONDS, **request).items():
        if isinstance(reply, FeverError):
            left.append(f"{host}: {reply}")
            continue
        for row in reply["removed"]:
            say(f"{host}: removed {row['what']} ({format_bytes(row['bytes'])})")
        for what in reply["kept"]:
            say(f"{host}: kept {what}")
        if not reply["removed"] and not reply["kept"]:
            say(f"{host}: nothing to remove")
    return left


def _jobs_here(cluster: str) -> set[str]:
    """The names on the head of a cluster's jobs that have ended, and of which everything is on this machine."""
    mine = [job for job in list_jobs() if job.home and job.facts.get("cluster") == cluster]
    return {Path(job.facts["remote_path"]).parent.name for job in mine if "remote_path" in job.facts}
