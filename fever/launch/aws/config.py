"""The configuration of Ray's launcher for a cluster on AWS, and the IAM policies of the head and of the user."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fever.launch.aws import resources
from fever.launch.aws.resources import Facts, Names
from fever.launch.clusters.ssh import shell_word
from fever.launch.rendezvous.rank import RAY

if TYPE_CHECKING:
    from fever.launch.aws.target import Aws

PORT, DASHBOARD = 6379, 8265
DEMAND = "fever_worker"  # a Ray resource of which every worker has one; a run asks for as many as there may be
HOME = "$HOME/.fever"  # on the instances


@dataclass(frozen=True)
class Parts:
    """What was created or found on AWS for a cluster, and the local files that its instances get."""

    facts: Facts
    group: str
    profile: str
    key: Path
    files: Path  # a folder with Ray's token and pip's constraints, readable by this user only
    requirements: tuple[str, ...]


def render(target: Aws, names: Names, parts: Parts) -> dict[str, Any]:
    """The configuration for `ray up`, which has only instances left to create."""
    least = target.workers.count if target.workers.least is None else target.workers.least
    market = {"InstanceMarketOptions": {"MarketType": "spot"}} if target.workers.spot else {}
    head = {**_instance(target, names, parts, target.head), "IamInstanceProfile": {"Name": parts.profile}}
    worker = {**_instance(target, names, parts, target.workers.type), **market}
    cores = {} if target.cpus_per_node is None else {"CPU": target.cpus_per_node}
    start = f"{_environment(target)} {_python(target)} -m ray.scripts.scripts"
    folder = "" if target.scratch == "/tmp" else f" --temp-dir={shlex.quote(target.scratch + '/ray')}"
    dashboard = f"--include-dashboard=true --dashboard-host=127.0.0.1 --dashboard-port={DASHBOARD}"
    scaling = "--autoscaling-config=~/ray_bootstrap_config.yaml"
    return {
        "cluster_name": names.full,
        "max_workers": target.workers.count,
        "idle_timeout_minutes": target.idle_minutes,
        "provider": {"type": "aws", "region": target.region, "cache_stopped_nodes": False},
        "auth": {"ssh_user": target.user, "ssh_private_key": str(parts.key)},
        "head_node_type": "head",
        "available_node_types": {
            "head": {"resources": {**cores}, "min_workers": 0, "max_workers": 0, "node_config": head},
            "worker": {
                "resources": {**cores, DEMAND: 1},
                "min_workers": least,
                "max_workers": target.workers.count,
                "node_config": worker,
            },
        },
        "file_mounts": {"~/.fever/files": str(parts.files)},
        "initialization_commands": [],
        "setup_commands": [] if target.python else _install(parts.requirements),
        "head_setup_commands": [],
        "worker_setup_commands": [],
        "head_start_ray_commands": [
            f"{_python(target)} -m ray.scripts.scripts stop",
            f"{start} start --head --port={PORT} {dashboard} {scaling} --disable-usage-stats{folder}",
        ],
        "worker_start_ray_commands": [
            f"{_python(target)} -m ray.scripts.scripts stop",
            f"{start} start --address=$RAY_HEAD_IP:{PORT} --disable-usage-stats",
        ],
    }


def _instance(target: Aws, names: Names, parts: Parts, kind: str) -> dict[str, Any]:
    disk = {"VolumeSize": target.disk, "VolumeType": "gp3", "DeleteOnTermination": True}
    return {
        "InstanceType": kind,
        "ImageId": parts.facts.image,
        "KeyName": names.full,
        "SubnetIds": list(parts.facts.subnets),
        "SecurityGroupIds": [parts.group],
        "BlockDeviceMappings": [{"DeviceName": parts.facts.device, "Ebs": disk}],
        "MetadataOptions": {"HttpTokens": "required"},
        "TagSpecifications": [*names.tagged("instance"), *names.tagged("volume")],
    }


def _python(target: Aws) -> str:
    return f"{HOME}/env/bin/python" if target.python is None else shell_word(target.python)


def _environment(target: Aws) -> str:
    """Shell commands before `ray start`: limits and variables; the token is in a file, never in a command line."""
    traps = ["SSH_CLIENT", "SSH_CONNECTION", "SSH_TTY"]  # bash would read ~/.bashrc for every job of Ray
    words = ["ulimit -n 65536;", "unset", *traps, *target.unset, "RAY_ADDRESS", "RAY_AUTH_TOKEN;", "export"]
    variables = {**target.env, **RAY}
    words += [f"{name}={shlex.quote(value)}" for name, value in variables.items()]
    return " ".join([*words, f'RAY_AUTH_TOKEN_PATH="{HOME}/files/token";'])


def _install(requirements: Sequence[str]) -> list[str]:
    """Shell commands that set up an environment with exactly the versions that fever was tested with."""
    python = f"{HOME}/env/bin/python"
    apt = "sudo DEBIAN_FRONTEND=noninteractive apt-get -q -o DPkg::Lock::Timeout=300"
    wanted = " ".join(map(shlex.quote, requirements))
    return [
        "cloud-init status --wait > /dev/null 2>&1 || true",  # it may still hold apt's lock
        f"python3 -c 'import ensurepip' || ({apt} update && {apt} install -y python3-venv)",
        f"test -x {python} || python3 -m venv {HOME}/env",
        f"{python} -m pip install -q --disable-pip-version-check -c {HOME}/files/constraints.txt {wanted}",
    ]


def check(config: dict[str, Any]) -> None:
    """Have Ray validate a configuration before anything is created with it."""
    from ray.autoscaler._private.util import prepare_config, validate_config

    validate_config(prepare_config(config))


def head_policy(names: Names, region: str) -> dict[str, Any]:
    """The head's IAM policy: describe instances, and launch, tag and terminate workers of its own cluster."""
    arn = f"arn:{resources.partition_of(region)}:ec2:{region}"
    new = {"StringEquals": {"aws:RequestTag/ray-cluster-name": names.full}}
    own = {"StringEquals": {"aws:ResourceTag/ray-cluster-name": names.full}}
    tagged = [f"{arn}:*:instance/*", f"{arn}:*:volume/*"]
    parts = ("network-interface", "security-group", "spot-instances-request", "subnet")
    base = [f"{arn}::image/*", f"{arn}:*:key-pair/{names.full}", *(f"{arn}:*:{part}/*" for part in parts)]
    launching = {"StringEquals": {"ec2:CreateAction": "RunInstances"}}
    rows: list[tuple[str, list[str] | str, dict[str, Any]]] = [
        ("ec2:DescribeInstances", "*", {}),
        ("ec2:RunInstances", tagged, new),
        ("ec2:RunInstances", base, {}),
        ("ec2:CreateTags", "*", launching),
        ("ec2:CreateTags", tagged[:1], own),
        ("ec2:TerminateInstances", tagged[:1], own),
    ]
    statements = [
        {"Effect": "Allow", "Action": action, "Resource": resource, **({"Condition": condition} if condition else {})}
        for action, resource, condition in rows
    ]
    return {"Version": "2012-10-17", "Statement": statements}


def policy(region: str | None = None) -> dict[str, Any]:
    """The least privileges for `fever up`, `down`, `status` and `aws leftovers`, as an IAM policy.

    `region` matters only where ARNs begin differently, such as in China.
    """
    rows = [{key: value for key, value in row.items() if key != "why"} for row in _statements()]
    document = json.dumps({"Version": "2012-10-17", "Statement": rows})
    return json.loads(document.replace("arn:aws:", f"arn:{resources.partition_of(region)}:") if region else document)


def explain_policy() -> dict[str, str]:
    """Why each statement of the policy is needed, by its Sid."""
    return {row["Sid"]: row["why"] for row in _statements()}


def _statements() -> list[dict[str, Any]]:
    return json.loads(Path(__file__).with_name("policy.json").read_text())["statements"]
