"""`--on mpi` under real launchers: OpenMPI's and MPICH's mpirun over real ssh, and srun inside salloc."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest

from tests.helpers import ROOT, wait_for
from tests.lab.machines import Command, Lab, require_lab
from tests.lab.site import FEVER, FOREVER, Site, metrics, summary

pytestmark = [
    pytest.mark.lab,
    pytest.mark.flaky_under_load("several Ray nodes on two cores: a starved node is taken for a lost one"),
]

MINE = "/srv/fever-lab"  # a folder that every machine has for itself


class Ranks(Site):
    """A lab whose login machine reaches the others by ssh."""

    def mpirun(self, launcher: str, *words: str, machines: int = 2) -> Command:
        """Start two ranks on each of the first machines; returns at once."""
        self.lab.environment = {**self.lab.environment, **self.own}
        begin = {"OpenMPI": self.lab.mpirun_openmpi, "MPICH": self.lab.mpirun_mpich}[launcher]
        command = [*begin(2 * machines, self.lab.machines[:machines]), *FEVER, *words, "--on", "mpi"]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        return self.lab.login.popen(command, cwd=self.folder, **pipes)

    @property
    def own(self) -> dict[str, str]:
        """The last one is what a training on one machine leaves in the environment of its process."""
        left = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
        return {"PYTHONPATH": str(ROOT), "FEVER_HOME": str(self.folder / "home"), **left}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    require_lab("sshd", "mpirun.openmpi", "mpirun.mpich")
    folder = tmp_path_factory.mktemp("mpi")
    with Lab(folder / "lab", private=("/tmp/ray", MINE)) as lab:
        lab.start_ssh()
        yield Ranks(lab, folder)


@pytest.mark.parametrize("launcher", ["OpenMPI", pytest.param("MPICH", marks=pytest.mark.slow)])
def test_six_ranks_on_three_hosts_are_three_nodes(ranks: Ranks, launcher: str) -> None:
    words = ("train", "CartPole-v1", "--stop-steps", "20000", "--runs", f"runs/{launcher}")
    process = ranks.mpirun(launcher, *words, machines=3)
    output = process.communicate(timeout=300)[0]
    assert process.returncode == 0, output
    (run,) = (ranks.folder / "runs" / launcher).iterdir()  # all ranks have found the same name for it
    assert set(summary(run)["hosts"]) == {"node1", "node2", "node3"}
    assert summary(run)["workers"] == 6
    assert re.search(r"rank 0 node1: Ray's head is at .* 3 hosts", output)
    ranks.assert_nothing_left(f"{launcher}/{run.name}")
    assert re.search(r"mpi-\S+ +ended +exit code 0", ranks.fever("jobs").stdout)


def test_more_ranks_than_cores(ranks: Ranks) -> None:
    ranks.lab.environment |= ranks.own
    begin = ranks.lab.mpirun_openmpi(4, ranks.lab.machines[:1])
    words = ("train", "CartPole-v1", "--workers", "ranks", "--stop-steps", "5000", "--name", "ranks", "--on", "mpi")
    done = ranks.lab.login.run([*begin, *FEVER, *words], cwd=ranks.folder, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"workers 4: one for each of 4 ranks, on \d+ cores", done.stdout + done.stderr)
    assert summary(ranks.run("ranks"))["workers"] == 4
    ranks.assert_nothing_left("ranks")


@pytest.mark.parametrize("launcher", ["OpenMPI", "MPICH"])
def test_every_rank_ends_with_the_drivers_code(ranks: Ranks, launcher: str) -> None:
    process = ranks.mpirun(launcher, "train", "tests.environments:ExitEnv", "--name", f"three-{launcher}")
    process.communicate(timeout=300)
    assert process.returncode == 3
    ranks.assert_nothing_left(f"three-{launcher}")


@pytest.mark.parametrize(
    ("launcher", "number"),
    [("OpenMPI", signal.SIGTERM), pytest.param("MPICH", signal.SIGINT, marks=pytest.mark.slow)],
)
def test_a_signal_to_mpirun_saves_and_leaves_nothing(ranks: Ranks, launcher: str, number: int) -> None:
    name = f"signal-{launcher}"
    process = ranks.mpirun(launcher, "train", "CartPole-v1", "--name", name, *FOREVER)
    ranks.wait_for_steps(name)
    process.send_signal(number)
    process.communicate(timeout=300)
    wait_for(lambda: (ranks.run(name) / "summary.json").exists(), "saved run")
    ended = summary(ranks.run(name))
    assert ended["stop_reason"] == "interrupted"
    ranks.assert_nothing_left(name)
    if launcher == "MPICH":  # and on it goes, in another launch
        process = ranks.mpirun(launcher, "resume", name, "--stop-steps", str(ended["steps"] + 5000))
        output = process.communicate(timeout=300)[0]
        assert process.returncode == 0, output
        assert summary(ranks.run(name))["stop_reason"] == "steps"
        assert "the step limit was reached" in ranks.fever("logs", name).stdout
        ranks.assert_nothing_left(name)


def kill_rank(ranks: Ranks, name: str, number: int) -> None:
    """Kill what a launcher knows as a rank: the parent of its inner process."""
    facts = json.loads((ranks.run(name) / "job" / "ranks" / f"{number}.json").read_text())
    ranks.lab[facts["host"]].run(["bash", "-c", f"kill -9 $(ps -o ppid= -p {facts['pid']})"], check=True)


@pytest.mark.slow
def test_a_launcher_that_kills_all_when_one_rank_dies(ranks: Ranks) -> None:
    process = ranks.mpirun("OpenMPI", "train", "CartPole-v1", "--name", "abort", *FOREVER)
    ranks.wait_for_steps("abort")
    kill_rank(ranks, "abort", 2)
    process.communicate(timeout=300)
    assert process.returncode != 0
    wait_for(lambda: (ranks.run("abort") / "summary.json").exists(), "saved run")
    ranks.assert_nothing_left("abort")


@pytest.mark.slow
def test_a_launcher_that_goes_on_when_one_rank_dies(ranks: Ranks) -> None:
    process = ranks.mpirun("MPICH", "train", "CartPole-v1", "--name", "without", *FOREVER)
    ranks.wait_for_steps("without")
    leader = min(number for number in range(4) if host_of(ranks, "without", number) == "node2")
    kill_rank(ranks, "without", leader)
    wait_for(lambda: metrics(ranks.run("without"))[-1]["worker_restarts"] >= 2, "workers elsewhere", 300)
    assert "has saved and stopped" in ranks.fever("stop", "without").stdout
    process.communicate(timeout=300)
    ranks.assert_nothing_left("without")


def host_of(ranks: Ranks, name: str, number: int) -> str:
    return json.loads((ranks.run(name) / "job" / "ranks" / f"{number}.json").read_text())["host"]


def test_mistakes_end_every_rank_with_one_sentence(ranks: Ranks) -> None:
    process = ranks.mpirun("OpenMPI", "train", "CartPole-v1", "learning_rat=1", "--name", "typo")
    output = process.communicate(timeout=300)[0]
    assert process.returncode == 2
    assert output.count("did you mean learning_rate?") == 1
    ranks.assert_nothing_left("typo")


def test_a_machine_whose_ray_does_not_start_is_named(ranks: Ranks) -> None:
    broken = ranks.folder / "broken"
    broken.mkdir()
    (broken / "sitecustomize.py").write_text(
        "import socket, sys\n"
        "if socket.gethostname() == 'node2' and 'start' in sys.orig_argv: sys.exit('no licence for Ray')\n"
    )
    with mock.patch.object(Ranks, "own", {**ranks.own, "PYTHONPATH": f"{broken}:{ROOT}"}):
        process = ranks.mpirun("OpenMPI", "train", "CartPole-v1", "--name", "unlicensed")
    output = process.communicate(timeout=300)[0]
    assert process.returncode == 2, output
    assert "fever: node2 did not join Ray; node2 said last: " in output
    assert "no licence for Ray" in output
    ranks.assert_nothing_left("unlicensed")


def test_doctor_sees_what_is_between_the_hosts(ranks: Ranks) -> None:
    begin = ranks.lab.mpirun_openmpi(3, ranks.lab.machines)
    done = ranks.lab.login.run([*begin, *FEVER, "doctor", "--on", "mpi"], cwd=ranks.folder)
    assert done.returncode == 0, done.stdout + done.stderr
    for line in ("ranks          3 on node1, node2, node3", "names          every host", "ports          every host"):
        assert line in done.stdout
    assert not list((ranks.folder / "runs").glob(".doctor*"))


@pytest.mark.slow
def test_modules_of_one_machine_are_shipped_to_the_others(ranks: Ranks) -> None:
    module = "from gymnasium.envs.classic_control import CartPoleEnv\n\n\nclass Mine(CartPoleEnv):\n    pass\n"
    ranks.lab["node1"].run(["python3", "-c", f"open('{MINE}/only_on_one.py', 'w').write({module!r})"], check=True)
    (ranks.folder / "ship.yaml").write_text("{kind: mpi, ship: true, interface: eth0}")
    words = ["only_on_one:Mine", "--name", "shipped", "--runs", str(ranks.folder / "runs"), "--stop-steps", "10000"]
    begin = [*ranks.lab.mpirun_mpich(2, ranks.lab.machines[:2]), *FEVER, "train", *words]
    command = [*begin, "--on", str(ranks.folder / "ship.yaml")]
    done = ranks.lab.login.run(command, cwd=MINE, env=ranks.variables, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert set(summary(ranks.run("shipped"))["hosts"]) == {"node1", "node2"}
    ranks.assert_nothing_left("shipped")


class StandIn(Ranks):
    """The same machines behind a stand-in for a scheduler, from tests/lab."""

    def __init__(self, kind: str, lab: Lab, folder: Path) -> None:
        super().__init__(lab, folder)
        self.jobs = folder / kind
        self.jobs.mkdir()
        self.variables |= {
            "PATH": f"{ROOT / 'tests' / 'lab' / kind}:{os.environ['PATH']}",
            f"{kind.upper()}_FOLDER": str(self.jobs),
            f"{kind.upper()}_SSH": f"ssh -F {lab.ssh_config}",
        }
        launcher = " ".join(lab.mpirun_mpich(2, lab.machines[:2]))
        (folder / f"{kind}.yaml").write_text(json.dumps({"kind": kind, "nodes": 2, "launcher": launcher}))


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "first", "second"), [("pbs", "1.stand-in", "2.stand-in"), ("lsf", "1", "2")])
def test_a_job_comes_back_after_its_limit(ranks: Ranks, kind: str, first: str, second: str) -> None:
    site, name = StandIn(kind, ranks.lab, ranks.folder), f"queued-{kind}"
    options = ("--on", f"{kind}.yaml", "--name", name, "--time", "2m", "--stop-time", "20m", "--requeue", "--detach")
    submitted = site.fever("train", "CartPole-v1", *options)  # a quarter of the limit before its end, it saves
    assert submitted.returncode == 0, submitted.stderr
    assert f"submitted {kind}-{first}" in submitted.stderr
    try:
        wait_for(lambda: (site.jobs / f"{second}.pid").exists(), "second job", 300)
        assert "the job's time limit is near" in site.fever("logs", name).stdout
        site.wait_for_steps(name, metrics(site.run(name))[-1]["steps"] + 1)
    finally:
        stopped = site.fever("stop", name).stdout
    assert "has saved and stopped" in stopped
    assert set(summary(site.run(name))["hosts"]) == {"node1", "node2"}
    rows = [row["steps"] for row in metrics(site.run(name))]
    assert rows == sorted(set(rows))
    site.assert_nothing_left(name)


@pytest.mark.slow
def test_rllib_has_runners_on_every_machine(ranks: Ranks) -> None:
    pytest.importorskip("torch")
    settings = ("train_batch_size_per_learner=400", "num_epochs=2", "--stop-iterations", "3", "--name", "rllib")
    process = ranks.mpirun("MPICH", "train", "CartPole-v1", "--algo", "rllib:PPO", *settings, machines=2)
    output = process.communicate(timeout=300)[0]
    assert process.returncode == 0, output
    assert set(summary(ranks.run("rllib"))["hosts"]) == {"node1", "node2"}
    assert summary(ranks.run("rllib"))["workers"] == 4
    ranks.assert_nothing_left("rllib")


@pytest.mark.slow
def test_a_search_has_trials_on_every_machine(ranks: Ranks) -> None:
    pytest.importorskip("optuna")
    settings = ("learning_rate=loguniform(1e-4,1e-2)", "--trials", "6", "--stop-steps", "6000", "--name", "search")
    process = ranks.mpirun("OpenMPI", "tune", "CartPole-v1", *settings, machines=2)
    output = process.communicate(timeout=300)[0]
    assert process.returncode == 0, output
    run = ranks.run("search")
    trials = [json.loads(line) for line in (run / "trials.jsonl").read_text().splitlines()]
    assert {trial["host"] for trial in trials} == {"node1", "node2"}
    assert all((run / "trials" / f"{trial['number']:04d}" / "summary.json").is_file() for trial in trials)
    assert (run / "best.yaml").is_file()
    ranks.assert_nothing_left("search")


@pytest.mark.slow
def test_without_the_heads_machine_the_others_leave(ranks: Ranks) -> None:
    """The last test here: the machine stays dead."""
    process = ranks.mpirun("MPICH", "train", "CartPole-v1", "--name", "headless", *FOREVER)
    ranks.wait_for_steps("headless")
    ranks.lab["node1"].crash()
    process.communicate(timeout=300)
    wait_for(lambda: not ranks.processes(), "end of all processes")
    assert len(list(Path("/tmp").glob("fever-ray-*"))) == 1  # the dead machine's
    assert not (ranks.run("headless") / "job" / "token").exists()
