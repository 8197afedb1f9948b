"""`fever train --seeds`: real trainings side by side, how they end, and what they leave."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import matplotlib.image
import pytest

from fever import layout
from fever.config import RunConfig
from fever.errors import FeverError
from fever.experiments import several
from fever.experiments.member import KEPT_OUTPUT, Member
from fever.experiments.several import at_once, several_configs, share_cores
from fever.experiments.table import closing_lines, errors_text
from fever.runs.groups import by_experiment
from fever.runs.run import Run, list_runs
from fever.scratch import sweep
from tests.helpers import ROOT, call_fever, processes_with, run_fever, wait_for

SMALL = ("--envs", "2", "steps=16", "minibatch=32")
ENDLESS = ("--stop-steps", "1000000000")


def config(**values: Any) -> RunConfig:
    return RunConfig.model_validate({"env": "CartPole-v1", **values})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with an experiment of three seeds, from seed 4 on, and the object that the command printed."""
    path = tmp_path_factory.mktemp("seeds")
    words = ["train", "CartPole-v1", "--seeds", "3", "--seed", "4", "--name", "a", "--stop-steps", "4000", "--json"]
    done = run_fever(*words, cwd=path, FEVER_RUNS="elsewhere")
    assert done.returncode == 0, done.stderr
    (path / "printed.json").write_text(done.stdout)
    (path / "said.txt").write_text(done.stderr)
    return path


def test_every_seed_is_an_ordinary_run(folder: Path) -> None:
    runs = list_runs(folder / "elsewhere")
    assert sorted(run.path.name for run in runs) == ["a-seed-4", "a-seed-5", "a-seed-6"]
    assert len(by_experiment(runs)) == 1
    assert sorted(run.config.seed for run in runs) == [4, 5, 6]
    assert {run.status for run in runs} == {"steps"}
    words = ["train", "CartPole-v1", "--seed", "5", "--name", "alone", "--stop-steps", "4000", "--quiet"]
    assert run_fever(*words, cwd=folder).returncode == 0
    alone, there = Run(folder / "runs/alone"), Run(folder / "elsewhere/a-seed-5")
    assert [row["return_mean"] for row in alone.metrics()] == [row["return_mean"] for row in there.metrics()]


def test_the_score_is_that_of_all_seeds(folder: Path) -> None:
    printed = json.loads((folder / "printed.json").read_text())
    assert (printed["stop_reason"], printed["failed"], printed["next"]) == ("done", 0, [])
    assert [(run["seed"], run["state"], run["stop_reason"]) for run in printed["runs"]] == [
        (seed, "done", "steps") for seed in (4, 5, 6)
    ]
    score = printed["score"]
    last = [Run(folder / run["run"]).metrics()[-1] for run in printed["runs"]]
    assert score["steps"] == min(row["steps"] for row in last)
    assert score["final"]["mean"] == pytest.approx(sum(row["return_mean"] for row in last) / 3, rel=0.1)
    low, high = score["final"]["interval"]
    assert low <= score["final"]["mean"] <= high
    picture = folder / printed["picture"]
    assert picture == folder / "elsewhere/a-seed-4" / layout.SEEDS
    assert matplotlib.image.imread(picture).shape[2] == 4


def test_what_a_person_reads(folder: Path) -> None:
    said = (folder / "said.txt").read_text()
    assert said.startswith("training CartPole-v1 with ppo, seeds 4 to 6, ")
    for seed in (4, 5, 6):
        assert f"seed {seed} done: return " in said
    assert "done: 3 of 3 seeds are done, in " in said
    assert "score of 3 seeds at " in said
    assert "picture: elsewhere/a-seed-4/seeds.png" in said
    assert "next: fever compare elsewhere/a-seed-4 OTHER-RUN" in said


def test_names_that_exist_are_refused_before_anything_starts(folder: Path) -> None:
    words = ["train", "CartPole-v1", "--seeds", "2", "--seed", "3", "--name", "a", "--runs", "elsewhere"]
    done = call_fever(*words, cwd=folder)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        "fever: elsewhere/a-seed-4 exists already; choose another --name or --seed, or continue it with: "
        "fever resume elsewhere/a-seed-4\n"
    )
    assert not (folder / "elsewhere/a-seed-3").exists()


def start(folder: Path, *words: str) -> subprocess.Popen[str]:
    variables = {**os.environ, "PYTHONPATH": str(ROOT), "SEEDS_TEST": str(folder)}
    command = [sys.executable, "-m", "fever", "train", "CartPole-v1", *SMALL, *words]
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, cwd=folder, env=variables, **pipes)


SLOW = (pytest.param(number, marks=pytest.mark.slow) for number in (signal.SIGTERM, signal.SIGHUP))


@pytest.mark.parametrize("number", [signal.SIGINT, *SLOW])
def test_a_signal_saves_and_ends_all(tmp_path: Path, number: int) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # tests may run under nohup
    process = start(tmp_path, *ENDLESS, "--seeds", "3", "--parallel", "2", "--name", "a", "--json")
    signal.signal(signal.SIGHUP, before)
    metrics = [tmp_path / f"runs/a-seed-{seed}" / layout.METRICS for seed in (0, 1)]
    wait_for(lambda: all(path.exists() and path.stat().st_size for path in metrics), "metrics of both")
    process.send_signal(number)
    out, said = process.communicate(timeout=15)
    assert process.returncode == 130, said
    printed = json.loads(out)
    assert [run["state"] for run in printed["runs"]] == ["interrupted", "interrupted", "waiting"]
    assert printed["stop_reason"] == "interrupted"
    for seed in (0, 1):
        run = Run(tmp_path / f"runs/a-seed-{seed}")
        assert run.status == "interrupted"
        rows_after = run.last_row()["iteration"] - run.checkpoints()[-1].iteration
        assert rows_after in (0, 1)  # 1: on a busy machine the last resort has saved while an iteration ended
        assert f"next: fever resume runs/a-seed-{seed}\n" in said
    assert "next: fever train -f runs/a-seed-0/config.yaml --seed 2 --name a-seed-2\n" in said
    assert not (tmp_path / "runs/a-seed-2").exists()
    assert processes_with(f"SEEDS_TEST={tmp_path}") == []
    words = printed["next"][-1].split()[1:]
    done = run_fever(*words, "--stop-steps", "100", "--quiet", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert Run(tmp_path / "runs/a-seed-2").config.settings["steps"] == 16


@pytest.mark.slow
def test_children_end_with_a_parent_that_is_killed(tmp_path: Path) -> None:
    """Its temporary folder is removed by the next command."""
    temporary = Path(tempfile.gettempdir())
    before = {*temporary.iterdir()}
    process = start(tmp_path, *ENDLESS, "--seeds", "1", "--name", "a", "--quiet")
    metrics = tmp_path / "runs/a-seed-0" / layout.METRICS
    wait_for(lambda: metrics.exists() and metrics.stat().st_size, "metrics")
    process.kill()
    process.communicate()
    wait_for(lambda: processes_with(f"SEEDS_TEST={tmp_path}") == [], "end of the children", 30)
    assert Run(tmp_path / "runs/a-seed-0").status == "interrupted"
    left = {path for path in temporary.glob(f"{several.SCRATCH}*") if path not in before}
    assert len(left) == 1
    sweep(temporary, several.SCRATCH)
    assert not left & {*temporary.iterdir()}


@pytest.mark.slow
def test_one_seed_that_fails_does_not_end_the_others(tmp_path: Path) -> None:
    words = ["train", "CartPole-v1", *SMALL, "--stop-steps", "500", "--seeds", "3", "--name", "a"]
    done = run_fever(*words, "--callback", 'tests.experiments.callbacks:FailWith={"seed": 1}', cwd=tmp_path)
    assert done.returncode == 1, done.stderr
    assert (
        "seed 1 failed: the callback tests.experiments.callbacks:FailWith failed in on_iteration: ValueError"
        in done.stdout
    )
    assert "done: 2 of 3 seeds are done" in done.stdout
    assert "1 failed: seed 1: the callback tests" in done.stdout
    assert "score of 2 seeds" in done.stdout
    assert [Run(tmp_path / f"runs/a-seed-{seed}").status for seed in (0, 1, 2)] == ["steps", "failed", "steps"]


@pytest.mark.slow
def test_a_file_is_trained_with_several_seeds(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("env: CartPole-v1\nenvs: 2\nseed: 7\nsettings: {steps: 16, minibatch: 32}\n")
    words = ["train", "-f", "run.yaml", "--seeds", "2", "--stop-steps", "100", "--workers", "auto", "--quiet", "--json"]
    done = run_fever(*words, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    printed = json.loads(done.stdout)
    assert [run["seed"] for run in printed["runs"]] == [7, 8]
    assert printed["workers"] == 0
    assert Path(printed["runs"][1]["run"]).name.startswith("cartpole-v1-ppo-")
    assert Path(printed["runs"][1]["run"]).name.endswith("-seed-8")
    with (tmp_path / "run.yaml").open("a") as file:
        file.write("search: {space: {gamma: 'uniform(0.9,1)'}}\n")
    done = call_fever("train", "-f", "run.yaml", "--seeds", "2", cwd=tmp_path)
    assert done.returncode == 2
    assert "fever: a search has its own --seeds: fever tune" in done.stderr


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["train", "CartPole-v1", "--seeds", "0"], "fever: --seeds 0: must be a number from 1 to 1,000\n"),
        (["train", "CartPole-v1", "--seeds", "2", "--on", "mpi"], "fever: --seeds does not go with --on mpi"),
        (["resume", "last", "--seeds", "2"], "fever: No such option: --seeds"),
    ],
)
def test_mistakes_are_one_sentence_and_nothing_is_made(tmp_path: Path, words: list[str], sentence: str) -> None:
    done = call_fever(*words, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(sentence)
    assert done.stderr.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_what_all_seeds_have_wrong_is_one_sentence(tmp_path: Path) -> None:
    """The environment is made in time only in the processes of the seeds."""
    (tmp_path / "once.py").write_text(
        "from tests.environments import InfoEnv\nfrom pathlib import Path\n"
        "def make():\n    if Path('made').exists():\n        raise ValueError('no licence')\n"
        "    Path('made').touch()\n    return InfoEnv()\n"
    )
    done = run_fever("train", "once:make", "--seeds", "2", "--name", "a", "--quiet", cwd=tmp_path)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert re.match("fever: all failed: seeds 0, 1: .*no licence", done.stderr)


def test_names_and_seeds(tmp_path: Path) -> None:
    found = several_configs(config(seed=3, runs=str(tmp_path), name="x"), 2)
    assert [(one.seed, one.name) for one in found] == [(3, "x-seed-3"), (4, "x-seed-4")]
    (tmp_path / "x-seed-4").mkdir()
    with pytest.raises(FeverError, match="x-seed-4 exists already"):
        several_configs(config(seed=3, runs=str(tmp_path), name="x"), 2)
    with pytest.raises(FeverError, match="'18446744073709551616' is not an integer of 64 bits"):
        several_configs(config(seed=2**64 - 1, runs=str(tmp_path)), 2)
    with pytest.raises(FeverError, match="from 1 to 1,000"):
        several_configs(config(runs=str(tmp_path)), 1001)


def test_runs_are_packed_on_the_cores() -> None:
    for given, cores, workers, parallel in (
        (0, 8, 0, 8), (None, 8, 0, 8), ("auto", 8, 0, 8), (1, 8, 1, 4), (3, 8, 3, 2), (7, 8, 7, 1), (20, 8, 20, 1),
        ("all", 8, 1, 4), ("all", 64, 15, 4), ("all", 2, 0, 2),
    ):  # fmt: skip
        shared = share_cores(config(workers=given), 4, cores)
        assert (shared.workers, at_once(shared, cores)) == (workers, parallel), (given, cores)
    assert at_once(config(device="gpu", workers=0), 8) == 1


def test_the_last_words_of_a_run(tmp_path: Path) -> None:
    member = Member(config(name="a", runs=str(tmp_path)), tmp_path)
    assert member._last_words(3) == "exit code 3"
    assert member._last_words(-9) == "it was killed by SIGKILL"
    member.output.write_text("Traceback\n  File\nOSError: no such thing\n\n")
    assert member._last_words(1) == "OSError: no such thing"
    member.output.write_text("noise\nfever: the reason\nnoise of another library\n" + "x" * 10)
    assert member._last_words(1) == "the reason"
    assert len(errors_text([{"error": "a", "seed": 1}, {"error": None, "seed": 2}, {"error": "a", "seed": 3}])) == 13


def test_what_a_run_prints_does_not_fill_the_disk(tmp_path: Path) -> None:
    member = Member(config(name="a", runs=str(tmp_path)), tmp_path)
    member.process = subprocess.Popen(["sleep", "60"])
    try:
        member.output.write_bytes(b"x" * (KEPT_OUTPUT + 1))
        assert not member.look()
        assert member.output.stat().st_size == 0
    finally:
        member.kill()
    assert member.process.returncode is not None


def test_nothing_is_said_to_continue_that_did_not_begin() -> None:
    run = {"seed": 0, "run": "runs/a-seed-0", "state": "waiting", "error": None}
    summary = {
        "runs": [run], "failed": 0, "stop_reason": "interrupted", "seconds": 1.0, "score": None, "notes": [],
        "picture": None, "next": several.next_commands([]),
    }  # fmt: skip
    assert closing_lines(summary) == ["interrupted: 0 of 1 seeds are done, in 1s"]
