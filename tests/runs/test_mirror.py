"""Folders kept the same over a connection: each byte once, verified, and what is interrupted goes on.

And how run directories come home that way, whoever else brings them, and before a cluster goes.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fever.config import RunConfig
from fever.errors import FeverError
from fever.launch import jobs
from fever.launch.clusters import jobs as cluster_jobs
from fever.launch.clusters import tunnel
from fever.launch.clusters.link import Link
from fever.launch.clusters.ray_jobs import RayJobs
from fever.launch.clusters.ssh import Unreachable
from fever.launch.jobs import Job
from fever.launch.targets import Aws, Existing, Machines, Ssh
from fever.runs import mirror as files
from fever.runs.mirror import PARTIAL, Mirror

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
        with pytest.raises(FeverError, match="damaged on its way"):
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


# run directories of jobs


class Way(Link):
    """To a made-up cluster, whose Ray does not answer."""

    name, id, head, runs, python = "lab", "id", "alpha", "/there", "python"

    def __init__(self, mirror: Mirror | None = None) -> None:
        super().__init__()
        self.own, self.jobs = mirror, self  # type: ignore[assignment]
        self.submitted: list[Any] = []

    def mirror(self, run: Path, there: str) -> Mirror:
        assert self.own is not None
        return self.own

    def details(self, name: str) -> dict[str, str]:
        raise Unreachable("Ray does not answer")

    def push(self, run: Path, there: str) -> None: ...

    def upload(self, package: Any) -> None: ...

    def submit(self, name: str, command: str, runtime: Any) -> None:
        self.submitted.append(runtime)


@pytest.fixture
def job(there: Path, here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Job:
    """A job on a cluster, which runs."""
    monkeypatch.setenv("FEVER_HOME", str(tmp_path / "home"))
    return make_job("lab-1", here, there)


def make_job(name: str, run: Path, there: Path) -> Job:
    folder = jobs.prepare(RunConfig(env="CartPole-v1"), Ssh(hosts=("alpha",), name="lab"), run, [], f"{name}-0f0f0f0f")
    folder.note(cluster="lab", cluster_id="id", head="alpha", there=str(there))
    return jobs.remember(name, run)


def test_two_may_bring_one_run_home(job: Job, there: Path) -> None:
    """An attached `fever train` and a `fever tunnel` beside it."""
    with mirrored(job.run, there) as one, mirrored(job.run, there) as other:
        for number in range(6):
            with open(there / "metrics.jsonl", "ab") as file:
                file.write(b"%d\n" % number)
            write(there, {"state.json": b"%d" % number, f"checkpoints/{number}/arrays": b"x"})
            (there / f"checkpoints/{number - 1}/arrays").unlink(missing_ok=True)
            Way((one, other, other)[number % 3]).sync(job)
            assert {name: (job.run / name).read_bytes() for name in read(there)} == read(there)
            assert not (job.run / f"checkpoints/{number - 1}").exists()
        assert one.moved + other.moved < sum(map(len, RUN.values())) + 100


def test_one_run_that_cannot_come_home_is_said_once(capsys: pytest.CaptureFixture[str]) -> None:
    class Gone(Link):
        def look(self, job: Job) -> str:
            raise problem

    problem: FeverError = FeverError("its folder is gone")
    said: set[str] = set()
    for _ in range(2):
        tunnel.keep_up(Gone(), Job("lab-1", Path("run")), said)
    assert capsys.readouterr().out == "lab-1: its folder is gone\n"
    problem = Unreachable("its connection broke")
    with pytest.raises(Unreachable):
        tunnel.keep_up(Gone(), Job("lab-1", Path("run")), said)


def test_a_connection_that_breaks_has_not_ended_a_job(job: Job, there: Path) -> None:
    said: list[str] = []
    with mirrored(job.run, there, limit=100) as mirror, pytest.raises(Unreachable, match="its connection broke"):
        cluster_jobs._bring_home(Way(mirror), job, said.append)
    assert job.code is None
    with mirrored(job.run, there) as mirror:  # now it is only Ray that does not answer
        cluster_jobs._bring_home(Way(mirror), job, said.append)
    assert (job.code, job.home) == (1, True)
    assert said == [f"lab-1: fetched and verified, {job.run}"]


AWS = Aws(region="us-west-2", name="lab")
LAB = Ssh(hosts=("alpha",), name="lab")


@pytest.mark.parametrize(
    ("target", "state", "refused"),
    [(LAB, "RUNNING", True), (LAB, "SUCCEEDED", False), (AWS, "PENDING", True), (AWS, "SUCCEEDED", True)],
)
def test_a_job_whose_run_directory_was_moved_is_not_lost_without_a_word(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, target: Machines, state: str, refused: bool
) -> None:
    """Ssh hosts keep what has ended; of AWS nothing stays."""
    rows = [
        {"status": state, "metadata": {"fever": "lab-1-0f0f0f0f"}},
        {"status": "RUNNING", "metadata": None},
        {"status": "RUNNING", "metadata": {"fever": "other-1-0f0f0f0f"}},
    ]
    way = Way()
    way.jobs = RayJobs("http://nowhere", None)
    monkeypatch.setattr(way.jobs, "_call", lambda method, path: rows)
    monkeypatch.setattr(cluster_jobs, "Connection", lambda record: way)
    job.run.rename(tmp_path / "elsewhere")
    record: Any = SimpleNamespace(name="lab", id="id", head="alpha", target=target)
    said: list[str] = []
    if refused:
        with pytest.raises(FeverError, match=rf"only copy of lab-1 \(its run directory is not at {job.run} any more\)"):
            cluster_jobs.bring_home(record, said.append)
    cluster_jobs.bring_home(record, said.append, force=True)
    assert len(said) == refused

    def unreachable(record: Any) -> Any:
        raise Unreachable("it is off")

    monkeypatch.setattr(cluster_jobs, "Connection", unreachable)
    cluster_jobs.bring_home(record, said.append)  # nobody knows whether it is one of this cluster's


def test_variables_for_a_ray_that_runs_already_go_with_the_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEVER_HOME", str(tmp_path / "home"))
    way, package = Way(), SimpleNamespace(uri="gcs://x")
    target = Existing(address="http://10.0.0.7:8265", env={"LICENCE": "x"})
    cluster_jobs.submit(RunConfig(env="CartPole-v1"), target, way, tmp_path / "run", [], package)  # type: ignore[arg-type]
    assert way.submitted[0]["env_vars"]["LICENCE"] == "x"
    assert "FEVER_JOB" in way.submitted[0]["env_vars"]
