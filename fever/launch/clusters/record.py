"""The record of a cluster that is up: a folder of the user's, by which other commands find the cluster.

    clusters/NAME/
      cluster.json  the fields of `ClusterRecord`
      id            the cluster's id, written before anything is started
      token         Ray's token, readable by this user only
      lock          held by a `fever up` or `fever down` that is under way
      aws.json ...  files of `fever/launch/aws`

Every node also notes on its host which cluster it belongs to, so nodes can be found and ended without the record.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from filelock import FileLock, Timeout

from fever.errors import FeverError
from fever.files import user_path
from fever.job import JobFolder, records
from fever.launch.targets import restore_target

if TYPE_CHECKING:
    from fever.launch.clusters.base import ClusterTarget

CLUSTER_NAME = re.compile(r"[A-Za-z][\w.]*")  # part of paths
RECORD, ID, TOKEN, LOCK = "cluster.json", "id", "token", "lock"
EVIDENCE = (RECORD, ID, "aws.json")  # while one of these files exists, something may be running
FIXED = ("kind", "user", "scratch")  # settings that cannot change while a cluster is up: its nodes are found by them


@dataclass(frozen=True)
class ClusterRecord:
    """What is known on this machine of a cluster that is up."""

    name: str
    id: str
    file: str  # the YAML file that describes it
    target: ClusterTarget
    began: float  # when it came up, in seconds since the epoch
    ssh_command: list[str]  # the words of ssh that run a command on the head
    python: str  # the head's interpreter
    dashboard: int  # port of Ray's dashboard on the head's loopback device
    address: str  # of Ray's head
    head: str  # the head's host name
    logs: str  # the head's folder of Ray's logs
    runs: str  # the head's folder of run directories
    environment: str  # name of the environment on its hosts
    hosts: dict[str, Any]  # host -> its cores; 0: not in use, but something may be left on it

    @property
    def folder(self) -> Path:
        return record_folder(self.name)

    @property
    def token(self) -> str:
        return (self.folder / TOKEN).read_text()

    def write(self) -> None:
        values = {**self.__dict__, "target": self.target.model_dump(mode="json")}
        JobFolder(self.folder).write(RECORD, values)

    def require_file(self, file: str) -> None:
        """Refuse a file that describes another cluster of the same name."""
        if Path(self.file) != user_path(file).resolve():
            raise FeverError(f"{self.name} is another cluster, up by {self.file}; give this one another `name:`")

    def require_settings(self, target: ClusterTarget) -> None:
        """Refuse settings that would start a second Ray beside the one that runs."""
        for name in FIXED:
            if (was := getattr(self.target, name)) != getattr(target, name):
                raise FeverError(f"{self.name} was brought up with {name}: {was}; take it down to change that")


def record_folder(name: str) -> Path:
    return records("clusters") / name


def find_record(name: str) -> ClusterRecord | None:
    """A cluster that is up, by its name."""
    if not CLUSTER_NAME.fullmatch(name):  # it may come from a file of a run directory, and is part of a path
        return None
    values = JobFolder(record_folder(name)).read(RECORD)
    if values is None:
        return None
    target: Any = restore_target(values["target"])
    return ClusterRecord(**{**values, "target": target})


def require_record(target: ClusterTarget, file: str) -> ClusterRecord:
    """The cluster that a file describes, which must be up."""
    assert target.name is not None
    record = find_record(target.name)
    if record is None:
        raise FeverError(f"{target.name} is not up; start it with: fever up {file}")
    record.require_file(file)
    return record


def may_run(folder: Path) -> bool:
    """Whether something of the cluster of a record folder may be running."""
    return any((folder / name).exists() for name in EVIDENCE)


@contextmanager
def changing(name: str) -> Iterator[Path]:
    """The record folder of a cluster, for one `up` or `down` at a time; removed at the end if nothing is up."""
    folder = record_folder(name)
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    try:
        lock = FileLock(folder / LOCK, blocking=False).acquire()
    except Timeout:
        raise FeverError(f"another fever process is changing {name} right now; wait for it") from None
    with lock:
        try:
            yield folder
        finally:
            if not may_run(folder):
                for file in (TOKEN, LOCK):
                    (folder / file).unlink(missing_ok=True)
                with suppress(OSError):  # logs of a failed start are kept
                    folder.rmdir()


def forget(folder: Path) -> None:
    """Remove what says that a cluster is up; `aws.json` stays until AWS shows nothing of it."""
    for name in (RECORD, ID):
        (folder / name).unlink(missing_ok=True)
