"""Ray's Jobs API over HTTP: the part of it that fever uses."""

from __future__ import annotations

import http.client
import json
import time
import urllib.error
import urllib.request
from typing import TYPE_CHECKING, Any

from fever.errors import FeverError
from fever.launch.clusters.ssh import Unreachable

if TYPE_CHECKING:
    from fever.launch.clusters.package import Package

ANSWER_SECONDS = 60.0  # for Ray to answer
OVER = {"SUCCEEDED": 0, "FAILED": 1, "STOPPED": 130}  # states in which a job has ended -> exit code, if Ray knows none


class RayJobs:
    """A client of Ray's Jobs API; raises Unreachable if there is no answer, ApiError if it is an error."""

    def __init__(self, url: str, token: str | None) -> None:
        self.url = url
        own = urllib.request.ProxyHandler({} if "//127.0.0.1:" in url else None)  # a forwarded port needs no proxy
        self.opener = urllib.request.build_opener(own)
        self.headers = {"Authorization": f"Bearer {token}"} if token else {}

    def _call(self, method: str, path: str, content: bytes | None = None, kind: str = "application/json") -> Any:
        headers = {**self.headers, **({"Content-Type": kind} if content is not None else {})}
        try:
            request = urllib.request.Request(self.url + path, content, headers, method=method)
            with self.opener.open(request, timeout=ANSWER_SECONDS) as answer:
                text = answer.read()
        except urllib.error.HTTPError as error:
            said = error.read().decode(errors="replace").strip().splitlines()
            if error.code in (401, 403):
                raise FeverError(f"{self.url} refuses the token") from None
            raise ApiError(error.code, said[-1] if said else error.reason) from None
        except (OSError, http.client.HTTPException) as error:
            raise Unreachable(f"Ray's jobs at {self.url} do not answer: {error}") from None
        except ValueError as error:
            raise FeverError(f"{self.url} cannot be the address of a Ray: {error}") from None
        try:
            return json.loads(text) if text else None
        except ValueError:
            raise ApiError(200, f"not JSON; check that {self.url} is Ray's dashboard") from None

    def version(self) -> str:
        """The version of Ray that answers."""
        return self._call("GET", "/api/version")["ray_version"]

    def upload(self, package: Package) -> None:
        """Upload an archive, unless Ray has it already."""
        place = f"/api/packages/{package.uri.replace('://', '/')}"
        try:
            self._call("GET", place)
        except ApiError:
            self._call("PUT", place, package.content, "application/octet-stream")

    def submit(self, name: str, entrypoint: str, runtime: dict[str, Any]) -> None:
        body = {"submission_id": name, "entrypoint": entrypoint, "runtime_env": runtime, "metadata": {"fever": name}}
        self._call("POST", "/api/jobs/", json.dumps(body).encode())

    def details(self, name: str) -> dict[str, Any] | None:
        """Ray's description of a job; None if Ray does not know it."""
        try:
            return self._call("GET", f"/api/jobs/{name}")
        except ApiError as error:
            if error.code == 404:
                return None
            raise

    def states(self) -> dict[str, str]:
        """The states of all jobs that fever has submitted, in Ray's words, by job name."""
        rows = [(row.get("metadata") or {}, row["status"]) for row in self._call("GET", "/api/jobs/")]
        return {own["fever"]: status for own, status in rows if "fever" in own}

    def nodes(self) -> list[dict[str, Any]]:
        """The machines, as Ray's dashboard shows them."""
        return self._call("GET", "/nodes?view=summary")["data"]["summary"]

    def stop(self, name: str) -> None:
        """Tell a job to end; Ray kills it if it does not."""
        self._call("POST", f"/api/jobs/{name}/stop", b"")

    def forget(self, name: str) -> None:
        """Remove a job that has ended from Ray's list."""
        self._call("DELETE", f"/api/jobs/{name}")

    def logs(self, name: str) -> str:
        """All that a job has printed."""
        return self._call("GET", f"/api/jobs/{name}/logs")["logs"]

    def wait(self, name: str, seconds: float) -> str:
        """Wait for a job's end; returns its state in Ray's words. Raises FeverError after so many seconds."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if (status := (self.details(name) or {"status": "LOST"})["status"]) in (*OVER, "LOST"):
                return status
            time.sleep(0.2)
        raise FeverError(f"{name} did not end within {seconds:.0f} s")


class ApiError(FeverError):
    """An HTTP error from Ray's Jobs API."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(f"Ray's jobs answered {code}: {text}")
        self.code = code
