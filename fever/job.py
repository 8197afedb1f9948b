"""The meeting place of a job's processes: a folder that all its machines see, in which every file appears whole.

    job/
      job.json         what kind of job it is, and its settings
      run.yaml         what is trained
      ranks/K.json     who rank K is: host, addresses, cores, versions
      plan.json        rank 0's answer: who is part of this meeting, and who starts Ray on which host
      head.json        where Ray's head is
      alive            counted up by rank 0 as long as it lives
      stop             why the training is to save and stop
      exit.json        the driver's exit code, which every rank ends with
      left/K           rank K has cleaned up
      connected/HOST.json  how long its Ray took to join
      token            Ray's, for this user only
      log.txt          what the job has printed
      nodes/HOST.log   what happened on each host

Nothing here waits: callers poll. Files are looked for by listing their folder, because network file systems remember
for a while that a name did not exist.
"""

from __future__ import annotations

import errno
import json
import os
import secrets
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

from fever import layout
from fever.files import write_whole

JOB = "FEVER_JOB"  # environment variable of the process that drives a job: its folder
AUTOSCALED = "FEVER_WORKERS"  # environment variable: how many machines an autoscaler may launch for this process
CONTINUED = 75  # exit code of a run that was cut off by its job's limit: EX_TEMPFAIL, try again
TRANSIENT = ("ranks", "left", "plan.json", "head.json", "alive", "stop", "token")  # nothing of it stays


def records(part: str) -> Path:
    """A folder of this user's records: of jobs, of clusters."""
    return Path(os.environ.get("FEVER_HOME", "~/.fever")).expanduser() / part


def current_job() -> JobFolder | None:
    """The job that this process drives; None outside of jobs."""
    path = os.environ.get(JOB)
    return None if path is None else JobFolder(Path(path))


def autoscaled_machines() -> int | None:
    """How many machines Ray's autoscaler may launch for this process; None where there is no autoscaler."""
    count = os.environ.get(AUTOSCALED)
    return None if count is None else int(count)


class JobFolder:
    """One job's folder."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def clear(self, *keep: str) -> None:
        """Remove what an earlier meeting left here, but for these; rank 0 does so before it announces itself."""
        for name in (*TRANSIENT, "connected", "exit.json"):
            if name not in keep:
                self._remove(name)

    def tidy(self) -> None:
        """Remove what nobody needs after the end."""
        for name in TRANSIENT:
            self._remove(name)

    def _remove(self, name: str) -> None:
        path = self.path / name
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)

    def write(self, name: str, values: dict[str, Any], mode: int = 0o644) -> None:
        """Write a JSON file that is there whole or not at all."""
        self.write_text(name, json.dumps(values, indent=2) + "\n", mode)

    def write_text(self, name: str, text: str, mode: int = 0o644) -> None:
        path = self.path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, text, mode)

    def read(self, name: str) -> dict[str, Any] | None:
        """The content of a JSON file; None if it is not there."""
        text = self.read_text(name)
        return json.loads(text) if text is not None else None

    def read_text(self, name: str) -> str | None:
        path = self.path / name
        try:
            return path.read_text() if path.name in os.listdir(path.parent) else None
        except OSError as error:
            _only_missing(error)
            return None

    def names(self, folder: str) -> list[str]:
        """The files in a subfolder."""
        try:
            return [name for name in os.listdir(self.path / folder) if not name.startswith(".")]
        except OSError as error:
            _only_missing(error)
            return []

    @property
    def log(self) -> Path:
        """What the job has printed."""
        return self.path / "log.txt"

    def log_of(self, host: str) -> Path:
        return self.path / "nodes" / f"{host}.log"

    def last_words(self, host: str, lines: int = 5) -> str:
        """The end of a host's log, as part of a sentence; empty if it has none. It may be named by a longer name."""
        for path in sorted((self.path / "nodes").glob(f"{host}.*log")):
            with suppress(OSError):
                return " | ".join(path.read_text(errors="replace").strip().splitlines()[-lines:])
        return ""

    def write_token(self) -> None:
        """Make the job's token for Ray; only this user can read it."""
        self.write_text("token", secrets.token_hex(32), mode=0o600)

    @property
    def token(self) -> Path:
        return self.path / "token"

    @property
    def saved(self) -> bool:
        """Whether the run has a checkpoint to go on from; a search, whether it has begun."""
        checkpoints = self.path.parent / layout.CHECKPOINTS
        if (self.path.parent / layout.TUNE).is_dir():
            return True
        return checkpoints.is_dir() and any(not name.startswith(".") for name in os.listdir(checkpoints))


def _only_missing(error: OSError) -> None:
    """A file that is not there, or was replaced by another machine while it was read: callers ask again."""
    if error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.ESTALE, errno.EIO):
        raise error
