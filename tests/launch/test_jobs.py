"""Jobs: submitted, found again, left alone, put back; of every kind, without a cluster."""

from __future__ import annotations

import os
import stat
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fever.config import RunConfig
from fever.errors import FeverError
from fever.job import ENDED, QUEUED, RUNNING
from fever.launch import jobs
from fever.launch.clusters import jobs as cluster_jobs
from fever.launch.clusters import link as remote
from fever.launch.clusters import watch
from fever.launch.clusters.link import Link
from fever.launch.clusters.ray_jobs import ApiError
from fever.launch.clusters.ssh import Unreachable
from fever.launch.clusters.ssh_cluster import Ssh
from fever.launch.dispatch import Order
from fever.launch.jobs import Job
from fever.launch.rendezvous.mpi import Mpi
from fever.launch.schedulers.slurm import Slurm

CONFIG = RunConfig(env="CartPole-v1")
LAB = Ssh(hosts=("alpha",), name="lab")


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's folder of records."""
    monkeypatch.setenv("FEVER_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def make_job(name: str, run: Path) -> Job:
    jobs.prepare(CONFIG, Mpi(), run, [], name)
    return jobs.remember(f"mpi-{name}", run)


def test_jobs_are_found_by_many_names(tmp_path: Path) -> None:
    for name in ("one", "two"):
        make_job(f"launch-{name}", tmp_path / "runs" / name)
    first, last = jobs.list_jobs()
    assert {jobs.find_job(word) for word in ("mpi-launch-one", "launch-one", "one", str(first.run))} == {first}
    assert jobs.find_job("last") == last
    assert first.state() == (ENDED, "was cancelled before it began")
    first.log.write_text("rank 0 here")
    assert first.state() == (ENDED, "was killed")
    first.folder.write_text("alive", "1")
    assert first.state()[0] == RUNNING
    with pytest.raises(FeverError, match="there is no job three; the latest are: mpi-launch-one, mpi-launch-two"):
        jobs.find_job("three")


def test_a_token_does_not_outlive_a_job_that_was_killed(tmp_path: Path) -> None:
    job = make_job("launch", tmp_path / "run")
    job.folder.write_token()
    job.folder.write_text("alive", "1")
    for old in (61, 0):  # rank 0 is slow, and so is its file server
        for name, age in (("token", 61), ("alive", old)):
            os.utime(job.folder.path / name, (time.time() - age,) * 2)
        job.ended()
        assert job.folder.token.exists() is (old == 0)
        job.folder.write_token()
    (job.folder.path / "alive").unlink()
    assert job.state() == (ENDED, "was cancelled before it began")
    assert job.folder.token.exists()  # it is new: the job may just be starting
    os.utime(job.folder.token, (0, 0))
    job.state()
    assert not job.folder.token.exists()


def test_old_records_are_swept(tmp_path: Path, home: Path) -> None:
    """When the next one was submitted; those that a cluster which is up may need stay."""
    (home / "clusters" / "lab").mkdir(parents=True)
    (tmp_path / "mpi-here").mkdir()
    days = {"mpi-here": 90, "mpi-gone": 31, "mpi-away": 29, "lab-2": 90, "mpi-first": 2, "mpi-second": 1, "mpi-cut": 2}
    for name, old in days.items():
        run = tmp_path / ("again" if name in ("mpi-first", "mpi-second") else name)
        path = home / "jobs" / f"{jobs.remember(name, run).name}.json"
        path.write_text("" if name == "mpi-cut" else path.read_text())
        os.utime(path, (time.time() - old * 86400,) * 2)
    job = jobs.remember("mpi-new", tmp_path / "new")
    order = Order(CONFIG, "mpi", detach=True)
    assert len(list((home / "jobs").iterdir())) == 8
    order.follow(job)
    left = {path.stem for path in (home / "jobs").iterdir()}
    assert left == {"mpi-here", "mpi-away", "lab-2", "mpi-second", "mpi-new"}


def test_a_scheduler_that_is_not_there_is_one_sentence(fever: Any, tmp_path: Path) -> None:
    python = Path(sys.executable).parent
    done = fever("train", "CartPole-v1", "--on", "slurm", PATH=str(python))
    assert (done.returncode, "there is no sbatch here" in done.stderr) == (2, True)
    assert not (tmp_path / "runs").exists()
    assert "there are no jobs" in fever("jobs", FEVER_HOME=str(tmp_path)).stdout
    assert fever("stop", "7", FEVER_HOME=str(tmp_path)).stderr == "fever: there is no job 7\n"


def test_settings_are_checked_before_anything_waits_in_a_queue(fever: Any, tmp_path: Path) -> None:
    (tmp_path / "sbatch").write_text("#!/bin/sh\necho refused >&2\nexit 1\n")
    (tmp_path / "sbatch").chmod(0o755)
    (tmp_path / "site.yaml").write_text("{kind: slurm, modules: [mine]}")

    def said(*words: str) -> str:
        return fever("train", *words, PATH=f"{tmp_path}:{os.environ['PATH']}").stderr

    assert "did you mean learning_rate?" in said("CartPole-v1", "learning_rat=1", "--on", "slurm")
    assert "did you mean CartPole" in said("CartPol-v1", "--on", "slurm")
    assert "did you mean CartPole" in said("CartPol-v1", "--on", "slurm", "--dry-run")
    assert "did you mean learning_rate?" in said("CartPole-v1", "learning_rat=1", "--on", "slurm", "--dry-run")
    sizes = ("CartPole-v1", "--on", "slurm", "--nodes", "3", "--cpus-per-node", "2", "--envs", "6", "steps=100")
    for words in (sizes, (*sizes, "--dry-run"), (*sizes, "--workers", "8"), (*sizes, "--scale-batch")):
        assert "does not divide the batch of 6 environments x 100 steps = 600; minibatch=200 does" in said(*words)
    assert said(*sizes, "--workers", "ranks", "--dry-run", "minibatch=200", "--scale-batch") == ""
    refused = said("CartPole-v1", "--algo", "dqn", "--on", "slurm", "--dry-run", "--scale-batch")
    assert "the batches of dqn do not depend on workers" in refused
    assert said("only_there:Env", "--on", "site.yaml") == "fever: sbatch refused the job: refused\n"
    refused = fever("train", "CartPole-v1", "--on", "slurm", PATH=f"{tmp_path}:{os.environ['PATH']}")
    assert (refused.returncode, refused.stderr) == (2, "fever: sbatch refused the job: refused\n")
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("--cpus-per-node 2", "--cpus-per-worker 4: there are 2 cores"),
        ("--cpus-per-node 2 --nodes 3", "--cpus-per-worker 4: the largest machine has 2 cores"),
        ("--cpus-per-node 2 --on pbs", "--cpus-per-worker 4: there are 2 cores"),
        ("--workers 0", "--cpus-per-worker 4 is for worker processes, and --workers 0 has none"),
        ("--algo rllib:PPO", "--cpus-per-worker is for fever's own algorithms; rllib:PPO takes"),
        ("--cpus-per-node 4", ""),
        ("--nodes 3", ""),
    ],
)
def test_cores_of_workers_are_checked_before_a_job_waits(fever: Any, words: str, sentence: str) -> None:
    if "rllib" in words:
        pytest.importorskip("torch")
    done = fever("train", "CartPole-v1", "--dry-run", "--on", "slurm", "--cpus-per-worker", "4", *words.split())
    assert done.returncode == (2 if sentence else 0)
    assert done.stderr.startswith(f"fever: {sentence}" if sentence else "")
    assert len(done.stderr.splitlines()) == bool(sentence)


def test_ranks_of_a_step_are_no_shell_of_an_allocation(fever: Any, tmp_path: Path) -> None:
    step = {"SLURM_JOB_ID": "1", "SLURM_STEP_ID": "0", "SLURM_PROCID": "0", "SLURM_NTASKS": "3"}
    done = fever("train", "CartPole-v1", "--on", "slurm", **step)
    assert (done.returncode, done.stderr) == (
        2,
        "fever: srun has started several of this command; start one without srun, or use --on mpi\n",
    )
    assert not (tmp_path / "runs").exists()


def test_two_new_runs_do_not_get_one_folder(fever: Any, tmp_path: Path) -> None:
    """The first one's job is still in the queue, and has made nothing but its folder."""
    for name, text in (("sbatch", "echo 17"), ("squeue", "echo 'PENDING|Resources|N/A|1|batch'")):
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    words = ("train", "CartPole-v1", "--on", "slurm", "--name", "one", "--detach")
    variables = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "FEVER_HOME": str(tmp_path / "home")}
    assert fever(*words, **variables).returncode == 0
    before = everything(tmp_path / "runs" / "one")
    again = fever(*words, "--algo", "dqn", **variables)
    assert again.returncode == 2
    assert "belongs to slurm-17, which has not ended" in again.stderr
    assert everything(tmp_path / "runs" / "one") == before


@pytest.mark.parametrize("on", ["slurm", "mpi"])
def test_a_folder_that_cannot_be_made_is_one_sentence(fever: Any, tmp_path: Path, on: str) -> None:
    (tmp_path / "sbatch").touch(mode=0o755)
    (tmp_path / "file").touch()
    variables = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "PMI_RANK": "0", "PMI_SIZE": "1"}
    done = fever("train", "CartPole-v1", "--on", on, "--name", "one", "--runs", "file", **variables)
    assert done.returncode == 2
    assert "Not a directory" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_launch_that_is_refused_changes_nothing_of_the_run_before(fever: Any, tmp_path: Path) -> None:
    before = make_old_run(tmp_path / "runs" / "old")
    done = fever("train", "CartPole-v1", "--on", "mpi", "--name", "old", PMI_RANK="0", PMI_SIZE="1")
    assert done.returncode == 2
    assert "exists already; choose another --name" in done.stderr
    after = everything(tmp_path / "runs" / "old")
    assert {name: after[name] for name in before if name != "job/log.txt"} == {
        name: content for name, content in before.items() if name != "job/log.txt"
    }


def test_a_scheduler_that_does_not_answer_has_not_ended_the_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    jobs.prepare(RunConfig(env="CartPole-v1"), Slurm(), tmp_path / "runs" / "one", [], "17")
    job = jobs.remember("slurm-17", tmp_path / "runs" / "one")
    for answer, state in (
        ("echo 'Socket timed out' >&2; exit 1", RUNNING),
        ("echo 'Invalid job id specified' >&2; exit 1", ENDED),
        ("echo 'PENDING|Resources|N/A|1|batch'", QUEUED),
        ("echo 'SIGNALING|None|N/A|1|batch'", RUNNING),
        ("echo 'COMPLETING|None|N/A|1|batch'", RUNNING),
        ("echo 'CANCELLED|None|N/A|1|batch'", ENDED),
    ):
        (tmp_path / "squeue").write_text(f"#!/bin/sh\n{answer}\n")
        (tmp_path / "squeue").chmod(0o755)
        assert job.state()[0] == state, answer
    (tmp_path / "squeue").write_text("#!/bin/sh\necho 'RUNNING|None|N/A|1|batch'\n")
    with pytest.raises(FeverError, match="belongs to slurm-17, which has not ended"):
        jobs.refuse_busy(job.run)


def test_a_run_that_went_on_is_the_last_job(tmp_path: Path) -> None:
    for number, run in enumerate("aba"):
        make_job(str(number), tmp_path / run)
    assert [job.name for job in jobs.list_jobs()] == ["mpi-1", "mpi-2"]
    assert jobs.find_job("last").name == "mpi-2"


def test_a_damaged_record_hides_no_other_job(tmp_path: Path, home: Path) -> None:
    make_job("whole", tmp_path / "whole")
    (home / "jobs" / "lab-1.json").write_text("")
    job = jobs.remember("lab-2", tmp_path / "half")
    (tmp_path / "half" / "job").mkdir(parents=True)
    assert {one.name for one in jobs.list_jobs()} == {"mpi-whole", "lab-2"}
    assert job.state() == (ENDED, "its job.json is missing")


def test_two_submissions_never_get_one_name(home: Path) -> None:
    assert [jobs.claim_name("lab") for _ in range(3)] == ["lab-1", "lab-2", "lab-3"]
    assert jobs.claim_name("other") == "other-1"
    assert jobs.list_jobs() == []


def test_settings_that_may_be_secret_are_the_users_alone(tmp_path: Path) -> None:
    job = make_job("one", tmp_path / "run")
    assert stat.S_IMODE((job.run / "job" / "job.json").stat().st_mode) == 0o600


def everything(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def make_old_run(run: Path, **facts: Any) -> dict[str, bytes]:
    """A run that a job has trained before."""
    folder = jobs.prepare(CONFIG, Slurm(), run, [], "1")
    folder.note(**facts)
    (run / "config.yaml").write_text("old")
    folder.write("exit.json", {"code": 0, "plan": "", "reason": ""})
    folder.log.write_text("what it printed")
    return everything(run)


def test_a_refused_submission_leaves_a_run_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sbatch").write_text("#!/bin/sh\necho refused >&2\nexit 1\n")
    (tmp_path / "sbatch").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    before = make_old_run(tmp_path / "run")
    with pytest.raises(FeverError, match="sbatch refused the job: refused"):
        Slurm().submit(CONFIG, tmp_path / "run", [])
    assert everything(tmp_path / "run") == before


class Ray(Link):
    """A way to a Ray that is made up; `meanwhile` happens while a job is on its way."""

    name, id, head, runs, python = "lab", "id", "alpha", "/there", "~/my env/python"

    def __init__(self, broken: Exception | None = None) -> None:
        super().__init__()
        self.jobs: Any = self
        self.broken_by, self.known, self.commands = broken, {}, []  # type: ignore[var-annotated]
        self.seen: list[tuple[str, int | None]] = []

    def push(self, run: Path, there: str) -> None:
        assert run not in [job.run for job in jobs.list_jobs()]  # nobody learns of it before its files are there

    def upload(self, package: Any) -> None: ...

    def details(self, name: str) -> Any:
        return self.known.get(name)

    def stop(self, name: str) -> None: ...

    def submit(self, name: str, command: str, runtime: Any) -> None:
        self.commands.append(command)
        self.seen.append(self.state(jobs.find_job("last")))
        if self.broken_by:
            raise self.broken_by
        self.known[name] = {"status": "RUNNING"}


def submit(ray: Ray, run: Path) -> Job:
    package: Any = SimpleNamespace(uri="gcs://x")
    return cluster_jobs.submit(CONFIG, LAB, ray, run, [], package)


def test_a_job_on_its_way_is_not_taken_for_lost(tmp_path: Path) -> None:
    ray = Ray()
    job = submit(ray, tmp_path / "run")
    assert ray.seen == [("PENDING", None)]  # by whoever looked while it was sent
    assert job.code is None
    assert ray.commands[0].startswith("exec \"$HOME\"/'my env/python' -m fever train -f /there/lab-1-")
    assert ray.state(job) == ("RUNNING", None)
    ray.known.clear()
    assert ray.state(job) == ("LOST", 1)  # now Ray must know it


def test_a_job_that_never_arrived_is_lost_in_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ray = Ray(Unreachable("broke"))
    monkeypatch.setattr(cluster_jobs, "_is_unknown", lambda link, number: False)
    with pytest.raises(Unreachable):
        submit(ray, tmp_path / "run")
    job = jobs.find_job("last")  # who knows: it is kept
    assert ray.state(job) == ("PENDING", None)
    job.folder.note(submitted=time.time() - remote.SUBMIT_SECONDS)
    assert ray.state(job) == ("LOST", 1)


def test_a_job_that_cannot_be_sent_leaves_everything_as_it_was(tmp_path: Path, home: Path) -> None:
    before = make_old_run(tmp_path / "run")
    with pytest.raises(ApiError):
        submit(Ray(ApiError(500, "no")), tmp_path / "run")
    assert everything(tmp_path / "run") == before
    with pytest.raises(ApiError):
        submit(Ray(ApiError(500, "no")), tmp_path / "new")
    assert not (tmp_path / "new").exists()
    assert list((home / "jobs").iterdir()) == []


def test_results_of_one_job_do_not_depend_on_anothers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = [jobs.remember(f"lab-{number}", tmp_path / f"run{number}") for number in (1, 2, 3)]
    for job in made:
        jobs.prepare(CONFIG, LAB, job.run, []).note(cluster_id="id", remote_path="/there")
    asked, said = [], []

    def bring(link: Any, job: Job, say: Any) -> None:
        asked.append(job.name)
        if job.name == "lab-2":
            raise FeverError("its folder is gone")
        job.folder.write("exit.json", {"code": 0, "plan": "", "reason": "", "home": True})

    monkeypatch.setattr(cluster_jobs, "_stop_and_fetch", bring)
    monkeypatch.setattr(cluster_jobs, "SshLink", lambda record: Ray())
    record: Any = SimpleNamespace(id="id", head="alpha")
    with pytest.raises(FeverError, match=r"alpha may have the only copy of lab-2 \(its folder is gone\); --force"):
        cluster_jobs.fetch_all(record, said.append)
    assert asked == ["lab-1", "lab-2", "lab-3"]
    cluster_jobs.fetch_all(record, said.append, force=True)
    assert said == ["given up: lab-2 (its folder is gone)"]
    assert [job.code for job in made] == [0, 1, 0]


@pytest.mark.parametrize("code", [None, 75], ids=["the first time", "again after its limit"])
def test_a_scheduler_is_asked_now_and_then(monkeypatch: pytest.MonkeyPatch, code: int | None) -> None:
    now, asked = [0.0], []
    monkeypatch.setattr(jobs.time, "monotonic", lambda: now[0])
    job: Any = SimpleNamespace(code=code, state=lambda: asked.append(now[0]) or (QUEUED, ""))
    news = jobs.JobWatch(job)
    for half_seconds in range(240):
        now[0] = half_seconds / 2
        news.look()
    assert len(asked) == pytest.approx(20 + 10, abs=2)  # twenty seconds briskly, then every ten


def test_a_dead_ray_is_not_waited_for_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = [0.0]
    monkeypatch.setattr(jobs.time, "monotonic", lambda: now[0])
    news = watch.ClusterWatch(Job("lab-1", tmp_path))
    connection: Any = SimpleNamespace(look=lambda job: remote.UNKNOWN, close=lambda: None)
    news.connection = connection
    news.look_once()
    news.look_once()
    assert capsys.readouterr().err == "fever: Ray on the cluster does not answer; trying again\n"
    now[0] = watch.BROKEN_SECONDS + 1
    with pytest.raises(FeverError, match=rf"died with its Ray; .* resume it with: fever resume {tmp_path}"):
        news.look_once()


def test_a_run_whose_cluster_does_not_answer_can_be_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(job: Job) -> Any:
        raise Unreachable("it is off")

    job = submit(Ray(), tmp_path / "run")
    monkeypatch.setattr(cluster_jobs, "connect", unreachable)
    with pytest.raises(FeverError, match=r"lab-1, which does not answer: it is off; .*fever down FILE --force"):
        jobs.refuse_busy(job.run)
    ray = Ray()
    ray.known[job.facts["id"]] = {"status": "PENDING"}
    monkeypatch.setattr(cluster_jobs, "connect", lambda job: ray)
    with pytest.raises(FeverError, match="which has not ended; end it with: fever stop lab-1"):
        jobs.refuse_busy(job.run)


RECORDS = [
    "{}", "[]", '{"kind": "slurm"}', '{"kind": [], "id": "1"}', '{"kind": "slurm", "id": 3}',
    '{"kind": "slurm", "id": "1", "target": 3}', '{"kind": "slurm", "id": "1", "target": {"kind": []}}',
    '{"kind": "slurm", "id": "1", "target": {"nodes": 2}}', '{"kind": "slurm", "id": "--user=me"}',
    '{"kind": "slurm", "id": "1", "submitted": "x"}', '{"kind": "ray", "id": "1", "target": {"kind": "ray"}}',
]  # fmt: skip


@pytest.mark.parametrize("text", RECORDS)
@pytest.mark.parametrize("exit_code", ["{", '{"code": "x"}', "[]", None])
def test_a_record_with_wrong_types_blocks_no_other_job(tmp_path: Path, text: str, exit_code: str | None) -> None:
    good = make_job("good", tmp_path / "good")
    bad = make_job("bad", tmp_path / "bad")
    (bad.run / "job" / "job.json").write_text(text)
    if exit_code is not None:
        (bad.run / "job" / "exit.json").write_text(exit_code)
    assert [job.describe()["job"] for job in jobs.list_jobs()] == ["mpi-good", "mpi-bad"]
    assert jobs.find_job("good") == good
    assert bad.facts["id"] in ("bad", "1")
    assert isinstance(bad.facts["submitted"], float)


def test_a_record_that_leads_nowhere_blocks_no_other_job(tmp_path: Path, home: Path) -> None:
    good = make_job("good", tmp_path / "good")
    for number, text in enumerate(('{"run": 3}', '{"run": "\\u0000"}', "[]", '{"run": "/nonexistent"}', "{")):
        (home / "jobs" / f"slurm-{number}.json").write_text(text)
    os.symlink("nowhere", home / "jobs" / "slurm-9.json")
    assert jobs.list_jobs() == [good]
