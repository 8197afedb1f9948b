"""Small files of a run directory: whole or absent, JSON, and lines of JSON that grow while others read them."""

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

TAIL = 1 << 16  # bytes that are read at once from a file's end


def write_whole(path: Path, text: str, mode: int = 0o644, lasting: bool = False) -> None:
    """Write a file that is there whole or not at all, whoever else writes it on whichever machine; with `lasting` also
    if this machine loses its power."""
    partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    with open(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "w") as file:
        file.write(text)
        if lasting:
            file.flush()
            os.fsync(file.fileno())
    partial.replace(path)


def write_atomically(path: Path, text: str) -> None:
    """Write a whole file or nothing."""
    write_whole(path, text, lasting=True)


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
    """Open a file of lines to add more; one that a kill has cut short is ended, and does not spoil the next."""
    file = open(path, "a+b")  # noqa: SIM115 - the caller closes it
    if file.seek(0, os.SEEK_END):
        file.seek(-1, os.SEEK_END)
        if file.read(1) != b"\n":
            file.write(b"\n")
    return io.TextIOWrapper(file)


def last_line(path: Path) -> dict[str, Any]:
    """The last whole row of a JSON-lines file, or nothing."""
    if not path.is_file():
        return {}
    with open(path, "rb") as file:
        start, tail = file.seek(0, os.SEEK_END), b""
        while start:
            length = min(start, TAIL)
            start = file.seek(start - length)
            tail = file.read(length) + tail
            lines = tail.split(b"\n")
            for line in reversed(lines[1:] if start else lines):  # the first one may begin before
                with suppress(ValueError):
                    return json.loads(line)
    return {}


def newest(rows: Iterable[dict[str, Any]], number: str) -> list[dict[str, Any]]:
    """Rows in the order of their numbers: one that was made again replaces the old one, and all that came after it."""
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
