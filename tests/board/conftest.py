"""A page's server in a thread of the test, and requests to it as they are written; the page in a browser."""

from __future__ import annotations

import http.client
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from fever import layout
from fever.board.server import Board
from tests.experiments.made import make_experiment, make_run, write_rows
from tests.helpers import ROOT

ServeRuns = Callable[[Path], str]
OpenPage = Callable[..., Any]
HOSTILE = '<img src=x onerror="alert(1)">'
ODD = "a\u202eb"  # turns the direction of text
LONG = "a-name-that-does-not-end-" * 7
ROWS = 4000  # of the long run: more than a chart shows
SECONDS = 20  # until what is waited for must be there
# Everything that a page must not do ends up in this list.
WATCH = "addEventListener('securitypolicyviolation', e => console.error('CSP', e.violatedDirective, e.blockedURI))"


class Client:
    """Sends requests to a server, byte by byte as given."""

    def __init__(self, port: int) -> None:
        self.port = port

    def ask(self, path: str, method: str = "GET", body: str | None = None, **headers: str) -> Any:
        """Status, headers and body; of JSON its value. An underscore in a header's name is a dash."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=20)
        try:
            connection.putrequest(method, path, skip_host="Host" in headers)
            for name, value in headers.items():
                connection.putheader(name.replace("_", "-"), value)
            if body is not None:
                connection.putheader("Content-Length", str(len(body.encode())))
            connection.endheaders(None if body is None else body.encode())
            answer = connection.getresponse()
            content = answer.read()
        finally:
            connection.close()
        if answer.headers.get_content_type() == "application/json":
            return answer.status, answer.headers, json.loads(content)
        return answer.status, answer.headers, content

    def get(self, path: str) -> Any:
        """The answer's value; fails unless the request succeeds."""
        status, _, content = self.ask(path)
        assert status == 200, content
        return content


@pytest.fixture
def serve() -> Iterator[Callable[..., Client]]:
    """Serve a folder; the server ends with the test."""
    boards = []

    def start(folder: Path, **options: Any) -> Client:
        board = Board(folder, port=0, **options)
        boards.append(board)
        board.start()
        return Client(board.port)

    yield start
    for board in boards:
        board.close()


def give_up(reason: str) -> None:
    (pytest.fail if os.environ.get("FEVER_REQUIRE") else pytest.skip)(reason)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        give_up("playwright is not installed")
    path = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if path is None:
        give_up("there is no chromium")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        browser.close()


@contextmanager
def serving(folder: Path) -> Iterator[str]:
    """The address at which `fever board` serves a folder."""
    command = [sys.executable, "-m", "fever", "board", "--runs", str(folder), "--no-browser", "--port", "0"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
    ) as board:
        lines = []
        for line in board.stdout:
            lines.append(line)
            if found := re.search(r"http://\S+", line):
                break
        else:
            pytest.fail("".join(lines))
        try:
            yield found[0]
        finally:
            board.send_signal(signal.SIGINT)
            board.communicate(timeout=60)


def made(folder: Path) -> Path:
    """Runs of all kinds, without training."""
    make_run(folder, "long", [k % 500 for k in range(ROWS)], stop={"reward": 400.0})
    make_experiment(
        folder, "group", [[float(k + seed) for k in range(50)] for seed in range(3)], settings={"gamma": 0.9}
    )
    make_run(folder, "other", [float(k) for k in range(40)], env="Acrobot-v1", algo="dqn", reason="failed")
    make_run(folder, LONG, [1.0, 2.0])
    (folder / "broken").mkdir()
    (folder / "broken" / layout.CONFIG).write_text("env: [")
    hostile = make_run(folder, f"{HOSTILE} {ODD}", [1.0, 2.0, 3.0], env=f"CartPole-v1{HOSTILE}")
    rows = [
        {"iteration": k, "steps": 100 * k, "seconds": k, "episodes": k, "return_mean": k, HOSTILE: k} for k in (1, 2, 3)
    ]
    write_rows(hostile.path / layout.METRICS, rows)
    (hostile.path / layout.LOG).write_text(f"first {HOSTILE}\n<script>alert(2)</script> {ODD}\n")
    info = {HOSTILE: 1.5, "__proto__": 2.5}
    write_rows(
        hostile.path / layout.EPISODES,
        [{"episode": 1, "steps": 100, "return": 1.0, "length": 2, "worker": 0, "env": 0, "info": info}],
    )
    return folder


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made(tmp_path_factory.mktemp("runs"))


@pytest.fixture(scope="module")
def url(runs: Path) -> Iterator[str]:
    with serving(runs) as address:
        yield address


@pytest.fixture
def serve_runs() -> Iterator[ServeRuns]:
    """Serve a folder until the test and its pages have ended."""
    with ExitStack() as stack:
        yield lambda folder: stack.enter_context(serving(folder))


@pytest.fixture
def open_page(browser: Any, serve_runs: Any) -> Iterator[OpenPage]:
    """Open pages; any error, dialog or violation of the security policy in one of them fails the test."""
    contexts: list[Any] = []
    problems: list[str] = []

    def open_one(address: str, width: int = 1280, height: int = 800, refused: bool = False, **options: Any) -> Any:
        """With `refused`, answers with an error are expected."""
        context = browser.new_context(viewport={"width": width, "height": height}, **options)
        contexts.append(context)
        context.set_default_timeout(1000 * SECONDS)
        page = context.new_page()
        page.add_init_script(WATCH)

        def note(text: str) -> None:
            if not (refused and text.startswith("Failed to load resource")):
                problems.append(text)

        page.on("console", lambda one: one.type == "error" and note(one.text))
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("dialog", lambda dialog: (problems.append(f"dialog {dialog.message}"), dialog.dismiss()))
        page.goto(address)
        return page

    yield open_one
    for context in contexts:
        context.close()
    assert not problems
