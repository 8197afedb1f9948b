"""`fever tunnel`: a cluster's pages on this machine, and its runs kept up to date here."""

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
from fever.launch.clusters.link import Connection, Link
from fever.launch.clusters.ssh import Unreachable
from fever.launch.clusters.ssh_up import Record
from fever.launch.jobs import Job
from fever.launch.on_host.host import free_port
from fever.system import start

DASHBOARD, BOARD = 8265, 6006  # the ports that people know
SYNC_SECONDS = 2.0


def open_tunnel(record: Record, port: int | None) -> None:
    """Forward, mirror and serve until Ctrl-C or the connection breaks."""
    said: set[str] = set()
    with Connection(record, usable_port(port, DASHBOARD)) as connection, Board() as board:
        print(f"Ray dashboard  http://127.0.0.1:{connection.call.port}  its token: {record.folder / 'token'}")
        board.show({job.run.parent for job in jobs_of(record)})
        print("runs           " + (", ".join(str(job.run) for job in jobs_of(record)) or "none yet"))
        print("Ctrl-C closes it; nothing on the cluster changes", flush=True)
        try:
            while True:
                own = jobs_of(record)
                board.show({job.run.parent for job in own})
                for job in own:
                    if not job.home:
                        keep_up(connection, job, said)
                time.sleep(SYNC_SECONDS)
        except KeyboardInterrupt:
            print()


def keep_up(link: Link, job: Job, said: set[str]) -> None:
    """Bring home what is new of a job; what keeps it from coming is said once and does not hold up the others."""
    try:
        link.look(job)
    except Unreachable:
        raise
    except FeverError as error:
        if (sentence := f"{job.name}: {error}") not in said:
            said.add(sentence)
            print(sentence, flush=True)


def usable_port(wanted: int | None, usual: int) -> int:
    """The port that is wanted, or the usual one, or any if that is taken."""
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


class Board:
    """TensorBoard over the folders of runs, if it is installed here; started anew when there are more of them."""

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
            print("TensorBoard    comes with the first run", flush=True)
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

    def __enter__(self) -> Board:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
