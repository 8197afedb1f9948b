"""What acts on a host that ssh reaches, and the calls of it, without a host."""

from __future__ import annotations

import http.server
import json
import os
import socket
import threading
from pathlib import Path
from typing import Any

import pytest

from fever.launch import agent, host, ssh
from fever.launch.ssh import Unreachable


@pytest.mark.parametrize("scratch", ["/nowhere", "/tmp/too/long/a/path/for/the/sockets/of/ray"])
def test_a_node_is_found_where_it_had_to_go(scratch: str) -> None:
    """A scratch folder that cannot be used is replaced by another, in which `down` must look too."""
    place = host.Scratch(scratch)
    try:
        own = {"cluster": place.path.name, "host": socket.gethostname(), "pid": os.getpid()}
        (place.path / "node.json").write_text(json.dumps({**own, "began": host.began(os.getpid())}))
        request = {"cluster": place.path.name, "scratch": scratch}
        assert [node["pid"] for node in agent.find_nodes(request)] == [os.getpid()]
        assert agent.find_nodes({**request, "cluster": "another"}) == []
    finally:
        place.remove()


def test_no_proxy_sees_the_token(monkeypatch: pytest.MonkeyPatch) -> None:
    class Page(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200 if self.headers["Authorization"] == "Bearer secret" else 401)
            self.end_headers()

        def log_message(self, *words: Any) -> None: ...

    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    server = http.server.HTTPServer(("127.0.0.1", 0), Page)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        keeper = agent.Keeper.__new__(agent.Keeper)
        keeper.request, keeper.dashboard = {"token": "secret"}, server.server_port
        assert keeper._page_answers()
    finally:
        server.shutdown()
        server.server_close()


def test_a_host_that_hangs_is_not_waited_for_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its shell answers, and then its file server does not."""
    (tmp_path / "ssh").write_text("#!/bin/sh\necho\nexec sleep 60\n")
    (tmp_path / "ssh").chmod(0o755)
    monkeypatch.setattr(ssh, "ANSWER_SECONDS", 0.5)
    with pytest.raises(Unreachable, match="it does not answer within"):
        ssh.ask([str(tmp_path / "ssh"), "alpha"], {"action": "look"})


def test_a_home_is_the_one_of_the_host() -> None:
    assert ssh.shell_word("~/my env/python") == "\"$HOME\"/'my env/python'"
    assert ssh.shell_word("/usr/bin/python3") == "/usr/bin/python3"
