"""Ray's configuration of a cluster on AWS, its permissions, prices, and the log of its launcher."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from fever.errors import FeverError
from fever.launch.aws import config as aws_config
from fever.launch.aws import cost, launcher
from fever.launch.aws.resources import Facts, Names
from tests.lab.cloud import REGION, Call, Permissions
from tests.launch.aws.helpers import make_target

pytest.importorskip("boto3")

GOLDEN = Path(__file__).parents[1] / "golden" / "aws.yaml"
NAMES = Names("one", "0123abcd")
PARTS = aws_config.Parts(
    facts=Facts("ami-1", "/dev/sda1", "vpc-1", ("subnet-1", "subnet-2")),
    group="sg-1",
    profile=NAMES.full,
    key=Path("/home/me/.fever/clusters/one/key.pem"),
    files=Path("/home/me/.fever/clusters/one/files"),
    requirements=("ray[default]>=2.60,<2.61", "boto3"),
)


def rendered(**more: Any) -> dict[str, Any]:
    return aws_config.render(make_target(**more), NAMES, PARTS)


def test_rendered_configuration() -> None:
    text = yaml.safe_dump(rendered(), sort_keys=False, width=120)
    if os.environ.get("FEVER_GOLDEN"):  # write it anew, and look at the difference
        GOLDEN.write_text(text)
    assert text == GOLDEN.read_text()


def test_ray_accepts_the_configuration() -> None:
    aws_config.check(rendered())
    aws_config.check(rendered(python="/opt/py/bin/python", cpus_per_node=1, scratch="/mnt"))
    with pytest.raises(Exception, match="two"):
        aws_config.check({**rendered(), "max_workers": "two"})


def test_settings_that_change_the_configuration() -> None:
    config = rendered(
        workers={"count": 3, "least": 1, "spot": False}, cpus_per_node=4, env={"A": "b c"}, scratch="/mnt"
    )
    worker = config["available_node_types"]["worker"]
    assert (worker["min_workers"], worker["max_workers"], config["max_workers"]) == (1, 3, 3)
    assert "InstanceMarketOptions" not in worker["node_config"]
    assert worker["resources"] == {"CPU": 4, "fever_worker": 1}
    assert all("A='b c'" in config[f"{kind}_start_ray_commands"][1] for kind in ("head", "worker"))
    assert "--temp-dir=/mnt/ray" in config["head_start_ray_commands"][1]
    ready = rendered(python="/opt/py/bin/python")
    assert ready["setup_commands"] == []
    assert set(ready["file_mounts"]) == {"~/.fever/files"}
    assert ready["head_start_ray_commands"][0].startswith("/opt/py/bin/python ")


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        ({"workers": {"count": 2, "least": 3}}, "least=3 is more than count=2"),
        ({"allow": "everybody"}, "allow='everybody' cannot be used"),
        ({"interface": "ib0"}, "instances have one network interface"),
        ({"spot": True}, "has no setting spot"),
        ({"region": None}, "region"),
    ],
)
def test_settings_that_are_refused(more: dict[str, Any], sentence: str) -> None:
    with pytest.raises(FeverError, match=sentence):
        make_target(**more)


def test_installs_exactly_what_is_asked_for(tmp_path: Path) -> None:
    """The commands for an instance, run by a shell with a Python that only notes what it is told."""
    said, site = tmp_path / "said", tmp_path / "site"
    site.mkdir()
    note = f'#!/bin/bash\nprintf "%s\\n" "$*" >> {said}\nif [ "$1" = -c ]; then echo {site}; fi\n'
    make = f'if [ "$2" = venv ]; then mkdir -p "$3/bin"; cp {tmp_path}/bin/python3 "$3/bin/python"; fi\n'
    python = tmp_path / "bin" / "python3"
    python.parent.mkdir()
    python.write_text(note + make)
    python.chmod(0o755)
    environment = {"PATH": f"{python.parent}:/usr/bin:/bin", "HOME": str(tmp_path / "home")}
    for command in rendered(packages=["my-envs==1.0"])["setup_commands"]:
        subprocess.run(["bash", "-c", command], env=environment, check=True)
    fever = tmp_path / "home" / ".fever"
    lines = said.read_text().splitlines()
    assert f"-m venv {fever}/env" in lines
    pip = next(line for line in lines if line.startswith("-m pip install"))
    assert pip.endswith(f"-c {fever}/files/constraints.txt ray[default]>=2.60,<2.61 boto3")


def test_the_policy_is_documented_statement_by_statement() -> None:
    statements = aws_config.policy()["Statement"]
    assert [row["Sid"] for row in statements] == list(aws_config.explain_policy())
    assert all(set(row) <= {"Sid", "Effect", "Action", "Resource", "Condition"} for row in statements)
    assert "arn:aws-cn:ec2" in json.dumps(aws_config.policy("cn-north-1"))
    with pytest.raises(FeverError, match="AWS has no region 'nowhere'"):
        aws_config.policy("nowhere")


def test_permissions_of_the_lab_look_at_tags() -> None:
    """An instance's key pair has the cluster's name too, which is no tag."""
    values = {"KeyName": NAMES.full, "ImageId": "ami-1"}
    for number, kind in enumerate(("instance", "volume"), 1):
        tag = f"TagSpecification.{number}"
        values |= {f"{tag}.ResourceType": kind, f"{tag}.Tag.1.Key": "a", f"{tag}.Tag.1.Value": NAMES.full}
        values |= {f"{tag}.Tag.2.Key": "ray-cluster-name", f"{tag}.Tag.2.Value": NAMES.full}
    head = Permissions(aws_config.head_policy(NAMES, REGION))
    head.check(Call("head", "ec2:RunInstances", values))
    for name in ("TagSpecification.1.Tag.2.Value", "TagSpecification.2.Tag.2.Key"):
        with pytest.raises(AssertionError, match="head may not ec2:RunInstances"):
            head.check(Call("head", "ec2:RunInstances", {**values, name: "another"}))


LAUNCH_FAILED = """
2026-11-16 08:34:23,557\tINFO commands.py:1 -- Acquiring an up-to-date head node
2026-11-16 08:34:23,557\tWARN node_provider.py:473 -- create_instances: Attempt failed with An error occurred \
(VcpuLimitExceeded) when calling the RunInstances operation: You have requested more vCPU capacity, retrying.
2026-11-16 08:34:23,578\tPANIC node_provider.py:468 -- Failed to launch instances. Max attempts exceeded.
"""
COMMAND_FAILED = """
total size is 387  speedup is 0.95
2026-11-16 08:34:22,538\tVVINFO command_runner.py:401 -- Full command is `ssh`
bash: /nonexistent/python: No such file or directory
2026-11-16 08:34:22,557\tINFO log_timer.py:25 -- NodeUpdater: i-b6: Ray start commands failed [LogTimer=18ms]
2026-11-16 08:34:23,567\tERR updater.py:177 -- \x1b[31mNew status: update-failed\x1b[39m
2026-11-16 08:34:23,569\tERR updater.py:193 -- Error message: SSH command failed.
2026-11-16 08:34:23,578\tPANIC commands.py:925 -- Failed to setup head node.
"""


def test_the_reason_is_found_in_the_launchers_log() -> None:
    assert "You have requested more vCPU capacity" in launcher.failure_reason(LAUNCH_FAILED)
    assert launcher.failure_reason(COMMAND_FAILED) == "bash: /nonexistent/python: No such file or directory"
    assert launcher.failure_reason("Traceback\nKeyError: 'x'\n") == "Traceback; KeyError: 'x'"
    assert launcher.failure_reason("") == "it printed nothing"


def test_prices() -> None:
    spot_share = cost.price_table()["spot_share"]
    assert cost.price(REGION, "m5.large", spot=False, disk=0) == 0.096
    assert cost.price(REGION, "m5.2xlarge", spot=False, disk=0) == 0.384
    assert cost.price(REGION, "g5.xlarge", spot=False, disk=0) == 1.006
    assert cost.price(REGION, "m5.large", spot=True, disk=0) == pytest.approx(0.096 * spot_share, abs=1e-4)
    assert cost.price(REGION, "m5.large", spot=False, disk=730) == pytest.approx(0.096 + 0.08)
    assert cost.price(REGION, "x9.large", spot=False, disk=50) is None
    assert cost.price("mars-north-1", "m5.large", spot=False, disk=50) is None


def test_what_a_plan_costs() -> None:
    target = make_target(workers={"type": "m5.large", "count": 4, "least": 1, "spot": False}, disk=73)
    text = "\n".join(cost.describe_plan(target, "one", "ami-1"))
    assert "head     m5.large, 73 GB: 0.104 USD/h" in text  # 0.096 for the instance, 0.008 for the disk
    assert "workers  4 x m5.large, 73 GB: 0.104 USD/h each; 1 stay when nothing runs" in text
    assert "about 0.52 USD/h while it trains, 0.21 USD/h when nothing runs, until fever down (AWS's list prices" in text
    text = "\n".join(cost.describe_plan(make_target(workers={"type": "x9.large"}), "one", "ami-1"))
    assert "price unknown each" in text
    assert "what it costs is unknown" in text
