"""AWS on machines of the lab: its interface is moto's, instances are the lab's machines, ssh and Ray are real.

moto only makes up addresses for its instances. A watcher gives every new instance a machine, where the instance's key
pair may then log in, and kills everything on that machine when the instance is terminated. The `ssh` on the PATH of
users and instances takes made-up addresses to those machines, and refuses all others.
"""

from __future__ import annotations

import base64
import ctypes
import fnmatch
import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import parse_qsl

from fever.launch.aws.resources import SPOT_ROLE
from tests.helpers import ROOT
from tests.lab.machines import DAEMONS, Command, Lab, Machine, kill, program, read_process, wait_until

REGION = "us-west-2"
PORT = 15000
KEYS = {"user": "AKIAUSER", "head": "AKIAHEAD", "watcher": "AKIAWATCHER"}  # by which calls are told apart
IMAGE = {
    "ami_id": "ami-0fe0e00000000001",
    "architecture": "x86_64",
    "image_location": "canonical/noble",
    "image_type": "machine",
    "name": "ubuntu/images/hvm-ssd-gp3/ubuntu-noble-24.04-amd64-server-20250101",
    "owner_id": "099720109477",
    "platform": None,
    "public": True,
    "root_device_name": "/dev/sda1",
    "root_device_type": "ebs",
    "state": "available",
    "description": "",
    "hypervisor": "xen",
    "sriov": "simple",
    "virtualization_type": "hvm",
    "creation_date": "2025-01-01T00:00:00.000Z",
}

# The image's own Python: makes environments of the one that runs the tests, in which pip only notes what it is told.
PYTHON = """#!/bin/bash
if [ "$1 $2" = "-m venv" ]; then
  mkdir -p "$3/bin" "$3/modules" && cp "$0" "$3/bin/python"
elif [ "$1 $2" = "-m pip" ]; then
  echo "$*" >> "$HOME/installed"
elif [[ "$2" = *sysconfig* ]]; then
  echo "$(dirname "$(dirname "$0")")/modules"
else
  exec {python} "$@"
fi
"""

SHIM = """#!/bin/bash
# The first word that is an address, with or without a user, is where it goes.
mapped=
for word in "$@"; do
  shift
  if [ -z "$mapped" ] && [[ "$word" =~ ^([a-z]+@)?([0-9]+\\.[0-9]+\\.[0-9]+\\.[0-9]+)$ ]]; then
    for attempt in {{1..300}}; do
      node=$(sed -n "s/^${{BASH_REMATCH[2]}} //p" {map})
      [ -n "$node" ] && break
      sleep 0.1
    done
    [ -n "$node" ] || {{ echo "no machine has the address $word" >&2; exit 255; }}
    word="${{BASH_REMATCH[1]}}$node" mapped=1
  fi
  set -- "$@" "$word"
done
[ -n "$mapped" ] || {{ echo "not an address of an instance: $*" >&2; exit 255; }}
exec {ssh} -F {config} "$@"
"""


class Call(NamedTuple):
    """A request to AWS: who makes it, which operation, with which parameters."""

    who: str
    action: str  # such as ec2:RunInstances
    values: dict[str, str]


class Cloud:
    """A lab with AWS in it. For a `with`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        ssh = "/tmp/ray_ssh_4813494d13"  # where Ray's launcher keeps sockets of user root: every machine its own
        self.lab = Lab(folder / "lab", private=("/tmp/ray", ssh))
        self.map, self.recording = folder / "addresses", folder / "calls"
        self.instances: dict[str, Machine] = {}
        self.ended = threading.Event()

    def __enter__(self) -> Cloud:
        self.lab.__enter__()
        try:
            self._give_homes()
            self.lab.start_ssh()
            self._write_shim()
            self._start_interface()
        except BaseException:
            self.lab.close()
            raise
        self.inside = ThreadPoolExecutor(1, initializer=partial(self._enter, self.lab.server))
        self.watcher = threading.Thread(target=self._watch)
        self.watcher.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.ended.set()
        self.watcher.join()
        self.inside.shutdown()
        self.lab.__exit__(*exception)

    # what users and tests do

    def variables(self, who: str = "user") -> dict[str, str]:
        """The environment variables with which a user, or an instance, reaches AWS."""
        return {
            "AWS_ENDPOINT_URL": f"http://{self.lab.server.address}:{PORT}",
            "AWS_ACCESS_KEY_ID": KEYS[who],
            "AWS_SECRET_ACCESS_KEY": "secret",
            "AWS_EC2_METADATA_DISABLED": "true",
            "PATH": f"{self.folder / 'bin'}:{self.folder / 'image'}:{os.environ['PATH']}",
        }

    def start(self, *words: str) -> Command:
        """A command of fever's that a user types on the login machine."""
        home = self.folder / "home"
        home.mkdir(exist_ok=True)
        variables = {**self.variables(), "HOME": str(home), "FEVER_HOME": str(home / ".fever"), "COLUMNS": "120"}
        pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        command = [sys.executable, "-m", "fever", *words]
        return self.lab.login.popen(
            command, env=self.lab.variables(**variables, PYTHONPATH=str(ROOT)), cwd=self.folder, **pipes
        )

    def run(self, *words: str, seconds: float = 300) -> str:
        """Run such a command to its end; returns its output."""
        started = self.start(*words)
        try:
            stdout, stderr = started.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            started.kill_all()
            raise
        logs = "\n".join(path.read_text() for path in self.folder.glob("home/.fever/clusters/*/*.log"))
        assert started.returncode == 0, f"{stdout}\n{stderr}\n{logs}"
        return stdout + stderr

    def ask(self, service: str, method: str, **arguments: Any) -> Any:
        """Call AWS as none of the recorded users."""
        return self.inside.submit(self._ask, service, method, arguments).result(120)

    def living(self) -> list[dict[str, Any]]:
        """The instances that run."""
        return [row for row in rows_of(self.ask("ec2", "describe_instances")) if row["State"]["Name"] == "running"]

    def calls(self, who: str) -> list[Call]:
        """The calls that a user has made so far, in order."""
        found = []
        for line in self.recording.read_text().splitlines():
            try:
                request = json.loads(line)
            except ValueError:  # which moto is just writing
                continue
            headers = {name.lower(): text for name, text in request["headers"].items()}
            credential = headers.get("authorization", "").partition("Credential=")[2].split("/")
            if credential[0] == KEYS[who]:
                body = base64.b64decode(request["body"]).decode() if request["body_encoded"] else request["body"]
                values = dict(parse_qsl(body))
                found.append(Call(who, f"{credential[3]}:{values['Action']}", values))
        return found

    # how it works

    def _give_homes(self) -> None:
        """Give every machine its own home folder with what an image has: the tools, and access to AWS."""
        python = self.folder / "image" / "python3"
        python.parent.mkdir()
        python.write_text(PYTHON.format(python=sys.executable))
        python.chmod(0o755)
        exports = self.folder / "bashrc"
        exports.write_text("".join(f"export {key}='{text}'\n" for key, text in self.variables("head").items()))
        self.lab.give_homes("/run/home")
        for machine in self.lab.machines:
            machine.run(["cp", exports, "/run/home/.bashrc"], check=True)

    def _write_shim(self) -> None:
        self.map.touch()
        config = self.folder / "ssh_config"  # without a key: only an instance's own opens it
        config.write_text("Host *\n  GlobalKnownHostsFile /dev/null\n  BatchMode yes\n  LogLevel ERROR\n")
        shim = self.folder / "bin" / "ssh"
        shim.parent.mkdir()
        shim.write_text(SHIM.format(map=self.map, ssh=program("ssh"), config=config))
        shim.chmod(0o755)

    def _start_interface(self) -> None:
        images = self.folder / "images.json"
        images.write_text(json.dumps([IMAGE]))
        environment = self.lab.variables(
            MOTO_ENABLE_RECORDING="1", MOTO_RECORDER_FILEPATH=str(self.recording), MOTO_AMIS_PATH=str(images)
        )
        words = [sys.executable, "-m", "moto.server", "-H", self.lab.server.address, "-p", str(PORT)]
        with open(self.folder / "moto.log", "w") as log:
            self.lab.server.popen(words, env=environment, stdout=log, stderr=log)
        explain = (self.folder / "moto.log").read_text
        wait_until(partial(self.lab.server.listens, PORT), "interface of AWS", 30, explain)

    def _enter(self, machine: Machine) -> None:
        """Move this thread, and no other, into a machine's network."""
        with open(f"/proc/{machine.pid}/ns/net") as network:
            if ctypes.CDLL(None, use_errno=True).setns(network.fileno(), 0x40000000):  # CLONE_NEWNET
                raise OSError(ctypes.get_errno(), "setns")
        import boto3

        endpoint = f"http://{machine.address}:{PORT}"
        keys = {"aws_access_key_id": KEYS["watcher"], "aws_secret_access_key": "secret"}
        self.clients = {name: boto3.client(name, REGION, endpoint_url=endpoint, **keys) for name in ("ec2", "iam")}

    def _ask(self, service: str, method: str, arguments: dict[str, Any]) -> Any:
        return getattr(self.clients[service], method)(**arguments)

    def _watch(self) -> None:
        while not self.ended.wait(0.2):
            for row in rows_of(self.ask("ec2", "describe_instances")):
                if row["State"]["Name"] in ("pending", "running") and row["InstanceId"] not in self.instances:
                    self._boot(row)
                elif row["State"]["Name"] == "terminated" and row["InstanceId"] in self.instances:
                    end_all(self.instances.pop(row["InstanceId"]))

    def _boot(self, row: dict[str, Any]) -> None:
        """Assign a machine to a new instance: it accepts the instance's key and gets its addresses."""
        free = [machine for machine in self.lab.machines if machine not in self.instances.values()]
        self.instances[row["InstanceId"]] = machine = free[0]
        known = self.ask("ec2", "describe_key_pairs", IncludePublicKey=True)["KeyPairs"]
        public = [pair["PublicKey"].strip() for pair in known if pair["KeyName"] == row["KeyName"]]
        (self.lab.ssh_folder / "user.pub").write_text("\n".join(public) + "\n")
        lines = [line for line in self.map.read_text().splitlines() if not line.endswith(f" {machine.name}")]
        lines += [f"{row[key]} {machine.name}" for key in ("PublicIpAddress", "PrivateIpAddress")]
        part = self.map.with_suffix(".part")
        part.write_text("\n".join(lines) + "\n")
        part.replace(self.map)


def own_roles(answer: dict[str, Any]) -> list[str]:
    """All roles but those of AWS itself."""
    names = [row["RoleName"] for row in answer["Roles"]]
    return [name for name in names if not name.startswith("AWSServiceRole")]


def rows_of(answer: dict[str, Any]) -> list[dict[str, Any]]:
    return [row for reservation in answer["Reservations"] for row in reservation["Instances"]]


def end_all(machine: Machine) -> None:
    """Kill everything on a machine but its daemons, as when an instance is terminated."""

    def none_left() -> bool:
        for pid in machine.outer_processes():
            if read_process(pid, "comm").strip() not in DAEMONS:
                kill(pid, signal.SIGKILL, "pid", machine.pids)
        return not machine.processes()

    wait_until(none_left, f"end of all on {machine.name}", 60)
    with suppress(OSError):
        machine.run(["bash", "-c", "rm -rf /tmp/ray/* /run/home/.fever /run/home/ray_bootstrap*"])


class Permissions:
    """Judges calls by a policy as AWS does: by action, resource and condition."""

    def __init__(self, policy: dict[str, Any]) -> None:
        self.statements = policy["Statement"]
        self.used: set[str] = set()
        self.cluster = ""  # that the instances and groups of the moment belong to

    def check(self, call: Call) -> None:
        """Fail if the call, or one that it implies, is not allowed."""
        if call.action == "ec2:CreateSecurityGroup":
            self.cluster = call.values["GroupName"]
        elif call.action == "ec2:RunInstances":
            self.cluster = call.values["KeyName"]
        for action, resource, context in self.needs(call):
            self.used.add(action)
            allowed = any(_allows(row, action, resource, context) for row in self.statements)
            assert allowed, f"{call.who} may not {action} on {resource} with {context}"

    def unused(self) -> set[str]:
        return {action for row in self.statements for action in _listed(row["Action"])} - self.used

    def needs(self, call: Call) -> Iterator[tuple[str, str, dict[str, str]]]:
        service, _, operation = call.action.partition(":")
        values = call.values
        owned = {"aws:ResourceTag/ray-cluster-name": self.cluster}
        if service == "iam":
            yield from _iam_needs(call)
        elif operation.startswith("Describe"):
            yield call.action, "*", {}
        elif operation == "RunInstances":
            for kind in ("instance", "volume"):
                yield call.action, _ec2(kind, "new"), _tags(values, kind)
            for kind in ("subnet", "security-group", "network-interface"):
                yield call.action, _ec2(kind, "any"), {}
            yield call.action, f"arn:aws:ec2:{REGION}::image/{values['ImageId']}", {}
            yield call.action, _ec2("key-pair", values["KeyName"]), {}
            if "InstanceMarketOptions.MarketType" in values:
                yield call.action, _ec2("spot-instances-request", "new"), {}
            if role := values.get("IamInstanceProfile.Name"):
                context = {"iam:PassedToService": "ec2.amazonaws.com"}
                yield "iam:PassRole", f"arn:aws:iam::123456789012:role/{role}", context
            yield "ec2:CreateTags", _ec2("instance", "new"), {"ec2:CreateAction": operation}
        elif operation in ("CreateSecurityGroup", "CreateKeyPair"):
            kind = "key-pair" if operation == "CreateKeyPair" else "security-group"
            yield call.action, _ec2(kind, values.get("KeyName", "new")), _tags(values, kind)
            yield "ec2:CreateTags", _ec2(kind, values.get("KeyName", "new")), {"ec2:CreateAction": operation}
            if "VpcId" in values:
                yield call.action, _ec2("vpc", values["VpcId"]), {}
        elif operation == "DeleteKeyPair":
            yield call.action, _ec2("key-pair", values["KeyName"]), owned
        else:
            kind = "security-group" if "GroupId" in values else "instance"
            yield call.action, _ec2(kind, "any"), owned


def _tags(values: dict[str, str], kind: str) -> dict[str, str]:
    """The tags that a request gives to new resources of a kind, in the form that conditions use."""
    found = {}
    for name, key in values.items():
        part = re.fullmatch(r"(TagSpecification\.\d+)(\.Tag\.\d+)\.Key", name)
        if part and values[f"{part[1]}.ResourceType"] == kind:
            found[f"aws:RequestTag/{key}"] = values[f"{part[1]}{part[2]}.Value"]
    return found


def _iam_needs(call: Call) -> Iterator[tuple[str, str, dict[str, str]]]:
    values, base = call.values, "arn:aws:iam::123456789012"
    if call.action in ("iam:ListRoles", "iam:ListInstanceProfiles"):
        yield call.action, "*", {}
    elif "AWSServiceName" in values or values.get("RoleName") == SPOT_ROLE:
        yield call.action, f"{base}:role/aws-service-role/spot.amazonaws.com/{SPOT_ROLE}", {}
    else:
        profile = values.get("InstanceProfileName")
        yield call.action, f"{base}:instance-profile/{profile}" if profile else f"{base}:role/{values['RoleName']}", {}
        if call.action in ("iam:CreateRole", "iam:CreateInstanceProfile"):
            kind = call.action.removeprefix("iam:Create")
            place = "role" if kind == "Role" else "instance-profile"
            yield f"iam:Tag{kind}", f"{base}:{place}/{values.get('RoleName') or profile}", {}


def _ec2(kind: str, name: str) -> str:
    return f"arn:aws:ec2:{REGION}:123456789012:{kind}/{name}"


def _listed(value: str | list[str]) -> list[str]:
    return [value] if isinstance(value, str) else value


CONDITIONS: dict[str, Callable[[str | None, list[str]], bool]] = {
    "StringEquals": lambda value, wanted: value in wanted,
    "StringLike": lambda value, wanted: value is not None and any(fnmatch.fnmatchcase(value, one) for one in wanted),
    "Null": lambda value, wanted: str(value is None).lower() in wanted,
}


def _allows(statement: dict[str, Any], action: str, resource: str, context: dict[str, str]) -> bool:
    conditions = [
        CONDITIONS[operator](context.get(key), _listed(wanted))
        for operator, pairs in statement.get("Condition", {}).items()
        for key, wanted in pairs.items()
    ]
    return (
        action in _listed(statement["Action"])
        and any(fnmatch.fnmatchcase(resource, pattern) for pattern in _listed(statement["Resource"]))
        and all(conditions)
    )
