"""A laptop, a login node that ssh reaches, and Slurm behind it, where the user is not root."""

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
from tests.helpers import ROOT, WAREHOUSE, wait_for
from tests.lab.machines import Command, Lab, require_lab
from tests.lab.site import metrics, summary
from tests.lab.users import NUMBER, add_user, open_folder

pytestmark = [
    pytest.mark.lab,
    pytest.mark.flaky_under_load("several Ray nodes on two cores: a starved node is taken for a lost one"),
]

LATER = "now+1hour"
FEVER = [sys.executable, "-m", "fever"]
PROFILE = "export SLURM_CONF={conf} PATH={bin}:$PATH\necho Welcome\nread -r answer\n"  # what login shells may do
SHARED = ("ControlMaster=auto", "ControlPath={folder}/%C", "ControlPersist=60")  # one login for all commands


class Laptop:
    """A user of the login node at a machine without a scheduler, which shares nothing with the cluster."""

    def __init__(self, lab: Lab, home: Path, folder: Path) -> None:
        self.lab, self.home, self.folder = lab, home, folder
        (folder / "my_envs").mkdir(parents=True)
        (folder / "my_envs" / "__init__.py").write_text(WAREHOUSE % ((),))
        self.variables = {name: value for name, value in lab.variables().items() if name != "SLURM_CONF"}
        self.variables |= {"FEVER_HOME": str(folder / "home"), "COLUMNS": "120", "PYTHONPATH": str(ROOT)}
        self.node = {"host": "login", "user": home.name, "options": ["-F", str(lab.ssh_config)]}
        self.describe("kestrel.yaml", python=sys.executable)

    def describe(self, file: str, begin: str = "now", **login: Any) -> None:
        """Write a site's file, of jobs that begin then."""
        site = {"kind": "slurm", "nodes": 3, "cpus_per_node": 2, "time": "10m", "options": [f"--begin={begin}"]}
        (self.folder / file).write_text(yaml.safe_dump({**site, "login": self.node | login}))

    def start(self, *words: str) -> Command:
        """A command that goes on; what it prints is in `output`."""
        with open(self.folder / "output", "w") as output:
            return self.lab.server.popen(
                [*FEVER, *words], cwd=self.folder, env=self.variables, stdout=output, stderr=output
            )

    @property
    def output(self) -> str:
        return (self.folder / "output").read_text()

    def fever(self, *words: str) -> subprocess.CompletedProcess[str]:
        return self.lab.server.run([*FEVER, *words], cwd=self.folder, env=self.variables)

    def ok(self, *words: str) -> str:
        done = self.fever(*words)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout + done.stderr

    def train(self, *words: str) -> str:
        """Begin to train detached; returns the job's name."""
        said = self.ok("train", *words, "--detach")
        found = re.search(r"submitted (\S+):", said)
        assert found is not None
        return found[1]

    def run(self, name: str) -> Path:
        return self.folder / "runs" / name

    def there(self) -> set[str]:
        """What the user has on the login node: folders up to those of jobs, and what is in these."""
        places = self.home.rglob("*")
        return {"/".join(path.relative_to(self.home).parts[:4]) for path in places if path.is_file()}

    def job_folders(self) -> list[Path]:
        return sorted((self.home / ".fever" / "runs").glob("*"))

    def processes(self) -> list[str]:
        """What runs on the login node and on the machines behind it."""
        return [*self.lab.login.processes().values(), *self.lab.leftovers()]

    def jobs(self) -> list[dict[str, str]]:
        rows: list[dict[str, str]] = json.loads(self.ok("jobs", "--json").splitlines()[-1])
        return rows


def digests(folder: Path) -> dict[str, str]:
    names = [path for path in folder.rglob("*") if path.is_file() and path.parent.name != "job"]
    return {path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest() for path in names}


@pytest.fixture(scope="module")
def laptop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Laptop]:
    require_lab("sshd", "ssh", "ssh-keygen", "slurmctld", "slurmd", "sbatch", "munged")
    with open_folder() as folder, Lab(folder / "lab") as lab:
        home = add_user(lab, "ada")
        lab.start_ssh()
        lab.start_slurm()
        (home / ".profile").write_text(PROFILE.format(conf=lab.environment["SLURM_CONF"], bin=f"{sys.base_prefix}/bin"))
        yield Laptop(lab, home, tmp_path_factory.mktemp("laptop"))


def test_a_queued_job_is_seen_and_cancelled_from_the_laptop(laptop: Laptop) -> None:
    assert "problem" not in (said := laptop.ok("doctor", "--on", "kestrel.yaml"))
    assert re.search(r"ok +environment +Python 3\.\d+\.\d+, Ray 2", said)
    assert re.search(r"ok +scheduler +scontrol: Slurmctld\(primary\) at server is UP", said)
    assert laptop.there() == {".profile"}
    shared = (word for setting in SHARED for word in ("-o", setting.format(folder=laptop.folder)))
    laptop.describe("later.yaml", LATER, python=sys.executable, options=[*laptop.node["options"], *shared])
    job = laptop.train("CartPole-v1", "--name", "waiting", "--on", "later.yaml")
    assert job == "later-1"
    (row,) = laptop.jobs()
    assert (row["job"], row["state"]) == (job, "queued")
    assert "BeginTime" in row["reason"]
    assert {path.name for path in laptop.job_folders()[0].iterdir()} == {"code", "records", "waiting"}
    assert laptop.job_folders()[0].stat().st_uid == NUMBER
    assert "later-1 is cancelled" in laptop.ok("stop", "waiting")
    assert laptop.jobs()[0]["state"] == "ended"
    assert [path.name for path in laptop.job_folders()[0].iterdir()] == ["waiting"]
    wait_for(lambda: not laptop.processes(), "end of all processes")


@pytest.mark.slow
def test_a_run_is_followed_through_the_login_node(laptop: Laptop) -> None:
    """It outlives its connection and the laptop, is stopped and resumed from there, and comes home whole."""
    words = ("--on", "kestrel.yaml", "--name", "one")
    command = laptop.start("train", "my_envs:Warehouse", "--stop-time", "10m", *words)
    wait_for(lambda: "training my_envs:Warehouse" in laptop.output, "training", 300)
    assert str(laptop.run("one")) in laptop.output
    seen = len(wait_for(lambda: metrics(laptop.run("one")), "metrics", 300))
    lost = [pid for pid, line in laptop.lab.server.processes().items() if line.startswith("ssh ")]
    laptop.lab.server.run(["kill", *map(str, lost)], check=True)
    wait_for(lambda: "the connection broke" in laptop.output, "lost connection")
    wait_for(lambda: len(metrics(laptop.run("one"))) > seen, "metrics over a new connection")
    command.send_signal(signal.SIGINT)
    assert (command.wait(60), "detached; the job continues" in laptop.output) == (0, True)

    job = next(row for row in laptop.jobs() if row["run"] == str(laptop.run("one")))
    assert job["state"] == "running"
    assert "training my_envs:Warehouse" in laptop.ok("logs", job["job"])
    assert not {"token", "ranks", "plan.json"} & {path.name for path in (laptop.run("one") / "job").iterdir()}
    assert f"{job['job']} has saved and stopped; resume it with: fever resume {laptop.run('one')}" in laptop.ok(
        "stop", job["job"]
    )
    (there,) = (path for path in laptop.job_folders() if (path / "one").is_dir())
    assert [path.name for path in there.iterdir()] == ["one"]
    assert digests(there / "one") == digests(laptop.run("one"))
    steps = metrics(laptop.run("one"))[-1]["steps"]

    again = laptop.ok("resume", "one", "--on", "kestrel.yaml", "--stop-steps", str(steps + 10_000))
    assert "the step limit was reached" in again
    assert summary(laptop.run("one"))["steps"] >= steps + 10_000
    assert set(summary(laptop.run("one"))["hosts"]) == {"node1", "node2", "node3"}
    assert [path.name for path in there.iterdir()] == ["one"]
    assert digests(there / "one") == digests(laptop.run("one"))
    assert laptop.there() <= {".profile", *(f".fever/runs/{path.name}/{name}" for path in laptop.job_folders()
                                            for name in ("one", "waiting"))}  # fmt: skip
    wait_for(lambda: not laptop.processes(), "end of all processes")
    assert not [path for path in Path("/tmp").glob("fever-ray-*") if path.stat().st_uid == NUMBER]


@pytest.mark.slow
def test_the_environment_is_made_there_once(laptop: Laptop, tmp_path: Path) -> None:
    """From a folder of wheels, since the lab has no package registry."""
    wheels, constraints = laptop.lab.folder / "wheels", ROOT / "fever" / "constraints.txt"
    environment = describe_environment(extras=())  # PyTorch would take minutes
    words = ["download", "--quiet", "--disable-pip-version-check", "-c", str(constraints), "-d", str(wheels)]
    subprocess.run([sys.executable, "-m", "pip", *words, *environment.requirements], check=True, timeout=600)
    laptop.describe("bare.yaml", LATER, wheels=str(wheels), extras=[])
    assert "ok      environment    is set up by the first job" in laptop.ok("doctor", "--on", "bare.yaml")
    words = ["train", "CartPole-v1", "--on", "bare.yaml", "--detach", "--name"]
    assert f"login: environment {environment.name} in" in laptop.ok(*words, "bare")
    assert re.search(r"ok +environment +Python 3\S+, Ray 2", laptop.ok("doctor", "--on", "bare.yaml"))
    assert "environment" not in laptop.ok(*words, "again")
    made = laptop.home / ".fever" / "environments"
    assert [path.name.partition("-")[0] for path in made.iterdir() if path.is_dir()] == [environment.name]
    for name in ("bare", "again"):
        assert "is cancelled" in laptop.ok("stop", name)
