"""The agent on a host, calls of it over ssh, and clusters of hosts, without a real host."""

from __future__ import annotations

import http.server
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from fever import system
from fever.errors import FeverError
from fever.launch.clusters import ssh, ssh_up
from fever.launch.clusters.base import down
from fever.launch.clusters.ray_jobs import RayJobs
from fever.launch.clusters.record import ClusterRecord, find_record
from fever.launch.clusters.ssh import Unreachable
from fever.launch.clusters.ssh_cluster import Ssh
from fever.launch.on_host import agent
from fever.launch.targets import load_target, restore_target
from fever.runs.mirror import REPLY
from fever.scratch import Scratch
from tests.helpers import wait_for

pytestmark = pytest.mark.lab


@pytest.mark.parametrize("scratch", ["/nowhere", "/tmp/too/long/a/path/for/the/sockets/of/ray"])
def test_a_node_is_found_where_it_had_to_go(scratch: str) -> None:
    """A scratch folder that cannot be used is replaced by another, in which `down` must look too."""
    place = Scratch(scratch)
    try:
        own = {"cluster": place.path.name, "host": socket.gethostname(), "pid": os.getpid()}
        (place.path / "node.json").write_text(json.dumps({**own, "began": system.began(os.getpid())}))
        request = {"cluster": place.path.name, "scratch": scratch}
        assert [node["pid"] for node in agent.find_nodes(request)] == [os.getpid()]
        assert agent.find_nodes({**request, "cluster": "another"}) == []
    finally:
        place.remove()


@pytest.mark.parametrize("swept", [True, False])
def test_what_a_killed_keeper_left_is_removed_or_named(
    swept: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("fever.scratch", "fever.launch.on_host.agent"):
        monkeypatch.setattr(f"{module}.FALLBACK", tmp_path)
    places = [Scratch("/nowhere") for _ in range(3)]
    dead = {"host": socket.gethostname(), "pid": os.getpid(), "began": "long ago"}
    for place, cluster in zip(places, ("mine", "mine", "another"), strict=True):
        (place.path / "token").write_text("secret")
        (place.path / "node.json").write_text(json.dumps({**dead, "cluster": cluster, "scratch": str(place.path)}))
    places[0].release()
    if not swept:
        monkeypatch.setattr("fever.launch.on_host.agent.sweep", lambda *of: None)
    left = [places[1].path] if swept else [place.path for place in places[:2]]  # whose owner still holds it
    request = {"cluster": "mine", "scratch": "/nowhere"}
    assert agent.stop(request) == {"left": sorted(map(str, left))}
    assert places[0].path.exists() is not swept
    places[1].release()
    if swept:
        assert agent.stop(request) == {"left": []}
    assert places[2].path.exists()
    places[2].release()


def test_what_a_host_cannot_do_is_one_line(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(request: dict[str, Any]) -> dict[str, Any]:
        raise PermissionError(13, "Permission denied", "/root/.fever")

    monkeypatch.setitem(agent.ACTIONS, "look", refuse)
    agent.main({"action": "look"})
    assert capsys.readouterr().out == f'\n{REPLY}{{"error": "/root/.fever: Permission denied"}}\n'


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
        daemon = agent.HostDaemon.__new__(agent.HostDaemon)
        daemon.request, daemon.dashboard = {"token": "secret"}, server.server_port
        assert daemon._dashboard_answers()
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


def test_a_python_that_is_too_old_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch, pytest.raises(SystemExit) as said:  # noqa: PT012 - the patch ends first
        patch.setattr(sys, "version_info", (3, 9, 2))
        patch.setattr(sys, "version", "3.9.2+ (main)")
        exec(ssh.LOADER)
    assert str(said.value) == "fever-python 3.9.2+"
    (tmp_path / "ssh").write_text(f"#!/bin/sh\necho {said.value} >&2\nexit 1\n")
    (tmp_path / "ssh").chmod(0o755)
    with pytest.raises(Unreachable, match=r"its Python is 3\.9\.2\+; fever needs 3\.11 or newer; set `python:`"):
        ssh.ask([str(tmp_path / "ssh"), "alpha"], {"action": "look"})


def test_a_home_is_the_one_of_the_host() -> None:
    assert ssh.shell_word("~/my env/python") == "\"$HOME\"/'my env/python'"
    assert ssh.shell_word("/usr/bin/python3") == "/usr/bin/python3"


def test_an_address_that_is_none_is_one_sentence() -> None:
    with pytest.raises(FeverError, match=r"http://\[x cannot be the address of a Ray"):
        RayJobs("http://[x", None).version()


@pytest.mark.parametrize(
    "setting",
    ["cpus_per_node: 2", "scratch: /mnt", "unset: [A]", "packages: [x]", "extras: [tune]", "name: x", "interface: ib0"],
)
def test_settings_that_a_ray_that_runs_already_cannot_have(setting: str, tmp_path: Path) -> None:
    file = tmp_path / "ray.yaml"
    file.write_text("{kind: ray, address: '10.0.0.7:6379', runs: /runs, python: /py, env: {A: b}}")
    target = load_target(str(file), {})
    assert restore_target(target.model_dump(mode="json")) == target
    file.write_text(f"kind: ray\naddress: 10.0.0.7:6379\n{setting}\n")
    with pytest.raises(FeverError, match=rf"{setting.partition(':')[0]}=.* it applies only to a Ray that fever starts"):
        load_target(str(file), {})


def test_tensorboard_ends_with_the_tunnel(tmp_path: Path) -> None:
    program = tmp_path / "tensorboard"
    program.write_text(f"#!/bin/sh\necho $$ > {tmp_path}/pid\nexec sleep 60\n")
    program.chmod(0o755)
    code = "import sys, time; from pathlib import Path; from fever.launch.clusters.tunnel import TensorBoard\n"
    code += "board = TensorBoard(); board.program = sys.argv[1]; board.show({Path('.')}); time.sleep(60)"
    opened = subprocess.Popen([sys.executable, "-c", code, str(program)], stdout=subprocess.DEVNULL)
    try:
        pid = int(wait_for(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text(), "TensorBoard"))
        began = system.began(pid)
    finally:
        opened.send_signal(signal.SIGKILL)
        opened.wait()
    wait_for(lambda: not system.alive(pid, began), "end of TensorBoard")


# clusters


class Hosts:
    """Hosts that answer as `agent.py` would; those in `silent` do not."""

    def __init__(self) -> None:
        self.nodes: dict[str, dict[str, Any]] = {}
        self.pythons: dict[str, str] = {}
        self.made: list[tuple[str, str]] = []  # host, environment
        self.silent: set[str] = set()
        self.said: list[str] = []

    def ask(self, reach: list[str], request: dict[str, Any], python: str | None = None) -> dict[str, Any]:
        name, action = reach[-1], request["action"]
        if name in self.silent:
            raise Unreachable("it does not answer")
        if action == "stop":
            self.nodes.pop(name, None)
            return {"left": []}
        if action == "start":
            own = {"address": request["head"] or "alpha:1", "dashboard": 0 if request["head"] else 8265, "cores": 2}
            own |= {"interpreter": request["interpreter"], "scratch": "/tmp/x"}
            return self.nodes.setdefault(name, own)
        own = self.pythons.get(name, "3.12.1")
        if action == "install":
            self.made.append((name, request["environment"]))
        ready = (name, request["environment"]) in self.made
        facts = {"python": f"/{request['environment']}/python" if ready else None, "seconds": 1.0}
        facts |= {"home": "/home/me", "own_python": own, "node": self.nodes.get(name)}
        versions = {"Python": own, "ray": "2.60.0", "jax": "0.8"}
        return {**facts, "versions": versions if ready or self.nodes.get(name) else None}

    def up(self, **settings: Any) -> ClusterRecord:
        target = Ssh(name="lab", **{"hosts": ("alpha", "beta"), "extras": (), **settings})
        return target.up("lab.yaml", self.said.append)


@pytest.fixture
def hosts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hosts:
    monkeypatch.setenv("FEVER_HOME", str(tmp_path / "home"))
    hosts = Hosts()
    monkeypatch.setattr(ssh_up, "ask", hosts.ask)
    return hosts


@pytest.mark.parametrize(("name", "value", "was"), [("user", "you", "None"), ("scratch", "/mnt", "/tmp")])
def test_what_runs_is_not_lost_sight_of(hosts: Hosts, name: str, value: str, was: str) -> None:
    record = hosts.up()
    with pytest.raises(FeverError, match=f"lab was brought up with {name}: {was}; take it down to change that"):
        hosts.up(**{name: value})
    assert find_record("lab") == record
    assert down(record, hosts.said.append) == {"alpha": [], "beta": []}
    hosts.up(**{name: value})


def test_packages_that_come_later_are_not_passed_over_in_silence(hosts: Hosts) -> None:
    hosts.up(hosts=("alpha",))
    assert hosts.up(hosts=("alpha",)).hosts == {"alpha": 2}
    assert not any("another environment" in line for line in hosts.said)
    first = hosts.made.copy()
    again = hosts.up(hosts=("alpha",), packages=("sionna",))
    (line,) = [line for line in hosts.said if "another environment" in line]
    assert line.startswith("alpha: started with another environment than ")
    assert line.endswith("lab.yaml describes now; fever down and fever up change that")
    assert hosts.made == first  # what alpha would not use
    assert again.environment == first[0][1]
    del hosts.nodes["alpha"]  # its Ray died, so it is started in the new one
    again = hosts.up(hosts=("alpha",), packages=("sionna",))
    assert hosts.made[1:] == [("alpha", again.environment)]
    assert first[0][1] != again.environment


def test_a_token_that_a_killed_up_left_is_not_used_again(hosts: Hosts, tmp_path: Path) -> None:
    folder = tmp_path / "home" / "clusters" / "lab"
    folder.mkdir(parents=True)
    (folder / "token").write_text("old")
    record = hosts.up()
    assert record.token != "old"
    assert hosts.up().token == record.token
    (folder / "cluster.json").unlink()  # as if this `up` had been killed: its nodes have the token
    assert hosts.up().token == record.token


def test_another_python_is_refused_before_anything_is_set_up(hosts: Hosts) -> None:
    hosts.pythons["beta"] = "3.12.3"
    assert list(hosts.up().hosts) == ["alpha"]
    assert "beta: has Python 3.12.3, but alpha has 3.12.1; all hosts of a cluster need the same" in "\n".join(
        hosts.said
    )
    assert [host for host, _ in hosts.made] == ["alpha"]


def test_the_doctor_tries_what_up_would_do_and_names_old_environments(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = {"alpha": None, "beta": "no package registry answers it"}
    old = {"name": "aa-3.12-x86_64", "bytes": 2e9, "days": 45.2, "users": []}
    busy, young = {**old, "users": ["alpha"]}, {**old, "days": 29.0}

    def ask(reach: list[str], request: dict[str, Any], python: str | None = None) -> dict[str, Any]:
        if request["action"] == "check":
            return {"problem": problem[reach[-1]]}
        free = {"home": 2**40, "scratch": 2**40}
        return {
            "python": None,
            "versions": None,
            "environments": [old, busy, young],
            "cores": 2,
            "busy": 0.1,
            "free": free,
        }

    monkeypatch.setattr(ssh_up, "ask", ask)
    found = Ssh(name="lab", hosts=("alpha", "beta"), extras=()).examine("lab.yaml", Path("runs"))
    assert [(row.mark, row.topic) for row in found] == [
        ("ok", "alpha"), ("problem", "beta"), ("note", "alpha"), ("note", "beta"),
    ]  # fmt: skip
    assert found[1].text == problem["beta"]
    assert found[2].text == (
        "environment aa-3.12-x86_64 (2.0 GB, unused for 45 days); fever down lab.yaml --purge removes it"
    )


def test_a_cluster_that_stays_is_not_said_to_be_gone(hosts: Hosts, tmp_path: Path) -> None:
    hosts.silent.add("beta")
    with pytest.raises(FeverError, match="1 of 2 hosts can be used, nothing is up: beta: it does not answer"):
        hosts.up(min_hosts=2)
    assert hosts.nodes == {}
    assert not list((tmp_path / "home" / "clusters").iterdir())
    hosts.up()
    with pytest.raises(FeverError, match="1 of 2 hosts can be used, nothing was added to what is up: beta"):
        hosts.up(min_hosts=2)
    assert list(hosts.nodes) == ["alpha"]


def test_a_cluster_is_looked_for_among_the_records_only(hosts: Hosts, tmp_path: Path) -> None:
    hosts.up()
    (tmp_path / "home" / "clusters" / "lab").rename(tmp_path / "lab")
    for name in ("../../lab", str(tmp_path / "lab"), "..", ""):
        assert find_record(name) is None
