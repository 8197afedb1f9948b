"""`fever scale` as a user calls it, with real trainings."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.helpers import ROOT, call_fever, run_fever, wait_for

pytestmark = pytest.mark.ray
SLEEP, BUSY = "tests.environments.timing:SleepEnv", "tests.environments.timing:BusyEnv"
NOISY = "the speeds of two trainings are compared, which others that need the cores at the time of one of them change"


def scaled(cwd: Path, *words: str, timeout: float = 900) -> dict[str, Any]:
    """The report of a comparison that worked."""
    done = run_fever("scale", *words, "--json", cwd=cwd, timeout=timeout)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def milliseconds(count: float) -> tuple[str, str]:
    return "--env-kwargs", json.dumps({"milliseconds": count})


def by_count(report: dict[str, Any], name: str) -> dict[int, Any]:
    return {one["count"]: one[name] for one in report["counts"]}


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("--workers 2,2,x", "--workers 2,2,x: must be whole numbers from 0 to 10,000, such as --workers 1,2,4"),
        ("--workers 2,2", "--workers 2,2: a number comes twice; --rounds says how often each is measured"),
        ("--workers 2", "--workers 2: a comparison takes two numbers or more, for example --workers 1,2,4"),
        ("--workers -1,2", "--workers -1,2: must be whole numbers from 0 to 10,000, such as --workers 1,2,4"),
        ("--workers 1,99999999999", "--workers 1,99999999999: must be whole numbers from 0 to 10,000, such as "
         "--workers 1,2,4"),
        ("--workers ²,1", "--workers ²,1: must be whole numbers from 0 to 10,000, such as --workers 1,2,4"),
        ("--nodes 1,2", "--nodes has no effect without --on; add --on TARGET"),
        ("--workers 1,2 --hosts 2", "--hosts has no effect without --on; add --on TARGET"),
        ("--workers 1,2 --account abc", "--account has no effect without --on; add --on TARGET"),
        ("--nodes 0,2 --on slurm", "--nodes 0,2: must be whole numbers from 1 to 10,000, such as --nodes 1,2,4"),
        ("--nodes 1,2 --hosts 1,2 --on slurm", "say what to compare: --workers 0,1,2,4, or with --on TARGET --nodes "
         "1,2,3 or --hosts 1,2,3"),
        ("--nodes 1,2 --workers 1,2 --on slurm", "--nodes 1,2: compare either nodes or workers, with one number of "
         "the other"),
        ("", "say what to compare: --workers 0,1,2,4, or with --on TARGET --nodes 1,2,3 or --hosts 1,2,3"),
        ("--workers 1,2 --seconds soon", "--seconds: 'soon' is not a time; write 90s, 10m or 2h"),
        ("--workers 1,2 --seconds 0", "--seconds '0': must be more than 0 s"),
        ("--workers 1,2 --longest 5s", "--longest 5s must be more than --seconds 10s: the warm-up is part of it"),
        ("--workers 1,2 --target nan", "--target nan: must be a return that can be reached, a finite number"),
        ("--workers 1,2 --predict 0", "--predict 0: must be whole numbers from 1 to 10,000, such as --predict 1,2,4"),
        ("--nodes 1,2 --on mpi", "--on mpi: the ranks of one launcher are one number of machines; submit with --on "
         "slurm"),
        ("--hosts 1,2 --on slurm", "--hosts does not go with --on slurm"),
        ("--nodes 1,2 --on nowhere.yaml", "nowhere.yaml cannot be read: No such file or directory"),
        ("--workers 1,2 --algo nope", None),
        ("--workers 1,2 stepz=3", None),
        ("--workers 1,2 learning_rate=loguniform(1e-5,1e-2)", None),
    ],
)  # fmt: skip
def test_mistakes_are_one_sentence_and_leave_nothing(words: str, sentence: str | None, tmp_path: Path) -> None:
    done = call_fever("scale", "CartPole-v1", *words.split(), cwd=tmp_path)
    said = done.stderr
    assert done.returncode == 2
    assert said.count("\n") == 1
    assert said.startswith("fever: ")
    assert sentence is None or said == f"fever: {sentence}\n"
    assert list(tmp_path.iterdir()) == []


def test_an_environment_that_fails_is_one_sentence(tmp_path: Path) -> None:
    env = "tests.environments.faults:FailingEnv"
    done = run_fever("scale", env, "--workers", "0,1", "--env-kwargs", '{"in_reset": true, "at": 1}', cwd=tmp_path)
    assert done.returncode == 2, done.stderr
    (line,) = done.stderr.strip().splitlines()
    assert line == f"fever: {env}: the engine has ended"
    assert list(tmp_path.iterdir()) == []


@pytest.fixture(scope="module")
def cut(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """The folder and the report of a comparison that Ctrl-C has ended in its second round."""
    path = tmp_path_factory.mktemp("cut")
    words = ["--workers", "0,1,200", "--rounds", "50", "--seconds", "0.2", "--name", "cut", "--json"]
    command = [sys.executable, "-m", "fever", "scale", "CartPole-v1", *words, "--envs", "3", "steps=8", "minibatch=24"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, cwd=path, env=environment, stdout=subprocess.PIPE, text=True) as process:
        wait_for(lambda: (path / "runs/cut/workers-0-round-2").is_dir(), "second round")
        process.send_signal(signal.SIGINT)
        printed = process.communicate(timeout=120)[0]
    assert process.returncode == 130
    return path, json.loads(printed.splitlines()[-1])


def test_a_count_that_fails_leaves_the_others(cut: tuple[Path, dict[str, Any]]) -> None:
    """There are never cores for 200 workers."""
    path, report = cut
    assert list(by_count(report, "samples_per_second")) == [0, 1]
    (failed,) = report["failed"]
    assert (failed["count"], failed["round"]) == (200, 1)
    assert failed["problem"].startswith("--workers 200: every worker is a process")
    folder = path / "runs/cut"
    assert {"report.json", "report.md", "speedup.png", "speedup.svg"} <= {path.name for path in folder.iterdir()}
    assert json.loads((folder / "report.json").read_text()) == report
    assert report["answer"].startswith("one round only: ")
    shown = call_fever("show", "runs/cut/workers-1-round-1", "--json", cwd=path)
    assert json.loads(shown.stdout)["status"] == "measured"  # an ordinary run


def test_ctrl_c_reports_what_was_measured(cut: tuple[Path, dict[str, Any]]) -> None:
    _, report = cut
    assert report["complete"] is False
    assert all(len(one["runs"]) == 1 for one in report["counts"])


def test_ctrl_c_at_once_leaves_nothing(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "fever", "scale", SLEEP, *milliseconds(50), "--workers", "0,1"]
    with subprocess.Popen(command, cwd=tmp_path, env=environment, stderr=subprocess.PIPE, text=True) as process:
        wait_for(lambda: list(tmp_path.glob("runs/*")), "folder of the report")
        process.send_signal(signal.SIGINT)
        said = process.communicate(timeout=120)[1]
    assert process.returncode == 130
    assert said.splitlines()[-1].startswith("fever: interrupted before anything was measured")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.flaky_under_load(NOISY)
def test_a_waiting_environment_scales_and_is_predicted(tmp_path: Path) -> None:
    """Steps of 5 ms that compute nothing: n workers are n times as fast, also beyond the cores."""
    words = (SLEEP, *milliseconds(5), "--envs", "8", "steps=16", "--seconds", "6")
    report = scaled(tmp_path, *words, "--workers", "1,2,4", "--predict", "8")
    assert report["answer"].startswith("yes: 4 workers are ")
    assert by_count(report, "speedup")[4] == pytest.approx(4, rel=0.1)
    assert report["bottleneck"].startswith("at 4 workers it is the environment")
    (predicted,) = report["predicted"]
    really = by_count(scaled(tmp_path, *words, "--workers", "4,8", "--rounds", "1"), "samples_per_second")[8]
    assert predicted["samples_per_second"] == pytest.approx(really, rel=0.1)


@pytest.mark.slow
@pytest.mark.flaky_under_load(NOISY)
def test_a_computing_environment_is_limited_by_the_cores(tmp_path: Path) -> None:
    """Steps of 2 ms of processor time, on two cores: nothing is gained beyond two workers, and the model knows."""
    two = sorted(os.sched_getaffinity(0))[:2]
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, two)
    try:
        words = (BUSY, *milliseconds(2), "--envs", "4", "steps=64", "--seconds", "8", "--predict", "16")
        report = scaled(tmp_path, *words, "--workers", "1,2,4")
    finally:
        os.sched_setaffinity(0, before)
    speedups = by_count(report, "speedup")
    assert len(two) == 2
    assert speedups[2] > 1.5
    assert speedups[4] < 2.2
    assert "beyond 2 workers" in report["answer"]
    assert report["bottleneck"].startswith("at 4 workers it is the number of cores")
    assert report["predicted"][0]["speedup"] < 2.4
    assert all(abs(one["error"]) < 0.15 for one in report["counts"])


@pytest.mark.slow
@pytest.mark.flaky_under_load(NOISY)
def test_where_more_workers_do_not_help_it_says_no(tmp_path: Path) -> None:
    """A step of CartPole takes microseconds: sending 128 of them from another process takes longer."""
    words = ("CartPole-v1", "--workers", "0,1", "--seconds", "4", "--rounds", "4")
    report = scaled(tmp_path, *words, "steps=16", "minibatch=128", "epochs=1")
    assert report["answer"].startswith("no: more workers make this slower: 1 worker is 0.")


@pytest.mark.slow
@pytest.mark.parametrize("algo", ["impala", "dqn", "rllib:PPO"])
def test_every_kind_of_algorithm_is_measured(algo: str, tmp_path: Path) -> None:
    if algo.startswith("rllib"):
        pytest.importorskip("torch")
    words = ("--algo", algo, "--workers", "1,2", "--rounds", "2", "--seconds", "3", "--target", "15")
    report = scaled(tmp_path, "CartPole-v1", *words)
    assert [one["count"] for one in report["counts"]] == [1, 2]
    assert all(one["samples_per_second"] > 0 for one in report["counts"])
    assert all(one["target_seconds"] is not None for one in report["counts"])
    assert (tmp_path / report["report"] / "speedup.png").is_file()


@pytest.mark.slow
def test_a_target_that_is_never_reached_is_in_the_report(tmp_path: Path) -> None:
    words = ("--workers", "0,1", "--rounds", "1", "--seconds", "2", "--target", "501", "--longest", "10s")
    report = scaled(tmp_path, "CartPole-v1", *words)
    assert report["counts"][0]["target_seconds"] is None
    assert any("the return 501.0 was not reached within 10s" in note for note in report["notes"])
