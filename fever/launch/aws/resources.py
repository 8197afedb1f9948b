"""The AWS resources of a cluster besides its instances: what is checked first, and what is created.

All of fever's resources are called `fever-CLUSTER-ID` and have the tags `fever-cluster`, `fever-id` and
`ray-cluster-name`. Those of Ray's own launcher have the last of these tags, or names that it gives.
"""

from __future__ import annotations

import difflib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from fever.errors import FeverError

CANONICAL = "099720109477"  # the owner of the official Ubuntu images
UBUNTU = "ubuntu/images/hvm-ssd*/ubuntu-noble-24.04-{}-server-*"  # all pinned packages have wheels for its Python
SPOT_ROLE = "AWSServiceRoleForEC2Spot"
LIVING = ("pending", "running")
REFUSED = {
    "AuthFailure",
    "InvalidClientTokenId",
    "UnrecognizedClientException",
    "SignatureDoesNotMatch",
    "OptInRequired",
}
EXPIRED = {"ExpiredToken", "ExpiredTokenException", "RequestExpired"}
FORBIDDEN = {"UnauthorizedOperation", "AccessDenied", "AccessDeniedException"}


class Clients(NamedTuple):
    """Clients of the two services that are used, in one region."""

    region: str
    ec2: Any
    iam: Any


@dataclass(frozen=True)
class Names:
    """The names and tags of a cluster's resources."""

    cluster: str
    id: str

    @property
    def full(self) -> str:
        return f"fever-{self.cluster}-{self.id}"

    @property
    def tags(self) -> list[dict[str, str]]:
        pairs = {"fever-cluster": self.cluster, "fever-id": self.id, "ray-cluster-name": self.full}
        return [{"Key": key, "Value": value} for key, value in pairs.items()]

    def tagged(self, kind: str) -> list[dict[str, Any]]:
        return [{"ResourceType": kind, "Tags": self.tags}]


@dataclass(frozen=True)
class Facts:
    """What AWS knows about a target, before anything is created."""

    image: str
    device: str  # of the image's root disk
    vpc: str
    subnets: tuple[str, ...]


# access


def load(module: str) -> Any:
    """Import a module of boto3, which is an optional dependency."""
    try:
        return import_module(module)
    except ImportError:
        raise FeverError('AWS needs boto3; install it with: pip install "fever[aws]"') from None


def _session_for(region: str) -> Any:
    """A boto3 session; refuses a region that AWS does not have."""
    session = load("boto3").session.Session()
    known = [name for part in session.get_available_partitions() for name in session.get_available_regions("ec2", part)]
    if region not in known:
        close = difflib.get_close_matches(region, known, n=1)
        raise FeverError(f"AWS has no region {region!r}" + (f"; did you mean {close[0]}?" if close else ""))
    return session


@cache
def connect(region: str) -> Clients:
    """Clients for a region; refuses one that AWS does not have."""
    session = _session_for(region)
    options = load("botocore.config").Config(retries={"mode": "standard", "max_attempts": 5}, connect_timeout=10)
    return Clients(region, *(session.client(name, region_name=region, config=options) for name in ("ec2", "iam")))


@contextmanager
def translate_errors() -> Iterator[None]:
    """Turn exceptions of boto3 into FeverErrors of one sentence."""
    exceptions = load("botocore.exceptions")
    try:
        yield
    except exceptions.ClientError as error:
        code, text = error.response["Error"].get("Code", ""), error.response["Error"].get("Message", "")
        if code in FORBIDDEN:
            message = (
                f"these AWS credentials may not call {error.operation_name}; `fever aws policy` prints what they need"
            )
        elif code in EXPIRED:
            message = "the AWS credentials have expired; log in again"
        elif code in REFUSED:
            message = f"AWS refuses the credentials: {text}"
        else:
            message = f"AWS refuses {error.operation_name}: {text or code}"
        raise FeverError(message) from error
    except (exceptions.NoCredentialsError, exceptions.PartialCredentialsError) as error:
        how = "run `aws configure`, or set AWS_PROFILE, or AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
        raise FeverError(f"there are no credentials for AWS; {how}") from error
    except exceptions.BotoCoreError as error:
        raise FeverError(f"AWS cannot be used: {error}") from error


@translate_errors()
def partition_of(region: str) -> str:
    """The first part of ARNs: aws, aws-cn, aws-us-gov."""
    return str(_session_for(region).get_partition_for_region(region))


def error_code(error: BaseException) -> str:
    """AWS's code for an error; empty for other exceptions."""
    return str(getattr(error, "response", {}).get("Error", {}).get("Code", ""))


def is_missing(error: BaseException) -> bool:
    return error_code(error) == "NoSuchEntity" or "NotFound" in error_code(error)


def found(call: Callable[..., Any], **arguments: Any) -> Any:
    """The result of a call, or None if AWS says that the resource does not exist."""
    try:
        return call(**arguments)
    except load("botocore.exceptions").ClientError as error:
        if is_missing(error):
            return None
        raise


# before anything is created


def inspect(clients: Clients, head: str, worker: str, image: str | None) -> Facts:
    """Check what AWS could refuse, and find the image and the networks. Creates nothing."""
    architecture = _architecture(clients, sorted({head, worker}))
    chosen = _find_image(clients, image, architecture)
    if chosen["Architecture"] != architecture:
        raise FeverError(f"image {image} is for {chosen['Architecture']}, but {head} is {architecture}")
    wanted = [{"Name": "default-for-az", "Values": ["true"]}, {"Name": "state", "Values": ["available"]}]
    subnets = [row for row in clients.ec2.describe_subnets(Filters=wanted)["Subnets"] if row["MapPublicIpOnLaunch"]]
    if not subnets:
        how = f"make one with `aws ec2 create-default-vpc --region {clients.region}`"
        raise FeverError(f"{clients.region} has no default network with public addresses; {how}")
    places = sorted(subnets, key=lambda row: row["AvailabilityZone"])
    names = tuple(row["SubnetId"] for row in places if row["VpcId"] == places[0]["VpcId"])
    return Facts(chosen["ImageId"], chosen.get("RootDeviceName") or "/dev/sda1", places[0]["VpcId"], names)


def _architecture(clients: Clients, types: list[str]) -> str:
    kinds = set()
    for name in types:
        try:
            described = clients.ec2.describe_instance_types(InstanceTypes=[name])["InstanceTypes"]
        except clients.ec2.exceptions.ClientError as error:
            if "InvalidInstanceType" not in error_code(error) and "InvalidParameterValue" not in error_code(error):
                raise
            described = []
        if not described:
            raise FeverError(f"{clients.region} has no instance type {name!r}")
        kinds.add("arm64" if "arm64" in described[0]["ProcessorInfo"]["SupportedArchitectures"] else "x86_64")
    if len(kinds) > 1:
        raise FeverError(f"{' and '.join(types)} need different images; take types of one architecture")
    return kinds.pop()


def _find_image(clients: Clients, image: str | None, architecture: str) -> Any:
    if image is not None:
        try:
            images = found(clients.ec2.describe_images, ImageIds=[image])
        except clients.ec2.exceptions.ClientError as error:
            if "InvalidAMIID" not in error_code(error):
                raise
            images = None
        if not images or not images["Images"]:
            raise FeverError(f"{clients.region} has no image {image!r}; images have other ids in every region")
        return images["Images"][0]
    name = UBUNTU.format({"x86_64": "amd64"}.get(architecture, architecture))
    filters = [{"Name": "name", "Values": [name]}, {"Name": "state", "Values": ["available"]}]
    images = clients.ec2.describe_images(Owners=[CANONICAL], Filters=filters)["Images"]
    if not images:
        raise FeverError(f"{clients.region} has no Ubuntu image for {architecture}; set image")
    return max(images, key=lambda row: row["CreationDate"])


# creating


def make_role(clients: Clients, names: Names, policy: dict[str, Any]) -> str:
    """Create the head's role with its policy, and its instance profile; returns the profile's name."""
    iam, name = clients.iam, names.full
    if found(iam.get_role, RoleName=name) is None:
        trust = {"Effect": "Allow", "Principal": {"Service": "ec2.amazonaws.com"}, "Action": "sts:AssumeRole"}
        document = json.dumps({"Version": "2012-10-17", "Statement": [trust]})
        tags = [*names.tags, {"Key": "fever-region", "Value": clients.region}]
        iam.create_role(RoleName=name, AssumeRolePolicyDocument=document, Tags=tags)
    iam.put_role_policy(RoleName=name, PolicyName="autoscaler", PolicyDocument=json.dumps(policy))
    profile = found(iam.get_instance_profile, InstanceProfileName=name)
    if profile is None:
        tags = [*names.tags, {"Key": "fever-region", "Value": clients.region}]
        profile = iam.create_instance_profile(InstanceProfileName=name, Tags=tags)
    if not profile["InstanceProfile"]["Roles"]:
        iam.add_role_to_instance_profile(InstanceProfileName=name, RoleName=name)
    return name


def make_spot_role(clients: Clients) -> bool:
    """Create the service-linked role that an account needs for spot instances; returns whether it was missing."""
    if found(clients.iam.get_role, RoleName=SPOT_ROLE) is not None:
        return False
    try:
        clients.iam.create_service_linked_role(AWSServiceName="spot.amazonaws.com")
    except clients.iam.exceptions.ClientError as error:
        if error_code(error) not in ("InvalidInput", "EntityAlreadyExists"):  # another process has just created it
            raise
        return False
    return True


def make_key(clients: Clients, names: Names, path: Path) -> None:
    """Create a key pair with its private key in this file, readable by this user only."""
    known = {row["KeyName"] for row in clients.ec2.describe_key_pairs()["KeyPairs"]}
    if names.full in known and path.exists():
        return
    if names.full in known:
        clients.ec2.delete_key_pair(KeyName=names.full)
    path.unlink(missing_ok=True)
    pair = clients.ec2.create_key_pair(
        KeyName=names.full, KeyType="ed25519", TagSpecifications=names.tagged("key-pair")
    )
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(pair["KeyMaterial"].rstrip() + "\n")


def make_group(clients: Clients, names: Names, vpc: str, allow: str) -> str:
    """Create a security group: ssh from `allow` only, and all traffic between members; returns its id."""
    filters = [{"Name": "group-name", "Values": [names.full]}, {"Name": "vpc-id", "Values": [vpc]}]
    groups = clients.ec2.describe_security_groups(Filters=filters)["SecurityGroups"]
    if groups:
        group, rules = groups[0]["GroupId"], groups[0]["IpPermissions"]
    else:
        made = clients.ec2.create_security_group(
            GroupName=names.full,
            Description=f"fever cluster {names.cluster}",
            VpcId=vpc,
            TagSpecifications=names.tagged("security-group"),
        )
        group, rules = made["GroupId"], []
    ranges = {"Ipv6Ranges": [{"CidrIpv6": allow}]} if ":" in allow else {"IpRanges": [{"CidrIp": allow}]}
    ssh: dict[str, Any] = {"IpProtocol": "tcp", "FromPort": 22, "ToPort": 22, **ranges}
    inside: dict[str, Any] = {"IpProtocol": "-1", "UserIdGroupPairs": [{"GroupId": group}]}
    outdated = [rule for rule in rules if rule.get("FromPort") == 22 and not _same_source(rule, allow)]
    if outdated:
        clients.ec2.revoke_security_group_ingress(GroupId=group, IpPermissions=outdated)
    wanted = [] if any(_same_source(rule, allow) for rule in rules) else [ssh]
    wanted += [] if any(rule["IpProtocol"] == "-1" for rule in rules) else [inside]
    if wanted:
        clients.ec2.authorize_security_group_ingress(GroupId=group, IpPermissions=wanted)
    return str(group)


def _same_source(rule: dict[str, Any], allow: str) -> bool:
    sources = [row["CidrIp"] for row in rule.get("IpRanges", [])] + [
        row["CidrIpv6"] for row in rule.get("Ipv6Ranges", [])
    ]
    return sources == [allow]


# describing


def list_instances(clients: Clients, states: Sequence[str] = (), **tags: str) -> list[Any]:
    """Instances with fever's or Ray's tags, in one of these states, and with these tags (`_` for `-`)."""
    filters = [{"Name": f"tag:{key.replace('_', '-')}", "Values": [value]} for key, value in tags.items()]
    filters = filters or [{"Name": "tag-key", "Values": ["fever-cluster", "ray-cluster-name"]}]
    filters += [{"Name": "instance-state-name", "Values": list(states)}] if states else []
    pages = clients.ec2.get_paginator("describe_instances").paginate(Filters=filters)
    return [row for page in pages for reservation in page["Reservations"] for row in reservation["Instances"]]


def tags_of(row: dict[str, Any]) -> dict[str, str]:
    return {tag["Key"]: tag["Value"] for tag in row.get("Tags", [])}
