"""The rendezvous: who meets, who is missed, what is said; with real processes, but Ray only where it must be."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from fever import system
from fever.config import RunConfig
from fever.errors import FeverError
from fever.job import JobFolder
from fever.launch import jobs
from fever.launch.on_host import host
from fever.launch.rendezvous import member
from fever.launch.rendezvous import rank as node
from fever.launch.rendezvous.launchers import Rank
from fever.launch.rendezvous.member import Member
from fever.launch.rendezvous.mpi import Mpi
from fever.launch.schedulers.pbs import Pbs
from fever.launch.schedulers.slurm import LearnerMachine, Slurm
from fever.scratch import Scratch, sweep
from tests.helpers import ROOT, wait_for

pytestmark = pytest.mark.lab


class Job:
    """A job whose ranks are started one by one, as a launcher would, all on this machine."""

    def __init__(self, run: Path, size: int, **settings: Any) -> None:
        self.run, self.size = run, size
        self.ranks: dict[int, subprocess.Popen[str]] = {}
        config = RunConfig(env="CartPole-v1", workers=1, stop={"steps": 4000})
        jobs.prepare(config, Mpi(**{"connect_seconds": 60.0, **settings}), run, [])

    def start(self, number: int, **variables: str) -> subprocess.Popen[str]:
        environ = {
            **os.environ,
            "PMI_RANK": str(number),
            "PMI_SIZE": str(self.size),
            "PYTHONPATH": str(ROOT),
            **variables,
        }
        command = [sys.executable, "-m", "fever.launch.rendezvous.rank", str(self.run / "job")]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        self.ranks[number] = subprocess.Popen(command, env=environ, **pipes)
        return self.ranks[number]

    def start_waiting(self, number: int, **variables: str) -> None:
        """Start a rank and wait until it has announced itself, which it does again when rank 0 comes."""
        before = self.nonce(number)
        self.start(number, **variables)
        wait_for(lambda: self.nonce(number) != before, f"rank {number}")

    def nonce(self, number: int) -> str:
        return (JobFolder(self.run / "job").read(f"ranks/{number}.json") or {}).get("nonce", "")

    def end(self, seconds: float = 300) -> dict[int, tuple[int, str]]:
        """Wait for all ranks; exit code and output of each."""
        outputs = {number: rank.communicate(timeout=seconds)[0] for number, rank in self.ranks.items()}
        return {number: (self.ranks[number].returncode, output) for number, output in outputs.items()}

    def names(self) -> set[str]:
        return {path.name for path in (self.run / "job").iterdir()}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return tmp_path / "runs" / "one"


@pytest.fixture
def scratch() -> Iterator[Path]:
    """A folder with a short name."""
    folder = Path(tempfile.mkdtemp(prefix="fs", dir="/tmp"))
    yield folder
    shutil.rmtree(folder)


@pytest.mark.slow
def test_a_rank_that_does_not_come_is_named(run: Path) -> None:
    job = Job(run, 3, connect_seconds=20.0)
    job.start_waiting(2)
    job.start(0)
    ended = job.end()
    assert [code for code, _ in ended.values()] == [2, 2]
    assert "rank 1 did not start in 20 s" in ended[0][1]
    assert "a file system that all machines share" in ended[0][1]
    assert job.names() == {"job.json", "run.yaml", "exit.json", "nodes", "log.txt"}


def test_rank_0_that_does_not_come_is_missed(run: Path) -> None:
    job = Job(run, 2, connect_seconds=1.0)
    job.start(1)
    ((code, output),) = job.end().values()
    assert code == 2
    assert "rank 0 did not appear in" in output


@pytest.fixture
def another_ray(tmp_path: Path) -> str:
    """A search path on which there is another version of Ray, as far as one can see from outside."""
    other = tmp_path / "other" / "ray-9.9.9.dist-info"
    other.mkdir(parents=True)
    (other / "METADATA").write_text("Metadata-Version: 2.1\nName: ray\nVersion: 9.9.9\n")
    return f"{other.parent}:{ROOT}"


def test_a_host_with_another_ray_is_named(run: Path, another_ray: str) -> None:
    job = Job(run, 2)
    job.start(0)
    job.start(1, PYTHONPATH=another_ray)
    ended = job.end()
    assert [code for code, _ in ended.values()] == [2, 2]
    assert "has ray 9.9.9, but" in ended[0][1]
    assert "starting Ray" not in ended[0][1]


def test_without_a_number_of_ranks_those_that_come_soon_are_all(run: Path, another_ray: str) -> None:
    job = Job(run, 0)
    job.start_waiting(1, PMI_RANK="", ALPS_APP_PE="1", ALPS_APP_ID="7", PYTHONPATH=another_ray)
    job.start(0, PMI_RANK="", ALPS_APP_PE="0", ALPS_APP_ID="7")
    ended = job.end()
    assert [code for code, _ in ended.values()] == [2, 2]
    assert "has ray 9.9.9, but" in ended[0][1]  # both have come, though nobody knew how many there would be


def test_an_unknown_interface_is_one_sentence(run: Path) -> None:
    job = Job(run, 1, interface="ib7")
    job.start(0)
    ((code, output),) = job.end().values()
    assert code == 2
    assert "has no network interface ib7; it has lo" in output


def test_a_signal_before_all_have_come_ends_those_who_have(run: Path) -> None:
    job = Job(run, 3)
    job.start(0)
    job.start(1)
    wait_for(lambda: len(JobFolder(run / "job").names("ranks")) == 2, "two ranks")
    job.ranks[0].send_signal(signal.SIGTERM)
    ended = job.end()
    assert [code for code, _ in ended.values()] == [130, 130]
    assert "stopped before the training began" in ended[0][1]


@pytest.mark.slow
def test_what_an_earlier_meeting_left_misleads_nobody(run: Path, scratch: Path) -> None:
    """A job that was killed and requeued finds its own old files."""
    job = Job(run, 2, scratch=str(scratch))
    old = JobFolder(run / "job")
    old.write("ranks/0.json", {"nonce": "old", "host": "dead"})
    old.write("ranks/1.json", {"nonce": "old", "host": "dead"})
    old.write("plan.json", {"id": "old", "members": {"0": "old", "1": "old"}, "nodes": {"dead": {"rank": 0}}})
    old.write("head.json", {"plan": "old", "address": "10.0.0.1:6379"})
    old.write("exit.json", {"plan": "old", "code": 7, "reason": "old"})
    job.start_waiting(1)  # it sees all this before rank 0 comes
    job.start(0, LD_PRELOAD="/nowhere.so")
    ended = job.end()
    assert [code for code, _ in ended.values()] == [0, 0], ended
    assert json.loads((run / "summary.json").read_text())["stop_reason"] == "steps"
    assert "LD_PRELOAD was set and is unset" in ended[0][1]
    assert not {"token", "ranks", "plan.json", "stop", "alive"} & job.names()
    assert list(scratch.iterdir()) == []


def test_missing_hosts_that_a_scheduler_knows_are_named(run: Path, tmp_path: Path) -> None:
    nodes = tmp_path / "nodes"
    nodes.write_text("beta.cluster\nalpha\n")
    job = Job(run, 2, connect_seconds=1.0)
    log = JobFolder(run / "job").log_of("beta.cluster.org")
    log.parent.mkdir(parents=True)
    log.write_text("python: command not found\n")
    job.start(0, PBS_NODEFILE=str(nodes))
    ((code, output),) = job.end().values()
    assert code == 2
    assert "no word from alpha, beta" in output
    assert "beta said last: python: command not found" in output


@pytest.fixture
def rank_0(run: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Member]]:
    """Rank 0 of a job with these settings, which has not done anything yet."""
    handlers = {number: signal.getsignal(number) for number in member.SIGNALS}
    wakeup = signal.set_wakeup_fd(-1)
    run.mkdir(parents=True)
    yield lambda site, size=None: Member(JobFolder(run), site, Rank("Slurm", 0, size, "one"))
    signal.set_wakeup_fd(wakeup)
    for number, handler in handlers.items():
        signal.signal(number, handler)


def test_a_rank_whose_file_is_just_replaced_is_not_left_out(
    rank_0: Callable[..., Member], monkeypatch: pytest.MonkeyPatch
) -> None:
    leader = rank_0(Mpi(), 2)
    for number in (0, 1):
        leader.folder.write(f"ranks/{number}.json", {"host": "alpha"})
    with monkeypatch.context() as once:
        once.setattr(JobFolder, "read_all", lambda self, names: [None for name in names])
        assert leader.arrivals() is None
    assert leader.arrivals() == {0: {"host": "alpha"}, 1: {"host": "alpha"}}
    leader.folder.write("ranks/1.json", {"host": "beta"})
    assert leader.arrivals() == {0: {"host": "alpha"}, 1: {"host": "beta"}}


def test_a_job_waits_for_every_machine_though_the_launcher_does_not_say_how_many(
    rank_0: Callable[..., Member], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(member, "SETTLE_SECONDS", 0.0)
    leader = rank_0(Pbs(nodes=2))
    leader.folder.write("ranks/0.json", {"host": "alpha"})
    assert leader.arrivals() is None
    leader.folder.write("ranks/1.json", {"host": "beta"})
    assert leader.arrivals() == {0: {"host": "alpha"}, 1: {"host": "beta"}}


def test_the_learners_machine_has_its_own_number_of_cores(rank_0: Callable[..., Member]) -> None:
    leader = rank_0(Slurm(cpus_per_node=4, learner=LearnerMachine(cpus=16)))
    cpus = list(range(64))
    facts = {"cpus": cpus, "allowed_cpus": cpus, "allotted": 16, "granted": 64}
    assert leader.cores([{**facts, "rank": 0}])["cores"] == 16
    assert leader.cores([{**facts, "rank": 1}])["cores"] == 4


def test_a_machine_that_does_not_see_the_job_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node, "SEE_SECONDS", 0.0)
    with pytest.raises(FeverError, match=r"does not see .*; is it on a file system that all machines share"):
        node._target_of(JobFolder(tmp_path / "job"))


# this host


def test_scratch_is_private_swept_and_removed(tmp_path: Path, scratch: Path) -> None:
    mine = Scratch(str(scratch))
    assert mine.path.stat().st_mode & 0o777 == 0o700
    dead, ownerless = scratch / "fever-ray-000000", scratch / "fever-ray-000001"
    dead.mkdir()
    (dead / "owner").write_text("")
    ownerless.mkdir()
    os.utime(ownerless, (0, 0))
    sweep(scratch)
    assert mine.path.is_dir()  # its owner lives
    assert not dead.exists()
    assert not ownerless.exists()
    mine.remove()
    assert list(scratch.iterdir()) == []
    long = Scratch(str(tmp_path / ("long" * 20)))
    assert long.path.parent == Path("/tmp")
    assert "too long" in long.note
    long.remove()


def test_end_ends_a_whole_family_and_nobody_else() -> None:
    code = "import subprocess, time; p = subprocess.Popen(['sleep', '300']); print(p.pid, flush=True); time.sleep(300)"
    stubborn = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); " + code
    bystander = subprocess.Popen(["sleep", "300"])
    parent = system.start([sys.executable, "-c", stubborn], os.environ, stdout=subprocess.PIPE)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    parent.stdout.close()
    system.end(parent, 0.5)
    wait_for(lambda: not Path(f"/proc/{child}").exists(), "end of the child")
    assert bystander.poll() is None
    bystander.kill()
    bystander.wait()


def test_own_address_is_one_that_others_can_reach() -> None:
    known = host.interfaces()
    assert known["lo"] == "127.0.0.1"
    assert host.own_address(None) in known.values()
    assert host.own_address(None, "127.0.0.1") == "127.0.0.1"
    with pytest.raises(FeverError, match="has no network interface"):
        host.own_address("ib7")


# other launches


def test_a_second_launch_leaves_a_running_job_alone(run: Path) -> None:
    job = Job(run, 1)
    folder = JobFolder(run / "job")
    folder.write_text("token", "theirs")
    beating = subprocess.Popen([
        sys.executable, "-c",
        "import sys, time; from pathlib import Path; from fever.job import JobFolder\n"
        "for beat in range(100): JobFolder(Path(sys.argv[1])).write_text('alive', f'other {beat}'); time.sleep(0.5)",
        str(folder.path),
    ])  # fmt: skip
    try:
        wait_for(lambda: folder.read_text("alive"), "sign of life")
        job.start(0)
        ((code, output),) = job.end().values()
    finally:
        beating.kill()
        beating.wait()
    assert code == 2
    assert "is being trained by another job" in output
    assert folder.token.read_text() == "theirs"


def test_rank_0_of_the_same_launch_is_no_other_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It replaces the sign of life that a killed launch has left, while this rank looks whether that still beats."""
    folder = JobFolder(tmp_path)
    folder.write_text("alive", "killed 17")
    monkeypatch.setattr(member.time, "sleep", lambda seconds: folder.write_text("alive", "mine 1"))
    member.refuse_occupied(folder, Rank("PMI", 1, 2, "mine"))
    folder.write_text("alive", "killed 17")
    with pytest.raises(FeverError, match="is being trained by another job"):
        member.refuse_occupied(folder, Rank("PMI", 1, 2, "other"))


def test_an_old_sign_of_life_keeps_nobody_out(run: Path) -> None:
    job = Job(run, 2, connect_seconds=1.0)
    JobFolder(run / "job").write_text("alive", "other 17")
    job.start(0)
    ((_, output),) = job.end().values()
    assert "rank 1 did not start" in output


def test_a_fault_of_rank_0_keeps_nobody_waiting(run: Path) -> None:
    """Not a mistake that was foreseen, such as a full disk."""
    job = Job(run, 2)
    (run / "job" / "nodes").write_text("no folder")
    job.start_waiting(1)
    job.start(0)
    ended = job.end()
    assert [code for code, _ in ended.values()] == [1, 1], ended
    assert not {"token", "ranks", "plan.json"} & job.names()
