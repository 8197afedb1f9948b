"""A Ray that is not fever's: it takes jobs, and nothing else. Files are sent and fetched by small jobs."""

from __future__ import annotations

import base64
import io
import os
import secrets
import socket
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from fever import layout
from fever.errors import FeverError
from fever.launch.clusters.link import Link
from fever.launch.clusters.package import pack
from fever.launch.clusters.ray_jobs import ApiError, RayJobs
from fever.launch.clusters.ssh import Unreachable, shell_word
from fever.launch.targets import Existing
from fever.runs.mirror import MARK, Mirror, read_line, write_line

if TYPE_CHECKING:
    from fever.launch.jobs import Job

FILES_SECONDS = 300.0  # for a job that brings files
SYNC_SECONDS = 20.0  # between two such jobs while a run is shown


class JobsOnly(Link):
    """To a Ray that is not fever's."""

    def __init__(self, target: Existing) -> None:
        super().__init__()
        self.name, self.id, self.head, self.python = "ray", target.address, "", target.python or "python"
        self.jobs = RayJobs(find_page(target.address), own_token())
        self.runs = target.runs
        self.synced = time.monotonic()

    def prepare(self) -> None:
        """Find out where runs go there, and whether fever's dependencies are there."""
        write_line(requests := Exchange(self.jobs, self.python), {"do": "where", "folder": self.runs})
        requests.flush()
        answer = read_line(requests)
        self.runs = answer["folder"]
        if answer["lacks"]:
            what = ", ".join(answer["lacks"])
            raise FeverError(f"the Python of Ray at {self.id} has no {what}; install fever's dependencies there")

    def streams(self) -> tuple[BinaryIO, BinaryIO]:
        exchange = Exchange(self.jobs, self.python)
        return exchange, exchange

    def mirror(self, run: Path, there: str) -> Mirror:
        mirror = super().mirror(run, there)
        mirror.begun = False  # every job that answers is a new one
        return mirror

    def sync(self, job: Job, to: Path | None = None, whole: bool = True) -> int:
        self._write_log(job, to or job.run)
        self.synced = time.monotonic()
        return super().sync(job, to, whole)

    def refresh(self, job: Job) -> None:
        """The log at every look; files cost a job, and come now and then and at the end."""
        if job.code is not None or time.monotonic() - self.synced > SYNC_SECONDS:
            self.sync(job, whole=False)
        else:
            self._write_log(job, job.run)

    def _write_log(self, job: Job, run: Path) -> None:
        (run / layout.JOB).mkdir(parents=True, exist_ok=True)
        with suppress(ApiError):  # a Ray that was started anew does not know it
            (run / layout.JOB / "log.txt").write_text(self.jobs.logs(job.facts["id"]))


class Exchange(io.BytesIO):
    """Requests about files that a job answers: what was written goes there with the job, what it prints comes back."""

    def __init__(self, jobs: RayJobs, python: str) -> None:
        super().__init__()
        self.jobs, self.python = jobs, python
        self.asked = b""

    def write(self, data: Any) -> int:
        self.asked += bytes(data)
        return len(data)

    def flush(self) -> None:
        if not self.asked:
            return
        package = pack("", more={"request": self.asked})
        self.asked, name = b"", f"fever-files-{secrets.token_hex(4)}"
        command = f"{shell_word(self.python)} -m fever.runs.mirror request"
        self.jobs.upload(package)
        try:
            self.jobs.submit(name, command, {"working_dir": package.uri})
            status, printed = self.jobs.wait(name, FILES_SECONDS), self.jobs.logs(name)
        finally:
            with suppress(FeverError):
                self.jobs.stop(name)
                self.jobs.forget(name)
        found = [line for line in printed.splitlines() if line.startswith(MARK)]
        if status != "SUCCEEDED" or not found:
            raise FeverError(f"a job that brings files failed: {' | '.join(printed.strip().splitlines()[-3:])}")
        self.seek(0)
        self.truncate(0)
        super().write(base64.b64decode(found[-1][len(MARK) :]))
        self.seek(0)


def find_page(address: str) -> str:
    """Where a Ray answers about jobs, whether its page or its head was named."""
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
    """The page of a Ray, by its head's address."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    from ray._private import ray_constants as constants
    from ray._raylet import GcsClient  # type: ignore[attr-defined]

    try:
        client = GcsClient(address=address)
        known = client.internal_kv_get(constants.DASHBOARD_ADDRESS.encode(), constants.KV_NAMESPACE_DASHBOARD)
    except Exception as error:  # noqa: BLE001 - Ray has many, and all mean the same here
        raise FeverError(f"no Ray answers at {address}: {' '.join(str(error).split())[:200]}") from None
    if known is None:
        raise FeverError(f"Ray at {address} has no page for jobs; it was started without its dashboard")
    host, _, port = known.decode().rpartition(":")
    try:
        with socket.create_connection((host, int(port)), timeout=5):
            return known.decode()
    except OSError:
        head = address.rpartition(":")[0]
        way = f"ssh -N -L 8265:{known.decode()} {head}"
        where = f"Ray's jobs are at {known.decode()} of {head}, which cannot be reached from here"
        raise FeverError(f"{where}; open a way with: {way}, then use --on http://127.0.0.1:8265") from None


def own_token() -> str | None:
    """The user's token for Ray, where Ray itself would look for it."""
    if token := os.environ.get("RAY_AUTH_TOKEN"):
        return token
    path = Path(os.environ.get("RAY_AUTH_TOKEN_PATH", "~/.ray/auth_token")).expanduser()
    return path.read_text().strip() if path.is_file() else None
