"""Where a run may happen besides this machine: the settings of each kind of target, as frozen models.

`--on slurm` is a kind with its defaults, `--on site.yaml` a file that says its kind and a site's settings once; options
of the command line win over both.
"""

from __future__ import annotations

import ipaddress
import re
from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationInfo, field_validator, model_validator

from fever.config import Duration, Settings, load_yaml, setting, validate
from fever.errors import FeverError

CLUSTER_NAME = re.compile(r"[A-Za-z][\w.]*")  # part of paths


class Target(Settings):
    """What every target has."""

    kind: str = setting(..., "slurm, pbs, mpi, ssh or aws")
    cpus_per_node: int | None = setting(None, "cores of each machine to use; null: all that the job may use", gt=0)
    interface: str | None = setting(None, "network interface that Ray uses, such as ib0; null: the host name's")
    scratch: str = setting("/tmp", "node-local folder for Ray's temporary files; a short path")
    unset: tuple[str, ...] = setting(("LD_PRELOAD",), "variables that neither Ray nor the training gets")
    env: dict[str, str] = setting({}, "variables that they get")
    connect_seconds: Duration = setting(300.0, "until when all machines must have joined")

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
    """Machines that somebody else gives us for a time, on which ranks are started."""

    lead_seconds: Duration = setting(120.0, "time before the job's limit at which the run saves and stops")
    ship: bool = setting(False, "send the modules of the folder where fever was started to machines without it")


class Mpi(Allocation):
    """Ranks that somebody has started: mpirun, mpiexec, aprun, srun, jsrun."""

    kind: Literal["mpi"] = "mpi"


class LearnerMachine(Settings):
    """A machine for the learner that differs from the samplers' (Slurm's heterogeneous jobs)."""

    gpus: int = setting(0, "GPUs of the learner's machine", ge=0)
    cpus: int | None = setting(None, "its cores; null: as the samplers' machines", gt=0)
    partition: str | None = setting(None, "its partition; null: the same")
    options: tuple[str, ...] = setting((), "further options of its own, such as --constraint=a100")


class Scheduler(Allocation):
    """A script that a scheduler runs later."""

    nodes: int = setting(1, "machines, the learner's included", gt=0)
    seconds: Duration | None = setting(None, "time limit; `time: 20m` in a file; null: the scheduler's default")
    account: str | None = setting(None, "whom the hours are charged to")
    partition: str | None = setting(None, "partition (Slurm) or queue (PBS)")
    requeue: bool = setting(False, "at the time limit save, go back into the queue and continue")
    modules: tuple[str, ...] = setting((), "environment modules to load")
    conda: str | None = setting(None, "conda environment to activate")
    venv: str | None = setting(None, "folder of a virtual environment to activate; null: the one that submits")
    shell: tuple[str, ...] = setting((), "lines of shell before the training begins")
    options: tuple[str, ...] = setting((), "further options for the scheduler, such as --exclusive")


class Slurm(Scheduler):
    """`sbatch`."""

    kind: Literal["slurm"] = "slurm"
    qos: str | None = setting(None, "quality of service")
    learner: LearnerMachine | None = setting(None, "the learner's machine, if it differs; makes the job heterogeneous")


class Pbs(Scheduler):
    """`qsub`, for PBS Pro, OpenPBS and Torque."""

    kind: Literal["pbs"] = "pbs"
    select: str | None = setting(None, "resources that are asked for with -l; null: select=NODES:ncpus=CPUS, scattered")
    launcher: str = setting("mpiexec -n {nodes} --ppn 1", "what starts one rank on every machine, aprun for example")


class Machines(Target):
    """Machines of the user's own, on which a Ray stays up between jobs."""

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

    kind: Literal["ray"] = "ray"
    address: str = setting(..., "of its head, 10.0.0.7:6379, or of its page, http://10.0.0.7:8265")

    @field_validator("cpus_per_node", "interface", "scratch", "unset", "connect_seconds", "name", "packages", "extras")
    @classmethod
    def _runs_already(cls, value: Any, info: ValidationInfo) -> Any:
        if value != cls.model_fields[str(info.field_name)].default:
            raise ValueError("it is for a Ray that fever starts, and this one runs already")
        return value


ADDRESS = re.compile(r"https?://\S+|[\w.-]+:\d+")
WORDS = ("slurm", "pbs", "mpi")  # kinds that need no file
KINDS: dict[str, type[Target]] = {"slurm": Slurm, "pbs": Pbs, "mpi": Mpi, "ssh": Ssh, "aws": Aws, "ray": Existing}


def load_target(word: str, options: dict[str, Any]) -> Target:
    """The target that `--on` names, with options of the command line put over it."""
    if word in WORDS:
        values: dict[str, Any] = {"kind": word}
        what = f"--on {word}"
    elif Path(word).suffix in (".yaml", ".yml"):
        values, what = load_yaml(Path(word).expanduser()), word
    elif ADDRESS.fullmatch(word):
        values, what = {"kind": "ray", "address": word}, f"--on {word}"
    else:
        kinds = ", ".join(WORDS)
        raise FeverError(f"--on takes {kinds}, a file that ends in .yaml, or the address of a Ray, not {word!r}")
    kind = values.get("kind")
    if not isinstance(kind, str) or kind not in KINDS:
        raise FeverError(f"{what} needs a kind: {', '.join(KINDS)}" + (f", not {kind!r}" if kind else ""))
    model = KINDS[kind]
    if issubclass(model, Machines) and kind != "ray":
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
    return validate(KINDS[values["kind"]], values, "job.json")
