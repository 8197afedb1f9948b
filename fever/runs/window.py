"""Rows of a part of a file, found without reading the rest: what a picture needs when it is zoomed."""

from __future__ import annotations

import itertools
import os
from pathlib import Path
from typing import IO, Any

from fever.files import newest, open_rows, parse_row, reading
from fever.runs.rows import SAMPLED_LINE, SMALL, Wanted, every, fields_of

Rows = list[dict[str, Any]]
SKIPPED = 100  # damaged lines in a row, beyond which no row is looked for


def window(
    path: Path,
    number: str,
    field: str,
    low: float | None,
    high: float | None,
    points: int,
    wanted: Wanted = every,
) -> tuple[Rows, bool]:
    """Rows whose `field` is from `low` to `high` (None: no limit), in order, of each its `wanted` fields; and whether
    these are all.

    If there are more than `points`, about so many of them, spread evenly. The field must grow from row to row, as
    steps, seconds and episodes do; `number` names the field that counts rows (`newest`). Where the part is large, only
    the rows that are returned are read, so it takes no longer the larger the file is.
    """
    with reading(path), open_rows(path) as file:
        size = os.fstat(file.fileno()).st_size
        begin = 0 if low is None else _first(file, size, field, low, beyond=False)
        end = size if high is None else _first(file, size, field, high, beyond=True)
        if end - begin <= SMALL:
            file.seek(begin)
            lines = file.read(max(0, end - begin)).split(b"\n")
            rows = newest((row for line in lines if (row := parse_row(line))), number)
            rows = [row for row in rows if _inside(row, field, low, high)]
            step = max(1, -(-len(rows) // points))
            chosen = [row for place, row in enumerate(rows) if place % step == 0 or place == len(rows) - 1]
            return [fields_of(row, wanted) for row in chosen], step == 1
        found = (_row_at(file, begin + place * (end - begin) // points) for place in range(points))
        rows = newest((row for row, _ in found if row is not None), number)
        return [fields_of(row, wanted) for row in rows if _inside(row, field, low, high)], False
    return [], True


def _first(file: IO[bytes], size: int, field: str, limit: float, beyond: bool) -> int:
    """The place of the first line whose field is `limit` or more, or with `beyond` more than it; by bisection."""
    low, high = 0, size
    while low < high:
        middle = (low + high) // 2
        row, after = _row_at(file, middle)
        value = None if row is None else row.get(field)
        if isinstance(value, int | float) and (value <= limit if beyond else value < limit):
            low = after
        else:
            high = middle
    return _line_behind(file, low)


def _row_at(file: IO[bytes], place: int) -> tuple[dict[str, Any] | None, int]:
    """The first row that begins at or behind a place, and the place behind it; None if no row follows soon."""
    _line_behind(file, place)
    lines = itertools.islice(iter(lambda: file.readline(SAMPLED_LINE), b""), SKIPPED)
    row = next((row for line in lines if (row := parse_row(line))), None)
    return row, file.tell()


def _line_behind(file: IO[bytes], place: int) -> int:
    """Go to the beginning of the first line that begins at or behind a place; returns where that is."""
    file.seek(max(0, place - 1))
    if place:
        while (part := file.readline(SAMPLED_LINE)) and not part.endswith(b"\n"):
            pass
    return file.tell()


def _inside(row: dict[str, Any], field: str, low: float | None, high: float | None) -> bool:
    value = row.get(field)
    if not isinstance(value, int | float):
        return False
    return (low is None or value >= low) and (high is None or value <= high)
