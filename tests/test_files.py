"""Folders kept the same over a connection: each byte once, verified, and what is interrupted goes on."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from fever.errors import FeverError
from fever.launch import files
from fever.launch.files import PARTIAL, Mirror

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


@pytest.fixture
def there(tmp_path: Path) -> Path:
    write(tmp_path / "there", RUN)
    return tmp_path / "there"


@pytest.fixture
def here(tmp_path: Path) -> Path:
    return tmp_path / "here"


def test_each_byte_moves_once(there: Path, here: Path) -> None:
    with mirrored(here, there) as mirror:
        assert mirror.pull()
        assert read(here) == RUN
        assert mirror.moved == sum(map(len, RUN.values()))
        assert not mirror.pull()
        with open(there / "metrics.jsonl", "ab") as file:
            file.write(b'{"a": 2}\n')
        before = mirror.moved
        assert mirror.pull()
        assert mirror.moved - before == 9
    with mirrored(here, there) as mirror:  # another connection begins with what is here
        assert not mirror.pull()
        with open(there / "metrics.jsonl", "ab") as file:
            file.write(b"more\n")
        mirror.pull()
        assert mirror.moved == 5
    assert read(here) == read(there)


def test_what_was_replaced_is_sent_again_and_what_is_gone_goes(there: Path, here: Path) -> None:
    with mirrored(here, there) as mirror:
        mirror.pull()
        (there / "summary.json").write_bytes(b"first")
        (there / "checkpoints/0001/arrays").unlink()
        (there / "checkpoints/0001").rmdir()
        write(there, {"checkpoints/0002/arrays": b"new"})
        mirror.pull()
        (there / "new").write_bytes(b"other")
        (there / "new").replace(there / "summary.json")  # of the same length
        mirror.pull()
    assert read(here) == read(there)
    assert not (here / "checkpoints/0001").exists()


def test_a_file_that_grew_from_another_beginning_is_sent_whole(there: Path, here: Path) -> None:
    write(here, {"metrics.jsonl": b'{"b": 1}\n', "own.txt": b"mine"})
    with mirrored(here, there) as mirror:
        mirror.pull()
    assert read(here) == {**RUN, "own.txt": b"mine"}  # what was never there stays


def test_a_file_that_is_written_anew_and_longer_is_sent_whole(there: Path, here: Path) -> None:
    write(there, {"work/state.dat": b"OLDOLD"})
    with mirrored(here, there) as mirror:
        mirror.pull()
        write(there, {"work/state.dat": b"newnewnewnew"})  # the same file on the disk
        mirror.pull()
    assert read(here) == read(there)


def test_what_can_wait_is_neither_sent_nor_removed(there: Path, here: Path) -> None:
    write(there, {"replay/0.bin": b"new", "work/x": b"1"})
    write(here, {"replay/0.bin": b"old"})
    with mirrored(here, there) as mirror:
        mirror.pull(skip=("replay/", "work/"))
        mirror.pull(skip=("replay/", "work/"))
        assert read(here) == {**RUN, "replay/0.bin": b"old"}
        mirror.pull()
    assert read(here) == read(there)


def test_a_summary_of_before_is_not_taken_for_todays(there: Path, here: Path) -> None:
    write(here, {"summary.json": b"of the last job"})
    with mirrored(here, there) as mirror:
        mirror.pull()
    assert read(here) == RUN


def test_what_is_being_written_is_left_alone(there: Path, here: Path) -> None:
    write(there, {".partial-7/arrays": b"half", "checkpoints/.partial-1/x": b"half"})
    with mirrored(here, there) as mirror:
        mirror.pull()
    assert read(here) == RUN


def test_an_interrupted_transfer_goes_on(there: Path, here: Path) -> None:
    with mirrored(here, there, limit=2 << 20) as mirror, pytest.raises(EOFError):
        mirror.pull()
    first = mirror.moved
    assert first > 1 << 20
    assert not (here / "checkpoints/0001/arrays").exists()  # not under its name
    assert (here / f"checkpoints/0001/{PARTIAL}arrays").exists()
    with mirrored(here, there) as mirror:
        mirror.pull()
    assert mirror.moved <= sum(map(len, RUN.values())) - first + files.CHUNK
    assert read(here) == RUN


def test_damage_is_noticed(there: Path, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with mirrored(here, there) as mirror:
        monkeypatch.setattr(files, "blocks", lambda stream, count: iter([stream.read(count)[:-1] + b"?"]))
        with pytest.raises(FeverError, match="damaged on its way"):
            mirror.pull()
    assert "config.yaml" not in read(here)


def test_a_path_outside_is_refused(tmp_path: Path) -> None:
    for name in ("../x", "/etc/x", "a/../../x"):
        with pytest.raises(FeverError, match="is not below"):
            files.inside(tmp_path, name)


def test_files_from_elsewhere_come_along(there: Path, here: Path, tmp_path: Path) -> None:
    log = tmp_path / "log"
    with mirrored(here, there) as mirror:
        mirror.pull({"job/log.txt": str(log)})
        assert read(here) == RUN
        log.write_text("hello\n")
        mirror.pull({"job/log.txt": str(log)})
    assert read(here) == {**RUN, "job/log.txt": b"hello\n"}


def test_push_sends_what_differs(there: Path, here: Path) -> None:
    write(here, {**RUN, "config.yaml": b"env: y\n", "job/run.yaml": b"x"})
    (here / "job/run.yaml").chmod(0o600)
    with mirrored(here, there) as mirror:
        assert mirror.push() == 2
        assert mirror.push() == 0
    assert read(here) == read(there)
    assert (there / "job/run.yaml").stat().st_mode & 0o777 == 0o600


def test_push_ends_a_course_that_was_left(there: Path, here: Path) -> None:
    """The run went on here from an earlier checkpoint: the later ones there are not its own any more."""
    write(here, {**RUN, "checkpoints/0002/arrays": b"own"})
    write(there, {"checkpoints/0009/arrays": b"left", "notes.txt": b"of the other side"})
    with mirrored(here, there) as mirror:
        mirror.push()
    assert read(there) == {**read(here), "notes.txt": b"of the other side"}
