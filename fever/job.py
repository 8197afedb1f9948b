"""The folder of a job: what its processes know of each other, on a file system that all its machines share.

    job/
      job.json         the kind of job and its settings
      run.yaml         what is trained
      start_from/      on other machines: the checkpoint whose weights the run begins with, if it has one
      script.sh        what the scheduler runs
      started.json     when the script began
      meeting.ID       rank 0 has cleared the folder: ranks that came before announce themselves again
      ranks/K.json     rank K: host, addresses, cores, versions
      plan.json        written by rank 0 once all have arrived: the ranks, and which of them starts Ray on which host
      plans/K.json     the same for 64 ranks: each reads only the part that it is in
      head.json        the address of Ray's head
      alive            a counter that rank 0 increases as long as it lives
      stop             the reason why the training is to save and stop
      exit.json        the driver's exit code, with which every rank exits
      left/K           rank K has cleaned up
      connected/HOST.json  the seconds that its Ray took to join
      breakdown.json   where the job's time went
      token            Ray's, readable by this user only
      log.txt          what the job has printed
      scheduler.txt    what the scheduler itself (PBS, LSF) says of the job at its end
      nodes/HOST.log   what happened on each host

Files appear whole (written beside and renamed). Nothing here waits: callers poll. Files are looked for by listing their
folder, because network file systems remember for a while that a name did not exist. Folders that grow with the number
of ranks are listed by rank 0 only.
"""

from __future__ import annotations

import errno
import json
import os
import secrets
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

from fever import layout
from fever.errors import FeverError
from fever.files import user_path, write_atomically

JOB = "FEVER_JOB"  # environment variable of the process that drives a job: its folder
AUTOSCALED = "FEVER_WORKERS"  # environment variable: how many machines an autoscaler may launch for this process
HOSTS = "FEVER_HOSTS"  # environment variable: how many hosts of a cluster that outlives jobs this process may use
CONTINUED = 75  # exit code of a run that was cut off by its job's limit: EX_TEMPFAIL, try again
QUEUED, RUNNING, ENDED = "queued", "running", "ended"  # states of a job

RECORD, RUN, SCRIPT, LOG = "job.json", "run.yaml", "script.sh", "log.txt"  # files of a job's folder
STARTED, BREAKDOWN, EXIT, REPORT = "started.json", "breakdown.json", "exit.json", "scheduler.txt"
PLAN, HEAD, ALIVE, STOP, TOKEN = "plan.json", "head.json", "alive", "stop", "token"
RANKS, PLANS, LEFT, CONNECTED, NODES = "ranks", "plans", "left", "connected", "nodes"  # and its subfolders
MEETING = "meeting."  # the first part of a file's name; the rest is the meeting's
START = "start_from"
READERS = 16  # files that are read at the same time
SILENT_SECONDS = 60.0  # without a sign of life of a job that its scheduler says is over
TRANSIENT = (RANKS, LEFT, PLAN, PLANS, HEAD, ALIVE, STOP, TOKEN)  # removed when the job ends


def records(part: str) -> Path:
    """A folder of this user's records: of jobs, of clusters."""
    return user_path(os.environ.get("FEVER_HOME", "~/.fever")) / part


def current_job() -> JobFolder | None:
    """The job that this process drives; None outside of jobs."""
    path = os.environ.get(JOB)
    return None if path is None else JobFolder(Path(path))


def autoscaled_machines() -> int | None:
    """How many machines Ray's autoscaler may launch for this process; None where there is no autoscaler."""
    count = os.environ.get(AUTOSCALED)
    return None if count is None else int(count)


def hosts_allowed() -> int | None:
    """How many hosts of a cluster that outlives jobs this process may use; None for all."""
    count = os.environ.get(HOSTS)
    return None if count is None else int(count)


class JobFolder:
    """One job's folder."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def of(cls, run: Path) -> JobFolder:
        """The folder of the job that trains a run."""
        return cls(run / layout.JOB)

    @property
    def run(self) -> Path:
        """The run directory that the folder is in."""
        return self.path.parent

    def clear(self, *keep: str) -> None:
        """Remove the files of an earlier attempt, except these; rank 0 does so before it announces itself."""
        for name in (*TRANSIENT, *self._meetings(), CONNECTED, EXIT):
            if name not in keep:
                self._remove(name)

    def tidy(self) -> None:
        """Remove what nobody needs after the job's end."""
        for name in (*TRANSIENT, *self._meetings()):
            self._remove(name)

    def _meetings(self) -> list[str]:
        return [name for name in self.names("") if name.startswith(MEETING)]

    @property
    def meeting(self) -> str | None:
        """The name of the meeting that rank 0 has opened; None if there is none."""
        return next((name.removeprefix(MEETING) for name in self._meetings()), None)

    def _remove(self, name: str) -> None:
        path = self.path / name
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            with suppress(IsADirectoryError):  # another rank has just made it anew
                path.unlink(missing_ok=True)

    def write(self, name: str, values: dict[str, Any], mode: int = 0o644) -> None:
        """Write a JSON file that appears whole."""
        self.write_text(name, json.dumps(values, indent=2) + "\n", mode)

    def write_text(self, name: str, text: str, mode: int = 0o644) -> None:
        path = self.path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, text, mode, fsync=False)

    def note(self, **facts: Any) -> None:
        """Add facts to the job's record, job.json; it has the job's environment variables and is the user's alone."""
        self.write(RECORD, {**(self.read(RECORD) or {}), **facts}, mode=0o600)

    def read(self, name: str, listed: bool = False) -> dict[str, Any] | None:
        """The content of a JSON file; None if it does not exist. Raises `FeverError` if it is damaged. `listed`: its
        folder need not be listed again."""
        text = self.read_text(name, listed)
        if text is None:
            return None
        with suppress(ValueError, RecursionError):
            if isinstance(values := json.loads(text), dict):
                return values
        raise FeverError(f"{self.path / name} is damaged")

    def read_all(self, names: list[str]) -> list[dict[str, Any] | None]:
        """The contents of JSON files whose folder was listed just now, several at a time: each may take a while."""
        if not names:
            return []
        with ThreadPoolExecutor(min(READERS, len(names))) as readers:
            return list(readers.map(lambda name: self.read(name, listed=True), names))

    def read_text(self, name: str, listed: bool = False) -> str | None:
        path = self.path / name
        try:
            return path.read_text() if listed or path.name in os.listdir(path.parent) else None
        except OSError as error:
            _only_missing(error)
            return None

    def names(self, folder: str) -> list[str]:
        """The files in a subfolder."""
        return list(self.files(folder))

    def files(self, folder: str) -> dict[str, int]:
        """The files in a subfolder with their inode numbers: a file that was replaced has another one."""
        try:
            with os.scandir(self.path / folder) as entries:
                return {entry.name: entry.inode() for entry in entries if not entry.name.startswith(".")}
        except OSError as error:
            _only_missing(error)
            return {}

    @property
    def log(self) -> Path:
        """What the job has printed."""
        return self.path / LOG

    def log_of(self, host: str) -> Path:
        return self.path / NODES / f"{host}.log"

    def last_words(self, host: str, lines: int = 5) -> str:
        """The last lines of a host's log, joined by "|"; empty if there is no log. Its file may have a longer name."""
        for path in sorted((self.path / NODES).glob(f"{host}.*log")):
            with suppress(OSError):
                return " | ".join(path.read_text(errors="replace").strip().splitlines()[-lines:])
        return ""

    def write_token(self) -> None:
        """Make the token for Ray, which only this user can read."""
        self.write_text(TOKEN, secrets.token_hex(32), mode=0o600)

    @property
    def token(self) -> Path:
        return self.path / TOKEN

    def drop_token(self) -> None:
        """Remove the token of a job that is over, if it was killed so that nothing of it could; not while there are
        signs of life, since a scheduler may be wrong."""
        with suppress(OSError):
            files = [path for path in (self.token, self.path / ALIVE) if path.exists()]
            if all(time.time() - path.stat().st_mtime > SILENT_SECONDS for path in files):
                self.token.unlink(missing_ok=True)

    @property
    def saved(self) -> bool:
        """Whether the run has a checkpoint to resume from; of a search, whether it has begun."""
        checkpoints = self.run / layout.CHECKPOINTS
        if (self.run / layout.TUNE).is_dir():
            return True
        return checkpoints.is_dir() and any(not name.startswith(".") for name in os.listdir(checkpoints))


def _only_missing(error: OSError) -> None:
    """Ignore that a file does not exist, or was replaced by another machine while it was read: callers ask again."""
    if error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.ESTALE, errno.EIO):
        raise error
