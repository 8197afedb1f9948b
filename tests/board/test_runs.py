"""The list of runs and what is shown of one: states, groups, damage, five hundred runs."""

from __future__ import annotations

import json
import os
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fever import layout
from fever.board.listing import Listing
from fever.job import RECORD, STARTED
from fever.runs.lock import RunLock
from fever.runs.run import Run
from tests.board.conftest import Client
from tests.experiments.made import make_experiment, make_run, write_rows

Serve = Callable[..., Client]


def rows_of(folder: Path) -> dict[str, dict[str, Any]]:
    listing = Listing(folder)
    listing.scan()
    return {row["id"]: row for row in listing.rows()}


def test_states(tmp_path: Path) -> None:
    for name in ("solved", "failed", "killed", "running", "queued", "starting"):
        make_run(tmp_path, name, [1.0, 2.0], reason={"solved": "reward"}.get(name, name))
    for name in ("killed", "running", "queued", "starting"):
        (tmp_path / name / layout.SUMMARY).unlink()
    for name in ("queued", "starting"):
        (tmp_path / name / layout.JOB).mkdir()
        (tmp_path / name / layout.JOB / RECORD).write_text("{}")
        (tmp_path / name / layout.METRICS).unlink()
    (tmp_path / "starting" / layout.JOB / STARTED).write_text("{}")
    (make_run(tmp_path, "broke", [1.0]).path / layout.SUMMARY).write_text(
        json.dumps({"stop_reason": "failed", "error": "the valve is stuck"})
    )
    lock = RunLock(tmp_path / "running")
    try:
        states = {name: (row["state"], row["reason"]) for name, row in rows_of(tmp_path).items()}
    finally:
        lock.release()
    assert states == {
        "solved": ("done", "goal reached"),
        "failed": ("failed", "failed"),
        "broke": ("failed", "the valve is stuck"),
        "killed": ("killed", "it ended without a summary"),
        "running": ("running", None),
        "queued": ("queued", "its job has not begun"),
        "starting": ("running", "its machines are starting"),
    }


def test_a_run_that_is_killed_is_noticed_although_no_file_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fever.board.listing.AGAIN_SECONDS", 0.0)
    make_run(tmp_path, "a", [1.0])
    (tmp_path / "a" / layout.SUMMARY).unlink()
    lock = RunLock(tmp_path / "a")
    listing = Listing(tmp_path)
    listing.scan()
    assert listing.rows()[0]["state"] == "running"
    lock.release()
    listing.scan()
    assert listing.rows()[0]["state"] == "killed"


def test_a_run_that_could_not_be_read_for_a_moment_is_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fever.board.listing.AGAIN_SECONDS", 0.0)
    make_run(tmp_path, "a", [1.0])
    listing = Listing(tmp_path)
    with monkeypatch.context() as failing:
        failing.setattr(Run, "last_row", lambda run: os.stat(tmp_path / "not mounted"))
        listing.scan()
    assert listing.rows()[0]["state"] == "damaged"
    listing.scan()
    assert listing.rows()[0]["state"] == "done"


def test_a_row_has_the_last_figures_and_the_experiment(tmp_path: Path) -> None:
    make_experiment(tmp_path, "ppo", [[1.0, 5.0], [2.0, 6.0]])
    make_run(tmp_path, "other", [1.0], algo="dqn")
    rows = rows_of(tmp_path)
    assert {rows[f"ppo-seed-{seed}"]["experiment_name"] for seed in (0, 1)} == {"ppo"}
    assert rows["ppo-seed-0"]["experiment"] == rows["ppo-seed-1"]["experiment"] != rows["other"]["experiment"]
    row = rows["ppo-seed-1"]
    assert (row["return"], row["steps"], row["iteration"], row["seed"]) == (6.0, 200, 2, 1)


def test_when_a_run_began_does_not_depend_on_the_clock_of_its_place(tmp_path: Path) -> None:
    for name, moment in {"here": "2026-01-02T12:00:00+0000", "there": "2026-01-02T20:30:00+0900"}.items():
        (make_run(tmp_path, name, [1.0]).path / layout.FACTS).write_text(json.dumps({"time": moment}))
    rows = rows_of(tmp_path)
    assert rows["here"]["began"] - rows["there"]["began"] == 1800


def test_only_what_has_changed_is_read_again(tmp_path: Path) -> None:
    runs = make_experiment(tmp_path, "ppo", [[1.0], [2.0], [3.0]])
    listing = Listing(tmp_path)
    assert len(listing.scan()[0]) == 3
    assert listing.scan() == ([], [])
    with (runs[1].path / layout.METRICS).open("a") as file:
        file.write(json.dumps({"iteration": 2, "steps": 200, "return_mean": 9.0}) + "\n")
    ((changed,), gone) = listing.scan()
    assert (changed["id"], changed["return"], gone) == ("ppo-seed-1", 9.0, [])
    runs[2].path.rename(tmp_path / ".hidden")
    assert listing.scan() == ([], ["ppo-seed-2"])


def test_no_run_is_known_before_its_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_run(tmp_path, "a", [1.0])
    listing, seen = Listing(tmp_path), []
    whole = listing._row
    monkeypatch.setattr(listing, "_row", lambda *given: (seen.append(listing.rows()), whole(*given))[1])  # meanwhile
    assert len(listing.scan()[0]) == 1
    assert seen == [[]]


def test_trials_of_a_search_and_runs_of_a_report_belong_to_it(tmp_path: Path) -> None:
    make_run(tmp_path, "search", [1.0])
    make_run(tmp_path / "search" / layout.TRIALS, "0001", [1.0])
    make_run(tmp_path / "scale", "workers-2", [1.0])
    (tmp_path / "scale" / "report.json").write_text(json.dumps({"env": "E", "algo": "ppo", "answer": "yes: 1.8x"}))
    rows = rows_of(tmp_path)
    assert {name: (row["kind"], row["parent"]) for name, row in rows.items()} == {
        "search": ("search", None),
        "search/trials/0001": ("trial", "search"),
        "scale": ("scaling", None),
        "scale/workers-2": ("trial", "scale"),
    }
    assert rows["scale"]["reason"] == "yes: 1.8x"


def damage(path: Path, kind: int) -> None:
    """Spoil a run directory in one of ten ways."""
    name = (layout.CONFIG, layout.METRICS, layout.SUMMARY, layout.EPISODES, layout.FACTS)[kind % 5]
    (path / name).unlink(missing_ok=True)
    if kind < 5:
        (path / name).write_bytes(b'{"steps": NaN, "return_mean": 1e999, "iteration": [')
    else:
        os.mkfifo(path / name)


@pytest.mark.parametrize("kind", range(10))
def test_a_damaged_run_hides_no_other_and_is_answered_with_a_sentence(serve: Serve, tmp_path: Path, kind: int) -> None:
    make_run(tmp_path, "whole", [1.0])
    damage(make_run(tmp_path, "spoilt", [1.0]).path, kind)
    client = serve(tmp_path)
    rows = {row["id"]: row for row in client.get("/api/runs")["runs"]}
    assert rows["whole"]["state"] == "done"
    assert "spoilt" in rows
    for path in ("run", "series", "episodes", "log", "workers"):
        status, _, content = client.ask(f"/api/{path}?id=spoilt&names=return_mean")
        assert status in (200, 404), content
        assert status == 200 or "\n" not in content["error"]


def test_a_link_that_leads_nowhere_hides_no_run(tmp_path: Path) -> None:
    make_run(tmp_path, "whole", [1.0])
    (tmp_path / "itself").symlink_to("itself")
    (tmp_path / "nowhere").symlink_to("nothing")
    assert list(rows_of(tmp_path)) == ["whole"]


def test_numbers_that_json_has_not_and_hostile_texts(serve: Serve, tmp_path: Path) -> None:
    run = make_run(tmp_path, "a", [1.0])
    rows = [
        {"iteration": 1, "steps": 1, "return_mean": float("nan"), "<b>x</b>": 1.0, "odd": 10**400},
        {"iteration": 2, "steps": 2, "return_mean": float("inf"), "odd": "text", "list": [1, 2]},
    ]
    write_rows(run.path / layout.METRICS, rows)
    (run.path / layout.LOG).write_text("\x1b[31mred\u202e<script>alert(1)</script>\n")
    client = serve(tmp_path)
    found = client.get("/api/series?id=a&names=return_mean,odd,list")
    assert found["y"] == {"return_mean": [None, None], "odd": [None, None], "list": [None, None]}
    assert client.get("/api/log?id=a")["text"] == "red<script>alert(1)</script>\n"


def test_names_may_have_commas_and_percent_signs(serve: Serve, tmp_path: Path) -> None:
    run = make_run(tmp_path, "a,b", [1.0])
    write_rows(run.path / layout.METRICS, [{"iteration": 1, "steps": 1, "x,y": 3.0, "50%25": 4.0}])
    found = serve(tmp_path).get("/api/series?id=a,b&names=x%252Cy,50%252525")  # each encoded, joined, encoded
    assert found["y"] == {"x,y": [3.0], "50%25": [4.0]}


def test_a_search_says_what_its_trials_tried(serve: Serve, tmp_path: Path) -> None:
    search = make_run(tmp_path, "search", [])
    for name in ("0001", "0002-seed-1"):
        make_run(search.path / layout.TRIALS, name, [1.0])
    row = {"number": 1, "settings": {"learning_rate": 0.1}, "state": "finished", "score": 7.5}
    other = {"number": 2, "settings": {"hidden": [32]}, "state": "failed", "score": None, "error": "no"}
    broken = {"number": 3, "settings": [], "score": 1.0}
    write_rows(search.path / layout.TRIALS_TABLE, [row, other, broken, {"odd": 1}])
    assert serve(tmp_path).get("/api/run?id=search")["searched"] == {
        "names": ["learning_rate", "hidden"],
        "trials": {"1": {"score": 7.5, "values": [0.1, "null"]}, "2": {"score": None, "values": ["null", "[32]"]}},
    }


def test_details_of_a_run_that_was_trained(serve: Serve, trained: dict[str, Any]) -> None:
    client = serve(Path(trained["folder"]) / "runs")
    found = client.get("/api/run?id=first")
    assert found["row"]["state"] == "done"
    assert found["row"]["reason"] == "goal reached"
    assert {"return_mean", "time_env", "steps_per_second"} <= set(found["metrics"])
    assert found["units"]["steps_per_second"]["unit"] == "1/s"
    config = {row["name"]: row for row in found["config"]}
    assert (config["learning_rate"]["group"], config["learning_rate"]["changed"]) == ("settings", False)
    assert config["learning_rate"]["meaning"]
    assert (config["reward"]["value"], config["reward"]["changed"]) == ("475.0", True)
    assert any(one["last"] for one in found["checkpoints"])
    assert dict(found["facts"])["command"].startswith("fever train CartPole-v1")
    workers = client.get("/api/workers?id=first")
    (worker,) = workers["workers"]
    assert (worker["state"], worker["steps"]) == ("ended", found["row"]["steps"])
    series = client.get("/api/series?id=first&names=return_mean&points=10000")
    assert series["exact"]
    assert series["x"]["iteration"][-1] == found["row"]["iteration"]
    episodes = client.get("/api/episodes?id=first&points=10000")
    assert len(episodes["steps"]) == found["row"]["episodes"]


def test_a_checkpoint_that_is_removed_meanwhile_is_left_out(
    serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(tmp_path, "a", [1.0])
    for iteration in (1, 2):
        run.save_checkpoint({"x": np.zeros(1)}, {"iteration": iteration, "score": None}, keep=3)
    read = Run.checkpoints

    def read_and_lose_one(run: Run) -> Any:
        found = read(run)
        shutil.rmtree(found[0].path)
        return found

    monkeypatch.setattr(Run, "checkpoints", read_and_lose_one)
    assert [one["iteration"] for one in serve(tmp_path).get("/api/run?id=a")["checkpoints"]] == [2]


def test_a_mean_over_seeds_has_a_band(serve: Serve, tmp_path: Path) -> None:
    make_experiment(tmp_path, "ppo", [[1.0, 2.0, 3.0], [3.0, 4.0, 5.0]])
    client = serve(tmp_path)
    found = client.get("/api/group?ids=ppo-seed-0,ppo-seed-1&metric=return_mean&x=steps")
    assert (found["mean"][0], found["mean"][-1], found["runs"]) == (2.0, 4.0, 2)
    assert (found["low"][0], found["high"][0]) == (1.0, 3.0)
    make_run(tmp_path, "again", [100.0, 200.0, 300.0], seed=1)  # the same seed, once more
    make_run(tmp_path, "longer", [1.0, 2.0, 3.0, 4.0], seed=0)
    ids = "ppo-seed-0,ppo-seed-1,again,longer"
    repeated = client.get(f"/api/group?ids={ids}&metric=return_mean&x=steps")
    assert repeated["runs"] == 2
    alone = client.get("/api/group?ids=ppo-seed-0&metric=return_mean&x=seconds")
    assert alone["low"] is None


def test_episodes_in_the_archive_are_found_when_zoomed(serve: Serve, tmp_path: Path) -> None:
    import gzip

    run = make_run(tmp_path, "a", [1.0])
    rows = [{"episode": k, "steps": k * 10, "return": k, "length": 1, "info": {"s": k}} for k in range(1, 101)]
    with gzip.open(run.path / layout.OLD_EPISODES, "wt") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows[:60])
    write_rows(run.path / layout.EPISODES, rows[50:])
    client = serve(tmp_path)
    whole = client.get("/api/episodes?id=a&info=s")
    assert whole["episode"] == list(range(1, 101))
    assert whole["info"]["s"] == list(range(1, 101))
    assert client.get("/api/episodes?id=a&from=550&to=640")["episode"] == list(range(55, 65))


def test_five_hundred_runs_are_listed_soon(tmp_path: Path) -> None:
    source = make_run(tmp_path, "run-0", [1.0] * 100).path
    for k in range(1, 500):
        (tmp_path / f"run-{k}").mkdir()
        for name in (layout.CONFIG, layout.METRICS, layout.SUMMARY):
            (tmp_path / f"run-{k}" / name).write_bytes((source / name).read_bytes())
    listing = Listing(tmp_path)
    began = time.process_time()
    assert len(listing.scan()[0]) == 500
    assert time.process_time() - began < 3  # 0.4 s on an idle machine
    began = time.process_time()
    assert listing.scan() == ([], [])
    assert time.process_time() - began < 0.5


def test_runs_that_come_and_go_disturb_no_answer(serve: Serve, tmp_path: Path) -> None:
    """Requests are answered in several threads."""
    make_run(tmp_path, "stays", [1.0])
    client, ended = serve(tmp_path), threading.Event()

    def change() -> None:
        for k in range(1000):
            make_run(tmp_path, f"new-{k}", [1.0])
            if k > 5:
                (tmp_path / f"new-{k - 5}").rename(tmp_path / f".gone-{k}")
            if ended.is_set():
                return

    thread = threading.Thread(target=change)
    thread.start()
    try:
        for _ in range(30):
            assert any(row["id"] == "stays" for row in client.get("/api/runs")["runs"])
            assert client.get("/api/run?id=stays")["row"]["id"] == "stays"
    finally:
        ended.set()
        thread.join()
