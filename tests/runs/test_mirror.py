"""Copies of folders over a connection: each byte is sent once and verified, and an interrupted transfer continues."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import pytest

from fever.errors import FeverError
from fever.runs import mirror as files
from fever.runs.mirror import PARTIAL, Mirror
from tests.mirrors import RUN, mirrored, read, write


@pytest.fixture
def there(tmp_path: Path) -> Path:
    write(tmp_path / "there", RUN)
    return tmp_path / "there"


@pytest.fixture
def here(tmp_path: Path) -> Path:
    return tmp_path / "here"


def test_each_byte_moves_once(there: Path, here: Path) -> None:
    size = sum(map(len, RUN.values()))
    with mirrored(here, there) as mirror:
        mirror.pull()
        assert read(here) == RUN
        assert mirror.moved == size
        mirror.pull()
        assert mirror.moved == size
        with open(there / "metrics.jsonl", "ab") as file:
            file.write(b'{"a": 2}\n')
        mirror.pull()
        assert mirror.moved == size + 9
    with mirrored(here, there) as mirror:  # another connection begins with what is here
        mirror.pull()
        assert mirror.moved == 0
        with open(there / "metrics.jsonl", "ab") as file:
            file.write(b"more\n")
        mirror.pull()
        assert mirror.moved == 5
    assert read(here) == read(there)


def test_videos_of_training_come_and_go_and_a_users_own_stay(there: Path, here: Path) -> None:
    write(there, {"videos/video-000000100.mp4": b"1", "videos/.video-000000200.12ab.mp4": b"half"})
    with mirrored(here, there) as mirror:
        mirror.pull()
        write(here, {"videos/00000003.mp4": b"by fever watch"})
        (there / "videos/video-000000100.mp4").unlink()
        write(there, {"videos/video-000000200.mp4": b"2"})
        mirror.pull()
    videos = {name: data for name, data in read(here).items() if name.startswith("videos")}
    assert videos == {"videos/video-000000200.mp4": b"2", "videos/00000003.mp4": b"by fever watch"}


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


def test_what_went_between_two_connections_goes(there: Path, here: Path) -> None:
    write(there, {"replay/0.bin": b"new", "checkpoints/0002/arrays": b"new"})
    with mirrored(here, there) as mirror:
        mirror.pull()
    (there / "checkpoints/0001/arrays").unlink()
    write(here, {f"checkpoints/0000/{PARTIAL}arrays": b"ha", "checkpoints/.partial-7/x": b"own", "own.txt": b"own"})
    with mirrored(here, there) as mirror:
        mirror.pull(skip=("replay/",))
    left = {name: data for name, data in RUN.items() if not name.startswith("checkpoints/0001")}
    own = {"checkpoints/.partial-7/x": b"own", "own.txt": b"own"}
    assert read(here) == {**left, **own, "replay/0.bin": b"new", "checkpoints/0002/arrays": b"new"}


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
        with pytest.raises(FeverError, match="damaged in transfer"):
            mirror.pull()
    assert "config.yaml" not in read(here)


def test_a_path_outside_is_refused(tmp_path: Path) -> None:
    for name in ("../x", "/etc/x", "a/../../x", "job/./x", "job//x", "job/x/", "job/.x", ".x/y", ""):
        with pytest.raises(FeverError, match="is not the name of a file below"):
            files.inside(tmp_path, name)


def test_what_this_side_writes_itself_is_taken_from_nobody(there: Path, here: Path, tmp_path: Path) -> None:
    write(here, {"job/job.json": b"mine", "job/exit.json": b"mine"})
    write(tmp_path, {"other": b"evil"})
    for name in ("job/job.json", "job/./job.json", "job//exit.json", f"job/{PARTIAL}job.json"):
        with mirrored(here, there) as mirror, suppress(FeverError):
            mirror.pull({name: str(tmp_path / "other"), "job/job.json": str(tmp_path / "other")})
    assert {name: data for name, data in read(here).items() if name not in RUN} == {
        "job/job.json": b"mine",
        "job/exit.json": b"mine",
    }


def test_a_file_that_cannot_be_written_does_not_upset_the_connection(there: Path, here: Path, tmp_path: Path) -> None:
    write(tmp_path / "second", {"config.yaml": b"of the second"})
    write(here, {"checkpoints": b"is no folder"})
    with mirrored(here, there) as mirror:
        with pytest.raises(FeverError, match=r"checkpoints.* cannot be written: "):
            mirror.pull()
        second = Mirror(tmp_path / "copy", str(tmp_path / "second"), mirror.requests, mirror.answers)
        second.pull()
        assert read(tmp_path / "copy") == read(tmp_path / "second")
        (here / "checkpoints").unlink()
        mirror.pull()
    assert read(here) == RUN


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

    def files_there() -> dict[str, int]:
        return {name: (there / name).stat().st_ino for name in read(there)}

    before = files_there()
    with mirrored(here, there) as mirror:
        mirror.push()
        after = files_there()
        mirror.push()
        assert files_there() == after
    assert {name for name in after if after[name] != before.get(name)} == {"config.yaml", "job/run.yaml"}
    assert read(here) == read(there)
    assert (there / "job/run.yaml").stat().st_mode & 0o777 == 0o600


def test_push_ends_a_course_that_was_left(there: Path, here: Path) -> None:
    """The run went on here from an earlier checkpoint: the later ones there are not its own any more."""
    write(here, {**RUN, "checkpoints/0002/arrays": b"own"})
    write(there, {"checkpoints/0009/arrays": b"left", "notes.txt": b"of the other side"})
    with mirrored(here, there) as mirror:
        mirror.push()
    assert read(there) == {**read(here), "notes.txt": b"of the other side"}


def test_messages_make_two_folders_equal(tmp_path: Path, there: Path, here: Path) -> None:
    """As trials of a search are copied: a call carries requests and answers, and only one side is right."""
    calls: list[int] = []

    def call(requests: bytes) -> bytes:
        calls.append(len(requests))
        return files.answer(requests, tmp_path)

    def mirror() -> Mirror:
        exchange = files.Exchange(call)
        return Mirror(here, "there", exchange, exchange, prune=("",))

    write(here, {"notes.txt": b"old", "checkpoints/0009/arrays": b"old"})
    write(there, {"work/x": b"1", "lock": b"7"})
    mirror().pull(skip=("work/", "lock"))
    assert read(here) == RUN
    write(here, {"metrics.jsonl": b"new", "work/y": b"2"})
    (here / "config.yaml").unlink()
    calls.clear()
    mirror().push(skip=("work/", "lock"))
    assert read(there) == {name: data for name, data in read(here).items() if name != "work/y"}
    assert sum(calls) < 2000, "what did not change is not sent"
    with pytest.raises(files.RemoteFolderGone):
        Mirror(here, "nowhere", *[files.Exchange(call)] * 2).pull()


def test_files_that_are_shortened_arrive_whole(there: Path, here: Path) -> None:
    path = there / "metrics.jsonl"
    write(there, {"metrics.jsonl": b'{"a": 1}\n' * 100})
    with mirrored(here, there) as mirror:
        mirror.pull()
        path.write_bytes(b'{"b": 2}\n' * 500)  # longer, and with the same inode, which a new file may have, too
        mirror.pull()
        assert (here / "metrics.jsonl").read_bytes() == path.read_bytes()
        other = there / ".metrics.jsonl.0"
        other.write_bytes(b'{"c": 3}\n' * 10)
        other.replace(path)
        mirror.pull()
        assert (here / "metrics.jsonl").read_bytes() == path.read_bytes()
        with open(path, "ab") as file:
            file.write(b'{"c": 4}\n')
        moved = mirror.moved
        mirror.pull()
        assert (here / "metrics.jsonl").read_bytes() == path.read_bytes()
        assert mirror.moved - moved == 9, "what is appended is sent alone"


def test_links_are_neither_sent_nor_followed(there: Path, here: Path, tmp_path: Path) -> None:
    write(tmp_path / "outside", {"secret": b"x", "old": b"y"})
    (there / "leak").symlink_to(tmp_path / "outside" / "secret")
    with mirrored(here, there) as mirror:
        mirror.pull()
        assert read(here) == RUN
    (here / "more").symlink_to(tmp_path / "outside")
    write(there, {"more/old": b"z"})
    with mirrored(here, there) as mirror, pytest.raises(FeverError, match="more is a symbolic link"):
        mirror.pull()
    assert read(tmp_path / "outside") == {"secret": b"x", "old": b"y"}
