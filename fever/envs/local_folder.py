"""A folder on this machine's own disk for every environment whose constructor has a parameter `scratch`.

All folders of a process are in one, which is removed when the environments are closed. That of a process that was
killed is removed with its job or its Ray, or else by the next process that needs one.
"""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
from collections.abc import Hashable
from pathlib import Path

from fever.scratch import Scratch

LOCAL = "FEVER_LOCAL"  # environment variable: a folder on this machine that is removed when the job or Ray ends
PREFIX = "fever-env-"


class LocalFolders:
    """The folders of this process's environments."""

    def __init__(self) -> None:
        self.root: Path | None = None  # of all of them
        self.owned: Scratch | None = None  # the root, if nobody else removes it
        self.folders: dict[Hashable, Path] = {}

    def make(self, owner: Hashable, name: str) -> Path:
        """A new folder, whose name begins with `name`. The one that this owner had is removed: its environment is made
        anew."""
        if owner in self.folders:
            shutil.rmtree(self.folders.pop(owner), ignore_errors=True)
        folder = Path(tempfile.mkdtemp(prefix=f"{name}-", dir=self.root or self._make_root()))
        self.folders[owner] = folder
        return folder

    def _make_root(self) -> Path:
        parent = os.environ.get(LOCAL)
        if parent is not None and os.path.isdir(parent):
            self.root = Path(tempfile.mkdtemp(prefix="env-", dir=parent))
        else:
            self.owned = Scratch(tempfile.gettempdir(), PREFIX, for_ray=False)
            self.root = self.owned.path
        atexit.register(self.remove)
        return self.root

    def remove(self) -> None:
        """Remove all of them."""
        atexit.unregister(self.remove)
        self.folders.clear()
        if self.owned is not None:
            self.owned.remove()
        elif self.root is not None:
            shutil.rmtree(self.root, ignore_errors=True)
        self.root = self.owned = None


LOCAL_FOLDERS = LocalFolders()
