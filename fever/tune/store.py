"""The folder of a search on the driver's machine, and how trials on other machines write into it.

A trial on the driver's machine writes into the search's folder itself. On another machine it writes into a temporary
folder, which is copied through Ray to an actor on the driver's machine, so no shared file system is needed.
"""

from __future__ import annotations

import shutil
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fever import layout
from fever.files import read_json, refuse_link
from fever.runs.mirror import Exchange, Mirror, RemoteFolderGone, answer

STORE_SECONDS = 600  # for the driver's machine to answer a request, which may hold a checkpoint
LEFT_OUT = (f"{layout.WORK}/", f"{layout.REPLAY}/", layout.LOCK)  # environments' own files, and what can be regained


class TrialStore:
    """The actor on the driver's machine that answers the requests of trials' `Mirror`s."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def answer(self, requests: bytes) -> bytes:
        return answer(requests, self.root)


@dataclass(frozen=True)
class SearchFolder:
    """A search's folder, as any of its processes sees it."""

    root: Path  # on the driver's machine
    node: str  # Ray's id of that machine
    store: Any = None  # the TrialStore actor on that machine; None: there are no other machines

    def local(self) -> TrialFolder:
        """The folder to work in on this machine."""
        import ray
        from ray._private import worker

        if self.store is None or ray.get_runtime_context().get_node_id() == self.node:
            return TrialFolder(self.root, None)
        node: Any = worker._global_node
        session = node.get_session_dir_path()  # removed with Ray if this process is killed
        root = Path(tempfile.mkdtemp(prefix="fever-trials-", dir=session), self.root.name)  # loggers use the name
        root.mkdir()
        return TrialFolder(root, self.store)


@dataclass(frozen=True)
class TrialFolder:
    """Where a trial's process reads and writes; `store` is None if that is the search's folder itself."""

    root: Path
    store: Any

    def place(self, name: str) -> Path:
        """The local path of a subfolder, which is about to be written. Raises `FeverError` if it leads elsewhere."""
        path = self.root / name
        for part in (*reversed(path.relative_to(self.root).parents[:-1]), path.relative_to(self.root)):
            refuse_link(self.root / part)
        return path

    def send(self, name: str) -> None:
        """Make the driver's copy of a subfolder equal to the local one; returns when it is."""
        if self.store is not None and (self.root / name).is_dir():
            self._mirror(name).push(skip=LEFT_OUT)

    def fetch(self, name: str) -> Path:
        """Make the local copy of a subfolder equal to the driver's, if the driver has it; returns the local path.
        Raises `FeverError` if that is a symbolic link: a trial's run is resumed, pruned and removed."""
        path = self.place(name)
        if self.store is not None:
            with suppress(RemoteFolderGone):
                self._mirror(name).pull(skip=LEFT_OUT)
        return path

    def _mirror(self, name: str) -> Mirror:
        import ray

        exchange = Exchange(lambda requests: ray.get(self.store.answer.remote(requests), timeout=STORE_SECONDS))
        return Mirror(self.root / name, name, exchange, exchange, prune=("",))  # of both sides only one is right

    def close(self) -> None:
        """Remove a temporary folder."""
        if self.store is not None:
            shutil.rmtree(self.root, ignore_errors=True)


def read_list(path: Path) -> list[Any]:
    """The list in a small JSON file, or an empty one."""
    return read_json(path)["list"] if path.is_file() else []
