"""A Ray that fever did not start. It takes jobs and nothing else, so files are copied by small jobs."""

from __future__ import annotations

import base64
import os
import secrets
import socket
import time
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, ClassVar, Literal

from pydantic import ValidationInfo, field_validator

from fever import layout
from fever.config import setting
from fever.errors import FeverError
from fever.files import user_path
from fever.job import LOG
from fever.launch.clusters.base import ClusterTarget
from fever.launch.clusters.link import Link
from fever.launch.clusters.package import pack
from fever.launch.clusters.ray_jobs import ApiError, RayJobs
from fever.launch.clusters.ssh import Unreachable, shell_word
from fever.runs.mirror import ANSWERS, Exchange, Mirror, read_line, write_line

if TYPE_CHECKING:
    from fever.launch.jobs import Job

FILES_SECONDS = 300.0  # for a job that copies files
SYNC_SECONDS = 20.0  # between two such jobs while a run is shown


class Existing(ClusterTarget):
    """A Ray that runs already, perhaps somebody else's."""

    named_by_file: ClassVar[bool] = False
    starts_ray: ClassVar[bool] = False

    kind: Literal["ray"] = "ray"
    address: str = setting(..., "of its head, 10.0.0.7:6379, or of its dashboard, http://10.0.0.7:8265")

    @field_validator("cpus_per_node", "interface", "scratch", "unset", "connect_seconds", "name", "packages", "extras")
    @classmethod
    def _runs_already(cls, value: Any, info: ValidationInfo) -> Any:
        if value != cls.model_fields[str(info.field_name)].default:
            raise ValueError("it applies only to a Ray that fever starts; remove it")
        return value

    @property
    def job_variables(self) -> dict[str, str]:
        return self.env  # its Ray was not started with them

    def require_up(self, file: str) -> None:
        """No check here: `open_link` raises FeverError if Ray does not answer."""

    def open_link(self, file: str) -> Link:
        return JobsLink(self)

    def connect(self, job: Job) -> Link:
        return JobsLink(self)


class JobsLink(Link):
    """A connection to a Ray that takes jobs only."""

    def __init__(self, target: Existing) -> None:
        super().__init__()
        self.name, self.id, self.head, self.python = "ray", target.address, "", target.python or "python"
        self.jobs = RayJobs(find_dashboard(target.address), own_token())
        self.runs = target.runs
        self.synced = time.monotonic()

    def prepare(self) -> None:
        """Find out the absolute path of the folder of runs, and whether fever's dependencies are installed."""
        write_line(requests := self._exchange(), {"do": "inspect", "folder": self.runs})
        requests.flush()
        answer = read_line(requests)
        self.runs = answer["folder"]
        if answer["missing"]:
            what = ", ".join(answer["missing"])
            raise FeverError(f"the Python of Ray at {self.id} has no {what}; install fever's dependencies for it")

    def streams(self) -> tuple[BinaryIO, BinaryIO]:
        exchange = self._exchange()
        return exchange, exchange

    def _exchange(self) -> Exchange:
        return Exchange(partial(_answer_by_job, self.jobs, self.python))

    def mirror(self, run: Path, remote_path: str) -> Mirror:
        mirror = super().mirror(run, remote_path)
        mirror.announced = False  # every job that answers is a new server
        return mirror

    def sync(self, job: Job, to: Path | None = None, whole: bool = True) -> int:
        self._write_log(job, to or job.run)
        self.synced = time.monotonic()
        return super().sync(job, to, whole)

    def refresh(self, job: Job) -> None:
        """Copy the log; other files cost a job, so they are copied only now and then, and at the end."""
        if job.code is not None or time.monotonic() - self.synced > SYNC_SECONDS:
            self.sync(job, whole=False)
        else:
            self._write_log(job, job.run)

    def _write_log(self, job: Job, run: Path) -> None:
        (run / layout.JOB).mkdir(parents=True, exist_ok=True)
        with suppress(ApiError):  # a Ray that was restarted does not know the job
            (run / layout.JOB / LOG).write_text(self.jobs.logs(job.facts["id"]))


def _answer_by_job(jobs: RayJobs, python: str, requests: bytes) -> bytes:
    """The answers to requests about files, by a job that gets the requests with its code and prints the answers."""
    package, name = pack("", more={"request": requests}), f"fever-files-{secrets.token_hex(4)}"
    jobs.upload(package)
    try:
        jobs.submit(name, f"{shell_word(python)} -m fever.runs.mirror request", {"working_dir": package.uri})
        status, printed = jobs.wait(name, FILES_SECONDS), jobs.logs(name)
    finally:
        with suppress(FeverError):
            jobs.stop(name)
            jobs.forget(name)
    found = [line for line in printed.splitlines() if line.startswith(ANSWERS)]
    if status != "SUCCEEDED" or not found:
        raise FeverError(f"the job that copies files failed: {' | '.join(printed.strip().splitlines()[-3:])}")
    return base64.b64decode(found[-1][len(ANSWERS) :])


def find_dashboard(address: str) -> str:
    """The URL of a Ray's Jobs API, from the address of its dashboard or of its head."""
    if "://" in address:
        return address.rstrip("/")
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host, int(port)), timeout=5):
            pass
    except (OSError, UnicodeError) as error:
        raise FeverError(f"no Ray answers at {address}: {getattr(error, 'strerror', None) or error}") from None
    try:
        RayJobs(f"http://{address}", own_token()).version()
        return f"http://{address}"
    except (ApiError, Unreachable, ValueError, KeyError):
        return f"http://{_ask_head(address)}"


def _ask_head(address: str) -> str:
    """The address of a Ray's dashboard, as its head knows it."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    from ray._private import ray_constants as constants
    from ray._raylet import GcsClient  # type: ignore[attr-defined]

    try:
        client = GcsClient(address=address)
        known = client.internal_kv_get(constants.DASHBOARD_ADDRESS.encode(), constants.KV_NAMESPACE_DASHBOARD)
    except Exception as error:  # noqa: BLE001 - Ray raises many kinds, which all mean the same here
        raise FeverError(f"no Ray answers at {address}: {' '.join(str(error).split())[:200]}") from None
    if known is None:
        raise FeverError(f"Ray at {address} does not take jobs; it was started without its dashboard")
    host, _, port = known.decode().rpartition(":")
    try:
        with socket.create_connection((host, int(port)), timeout=5):
            return known.decode()
    except OSError:
        head = address.rpartition(":")[0]
        forward = f"ssh -N -L 8265:{known.decode()} {head}"
        where = f"Ray's jobs are at {known.decode()} of {head}, which cannot be reached from here"
        raise FeverError(f"{where}; forward a port with: {forward}, then use --on http://127.0.0.1:8265") from None


def own_token() -> str | None:
    """The user's token for Ray, from where Ray itself looks for it."""
    if token := os.environ.get("RAY_AUTH_TOKEN"):
        return token
    path = user_path(os.environ.get("RAY_AUTH_TOKEN_PATH", "~/.ray/auth_token"))
    return path.read_text().strip() if path.is_file() else None
