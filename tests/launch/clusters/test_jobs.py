"""Run directories of jobs on a cluster: copied by several processes, and fetched before the cluster goes down."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fever.config import RunConfig
from fever.errors import FeverError
from fever.launch import jobs
from fever.launch.aws.target import Aws
from fever.launch.clusters import jobs as cluster_jobs
from fever.launch.clusters import tunnel
from fever.launch.clusters.base import ClusterTarget
from fever.launch.clusters.existing import Existing
from fever.launch.clusters.link import Link
from fever.launch.clusters.ray_jobs import RayJobs
from fever.launch.clusters.ssh import Unreachable
from fever.launch.clusters.ssh_cluster import Ssh
from fever.launch.jobs import Job
from fever.runs.mirror import Mirror
from tests.mirrors import RUN, mirrored, read, write


class Way(Link):
    """To a made-up cluster, whose Ray does not answer."""

    name, id, head, runs, python = "lab", "id", "alpha", "/there", "python"

    def __init__(self, mirror: Mirror | None = None) -> None:
        super().__init__()
        self.own, self.jobs = mirror, self  # type: ignore[assignment]
        self.submitted: list[Any] = []

    def mirror(self, run: Path, remote_path: str) -> Mirror:
        assert self.own is not None
        return self.own

    def details(self, name: str) -> dict[str, str]:
        raise Unreachable("Ray does not answer")

    def push(self, run: Path, remote_path: str) -> None: ...

    def upload(self, package: Any) -> None: ...

    def submit(self, name: str, command: str, runtime: Any) -> None:
        self.submitted.append(runtime)


@pytest.fixture
def there(tmp_path: Path) -> Path:
    """The run directory on the cluster."""
    write(tmp_path / "there", RUN)
    return tmp_path / "there"


@pytest.fixture
def job(there: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Job:
    """A job on a cluster, which runs."""
    monkeypatch.setenv("FEVER_HOME", str(tmp_path / "home"))
    return make_job("lab-1", tmp_path / "here", there)


def make_job(name: str, run: Path, there: Path) -> Job:
    folder = jobs.prepare(RunConfig(env="CartPole-v1"), Ssh(hosts=("alpha",), name="lab"), run, [], f"{name}-0f0f0f0f")
    folder.note(cluster="lab", cluster_id="id", head="alpha", remote_path=str(there))
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
        tunnel.copy_new(Gone(), Job("lab-1", Path("run")), said)
    assert capsys.readouterr().out == "lab-1: its folder is gone\n"
    problem = Unreachable("its connection broke")
    with pytest.raises(Unreachable):
        tunnel.copy_new(Gone(), Job("lab-1", Path("run")), said)


def test_a_connection_that_breaks_has_not_ended_a_job(job: Job, there: Path) -> None:
    said: list[str] = []
    with mirrored(job.run, there, limit=100) as mirror, pytest.raises(Unreachable, match="its connection broke"):
        cluster_jobs._stop_and_fetch(Way(mirror), job, said.append)
    assert job.code is None
    with mirrored(job.run, there) as mirror:  # now it is only Ray that does not answer
        cluster_jobs._stop_and_fetch(Way(mirror), job, said.append)
    assert (job.code, job.home) == (1, True)
    assert said == [f"lab-1: fetched and verified, {job.run}"]


AWS = Aws(region="us-west-2", name="lab")
LAB = Ssh(hosts=("alpha",), name="lab")


@pytest.mark.parametrize(
    ("target", "state", "refused"),
    [(LAB, "RUNNING", True), (LAB, "SUCCEEDED", False), (AWS, "PENDING", True), (AWS, "SUCCEEDED", True)],
)
def test_a_job_whose_run_directory_was_moved_is_not_lost_without_a_word(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, target: ClusterTarget, state: str, refused: bool
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
    monkeypatch.setattr(cluster_jobs, "SshLink", lambda record: way)
    job.run.rename(tmp_path / "elsewhere")
    record: Any = SimpleNamespace(name="lab", id="id", head="alpha", target=target)
    said: list[str] = []
    if refused:
        with pytest.raises(FeverError, match=rf"only copy of lab-1 \(its run directory is no longer at {job.run}\)"):
            cluster_jobs.fetch_all(record, said.append)
    cluster_jobs.fetch_all(record, said.append, force=True)
    assert len(said) == refused

    def unreachable(record: Any) -> Any:
        raise Unreachable("it is off")

    monkeypatch.setattr(cluster_jobs, "SshLink", unreachable)
    cluster_jobs.fetch_all(record, said.append)  # nobody knows whether it is one of this cluster's


def test_variables_for_a_ray_that_runs_already_go_with_the_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEVER_HOME", str(tmp_path / "home"))
    way, package = Way(), SimpleNamespace(uri="gcs://x")
    target = Existing(address="http://10.0.0.7:8265", env={"LICENCE": "x"})
    cluster_jobs.submit(RunConfig(env="CartPole-v1"), target, way, tmp_path / "run", [], package)  # type: ignore[arg-type]
    assert way.submitted[0]["env_vars"]["LICENCE"] == "x"
    assert "FEVER_JOB" in way.submitted[0]["env_vars"]
