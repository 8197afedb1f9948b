"""Where a run may happen besides this machine: what every kind of target has, and the list of kinds.

`--on slurm` is a kind with its defaults; `--on site.yaml` is a file with a kind and a site's settings. Options of the
command line override both. A kind is one class in a module of its own: its settings and what can be done there.
"""

from __future__ import annotations

import ipaddress
import re
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import ValidationInfo, field_validator, model_validator

from fever.config import Duration, Settings, load_yaml, setting, validate
from fever.errors import FeverError
from fever.job import RUNNING

if TYPE_CHECKING:
    from fever.launch.dispatch import Order
    from fever.launch.doctor import Finding
    from fever.launch.jobs import Job, JobWatch

CLUSTER_NAME = re.compile(r"[A-Za-z][\w.]*")  # part of paths


class Target(Settings):
    """The settings that every kind has, and what dispatch, jobs and the doctor ask of a kind."""

    named_by_file: ClassVar[bool] = False  # the setting `name` is the file's unless it is given
    is_remote: ClassVar[bool] = False  # run directories are on its machines, and copied to this one

    kind: str = setting(..., "slurm, pbs, lsf, mpi, ssh, aws or ray")
    cpus_per_node: int | None = setting(None, "cores of each machine to use; null: all that the job may use", gt=0)
    interface: str | None = setting(None, "network interface that Ray uses, such as ib0; null: the host name's")
    scratch: str = setting("/tmp", "node-local folder for Ray's temporary files; a short path")
    unset: tuple[str, ...] = setting(("LD_PRELOAD",), "environment variables to remove for Ray and the training")
    env: dict[str, str] = setting({}, "environment variables to set for Ray and the training")
    connect_seconds: Duration = setting(300.0, "time within which all machines must have joined")

    def run(self, order: Order) -> int:
        """Train what is ordered, as a job of this kind; returns the exit code."""
        raise NotImplementedError

    def state(self, job: Job) -> tuple[str, str]:
        """QUEUED, RUNNING or ENDED, and a short reason."""
        raise NotImplementedError

    def stop(self, job: Job, state: str, now: bool) -> str:
        """End a job that is QUEUED or RUNNING, after it has saved unless `now`. Returns what happened, for the user."""
        raise NotImplementedError

    def examine(self, on: str, runs: Path) -> list[Finding]:
        """What `fever doctor --on ON` reports; empty in ranks other than 0. `runs`: the folder of run directories."""
        raise NotImplementedError

    def watch(self, job: Job) -> JobWatch:
        """What follows a job's state while it is shown."""
        return job.watch()

    def fetch(self, job: Job) -> None:
        """Copy what is new of a job's run directory to this machine; nothing to do on a shared file system."""

    def cores_of(self, rank: int) -> int | None:
        """The cores to use on the machine of a rank; None: all that the job may use."""
        return self.cpus_per_node

    @classmethod
    def allocated_hosts(cls) -> list[str]:
        """The host names of the allocation that this process runs in, from the scheduler's environment variables."""
        return []

    @field_validator("env", mode="before")
    @classmethod
    def _texts(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        return {name: text if text is None else str(text) for name, text in value.items()}  # None is refused

    @field_validator("env", "unset")
    @classmethod
    def _variables(cls, value: Any) -> Any:
        for name in value:
            if not re.fullmatch(r"[A-Za-z_]\w*", name):
                raise ValueError(f"{name!r} is not the name of a variable")
        return value


class Allocation(Target):
    """Machines that a scheduler or the user provides for a time, on which a launcher starts ranks."""

    supervised: ClassVar[bool] = False  # ranks are started by schedulers/supervisor.py; what they print is kept

    lead_seconds: Duration = setting(120.0, "time before the job's limit at which the run saves and stops")
    ship: bool = setting(False, "send the modules of the folder where fever was started to machines without it")

    @property
    def lead(self) -> float:
        """Seconds before the job's limit at which the run saves."""
        return self.lead_seconds

    @property
    def least_ranks(self) -> int:
        """How many ranks there are at least, if the launcher does not say."""
        return 1

    def cancel(self, job: Job) -> str:
        """End a job at once. Returns what happened, for the user."""
        raise NotImplementedError

    def stop(self, job: Job, state: str, now: bool) -> str:
        return job.stopped() if state == RUNNING and not now and job.let_save() else self.cancel(job)


class Machines(Target):
    """Machines of the user's own, on which a Ray stays up between jobs."""

    named_by_file: ClassVar[bool] = True
    is_remote: ClassVar[bool] = True

    name: str | None = setting(None, "the cluster's name; null: the file's")
    python: str | None = setting(None, "an interpreter there that has fever's dependencies; null: one is set up")
    packages: tuple[str, ...] = setting((), "further packages for the interpreter that is set up")
    extras: tuple[str, ...] | None = setting(
        None, "what of fever's it has: render, mujoco, box2d, atari, rllib, tune; null: what is installed here"
    )
    runs: str = setting("~/.fever/runs", "folder of run directories there", min_length=1)

    @field_validator("name")
    @classmethod
    def _plain_name(cls, value: str | None) -> str | None:
        if value is not None and not CLUSTER_NAME.fullmatch(value):
            raise ValueError("a cluster's name has letters, digits, dots and underscores only")
        return value

    def run(self, order: Order) -> int:
        from fever.launch.dispatch import run_on_cluster

        return run_on_cluster(order, self)

    def state(self, job: Job) -> tuple[str, str]:
        from fever.launch.clusters import jobs

        return jobs.state(job)

    def stop(self, job: Job, state: str, now: bool) -> str:
        from fever.launch.clusters import jobs

        if now:
            raise FeverError(f"a job on a cluster saves before it stops, within {jobs.STOP_SECONDS} s; omit --now")
        return jobs.stop(job)

    def watch(self, job: Job) -> JobWatch:
        from fever.launch.clusters.watch import ClusterWatch

        return ClusterWatch(job)

    def fetch(self, job: Job) -> None:
        from fever.launch.clusters.watch import fetch

        fetch(job)

    def examine(self, on: str, runs: Path) -> list[Finding]:
        raise FeverError("the doctor looks at schedulers, MPI and ssh hosts; for others see: fever status")


class Ssh(Machines):
    """Hosts that `ssh` reaches."""

    kind: Literal["ssh"] = "ssh"
    hosts: tuple[str, ...] = setting(
        ..., "as ssh knows them; the first that can be used gets the learner", min_length=1
    )
    user: str | None = setting(None, "who logs in; null: what ssh's own configuration says")
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

    def examine(self, on: str, runs: Path) -> list[Finding]:
        from fever.launch.checks import examine_hosts

        return examine_hosts(self)

    def reach(self, host: str) -> list[str]:
        """The words that run a command on a host."""
        return ["ssh", *self.options, *(["-l", self.user] if self.user else []), host]


class AwsWorkers(Settings):
    """The instances besides the head."""

    type: str = setting("m5.large", "instance type")
    count: int = setting(2, "how many there may be", ge=0)
    least: int | None = setting(None, "how many there are even if nothing runs; null: as many as there may be", ge=0)
    spot: bool = setting(True, "spot instances: cheaper, and AWS may take them back")

    @model_validator(mode="after")
    def _ordered(self) -> AwsWorkers:
        if self.least is not None and self.least > self.count:
            raise ValueError(f"least={self.least} is more than count={self.count}")
        return self


class Aws(Machines):
    """A cluster of EC2 instances."""

    kind: Literal["aws"] = "aws"
    region: str = setting(..., "region, such as us-west-2")
    head: str = setting("m5.large", "instance type of the head, where the learner runs")
    workers: AwsWorkers = setting(AwsWorkers(), "the other instances")
    image: str | None = setting(None, "image (ami-...); null: the newest Ubuntu 24.04 of Canonical")
    user: str = setting("ubuntu", "user of that image")
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


class Existing(Machines):
    """A Ray that runs already, somebody else's perhaps."""

    named_by_file: ClassVar[bool] = False

    kind: Literal["ray"] = "ray"
    address: str = setting(..., "of its head, 10.0.0.7:6379, or of its page, http://10.0.0.7:8265")

    @field_validator("cpus_per_node", "interface", "scratch", "unset", "connect_seconds", "name", "packages", "extras")
    @classmethod
    def _runs_already(cls, value: Any, info: ValidationInfo) -> Any:
        if value != cls.model_fields[str(info.field_name)].default:
            raise ValueError("it is for a Ray that fever starts, and this one runs already")
        return value


ADDRESS = re.compile(r"https?://\S+|[\w.-]+:\d+")
WITHOUT_FILE = {  # kinds that `--on KIND` names without a file: module and class
    "slurm": "fever.launch.schedulers.slurm:Slurm",
    "pbs": "fever.launch.schedulers.pbs:Pbs",
    "lsf": "fever.launch.schedulers.lsf:Lsf",
    "mpi": "fever.launch.rendezvous.mpi:Mpi",
}
KINDS: dict[str, str | type[Target]] = {**WITHOUT_FILE, "ssh": Ssh, "aws": Aws, "ray": Existing}


def find_kind(kind: str) -> type[Target]:
    """The class of a kind; its module is imported when it is asked for."""
    found = KINDS[kind]
    if isinstance(found, str):
        module, _, name = found.partition(":")
        found = getattr(import_module(module), name)
    assert isinstance(found, type)
    return found


def load_target(word: str, options: dict[str, Any]) -> Target:
    """The target that `--on` names, with options of the command line put over it."""
    if word in WITHOUT_FILE:
        values: dict[str, Any] = {"kind": word}
        what = f"--on {word}"
    elif Path(word).suffix in (".yaml", ".yml"):
        values, what = load_yaml(Path(word).expanduser()), word
    elif ADDRESS.fullmatch(word):
        values, what = {"kind": "ray", "address": word}, f"--on {word}"
    else:
        kinds = ", ".join(WITHOUT_FILE)
        raise FeverError(f"--on takes {kinds}, a file that ends in .yaml, or the address of a Ray, not {word!r}")
    kind = values.get("kind")
    if not isinstance(kind, str) or kind not in KINDS:
        raise FeverError(f"{what} needs a kind: {', '.join(KINDS)}" + (f", not {kind!r}" if kind else ""))
    model = find_kind(kind)
    if model.named_by_file:
        stem = re.sub(r"\W", "_", Path(word).stem)
        values.setdefault("name", stem if stem[0].isalpha() else f"c{stem}")
    for name in options:
        if {"time": "seconds", "gpus": "learner"}.get(name, name) not in model.model_fields:
            raise FeverError(f"--{name.replace('_', '-')} does not go with {what}")
    if "gpus" in options:
        given = values.get("learner") or {}
        learner = {**given, "gpus": options["gpus"]} if isinstance(given, dict) else given  # which is refused below
        options = {**{name: value for name, value in options.items() if name != "gpus"}, "learner": learner}
    values |= options
    if "time" in values:
        values["seconds"] = values.pop("time")
    return validate(model, values, what)


def restore_target(values: dict[str, Any]) -> Target:
    """A target from what `model_dump` gave."""
    if values["kind"] not in KINDS:
        raise FeverError(f"job.json has an unknown kind: {values['kind']!r}")
    return validate(find_kind(values["kind"]), values, "job.json")


def allocated_hosts() -> list[str]:
    """The short host names of the allocation that this process runs in, whichever scheduler made it; or none."""
    found = (find_kind(kind).allocated_hosts() for kind in WITHOUT_FILE)
    return [name.split(".")[0] for name in next(filter(None, found), [])]
