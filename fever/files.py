"""Files of a run directory: atomic writes, JSON, and JSON-lines files that are read while they grow."""

from __future__ import annotations

import hashlib
import io
import json
import os
import secrets
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

from fever.errors import FeverError

TAIL = 1 << 16  # bytes read at once from the end of a file


def write_atomically(path: Path, text: str, mode: int = 0o644, fsync: bool = True) -> None:
    """Write a file that readers see whole or not at all, whichever machine they or other writers are on."""
    partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    with open(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "w") as file:
        file.write(text)
        if fsync:
            file.flush()
            os.fsync(file.fileno())
    partial.replace(path)


def read_json(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise FeverError(f"{path} is missing or damaged") from error


def sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def flush_to_disk(path: Path) -> None:
    with open(path, "rb") as file:
        os.fsync(file.fileno())


def open_to_append(path: Path) -> TextIO:
    """Open a file of lines to append to; a last line that a kill cut short is ended with a newline."""
    file = open(path, "a+b")  # noqa: SIM115 - the caller closes it
    if file.seek(0, os.SEEK_END):
        file.seek(-1, os.SEEK_END)
        if file.read(1) != b"\n":
            file.write(b"\n")
    return io.TextIOWrapper(file)


def last_line(path: Path) -> dict[str, Any]:
    """The last complete row of a JSON-lines file; empty if there is none."""
    if not path.is_file():
        return {}
    with open(path, "rb") as file:
        start, tail = file.seek(0, os.SEEK_END), b""
        while start:
            length = min(start, TAIL)
            start = file.seek(start - length)
            tail = file.read(length) + tail
            lines = tail.split(b"\n")
            for line in reversed(lines[1:] if start else lines):  # the first line may start in the part before
                with suppress(ValueError):
                    return json.loads(line)
    return {}


def newest(rows: Iterable[dict[str, Any]], number: str) -> list[dict[str, Any]]:
    """Rows in increasing order of `number`: a repeated number replaces the old row and all that followed it."""
    kept: list[dict[str, Any]] = []
    for row in rows:
        while kept and kept[-1][number] >= row[number]:
            kept.pop()
        kept.append(row)
    return kept


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Rows of a JSON-lines file; a last line cut short by a kill is left out."""
    if not path.is_file():
        return
    with open(path) as file:
        for line in file:
            try:
                yield json.loads(line)
            except ValueError:
                continue
