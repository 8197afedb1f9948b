"""However a run is ended, it ends soon, and what it has learned is saved."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from fever.cli import main
from fever.files import unbreakable
from fever.signals import Interrupts
from tests.helpers import ROOT, run_fever, wait_for

SECONDS = pytest.mark.flaky_under_load("what is asserted is a promise in seconds, and the machine must have so many")
SMALL = ("--envs", "2", "steps=16", "minibatch=32")
# What Ray's own handler prints of a SIGTERM that comes while Ray starts in C; then it calls fever's.
RAY_LINES = re.compile(
    r"^(\[[^\]\n]*\] logging\.cc:\d+: )?(\*\*\* SIGTERM received at .*|PC: @ .*| *@ +0x.*)\n", re.MULTILINE
)


def stuck(folder: Path, how: str) -> list[str]:
    """Arguments for a run whose environment is soon stuck."""
    kwargs = json.dumps({"folder": str(folder), "how": how})
    return ["train", "tests.environments:StuckEnv", "--env-kwargs", kwargs, *SMALL, "--name", "a"]


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> None:
    """What the trainings here compile is in JAX's cache: a limit of time is not spent on that."""
    for env in ("CartPole-v1", "tests.environments:CounterEnv"):
        done = run_fever("train", env, *SMALL, "--stop-iterations", "2", cwd=tmp_path_factory.mktemp("compiled"))
        assert done.returncode == 0, done.stderr


@contextmanager
def started(folder: Path, words: list[str], **more: Any) -> Iterator[subprocess.Popen[str]]:
    """A command in a process of its own, killed at the latest here."""
    command = [sys.executable, "-m", "fever", *words]
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, **more}
    process = subprocess.Popen(command, cwd=folder, env={**os.environ, "PYTHONPATH": str(ROOT)}, **pipes)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def saved(folder: Path) -> tuple[str, bool]:
    """Why the run has ended, and whether its last row is in a checkpoint."""
    described = json.loads(run_fever("show", "a", "--json", cwd=folder).stdout)
    return described["status"], described["last"]["iteration"] == described["checkpoints"][-1]["iteration"]


@SECONDS
@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("how", ["python", "c"])
def test_the_limit_of_time_holds_although_an_environment_is_stuck(tmp_path: Path, how: str) -> None:
    done = run_fever(*stuck(tmp_path, how), "--stop-time", "5s", "--json", cwd=tmp_path, timeout=60)
    assert done.returncode == 0, done.stderr
    summary = json.loads((tmp_path / "runs/a/summary.json").read_text())
    assert json.loads(done.stdout) == summary
    assert 5 <= summary["seconds"] < 7
    assert (tmp_path / "stuck").exists()
    assert saved(tmp_path) == ("time", True)


@SECONDS
@pytest.mark.parametrize(
    ("number", "how"), [(signal.SIGINT, "c"), (signal.SIGHUP, "python"), (signal.SIGTERM, "python")]
)
def test_a_signal_ends_a_run_that_is_stuck_within_ten_seconds(tmp_path: Path, number: int, how: str) -> None:
    heard = {"preexec_fn": lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL)}  # tests may run under nohup
    with started(tmp_path, [*stuck(tmp_path, how), "--stop-steps", "1000000"], **heard) as process:
        wait_for((tmp_path / "stuck").exists, "the environment to be stuck")
        time.sleep(0.5)
        process.send_signal(number)
        said = "".join(process.communicate(timeout=10))
    assert process.returncode == 130, said
    assert "next: fever resume runs/a" in said
    assert saved(tmp_path) == ("interrupted", True)


@SECONDS
def test_a_second_ctrl_c_ends_a_run_at_once_and_it_is_saved(tmp_path: Path) -> None:
    with started(tmp_path, [*stuck(tmp_path, "c"), "--stop-steps", "1000000"]) as process:
        wait_for((tmp_path / "stuck").exists, "the environment to be stuck")
        time.sleep(0.5)
        process.send_signal(signal.SIGINT)
        time.sleep(0.5)
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=4)
    assert process.returncode == 130
    assert saved(tmp_path) == ("interrupted", True)


def test_a_second_ctrl_c_ends_a_search_that_is_being_saved(monkeypatch: pytest.MonkeyPatch) -> None:
    codes: list[int] = []
    ended: list[bool] = []

    def search(config: Any, **more: Any) -> dict[str, Any]:
        with Interrupts(held=True):
            for _ in range(2):
                assert not codes
                signal.raise_signal(signal.SIGINT)
            wait_for(lambda: codes, "the end")
        return {"stop_reason": "trials"}

    monkeypatch.setattr("fever.tune.search", search)
    monkeypatch.setattr("fever.sampling.ray_cluster.kill_private_ray", lambda: ended.append(True))
    monkeypatch.setattr("os._exit", codes.append)
    main._search(None, quiet=True, as_json=False)
    assert (codes, ended) == ([130], [True])


def test_an_environment_that_nothing_can_interrupt_ends_the_run_saved(tmp_path: Path) -> None:
    words = [*stuck(tmp_path, "c"), "--stop-steps", "1000000", "--step-timeout", "1s"]
    done = run_fever(*words, cwd=tmp_path, timeout=60)
    assert done.returncode == 1
    assert "cannot be interrupted; with --workers 1 or more it runs in a process of its own" in done.stderr
    assert saved(tmp_path) == ("failed", True)


def train_with_callback(folder: Path, seconds: float) -> subprocess.CompletedProcess[str]:
    """A run of six seconds whose callback takes so long; it ends with exit code 0."""
    arguments = json.dumps({"folder": str(folder), "seconds": seconds})
    words = ["train", "CartPole-v1", *SMALL, "--name", "a", "--stop-time", "6s", "--json"]
    words += ["--callback", f"tests.environments:SlowCallback={arguments}"]
    done = run_fever(*words, cwd=folder, timeout=60)
    assert done.returncode == 0, done.stderr
    return done


@SECONDS
@pytest.mark.usefixtures("compiled")
def test_a_callback_that_is_being_called_when_the_time_is_over_is_waited_for(tmp_path: Path) -> None:
    done = train_with_callback(tmp_path, 8)
    assert json.loads(done.stdout)["stop_reason"] == (tmp_path / "stopped").read_text() == "time"
    assert saved(tmp_path) == ("time", True)


@SECONDS
@pytest.mark.usefixtures("compiled")
def test_a_callback_that_takes_too_long_is_cut_and_its_row_is_kept(tmp_path: Path) -> None:
    done = train_with_callback(tmp_path, 100)
    assert "fever: a callback was cut" in done.stderr
    assert json.loads(done.stdout)["iterations"] == 2
    assert (tmp_path / "stopped").read_text() == "time"
    rows = (tmp_path / "runs/a/metrics.jsonl").read_text().splitlines()
    assert [json.loads(row)["iteration"] for row in rows] == [1, 2]
    assert saved(tmp_path) == ("time", True)


def test_a_failed_run_whose_environments_do_not_close_has_failed(tmp_path: Path) -> None:
    words = ["train", "tests.environments:StuckInCloseEnv", *SMALL, "--name", "a", "--max-env-failures", "0"]
    done = run_fever(*words, cwd=tmp_path, timeout=60)
    assert done.returncode == 1, done.stderr
    assert "fever: ValueError: the robot fell over" in done.stderr
    assert "resume with: fever resume runs/a" in done.stderr
    assert saved(tmp_path)[0] == "failed"


@SECONDS
def test_two_ctrl_c_end_a_run_whose_disk_does_not_answer(tmp_path: Path) -> None:
    kwargs = json.dumps({"folder": str(tmp_path)})
    words = ["train", "tests.environments:StuckDiskEnv", "--env-kwargs", kwargs, *SMALL, "--name", "a"]
    with started(tmp_path, [*words, "--checkpoint-every", "0.1s", "--stop-steps", "1000000"]) as process:
        wait_for((tmp_path / "stuck").exists, "the disk to hang")
        process.send_signal(signal.SIGINT)
        time.sleep(0.5)
        process.send_signal(signal.SIGINT)
        said = process.communicate(timeout=8)[1]
    assert process.returncode == 130
    assert "ended while the run was being saved; the checkpoint before that is kept" in said
    assert json.loads(run_fever("show", "a", "--json", cwd=tmp_path).stdout)["checkpoints"]


def test_a_limit_of_time_before_anything_was_learned_leaves_nothing(tmp_path: Path) -> None:
    done = run_fever("train", "CartPole-v1", "steps=100000", "--stop-time", "1s", cwd=tmp_path, timeout=60)
    assert done.returncode == 1
    assert done.stderr == "fever: the time limit was reached before anything was learned; nothing is left behind\n"
    assert not (tmp_path / "runs").exists()


def test_output_that_nobody_reads_does_not_end_a_run(tmp_path: Path) -> None:
    words = ["train", "CartPole-v1", *SMALL, "--stop-iterations", "30", "--name", "a"]
    reader, writer = os.pipe()
    os.close(reader)
    with started(tmp_path, words, stdout=writer, stderr=writer) as process:
        os.close(writer)
        assert process.wait(60) == 0
    assert saved(tmp_path) == ("iterations", True)


def test_an_environment_does_not_close_the_output_of_a_run(tmp_path: Path) -> None:
    with open(tmp_path / "out.txt", "w") as file:
        output = unbreakable(file)
        output.close()
        output.write("training goes on\n")
        output.flush()
    assert (tmp_path / "out.txt").read_text() == "training goes on\n"


def test_a_run_whose_standard_files_are_closed(tmp_path: Path) -> None:
    """Its own files must not get their numbers, and what is printed with them."""
    words = ["train", "CartPole-v1", *SMALL, "--stop-iterations", "2", "--name", "a"]
    command = ["sh", "-c", '"$@" <&- >&- 2>&-', "sh", sys.executable, "-m", "fever", *words]
    done = subprocess.run(command, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)}, timeout=60)
    assert done.returncode == 0
    assert saved(tmp_path) == ("iterations", True)


def test_a_run_under_nohup_outlives_its_terminal(tmp_path: Path) -> None:
    words = ["train", "CartPole-v1", *SMALL, "--stop-steps", "100000000", "--name", "a"]
    ignore = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with started(tmp_path, words) as process:
            metrics = tmp_path / "runs/a/metrics.jsonl"
            wait_for(lambda: metrics.exists() and metrics.stat().st_size, "metrics")
            process.send_signal(signal.SIGHUP)
            size = metrics.stat().st_size
            wait_for(lambda: metrics.stat().st_size > size + 1000, "more metrics")
            assert process.poll() is None
    finally:
        signal.signal(signal.SIGHUP, ignore)


def interrupt_at_start(folder: Path, words: list[str], after: float, number: int) -> None:
    """Interrupt a run while it starts: it ends soon with one sentence, and leaves nothing; unless it was done."""
    with started(folder, words) as process:
        time.sleep(after)
        process.send_signal(number)
        said = RAY_LINES.sub("", process.communicate(timeout=15)[1])
    if (folder / "runs").exists():  # it had learned something
        assert (process.returncode, said) == (130, ""), (after, said)
        subprocess.run(["rm", "-r", folder / "runs"], check=True)
        return
    early = process.returncode == -number  # while Python itself started
    assert early or (process.returncode == 130 and said.startswith("fever: interrupted")), (after, said)
    assert early or said.count("\n") == 1, said


@pytest.mark.parametrize("after", [0.15, 0.4, 0.8, 1.2, 1.6, 2.0])
def test_a_start_is_interrupted_cleanly(tmp_path: Path, after: float) -> None:
    interrupt_at_start(tmp_path, ["train", "CartPole-v1", "--stop-steps", "1000000000"], after, signal.SIGINT)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_while_fever_is_imported_is_named(tmp_path: Path, number: int) -> None:
    (tmp_path / "typer.py").write_text("import time\nopen('begun', 'w').close()\ntime.sleep(60)\n")
    heard = {"preexec_fn": lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL)}  # tests may run under nohup
    with started(tmp_path, ["runs"], **heard) as process:
        wait_for((tmp_path / "begun").exists, "the import")
        process.send_signal(number)
        _, said = process.communicate(timeout=15)
    assert (process.returncode, said) == (130, "fever: interrupted\n")


def test_sigterm_ends_a_command_whose_environment_is_stuck(tmp_path: Path) -> None:
    """A program that handles it in Python would not be ended while a call in C does not return."""
    words = ["train", "tests.environments:CounterEnv", *SMALL, "--stop-iterations", "1", "--name", "a"]
    assert run_fever(*words, cwd=tmp_path).returncode == 0
    kwargs = json.dumps({"folder": str(tmp_path), "how": "c", "at": 5})
    with started(tmp_path, ["eval", "a", "--env", "tests.environments:StuckEnv", "--env-kwargs", kwargs]) as process:
        wait_for(lambda: (tmp_path / "stuck").exists(), "the call")
        process.send_signal(signal.SIGTERM)
        assert process.wait(5) == -signal.SIGTERM


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_130_starts_are_interrupted_cleanly(tmp_path: Path, number: int) -> None:
    words = ["train", "CartPole-v1", "--stop-steps", "1000000000"]
    for trial in range(50):
        interrupt_at_start(tmp_path, words, 0.12 + 0.05 * trial, number)
    for trial in range(15):
        interrupt_at_start(tmp_path, [*words, "--workers", "1"], 1 + 0.4 * trial, number)


IN_C = """
import ctypes
run = ctypes.pythonapi.PyRun_String
run.restype, run.argtypes = ctypes.py_object, [ctypes.c_char_p, ctypes.c_int, ctypes.py_object, ctypes.py_object]
run(b"raise KeyboardInterrupt", 257, {}, {})
"""


def test_an_interrupt_in_the_code_of_a_library_in_c_has_its_exit_code(tmp_path: Path) -> None:
    (tmp_path / "in_c.py").write_text(IN_C)
    with started(tmp_path, ["train", "in_c:Env"]) as process:
        said = process.communicate(timeout=60)[1]
        assert (process.returncode, said) == (130, "fever: interrupted\n")
