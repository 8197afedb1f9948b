"""A user of a lab's machines who is not root, at home in a folder that all machines share."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.lab.machines import Lab

NUMBER = 4001  # of the user and of the group
# Show the machine a folder in which nobody else may look, $1, as one with nothing in it but the paths $2, ...
OPEN = """
set -e
closed=$1; shift
number=0
for path; do number=$((number + 1)); mkdir -p /run/open/$number; mount --bind "$path" /run/open/$number; done
mount -t tmpfs -o mode=755 tmpfs "$closed"
number=0
for path; do number=$((number + 1)); mkdir -p "$path"; mount --bind /run/open/$number "$path"; done
"""


@contextmanager
def open_folder() -> Iterator[Path]:
    """A temporary folder in which all users may look; those of pytest are root's alone."""
    folder = Path(tempfile.mkdtemp(prefix="fever-lab-"))
    folder.chmod(0o755)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def add_user(lab: Lab, name: str) -> Path:
    """Add a user to all machines of a lab whose folder is open, and let them run this Python; returns their home."""
    home = lab.folder / "home" / name
    home.mkdir(parents=True)
    os.chown(home, NUMBER, NUMBER)
    passwd = lab.folder / "passwd"
    passwd.write_text(Path("/etc/passwd").read_text() + f"{name}:x:{NUMBER}:{NUMBER}::{home}:/bin/bash\n")
    for machine in lab.everyone:
        machine.run(["mount", "--bind", passwd, "/etc/passwd"], check=True)
        for closed, paths in closed_folders().items():
            machine.run(["bash", "-c", OPEN, "open", closed, *paths], check=True)
    return home


def closed_folders() -> dict[str, list[str]]:
    """The folders above this Python and its packages that only their owner may enter, with what is needed in them."""
    found: dict[str, list[str]] = {}
    needed = [sys.base_prefix, sys.prefix, *(entry for entry in sys.path if os.path.isdir(entry or "."))]
    for path in dict.fromkeys(Path(entry).resolve() for entry in needed):
        closed = (folder for folder in reversed(path.parents) if not folder.stat().st_mode & 0o001)
        if (first := next(closed, None)) is not None:
            found.setdefault(str(first), []).append(str(path))
    return found
