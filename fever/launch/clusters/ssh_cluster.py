"""Clusters of hosts that ssh reaches: their settings, and what can be done with them."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import field_validator

from fever.config import setting
from fever.errors import FeverError
from fever.launch.clusters import remains
from fever.launch.clusters.base import ClusterTarget, Say
from fever.launch.clusters.host_packages import describe_environment
from fever.launch.clusters.record import ClusterRecord
from fever.launch.clusters.ssh_up import SshBringUp, ask_hosts, stop_hosts
from fever.launch.doctor import Finding
from fever.launch.script_text import Word

CHECK_SECONDS = 60.0  # for a host to find out whether an environment could be set up on it


class Ssh(ClusterTarget):
    """Hosts that `ssh` reaches."""

    kind: Literal["ssh"] = "ssh"
    hosts: tuple[str, ...] = setting(
        ..., "as ssh knows them; the first that can be used gets the learner", min_length=1
    )
    user: Word | None = setting(None, "who logs in; null: what ssh's own configuration says")
    options: tuple[str, ...] = setting((), "further words for ssh, such as -p 2222")
    wheels: str | None = setting(None, "folder of wheels on every host, if the hosts have no package registry")
    min_hosts: int = setting(1, "hosts that must be usable, or nothing stays up", gt=0)

    @field_validator("hosts")
    @classmethod
    def _different(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for host in value:
            if host.startswith("-") or not host.strip():
                raise ValueError(f"{host!r} is not the name of a host")
        if len(set(value)) < len(value):
            raise ValueError("a host is named twice")
        return value

    def ssh_command(self, host: str) -> list[str]:
        """The words that run a command on a host."""
        return ["ssh", *self.options, *(["-l", self.user] if self.user else []), host]

    def bring_up(self, file: str, record: ClusterRecord | None, folder: Path, say: Say) -> ClusterRecord:
        return SshBringUp(self, file, record, folder, say).run()

    def take_down(self, cluster_id: str, hosts: set[str], folder: Path, say: Say) -> dict[str, list[str]]:
        return stop_hosts(self, cluster_id, sorted(hosts))

    def describe_remains(self, record: ClusterRecord, hosts: list[str]) -> dict[str, list[str]]:
        return remains.describe_remains(self, record, hosts)

    def purge(self, record: ClusterRecord | None, say: Say) -> list[str]:
        return remains.purge(self, record, say)

    @property
    def possible_hosts(self) -> set[str]:
        return set(self.hosts)

    def describe_hosts(self, record: ClusterRecord) -> list[dict[str, Any]]:
        more = {"cluster": record.id, "environment": record.environment, "measure": True}
        return [_describe(host, facts) for host, facts in ask_hosts(self, "look", self.hosts, **more).items()]

    def examine(self, on: str, runs: Path) -> list[Finding]:
        """What can be seen of the hosts, all at once; nothing is changed on them."""
        more = {"cluster": "", "environment": describe_environment(self.packages, self.extras).name}
        replies = ask_hosts(self, "look", self.hosts, measure=True, list=True, **more)
        to_set_up = [
            host for host, facts in replies.items() if not isinstance(facts, FeverError) and not facts["python"]
        ]
        problems = ask_hosts(self, "check", to_set_up, wheels=self.wheels, seconds=CHECK_SECONDS, **more)
        findings = [_examine(host, facts, problems.get(host)) for host, facts in replies.items()]
        return findings + [note for host, facts in replies.items() for note in _unused(on, host, facts)]


def _describe(host: str, facts: Any) -> dict[str, Any]:
    """One row of `fever status`, from what a host says of itself or the error of one that does not answer."""
    if isinstance(facts, FeverError):
        return {"host": host, "state": "lost", "reason": str(facts), "busy": 0.0, "cores": 0}
    row = {"host": host, "state": "up", "reason": "", "busy": facts["busy"], "cores": facts["cores"]}
    if facts["node"] is None:
        return {**row, "state": "down", "reason": "no node of Ray runs on it; fever up starts one"}
    return {**row, "cores": facts["node"].get("cores", facts["cores"])}


def _examine(host: str, facts: Any, checked: Any) -> Finding:
    """One line of `fever doctor`, from the same, and from whether an environment could be set up there."""
    if isinstance(facts, FeverError):
        return Finding("problem", host, str(facts))
    if problem := str(checked) if isinstance(checked, FeverError) else (checked or {}).get("problem"):
        return Finding("problem", host, problem)
    home, scratch = (facts["free"][place] / 2**30 for place in ("home", "scratch"))
    has = facts["versions"]
    made = f"Python {has['Python']}, Ray {has['ray']}" if has else "its environment is set up by the first fever up"
    space = f"{home:.0f} GiB free at home, {scratch:.0f} in scratch"
    text = f"{facts['cores']} cores, {facts['busy']:.1f} in use, {space}; {made}"
    return Finding("problem" if has and "none" in has.values() else "ok", host, text)


def _unused(on: str, host: str, facts: Any) -> list[Finding]:
    """Environments that nothing has used for a long time."""
    rows = [] if isinstance(facts, FeverError) else facts["environments"]
    unused = [remains.describe_environment_row(row) for row in rows if remains.is_unused(row)]
    return [Finding("note", host, f"{row}; fever down {on} --purge removes it") for row in unused]
