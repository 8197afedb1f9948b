"""`--on slurm` against the real Slurm, on machines made of namespaces; and what is left behind: nothing."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
from collections.abc import Iterator

import pytest

from tests.helpers import wait_for
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
@pytest.mark.flaky_under_load("scancel ends Ray's processes too; if they end first, nothing is saved")
def test_scancel_saves_and_leaves_nothing(site: Site) -> None:
    """scancel tells all processes at once. If Ray's are the first to go, they take the driver with them before it has
    saved: then only what was saved before is there. One of a few jobs must have saved."""
    for name in (f"cancelled-{attempt}" for attempt in range(5)):
        number = site.submit("CartPole-v1", "--name", name, *FOREVER, nodes=2)
        site.wait_for_steps(name)
        site.slurm("scancel", number)
        assert site.wait_for_end(number)["JobState"] == "CANCELLED"
        site.assert_nothing_left(name)
        if (site.run(name) / "summary.json").exists():
            break
    ended = summary(site.run(name))
    assert ended["stop_reason"] == "interrupted"
    last = metrics(site.run(name))[-1]["iteration"]
    assert (site.run(name) / "checkpoints" / f"{last:08d}").is_dir()  # nothing that was learned is lost


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


def test_srun_inside_an_allocation(site: Site) -> None:
    words = [*FEVER, "train", "CartPole-v1", "--on", "mpi", "--name", "inside", "--stop-steps", "20000"]
    allocate = ["salloc", "--nodes=2", "--exclusive", "--quiet", "srun", "--ntasks-per-node=2", *words]
    done = site.lab.login.run(allocate, cwd=site.folder, env=site.variables, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert set(summary(site.run("inside"))["hosts"]) == {"node1", "node2"}
    assert summary(site.run("inside"))["workers"] == 4
    site.assert_nothing_left("inside")


def test_a_queued_job_is_cancelled(site: Site) -> None:
    later = {"kind": "slurm", "nodes": 3, "time": "10m", "options": ["--begin=now+1hour"]}
    (site.folder / "later.yaml").write_text(json.dumps(later))
    done = site.fever("train", "CartPole-v1", "--on", "later.yaml", "--name", "later", "--detach")
    assert done.returncode == 0, done.stderr
    assert re.search(r"slurm-\d+ +queued +BeginTime", site.fever("jobs").stdout)
    assert "is cancelled" in site.fever("stop", "later").stdout
    assert re.search(r"slurm-\d+ +ended +was cancelled before it began", site.fever("jobs").stdout)


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
