"""What happens when Ray cannot start or end, on a real Ray."""

from __future__ import annotations

import subprocess
import sys
import tempfile

import pytest

from tests.helpers import ROOT

pytestmark = pytest.mark.ray

KILLED = """
import sys, time
from fever.sampling.ray_cluster import connect
from fever.sampling.ray_settings import apply_settings

apply_settings(None)  # before Ray is imported, which reads them once
from ray._private import node

start, left, killed = node.Node.start_ray_processes, int(sys.argv[1]), 0.0

def start_and_kill(started):
    global killed, left
    start(started)
    if left:
        started.all_processes["raylet"][0].process.kill()
        killed, left = time.monotonic(), left - 1

node.Node.start_ray_processes = start_and_kill
try:
    cluster = connect(1)
except Exception as error:
    print(round(time.monotonic() - killed), error)
else:
    print(cluster.ray.get(cluster.ray.remote(lambda: "it works").remote(), timeout=100))
    cluster.leave()
"""


def start_with_kills(count: int) -> str:
    """What a program prints that starts a private Ray whose raylet is killed so many times while it starts."""
    command = [sys.executable, "-c", KILLED, str(count)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, cwd=ROOT, check=True)
    return done.stdout


def test_a_raylet_that_dies_while_ray_starts_is_noticed_at_once() -> None:
    """Ray itself would wait 30 s for it."""
    seconds, _, said = start_with_kills(10).partition(" ")
    assert "its raylet died (killed by SIGKILL)" in said
    assert int(seconds) < 20


def test_ray_is_started_once_more_if_it_does_not_start() -> None:
    assert start_with_kills(1) == "it works\n"


CUT = """
import os, signal, sys, tempfile
from pathlib import Path

tempfile.tempdir = sys.argv[1]
from fever.sampling import ray_cluster
from fever.sampling.ray_settings import apply_settings
from fever.signals import Interrupts

apply_settings(None)
import ray
from ray._private import node

start, processes = node.Node.start_ray_processes, []

def start_and_cut(started):
    start(started)
    processes.extend(one.process for kind in started.all_processes.values() for one in kind)
    if sys.argv[2] == "signal":
        os.kill(os.getpid(), signal.SIGTERM)
    else:
        ray_cluster.kill_private_ray()

node.Node.start_ray_processes = start_and_cut
try:
    with Interrupts(held=True) as interrupts, interrupts.allow():
        ray_cluster.connect(1)
except (KeyboardInterrupt, Exception) as error:
    print(type(error).__name__)
print(ray.is_initialized(), [one.args for one in processes if one.poll() is None], os.listdir(sys.argv[1]))
"""


@pytest.mark.parametrize(
    ("how", "ending"),
    [("signal", "KeyboardInterrupt"), pytest.param("kill", "TrainingError", marks=pytest.mark.slow)],
)
def test_a_start_of_ray_that_is_cut_leaves_nothing(how: str, ending: str) -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:  # a short path, as Ray needs
        done = subprocess.run(
            [sys.executable, "-c", CUT, folder, how], capture_output=True, text=True, timeout=240, cwd=ROOT, check=True
        )
    assert done.stdout.splitlines() == [ending, "False [] []"], done.stderr


FAILING = """
import os, sys, tempfile
import fever
from fever.sampling import ray_pool

def fail(cluster):
    raise KeyboardInterrupt

tempfile.tempdir = sys.argv[1]
ray_pool.StoppedProcesses = fail  # after Ray was started, before there is a pool that could be closed
try:
    fever.train("CartPole-v1", workers=1, runs=sys.argv[1] + "/runs")
except KeyboardInterrupt:
    import ray
    print(ray.is_initialized(), [name for name in os.listdir(sys.argv[1]) if "ray" in name])
"""


def test_ray_ends_if_no_pool_could_be_made() -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        done = subprocess.run(
            [sys.executable, "-c", FAILING, folder], capture_output=True, text=True, timeout=240, cwd=ROOT, check=True
        )
    assert done.stdout.splitlines()[-1:] == ["False []"], done.stderr


STOPPED = """
import os, signal, sys, tempfile
from fever.sampling.ray_cluster import connect

tempfile.tempdir = sys.argv[1]
cluster = connect(1)
os.kill(cluster.processes[sys.argv[2]].pid, signal.SIGSTOP)
cluster.leave()
print(cluster.ray.is_initialized(), [name for name in os.listdir(sys.argv[1]) if "ray" in name])
"""


@pytest.mark.parametrize("part", ["GCS", pytest.param("raylet", marks=pytest.mark.slow)])
def test_a_ray_of_which_a_part_is_stopped_is_shut_down_all_the_same(part: str) -> None:
    """Ray itself waits for it without end, in C."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        command = [sys.executable, "-c", STOPPED, folder, part]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=ROOT, check=True)
    assert done.stdout.splitlines() == ["False []"], done.stderr
