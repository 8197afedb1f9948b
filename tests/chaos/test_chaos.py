"""The harness itself: its schedule, its environment's tokens, and that its ledger finds what is wrong."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from chaos import envs, ledger, report
from chaos.case import Outcome, Result
from chaos.processes import MARK, marked
from chaos.schedule import IN_LAB, KINDS, RECIPES, schedule
from chaos.training import TARGET, Training
from fever.runs.run import Run
from tests.helpers import wait_for


def test_a_schedule_is_a_function_of_its_seed() -> None:
    assert schedule(3, 100) == schedule(3, 100)
    assert schedule(3, 100) != schedule(4, 100)


@pytest.mark.parametrize("seed", range(5))
def test_a_hundred_faults_have_every_kind_in_every_training(seed: int) -> None:
    cases = schedule(seed, 100)
    kinds = Counter(kind for case in cases for kind in case.kinds)
    assert kinds.total() == 100
    assert set(kinds) == set(KINDS)
    assert kinds["kill_driver"] == 20
    assert {case.recipe for case in cases} == {*RECIPES, None}
    for case in cases:
        assert (case.recipe is None) == bool(set(IN_LAB) & set(case.kinds))


def test_kinds_and_algorithms_can_be_chosen() -> None:
    cases = schedule(0, 7, ["kill_sampler", "exit"], ["ppo", "sac"])
    assert Counter(kind for case in cases for kind in case.kinds).total() == 7
    assert all(case.recipe is not None and case.recipe.workers for case in cases)


def claim_all(folder: Path) -> list[str]:
    return [kind for _ in range(200) if (kind := envs.claim(folder)) is not None]


def test_a_token_is_taken_once(tmp_path: Path) -> None:
    envs.make_folder(tmp_path)
    for number in range(100):
        (tmp_path / envs.TOKENS / f"raise.{number}").touch()
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        taken = pool.map(claim_all, [tmp_path, tmp_path])
    assert sum(map(len, taken)) == 100
    assert len(list((tmp_path / envs.CLAIMED).iterdir())) == 100


def test_the_environment_breaks_as_it_is_told(tmp_path: Path) -> None:
    envs.make_folder(tmp_path)
    env = envs.Balance(str(tmp_path), pause=0)
    env.reset(seed=0)
    (tmp_path / envs.TOKENS / "nan.0").touch()
    observation, reward, *_ = env.step(0)
    assert observation[0] != observation[0]
    assert reward != reward
    (tmp_path / envs.TOKENS / "raise.1").touch()
    with pytest.raises(RuntimeError, match="told to raise"):
        env.step(0)
    ends = [info for *_, info in (env.step(1) for _ in range(40)) if info]
    assert ends[0]["chaos_length"] >= 5
    assert envs.steps_taken(tmp_path) == 41


def write_run(folder: Path, metrics: list[dict[str, Any]], episodes: list[dict[str, Any]]) -> Run:
    folder.mkdir()
    for name, rows in {"metrics.jsonl": metrics, "episodes.jsonl": episodes}.items():
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return Run(folder)


def episode(number: int, identity: int, length: int = 10, **more: Any) -> dict[str, Any]:
    info = {"chaos_episode": identity, "chaos_length": 10}
    return {"episode": number, "length": length, "return": 10.0, "info": info, **more}


def test_the_ledger_finds_what_is_wrong(tmp_path: Path) -> None:
    rows = [{"iteration": number, "steps": 10 * number} for number in (1, 2, 3, 2, 3, 5)]  # resumed after the first
    run = write_run(tmp_path / "run", rows, [episode(1, 71), episode(2, 72), episode(3, 72), episode(4, 73, length=13)])
    summary = {"iterations": 5, "episodes": 4, "steps": 50}
    assert ledger.rows_lost(run, summary) == 1
    assert ledger.learned_twice(run, summary, taken=45) == 20 + 3 + 5
    assert ledger.contradictions(run) == []


def test_the_ledger_is_content_with_a_run_that_was_resumed(tmp_path: Path) -> None:
    rows = [{"iteration": number, "steps": 10 * number} for number in (1, 2, 3, 2, 3)]
    run = write_run(tmp_path / "run", rows, [episode(1, 71), episode(2, 72), episode(2, 72), episode(3, 73)])
    summary = {"iterations": 3, "episodes": 3, "steps": 30}
    assert ledger.rows_lost(run, summary) == 0
    assert ledger.learned_twice(run, summary, taken=50) == 0


def test_contradictions(tmp_path: Path) -> None:
    rows = [{"iteration": 1, "steps": 20}, {"iteration": 2, "steps": 10}]
    episodes = [episode(1, 71) | {"return": float("nan")}, episode(2, 72) | {"info": {}}]
    run = write_run(tmp_path / "run", rows, episodes)
    assert len(ledger.contradictions(run)) == 3


def test_leftovers_are_found(tmp_path: Path) -> None:
    training = Training(RECIPES[0], tmp_path / "case", 0)
    training.path.mkdir()
    assert ledger.leftovers(training) == []
    (tmp_path / "case" / "t" / "ray" / "session_2026").mkdir(parents=True)
    (tmp_path / "case" / "t" / "forgotten").touch()
    (training.path / "checkpoints" / ".partial-12").mkdir(parents=True)
    left = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, env={MARK: f"{training.mark}1."})
    wait_for(lambda: marked(training.mark), "the process")
    found = ledger.leftovers(training)
    assert len(found) == 4
    assert any(f"process {left.pid}" in line for line in found)
    training.kill()
    assert left.wait(10) == -signal.SIGKILL


def test_processes_of_others_are_never_found(tmp_path: Path) -> None:
    training = Training(RECIPES[0], tmp_path / "case", 0)
    other = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, env={MARK: "fc-other-1."})
    try:
        wait_for(lambda: marked("fc-other-"), "the process")
        training.kill()
        assert other.poll() is None
        assert os.getpid() not in [process.pid for process in marked("")]
    finally:
        other.kill()
        other.wait(10)


def test_rows_are_read_as_they_appear(tmp_path: Path) -> None:
    training = Training(RECIPES[0], tmp_path / "case", 0)
    training.path.mkdir()
    file = training.path / "metrics.jsonl"
    training.follow()
    file.write_text('{"iteration": 1, "steps": 5, "return_mean": 3.0}\n{"iterat')
    training.follow()
    assert [timed.row["iteration"] for timed in training.rows] == [1]
    with open(file, "a") as opened:
        opened.write('ion": 2, "steps": 9, "return_mean": 4.0}\n')
    moment = time.monotonic()
    training.follow()
    assert training.rows_since(moment) == 1
    assert training.score() == 4.0


def test_every_bar_can_be_missed() -> None:
    good = Result("ppo", [Outcome("ppo", "kill_driver", beyond=1, lost=1.0, pause=9.0)], score=TARGET)
    bars = report.bars([good], 1)
    assert all(met for _, met in bars)
    outcomes = [
        Outcome("ppo", "kill_sampler", lost=4.0, pause=4.0),
        Outcome("ppo", "kill_gcs", lost=1.0, pause=21.0),
        Outcome("ppo", "kill_driver", beyond=2),
        Outcome("ppo", "hang", reason="it hung"),
    ]
    bad = Result("ppo", outcomes, reason="it hung", rows_lost=1, twice=1, leftovers=["process 7"])
    missed = report.bars([bad], 4)
    assert len(missed) == 9
    assert not any(met for _, met in missed)
    assert "ppo: hang: it hung" in report.text([bad], 4, 0, 60.0)


def test_faults_that_never_happened_are_missed() -> None:
    assert dict(report.bars([Result("ppo", score=TARGET)], 3))["0 of 3 faults survived"] is False
