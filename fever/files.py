"""Files of a run directory: atomic writes, JSON, JSON-lines files that are read while they grow; standard output."""

from __future__ import annotations

import errno
import hashlib
import io
import itertools
import json
import os
import secrets
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, TextIO

from fever.errors import DamagedError, FeverError

TAIL = 1 << 16  # bytes at the end of a file in which its last row is looked for first
LARGEST = 1 << 53  # of counters and seconds; a whole number up to it is also a float
LONGEST_LINE = 1 << 20  # bytes of a line; what is longer is damaged
MOST_BYTES = 1 << 30  # of a file of rows that is read whole; fever's own stay far below
JSON_BYTES = 64 << 20  # of a JSON file, which is read whole; fever's own, with the hashes of many files, have a few MB
SEAL = "manifest_sha256"  # field of a sealed manifest: the hash of the text without this field


def user_path(path: str | Path) -> Path:
    """A path as users write it: `~` and `~name` at its beginning are home folders. Raises `FeverError` if there is no
    such user, or no file could have such a name, for which pathlib's methods would raise."""
    try:
        expanded = Path(path).expanduser()
        expanded.lstat()
    except RuntimeError as error:
        raise FeverError(f"{path} is not a path: no home folder is known for {Path(path).parts[0]}") from error
    except (OSError, ValueError) as error:
        if isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG:
            raise FeverError(f"{path} is not a path: {error.strerror}") from error
    return expanded


def write_atomically(path: Path, text: str, mode: int = 0o644, fsync: bool = True) -> None:
    """Write a file that readers see whole or not at all, whichever machine they or other writers are on."""
    with replacing(path, mode, fsync) as file:
        file.write(text.encode())


@contextmanager
def replacing(path: Path, mode: int = 0o666, fsync: bool = True) -> Iterator[IO[bytes]]:
    """A new file that takes the place of `path` when the block is left without an exception."""
    partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        with open(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
            yield file
            if fsync:
                file.flush()
                os.fsync(file.fileno())
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def open_regular(path: Path, flags: int = os.O_RDONLY) -> io.BufferedReader:
    """Open a file to read. Raises `OSError` if it is a pipe or a device, which might never end, or a folder."""
    number = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        require_regular(number, path)
        return open(number, "rb")
    except BaseException:
        os.close(number)
        raise


def refuse_link(path: Path) -> None:
    """Raise `FeverError` if there is something else than a file or a folder: a link may lead anywhere, and a pipe or a
    device may never end."""
    try:
        mode = path.lstat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        return
    if stat.S_ISLNK(mode):
        raise FeverError(f"{path} is a symbolic link, which fever does not follow; remove it first")
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        raise FeverError(f"{path} is neither a file nor a folder; remove it first")


def require_regular(number: int, path: Path) -> None:
    """Raise `OSError` if an open file is not a regular one."""
    mode = os.fstat(number).st_mode
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if not stat.S_ISREG(mode):
        raise OSError(errno.EINVAL, "Not a regular file", str(path))


def _read_text(path: Path) -> str:
    """The text of a JSON file; raises `OSError` if it is none that fever would have written."""
    with open_regular(path) as file:
        content = file.read(JSON_BYTES + 1)
    if len(content) > JSON_BYTES:
        raise OSError(errno.EFBIG, os.strerror(errno.EFBIG), str(path))
    return content.decode()


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; raises `FeverError` if there is none."""
    try:
        values = json.loads(_read_text(path))
    except (OSError, ValueError, RecursionError) as error:
        raise FeverError(f"{path} is missing or damaged") from error
    if not isinstance(values, dict):
        raise FeverError(f"{path} is damaged: it does not hold a JSON object")
    return values


def sealed(values: dict[str, Any]) -> str:
    """The text of a manifest with these values and its own hash; `read_sealed` reads it."""
    digest = hashlib.sha256(_text(values).encode()).hexdigest()
    return _text({**values, SEAL: digest})


def read_sealed(path: Path, unsealed: tuple[int, ...] = ()) -> dict[str, Any]:
    """The values of a manifest. Raises `DamagedError` if a single bit of it is not as it was written. Manifests whose
    field `format` is one of `unsealed` are older than the seal, and only have to be JSON."""
    try:
        text = _read_text(path)
        values = json.loads(text)
    except FileNotFoundError as error:
        raise DamagedError(f"{path.name} is missing") from error
    except (OSError, ValueError, RecursionError) as error:
        raise DamagedError(f"{path.name} cannot be read") from error
    if not isinstance(values, dict):
        raise DamagedError(f"{path.name} cannot be read")
    if SEAL not in values and values.get("format") in unsealed:
        return values
    content = {name: value for name, value in values.items() if name != SEAL}
    if sealed(content) != text:  # the text, because other texts have the same values: 1E5 for 1e5
        raise DamagedError(f"{path.name} has changed since it was written")
    return content


def _text(values: dict[str, Any]) -> str:
    return json.dumps(values, indent=2) + "\n"


def as_count(value: Any) -> int:
    """A counter out of a file, which may be anybody's; raises `ValueError` for anything else."""
    if type(value) is not int or not 0 <= value < LARGEST:
        raise ValueError(f"{str(value)[:50]} is not a whole number")
    return value


def as_number(value: Any) -> float:
    """A number out of a file; raises `ValueError` or `OverflowError` for anything else."""
    if type(value) not in (int, float):
        raise ValueError(f"{str(value)[:50]} is not a number")
    return float(value)


def as_seconds(value: Any) -> float:
    """A duration out of a file; raises `ValueError` for anything else."""
    if not 0 <= as_number(value) < LARGEST:
        raise ValueError(f"{str(value)[:50]} is not a duration")
    return float(value)


def as_list(value: Any) -> list[Any]:
    """A list out of a file; raises `ValueError` for anything else."""
    if not isinstance(value, (list, tuple)):
        raise ValueError(f"{str(value)[:50]} is not a list")
    return [*value]


def sha256(path: Path) -> str:
    with open_regular(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def unreadable_tensors() -> tuple[type[Exception], ...]:
    """What safetensors raises for a file that is damaged, or has types or shapes that NumPy has not."""
    from safetensors import SafetensorError

    return SafetensorError, OSError, AttributeError, KeyError, OverflowError, TypeError, ValueError


def flush_to_disk(path: Path) -> None:
    with open(path, "rb") as file:
        os.fsync(file.fileno())


def open_unbuffered(path: Path, lines: bool = True) -> io.FileIO:
    """Open a file to append to, which is no symbolic link. In a file of `lines`, a last one that was cut is ended."""
    number = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    file = io.FileIO(number, "a+")
    try:
        require_regular(number, path)
        if lines and file.seek(0, os.SEEK_END):
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b"\n":
                file.write(b"\n")
    except BaseException:
        file.close()
        raise
    return file


def last_line(path: Path) -> dict[str, Any]:
    """The last complete row of a JSON-lines file; empty if its last megabyte, or its last thousand lines, has none."""
    with reading(path), open_regular(path) as file:
        size = file.seek(0, os.SEEK_END)
        for length in (TAIL, LONGEST_LINE):
            start = file.seek(max(0, size - length))
            lines = file.read(length).split(b"\n")
            for line in itertools.islice(reversed(lines[1:] if start else lines), 1000):  # the first is not whole
                if row := parse_row(line):
                    return row
    return {}


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """A block that reads a file: left early if there is none; `FeverError` if it cannot be read."""
    try:
        yield
    except FileNotFoundError:
        pass
    except OSError as error:
        raise FeverError(f"{path} cannot be read: {error.strerror}") from error


def parse_row(line: bytes) -> dict[str, Any] | None:
    """The row in a line; None if there is none: it was cut short by a kill, or is damaged."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) else None


def newest(rows: Iterable[dict[str, Any]], number: str) -> list[dict[str, Any]]:
    """Rows in increasing order of `number`: a repeated number replaces the old row and all that followed it. Rows that
    have no such number are left out."""
    kept: list[dict[str, Any]] = []
    for row in rows:
        if not isinstance(row.get(number), int):
            continue
        while kept and kept[-1][number] >= row[number]:
            kept.pop()
        kept.append(row)
    return kept


def lines_of(file: IO[bytes]) -> Iterator[bytes]:
    """The lines of a file from where it is read; a damaged line that is too long comes in parts."""
    return iter(lambda: file.readline(LONGEST_LINE), b"")


def open_rows(path: Path) -> io.BufferedReader:
    """Open a file of rows to read it whole. Raises `FeverError` if it is larger than any that fever has written."""
    file = open_regular(path)
    if os.fstat(file.fileno()).st_size > MOST_BYTES:
        file.close()
        raise FeverError(f"{path} is damaged: it is larger than {MOST_BYTES >> 30} GB")
    return file


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Rows of a JSON-lines file; a last line cut short by a kill, and whatever is no row, is left out."""
    with reading(path), open_rows(path) as file:
        yield from (row for line in lines_of(file) if (row := parse_row(line)))


class _Dropping(io.FileIO):
    """A file whose writer is not told that nobody reads it any more, or that its disk is full."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data) or 0
        except OSError:
            return memoryview(data).nbytes


class _Lasting(io.TextIOWrapper):
    """A stream that stays open: environments run in this process, and some close standard output."""

    def close(self) -> None:
        self.flush()


def unbreakable(stream: TextIO) -> TextIO:
    """Standard output or error that drops what nobody reads, for example after `| head`, or in a closed terminal, and
    that nobody closes."""
    try:
        raw = _Dropping(stream.fileno(), "w", closefd=False)
    except (AttributeError, OSError, ValueError):  # there is none, or it is no file: tests, notebooks
        return stream
    stream.flush()
    by_line = stream.isatty() or raw.fileno() == 2
    buffer = io.BufferedWriter(raw)
    return _Lasting(buffer, encoding=stream.encoding, errors=stream.errors, line_buffering=by_line)
