"""The lock of a run directory: who has it, who outlives it, and who may take it over."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from fever.config import RunConfig
from fever.errors import FeverError
from fever.runs.run import Run
from tests.helpers import ROOT

TRAINER = """
import ctypes, os, sys, time
from pathlib import Path
from fever.runs.run import Run
run = Run(Path(sys.argv[1]))
run.lock()
fork = ctypes.CDLL(None).fork if sys.argv[2] == "c" else os.fork
child = fork()
if child == 0:
    time.sleep(100)
    os._exit(0)
print(child, flush=True)
if sys.argv[3] == "clean":
    run.close()
else:
    time.sleep(100)
"""
STARTER = """
import sys, time
from pathlib import Path
from fever.errors import FeverError
from fever.runs import lock
from fever.runs.run import Run
is_dead = lock._is_dead
lock._is_dead = lambda owner: (is_dead(owner), time.sleep(0.2))[0]  # time for the others to come in between
run = Run(Path(sys.argv[1]))
print("ready", flush=True)
sys.stdin.readline()
try:
    run.lock()
except FeverError:
    sys.exit(3)
time.sleep(2)
"""


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run.create(RunConfig(env="X-v0", runs=str(tmp_path), name="a"), {})


def start(script: str, run: Run, *words: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", script, str(run.path), *words]
    return subprocess.Popen(
        command, env={**os.environ, "PYTHONPATH": str(ROOT)}, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


@pytest.mark.parametrize("end", ["clean", "kill"])
@pytest.mark.parametrize("fork", ["python", "c"])
def test_children_of_a_trainer_that_is_gone_do_not_keep_the_lock(run: Run, fork: str, end: str) -> None:
    with start(TRAINER, run, fork, end) as trainer:
        assert trainer.stdout is not None
        child = int(trainer.stdout.readline())
        try:
            if end == "kill":
                assert run.running
                with pytest.raises(FeverError, match=f"is being trained right now by process {trainer.pid}$"):
                    run.lock()
                trainer.kill()
            trainer.wait(20)
            assert not run.running
            run.lock()
            assert Run(run.path).running
            with pytest.raises(FeverError, match=f"by process {os.getpid()}$"):
                Run(run.path).lock()
            run.close()
            assert not run.running
        finally:
            os.kill(child, signal.SIGKILL)


def test_two_that_start_at_once_never_both_take_over(run: Run) -> None:
    with start(TRAINER, run, "c", "kill") as trainer:
        assert trainer.stdout is not None
        child = int(trainer.stdout.readline())
        trainer.kill()
        trainer.wait(20)
        starters = [start(STARTER, run) for _ in range(4)]
        try:
            for one in starters:
                assert one.stdout is not None
                assert one.stdout.readline() == "ready\n"
            for one in starters:
                assert one.stdin is not None
                one.stdin.write("\n")
                one.stdin.flush()
            codes = sorted(one.wait(60) for one in starters)
        finally:
            os.kill(child, signal.SIGKILL)
            for one in starters:
                one.kill()
                one.communicate()
    assert codes == [0, 3, 3, 3]


@pytest.mark.parametrize("field", ["host", "boot"])
def test_process_numbers_of_other_machines_mean_nothing(run: Run, field: str) -> None:
    run.lock()
    owner = json.loads((run.path / "lock").read_text())
    assert (owner["host"], owner["pid"]) == (socket.gethostname(), os.getpid())
    (run.path / "lock").write_text(json.dumps({**owner, "pid": 2**22 + 1}))  # a dead one
    assert not Run(run.path).running
    (run.path / "lock").write_text(json.dumps({**owner, "pid": 2**22 + 1, field: "other"}))
    assert Run(run.path).running
    where = " on other" if field == "host" else ""
    with pytest.raises(FeverError, match=f"by process {2**22 + 1}{where}$"):
        Run(run.path).lock()
    run.close()


def test_another_process_with_the_number_of_a_dead_one_is_not_taken_for_it(run: Run) -> None:
    run.lock()
    owner = json.loads((run.path / "lock").read_text())
    (run.path / "lock").write_text(json.dumps({**owner, "started": owner["started"] - 1}))
    assert not Run(run.path).running
    run.close()


def test_a_forked_child_that_ends_like_its_parent_does_not_release_the_lock(run: Run) -> None:
    run.lock()
    child = os.fork()
    if child == 0:
        run.close()
        os._exit(0)
    os.waitpid(child, 0)
    assert Run(run.path).running
    run.close()
