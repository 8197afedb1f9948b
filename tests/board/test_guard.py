"""Who may read runs through the page's server: not other sites, not other machines without the token."""

from __future__ import annotations

import socket
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fever import layout
from fever.board.guard import Guard, is_loopback, token_path
from fever.board.listing import Listing
from fever.board.live import Watcher
from fever.scaling.report import REPORT
from tests.board.conftest import Client
from tests.experiments.made import make_run

Serve = Callable[..., Client]


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    folder = tmp_path / "runs"
    run = make_run(folder, "a", [1.0, 2.0])
    (run.path / "videos").mkdir()
    (run.path / "videos" / "00000001.mp4").write_bytes(bytes(range(200)))
    (run.path / "curves.png").write_bytes(b"\x89PNG")
    (tmp_path / "secret.txt").write_text("secret")
    (tmp_path / "secret.png").write_text("secret")
    return folder


@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "evil.example:8300",
        "localhost.evil.example",
        "10.1.2.3",
        "",
        "[::2]",
        "[::1].evil.example",
        "[::1",
    ],
)
def test_another_name_of_the_server_is_refused(serve: Serve, runs: Path, host: str) -> None:
    status, _, content = serve(runs).ask("/api/runs", Host=host)
    assert status in (400, 403)
    assert b"cartpole" not in str(content).lower().encode()


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost:9000", "LOCALHOST", "[::1]:80"])
def test_names_of_this_machine_are_accepted_at_any_port(serve: Serve, runs: Path, host: str) -> None:
    assert serve(runs).ask("/api/runs", Host=host)[0] == 200


@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": "http://evil.example"},
        {"Origin": "null"},
        {"Origin": "https://127.0.0.1"},
        {"Sec_Fetch_Site": "cross-site"},
        {"Sec_Fetch_Site": "same-site", "Sec_Fetch_Mode": "no-cors"},
        {"Sec_Fetch_Site": "cross-site", "Sec_Fetch_Mode": "navigate"},
    ],
)
def test_other_sites_read_nothing(serve: Serve, runs: Path, headers: dict[str, str]) -> None:
    assert serve(runs).ask("/api/runs", **headers)[0] == 403


def test_our_own_page_and_a_link_from_elsewhere_are_answered(serve: Serve, runs: Path) -> None:
    client = serve(runs)
    own = {"Origin": f"http://127.0.0.1:{client.port}", "Sec_Fetch_Site": "same-origin"}
    assert client.ask("/api/runs", **own)[0] == 200
    status, headers, _ = client.ask("/", Sec_Fetch_Site="cross-site", Sec_Fetch_Mode="navigate")
    assert status == 200
    policy = headers["Content-Security-Policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert headers["X-Content-Type-Options"] == "nosniff"


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS"])
def test_nothing_can_be_changed(serve: Serve, runs: Path, method: str) -> None:
    assert serve(runs).ask("/api/runs", method, body="")[0] in (403, 404, 405)


TRAVERSALS = [
    "../secret.txt", "..%2fsecret.txt", "..%252fsecret.txt", "%2e%2e/secret.txt", "..\\secret.txt", "/etc/passwd",
    "//etc/passwd", "file:///etc/passwd", "videos/../../../secret.png", "videos/..%2f..%2f..%2fsecret.png",
    "./curves.png", "videos//00000001.mp4", "config.yaml", "metrics.jsonl", "signature", "", ".", "..",
    "curves.png%00.txt", "..%c0%af..%c0%afsecret.txt", "checkpoints", "lock",
]  # fmt: skip


@pytest.mark.parametrize("path", TRAVERSALS)
def test_no_other_file_can_be_had(serve: Serve, runs: Path, path: str) -> None:
    client = serve(runs)
    for request in (f"/file?id=a&name={path}", f"/file?id={path}&name=curves.png", f"/static/{path}", f"/{path}"):
        status, _, content = client.ask(request)
        body = content if isinstance(content, bytes) else str(content).encode()
        assert status in (400, 404) or (request in ("/", "/.") and status == 200)
        assert b"secret" not in body
        assert b"root:" not in body
    for interface in ("run", "series", "episodes", "log", "workers"):
        assert client.ask(f"/api/{interface}?id={path}")[0] in (400, 404)


def test_what_is_no_request_prints_nothing(serve: Serve, runs: Path, caplog: pytest.LogCaptureFixture) -> None:
    port = serve(runs).port
    for sent in (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03 TLS \r\n\r\n", b"GET / HTTP/1.1\r\n\r\n"):
        with socket.create_connection(("127.0.0.1", port), timeout=20) as connection:
            connection.sendall(sent)
            assert b" 400 " in connection.makefile("rb").readline()
    assert not caplog.records  # which a terminal would show


def test_links_lead_nowhere(serve: Serve, runs: Path, tmp_path: Path) -> None:
    outside = make_run(tmp_path / "elsewhere", "foreign", [5.0]).path
    (outside / "log.txt").write_text("secret")
    (runs / "linked").symlink_to(outside)
    for name in ("a", "b"):
        make_run(runs, f"with-{name}", [1.0])
    (runs / "with-a" / "log.txt").symlink_to(tmp_path / "secret.txt")
    (runs / "with-b" / "videos").symlink_to(tmp_path)
    client = serve(runs)
    rows = {row["id"]: row for row in client.get("/api/runs")["runs"]}
    assert rows["linked"]["state"] == "damaged"
    assert "symbolic link" in rows["linked"]["reason"]
    for name in ("linked", "with-a", "with-b"):
        for interface in ("/api/run", "/api/series", "/api/log", "/api/episodes", "/api/workers"):
            status, _, content = client.ask(f"{interface}?id={name}")
            assert status == 404
            assert "symbolic link" in content["error"]
        assert client.ask(f"/file?id={name}&name=videos/secret.png")[0] == 404


def test_links_inside_a_run_show_nothing_in_the_list(runs: Path, tmp_path: Path) -> None:
    outside = make_run(tmp_path / "elsewhere", "foreign", [123.0], env="Secret-v1").path
    search = make_run(runs, "search", [1.0]).path
    (search / layout.TRIALS).symlink_to(outside.parent)
    for name in (layout.CONFIG, layout.METRICS):
        path = make_run(runs, f"with-{name}", [1.0]).path / name
        path.unlink()
        path.symlink_to(outside / name)
    listing = Listing(runs)
    listing.scan()
    rows = {row["id"]: row for row in listing.rows()}
    assert rows.keys() == {"a", "search", f"with-{layout.CONFIG}", f"with-{layout.METRICS}"}
    for name in (layout.CONFIG, layout.METRICS):
        row = rows[f"with-{name}"]
        assert (row["state"], row["return"]) == ("damaged", None)
        assert row["env"] != "Secret-v1"
        assert "symbolic link" in row["reason"]


def test_a_report_that_is_a_link_is_not_read(serve: Serve, runs: Path, tmp_path: Path) -> None:
    (tmp_path / "secret.json").write_text('{"answer": "secret"}')
    (runs / "scale").mkdir()
    (runs / "scale" / REPORT).symlink_to(tmp_path / "secret.json")
    client = serve(runs)
    assert "secret" not in str(client.get("/api/runs")).replace("secret.json", "")
    status, _, content = client.ask("/api/run?id=scale")
    assert status == 404
    assert "symbolic link" in content["error"]


def test_a_link_that_comes_while_a_run_is_watched_is_not_read(runs: Path, tmp_path: Path) -> None:
    watcher = Watcher(Listing(runs))
    watcher.watch({"a"})
    list(watcher.look())
    (tmp_path / "secret.txt").write_text("secret\n" * 100)
    (runs / "a" / layout.LOG).symlink_to(tmp_path / "secret.txt")
    assert "log" not in [kind for _, (kind, _) in watcher.look()]


def test_parts_of_a_video_are_served(serve: Serve, runs: Path) -> None:
    client, name = serve(runs), "/file?id=a&name=videos/00000001.mp4"
    everything = bytes(range(200))
    status, headers, content = client.ask(name)
    assert (status, headers["Content-Type"], content) == (200, "video/mp4", everything)
    for asked, expected in (("0-9", everything[:10]), ("150-", everything[150:]), ("-5", everything[-5:])):
        status, headers, content = client.ask(name, Range=f"bytes={asked}")
        assert (status, content) == (206, expected)
        assert headers["Content-Range"].endswith("/200")
    for odd in ("bytes=500-600", "bytes=-", "bytes=a-b", "lines=0-1", "bytes=9-3"):
        assert client.ask(name, Range=odd)[2] == everything


def test_addresses_that_only_this_machine_reaches() -> None:
    assert [is_loopback(host) for host in ("127.0.0.1", "::1", "localhost", "127.9.9.9")] == [True] * 4
    assert [is_loopback(host) for host in ("0.0.0.0", "::", "example.org", "10.0.0.1")] == [False] * 4
    assert Guard("127.0.0.1").token is None


def test_other_machines_need_the_token(
    serve: Serve, runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setenv("FEVER_HOME", str(tmp_path / "home"))
    monkeypatch.setattr("fever.board.guard.REFUSED_SECONDS", 0.01)
    monkeypatch.setattr("fever.board.guard.is_loopback", lambda host: False)  # it listens on loopback all the same
    client = serve(runs)
    assert stat.S_IMODE(token_path().stat().st_mode) == 0o600
    assert client.ask("/api/runs")[0] == 401
    assert client.ask("/static/index.html")[0] == 401
    status, headers, _ = client.ask("/")
    assert (status, headers["Location"]) == (302, "/login")
    assert b"Token" in client.ask("/login")[2]
    assert client.ask("/login", "POST", "wrong")[0] == 401
    assert client.ask("/api/runs", Cookie=f"fever_board_{client.port}=")[0] == 401
    token = token_path().read_text().strip()
    assert client.ask("/login", "POST", token, Host="evil.example")[0] == 403
    status, headers, _ = client.ask("/login", "POST", token)
    assert status == 200
    cookie = headers["Set-Cookie"]
    assert token not in cookie
    assert "HttpOnly" in cookie
    assert "SameSite=Strict" in cookie
    assert client.ask("/api/runs", Cookie=cookie.partition(";")[0])[0] == 200
    output = capsys.readouterr()
    assert token not in output.out + output.err


def test_pages_at_two_ports_of_a_machine_do_not_log_each_other_out(
    serve: Serve, runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FEVER_HOME", str(tmp_path / "home"))
    monkeypatch.setattr("fever.board.guard.is_loopback", lambda host: False)
    clients = [serve(runs), serve(runs)]
    cookies: dict[str, str] = {}  # as a browser keeps them: by name, whatever the port
    for client in clients:
        headers = client.ask("/login", "POST", token_path().read_text().strip())[1]
        name, _, value = headers["Set-Cookie"].partition(";")[0].partition("=")
        cookies[name] = value
    sent = "; ".join(f"{name}={value}" for name, value in cookies.items())
    assert [client.ask("/api/runs", Cookie=sent)[0] for client in clients] == [200, 200]


def test_a_token_that_others_could_read_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEVER_HOME", str(tmp_path))
    token_path().write_text("known-to-everybody-on-this-machine")
    token_path().chmod(0o644)
    assert Guard("0.0.0.0").token != "known-to-everybody-on-this-machine"
    assert stat.S_IMODE(token_path().stat().st_mode) == 0o600
