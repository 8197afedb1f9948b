"""Clusters of the user's own machines: `up`, `down`, `status`, and the record by which other commands find them.

A record is a folder of the user's: the cluster's facts, and its token, which nobody else can read. What runs on the
hosts says by itself which cluster it belongs to, so a record is never the only one to know.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from fever.errors import FeverError
from fever.job import JobFolder, records
from fever.launch.clusters.host_packages import describe_environment
from fever.launch.clusters.ssh import ask, at_once
from fever.launch.rendezvous.rank import RAY
from fever.launch.targets import CLUSTER_NAME, Aws, Machines, Ssh, restore_target
from fever.signals import signals_interrupt, signals_wait
from fever.text import format_duration

FIXED = ("kind", "user", "scratch")  # settings by which what runs is found
KEPT = ("cluster.json", "id", "aws.json")  # while one of them is there, something may be up
Say = Callable[[str], None]


@dataclass(frozen=True)
class Record:
    """What is known here of a cluster that is up."""

    name: str
    id: str
    file: str  # that describes it
    target: Machines
    began: float  # when it came up
    reach: list[str]  # the words of ssh that run a command on the head
    python: str  # the head's interpreter
    dashboard: int  # port of its loopback device
    address: str  # of Ray
    head: str  # the head's name
    logs: str  # the head's folder of Ray's logs
    runs: str  # and of run directories
    environment: str  # name of the environment on its hosts
    hosts: dict[str, Any]  # that are part of it -> their cores

    @property
    def folder(self) -> Path:
        return records("clusters") / self.name

    @property
    def token(self) -> str:
        return (self.folder / "token").read_text()

    def write(self) -> None:
        values = {**self.__dict__, "target": self.target.model_dump(mode="json")}
        JobFolder(self.folder).write("cluster.json", values)


def find_record(name: str) -> Record | None:
    """A cluster that is up, by its name."""
    if not CLUSTER_NAME.fullmatch(name):  # it may come from a file of a run directory, and is part of a path
        return None
    values = JobFolder(records("clusters") / name).read("cluster.json")
    if values is None:
        return None
    target = restore_target(values["target"])
    assert isinstance(target, Machines)
    return Record(**{**values, "target": target})


def require_record(target: Machines, file: str) -> Record:
    """The cluster that a file describes, which must be up."""
    assert target.name is not None
    record = find_record(target.name)
    if record is None:
        raise FeverError(f"{target.name} is not up; start it with: fever up {file}")
    _same_file(record, file)
    return record


def _same_file(record: Record, file: str) -> None:
    if Path(record.file) != Path(file).expanduser().resolve():
        raise FeverError(f"{record.name} is another cluster, up by {record.file}; give this one another `name:`")


def _same_place(record: Record, target: Machines) -> None:
    """Refuse what would start a second Ray beside the one that runs."""
    for name in FIXED:
        if (was := getattr(record.target, name)) != getattr(target, name):
            raise FeverError(f"{record.name} was brought up with {name}: {was}; take it down to change that")


@contextmanager
def _alone(name: str) -> Iterator[Path]:
    """The folder of a cluster, for one `up` or `down` at a time; gone afterwards if nothing is up."""
    folder = records("clusters") / name
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    try:
        lock = FileLock(folder / "lock", blocking=False).acquire()
    except Timeout:
        raise FeverError(f"another fever is just changing {name}; wait for it") from None
    with lock:
        try:
            yield folder
        finally:
            if not any((folder / name).exists() for name in KEPT):
                for name in ("token", "lock"):
                    (folder / name).unlink(missing_ok=True)
                with suppress(OSError):  # logs of what went wrong stay
                    folder.rmdir()


# up


def up(target: Machines, file: str, say: Say) -> Record:
    """Bring a cluster up, or what is missing of it; every host gets a line. Nothing stays of one that cannot be."""
    assert target.name is not None
    with _alone(target.name) as folder:
        record = find_record(target.name)
        if record is not None:
            _same_file(record, file)
            _same_place(record, target)
        elif not (folder / "token").exists():
            JobFolder(folder).write_text("token", secrets.token_hex(32), mode=0o600)
        path = str(Path(file).expanduser().resolve())
        if isinstance(target, Aws):
            return _up_on_aws(target, path, folder, say)
        assert isinstance(target, Ssh)
        return Rise(target, path, record, folder, say).run()


def _up_on_aws(target: Aws, file: str, folder: Path, say: Say) -> Record:
    """The head's instance is reached as any other host, so everything but `up` and `down` is the same."""
    from fever.launch import aws

    name, python = str(target.name), target.python or "python3"
    request = {"action": "look", "cluster": "", "scratch": target.scratch, "python": python}
    reached = aws.up(target, name, folder, folder / "token", say, lambda ssh: ask(ssh, request, python))
    record = Record(
        name=name, id=reached["id"], file=file, target=target, began=reached["began"], reach=reached["ssh"],
        python=target.python or f"{reached['home']}/.fever/env/bin/python", dashboard=reached["dashboard"],
        address=reached["address"], head=reached["ssh"][-1].rpartition("@")[2],
        logs=f"{target.scratch}/ray/session_latest/logs", environment="",
        runs=_absolute(target.runs, reached["home"]), hosts={},
    )  # fmt: skip
    record.write()
    return record


def _absolute(folder: str, home: str) -> str:
    """A folder on a host, as the host's own programs find it from anywhere."""
    return f"{home}/{folder.removeprefix('~').lstrip('/')}" if folder[0] != "/" else folder


class Rise:
    """One `fever up` of ssh hosts."""

    def __init__(self, target: Ssh, file: str, record: Record | None, folder: Path, say: Say) -> None:
        self.target, self.file, self.record, self.say = target, file, record, say
        self.token = (folder / "token").read_text()
        self.environment = describe_environment(target.packages, target.extras)
        meeting = JobFolder(folder)
        self.id = record.id if record else meeting.read_text("id") or secrets.token_hex(6)
        meeting.write_text("id", self.id)  # before anything runs, so that it can be found and ended
        self.folder = folder
        self.failed: dict[str, str] = {}
        self.started: list[str] = []  # by this call: what is ended again if it fails
        self.left: dict[str, int] = {}  # hosts on which something may be left: `down` tries again

    def run(self) -> Record:
        try:
            with signals_interrupt():
                return self._run()
        except BaseException:
            with signals_wait(self.say):
                left = self._stop(self.started)
            if self.record is None and not left:
                (self.folder / "id").unlink(missing_ok=True)
            raise

    def _stop(self, hosts: list[str]) -> dict[str, list[str]]:
        """End nodes of this cluster; says and returns what is left."""
        results = stop_hosts(self.target, self.id, hosts) if hosts else {}
        left = {host: things for host, things in results.items() if things}
        for host, things in left.items():
            self.say(f"{host}: could not be stopped, left: {', '.join(things)}")
        self.left |= dict.fromkeys(left, 0)
        return left

    def _run(self) -> Record:
        self._dismiss()
        facts = self._look()
        self._refuse_loss(facts)
        facts = self._install(facts)
        facts = self._same_versions(facts)
        nodes = self._start(facts)
        if len(nodes) < self.target.min_hosts:
            reasons = "; ".join(f"{host}: {reason}" for host, reason in self.failed.items())
            many = f"{len(nodes)} of {len(self.target.hosts)} hosts" if nodes else "no host"
            so = "nothing is up" if self.record is None else "nothing was added to what is up"
            raise FeverError(f"{many} can be used, {so}: {reasons}")
        if old := [host for host, node in nodes.items() if node["interpreter"] != facts[host]["python"]]:
            what = f"started with another environment than {self.file} describes now"
            self.say(f"{', '.join(old)}: {what}; fever down and fever up change that")
        head = next(host for host, node in nodes.items() if node["dashboard"])
        record = Record(
            name=str(self.target.name), id=self.id, file=self.file, target=self.target,
            began=self.record.began if self.record and self.record.head == head else time.time(),
            reach=self.target.reach(head), python=nodes[head]["interpreter"], dashboard=nodes[head]["dashboard"],
            address=nodes[head]["address"], head=head,
            hosts=self.left | self._silent() | {host: node["cores"] for host, node in nodes.items()},
            logs=f"{nodes[head]['scratch']}/r/session_latest/logs", environment=self.environment.name,
            runs=_absolute(self.target.runs, facts[head]["home"]),
        )  # fmt: skip
        record.write()
        return record

    def _silent(self) -> dict[str, int]:
        """Hosts that were part of the cluster and cannot be used now: `down` looks at them."""
        return {host: 0 for host in self.failed if self.record is not None and host in self.record.hosts}

    def _dismiss(self) -> None:
        """End the nodes of hosts that the file does not name any more."""
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

    def _refuse_loss(self, facts: dict[str, dict[str, Any]]) -> None:
        """Do not make another host the head while the old one cannot be reached and has the only copy of something."""
        if self.record is None or self.record.head in facts:
            return
        from fever.launch.clusters.jobs import not_home

        if names := ", ".join(job.name for job in not_home(self.record)):
            what = f"{self.record.head}, the head of {self.record.name}, cannot be reached"
            how = f"if it is gone for good: fever down {self.file} --force"
            raise FeverError(f"{what} and may have the only copy of {names}; {how}")

    def _fail(self, host: str, reason: object) -> None:
        self.failed[host] = str(reason)
        self.say(f"{host}: {reason}")

    def _each(self, hosts: list[str], function: Callable[[str], Any]) -> dict[str, Any]:
        """A function for all hosts at once; those for which it fails are named and left out from then on."""
        results = at_once({host: partial(function, host) for host in hosts})
        for host, result in results.items():
            if isinstance(result, FeverError):
                self._fail(host, result)
        return {host: result for host, result in results.items() if not isinstance(result, FeverError)}

    def _ask(self, host: str, action: str, **more: Any) -> dict[str, Any]:
        return ask_host(self.target, action, host, cluster=self.id, environment=self.environment.name, **more)

    def _look(self) -> dict[str, dict[str, Any]]:
        return self._each(list(self.target.hosts), lambda host: self._ask(host, "look"))

    def _install(self, facts: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
        """Make the environments that are missing."""
        missing = [host for host in facts if facts[host]["python"] is None]
        packages = self.environment.requirements
        if missing:
            self.say(f"setting up {', '.join(missing)}: {len(packages)} packages, minutes once")
        more = {"requirements": packages, "constraints": self.environment.constraints, "wheels": self.target.wheels}
        made = self._each(missing, lambda host: self._ask(host, "install", **more))
        for host, reply in made.items():
            self.say(f"{host}: environment {self.environment.name} in {format_duration(reply['seconds'])}")
        return {host: fact | made.get(host, {}) for host, fact in facts.items() if host not in self.failed}

    def _same_versions(self, facts: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
        """Leave out hosts whose Python or packages are not those of the head-to-be."""
        for host in facts:
            if lacks := [name for name, has in facts[host]["versions"].items() if has == "none"]:
                self._fail(host, f"{facts[host]['python']} has no {', '.join(lacks)}")
        facts = {host: fact for host, fact in facts.items() if host not in self.failed}
        for first in self._in_order(facts)[:1]:
            for host in facts:
                pairs = zip(facts[host]["versions"].items(), facts[first]["versions"].values(), strict=True)
                if differ := [
                    f"{name} {has}, but {first} has {wanted}" for (name, has), wanted in pairs if has != wanted
                ]:
                    self._fail(host, f"has {'; '.join(differ)}; they must be the same")
        return {host: fact for host, fact in facts.items() if host not in self.failed}

    def _in_order(self, facts: dict[str, dict[str, Any]]) -> list[str]:
        """The head, if it runs, then the one that was: it has the runs; then the others as the file lists them."""
        first = [host for host in facts if (facts[host]["node"] or {}).get("dashboard")]
        first += [self.record.head] if self.record and self.record.head in facts.keys() - set(first) else []
        return first + [host for host in self.target.hosts if host in facts and host not in first]

    def _start(self, facts: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
        """The head first, then all others at once; returns every host's node."""
        order = self._in_order(facts)
        running = [host for host in order if facts[host]["node"]]
        if running and not facts[running[0]]["node"].get("dashboard"):
            if self.record is not None and self.record.head in self.failed:
                raise FeverError(
                    f"{self.record.head}, the head of {self.target.name}, cannot be reached; try again later"
                )
            self._stop(running)  # their head is gone, and with it the cluster
            self.say(f"the head of {self.target.name} is gone; the cluster is started anew")
            facts = {host: {**fact, "node": None} for host, fact in facts.items()}
        while order:
            head, *order = order
            nodes = self._start_nodes([head], facts, None)
            if nodes:
                return nodes | self._start_nodes(order, facts, nodes[head]["address"])
            if facts[head]["node"]:
                raise FeverError(f"{head}, the head of {self.target.name}, does not answer any more; try again")
            self._refuse_loss({host: facts[host] for host in order})
        return {}

    def _start_nodes(
        self, hosts: list[str], facts: dict[str, dict[str, Any]], head: str | None
    ) -> dict[str, dict[str, Any]]:
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


def ask_host(target: Ssh, action: str, host: str, **more: Any) -> dict[str, Any]:
    """One request to a host and its reply."""
    request = {"action": action, "scratch": target.scratch, "python": target.python, **more}
    return ask(target.reach(host), request, target.python)


def ask_hosts(target: Ssh, action: str, hosts: Iterable[str], **more: Any) -> dict[str, Any]:
    """The same for several at once; a FeverError for those that do not answer."""
    return at_once({host: partial(ask_host, target, action, host, **more) for host in hosts})


def stop_hosts(target: Ssh, cluster: str, hosts: list[str]) -> dict[str, list[str]]:
    """End a cluster's nodes, all at once; returns what is left, by host."""
    results = ask_hosts(target, "stop", hosts, cluster=cluster)
    return {
        host: [f"perhaps everything: {result}"] if isinstance(result, FeverError) else result["left"]
        for host, result in results.items()
    }


# down and status


def down(record: Record, say: Say, force: bool = False) -> dict[str, list[str]]:
    """End a cluster and forget it, with `force` also if something is left; returns what is left, by host."""
    with _alone(record.name):
        left = _end(record.target, record.id, set(record.hosts), record.folder, say)
        if force or not any(left.values()):
            _forget(record.folder)
        else:
            replace(record, hosts={host: 0 for host, things in left.items() if things}).write()
    return left


def down_unfinished(target: Machines, say: Say, force: bool = False) -> dict[str, list[str]] | None:
    """End what an `up` that was killed has left; None if there is nothing of that kind."""
    folder = records("clusters") / str(target.name)
    if not any((folder / name).exists() for name in KEPT):
        return None
    with _alone(str(target.name)):
        hosts = set(target.hosts) if isinstance(target, Ssh) else set()
        left = _end(target, JobFolder(folder).read_text("id") or "", hosts, folder, say)
        if force or not any(left.values()):
            _forget(folder)
    return left


def _end(target: Machines, cluster: str, hosts: set[str], folder: Path, say: Say) -> dict[str, list[str]]:
    if isinstance(target, Aws):
        from fever.launch import aws

        return {"AWS": aws.down(target, str(target.name), folder, say)}
    assert isinstance(target, Ssh)
    return stop_hosts(target, cluster, sorted(hosts))


def _forget(folder: Path) -> None:
    for name in KEPT:
        if name != "aws.json":  # which is removed when AWS shows nothing any more
            (folder / name).unlink(missing_ok=True)


def look_at(record: Record) -> dict[str, Any]:
    """What every ssh host of a cluster says of itself; a FeverError for those that do not answer."""
    target = record.target
    assert isinstance(target, Ssh)
    return ask_hosts(target, "look", target.hosts, cluster=record.id, environment=record.environment, measure=True)
