"""The whole life of a cluster on AWS, with Ray's real launcher, on machines made of namespaces; AWS itself is moto."""

from __future__ import annotations

import json
import re
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from fever.launch.aws.config import head_policy, policy
from fever.launch.aws.resources import Names
from tests.helpers import WAREHOUSE, wait_for
from tests.lab.cloud import REGION, Cloud, Permissions, own_roles
from tests.lab.machines import require_lab

pytestmark = pytest.mark.lab

pytest.importorskip("boto3")

CLUSTER: dict[str, Any] = {
    "kind": "aws",
    "region": REGION,
    "head": "m5.large",
    "workers": {"type": "m5.large", "count": 2, "least": 1, "spot": True},
    "allow": "1.2.3.4/32",
    "user": "root",
    "env": {"AUTOSCALER_UPDATE_INTERVAL_S": "1"},  # the autoscaler looks every second
}
NODES = """
import ray, time
ray.init("auto", log_to_driver=False, configure_logging=False)
deadline = time.time() + 240
while len(names := [n["NodeManagerHostname"] for n in ray.nodes() if n["Alive"]]) < 2 and time.time() < deadline:
    time.sleep(0.2)
print("nodes", *sorted(names))
"""
PAGE = """
import urllib.request
for address in ("127.0.0.1", "10.77.0.11"):
    try:
        print(urllib.request.urlopen(f"http://{address}:8265/api/jobs/").status)
    except OSError as error:
        print(error)
"""


@pytest.fixture(scope="module")
def cloud(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cloud]:
    require_lab("sshd", "ssh", "rsync", "ssh-keygen")
    with Cloud(tmp_path_factory.mktemp("aws")) as cloud:
        for name in ("one", "two"):
            (cloud.folder / f"{name}.yaml").write_text(yaml.safe_dump(CLUSTER))
        (cloud.folder / "my_envs.py").write_text(WAREHOUSE % ((),))
        yield cloud


def assert_nothing_left(cloud: Cloud, folder: Path) -> None:
    """AWS shows nothing, no process runs on any machine, no token and no key is in the record."""
    assert cloud.living() == []
    assert cloud.ask("ec2", "describe_key_pairs")["KeyPairs"] == []
    assert cloud.ask("ec2", "describe_volumes")["Volumes"] == []
    assert {row["GroupName"] for row in cloud.ask("ec2", "describe_security_groups")["SecurityGroups"]} == {"default"}
    assert not own_roles(cloud.ask("iam", "list_roles"))
    assert cloud.ask("iam", "list_instance_profiles")["InstanceProfiles"] == []
    wait_for(lambda: not cloud.lab.leftovers(), "end of all processes")
    assert not [line for line in cloud.lab.login.processes().values() if "ray.scripts" in line]
    assert {path.name for path in folder.iterdir()} <= {"up.log", "down.log"}


def on_head(cloud: Cloud, code: str) -> str:
    """What a program on the head prints that has Ray's token there."""
    variables = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": "/run/home/.fever/files/token"}
    done = cloud.lab["node1"].run([sys.executable, "-c", code], env=cloud.lab.variables(**variables), timeout=300)
    return done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.flaky_under_load("three Ray nodes and moto on two cores: a starved node is taken for a lost one")
def test_the_whole_life_of_a_cluster(cloud: Cloud) -> None:
    folder = cloud.folder / "home" / ".fever" / "clusters" / "one"
    assert "workers  2 x m5.large, spot, 50 GB" in cloud.run("up", "one.yaml", "--dry-run")
    assert not folder.exists()
    assert cloud.living() == []
    assert "one is up: workers follow; train with: fever train ENV --on one.yaml" in cloud.run("up", "one.yaml")
    run = cloud.folder / "runs" / "first"
    words = ("--on", "one.yaml", "--name", "first", "--workers", "all", "--stop-time", "15m", "--detach")
    cloud.run("train", "my_envs:Warehouse", *words)  # at once: no worker is there yet
    assert "nodes node1 node2" in on_head(cloud, NODES)
    for machine in cloud.lab.machines[:2]:  # both have been set up alike
        shown = machine.run(["cat", "/run/home/installed"]).stdout
        assert "-c /run/home/.fever/files/constraints.txt" in shown
        assert "ray[default]" in shown
    alone, outside = on_head(cloud, PAGE).splitlines()
    assert "401" in alone  # without the token
    assert "refused" in outside
    gcs = [pid for pid, line in cloud.lab["node1"].processes().items() if "gcs_server" in line]
    assert len(gcs) == 1
    assert (folder / "token").read_text() not in "\n".join(cloud.lab.leftovers())

    def helps() -> bool:  # ppo has waited for the other machine that the autoscaler launches for the run
        cloud.run("fetch", "first")
        rows = json.loads((run / "workers.json").read_text())["workers"] if (run / "workers.json").exists() else []
        return any(row["host"] == "node3" and row["episodes"] for row in rows)

    wait_for(helps, "episodes of the second machine", 400, 1.0)
    assert "has saved and stopped" in cloud.run("stop", "first")
    printed = (run / "job" / "log.txt").read_text()
    assert "machines are being launched; the run begins when they are there" in printed
    assert "all 2 machines are there after" in printed
    summary = json.loads((run / "summary.json").read_text())
    assert (summary["workers"], set(summary["hosts"])) == (6, {"node1", "node2", "node3"})

    before = json.loads((folder / "cluster.json").read_text())
    cloud.run("up", "one.yaml")
    assert json.loads((folder / "cluster.json").read_text()) == before
    assert gcs[0] in cloud.lab["node1"].processes()  # what runs there was not disturbed
    shown = json.loads(cloud.run("status", "one.yaml", "--json").splitlines()[-1])
    assert sorted((row["role"], row["spot"], row["state"]) for row in shown["cost"]["instances"]) == [
        ("head", False, "running"),
        ("worker", True, "running"),
        ("worker", True, "running"),
    ]
    assert 0 < shown["cost"]["estimate"] < 0.1
    assert [row["state"] for row in shown["hosts"]] == ["up"] * 3
    assert [(row["state"], row["reason"]) for row in shown["jobs"]] == [("ended", "exit code 130")]
    assert "so far about 0.0" in cloud.run("status", "one.yaml")

    printed = cloud.run("down", "one.yaml")
    assert "AWS: stopped, nothing is left" in printed
    assert re.search(r"one is down after .* h; it cost about 0\.0\d USD \(3 instances, .* h together; AWS's", printed)
    assert_nothing_left(cloud, folder)
    assert "nothing is left" in cloud.run("aws", "leftovers", REGION)
    assert_policies_fit(cloud, f"fever-one-{before['id']}")


def test_ctrl_c_in_the_middle_leaves_nothing(cloud: Cloud) -> None:
    started = cloud.start("up", "two.yaml")
    wait_for(cloud.living, "the head's instance", 240)
    started.send_signal(signal.SIGINT)
    _, said = started.communicate(timeout=240)
    assert started.returncode == 130, said
    assert "removing instance i-" in said
    assert_nothing_left(cloud, cloud.folder / "home" / ".fever" / "clusters" / "two")


def assert_policies_fit(cloud: Cloud, cluster: str) -> None:
    """All that the user and the head have called was allowed, and hardly anything else is."""
    user = Permissions(policy())
    head = Permissions(head_policy(Names(*cluster.removeprefix("fever-").split("-")), REGION))
    for permissions, who in ((user, "user"), (head, "head")):
        for call in cloud.calls(who):
            permissions.check(call)
    assert head.unused() <= {"ec2:TerminateInstances"}  # of workers that do nothing
    assert user.unused() == {
        "ec2:RevokeSecurityGroupIngress",  # if the caller's address changes
        "ec2:DeleteVolume",  # of clusters of Ray's
        "iam:DetachRolePolicy",
    }
