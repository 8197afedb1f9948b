"""`--on slurm` against the real Slurm, on machines made of namespaces; and what is left behind: nothing."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers import ROOT, wait_for
from tests.lab.machines import Lab, require_lab
from tests.lab.site import FEVER, FOREVER, Site, metrics, summary

pytestmark = [
    pytest.mark.lab,
    pytest.mark.flaky_under_load("several Ray nodes on two cores: a starved node is taken for a lost one"),
]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    require_lab("slurmctld", "slurmd", "munged", "sbatch")
    folder = tmp_path_factory.mktemp("slurm")
    with Lab(folder / "lab") as lab:
        lab.start_slurm()
        yield Site(lab, folder)


@pytest.fixture
def own_site(tmp_path: Path) -> Iterator[Site]:
    """Machines that no other test uses: those that have crashed stay down."""
    require_lab("slurmctld", "slurmd", "munged", "sbatch")
    with Lab(tmp_path / "lab", 3) as lab:
        lab.start_slurm()
        yield Site(lab, tmp_path)


def test_trains_with_workers_on_every_machine(site: Site) -> None:
    done = site.fever("train", "CartPole-v1", "--on", "slurm", "--nodes", "3", "--name", "all", "--stop-steps", "30000")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "submitted slurm-" in done.stderr
    assert "workers 6: one for each of 6 cores" in done.stdout
    assert "the step limit was reached" in done.stdout
    steps = summary(site.run("all"))["hosts"]
    assert set(steps) == {"node1", "node2", "node3"}
    assert min(steps.values()) > 0.9 * max(steps.values())  # six workers on six cores: two on every machine
    spent = json.loads((site.run("all") / "job" / "breakdown.json").read_text())
    assert set(spent["connect_by_host"]) == {"node1", "node2", "node3"}
    assert {"queue", "start", "connect", "setup", "first_batch", "iterations", "checkpoints", "stop", "leave"} <= set(
        spent
    )
    assert "the time went into: queue" in done.stdout
    site.assert_nothing_left("all")
    listed = site.fever("jobs").stdout
    assert re.search(r"slurm-\d+ +ended +exit code 0", listed)
    assert "the step limit was reached" in site.fever("logs", "all").stdout
    again = site.fever("resume", str(site.run("all")), "--on", "slurm", "--stop-steps", "90000", "--dry-run")
    assert again.returncode == 0, again.stderr
    assert again.stdout.startswith("#!/bin/bash")


def test_a_driver_that_fails_ends_the_job_with_its_code(site: Site) -> None:
    number = site.submit("tests.environments:ExitEnv", "--env-kwargs", '{"code": 3}', "--name", "three")
    ended = site.wait_for_end(number)
    assert ended["JobState"] == "FAILED"
    assert ended["ExitCode"] == "3:0"
    assert site.fever("logs", number, "-f").returncode == 3
    site.assert_nothing_left("three")


@pytest.mark.slow
@pytest.mark.parametrize("algo", ["ppo", "apex"])
@pytest.mark.parametrize("attempt", range(int(os.environ.get("FEVER_CANCELS", "2"))))
def test_scancel_saves_everything_and_leaves_nothing(site: Site, algo: str, attempt: int) -> None:
    """scancel signals all processes at once, Ray's as well; these must be there until the driver has saved."""
    name = f"{algo}-cancelled-{attempt}"
    number = site.submit("CartPole-v1", "--name", name, "--algo", algo, *FOREVER, nodes=2)
    site.wait_for_steps(name, 5000)
    cancelled = time.time()
    site.slurm("scancel", number)
    assert site.wait_for_end(number)["JobState"] == "CANCELLED"
    site.assert_nothing_left(name)
    run = site.run(name)
    assert summary(run)["stop_reason"] == "interrupted"
    last = metrics(run)[-1]
    assert last["worker_restarts"] == 0
    assert (run / "checkpoints" / f"{last['iteration']:08d}").is_dir()  # nothing that was learned is lost
    if algo == "apex":
        manifest = run / "replay" / "manifest.json"
        assert manifest.stat().st_mtime > cancelled, site.log(name)
        added = json.loads(manifest.read_text())["added"]
        assert added > 0.9 * last["steps"]  # explorers hold the last ones, for returns over several steps


@pytest.mark.slow
def test_stop_saves_and_resume_goes_on_in_another_job(site: Site) -> None:
    number = site.submit("CartPole-v1", "--name", "stopped", *FOREVER, nodes=1)
    site.wait_for_steps("stopped")
    assert "has saved and stopped" in site.fever("stop", number).stdout
    site.assert_nothing_left("stopped")
    steps = summary(site.run("stopped"))["steps"]
    words = ("--stop-steps", str(steps + 10000), "--on", "slurm", "--nodes", "1")
    done = site.fever("resume", "stopped", *words)
    assert done.returncode == 0, done.stdout + done.stderr
    assert summary(site.run("stopped"))["steps"] >= steps + 10000
    rows = [row["steps"] for row in metrics(site.run("stopped"))]
    assert rows == sorted(set(rows))
    site.assert_nothing_left("stopped")


@pytest.mark.slow
def test_requeued_at_the_limit_it_goes_on_by_itself(site: Site) -> None:
    number = site.submit("CartPole-v1", "--name", "again", "--requeue", "--stop-steps", "400000", nodes=1)
    site.wait_for_steps("again")
    site.slurm("scancel", "--batch", "--signal=USR1", number)
    wait_for(lambda: int(site.job(number)["Restarts"]) == 1, "requeued job")
    assert summary(site.run("again"))["stop_reason"] == "limit"
    assert site.wait_for_end(number)["JobState"] == "COMPLETED"
    assert summary(site.run("again"))["stop_reason"] == "steps"
    rows = [row["steps"] for row in metrics(site.run("again"))]
    assert rows == sorted(set(rows))
    assert "the job's time limit is near" in site.log("again")
    site.assert_nothing_left("again")


@pytest.mark.slow
def test_srun_inside_an_allocation(site: Site) -> None:
    words = [*FEVER, "train", "CartPole-v1", "--on", "mpi", "--name", "inside", "--stop-steps", "20000"]
    allocate = ["salloc", "--nodes=2", "--exclusive", "--quiet", "srun", "--ntasks-per-node=2", *words]
    done = site.lab.login.run(allocate, cwd=site.folder, env=site.variables, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert set(summary(site.run("inside"))["hosts"]) == {"node1", "node2"}
    assert summary(site.run("inside"))["workers"] == 4
    site.assert_nothing_left("inside")


@pytest.mark.slow
def test_on_slurm_inside_an_allocation_runs_there(site: Site) -> None:
    allocate = ["salloc", "--nodes=2", "--exclusive", "--quiet", *FEVER, "train", "CartPole-v1", "--on", "slurm"]
    jobs = site.slurm("squeue", "--noheader", "--states=all", "--format=%i").split()

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        return site.lab.login.run([*allocate, *words], cwd=site.folder, env=site.variables, timeout=300)

    done = run("--name", "there", "--stop-steps", "20000")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "the step limit was reached" in done.stdout
    assert set(summary(site.run("there"))["hosts"]) == {"node1", "node2"}
    assert summary(site.run("there"))["workers"] == 4
    assert len(site.slurm("squeue", "--noheader", "--states=all", "--format=%i").split()) == len(jobs) + 1
    assert re.search(r"mpi-there +ended +exit code 0", site.fever("jobs").stdout)
    site.assert_nothing_left("there")
    for words, said in (
        (["--nodes", "3"], "--nodes 3: this allocation has 2 machines"),
        (["--account", "abc"], "--account has no effect inside an allocation"),
    ):
        refused = run("--name", "refused", *words)
        assert refused.returncode == 2
        assert said in refused.stderr
        assert not site.run("refused").exists()
    training = site.lab.login.popen([*allocate, "--name", "cut", *FOREVER], cwd=site.folder, env=site.variables)
    site.wait_for_steps("cut")
    training.send_signal(signal.SIGINT)  # to salloc and all in its foreground, as Ctrl-C
    training.wait(120)
    assert summary(site.run("cut"))["stop_reason"] == "interrupted"
    site.assert_nothing_left("cut")


def test_a_queued_job_is_cancelled(site: Site) -> None:
    later = {"kind": "slurm", "nodes": 3, "time": "10m", "options": ["--begin=now+1hour"]}
    (site.folder / "later.yaml").write_text(json.dumps(later))
    done = site.fever("train", "CartPole-v1", "--on", "later.yaml", "--name", "later", "--detach")
    assert done.returncode == 0, done.stderr
    assert re.search(
        r"slurm-\d+ +queued +for .*: its time to begin has not come \(BeginTime\); asks for 3",
        site.fever("jobs").stdout,
    )
    assert "is cancelled" in site.fever("stop", "later").stdout
    assert re.search(r"slurm-\d+ +ended +was cancelled before it began", site.fever("jobs").stdout)


@pytest.mark.slow
def test_a_learner_that_has_a_machine_of_its_own_kind(site: Site) -> None:
    (site.folder / "my site").mkdir()
    target = {"kind": "slurm", "nodes": 2, "cpus_per_node": 2, "time": "10m", "learner": {"cpus": 1}}
    (site.folder / "my site" / "mixed.yaml").write_text(json.dumps(target))
    runs = site.folder / "my site" / "runs"  # with a space in it
    words = ("--on", "my site/mixed.yaml", "--name", "mixed", "--runs", str(runs), "--stop-steps", "20000")
    done = site.fever("train", "CartPole-v1", *words)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "workers 3: one for each of 3 cores" in done.stdout
    steps = summary(runs / "mixed")["hosts"]
    assert len(steps) == 2
    assert max(steps.values()) > 1.8 * min(steps.values())  # one worker on the learner's machine, two on the other
    site.assert_nothing_left(str(runs / "mixed"))


INSIDE = """
import os, gymnasium

def make():
    with open(f"inside-{os.uname().nodename}", "w") as file:
        file.write(os.environ["APPTAINER_CONTAINER"])
    return gymnasium.make("CartPole-v1")
"""


@pytest.mark.slow
def test_ranks_inside_a_container(site: Site) -> None:
    """The runtime is a stand-in, Slurm and the ranks are real; with the settings that sites ask for."""
    target = {
        "kind": "slurm", "nodes": 2, "cpus_per_node": 2, "time": "10m", "exclusive": True, "mem": "2G",
        "login_shell": True, "before_modules": [f"export PATH={ROOT}/tests/lab/containers:$PATH"],
        "srun_options": ["--distribution=cyclic"], "container": {"image": "fever.sif", "python": sys.executable},
    }  # fmt: skip
    (site.folder / "boxed.yaml").write_text(json.dumps(target))
    (site.folder / "inside.py").write_text(INSIDE)
    done = site.fever("train", "inside:make", "--on", "boxed.yaml", "--name", "boxed", "--stop-steps", "20000")
    assert done.returncode == 0, done.stdout + done.stderr
    assert [path.read_text() for path in site.folder.glob("inside-node*")] == ["fever.sif", "fever.sif"]
    site.assert_nothing_left("boxed")


def test_doctor_inside_an_allocation(site: Site) -> None:
    done = site.lab.login.run(
        ["salloc", "--nodes=3", "--quiet", *FEVER, "doctor", "--on", "slurm"], cwd=site.folder, env=site.variables
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "ranks          3 on node1, node2, node3" in done.stdout
    assert "scheduler" in site.fever("doctor", "--on", "slurm").stdout


@pytest.mark.slow
def test_two_jobs_on_the_same_machines_do_not_meet(site: Site) -> None:
    options = ("--on", "slurm", "--nodes", "1", "--cpus-per-node", "1", "--time", "10m", "--detach")
    for name in ("left", "right"):
        assert site.fever("train", "CartPole-v1", "--name", name, *FOREVER, *options).returncode == 0
    site.wait_for_steps("left")
    site.wait_for_steps("right")
    head = json.loads((site.run("right") / "job" / "head.json").read_text())["address"]
    other = json.loads((site.run("left") / "job" / "head.json").read_text())["address"]
    assert other.partition(":")[0] == head.partition(":")[0]  # one machine, two ports
    assert "AuthenticationError" in site.connect(head, site.run("left") / "job" / "token")
    assert "connected" in site.connect(head, site.run("right") / "job" / "token")
    assert (site.run("right") / "job" / "token").stat().st_mode & 0o777 == 0o600
    assert "has saved and stopped" in site.fever("stop", "left").stdout
    before = metrics(site.run("right"))[-1]["iteration"]
    wait_for(lambda: metrics(site.run("right"))[-1]["iteration"] > before + 3, "the other job's training")
    assert metrics(site.run("right"))[-1]["worker_restarts"] == 0
    site.fever("stop", "right")
    site.assert_nothing_left("left")
    site.assert_nothing_left("right")


@pytest.mark.slow
def test_a_pulled_cable_is_a_lost_machine(site: Site) -> None:
    number = site.submit("CartPole-v1", "--name", "cable", *FOREVER, nodes=2)
    site.wait_for_steps("cable")
    site.lab["node2"].unplug()
    try:
        wait_for(lambda: metrics(site.run("cable"))[-1]["worker_restarts"] >= 2, "workers elsewhere", 300)
        before = metrics(site.run("cable"))[-1]["iteration"]
        wait_for(lambda: metrics(site.run("cable"))[-1]["iteration"] > before + 3, "training with one machine")
    finally:
        site.lab["node2"].plug()
    assert "has saved and stopped" in site.fever("stop", number).stdout
    site.assert_nothing_left("cable")


@pytest.mark.slow
def test_a_machine_that_dies_is_replaced_by_the_others(site: Site) -> None:
    number = site.submit("CartPole-v1", "--name", "dying", *FOREVER, nodes=2)
    site.wait_for_steps("dying")
    site.lab["node2"].crash()
    before = metrics(site.run("dying"))[-1]["iteration"]
    wait_for(lambda: metrics(site.run("dying"))[-1]["worker_restarts"] >= 2, "workers elsewhere", 300)
    wait_for(lambda: metrics(site.run("dying"))[-1]["iteration"] > before + 5, "training with one machine")
    assert "has saved and stopped" in site.fever("stop", number).stdout
    assert summary(site.run("dying"))["stop_reason"] == "interrupted"
    site.assert_nothing_left("dying", crashed=1)  # the next job on that machine sweeps, as the next test sees


@pytest.mark.slow
def test_a_job_reaches_its_target_after_slurm_has_given_a_machine_up(own_site: Site) -> None:
    """The lab's Slurm does so after ten seconds; without `--no-kill` it ends the job then."""
    site = own_site
    number = site.submit("CartPole-v1", "--name", "without", "--stop-time", "100s", nodes=3)
    site.wait_for_steps("without")
    site.lab["node3"].crash()
    wait_for(lambda: site.job(number)["NumNodes"] == "2", "Slurm to give the machine up", 60)
    wait_for(lambda: metrics(site.run("without"))[-1]["worker_restarts"] >= 2, "workers elsewhere", 300)
    before = metrics(site.run("without"))[-1]["iteration"]
    wait_for(lambda: metrics(site.run("without"))[-1]["iteration"] > before + 20, "training with two machines")
    assert site.wait_for_end(number)["JobState"] == "COMPLETED"
    assert summary(site.run("without"))["stop_reason"] == "time"
    site.assert_nothing_left("without", crashed=1)


@pytest.mark.slow
@pytest.mark.parametrize("requeue", [False, True])
def test_a_job_whose_first_machine_dies_does_not_stay(own_site: Site, requeue: bool) -> None:
    """Slurm would leave it to run until its time limit: `--no-kill` is for every machine, and its script is gone."""
    site = own_site
    number = site.submit("CartPole-v1", "--name", "headless", *FOREVER, *["--requeue"] * requeue, nodes=2)
    site.wait_for_steps("headless")
    steps = metrics(site.run("headless"))[-1]["steps"]
    site.lab["node1"].crash()
    if requeue:
        site.wait_for_steps("headless", steps + 100_000)
        assert site.job(number)["BatchHost"] == "node2"
        assert [row["iteration"] for row in metrics(site.run("headless"))].count(1) == 1  # it did not begin anew
        site.fever("stop", number)
    else:
        assert site.wait_for_end(number)["JobState"] == "CANCELLED"
    wait_for(lambda: not site.processes(), "end of all processes")


@pytest.mark.slow
def test_ctrl_c_detaches_and_the_job_goes_on(site: Site) -> None:
    words = [*FEVER, "train", "CartPole-v1", "--on", "slurm", "--nodes", "1", "--name", "detached", *FOREVER]
    following = site.lab.login.popen(
        words, cwd=site.folder, env=site.variables, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    site.wait_for_steps("detached")
    following.send_signal(signal.SIGINT)
    assert "the job continues" in following.communicate(timeout=20)[1]
    assert following.returncode == 0
    before = metrics(site.run("detached"))[-1]["iteration"]
    wait_for(lambda: metrics(site.run("detached"))[-1]["iteration"] > before, "further training")
    site.fever("stop", "last")
    site.assert_nothing_left("detached")
    assert os.path.exists(site.run("detached") / "checkpoints")
