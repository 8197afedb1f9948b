"""What a page is told while a run trains."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from fever import layout
from fever.board import server
from fever.board.listing import Listing
from fever.board.live import Watcher
from tests.board.conftest import Client
from tests.experiments.made import make_run
from tests.helpers import ROOT, wait_for

Serve = Callable[..., Client]


def append(path: Path, row: dict[str, Any]) -> None:
    with path.open("a") as file:
        file.write(json.dumps(row) + "\n")


@contextmanager
def events(client: Client, watched: str) -> Iterator[list[tuple[str, Any]]]:
    """The events that a page gets, as they come."""
    found: list[tuple[str, Any]] = []
    connection = http.client.HTTPConnection("127.0.0.1", client.port, timeout=20)
    connection.request("GET", f"/api/events?watch={watched}")
    opened = connection.sock
    answer = connection.getresponse()
    assert answer.headers["Content-Type"] == "text/event-stream"
    assert answer.readline() == b": alive\n"  # all that comes later is told

    def read() -> None:
        kind = ""
        try:
            while line := answer.readline().decode():
                if line.startswith("event: "):
                    kind = line[7:-1]
                elif line.startswith("data: "):
                    found.append((kind, json.loads(line[6:])))
        except (OSError, ValueError, AttributeError):
            return

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    yield found
    opened.shutdown(socket.SHUT_RDWR)
    thread.join(10)
    answer.close()


def test_new_rows_are_told_to_those_who_watch_the_run(serve: Serve, tmp_path: Path) -> None:
    run = make_run(tmp_path, "a", [1.0, 2.0])
    make_run(tmp_path, "b", [1.0])
    client = serve(tmp_path)
    client.get("/api/runs")
    with events(client, "a") as told, events(client, "b") as others:
        append(run.path / layout.METRICS, {"iteration": 3, "steps": 300, "return_mean": 7.5, "name": "x"})
        append(run.path / layout.EPISODES, {"episode": 9, "steps": 300, "return": 7, "length": 3, "info": {"s": 2}})
        (run.path / layout.LOG).write_text("first\nsecond\nhalf of a li")
        wait_for(lambda: {"points", "episodes", "log", "runs"} <= {kind for kind, _ in told}, "events")
        wait_for(lambda: "runs" in dict(others), "a row")
        points, found = dict(told)["points"], dict(told)["episodes"]
        assert (points["id"], points["columns"]["iteration"], points["columns"]["return_mean"]) == ("a", [3], [7.5])
        assert (found["episode"], found["info"]) == ([9], {"s": [2]})
        assert dict(told)["log"]["text"] == "first\nsecond\n"
        assert dict(told)["runs"]["rows"][0]["return"] == 7.5
        assert "points" not in dict(others)


def test_an_event_is_written_once_however_many_pages_are_open(
    serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(tmp_path, "a", [1.0])
    client, written = serve(tmp_path), []
    whole = server.to_json
    monkeypatch.setattr(server, "to_json", lambda value: (written.append("columns" in value), whole(value))[1])
    with events(client, "a") as one, events(client, "a") as other:
        append(run.path / layout.METRICS, {"iteration": 2, "steps": 200})
        wait_for(lambda: "points" in dict(one) and "points" in dict(other), "the row in both")
    assert sum(written) == 1


def test_checkpoints_and_workers_are_told(tmp_path: Path) -> None:
    run = make_run(tmp_path, "a", [1.0])
    watcher = Watcher(Listing(tmp_path))
    watcher.listing.scan()
    watcher.watch({"a", "unknown"})
    dict(event for _, event in watcher.look())
    (run.path / layout.CHECKPOINTS).mkdir()
    workers = [{"worker": 0, "host": "h", "steps": 5, "heard": 1.0, "weights_behind": 2, "restarts": 1}]
    (run.path / layout.WORKERS).write_text(json.dumps({"written": 3.0, "workers": workers}))
    told = dict(event for name, event in watcher.look() if name == "a")
    assert told["changed"]["what"] == ["checkpoints"]
    (worker,) = told["workers"]["workers"]
    assert (worker["weights_age"], worker["restarts"], worker["age"]) == (2, 1, 2.0)
    assert not list(watcher.look())


def test_a_file_that_was_thinned_is_followed(tmp_path: Path) -> None:
    run = make_run(tmp_path, "a", [1.0] * 10)
    watcher = Watcher(Listing(tmp_path))
    watcher.watch({"a"})
    rows = (run.path / layout.METRICS).read_text().splitlines(keepends=True)
    new = json.dumps({"iteration": 11, "steps": 1100}) + "\n"
    (run.path / "other").write_text("".join(rows[::2]) + new)
    (run.path / "other").replace(run.path / layout.METRICS)
    told = dict(event for name, event in watcher.look() if name == "a")
    assert told["points"]["columns"]["iteration"] == [11]


def test_a_run_that_is_removed_is_gone_from_the_list(tmp_path: Path) -> None:
    import shutil

    run = make_run(tmp_path, "a", [1.0])
    watcher = Watcher(Listing(tmp_path))
    list(watcher.look())
    watcher.watch({"a"})
    shutil.rmtree(run.path)
    ((name, (kind, content)),) = watcher.look()
    assert (name, kind, content["gone"]) == (None, "runs", ["a"])


def test_a_run_with_odd_files_silences_no_other(serve: Serve, tmp_path: Path) -> None:
    odd, whole = make_run(tmp_path, "odd", [1.0]), make_run(tmp_path, "whole", [1.0])
    client = serve(tmp_path)
    with events(client, "odd,whole") as told:
        (odd.path / layout.WORKERS).write_text('{"written": 1.0, "workers": 5}')
        append(odd.path / layout.METRICS, {"iteration": 2, "steps": 200, "huge": 10**400})
        wait_for(lambda: any(found["id"] == "odd" for kind, found in told if kind == "points"), "the odd run's row")
        append(whole.path / layout.METRICS, {"iteration": 2, "steps": 200})
        wait_for(lambda: any(found["id"] == "whole" for kind, found in told if kind == "points"), "the other's row")
    assert client.get("/api/run?id=odd")["metrics"]
    assert client.get("/api/workers?id=odd")["workers"] == []


def test_who_watches_a_run_that_is_gone_takes_no_news_from_others(serve: Serve, tmp_path: Path) -> None:
    run = make_run(tmp_path, "a", [1.0])
    client = serve(tmp_path)
    client.get("/api/runs")
    with events(client, "gone") as told:
        append(run.path / layout.METRICS, {"iteration": 2, "steps": 200, "return_mean": 7.5})
        assert client.ask("/api/run?id=gone")[0] == 404
        wait_for(lambda: "runs" in dict(told), "a row")
        assert dict(told)["runs"]["rows"][0]["return"] == 7.5


def test_the_page_is_opened_where_there_is_a_screen(tmp_path: Path) -> None:
    """$BROWSER is a shell script that notes what it was to open."""
    opened, browser = tmp_path / "opened", tmp_path / "browser"
    browser.write_text(f'#!/bin/sh\necho "$1" > {opened}\n')
    browser.chmod(0o755)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "DISPLAY": ":9", "BROWSER": f"{browser} %s"}
    command = [sys.executable, "-m", "fever", "board", "--runs", str(tmp_path / "runs"), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as board:
        try:
            url = board.stdout.readline().split()[0]  # type: ignore[union-attr]
            wait_for(lambda: opened.is_file() and opened.read_text().strip() == url, "the browser")
        finally:
            board.send_signal(signal.SIGINT)
            board.communicate(timeout=60)
