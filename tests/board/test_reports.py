"""Searches, reports on scaling, and runs that end badly, in the browser."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fever import layout
from fever.scaling import report
from tests.board.conftest import HOSTILE, SECONDS, OpenPage, ServeRuns, serving
from tests.experiments.made import make_run, write_rows
from tests.helpers import wait_for
from tests.scaling.synthetic import figures, waits_for_learner

SHARES = {"environment": 0.9, "inference": 0.05, "transfer": 0.03, "learner": 0.02}
REPORT = {
    "env": "CartPole-v1", "algo": "ppo", "kind": "workers", "target": 475.0, "answer": "yes: 4 workers are faster",
    "bottleneck": "at 4 workers it is the environment", "notes": [f"a note {HOSTILE}"], "failed": [],
    "model": {"held_out_error": -0.061},
    "counts": [
        {"count": count, "samples_per_second": 170.0 * count, "updates_per_second": 26.0, "speedup": float(count),
         "speedup_interval": [count - 0.5, count + 0.5], "verdict": "faster", "efficiency": 0.96, "error": 0.017,
         "target_seconds": 200.0, "time": SHARES}
        for count in (1, 4)
    ],
    "predicted": [{"count": 64, "samples_per_second": 5000.0, "speedup": 29.8, "efficiency": 0.47}],
}  # fmt: skip


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a page with a search, a report, a failed run with workers, and a metric with a comma."""
    folder = tmp_path_factory.mktemp("reports")
    for name in ("workers-4-round-1", "workers-1-round-1"):
        make_run(folder / "scale", name, [1.0])
    (folder / "scale" / "report.json").write_text(json.dumps(REPORT))
    search = make_run(folder, "search", [], reason="trials")
    trials = []
    for number, score in ((1, 2.0), (2, 8.0)):
        make_run(search.path / layout.TRIALS, f"{number:04d}", [10.0 - score])
        settings = {"learning_rate": 0.0066913 * number, "hidden": [64, 64]}
        trials.append({"number": number, "settings": settings, "state": "finished", "score": score})
    write_rows(search.path / layout.TRIALS_TABLE, trials)
    failed = make_run(folder, "failed", [1.0, 2.0])
    (failed.path / layout.SUMMARY).write_text(json.dumps({"stop_reason": "failed", "error": f"stuck {HOSTILE}"}))
    workers = [{"worker": 0, "host": "h", "steps": 5, "heard": 1.0, "time_env": 0.5, "time_inference": 0.1}]
    (failed.path / layout.WORKERS).write_text(json.dumps({"written": 3.5, "workers": workers}))
    rows = [{"iteration": k, "steps": 100 * k, "seconds": k, "info/x, y": k} for k in (1, 2, 3)]
    write_rows(make_run(folder, "comma", [1.0]).path / layout.METRICS, rows)
    with serving(folder) as address:
        yield address


def table(page: Any, name: str) -> list[list[str]]:
    """The cells of a table, once it is there."""
    rows = page.locator(f'[aria-label="{name}"] tr')
    rows.first.wait_for()
    return [row.locator("th, td").all_inner_texts() for row in rows.all()]


def test_a_report_says_what_was_measured_and_predicted(reports: str, open_page: OpenPage) -> None:
    page = open_page(f"{reports}#/run/scale")
    heads, one, four, predicted = table(page, "Speed")
    assert heads == ["Workers", "Samples/s", "Updates/s", "Time to 475", "Speedup", "Efficiency", "Model is off by"]
    assert one[:4] == ["1", "170", "26", "3 m 20 s"]
    assert four[4:] == ["4 (3.5 to 4.5), faster", "96 %", "1.7 %"]
    assert predicted == ["64", "5k", "\u2013", "\u2013", "29.8", "47 %", "predicted"]
    assert table(page, "Where the time went")[2] == ["4", "90 %", "5 %", "3 %", "2 %"]
    page.get_by_text("at most 1.7 % off for what was run; fitted without 4, it is 6.1 % off for 4.").wait_for()
    page.get_by_text(HOSTILE).wait_for()
    assert [row[0] for row in table(page, "Its runs")[1:]] == ["workers-1-round-1", "workers-4-round-1"]


def test_a_report_says_how_far_its_predictions_can_be_trusted(
    tmp_path: Path, serve_runs: ServeRuns, open_page: OpenPage
) -> None:
    found = figures({count: waits_for_learner(count) for count in (0, 1, 2)})
    (tmp_path / "scale").mkdir()
    report.write(found, [64], tmp_path / "scale", True, None)
    page = open_page(f"{serve_runs(tmp_path)}#/run/scale")
    page.get_by_text("two numbers of workers always fit: a third one shows how good predictions are").wait_for()


def test_a_search_shows_what_its_trials_tried_the_best_score_first(reports: str, open_page: OpenPage) -> None:
    page = open_page(f"{reports}#/run/search")
    heads, best, _ = table(page, "Its runs")
    assert heads[2:] == ["Score", "Return", "Steps", "Seed", "learning_rate", "hidden"]
    assert [best[0], *best[2:]] == ["0002", "8", "2", "100", "0", "0.0134", "[64, 64]"]
    assert not page.get_by_text("fever resume").count()  # its trials are done


def test_a_failed_run_says_why_and_when_its_workers_were_heard(reports: str, open_page: OpenPage) -> None:
    page = open_page(f"{reports}#/run/failed?tab=workers")
    page.locator(".reason.grave", has_text=f"stuck {HOSTILE}").wait_for()
    page.get_by_text("2.5 s before its end").wait_for()
    assert page.evaluate("[...document.querySelectorAll('.tile')].every(one => one.scrollWidth <= one.clientWidth)")
    page.get_by_text("fever resume").wait_for()


def test_a_metric_with_a_comma_is_drawn(reports: str, open_page: OpenPage) -> None:
    page = open_page(f"{reports}#/run/comma")
    page.get_by_role("combobox", name="Draw another metric").select_option("info/x, y")
    chart = page.locator('section.chart[aria-label="info/x, y"]')
    wait_for(lambda: chart.locator(".legend-value").inner_text() == "3", "its last value", SECONDS)


def test_reports_fit_a_phone_and_the_chosen_tab_is_seen(reports: str, open_page: OpenPage) -> None:
    page = open_page(f"{reports}#/run/scale", width=360, height=740, has_touch=True)
    for name in ("scale", "search"):
        page.goto(f"{reports}#/run/{name}")
        table(page, "Its runs")
        assert page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth") <= 0, name
    page.goto(f"{reports}#/run/failed?tab=log")
    tab = page.locator('.tabs [aria-current="page"]', has_text="Log")
    tab.wait_for()
    room = page.locator(".tabs").bounding_box()

    def is_seen() -> bool:
        box = tab.bounding_box()
        return bool(room["x"] <= box["x"] and box["x"] + box["width"] <= room["x"] + room["width"])

    wait_for(is_seen, "the chosen tab", SECONDS)


def test_there_is_no_serious_barrier_in_reports(reports: str, open_page: OpenPage) -> None:
    axe = pytest.importorskip("axe_playwright_python.sync_playwright").Axe()
    page = open_page(f"{reports}#/run/scale", bypass_csp=True)
    for name in ("scale", "search", "failed?tab=workers"):
        page.goto(f"{reports}#/run/{name}")
        page.locator('[aria-label="Its runs"] tr, .tile').first.wait_for()
        found = [one for one in axe.run(page).response["violations"] if one["impact"] in ("serious", "critical")]
        assert not found, (name, [(one["id"], one["nodes"][0]["html"]) for one in found])


def test_a_run_that_is_removed_while_it_is_open_is_said_to_be_gone(
    tmp_path: Path, serve_runs: ServeRuns, open_page: OpenPage
) -> None:
    run = make_run(tmp_path, "doomed", [1.0, 2.0])
    make_run(tmp_path, "other", [1.0])
    page = open_page(f"{serve_runs(tmp_path)}#/run/doomed", refused=True)
    page.locator(".chart canvas").first.wait_for()
    shutil.rmtree(run.path)
    page.get_by_text("This run is no longer in the folder").wait_for()
    assert page.locator(".chart canvas").first.is_visible()
