"""The folder of a search on the machine of its driver, and how trials on other machines write into it.

A trial on the driver's machine writes where its files stay. On another machine it writes into a temporary folder and
sends that through Ray, so that no file system need be shared; a keeper on the driver's machine unpacks it.
"""

from __future__ import annotations

import io
import shutil
import tarfile
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fever import layout
from fever.files import read_json

LEFT_OUT = (
    layout.WORK,
    layout.REPLAY,
    layout.LOCK,
)  # of a run directory: environments' own files, and what can be gathered again


@dataclass(frozen=True)
class Store:
    """A search's folder, as any of its processes sees it."""

    root: Path  # on the driver's machine
    node: str  # Ray's name for that machine
    keeper: Any = None  # the actor there, if there are other machines

    def local(self) -> Folder:
        """The folder to work in on this machine."""
        import ray
        from ray._private import worker

        if self.keeper is None or ray.get_runtime_context().get_node_id() == self.node:
            return Folder(self.root, None)
        node: Any = worker._global_node
        session = node.get_session_dir_path()  # goes with Ray, if this process is killed
        return Folder(Path(tempfile.mkdtemp(prefix="fever-trials-", dir=session)), self.keeper)


@dataclass(frozen=True)
class Folder:
    """Where a trial's process reads and writes; `keeper` is None if that is the search's folder itself."""

    root: Path
    keeper: Any

    def send(self, name: str) -> None:
        """Have the driver's machine hold what this folder has under a name; returns when it does."""
        if self.keeper is not None and (self.root / name).is_dir():
            import ray

            ray.get(self.keeper.put.remote(name, pack(self.root / name)))

    def fetch(self, name: str) -> Path:
        """The path of what the driver's machine holds under a name, which may be nothing."""
        if self.keeper is not None:
            import ray

            data = ray.get(self.keeper.get.remote(name))
            if data is not None:
                unpack(data, self.root / name)
        return self.root / name

    def close(self) -> None:
        """Remove a temporary folder."""
        if self.keeper is not None:
            shutil.rmtree(self.root, ignore_errors=True)


class Keeper:
    """Runs on the driver's machine; made a Ray actor where it is started."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def put(self, name: str, data: bytes) -> None:
        unpack(data, self.root / name)

    def get(self, name: str) -> bytes | None:
        return pack(self.root / name) if (self.root / name).is_dir() else None


def pack(folder: Path) -> bytes:
    """A folder as bytes, without what need not travel."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for path in sorted(folder.iterdir()):
            if path.name not in LEFT_OUT:
                archive.add(path, path.name)
    return buffer.getvalue()


def unpack(data: bytes, folder: Path) -> None:
    """Have a folder hold exactly what was packed."""
    partial = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        archive.extractall(partial, filter="data")
    shutil.rmtree(folder, ignore_errors=True)
    partial.rename(folder)


def read_list(path: Path) -> list[Any]:
    """The list in a small JSON file, or an empty one."""
    return read_json(path)["list"] if path.is_file() else []
