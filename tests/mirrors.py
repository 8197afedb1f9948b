"""A run directory's content, and mirrors of folders over a connection inside this process."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from fever.runs import mirror as files
from fever.runs.mirror import Mirror

RUN = {"config.yaml": b"env: x\n", "metrics.jsonl": b'{"a": 1}\n', "checkpoints/0001/arrays": os.urandom(3 << 20)}


def write(folder: Path, content: dict[str, bytes]) -> None:
    for name, data in content.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)


def read(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@contextmanager
def mirrored(here: Path, there: Path, limit: int | None = None) -> Iterator[Mirror]:
    """A mirror over a connection to a server in a thread; after so many bytes of answers the connection breaks."""
    near, far = socket.socketpair()
    requests, answers = far.makefile("rb"), far.makefile("wb")
    stream: Any = answers if limit is None else Breaking(answers, far, limit)
    server = threading.Thread(target=serve, args=(requests, stream), daemon=True)
    server.start()
    here.mkdir(exist_ok=True)
    try:
        yield Mirror(here, str(there), near.makefile("wb"), near.makefile("rb"))
    finally:
        near.shutdown(socket.SHUT_RDWR)
        near.close()
        server.join(10)


def serve(requests: Any, answers: Any) -> None:
    with suppress(OSError):
        files.serve(requests, answers)


class Breaking:
    """A stream that breaks."""

    def __init__(self, stream: Any, connection: socket.socket, limit: int) -> None:
        self.stream, self.connection, self.left = stream, connection, limit

    def write(self, data: bytes) -> None:
        self.stream.write(data[: self.left])
        self.left -= len(data)
        if self.left <= 0:
            self.stream.flush()
            self.connection.shutdown(socket.SHUT_RDWR)
            raise BrokenPipeError

    def flush(self) -> None:
        self.stream.flush()
