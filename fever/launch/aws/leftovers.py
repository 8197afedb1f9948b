"""Finds and removes what clusters left on AWS: fever's, and those of Ray's own launcher.

A resource counts as theirs if it has one of their tags, or a name that Ray's launcher gives. Others are not touched.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fever.launch.aws.resources import (
    LIVING,
    Clients,
    connect,
    error_code,
    found,
    is_missing,
    list_instances,
    load,
    tags_of,
    translate_errors,
)

IDLE = ("stopping", "stopped")
ENDING = (*LIVING, *IDLE, "shutting-down")
POLL_SECONDS = 2.0
GROUP_SECONDS = 30.0  # for AWS to notice that a security group has no instances any more
END_SECONDS = 300.0  # for instances to terminate; AWS takes a minute or two
ORDER = ("instance", "volume", "security group", "instance profile", "role", "key pair", "key file")


@dataclass(frozen=True)
class Leftover:
    """A resource that belongs to a cluster of fever's or of Ray's launcher."""

    kind: str  # one of ORDER
    id: str  # AWS's id for it; the path of a file
    name: str  # the cluster's full name, or its own
    region: str
    reason: str  # why it is listed, or why it could not be removed
    running: bool = False  # it belongs to instances that run

    def __str__(self) -> str:
        whose = f" of {self.name}" if self.name not in ("", self.id) else ""
        return f"{self.kind} {self.id}{whose} in {self.region}: {self.reason}"


Note = Callable[[str, str, str, str], Leftover]


@translate_errors()
def find_leftovers(region: str, files: Path | None = None) -> list[Leftover]:
    """Everything in the region that belongs to clusters, in the order in which it can be removed.

    What belongs to running instances is listed as running. `files`: where Ray's launcher puts its private keys; None:
    ~/.ssh.
    """
    clients = connect(region)
    living = list_instances(clients, LIVING)
    used = {tags_of(row).get("ray-cluster-name", "") for row in living} | {row.get("KeyName", "") for row in living}
    used |= {group["GroupId"] for row in living for group in row.get("SecurityGroups", [])}
    used |= {row["IamInstanceProfile"]["Arn"].rpartition("/")[2] for row in living if row.get("IamInstanceProfile")}
    used.discard("")  # of instances without a name or key

    def note(kind: str, id: str, name: str, reason: str) -> Leftover:
        running = kind != "instance" and bool({id, name} & used)
        return Leftover(kind, id, name, region, "instances that use it run" if running else reason, running)

    rows = [_instance(note, row) for row in [*living, *list_instances(clients, IDLE)]]
    rows += _volumes(clients, note) + _groups(clients, note) + _roles(clients, note) + _keys(clients, note, files)
    return sorted(rows, key=lambda row: ORDER.index(row.kind))


def _instance(note: Note, row: dict[str, Any]) -> Leftover:
    state, kind = row["State"]["Name"], row["InstanceType"]
    name = tags_of(row).get("ray-cluster-name", tags_of(row).get("fever-cluster", ""))
    if state in LIVING:
        reason = f"{kind}, {state} since {row['LaunchTime']:%Y-%m-%d %H:%M} UTC"
        return replace(note("instance", row["InstanceId"], name, reason), running=True)
    return note("instance", row["InstanceId"], name, f"{kind}, {state}; its disk still costs")


def _volumes(clients: Clients, note: Note) -> list[Leftover]:
    filters = [
        {"Name": "tag-key", "Values": ["fever-cluster", "ray-cluster-name"]},
        {"Name": "status", "Values": ["available"]},  # those in use go with their instance
    ]
    pages = clients.ec2.get_paginator("describe_volumes").paginate(Filters=filters)
    return [
        note(
            "volume",
            row["VolumeId"],
            tags_of(row).get("ray-cluster-name", ""),
            f"{row['Size']} GB, not in use",
        )
        for page in pages
        for row in page["Volumes"]
    ]


def _groups(clients: Clients, note: Note) -> list[Leftover]:
    rows = []
    for page in clients.ec2.get_paginator("describe_security_groups").paginate():
        for row in page["SecurityGroups"]:
            name = tags_of(row).get("ray-cluster-name") or row["GroupName"]
            if "ray-cluster-name" in tags_of(row) or name.startswith("ray-autoscaler-"):
                name = name.removeprefix("ray-autoscaler-")
                rows.append(note("security group", row["GroupId"], name, "no instance of its cluster runs"))
    return rows


def _roles(clients: Clients, note: Note) -> list[Leftover]:
    """Instance profiles and roles, which AWS keeps for all regions: fever's for this region, and all of Ray's."""
    rows = []
    everywhere = "of Ray's launcher in all regions; no instance in this one uses it"
    for kind, method, key, get in (
        ("instance profile", "list_instance_profiles", "InstanceProfile", clients.iam.get_instance_profile),
        ("role", "list_roles", "Role", clients.iam.get_role),
    ):
        pages = clients.iam.get_paginator(method).paginate()
        for name in [row[f"{key}Name"] for page in pages for row in page[f"{key}s"]]:
            if re.fullmatch(r"ray-autoscaler-v\d+", name):
                rows.append(note(kind, name, name, everywhere))
            elif name.startswith("fever-"):
                whole = found(get, **{f"{key}Name": name}) or {key: {}}  # lists have no tags
                if tags_of(whole[key]).get("fever-region") == clients.region:
                    rows.append(note(kind, name, name, "no instance of its cluster runs"))
    return rows


def _keys(clients: Clients, note: Note, files: Path | None) -> list[Leftover]:
    """Key pairs, and the files with the private keys of Ray's."""
    rows = []
    ray = re.compile(rf"ray-autoscaler(_\d+)?_{re.escape(clients.region)}")
    for row in clients.ec2.describe_key_pairs()["KeyPairs"]:
        if "fever-cluster" in tags_of(row) or ray.fullmatch(row["KeyName"]):
            rows.append(note("key pair", row["KeyName"], row["KeyName"], "no instance has it"))
    for path in sorted((files or Path.home() / ".ssh").glob("ray-autoscaler_*.pem")):
        if ray.fullmatch(path.stem):
            rows.append(note("key file", str(path), path.stem, "private key of a key pair of Ray's launcher"))
    return rows


# removing


@translate_errors()
def remove_leftovers(leftovers: Sequence[Leftover], seconds: float = END_SECONDS) -> list[Leftover]:
    """Remove these in the right order; returns those that remain, with the reason."""
    deadline = time.monotonic() + seconds
    left = []
    for region in dict.fromkeys(row.region for row in leftovers):
        clients = connect(region)
        here = sorted((row for row in leftovers if row.region == region), key=lambda row: ORDER.index(row.kind))
        left += _end_instances(clients, [row for row in here if row.kind == "instance"], deadline)
        for row in here:
            if row.kind != "instance" and (problem := _try_to_remove(clients, row)):
                left.append(replace(row, reason=f"could not be removed: {problem}"))
    return left


def _try_to_remove(clients: Clients, row: Leftover) -> str | None:
    """Remove one resource; returns why that failed, None if it did not."""
    try:
        _remove(clients, row)
    except load("botocore.exceptions").ClientError as error:
        return None if is_missing(error) else str(error.response["Error"].get("Message") or error)
    except OSError as error:
        return str(error)
    return None


def _end_instances(clients: Clients, rows: Sequence[Leftover], deadline: float) -> list[Leftover]:
    """Terminate instances and wait until AWS shows that; returns those that did not terminate in time."""
    if not rows:
        return []
    pending = {row.id: row for row in rows}
    reason = "did not terminate in time"
    for id in pending:
        try:  # one by one: if AWS does not know one of several, it ends none
            found(clients.ec2.terminate_instances, InstanceIds=[id])
        except clients.ec2.exceptions.ClientError as error:
            reason = f"could not be terminated: {error.response['Error'].get('Message')}"
    while True:
        alive = {row["InstanceId"] for row in list_instances(clients, ENDING)} & set(pending)
        if not alive or time.monotonic() > deadline:
            return [replace(pending[id], reason=reason) for id in sorted(alive)]
        time.sleep(POLL_SECONDS)


def _remove(clients: Clients, row: Leftover) -> None:
    ec2, iam = clients.ec2, clients.iam
    if row.kind == "volume":
        ec2.delete_volume(VolumeId=row.id)
    elif row.kind == "security group":
        _remove_group(clients, row.id)
    elif row.kind == "instance profile":
        for role in iam.get_instance_profile(InstanceProfileName=row.id)["InstanceProfile"]["Roles"]:
            iam.remove_role_from_instance_profile(InstanceProfileName=row.id, RoleName=role["RoleName"])
        iam.delete_instance_profile(InstanceProfileName=row.id)
    elif row.kind == "role":
        for name in iam.list_role_policies(RoleName=row.id)["PolicyNames"]:
            iam.delete_role_policy(RoleName=row.id, PolicyName=name)
        for policy in iam.list_attached_role_policies(RoleName=row.id)["AttachedPolicies"]:
            iam.detach_role_policy(RoleName=row.id, PolicyArn=policy["PolicyArn"])
        iam.delete_role(RoleName=row.id)
    elif row.kind == "key pair":
        ec2.delete_key_pair(KeyName=row.id)
    else:
        with suppress(FileNotFoundError):
            Path(row.id).unlink()


def _remove_group(clients: Clients, id: str) -> None:
    """Delete a security group as soon as AWS has noticed that its instances are gone."""
    deadline = time.monotonic() + GROUP_SECONDS
    while True:
        try:
            clients.ec2.delete_security_group(GroupId=id)
            return
        except clients.ec2.exceptions.ClientError as error:
            if error_code(error) != "DependencyViolation" or time.monotonic() > deadline:
                raise
        time.sleep(POLL_SECONDS)
