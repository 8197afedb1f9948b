"""Following a job on a cluster: its state is asked for, and what is new of its run directory copied, at every look."""

from __future__ import annotations

import sys
import time

from fever.errors import FeverError
from fever.job import ENDED, QUEUED, RUNNING
from fever.launch.clusters.link import UNKNOWN, ClusterDown, Link, connect
from fever.launch.clusters.ray_jobs import ApiError
from fever.launch.clusters.ssh import Unreachable
from fever.launch.jobs import Job, JobWatch, resume_words
from fever.text import say

BROKEN_SECONDS = 300.0  # for a broken connection, or a dead Ray, to come back


class ClusterWatch(JobWatch):
    """Follows the state of a job on a cluster; copies its files at every look, over a connection that may break."""

    connection: Link | None = None
    silent: float | None = None  # since when Ray has not answered although its machine does

    def look(self) -> tuple[str, str]:
        if not self.job.home:
            self._refresh()
        if self.job.code is not None:
            return ENDED, f"exit code {self.job.code}"
        return self.state, self.reason

    def _refresh(self) -> None:
        deadline, reported = time.monotonic() + BROKEN_SECONDS, False
        while True:
            try:
                self.look_once()
                return
            except (Unreachable, ApiError) as error:
                self.close()
                if time.monotonic() > deadline:
                    raise
                if not reported:
                    say(f"fever: the connection broke ({error}); the run continues, trying again", sys.stderr)
                    reported = True
                time.sleep(2)

    def look_once(self) -> None:
        """Ask for the state once and copy what is new; nothing is asked of a cluster that is down."""
        try:
            self.connection = self.connection or connect(self.job)
            status = self.connection.look(self.job)
        except ClusterDown:
            if self.job.code is None:
                self.state, self.reason = ENDED, "its cluster is down"
            return
        self.state, self.reason = (QUEUED, "starting") if status == "PENDING" else (RUNNING, "")
        if status != UNKNOWN:
            self.silent = None
        elif self.silent is None:
            self.silent = time.monotonic()
            say("fever: Ray on the cluster does not answer; trying again", sys.stderr)
        elif time.monotonic() - self.silent > BROKEN_SECONDS:
            what = f"{self.job.name} seems to have died with its Ray; what it saved is in {self.job.run}"
            raise FeverError(f"{what}, resume it with: {resume_words(self.job.run)}")

    def close(self) -> None:
        if self.connection is not None:
            self.connection.close()
            self.connection = None


def fetch(job: Job) -> None:
    """Copy what is new of a job's run directory, if its cluster is still up."""
    if not job.home:
        watch = ClusterWatch(job)
        try:
            watch.look_once()
        finally:
            watch.close()
