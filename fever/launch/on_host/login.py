"""The first process on a login node: it knows the environment there and hands over to the fever in it.

Like `agent.py`, whose actions this extends, it is sent with every call and uses the standard library only.

    login     describe the node, then answer a mirror's requests, and these:
      unpack  {"folder": a job's} puts the archive CODE that was pushed into the folder into its subfolder `code`
      enter   {"folder"} becomes the fever in that subfolder (`launch/login/session.py`), in the environment's Python
      tidy    {"folder"} removes all of a job's folder but the run directory
      discard {"folder"} removes a job's folder
      call    {"words", "seconds"} runs a command and answers its exit code and what it printed
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from contextlib import suppress
from pathlib import Path
from typing import Any

from fever.launch.on_host import agent, environments, host
from fever.runs import mirror

ARCHIVE, CODE, RECORDS = "code.zip", "code", "records"  # in a job's folder
SSH_VARIABLES = ("SSH_CLIENT", "SSH_CONNECTION", "SSH_TTY")  # a shell that has them reads other start-up files
SESSION = "fever.launch.login.session"


def login(request: dict[str, Any]) -> dict[str, Any]:
    """Describe this node, then serve. `request["own"]`: this very Python is the environment."""

    def interpreter() -> str | None:
        return sys.executable if request["own"] else environments.interpreter(request)

    python = interpreter()
    home = os.path.realpath(os.path.expanduser("~"))
    facts = {"home": home, "python": python, "versions": environments.versions(python) if python else None}
    agent.say({**facts, "free": host.free(Path(os.path.expanduser(request["runs"])))})

    def enter(job: dict[str, Any]) -> dict[str, Any]:
        folder, python = Path(job["folder"]), interpreter()  # which may have been set up since
        if not (folder / CODE).is_dir():
            return {"entered": False}
        if python is None:
            return {"error": f"the environment that the job of {folder} runs in is no longer there"}
        environments.Use(python).end()  # notes that it was used now
        os.chdir(folder / CODE)
        variables = {name: value for name, value in os.environ.items() if name not in SSH_VARIABLES}
        variables |= {"FEVER_HOME": str(folder / RECORDS), "PYTHONWARNINGS": "ignore"}
        os.execve(python, [python, "-m", SESSION], variables)  # nosec B606 # words, no shell

    more = {"unpack": unpack, "enter": enter, "tidy": tidy, "discard": discard, "call": call}
    mirror.serve(sys.stdin.buffer, sys.stdout.buffer, more=more)
    return {}


def unpack(request: dict[str, Any]) -> dict[str, Any]:
    """Put an archive's files into place; programs among them stay programs."""
    folder = Path(request["folder"])
    shutil.rmtree(folder / CODE, ignore_errors=True)
    with zipfile.ZipFile(folder / ARCHIVE) as archive:
        for entry in archive.infolist():
            path = Path(archive.extract(entry, folder / CODE))
            if mode := entry.external_attr >> 16 & 0o777:
                path.chmod(mode | 0o600)
    (folder / ARCHIVE).unlink()
    return {}


def tidy(request: dict[str, Any]) -> dict[str, Any]:
    """Remove what was sent with a job, and the records of its fever."""
    for name in (CODE, RECORDS):
        shutil.rmtree(Path(request["folder"]) / name, ignore_errors=True)
    (Path(request["folder"]) / ARCHIVE).unlink(missing_ok=True)
    return {}


def discard(request: dict[str, Any]) -> dict[str, Any]:
    """Remove a job's folder, and the folder of runs if that is empty."""
    folder = Path(request["folder"])
    shutil.rmtree(folder, ignore_errors=True)
    with suppress(OSError):
        folder.parent.rmdir()
    return {}


def call(request: dict[str, Any]) -> dict[str, Any]:
    """Run a command; its code is null if it cannot be run or does not end in time."""
    try:
        done = subprocess.run(
            request["words"], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            text=True, timeout=request["seconds"],
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        return {"code": None, "printed": getattr(error, "strerror", None) or "it does not answer"}
    return {"code": done.returncode, "printed": done.stdout}


agent.ACTIONS["login"] = login
