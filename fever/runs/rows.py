"""Files of a run with one JSON row per line: they stay small however long a run is, and are read while they grow.

The rule by which rows are left out (docs/run-directory.md has it, too): the newest `keep` rows stay, of the next `keep`
older ones every second, of the next 2 `keep` every fourth, of the next 4 `keep` every eighth, and so on: those whose
number is a multiple of 2, 4, 8. The first row stays. So n rows become about `keep` · (1 + log2(n / `keep`) / 2).
"""

from __future__ import annotations

import glob
import gzip
import io
import itertools
import json
import logging
import os
import re
import shutil
import zlib
from array import array
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

import numpy as np

from fever.errors import DamagedError, FeverError
from fever.files import TAIL, last_line, lines_of, open_regular, open_rows, parse_row, reading, replacing
from fever.runs.disk import Appender, Disk

KEEP_METRICS = 10_000  # newest rows of metrics that all stay, and rows between two looks whether some can go
KEEP_EPISODES = 50_000  # newest episodes of the archive that all stay
RECENT_BYTES = 16 << 20  # size at which recent episodes move to the archive
ARCHIVE_BYTES = 32 << 20  # size, compressed, at which the archive is thinned
SMALL = 8 << 20  # bytes; a smaller file is read whole where a sample of rows would be enough
BLOCK = 1 << 14  # bytes between two sampled rows of an archive, which can be read in order only
SAMPLED_LINE = 1 << 16  # bytes of a sampled row; longer ones are passed over
UNPACKED_BYTES = 4 << 30  # of an archive; fever's own have less than a tenth
LEVEL = 3  # of compression: as fast as 1, and a tenth smaller
Wanted = Callable[[str], bool]  # whether a field of this name is wanted
DAMAGE = (EOFError, gzip.BadGzipFile, zlib.error)  # what reading a damaged archive raises


def stride(age: int, keep: int) -> int:
    """The rule: of rows that are `age` rows older than the newest, multiples of this number stay."""
    return 1 << (age // keep).bit_length()


def every(name: str) -> bool:
    """All fields are wanted."""
    return True


# writing


class RowWriter:
    """Appends rows to a file, and thins the file when it has gained `keep` rows."""

    def __init__(self, path: Path, number: str, keep: int, disk: Disk | None = None) -> None:
        """`number`: the name of the field that counts rows. No other process writes the file."""
        self.path, self.number, self.keep = path, number, keep
        remove_partial(path)
        self.file = Appender(path, disk or Disk(path.parent))
        self.gained = self._count()  # since it was thinned, or more

    def _count(self) -> int:
        if not self.path.is_file():
            return 0
        with open_rows(self.path) as file:
            return sum(block.count(b"\n") for block in _blocks(file))

    def write(self, rows: list[dict[str, Any]]) -> None:
        self.file.write("".join(json.dumps(row) + "\n" for row in rows).encode())
        self.gained += len(rows)
        if self.is_full and not self.file.waiting:
            self.gained = 0
            try:
                self.shorten()
            except (OSError, FeverError) as error:  # a full disk: all rows stay, and are thinned another time
                logging.warning("%s could not be shortened: %s", self.path, error)
            self.file.close()  # another file has its name; it is opened by the next row

    @property
    def is_full(self) -> bool:
        return self.gained >= self.keep

    def shorten(self) -> None:
        thin(self.path, self.number, self.keep)

    def close(self) -> None:
        self.file.close()


class ArchivingWriter(RowWriter):
    """Appends rows to a file. When it is full its rows move to a compressed archive, and that is thinned."""

    def __init__(self, path: Path, archive: Path, number: str, keep: int, disk: Disk | None = None) -> None:
        super().__init__(path, number, keep, disk)
        self.archive = archive
        self.written: int | None = None  # checksum of the archive as this process left it
        remove_partial(archive)

    @property
    def is_full(self) -> bool:
        return self.file.size >= RECENT_BYTES

    def shorten(self) -> None:
        """A kill in between leaves rows in both files; readers take them once. A damaged archive is kept by another
        name, because nobody would read what is appended to it; a new one begins with what can be read of it."""
        exists, whole = self.archive.is_file(), self._is_whole()
        with replacing(self.archive) as new, open_regular(self.path) as recent:
            if exists and whole:
                with open_regular(self.archive) as old:
                    shutil.copyfileobj(old, new, 1 << 20)
            elif exists:
                _pack(stored_lines(self.archive), new)
            with gzip.GzipFile("", "wb", LEVEL, new, mtime=0) as member:  # a gzip file may have many
                shutil.copyfileobj(recent, member, 1 << 20)
            if exists and not whole:
                _set_aside(self.archive)
        with replacing(self.path):  # by an empty file
            pass
        if self.archive.stat().st_size >= ARCHIVE_BYTES:
            thin(self.archive, self.number, self.keep)
        self.written = _checksum(self.archive)

    def _is_whole(self) -> bool:
        """Whether the archive can be read to its end. It is unpacked only if this process has not written it so."""
        if not self.archive.is_file() or self.written == _checksum(self.archive):
            return True
        try:
            with _open(self.archive) as file:
                for _ in _blocks(file):
                    pass
        except DAMAGE:
            return False
        return True


def _blocks(file: IO[bytes]) -> Iterator[bytes]:
    return iter(lambda: file.read(1 << 20), b"")


def _checksum(path: Path) -> int:
    checksum = 0
    with open_regular(path) as file:
        for block in _blocks(file):
            checksum = zlib.crc32(block, checksum)
    return checksum


def _pack(lines: Iterable[bytes], new: IO[bytes]) -> None:
    """Write lines as one member of a gzip file."""
    lines = iter(lines)
    with gzip.GzipFile("", "wb", LEVEL, new, mtime=0) as target:
        for some in iter(lambda: b"".join(itertools.islice(lines, 1000)), b""):
            target.write(some)


def _set_aside(path: Path) -> None:
    """Give a damaged file another name, under which fever neither reads nor deletes it."""
    numbers = (f"-{number}" if number > 1 else "" for number in itertools.count(1))
    kept = next(other for end in numbers if not os.path.lexists(other := path.with_name(f"{path.name}.damaged{end}")))
    path.rename(kept)
    logging.warning("%s is damaged, and is kept as %s; a new one begins with what can be read of it", path, kept.name)


def remove_partial(path: Path) -> None:
    """Remove what a process that was killed left of `replacing`."""
    for left in path.parent.glob(f".{glob.escape(path.name)}.????????"):
        left.unlink(missing_ok=True)


def thin(path: Path, number: str, keep: int) -> None:
    """Leave out rows by the rule, rows that newer ones replace, and lines that are no rows. The file is replaced
    atomically, or left as it is if all its lines stay. It is read twice, so that little memory is needed. Raises
    `DamagedError`, and changes nothing, if an archive cannot be read to its end."""
    pattern = re.compile(rb'"%s": ?(\d{1,18})\b' % number.encode())
    matches = (pattern.search(line) if line.endswith(b"}\n") else None for line in stored_lines(path, whole=True))
    numbers = np.array(array("q", (int(match[1]) if match else -1 for match in matches)))
    stays = choose(numbers, keep)
    if stays.all():
        return
    with replacing(path) as new:
        chosen = itertools.compress(stored_lines(path, whole=True), stays)
        if path.suffix == ".gz":
            _pack(chosen, new)
        else:
            new.writelines(chosen)


def choose(numbers: np.ndarray, keep: int) -> np.ndarray:
    """Which rows with these numbers [n] stay, as booleans [n]; a line without a number has -1, and does not."""
    rows = numbers >= 0
    after = np.append(np.where(rows, numbers, np.iinfo(np.int64).max), np.iinfo(np.int64).max)
    lowest = np.minimum.accumulate(after[::-1])[::-1]  # [n + 1]: of this row and all that follow
    stays = rows & (numbers < lowest[1:])  # others were made again by a resumed run
    if stays.any():
        ages = numbers[stays].max() - numbers
        first = np.flatnonzero(stays)[0]
        octave = np.frexp(np.maximum(ages, 0) // keep)[1]  # the bit length of a whole number, as in `stride`
        stays &= numbers % (1 << octave.astype(np.int64)) == 0
        stays[first] = True
    return stays


# reading


def stored_lines(path: Path, whole: bool = False) -> Iterator[bytes]:
    """The lines of a file, or of a compressed one up to where it is damaged; none if there is no file. With `whole`,
    damage raises `DamagedError`."""
    with reading(path):
        try:
            with _open(path) as file:
                left = UNPACKED_BYTES
                for line in lines_of(file):
                    left -= len(line)
                    if left < 0:
                        raise FeverError(f"{path} is damaged: it holds more than {UNPACKED_BYTES >> 30} GB")
                    yield line
        except DAMAGE as error:
            if whole:
                raise DamagedError(f"{path} is damaged") from error


@contextmanager
def _open(path: Path) -> Iterator[IO[bytes]]:
    with open_rows(path) as file:
        yield io.BufferedReader(gzip.GzipFile(fileobj=file), BLOCK) if path.suffix == ".gz" else file


def stored_rows(path: Path, wanted: Wanted = every) -> Iterator[dict[str, Any]]:
    """The rows of a file or of a compressed one, of each its wanted fields; what is no row is left out."""
    return (fields_of(row, wanted) for line in stored_lines(path) if (row := parse_row(line)))


def sample(path: Path, points: int, wanted: Wanted = every) -> list[dict[str, Any]]:
    """About `points` rows spread evenly over a file, the first and the last among them; all rows of a small file. Of
    each row, its `wanted` fields.

    Nothing else of a large file is read, so it takes no longer the larger it is.
    """
    rows = []
    with reading(path), open_rows(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size <= SMALL:
            return [fields_of(row, wanted) for row in stored_rows(path)]
        places = (place * size // points for place in range(points))
        rows = [fields_of(row, wanted) for place in places if (row := _row_behind(file, place))]
    last = fields_of(last_line(path), wanted)
    return [*rows, last] if last else rows


def _row_behind(file: IO[bytes], place: int) -> dict[str, Any] | None:
    """The first row that begins at or behind a place; None if the row read before reaches beyond it."""
    if place < file.tell():
        return None
    if place:
        file.seek(place - 1)
        file.readline(SAMPLED_LINE)
    return parse_row(file.readline(SAMPLED_LINE))


def sample_archive(path: Path, points: int, wanted: Wanted = every) -> list[dict[str, Any]]:
    """At most about `points` rows, at least half as many of a large file, spread evenly over a compressed file. All of
    it is unpacked, and little parsed and kept."""
    lines: list[bytes] = []
    step = 1  # blocks between two lines that are kept
    with reading(path), suppress(*DAMAGE), _open(path) as file:
        for number, block in enumerate(iter(lambda: file.read(BLOCK), b"")):
            if number * BLOCK > UNPACKED_BYTES:
                break
            if number % step == 0:
                lines += block.split(b"\n", 2)[1:2]  # the first whole line
            if len(lines) >= 2 * points:
                lines, step = lines[::2], 2 * step
    picks = lines[:: max(1, len(lines) // points)]
    return [fields_of(row, wanted) for line in picks if (row := parse_row(line))]


def fields_of(row: dict[str, Any], wanted: Wanted) -> dict[str, Any]:
    """The wanted fields of a row, which may be anybody's and have any number of them."""
    return {name: value for name, value in row.items() if wanted(name)}


class Follower:
    """Reads what a file of rows has gained since the last look, also when it was thinned in between."""

    def __init__(self, path: Path, number: str, from_end: bool = False) -> None:
        """`from_end`: rows that are there already are not new."""
        self.path, self.number = path, number
        self.place, self.line, self.last = 0, b"", -1  # behind the last line read, that line, and its number
        if from_end:
            with reading(path), open_regular(path) as file:
                size = file.seek(0, os.SEEK_END)
                file.seek(max(0, size - TAIL))
                lines = file.read(TAIL).rpartition(b"\n")[0].split(b"\n")
                if lines[-1]:
                    self.line = lines[-1] + b"\n"
                    self.place = max(0, size - TAIL) + sum(len(line) + 1 for line in lines)
                    known = (parse_row(line) or {} for line in lines)
                    self.last = max((row[number] for row in known if isinstance(row.get(number), int)), default=-1)

    def rows(self) -> list[dict[str, Any]]:
        """The new rows. After the file was replaced, those with a number higher than the last one's."""
        with reading(self.path), open_regular(self.path) as file:
            file.seek(self.place - len(self.line))
            replaced = file.read(len(self.line)) != self.line
            known, self.place = (self.last, 0) if replaced else (-1, self.place)
            file.seek(self.place)
            return [row for row in self._read(file) if row[self.number] > known]
        return []

    def _read(self, file: IO[bytes]) -> Iterator[dict[str, Any]]:
        for line in lines_of(file):
            if not line.endswith(b"\n"):  # it is being written
                return
            self.place, self.line = self.place + len(line), line
            if (row := parse_row(line)) and isinstance(row.get(self.number), int):
                yield row
                self.last = row[self.number]
