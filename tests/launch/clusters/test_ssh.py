"""Clusters of hosts that ssh reaches: real sshd on machines made of namespaces; and what is left behind: nothing."""

from __future__ import annotations

import hashlib
import json
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from fever.launch.clusters.host_packages import describe_environment
from tests.helpers import ROOT, WAREHOUSE, has_helped, wait_for
from tests.lab.machines import Command, Lab, Machine, require_lab

pytestmark = [
    pytest.mark.lab,
    pytest.mark.flaky_under_load("several Ray nodes on two cores: a starved node is taken for a lost one"),
]

FEVER = [sys.executable, "-m", "fever"]


class Laptop:
    """A user on the login machine, with a project and a file that describes a cluster."""

    def __init__(self, lab: Lab, folder: Path, name: str = "lab", **settings: Any) -> None:
        self.lab, self.folder, self.name = lab, folder, name
        (folder / "my_envs").mkdir(parents=True, exist_ok=True)
        self.write_environment()
        self.variables = lab.variables(FEVER_HOME=str(folder / "home"), COLUMNS="120", PYTHONPATH=str(ROOT))
        self.variables["PATH"] = f"{lab.ssh_folder}:{self.variables['PATH']}"
        self.settings = {"kind": "ssh", "hosts": [machine.name for machine in lab.machines], "python": sys.executable}
        self.settings["runs"] = str(folder / "there")
        self.change(**settings)

    def write_environment(self, *broken: str) -> None:
        (self.folder / "my_envs" / "__init__.py").write_text(WAREHOUSE % (broken,))

    def change(self, **settings: Any) -> None:
        self.settings |= settings
        self.file.write_text(yaml.safe_dump(self.settings))

    @property
    def file(self) -> Path:
        return self.folder / f"{self.name}.yaml"

    def fever(self, *words: str, timeout: float = 300) -> subprocess.CompletedProcess[str]:
        return self.lab.login.run([*FEVER, *words], cwd=self.folder, env=self.variables, timeout=timeout)

    def start(self, *words: str) -> Command:
        """A command that goes on; what it prints is in `output`."""
        with open(self.folder / "output", "w") as output:
            return self.lab.login.popen(
                [*FEVER, *words], cwd=self.folder, env=self.variables, stdout=output, stderr=output
            )

    @property
    def output(self) -> str:
        return (self.folder / "output").read_text()

    def ok(self, *words: str, timeout: float = 300) -> str:
        done = self.fever(*words, timeout=timeout)
        assert done.returncode == 0, done.stderr
        return done.stdout + done.stderr

    def refused(self, *words: str) -> str:
        """The one sentence with which a command ends that cannot be done."""
        done = self.fever(*words)
        assert (done.returncode, done.stdout) == (2, ""), done
        return done.stderr.strip().splitlines()[-1]

    def up(self) -> str:
        return self.ok("up", self.file.name)

    def down(self) -> str:
        printed = self.ok("down", self.file.name)
        assert f"{self.name} is down" in printed
        return printed

    def train(self, *words: str, env: str = "my_envs:Warehouse") -> str:
        """Begin to train for a long time, detached; returns the job's name."""
        said = self.ok("train", env, "--on", self.file.name, "--detach", "--stop-time", "10m", *words)
        found = re.search(r"submitted (\S+):", said)
        assert found is not None
        return found[1]

    def run(self, name: str) -> Path:
        return self.folder / "runs" / name

    def there(self, name: str) -> Path:
        """A run's directory on the head."""
        (found,) = Path(self.settings["runs"]).glob(f"*/{name}")
        return found

    def record(self) -> dict[str, Any]:
        return json.loads((self.folder / "home" / "clusters" / self.name / "cluster.json").read_text())

    def wait_for_steps(self, job: str, steps: int = 1, seconds: float = 300) -> None:
        run = self.run(json.loads(self.ok("jobs", "--json"))[-1]["run"].rpartition("/")[2])

        def learned() -> bool:
            self.ok("fetch", job)
            lines = (run / "metrics.jsonl").read_text().splitlines() if (run / "metrics.jsonl").exists() else []
            return bool(lines) and json.loads(lines[-1])["steps"] >= steps

        wait_for(learned, "training", seconds, 0.5)


def nothing_left(lab: Lab) -> None:
    """No process on any machine, no temporary folder, no token."""
    wait_for(lambda: not lab.leftovers(), "end of all processes")
    assert [path.name for path in Path("/tmp").glob("fever-ray-*")] == []


def digests(folder: Path) -> dict[str, str]:
    names = [path for path in folder.rglob("*") if path.is_file() and path.parent.name != "job"]
    return {path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest() for path in names}


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    require_lab("sshd", "ssh", "ssh-keygen", "curl")
    with Lab(tmp_path_factory.mktemp("ssh"), private=("/tmp/ray", "/opt/own")) as lab:
        lab.give_homes("/opt/own/home")
        lab.start_ssh()
        yield lab


@pytest.fixture(scope="module")
def laptop(lab: Lab, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Laptop]:
    """One cluster for all tests that can share one."""
    laptop = Laptop(lab, tmp_path_factory.mktemp("laptop"))
    printed = laptop.up()
    for name in ("node1", "node2", "node3"):
        assert re.search(rf"{name}: is up after .* s, \d+ cores, Python 3\S+, Ray 2.60.0", printed)
    assert printed.count("(head)") == 1
    yield laptop
    printed = laptop.down()
    for name in ("node1", "node2", "node3"):
        assert f"{name}: stopped, nothing is left" in printed
    assert not (laptop.folder / "home" / "clusters" / "lab").exists()
    nothing_left(lab)


def test_the_doctor_looks_at_every_host(laptop: Laptop) -> None:
    printed = laptop.ok("doctor", "--on", "lab.yaml")
    assert len(re.findall(r"ok +node\d +\d+ cores, .* in use, .* free at home", printed)) == 3


def test_up_again_changes_nothing(laptop: Laptop) -> None:
    before = laptop.record()
    printed = laptop.up()
    assert len(re.findall(r"node\d: is up already", printed)) == 3
    assert laptop.record() == before


def test_a_run_outlives_the_laptop_and_comes_home(laptop: Laptop) -> None:
    words = ("--workers", "6", "--name", "long", "--stop-time", "10m", "--algo", "ppo", "steps=32")
    laptop.start("train", "my_envs:Warehouse", "--on", "lab.yaml", *words)
    run = laptop.run("long")
    wait_for(lambda: (run / "metrics.jsonl").exists(), "metrics at home", 300)
    assert "sending" in laptop.output
    laptop.lab.login.run(["pkill", "-9", "-f", "fever train"])  # the laptop's side is gone
    wait_for(lambda: not any("ssh" in line for line in laptop.lab.login.processes().values()), "end of ssh")
    (row,) = json.loads(laptop.ok("jobs", "--json"))
    assert (row["state"], row["run"]) == ("running", str(run))
    (row,) = json.loads(laptop.ok("runs", "--json"))
    assert (row["run"], row["status"]) == ("long", "running")
    assert "belongs to lab-1, which has not ended" in laptop.refused("resume", "long")
    the_board_shows_it_train(laptop, "long")

    attached = laptop.start("attach", "long")
    wait_for(lambda: "starting Ray and 6 workers" in laptop.output, "the whole history")
    attached.send_signal(signal.SIGINT)
    attached.wait(60)
    assert "detached; the job continues" in laptop.output
    printed = laptop.ok("stop", "long")
    assert f"has saved and stopped; resume it with: fever resume {run}" in printed
    summary = json.loads((run / "summary.json").read_text())
    assert set(summary["hosts"]) == {"node1", "node2", "node3"}
    assert summary["stop_reason"] == "interrupted"
    assert digests(run) == digests(laptop.there("long"))
    assert "all of it is here, verified" in laptop.ok("fetch", "long")

    laptop.ok("fetch", "long", "--to", "results")
    assert digests(laptop.folder / "results" / "long") == digests(run)
    assert laptop.ok("logs", "long") == (run / "job" / "log.txt").read_text()

    exit_file = run / "job" / "exit.json"
    exit_file.write_text(json.dumps({**json.loads(exit_file.read_text()), "home": False}))
    (run / "metrics.jsonl").write_text("")  # as if the laptop had not seen the end
    before = summary["steps"]
    done = laptop.fever("resume", "long", "--on", "lab.yaml", "--stop-steps", str(before + 1), "--json")
    assert done.returncode == 0, done.stderr
    again = json.loads(done.stdout.splitlines()[-1])
    assert again["steps"] > before
    iterations = [json.loads(line)["iteration"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert iterations == list(range(1, again["iterations"] + 1))  # nothing of the first job is lost
    assert (again["stop_reason"], again["run"]) == ("steps", str(run))


def the_board_shows_it_train(laptop: Laptop, run: str) -> None:
    board = laptop.start("board", "--on", "lab.yaml", "--no-browser", "--port", "0")
    url = wait_for(lambda: re.search(r"^(http\S+)  shows", laptop.output), "page")[1]

    def row() -> dict[str, Any]:
        rows = json.loads(laptop.lab.login.run(["curl", "-s", f"{url}api/runs"]).stdout)["runs"]
        return next(row for row in rows if row["id"] == run)

    before = row()
    assert (before["state"], before["elsewhere"], before["host"]) == ("running", True, laptop.record()["head"])
    wait_for(lambda: row()["steps"] > before["steps"], "new rows")
    board.send_signal(signal.SIGTERM)
    assert board.wait(60) == 0
    wait_for(lambda: not any("ssh" in line for line in laptop.lab.login.processes().values()), "end of ssh")


@pytest.mark.slow
def test_an_algorithm_of_the_user_and_weights_go_along(laptop: Laptop) -> None:
    (laptop.folder / "my_algos.py").write_text("from fever.algos.ppo import PPO\n\n\nclass Mine(PPO): ...\n")
    words = ("my_envs:Warehouse", "--algo", "my_algos:Mine", "--stop-iterations", "1", "steps=32")
    laptop.ok("train", *words, "--name", "first")
    done = laptop.fever(
        "train", *words, "--name", "mine", "--from", "first", "--on", "lab.yaml", "--workers", "1", "--json"
    )
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout.splitlines()[-1])
    assert (summary["algo"], summary["iterations"]) == ("my_algos:Mine", 1)
    first, mine = laptop.run("first"), laptop.run("mine")
    assert f"start_from: {first}:1" in (mine / "config.yaml").read_text()
    assert f"weights of {first}:1: policy0" in (mine / "job" / "log.txt").read_text()
    sent = laptop.there("mine") / "job" / "start_from"
    assert digests(sent) == digests(first / "checkpoints" / "00000001")
    said = laptop.refused("tune", *words, "gamma=choice(0.9)", "--from", "first", "--on", "lab.yaml")
    assert "--from: the machines of a cluster do not share the weights" in said


def test_a_missing_import_is_said_at_once_with_the_host(laptop: Laptop) -> None:
    laptop.write_environment("node3")
    try:
        done = laptop.fever("train", "my_envs:Warehouse", "--on", "lab.yaml", "--workers", "1", "--name", "missing")
    finally:
        laptop.write_environment()
    assert done.returncode == 2
    assert "on node3: " in done.stdout
    assert "libwarehouse.so is not here" in done.stdout
    assert not (laptop.there("missing") / "config.yaml").exists()


@pytest.mark.slow
def test_strangers_are_refused(laptop: Laptop) -> None:
    record = laptop.record()
    head, other = laptop.lab[record["head"]], laptop.lab["node2"]
    port = record["dashboard"]

    def asks(machine: Machine, url: str, token: str = "") -> str:
        header = ["-H", f"Authorization: Bearer {token}"] if token else []
        words = ["curl", "-s", "-o", "/dev/null", "-m", "60", "-w", "%{http_code}", *header, url]
        return machine.run(words).stdout

    token = (laptop.folder / "home/clusters/lab/token").read_text()
    assert asks(head, f"http://127.0.0.1:{port}/api/jobs/", token) == "200"
    assert asks(head, f"http://127.0.0.1:{port}/api/jobs/") == "401"
    assert asks(head, f"http://127.0.0.1:{port}/api/jobs/", "wrong") in ("401", "403")
    assert asks(other, f"http://{head.address}:{port}/") == "000"  # nothing listens there
    code = f"import ray; ray.init('{record['address']}', log_to_driver=False); print('connected')"
    for secret, connected in (("wrong", False), (token, True)):
        variables = {**laptop.variables, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secret}
        done = other.run([sys.executable, "-c", code], env=variables)
        assert ("connected" in done.stdout) is connected, done.stderr


def test_the_tunnel_has_the_pages(laptop: Laptop, tmp_path: Path) -> None:
    tunnel = laptop.start("tunnel", "lab.yaml")
    wait_for(lambda: "Ctrl-C closes it" in laptop.output, "tunnel")
    page = re.search(r"Ray dashboard +(http\S+):(\d+)/(\?key=\S+)", laptop.output)
    tensorboard = re.search(r"TensorBoard +(http\S+)", laptop.output)
    board = re.search(r"fever board +(http\S+)", laptop.output)
    assert page is not None
    assert tensorboard is not None
    assert board is not None
    browser = ("-L", "-b", str(tmp_path / "cookies"), "-c", str(tmp_path / "cookies"))

    def code(url: str, *words: str) -> str:
        return laptop.lab.login.run(["curl", "-s", "-o", "/dev/null", "-w", "%{http_code}", *words, url]).stdout

    here, port = f"{page[1]}:{page[2]}", page[2]
    assert f"port {port} is taken here" in laptop.refused("tunnel", "lab.yaml", "--port", port)
    assert code(f"{here}/") == "401"
    assert code(f"{here}/{page[3]}", *browser) == "200"
    assert code(f"{here}/api/jobs/", *browser) == "200"
    assert code(f"{here}/api/jobs/", *browser, "-X", "POST") == "405"
    assert (laptop.folder / "home/clusters/lab/token").read_text() not in (tmp_path / "cookies").read_text()
    assert code(board[1]) == "200"
    wait_for(lambda: code(tensorboard[1]) == "200", "TensorBoard", 60, 0.5)
    tunnel.send_signal(signal.SIGINT)
    assert tunnel.wait(60) == 0
    wait_for(lambda: not laptop.lab.login.processes(), "end of what the tunnel started")


@pytest.mark.slow
def test_two_clusters_on_the_same_hosts_do_not_meet(laptop: Laptop, tmp_path: Path) -> None:
    other = Laptop(laptop.lab, tmp_path / "other", hosts=["node1", "node2"])
    other.up()
    try:
        assert other.record()["address"] != laptop.record()["address"]
        shown = json.loads(other.ok("status", "lab.yaml", "--json"))
        assert [row["state"] for row in shown["hosts"]] == ["up", "up"]
        assert shown["jobs"] == []
    finally:
        other.down()
    shown = json.loads(laptop.ok("status", "lab.yaml", "--json"))
    assert [row["state"] for row in shown["hosts"]] == ["up"] * 3


@pytest.mark.slow
def test_a_ray_that_runs_already_takes_jobs(lab: Lab, tmp_path: Path) -> None:
    """Somebody else's, with a token of theirs; only its page can be reached."""
    node, secret, folder = lab["node2"], "f" * 64, f"/tmp/fever-test-{tmp_path.name[-8:]}"
    auth = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secret}
    ports = ["--port=7379", "--dashboard-port=9265", "--dashboard-host=0.0.0.0", "--dashboard-agent-listen-port=0"]
    words = [str(Path(sys.executable).with_name("ray")), "start", "--head", "--block", *ports, f"--temp-dir={folder}"]
    laptop = Laptop(lab, tmp_path / "laptop")
    with open(tmp_path / "ray.log", "w") as log:
        path = f"{Path(sys.executable).parent}:{laptop.variables['PATH']}"  # whose python has all that is needed
        variables = lab.variables(**auth, RAY_USAGE_STATS_ENABLED="0", PATH=path)
        foreign = node.popen(words, env=variables, stdout=log, stderr=log)
    try:
        wait_for(lambda: node.listens(9265) and node.listens(7379), "Ray")
        on = ("--on", f"{node.address}:7379", "--name", "guest", "--stop-steps", "3000", "--workers", "2")
        train = ("train", "my_envs:Warehouse", *on)
        assert "refuses the token" in laptop.refused("train", "CartPole-v1", "--on", f"http://{node.address}:9265")
        laptop.variables |= auth
        printed = laptop.ok(*train)
        assert "the step limit was reached" in printed
        summary = json.loads((laptop.run("guest") / "summary.json").read_text())
        assert set(summary["hosts"]) == {"node2"}
        assert "ended    exit code 0" in laptop.ok("jobs")
    finally:
        foreign.kill_all()
        subprocess.run(["rm", "-rf", folder], check=True)
    assert "no Ray answers at" in laptop.refused(*train[:-6], "--on", f"{node.address}:7379", "--name", "other")


@pytest.mark.slow
def test_an_environment_is_made_once_without_a_network(lab: Lab, tmp_path: Path) -> None:
    """From a folder of wheels, in a home of its own; the second time it is there."""
    wheels, constraints = tmp_path / "wheels", ROOT / "fever" / "constraints.txt"
    environment = describe_environment(extras=())  # PyTorch would take minutes
    words = ["download", "--quiet", "--disable-pip-version-check", "-c", str(constraints), "-d", str(wheels)]
    subprocess.run([sys.executable, "-m", "pip", *words, *environment.requirements], check=True, timeout=600)
    laptop = Laptop(lab, tmp_path / "laptop", hosts=["node1"], python=None, wheels=str(wheels), extras=[])
    first = laptop.ok("up", "lab.yaml", timeout=400)
    assert f"node1: environment {environment.name} in" in first
    laptop.down()
    assert "environment" not in laptop.up()
    job = laptop.train("--name", "made", "--workers", "1")
    laptop.wait_for_steps(job)
    there = laptop.there("made")
    printed = laptop.down()
    assert f"{job}: asked to save and stop" in printed
    assert f"{job}: fetched and verified, {laptop.run('made')}" in printed
    made = rf"environment {environment.name}-3\.\d+-\w+"
    copy = rf"the copy of a run in {laptop.settings['runs']} \(.*B\)"
    assert re.search(rf"node1: stopped, nothing is left but {made} \(.*B\), {copy}\n", printed)
    assert "fever down lab.yaml --purge removes its environments, those unused for 30 days, and copies" in printed
    assert json.loads((laptop.run("made") / "summary.json").read_text())["stop_reason"] == "interrupted"
    assert digests(laptop.run("made")) == digests(there)
    printed = laptop.ok("down", "lab.yaml", "--purge")
    assert re.search(rf"node1: removed {made} \(.*B\)\nnode1: removed {there.parent} \(", printed)
    assert not there.parent.exists()
    assert lab["node1"].run(["sh", "-c", "ls -A /opt/own/home/.fever/environments"]).stdout == ""


def test_a_host_without_a_package_registry_says_so(lab: Lab, tmp_path: Path) -> None:
    laptop = Laptop(lab, tmp_path / "laptop", hosts=["node1"], python=None, extras=[])
    sentence = r"no package registry answers it \(Temporary failure in name resolution\); set `wheels:` to a folder"
    done = laptop.fever("doctor", "--on", "lab.yaml")
    assert done.returncode != 0
    assert re.search(rf"node1 +{sentence}", re.sub(r"\s+", " ", done.stdout))
    assert re.search(f"node1: {sentence}", laptop.refused("up", "lab.yaml"))
    made = lab["node1"].run(["sh", "-c", "ls -A /opt/own/home/.fever/environments"]).stdout.split()
    assert [name for name in made if not name.endswith(".lock")] == []
    empty = tmp_path / "empty"
    empty.mkdir()
    laptop.change(wheels=str(empty))
    assert re.search(rf"node1: wheels: {empty} on it has no ray that fits Python 3", laptop.refused("up", "lab.yaml"))


BAD = {
    "unknown host": ({"hosts": ["nowhere"]}, r"nowhere: there is no host of this name"),
    "no answer": ({"hosts": ["server"]}, r"server: nothing listens on its ssh port"),
    "unknown key": ({"options": ["-o", "UserKnownHostsFile=/dev/null"]}, r"node1: its host key is not known here"),
    "changed key": ({"options": ["-o", "UserKnownHostsFile={swapped}"]}, r"node1: its host key has changed"),
    "refused key": ({"options": ["-F", "{stranger}"]}, r"node1: it refused the key"),
    "no such Python": ({"python": "/nowhere/python"}, r"node1: it has no python3"),
    "without Ray": ({"python": "/usr/bin/python3"}, r"node1: /usr/bin/python3 has no ray"),
    "full disk": ({"scratch": "/opt/own/full"}, r"node1: its disk is full: /opt/own/full has 0.0 GB"),
    "too few": ({"hosts": ["node1", "nowhere"], "min_hosts": 2}, r"1 of 2 hosts can be used, nothing is up"),
    "no extra": ({"extras": ["nope"]}, r"nope"),
    "no hosts": ({"hosts": []}, r"hosts=\[\] cannot be used"),
    "an option": ({"hosts": ["-oProxyCommand=x"]}, r"is not the name of a host"),
    "twice": ({"hosts": ["node1", "node1"]}, r"a host is named twice"),
}


@pytest.mark.parametrize("case", BAD)
def test_mistakes_are_one_sentence_and_nothing_stays(case: str, lab: Lab, tmp_path: Path) -> None:
    settings, sentence = BAD[case]
    swapped, stranger = tmp_path / "known_hosts", tmp_path / "config"
    known = [line.split(" ", 1) for line in (lab.ssh_folder / "known_hosts").read_text().splitlines()]
    others = [key for _, key in known[1:] + known[:1]]
    swapped.write_text("".join(f"{name} {other}\n" for (name, _), other in zip(known, others, strict=True)))
    stranger.write_text(f"Host *\n  UserKnownHostsFile {lab.ssh_folder}/known_hosts\n  IdentityFile /dev/null\n")
    lab["node1"].run(["sh", "-c", "mkdir -p /opt/own/full; mount -t tmpfs -o size=1m tmpfs /opt/own/full"], check=True)
    fill = {"swapped": str(swapped), "stranger": str(stranger)}
    options = [word.format(**fill) for word in settings.get("options", ())]
    one = {"hosts": ["node1"], "connect_seconds": 30, **settings, **({"options": options} if options else {})}
    laptop = Laptop(lab, tmp_path / "laptop", **one)
    assert re.search(sentence, laptop.refused("up", "lab.yaml"))
    lab["node1"].run(["umount", "/opt/own/full"])
    assert not list((tmp_path / "laptop" / "home").glob("clusters/*"))


def test_a_host_that_fails_is_named_and_the_others_go_on(lab: Lab, tmp_path: Path) -> None:
    """Of three hosts one says that it has another Ray, and one is unknown."""
    for name, ray in (("node1", "2.60.0"), ("node2", "2.61.0")):
        facts = f'*PackageNotFound*) {sys.executable} "$@" | sed s/2.60.0/{ray}/;;'
        script = f'#!/bin/sh\ncase "$2" in {facts} *) exec {sys.executable} "$@";; esac\n'
        lab[name].run(["sh", "-c", f"cat > /opt/own/python <<'END'\n{script}END\nchmod +x /opt/own/python"], check=True)
    laptop = Laptop(lab, tmp_path, hosts=["node1", "node2", "nowhere"], python="/opt/own/python")
    printed = laptop.up()
    assert "nowhere: there is no host of this name" in printed
    assert re.search(r"node2: has ray 2.61.0, but node1 has 2.60.0; they must be the same", printed)
    assert "lab is up: 1 hosts, 2 cores" in printed
    laptop.down()


@pytest.mark.slow
def test_interrupted_in_the_middle_nothing_stays(lab: Lab, tmp_path: Path) -> None:
    laptop, before = Laptop(lab, tmp_path), lab.leftovers()
    rising = laptop.start("up", "lab.yaml")
    wait_for(lambda: "node1: is up after" in laptop.output, "head")
    rising.send_signal(signal.SIGINT)
    assert rising.wait(120) == 130
    assert not list((tmp_path / "home" / "clusters").glob("*/cluster.json"))
    wait_for(lambda: set(lab.leftovers()) <= set(before), "end of what up started")


def test_what_a_killed_up_has_left_can_be_ended(lab: Lab, tmp_path: Path) -> None:
    laptop, before = Laptop(lab, tmp_path, hosts=["node1"]), lab.leftovers()
    rising = laptop.start("up", "lab.yaml")
    wait_for(lambda: len(lab.leftovers()) > len(before) + 3, "Ray")
    rising.kill()
    rising.wait(60)
    assert "node1: stopped, nothing is left" in laptop.ok("down", "lab.yaml")
    wait_for(lambda: set(lab.leftovers()) <= set(before), "end of its node")
    assert not list((tmp_path / "home" / "clusters").iterdir())


@pytest.mark.slow
@pytest.mark.flaky_under_load("three Ray nodes on two cores: a starved node is taken for a lost one")
def test_hosts_come_and_go_while_it_trains(tmp_path: Path) -> None:
    require_lab("sshd", "ssh", "ssh-keygen")
    with Lab(tmp_path / "lab", private=("/tmp/ray", "/opt/own")) as lab:
        lab.give_homes("/opt/own/home")
        lab.start_ssh()
        laptop = Laptop(lab, tmp_path / "laptop", hosts=["node1", "node2"], scratch="/opt/own")
        laptop.up()
        job = laptop.train("--algo", "impala", "--workers", "all", "--name", "elastic", "steps=16")
        laptop.wait_for_steps(job)
        laptop.change(hosts=["node1", "node2", "node3"])
        laptop.up()

        def fetched() -> Path:
            laptop.ok("fetch", job)
            return laptop.run("elastic")

        wait_for(lambda: has_helped(fetched(), "node3"), "episodes of the new host", pause=0.5)
        lab["node2"].crash()
        wait_for(lambda: "left with its machine" in (fetched() / "log.txt").read_text(), "workers that went", pause=0.5)
        laptop.ok("stop", job)
        summary = json.loads((laptop.run("elastic") / "summary.json").read_text())
        assert set(summary["hosts"]) == {"node1", "node2", "node3"}
        done = laptop.fever("down", "lab.yaml")
        assert "node1: stopped, nothing is left" in done.stdout
        assert "node2: left: unknown, perhaps everything: it does not answer" in done.stdout
        assert done.returncode == 2
        assert "lab is down" in laptop.ok("down", "lab.yaml", "--force")
        for machine in (lab["node1"], lab["node3"]):
            assert machine.processes() == {}
