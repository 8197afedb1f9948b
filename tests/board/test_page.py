"""The page in a browser, with the real server: what is drawn, found and compared, by mouse, by keyboard, and live."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fever import layout
from fever.board.guard import token_path
from tests.board.conftest import HOSTILE, LONG, ODD, ROWS, SECONDS, Client, OpenPage, ServeRuns, serving
from tests.experiments.made import make_run
from tests.helpers import ROOT, wait_for

# Names of the rows in which anything is written from now on. Times relative to now go on, and small curves are drawn.
WRITTEN = """() => {
  window.written = new Set();
  new MutationObserver((changes) => {
    for (const { target } of changes) {
      const place = target.nodeType === 1 ? target : target.parentElement;
      const name = place.closest("tr")?.querySelector(".name-link").textContent;
      if (!place.closest("time, .spark")) window.written.add(name);
    }
  }).observe(document.querySelector("tbody"), {subtree: true, childList: true, characterData: true, attributes: true});
}"""


def until(page: Any, expression: str) -> None:
    """Wait until a JavaScript expression is true. (Playwright's own wait needs eval, which the page forbids.)"""
    wait_for(lambda: page.evaluate(expression), expression, SECONDS)


def drawn(page: Any, title: str) -> dict[str, float]:
    """How many points a chart has, and where they begin and end, once it has any."""
    area = page.locator(f'section.chart[aria-label="{title}"] .chart-area')
    area.wait_for()
    wait_for(lambda: area.evaluate("area => Number(area.dataset.points) > 0"), f"points of {title}", SECONDS)
    return {name: float(value) for name, value in area.evaluate("area => ({...area.dataset})").items()}


def rows_of(page: Any, count: int) -> list[str]:
    """Names in the list, once there are so many."""
    until(page, f"document.querySelectorAll('tr.row').length === {count}")
    return page.locator("tr.row :is(.name-link, .name-button)").all_inner_texts()


def test_runs_are_listed_grouped_found_filtered_and_sorted(url: str, open_page: OpenPage) -> None:
    page = open_page(url)
    assert {"group", "long", "other", "broken"} <= set(rows_of(page, 6))
    group = page.locator("tr.group")
    assert group.locator(".c-seed").inner_text() == "3 seeds"
    assert group.locator(".c-return").inner_text() == "50"  # mean of 49, 50 and 51
    assert page.locator("tr.row", has_text="broken").locator(".badge").inner_text() == "damaged"
    group.get_by_role("button", name="group").click()
    assert "group-seed-2" in rows_of(page, 9)
    assert drawn(page, "Mean over the seeds")["last"] == 5000
    page.get_by_role("searchbox").fill("acrobot")
    assert rows_of(page, 1) == ["other"]
    assert "q=acrobot" in page.url
    page.get_by_role("searchbox").fill("")
    page.get_by_role("button", name="failed").click()
    assert rows_of(page, 1) == ["other"]
    page.go_back()
    rows_of(page, 9)
    page.get_by_role("columnheader", name="Return").get_by_role("button").click()
    until(page, "location.hash.includes('sort=-return')")
    assert rows_of(page, 9)[0] == "long"


def test_only_rows_that_changed_are_written_again(tmp_path: Path, serve_runs: ServeRuns, open_page: OpenPage) -> None:
    runs = [make_run(tmp_path, f"run-{k}", [1.0, 2.0], seed=k, envs=k + 1) for k in range(100)]
    address = serve_runs(tmp_path)
    page = open_page(address)
    rows_of(page, 100)
    page.evaluate(WRITTEN)
    with (runs[7].path / layout.METRICS).open("a") as file:
        file.write(json.dumps({"iteration": 3, "steps": 300, "return_mean": 77.5}) + "\n")
    until(page, "document.querySelector('tbody').textContent.includes('77.5')")
    assert page.evaluate("[...window.written]") == ["run-7"]


def test_a_run_is_shown_with_all_its_parts(url: str, open_page: OpenPage) -> None:
    page = open_page(f"{url}#/run/long")
    overview = drawn(page, "Learning curve")
    assert (overview["first"], overview["last"]) == (100, 100 * ROWS)
    assert overview["points"] < 3000
    assert "goal 400" in page.locator('[data-figure="Return"]').inner_text()
    label = page.locator('section.chart[aria-label="Learning curve"] .chart-area').get_attribute("aria-label")
    assert "Learning curve" in label
    page.get_by_role("link", name="Configuration").click()
    page.get_by_label("only what differs").check()
    until(page, "[...document.querySelectorAll('.setting')].every(one => one.matches('.changed'))")
    page.get_by_role("link", name="Checkpoints").click()
    page.get_by_text("There is no checkpoint yet").wait_for()
    assert "tab=checkpoints" in page.url


# How many pixels right of the plot's edge, and beside it, have a colour.
BESIDE = """chart => {
  const [canvas, over] = [chart.querySelector("canvas"), chart.querySelector(".u-over")];
  const [x, y, height] = [over.offsetLeft + over.offsetWidth, over.offsetTop, over.offsetHeight];
  const places = [x + 1, y, 2, height].map((place) => place * devicePixelRatio);
  const { data } = canvas.getContext("2d").getImageData(...places);
  return data.filter((value, index) => index % 4 === 3 && value).length;
}"""


def test_the_last_evaluation_is_not_cut(tmp_path: Path, serve_runs: ServeRuns, open_page: OpenPage) -> None:
    make_run(tmp_path, "a", [1.0, 2.0, 3.0], evaluations=[1.0, 2.0, 3.0])
    page = open_page(f"{serve_runs(tmp_path)}#/run/a")
    chart = page.locator('section.chart[aria-label="Learning curve"]')
    wait_for(lambda: drawn(page, "Learning curve")["last"] == 300, "the curve", SECONDS)
    wait_for(lambda: chart.evaluate(BESIDE) > 4, "the whole point", SECONDS)


def test_a_damaged_or_missing_run_is_one_sentence(url: str, open_page: OpenPage) -> None:
    page = open_page(f"{url}#/run/broken", refused=True)
    page.locator(".reason", has_text="config.yaml is not YAML").wait_for()
    page.goto(f"{url}#/run/nothing")
    page.get_by_text("there is no such run here").wait_for()


def test_dragging_zooms_to_the_exact_rows_and_the_address_keeps_it(url: str, open_page: OpenPage) -> None:
    page = open_page(f"{url}#/run/long")
    everything = drawn(page, "Learning curve")
    box = page.locator(".u-over").first.bounding_box()
    page.mouse.move(box["x"] + 300, box["y"] + 80)
    page.mouse.down()
    page.mouse.move(box["x"] + 380, box["y"] + 90, steps=4)
    page.mouse.up()
    until(page, "location.hash.includes('from=')")
    page.get_by_text("every row of this part").wait_for()
    low, high = (float(re.search(rf"{name}=([\d.]+)", page.url)[1]) for name in ("from", "to"))
    exact = sum(low <= 100 * k <= high for k in range(1, ROWS + 1))

    def is_exact(page: Any) -> bool:
        return drawn(page, "Learning curve")["points"] == exact

    wait_for(lambda: is_exact(page), "exact rows", SECONDS)
    again = open_page(page.url)
    wait_for(lambda: is_exact(again), "the same view", SECONDS)
    again.goto(f"{url}#/run/long?from=100&to={100 * (ROWS - 1)}")
    again.get_by_text("rows, evenly spread: zoom in for all of them").wait_for()
    page.mouse.dblclick(box["x"] + 200, box["y"] + 80)
    wait_for(lambda: drawn(page, "Learning curve") == everything, "all of it", SECONDS)
    page.go_back()
    wait_for(lambda: is_exact(page), "the zoom", SECONDS)


def test_runs_are_compared_over_each_other(url: str, open_page: OpenPage) -> None:
    page = open_page(url)
    rows_of(page, 6)
    for name in ("group", "long"):
        page.get_by_role("checkbox", name=f"Choose {name} ").check()
    page.get_by_role("link", name="Compare").click()
    page.get_by_text("group (3 seeds)").wait_for()
    assert drawn(page, "return_mean")["last"] == 100 * ROWS
    assert page.locator(".legend-entry").count() == 2
    page.get_by_label("mean over seeds").uncheck()
    until(page, "document.querySelectorAll('.legend-entry').length === 4")
    assert "gamma" in page.locator(".compare-runs thead").inner_text()
    page.get_by_role("slider").fill("0.9")
    until(page, "location.hash.includes('smooth=0.9')")
    entry = page.get_by_role("button", name="group-seed-1").first
    entry.click()
    assert entry.get_attribute("aria-pressed") == "false"
    page.get_by_role("combobox", name="Metric").select_option("iteration")
    drawn(page, "iteration")
    page.get_by_role("button", name="Remove long").click()
    until(page, "document.querySelectorAll('.legend-entry').length === 3")


def test_a_stop_rule_hides_no_setting_of_its_name(tmp_path: Path, serve_runs: ServeRuns, open_page: OpenPage) -> None:
    for name, steps in {"a": 128, "b": 32}.items():
        make_run(tmp_path, name, [1.0, 2.0], stop={"steps": 200}, settings={"steps": steps})
    page = open_page(f"{serve_runs(tmp_path)}#/compare?runs=a,b")
    page.locator(".compare-runs tbody tr").nth(1).wait_for()
    cells = [row.locator("th, td").all_inner_texts() for row in page.locator(".compare-runs tr").all()]
    assert [row[6:] for row in cells] == [["steps"], ["128"], ["32"]]


def test_a_mean_that_is_only_a_point_is_explained(tmp_path: Path, serve_runs: ServeRuns, open_page: OpenPage) -> None:
    for seed, every in enumerate((100, 1000)):  # the first ends before the other begins
        make_run(tmp_path, f"a-seed-{seed}", [1.0, 2.0, 3.0], seed=seed, every=every)
    page = open_page(f"{serve_runs(tmp_path)}#/compare?band=1&runs=a-seed-0,a-seed-1")
    page.get_by_text("one ends before all have begun on this axis").wait_for()
    page.get_by_role("button", name="Episodes").click()
    page.get_by_text("one ends before all have begun on this axis").wait_for(state="hidden")


def test_everything_is_reached_by_keyboard(url: str, open_page: OpenPage) -> None:
    page = open_page(url)
    rows_of(page, 6)
    focused = "document.activeElement"
    page.keyboard.press("Tab")
    assert page.evaluate(f"{focused}.id") == "skip"
    page.keyboard.press("Enter")
    assert page.evaluate(f"{focused}.id") == "main"
    page.keyboard.press("/")
    page.keyboard.type("limit")
    rows_of(page, 4)  # the reason of those that ended
    page.keyboard.press("Tab")
    assert page.evaluate(f"{focused}.matches('.filter')")
    page.keyboard.press("j")
    page.keyboard.press("Space")
    page.keyboard.press("j")
    page.keyboard.press("Space")
    page.get_by_text(re.compile(r"\d runs chosen")).wait_for()
    page.keyboard.press("c")
    page.get_by_role("heading", name="Comparison").wait_for()
    page.keyboard.press("Escape")
    page.locator("table.runs").wait_for()
    assert "q=limit" in page.url
    page.keyboard.press("/")
    page.keyboard.press("ControlOrMeta+a")
    page.keyboard.type("long")
    rows_of(page, 1)
    page.keyboard.press("Tab")
    page.keyboard.press("j")
    page.keyboard.press("Enter")
    until(page, "location.hash.startsWith('#/run/long')")
    drawn(page, "Learning curve")
    page.locator(".chart-area").first.focus()
    page.keyboard.press("ArrowRight")
    until(page, "document.querySelector('.legend-where').textContent === 'at 100 steps'")
    page.keyboard.press("+")
    until(page, "location.hash.includes('from=')")
    page.get_by_role("button", name="Reset zoom").first.wait_for()  # else Escape leaves the run
    page.keyboard.press("Escape")
    until(page, "!location.hash.includes('from=')")
    page.keyboard.press("]")
    until(page, "location.hash.includes('tab=workers')")
    page.keyboard.press("?")
    assert page.get_by_role("dialog").is_visible()
    page.keyboard.press("Escape")
    page.keyboard.press("Escape")
    page.locator("table.runs").wait_for()


def test_what_runs_wrote_is_shown_as_text(url: str, runs: Path, open_page: OpenPage) -> None:
    page = open_page(url)
    rows_of(page, 6)
    page.get_by_role("link", name=HOSTILE).click()
    page.get_by_role("heading", level=1).get_by_text(f"{HOSTILE} ab").wait_for()  # the direction is not turned
    page.get_by_role("combobox", name="Draw another metric").select_option(HOSTILE)
    drawn(page, "Learning curve")
    page.locator("section.chart h2", has_text=HOSTILE).wait_for()
    page.get_by_role("link", name="Episodes").click()
    page.locator("section.chart h2", has_text="info/__proto__").wait_for()
    page.locator("section.chart h2", has_text=f"info/{HOSTILE}").wait_for()
    page.get_by_role("link", name="Log").click()
    page.get_by_text("<script>alert(2)</script>").wait_for()
    with (runs / f"{HOSTILE} {ODD}" / layout.LOG).open("a") as log:
        log.write(f"later {HOSTILE}\n")
    page.get_by_text(f"later {HOSTILE}").wait_for()
    page.get_by_role("link", name="Configuration").click()
    page.get_by_text(f"CartPole-v1{HOSTILE}", exact=True).first.wait_for()
    assert page.locator("img").count() == 0


NUMBERS = (
    ("number", 481.53, "481.5"), ("number", 0.0003, "0.0003"), ("number", 12345, "12.3k"), ("number", 1234567, "1.2M"),
    ("number", 999999, "1M"), ("number", -0.05, "-0.05"), ("number", 2.5e-7, "2.5e-7"), ("number", 0, "0"),
    ("number", None, "\u2013"), ("count", 950, "950"), ("count", 1500, "1.5k"), ("bytes", 4_200_000, "4.2 MB"),
    ("duration", 8.34, "8.3 s"), ("duration", 200, "3 m 20 s"), ("duration", 7800, "2 h 10 m"),
    ("duration", 360000, "4 d 4 h"), ("percent", 0.5, "50 %"),
)  # fmt: skip
VIEWS = ("#/runs", "#/run/long", "#/run/long?tab=config", "#/run/other?tab=log", "#/run/other?tab=episodes",
         "#/compare?runs=group-seed-0,group-seed-1,long&band=1")  # fmt: skip


def settled(page: Any) -> None:
    """Wait until a view shows what it has fetched."""
    until(page, "document.getElementById('connection').textContent === 'live'")
    page.locator("tr.row, .chart canvas, .setting, .log, .empty:visible").first.wait_for()


def test_a_phone_scrolls_in_one_direction_only(url: str, open_page: OpenPage) -> None:
    page = open_page(url, width=360, height=740, has_touch=True)
    for view in (*VIEWS, f"#/run/{LONG}"):
        page.goto("about:blank")
        page.goto(url + view)
        settled(page)
        wide = page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
        assert wide <= 0, view


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_there_is_no_serious_barrier(url: str, theme: str, open_page: OpenPage) -> None:
    axe = pytest.importorskip("axe_playwright_python.sync_playwright").Axe()
    page = open_page(url, color_scheme=theme, bypass_csp=True)
    for view in VIEWS:
        page.goto("about:blank")
        page.goto(url + view)
        settled(page)
        found = [one for one in axe.run(page).response["violations"] if one["impact"] in ("serious", "critical")]
        assert not found, (view, [(one["id"], one["nodes"][0]["html"]) for one in found])


def test_the_theme_is_kept(url: str, open_page: OpenPage) -> None:
    page = open_page(url, color_scheme="light")
    for _ in range(2):
        page.keyboard.press("t")
    assert page.evaluate("document.documentElement.dataset.theme") == "dark"
    page.reload()
    assert page.evaluate("document.documentElement.dataset.theme") == "dark"


def test_a_run_is_live_whatever_its_name(tmp_path: Path, serve_runs: ServeRuns, open_page: OpenPage) -> None:
    name = "lr=1,seed=0 50%25"
    run = make_run(tmp_path, name, [1.0, 2.0])
    page = open_page(serve_runs(tmp_path))
    page.get_by_role("link", name=name).click()
    drawn(page, "Learning curve")
    with (run.path / layout.METRICS).open("a") as file:
        file.write(json.dumps({"iteration": 3, "steps": 300, "return_mean": 3.0}) + "\n")
    wait_for(lambda: drawn(page, "Learning curve")["last"] == 300, "the new row", SECONDS)


def test_a_folder_whose_name_is_no_text_hides_no_run(
    tmp_path: Path, serve_runs: ServeRuns, open_page: OpenPage
) -> None:
    folder = tmp_path / "runs"
    make_run(folder, "whole", [1.0])
    odd = make_run(folder, os.fsdecode(b"\xdcbung"), [1.0, 2.0], algo="a2c")  # written by a system with Latin-1
    (odd.path / layout.VIDEOS).mkdir()
    (odd.path / layout.VIDEOS / os.fsdecode(b"\xdc.gif")).write_bytes(b"GIF89a")
    page = open_page(serve_runs(folder))
    assert "whole" in rows_of(page, 2)
    page.get_by_role("link", name="bung").click()
    assert drawn(page, "Learning curve")["last"] == 200


def test_an_empty_folder_says_how_to_begin(tmp_path: Path, open_page: OpenPage) -> None:
    with serving(tmp_path) as address:
        page = open_page(address, refused=True)
        page.get_by_text("fever train CartPole-v1").wait_for()
        make_run(tmp_path, "first", [1.0])
        assert rows_of(page, 1) == ["first"]
    page.get_by_text("connection lost").wait_for()


def test_a_page_for_other_machines_asks_for_the_token(
    tmp_path: Path, serve: Callable[..., Client], open_page: OpenPage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FEVER_HOME", str(tmp_path / "home"))
    monkeypatch.setattr("fever.board.guard.is_loopback", lambda host: False)
    make_run(tmp_path / "runs", "first", [1.0])
    page = open_page(f"http://127.0.0.1:{serve(tmp_path / 'runs').port}/", refused=True)
    page.fill("#token", "wrong")
    page.keyboard.press("Enter")
    page.get_by_text("this is not the token").wait_for()
    page.fill("#token", token_path().read_text().strip())
    page.keyboard.press("Enter")
    page.get_by_text("live", exact=True).wait_for()
    assert rows_of(page, 1) == ["first"]


def test_numbers_are_written_for_people(url: str, open_page: OpenPage) -> None:
    page = open_page(url)
    write = "async ([name, value]) => (await import('/static/core/format.js'))[name](value)"
    for name, value, text in NUMBERS:
        assert page.evaluate(write, [name, value]) == text


def test_smoothing_is_an_average_without_a_bias_to_zero(url: str, open_page: OpenPage) -> None:
    page = open_page(url)
    smooth = "async ([values, weight]) => (await import('/static/charts/smooth.js')).smooth(values, weight)"
    found = page.evaluate(smooth, [[10, None, 20, 30], 0.5])
    assert found == [10, None, pytest.approx(50 / 3), pytest.approx(25 - 5 / 7)]  # weights 1; 1, 2; 1, 2, 4
    assert page.evaluate(smooth, [[1, 2], 0]) == [1, 2]


def test_a_video_plays(tmp_path: Path, serve_runs: ServeRuns, open_page: OpenPage) -> None:
    ffmpeg = pytest.importorskip("imageio_ffmpeg")
    run = make_run(tmp_path, "filmed", [1.0])
    (run.path / layout.VIDEOS).mkdir()
    film = ffmpeg.write_frames(str(run.path / layout.VIDEOS / "video-000000100.mp4"), (64, 64), fps=10)
    film.send(None)
    for shade in range(20):
        film.send(bytes([10 * shade]) * 64 * 64 * 3)
    film.close()
    address = serve_runs(tmp_path)
    page = open_page(f"{address}#/run/filmed?tab=videos")
    video = page.locator("video")
    video.evaluate("video => video.play()")
    until(page, "document.querySelector('video').currentTime > 0.2")
    assert "after 100 steps" in page.locator("figcaption").inner_text()


def written(path: Path, ended: threading.Event) -> dict[int, float]:
    """Follow a file of rows until an event: steps of each row -> when it was there."""
    found: dict[int, float] = {}
    while not ended.wait(0.01):
        if not path.is_file():
            continue
        for line in path.read_bytes().splitlines(keepends=True)[len(found) :]:
            if line.endswith(b"\n"):
                found[json.loads(line)["steps"]] = time.time()
    return found


SEEN = """area => {
  window.seen = {};
  new MutationObserver(() => (window.seen[area.dataset.last] ??= Date.now() / 1000)).observe(area, {attributes: true});
}"""


@pytest.mark.flaky_under_load("asserts that half of the points are drawn within a second")
def test_points_are_drawn_while_a_run_trains(tmp_path: Path, serve_runs: ServeRuns, open_page: OpenPage) -> None:
    command = [sys.executable, "-m", "fever", "train", "CartPole-v1", "--name", "live", "--stop-reward", "100000"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    ended, times = threading.Event(), {}
    follower = threading.Thread(target=lambda: times.update(written(tmp_path / "runs/live" / layout.METRICS, ended)))
    address = serve_runs(tmp_path / "runs")
    training = subprocess.Popen(command, cwd=tmp_path, env=environment, stderr=subprocess.DEVNULL)
    follower.start()
    try:
        page = open_page(address)
        page.get_by_role("link", name="live", exact=True).click()
        drawn(page, "Learning curve")
        area = page.locator('section.chart[aria-label="Learning curve"] .chart-area')
        area.evaluate(SEEN)
        until(page, "Object.keys(window.seen).length >= 15")
        assert page.locator(".run-head .badge").inner_text() == "running"
        seen = {int(steps): moment for steps, moment in page.evaluate("window.seen").items()}
    finally:
        training.send_signal(signal.SIGINT)
        training.wait(60)
        ended.set()
        follower.join()
    page.locator(".run-head .badge", has_text="done").wait_for()
    delays = sorted(moment - times[steps] for steps, moment in seen.items() if steps in times)
    assert delays[len(delays) // 2] < 1, delays
