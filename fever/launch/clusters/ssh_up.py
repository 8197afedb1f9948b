"""Starting and ending Ray on hosts that ssh reaches: `SshBringUp` is one `fever up`, `stop_hosts` a `fever down`."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fever.errors import FeverError
from fever.job import JobFolder
from fever.launch.clusters.host_packages import describe_environment
from fever.launch.clusters.jobs import unfetched_jobs
from fever.launch.clusters.record import ID, TOKEN, ClusterRecord
from fever.launch.clusters.ssh import ask, at_once
from fever.launch.rendezvous.rank import RAY
from fever.signals import signals_interrupt, signals_wait
from fever.text import format_duration

if TYPE_CHECKING:
    from fever.launch.clusters.ssh_cluster import Ssh

Say = Callable[[str], None]
Facts = dict[str, dict[str, Any]]  # host -> what `look` of on_host/agent.py said of it


class SshBringUp:
    """One `fever up`: starts what is missing of a cluster, and ends what it has started if that fails."""

    def __init__(self, target: Ssh, file: str, record: ClusterRecord | None, folder: Path, say: Say) -> None:
        self.target, self.file, self.record, self.say = target, file, record, say
        self.token = (folder / TOKEN).read_text()
        self.environment = describe_environment(target.packages, target.extras)
        files = JobFolder(folder)
        self.id = record.id if record else files.read_text(ID) or secrets.token_hex(6)
        files.write_text(ID, self.id)  # before anything runs, so that it can be found and ended
        self.folder = folder
        self.failed: dict[str, str] = {}  # host -> why it cannot be used
        self.started: list[str] = []  # hosts that this `up` has started Ray on
        self.left: dict[str, int] = {}  # hosts on which something may be left: `down` tries again
        self.outdated: list[str] = []  # hosts whose node runs with another environment than the file describes

    def run(self) -> ClusterRecord:
        try:
            with signals_interrupt():
                return self._run()
        except BaseException:
            with signals_wait(self.say):
                left = self._stop(self.started)
            if self.record is None and not left:
                (self.folder / ID).unlink(missing_ok=True)
            raise

    def _stop(self, hosts: list[str]) -> dict[str, list[str]]:
        """End the nodes on these hosts; returns what is left, by host, after saying so."""
        results = stop_hosts(self.target, self.id, hosts) if hosts else {}
        left = {host: things for host, things in results.items() if things}
        for host, things in left.items():
            self.say(f"{host}: could not be stopped, left: {', '.join(things)}")
        self.left |= dict.fromkeys(left, 0)
        return left

    def _run(self) -> ClusterRecord:
        self._stop_removed_hosts()
        facts = self._look()
        self._require_copies(facts)
        self._require_head(facts)
        facts = self._same_python(facts)
        facts = self._install(self._keep_running(facts))
        facts = self._same_versions(facts)
        nodes = self._start(facts)
        if len(nodes) < self.target.min_hosts:
            reasons = "; ".join(f"{host}: {reason}" for host, reason in self.failed.items())
            usable = f"{len(nodes)} of {len(self.target.hosts)} hosts" if nodes else "no host"
            result = "nothing is up" if self.record is None else "nothing was added to what is up"
            raise FeverError(f"{usable} can be used, {result}: {reasons}")
        if old := [host for host in nodes if host in self.outdated]:
            what = f"started with another environment than {self.file} describes now"
            self.say(f"{', '.join(old)}: {what}; fever down and fever up change that")
        head = next(host for host, node in nodes.items() if node["dashboard"])
        record = ClusterRecord(
            name=str(self.target.name), id=self.id, file=self.file, target=self.target,
            began=self.record.began if self.record and self.record.head == head else time.time(),
            ssh_command=self.target.ssh_command(head), python=nodes[head]["interpreter"],
            dashboard=nodes[head]["dashboard"], address=nodes[head]["address"], head=head,
            hosts=self.left | self._unusable() | {host: node["cores"] for host, node in nodes.items()},
            logs=f"{nodes[head]['scratch']}/r/session_latest/logs",
            environment=self.record.environment if self.record and head in self.outdated else self.environment.name,
            runs=absolute_path(self.target.runs, facts[head]["home"]),
        )  # fmt: skip
        record.write()
        return record

    def _unusable(self) -> dict[str, int]:
        """Hosts that were part of the cluster and cannot be used now; `down` stops what may run on them."""
        return {host: 0 for host in self.failed if self.record is not None and host in self.record.hosts}

    def _stop_removed_hosts(self) -> None:
        """End the nodes on hosts that the file no longer lists."""
        if self.record is None:
            return
        gone = [host for host in self.record.hosts if host not in self.target.hosts]
        if self.record.head in gone:
            raise FeverError(
                f"{self.record.head} is the head of {self.record.name}; take it down before you change that"
            )
        left = self._stop(gone)
        for host in gone:
            if host not in left:
                self.say(f"{host}: no longer in {self.file}, stopped")

    def _require_copies(self, usable: Facts) -> None:
        """Refuse to make another host the head while the old one cannot be used and has the only copy of a run."""
        if self.record is None or self.record.head in usable:
            return
        if names := ", ".join(job.name for job in unfetched_jobs(self.record)):
            what = f"{self.record.head}, the head of {self.record.name}, cannot be reached"
            how = f"if it is gone for good: fever down {self.file} --force"
            raise FeverError(f"{what} and may have the only copy of {names}; {how}")

    def _require_head(self, facts: Facts) -> None:
        """Refuse to start nodes anew that run while their head cannot be reached: it may be running, too."""
        running = [fact["node"] for fact in facts.values() if fact["node"]]
        if running and not any(map(_is_head, running)) and self.record and self.record.head in self.failed:
            raise FeverError(f"{self.record.head}, the head of {self.target.name}, cannot be reached; try again later")

    def _fail(self, host: str, reason: object) -> None:
        self.failed[host] = str(reason)
        self.say(f"{host}: {reason}")

    def _each(self, hosts: list[str], function: Callable[[str], Any]) -> dict[str, Any]:
        """Call a function for all hosts at once; hosts for which it fails are reported and left out from then on."""
        results = at_once({host: partial(function, host) for host in hosts})
        for host, result in results.items():
            if isinstance(result, FeverError):
                self._fail(host, result)
        return {host: result for host, result in results.items() if not isinstance(result, FeverError)}

    def _ask(self, host: str, action: str, **more: Any) -> dict[str, Any]:
        return ask_host(self.target, action, host, cluster=self.id, environment=self.environment.name, **more)

    def _look(self) -> Facts:
        return self._each(list(self.target.hosts), lambda host: self._ask(host, "look"))

    def _same_python(self, facts: Facts) -> Facts:
        """Leave out hosts whose Python is not the future head's, to the patch level as Ray demands, before anything is
        set up on them."""
        has = {host: (fact["versions"] or {"Python": fact["own_python"]})["Python"] for host, fact in facts.items()}
        for first in self._in_order(facts)[:1]:
            for host in facts:
                if has[host] != has[first]:
                    how = "all hosts of a cluster need the same; `python:` names another interpreter"
                    self._fail(host, f"has Python {has[host]}, but {first} has {has[first]}; {how}")
        return self._without_failed(facts)

    def _without_failed(self, facts: Facts) -> Facts:
        return {host: fact for host, fact in facts.items() if host not in self.failed}

    def _keep_running(self, facts: Facts) -> Facts:
        """Nodes that run keep their environment, unless their head is gone: then all are started again."""
        if not any(_is_head(fact["node"]) for fact in facts.values()):
            return facts
        running = {host: fact["node"]["interpreter"] for host, fact in facts.items() if fact["node"]}
        self.outdated = [host for host, python in running.items() if python != facts[host]["python"]]
        return {host: fact | ({"python": running[host]} if host in running else {}) for host, fact in facts.items()}

    def _install(self, facts: Facts) -> Facts:
        """Set up the environment on hosts that do not have it."""
        missing = [host for host in facts if facts[host]["python"] is None]
        packages = self.environment.requirements
        if missing:
            self.say(f"setting up {', '.join(missing)}: {len(packages)} packages, which takes minutes the first time")
        more = {"requirements": packages, "constraints": self.environment.constraints, "wheels": self.target.wheels}
        made = self._each(missing, lambda host: self._ask(host, "install", **more))
        for host, reply in made.items():
            self.say(f"{host}: environment {self.environment.name} in {format_duration(reply['seconds'])}")
        return {host: fact | made.get(host, {}) for host, fact in self._without_failed(facts).items()}

    def _same_versions(self, facts: Facts) -> Facts:
        """Leave out hosts whose packages differ from those of the future head."""
        for host in facts:
            if missing := [name for name, has in facts[host]["versions"].items() if has == "none"]:
                self._fail(host, f"{facts[host]['python']} has no {', '.join(missing)}")
        facts = self._without_failed(facts)
        for first in self._in_order(facts)[:1]:
            for host in facts:
                pairs = zip(facts[host]["versions"].items(), facts[first]["versions"].values(), strict=True)
                if differ := [
                    f"{name} {has}, but {first} has {wanted}" for (name, has), wanted in pairs if has != wanted
                ]:
                    self._fail(host, f"has {'; '.join(differ)}; they must be the same")
        return self._without_failed(facts)

    def _in_order(self, facts: Facts) -> list[str]:
        """Hosts by preference as head: the running head, the last head, which has the runs, then the file's order."""
        first = [host for host in facts if _is_head(facts[host]["node"])]
        first += [self.record.head] if self.record and self.record.head in facts.keys() - set(first) else []
        return first + [host for host in self.target.hosts if host in facts and host not in first]

    def _start(self, facts: Facts) -> Facts:
        """Start the head first, then all others at once; returns the node of every host."""
        order = self._in_order(facts)
        running = [host for host in order if facts[host]["node"]]
        if running and not _is_head(facts[running[0]]["node"]):
            self._require_head(facts)
            self._stop(running)  # nodes without their head
            self.say(f"the head of {self.target.name} is gone; the cluster is started again")
            facts = {host: {**fact, "node": None} for host, fact in facts.items()}
        while order:
            head, *order = order
            nodes = self._start_nodes([head], facts, None)
            if nodes:
                return nodes | self._start_nodes(order, facts, nodes[head]["address"])
            if facts[head]["node"]:
                raise FeverError(f"{head}, the head of {self.target.name}, no longer answers; try again")
            self._require_copies({host: facts[host] for host in order})
        return {}

    def _start_nodes(self, hosts: list[str], facts: Facts, head: str | None) -> Facts:
        variables = {**self.target.env, **RAY}

        def start(host: str) -> dict[str, Any]:
            began, running = time.monotonic(), facts[host]["node"] is not None
            if not running:
                self.started.append(host)
            node = self._ask(
                host, "start", token=self.token, head=head, interpreter=facts[host]["python"], variables=variables,
                unset=self.target.unset, interface=self.target.interface, cores=self.target.cpus_per_node,
                seconds=self.target.connect_seconds,
            )  # fmt: skip
            has = facts[host]["versions"]
            what = "is up already" if running else f"is up after {time.monotonic() - began:.1f} s"
            part = " (head)" if head is None else ""
            self.say(f"{host}: {what}, {node['cores']} cores, Python {has['Python']}, Ray {has['ray']}{part}")
            return node

        nodes = self._each(hosts, start)
        self._stop([host for host in hosts if host in self.failed and host in self.started])
        return nodes


def _is_head(node: dict[str, Any] | None) -> bool:
    return bool(node and node.get("dashboard"))


def ask_host(target: Ssh, action: str, host: str, **more: Any) -> dict[str, Any]:
    """Send one request to a host and return its reply."""
    request = {"action": action, "scratch": target.scratch, "python": target.python, **more}
    return ask(target.ssh_command(host), request, target.python)


def ask_hosts(target: Ssh, action: str, hosts: Iterable[str], **more: Any) -> dict[str, Any]:
    """Send a request to several hosts at once; the result of a host that does not answer is a FeverError."""
    return at_once({host: partial(ask_host, target, action, host, **more) for host in hosts})


def stop_hosts(target: Ssh, cluster: str, hosts: list[str]) -> dict[str, list[str]]:
    """End a cluster's nodes on all hosts at once; returns what is left, by host."""
    results = ask_hosts(target, "stop", hosts, cluster=cluster)
    return {
        host: [f"unknown, perhaps everything: {result}"] if isinstance(result, FeverError) else result["left"]
        for host, result in results.items()
    }


def absolute_path(folder: str, home: str) -> str:
    """The absolute path of a folder on a host whose home folder this is."""
    return f"{home}/{folder.removeprefix('~').lstrip('/')}" if folder[0] != "/" else folder
