"""Ray's dashboard on this machine: who may ask, and what is passed on. A small server stands for Ray's."""

from __future__ import annotations

import http.client
import http.server
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from fever.errors import FeverError
from fever.launch.clusters.ray_page import RayPage
from fever.launch.clusters.tunnel import usable_port
from fever.launch.on_host.host import free_port


class Ray(http.server.ThreadingHTTPServer):
    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Dashboard)
        self.asked: list[tuple[str, str, dict[str, str]]] = []


class Dashboard(http.server.BaseHTTPRequestHandler):
    server: Ray

    def do_GET(self) -> None:
        self.server.asked.append((self.command, self.path, dict(self.headers)))
        code, content = (404, b"no") if "missing" in self.path else (200, bytes(300_000))
        self.send_response(code)
        self.send_header("Content-Encoding", "gzip")  # as Ray's static files
        self.send_header("Set-Cookie", "ray-authentication-token=secret")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *words: Any) -> None: ...


@pytest.fixture
def ray() -> Iterator[Ray]:
    with Ray() as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


@pytest.fixture
def page(ray: Ray) -> Iterator[RayPage]:
    with RayPage(f"http://127.0.0.1:{ray.server_port}", "secret", free_port()) as page:
        yield page


def ask(page: RayPage, path: str, method: str = "GET", **headers: str) -> tuple[http.client.HTTPResponse, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", page.port, timeout=30)
    connection.request(method, path, headers={name.replace("_", "-"): value for name, value in headers.items()})
    answer = connection.getresponse()
    content = answer.read()
    connection.close()
    return answer, content


def test_the_key_becomes_a_cookie_and_the_token_stays_out_of_the_browser(page: RayPage, ray: Ray) -> None:
    key = page.url.rpartition("/")[2]
    opened, _ = ask(page, f"/{key}", Sec_Fetch_Site="cross-site", Sec_Fetch_Mode="navigate")  # a link in a chat
    assert (opened.status, opened.headers["Location"]) == (302, "/")
    cookie = opened.headers["Set-Cookie"].partition(";")[0]
    assert "HttpOnly" in opened.headers["Set-Cookie"]
    answer, content = ask(page, "/api/v0/logs?node=a%2Fb", Cookie=f"{cookie}; other=1", User_Agent="Mozilla")
    assert (answer.status, content, answer.headers["Content-Encoding"]) == (200, bytes(300_000), "gzip")
    assert answer.headers["Set-Cookie"] is None
    ((method, path, headers),) = ray.asked
    assert (method, path) == ("GET", "/api/v0/logs?node=a%2Fb")
    assert (headers["Authorization"], headers["User-Agent"]) == ("Bearer secret", "Mozilla")
    assert "Cookie" not in headers
    assert ask(page, "/missing", Cookie=cookie)[0].status == 404
    ray.shutdown()
    ray.server_close()
    answer, content = ask(page, "/", Cookie=cookie)
    assert (answer.status, b"does not answer" in content, b"secret" in content) == (502, True, False)


def test_others_are_refused(page: RayPage, ray: Ray) -> None:
    cookie = f"{page.cookie}={page.session}"
    strangers: list[tuple[dict[str, str], int]] = [
        ({}, 401),
        ({"Cookie": f"{page.cookie}=x"}, 401),
        ({"Authorization": "Bearer secret"}, 401),
        ({"Cookie": cookie, "Host": "evil.example"}, 403),  # after DNS rebinding
        ({"Cookie": cookie, "Origin": "http://evil.example"}, 403),
        ({"Cookie": cookie, "Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "no-cors"}, 403),
        ({"Cookie": cookie, "Sec-Fetch-Site": "same-site", "Sec-Fetch-Mode": "cors"}, 403),  # another port
    ]
    for headers, code in strangers:
        assert ask(page, "/api/jobs/", **headers)[0].status == code, headers
    assert ask(page, "/?key=x")[0].status == 401
    for method in ("POST", "PUT", "DELETE"):
        assert ask(page, "/api/jobs/", method, Cookie=cookie)[0].status == 405
    assert ray.asked == []


def test_a_port_that_is_taken_is_left_alone() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        taken = other.getsockname()[1]
        assert usable_port(None, taken) != taken
        with pytest.raises(FeverError, match=f"port {taken} is taken here"):
            usable_port(taken, 1)
