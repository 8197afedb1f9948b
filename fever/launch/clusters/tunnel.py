"""`fever tunnel`: Ray's dashboard and TensorBoard on this machine, with the cluster's runs copied as they grow."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

from fever.errors import FeverError
from fever.launch.clusters.jobs import jobs_of
from fever.launch.clusters.link import Link, SshLink
from fever.launch.clusters.record import ClusterRecord
from fever.launch.clusters.ssh import Unreachable
from fever.launch.jobs import Job
from fever.launch.on_host.host import free_port
from fever.system import start

DASHBOARD, BOARD = 8265, 6006  # the usual ports of Ray's dashboard and TensorBoard
SYNC_SECONDS = 2.0  # between two copies


def open_tunnel(record: ClusterRecord, port: int | None) -> None:
    """Forward ports and copy runs until Ctrl-C, or until the connection breaks."""
    reported: set[str] = set()
    with SshLink(record, usable_port(port, DASHBOARD)) as link, TensorBoard() as board:
        print(f"Ray dashboard  http://127.0.0.1:{link.call.port}  its token: {record.folder / 'token'}")
        board.show({job.run.parent for job in jobs_of(record)})
        print("runs           " + (", ".join(str(job.run) for job in jobs_of(record)) or "none yet"))
        print("Ctrl-C closes it; nothing on the cluster changes", flush=True)
        try:
            while True:
                own = jobs_of(record)
                board.show({job.run.parent for job in own})
                for job in own:
                    if not job.home:
                        copy_new(link, job, reported)
                time.sleep(SYNC_SECONDS)
        except KeyboardInterrupt:
            print()


def copy_new(link: Link, job: Job, reported: set[str]) -> None:
    """Copy what is new of a job; a problem is printed once and does not keep the other jobs from being copied."""
    try:
        link.look(job)
    except Unreachable:
        raise
    except FeverError as error:
        if (sentence := f"{job.name}: {error}") not in reported:
            reported.add(sentence)
            print(sentence, flush=True)


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


class TensorBoard:
    """TensorBoard on the folders of runs, if it is installed; restarted when there is another folder."""

    def __init__(self) -> None:
        own = Path(sys.executable).with_name("tensorboard")
        self.program = str(own) if own.exists() else shutil.which("tensorboard")
        self.port = usable_port(None, BOARD)
        self.folders: set[Path] | None = None
        self.process: subprocess.Popen[bytes] | None = None

    def show(self, folders: set[Path]) -> None:
        if folders == self.folders:
            return
        if self.program is None:
            print("TensorBoard    is not installed here: pip install tensorboard", flush=True)
        elif not folders:
            print("TensorBoard    starts with the first run", flush=True)
        else:
            self._start(self.program, sorted(folders))
        self.folders = folders

    def _start(self, program: str, folders: list[Path]) -> None:
        if self.process is None:
            print(f"TensorBoard    http://127.0.0.1:{self.port}", flush=True)
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
