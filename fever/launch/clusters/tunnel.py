"""`fever tunnel`: the live page, Ray's dashboard and TensorBoard of a cluster on this machine; its runs are copied."""

from __future__ import annotations

import os
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from fever.board.server import Board
from fever.errors import FeverError
from fever.launch.clusters.jobs import jobs_of
from fever.launch.clusters.link import Link, SshLink
from fever.launch.clusters.ray_page import RayPage
from fever.launch.clusters.record import ClusterRecord
from fever.launch.clusters.ssh import Unreachable
from fever.launch.jobs import Job
from fever.launch.on_host.host import free_port
from fever.system import start
from fever.text import say
from fever.training.tensorboard import find_program

DASHBOARD = 8265  # the usual port of Ray's dashboard
TENSORBOARD = 6006  # and TensorBoard's
SYNC_SECONDS = 2.0  # between two copies


def open_tunnel(record: ClusterRecord, port: int | None) -> None:
    """Serve the live page, forward ports and copy runs until Ctrl-C, or until the connection breaks."""
    jobs = jobs_of(record)
    folder = jobs[-1].run.parent if jobs else Path("runs")
    port = usable_port(port, DASHBOARD)
    with (
        SshLink(record) as link,
        RayPage(link.jobs.url, record.token, port) as page,
        TensorBoard() as tensorboard,
        Board(folder) as board,
    ):
        say(f"fever board    {board.url}  shows {folder}")
        say(f"Ray dashboard  {page.url}")
        tensorboard.show({job.run.parent for job in jobs})
        say("runs           " + (", ".join(str(job.run) for job in jobs) or "none yet"))
        say("Ctrl-C closes it; nothing on the cluster changes")
        _copy_until_interrupted(record, link, lambda jobs: tensorboard.show({job.run.parent for job in jobs}))


def usable_port(wanted: int | None, usual: int) -> int:
    """The wanted port, or else the usual one, or any free one if that is taken."""
    port = wanted or usual
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            if wanted:
                raise FeverError(f"port {wanted} is taken here: {error.strerror}; choose another --port") from None
            return free_port()
    return port


def copy_runs(record: ClusterRecord) -> None:
    """Copy the cluster's runs to this machine as they grow, until Ctrl-C, or until the connection breaks."""
    with SshLink(record) as link:
        _copy_until_interrupted(record, link)


def _copy_until_interrupted(
    record: ClusterRecord, link: Link, look: Callable[[list[Job]], None] = lambda jobs: None
) -> None:
    """Copy what is new of all jobs, again and again; `look` sees the jobs before."""
    reported: set[str] = set()
    try:
        while True:
            own = jobs_of(record)
            look(own)
            for job in own:
                if not job.home:
                    copy_new(link, job, reported)
            time.sleep(SYNC_SECONDS)
    except KeyboardInterrupt:
        say("")


def copy_new(link: Link, job: Job, reported: set[str]) -> None:
    """Copy what is new of a job; a problem is printed once and does not keep the other jobs from being copied."""
    try:
        link.look(job)
    except Unreachable:
        raise
    except FeverError as error:
        if (sentence := f"{job.name}: {error}") not in reported:
            reported.add(sentence)
            say(sentence)


class TensorBoard:
    """TensorBoard on the folders of runs, if it is installed; restarted when there is another folder."""

    def __init__(self) -> None:
        self.program = find_program()
        self.port = usable_port(None, TENSORBOARD)
        self.folders: set[Path] | None = None
        self.process: subprocess.Popen[bytes] | None = None

    def show(self, folders: set[Path]) -> None:
        if folders == self.folders:
            return
        if self.program is None:
            say("TensorBoard    is not installed here: pip install tensorboard")
        elif not folders:
            say("TensorBoard    starts with the first run")
        else:
            self._start(self.program, sorted(folders))
        self.folders = folders

    def _start(self, program: str, folders: list[Path]) -> None:
        if self.process is None:
            say(f"TensorBoard    http://127.0.0.1:{self.port}")
        self.close()
        where = ["--logdir", str(folders[0])]
        if len(folders) > 1:
            where = ["--logdir_spec", ",".join(f"{folder.name}:{folder}" for folder in folders)]
        words = [program, *where, "--host", "127.0.0.1", "--port", str(self.port)]
        self.process = start(words, os.environ, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def close(self) -> None:
        if self.process is not None:
            self.process.terminate()
            self.process.wait()

    def __enter__(self) -> TensorBoard:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
