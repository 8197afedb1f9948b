"""What earlier clusters have left on AWS: found, named, removed after asking."""

from __future__ import annotations

import json
from typing import Any

from fever.launch import aws
from fever.launch.aws import config as aws_config
from tests.cloud import REGION
from tests.test_aws import NAMES, Account, refuse


def ray_cluster(account: Account, name: str) -> dict[str, str]:
    """What Ray's own launcher makes; shared things only once."""
    ec2, iam = account.ec2, account.iam
    profile, key = "ray-autoscaler-v1", f"ray-autoscaler_{REGION}"
    if not any(row["RoleName"] == profile for row in iam.list_roles()["Roles"]):
        iam.create_role(RoleName=profile, AssumeRolePolicyDocument="{}")
        document = json.dumps(aws_config.head_policy(NAMES, REGION))
        managed = iam.create_policy(PolicyName="AmazonEC2FullAccess", PolicyDocument=document)["Policy"]["Arn"]
        iam.attach_role_policy(RoleName=profile, PolicyArn=managed)
        iam.create_instance_profile(InstanceProfileName=profile)
        iam.add_role_to_instance_profile(InstanceProfileName=profile, RoleName=profile)
        ec2.create_key_pair(KeyName=key)
        (account.home / ".ssh" / f"{key}.pem").write_text("private")
    vpc = ec2.describe_vpcs()["Vpcs"][0]["VpcId"]
    group = ec2.create_security_group(GroupName=f"ray-autoscaler-{name}", Description="x", VpcId=vpc)["GroupId"]
    config = {
        "InstanceType": "m5.large",
        "ImageId": account.image,
        "KeyName": key,
        "SecurityGroupIds": [group],
        "IamInstanceProfile": {"Name": profile},
    }
    return {"group": group, "instance": account.run_instance(config, name, "head")}


def foreign(account: Account) -> dict[str, set[str]]:
    """Everything in the account that is nobody's business, by kind."""
    ec2, iam = account.ec2, account.iam
    instances = [row for part in ec2.describe_instances()["Reservations"] for row in part["Instances"]]
    return {
        "instances": {row["InstanceId"] for row in instances if row["State"]["Name"] == "running"},
        "volumes": {row["VolumeId"] for row in ec2.describe_volumes()["Volumes"]},
        "groups": {row["GroupId"] for row in ec2.describe_security_groups()["SecurityGroups"]},
        "keys": {row["KeyName"] for row in ec2.describe_key_pairs()["KeyPairs"]},
        "roles": {row["RoleName"] for row in iam.list_roles()["Roles"]},
        "profiles": {row["InstanceProfileName"] for row in iam.list_instance_profiles()["InstanceProfiles"]},
        "files": {path.name for path in (account.home / ".ssh").iterdir()},
    }


def make_foreign(account: Account) -> None:
    ec2, iam = account.ec2, account.iam
    ec2.run_instances(ImageId=account.image, InstanceType="m5.large", MinCount=1, MaxCount=1)
    ec2.create_volume(AvailabilityZone=f"{REGION}a", Size=1)
    vpc = ec2.describe_vpcs()["Vpcs"][0]["VpcId"]
    ec2.create_security_group(GroupName="my-ray-autoscaler-x", Description="x", VpcId=vpc)
    for name in ("mine", "ray-autoscaler_us-east-1", "fever-mine-1"):
        ec2.create_key_pair(KeyName=name)
    for name in ("mine", "fever-dreams", "ray-autoscaler-mine"):
        iam.create_role(RoleName=name, AssumeRolePolicyDocument="{}")
        iam.create_instance_profile(InstanceProfileName=name)
    (account.home / ".ssh" / "ray-autoscaler_us-east-1.pem").write_text("private")
    (account.home / ".ssh" / "id_ed25519").write_text("private")


def test_leftovers_of_ray_are_found_and_removed_and_nothing_else(account: Account) -> None:
    make_foreign(account)
    before = foreign(account)
    made = ray_cluster(account, "old")
    account.ec2.stop_instances(InstanceIds=[made["instance"]])
    volume = account.ec2.create_volume(
        AvailabilityZone=f"{REGION}a",
        Size=8,
        TagSpecifications=[{"ResourceType": "volume", "Tags": [{"Key": "ray-cluster-name", "Value": "old"}]}],
    )["VolumeId"]
    found = aws.find_leftovers(REGION)
    file = str(account.home / ".ssh" / f"ray-autoscaler_{REGION}.pem")
    assert [(row.kind, row.id) for row in found] == [
        ("instance", made["instance"]),
        ("volume", volume),
        ("security group", made["group"]),
        ("instance profile", "ray-autoscaler-v1"),
        ("role", "ray-autoscaler-v1"),
        ("key pair", f"ray-autoscaler_{REGION}"),
        ("key file", file),
    ]
    assert not any(row.running for row in found)
    assert "stopped; its disk still costs" in str(found[0])
    assert aws.remove_leftovers(found) == []
    assert aws.find_leftovers(REGION) == []
    assert foreign(account) == before


def test_what_runs_is_told_apart(account: Account) -> None:
    account.up()
    old, new = ray_cluster(account, "old"), ray_cluster(account, "new")
    account.ec2.terminate_instances(InstanceIds=[old["instance"]])
    found = aws.find_leftovers(REGION)
    assert [row.id for row in found if not row.running] == [old["group"]]
    running = {row.id: row for row in found if row.running}
    assert {new["instance"], new["group"], "ray-autoscaler-v1", f"ray-autoscaler_{REGION}"} <= set(running)
    assert len([row for row in found if row.name.startswith("fever-one-")]) == 6  # all that a cluster of fever's has
    assert "m5.large, running since 20" in running[new["instance"]].reason
    assert aws.remove_leftovers([row for row in found if not row.running]) == []
    assert {row.id for row in aws.find_leftovers(REGION)} == set(running) | {row.id for row in found if row.running}


def test_what_cannot_be_removed_is_named_with_the_reason(account: Account) -> None:
    account.up()
    account.interrupt("DeleteSecurityGroup", refuse("DependencyViolation", "DeleteSecurityGroup"))
    left = account.down()
    assert len(left) == 1
    assert left[0].startswith("security group sg-")
    assert "could not be removed: because" in left[0]
    assert (account.folder / "aws.json").exists()  # to try again


def test_an_instance_that_shows_itself_late_is_ended_too(account: Account) -> None:
    """Ctrl-C came while AWS was launching: the security group cannot go before the instance."""
    import botocore.client

    account.up()
    original, refused = botocore.client.BaseClient._make_api_call, []

    def call(client: Any, name: str, values: Any) -> Any:
        if name == "DeleteSecurityGroup" and not refused:
            refused.append(name)
            config = json.loads((account.folder / "cluster.yaml").read_text())
            account.run_instance(
                config["available_node_types"]["worker"]["node_config"], config["cluster_name"], "worker"
            )
            raise refuse("DependencyViolation", name)
        return original(client, name, values)

    account.monkeypatch.setattr(botocore.client.BaseClient, "_make_api_call", call)
    assert account.down() == []
    assert refused
    assert account.nothing_is_left()
