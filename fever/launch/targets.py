"""Where a run may happen besides this machine: what every kind of target has, and the list of kinds.

`--on slurm` is a kind with its defaults; `--on site.yaml` is a file with a kind and a site's settings. Options of the
command line override both. A kind is one class in a module of its own: its settings and what can be done there.
"""

from __future__ import annotations

import re
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import field_validator

from fever.config import Duration, load_yaml, setting, validate
from fever.errors import FeverError
from fever.files import user_path
from fever.job import RUNNING
from fever.launch.script_text import ScriptSettings
from fever.text import brief

if TYPE_CHECKING:
    from fever.launch.dispatch import Order
    from fever.launch.doctor import Finding
    from fever.launch.jobs import Job, JobWatch


class Target(ScriptSettings):
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

    def how_to_give_up(self, job: Job) -> str:
        """The command that forgets a job whose machines are gone for good."""
        return "fever down FILE --force"

    def cores_of(self, rank: int) -> int | None:
        """The cores to use on the machine of a rank; None: all that the job may use."""
        return self.cpus_per_node

    @classmethod
    def allocated_hosts(cls) -> list[str]:
        """The host names of the allocation that this process runs in, from the scheduler's environment variables."""
        return []

    @classmethod
    def read_time(cls, value: Any) -> Any:
        """The seconds in the value of `time`; what is neither a number nor text stays. Raises ValueError."""
        return value

    @field_validator("env", mode="before")
    @classmethod
    def _texts(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        for name, text in value.items():
            if isinstance(text, bool):  # a program may know `off` and not `False`
                raise ValueError(f"the value of {name} is read as {text}; put it in quotes")
        return {name: str(text) if isinstance(text, int | float) else text for name, text in value.items()}

    @field_validator("env", "unset")
    @classmethod
    def _variables(cls, value: Any) -> Any:
        for name in value:
            if not re.fullmatch(r"[A-Za-z_]\w*", name, re.ASCII):
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

    def end_without(self, host: str) -> bool:
        """Called by a rank again and again after the job's first machine, `host`, died: end the job if the scheduler
        has noticed, and would leave it to run without. Returns whether nothing is left to do. Raises `FeverError` if
        the scheduler does not answer."""
        return True

    def stop(self, job: Job, state: str, now: bool) -> str:
        return job.stopped() if state == RUNNING and not now and job.let_save() else self.cancel(job)


TYPED_FIELDS = {"time": "seconds", "gpus": "learner.gpus", "hosts": "max_hosts"}  # option -> field, if they differ
ADDRESS = re.compile(r"https?://\S+|[\w.-]+:\d+")
WITHOUT_FILE = {  # kinds that `--on KIND` names without a file: module and class
    "slurm": "fever.launch.schedulers.slurm:Slurm",
    "pbs": "fever.launch.schedulers.pbs:Pbs",
    "lsf": "fever.launch.schedulers.lsf:Lsf",
    "mpi": "fever.launch.rendezvous.mpi:Mpi",
}
KINDS = {
    **WITHOUT_FILE,
    "ssh": "fever.launch.clusters.ssh_cluster:Ssh",
    "aws": "fever.launch.aws.target:Aws",
    "ray": "fever.launch.clusters.existing:Existing",
}


LOGIN = "fever.launch.login.target:LoginSite"  # of a scheduler's file that says `login: HOST`


def find_kind(kind: str) -> type[Target]:
    """The class of a kind."""
    return find_class(KINDS[kind])


def find_class(place: str) -> type[Target]:
    """A class by its module and name; the module is imported when it is asked for."""
    module, _, name = place.partition(":")
    found: type[Target] = getattr(import_module(module), name)
    return found


def load_target(word: str, options: dict[str, Any]) -> Target:
    """The target that `--on` names, with options of the command line put over it."""
    if word in WITHOUT_FILE:
        values: dict[str, Any] = {"kind": word}
        what = f"--on {word}"
    elif Path(word).suffix in (".yaml", ".yml"):
        values, what = load_yaml(user_path(word)), word
    elif ADDRESS.fullmatch(word):
        values, what = {"kind": "ray", "address": word}, f"--on {word}"
    else:
        kinds = ", ".join(WITHOUT_FILE)
        raise FeverError(f"--on takes {kinds}, a file that ends in .yaml, or the address of a Ray, not {word!r}")
    kind = values.get("kind")
    if not isinstance(kind, str) or kind not in KINDS:
        raise FeverError(f"{what} needs a kind: {', '.join(KINDS)}" + (f", not {kind!r}" if kind else ""))
    model, login = find_kind(kind), values.pop("login", None)
    stem = re.sub(r"\W", "_", Path(word).stem)
    plain_name = stem if stem[0].isalpha() else f"c{stem}"
    if model.named_by_file:
        values.setdefault("name", plain_name)
    asked = options
    for name in options:
        if {"time": "seconds", "gpus": "learner", "hosts": "max_hosts"}.get(name, name) not in model.model_fields:
            raise FeverError(f"--{name.replace('_', '-')} does not go with {what}")
    if "gpus" in options:
        given = values.get("learner") or {}
        learner = {**given, "gpus": options["gpus"]} if isinstance(given, dict) else given  # which is refused below
        options = {**{name: value for name, value in options.items() if name != "gpus"}, "learner": learner}
    if "hosts" in options:  # a number; the file's are names
        others = {name: value for name, value in options.items() if name != "hosts"}
        options = {**others, "max_hosts": options["hosts"]}
    typed = {TYPED_FIELDS.get(name, name): f"--{name.replace('_', '-')} {value}" for name, value in asked.items()}
    values |= options
    if "time" in values:
        value = values.pop("time")
        typed.setdefault("seconds", f"{what}: time={brief(value)} cannot be used")
        try:
            values["seconds"] = model.read_time(value)
        except ValueError as error:
            raise FeverError(f"{typed['seconds']}: {error}") from None
    target = validate(model, values, what, typed)
    if login is None:
        return target
    through = {"kind": kind, "name": plain_name, "login": login, "site": target.model_dump(mode="json")}
    return validate(find_class(LOGIN), through, what)


def restore_target(values: dict[str, Any]) -> Target:
    """A target from what `model_dump` gave."""
    kind = values.get("kind")
    if not isinstance(kind, str) or kind not in KINDS:
        raise FeverError(f"job.json has an unknown kind: {kind!r}")
    return validate(find_class(LOGIN) if "login" in values else find_kind(kind), values, "job.json")


def allocated_hosts() -> list[str]:
    """The short host names of the allocation that this process runs in, whichever scheduler made it; or none."""
    found = (find_kind(kind).allocated_hosts() for kind in WITHOUT_FILE)
    return [name.split(".")[0] for name in next(filter(None, found), [])]
