"""Clusters on AWS: what is made, found and removed, against moto and without Ray."""

from __future__ import annotations

import json
import os
import re
import stat
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fever.errors import FeverError
from fever.launch.aws import cluster, cost, leftovers, resources
from fever.launch.aws import config as aws_config
from fever.launch.aws.leftovers import find_leftovers, remove_leftovers
from fever.launch.aws.resources import Names
from tests.lab.cloud import REGION, own_roles
from tests.launch.aws.helpers import make_target

pytest.importorskip("boto3")
moto = pytest.importorskip("moto")

NAMES = Names("one", "0123abcd")


class Account:
    """An account on AWS, and a cluster's record in it."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.home, self.monkeypatch = folder / "record", folder / "home", monkeypatch
        for path in (self.folder, self.home / ".ssh"):
            path.mkdir(parents=True, mode=0o700)
        self.token = folder / "token"
        self.token.write_text("secret")
        self.said: list[str] = []
        self.launches: list[list[str]] = []
        self.clients = resources.connect(REGION)
        self.ec2, self.iam = self.clients.ec2, self.clients.iam
        self.image = self.register_image("20250101")
        monkeypatch.setattr(resources, "CANONICAL", "123456789012")
        monkeypatch.setattr(cluster, "run_ray", self.launch)
        monkeypatch.setattr(cluster, "PROGRAMS", ())
        monkeypatch.setattr(cluster, "PROFILE_SECONDS", 0.0)
        monkeypatch.setattr(leftovers, "GROUP_SECONDS", 0.0)

    def register_image(self, date: str) -> str:
        name = f"ubuntu/images/hvm-ssd-gp3/ubuntu-noble-24.04-amd64-server-{date}"
        image = self.ec2.register_image(Name=name, RootDeviceName="/dev/sda1")["ImageId"]
        backend = moto.backends.get_backend("ec2")["123456789012"][REGION]
        backend.amis[image].architecture = "x86_64"  # which moto's register_image does not take
        return image

    def launch(self, words: list[str], log: Path, *rest: Any) -> str | None:
        """What Ray's launcher does with AWS."""
        self.launches.append(words)
        log.write_text("")
        if words[0] == "up" and len(self.launches) == 1:
            config = json.loads(Path(words[1]).read_text())
            self.run_instance(config["available_node_types"]["head"]["node_config"], config["cluster_name"], "head")
            worker = config["available_node_types"]["worker"]["node_config"]
            self.run_instance(worker, config["cluster_name"], "worker")
        return None

    def run_instance(self, config: dict[str, Any], cluster: str, kind: str) -> str:
        conf = {key: value for key, value in config.items() if key != "SubnetIds"}
        own = [{"Key": "ray-cluster-name", "Value": cluster}, {"Key": "ray-node-type", "Value": kind}]
        given = conf.pop("TagSpecifications", [])
        tags = {tag["Key"]: tag for tag in [*own, *(given[0]["Tags"] if given else [])]}
        specifications = [{"ResourceType": "instance", "Tags": list(tags.values())}, *given[1:]]
        made = self.ec2.run_instances(**conf, TagSpecifications=specifications, MinCount=1, MaxCount=1)
        return made["Instances"][0]["InstanceId"]

    def up(self, **more: Any) -> dict[str, Any]:
        return cluster.up(make_target(**more), "one", self.folder, self.token, self.said.append)

    def down(self) -> list[str]:
        return cluster.down(make_target(), "one", self.folder, self.said.append)

    def interrupt(self, operation: str, error: BaseException | None = None) -> None:
        """Have this call, which is carried out, be the last before Ctrl-C; or have it fail."""
        import botocore.client

        original = botocore.client.BaseClient._make_api_call

        def call(client: Any, name: str, values: Any) -> Any:
            if name == operation and error is not None:
                raise error
            answer = original(client, name, values)
            if name == operation:
                raise KeyboardInterrupt
            return answer

        self.monkeypatch.setattr(botocore.client.BaseClient, "_make_api_call", call)

    def nothing_is_left(self) -> bool:
        assert find_leftovers(REGION) == []
        assert not any(row["State"]["Name"] != "terminated" for row in resources.list_instances(self.clients))
        assert {path.name for path in self.folder.iterdir()} <= {"up.log", "down.log"}
        return not self.ec2.describe_key_pairs()["KeyPairs"] and not own_roles(self.iam.list_roles())


def refuse(code: str, operation: str) -> Exception:
    from botocore.exceptions import ClientError

    return ClientError({"Error": {"Code": code, "Message": "because"}}, operation)


@pytest.fixture
def nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No settings of AWS but those of the test."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    for name in ("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"):
        monkeypatch.setenv(name, "/nonexistent")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("MOTO_EC2_LOAD_DEFAULT_AMIS", "false")  # which takes a second
    monkeypatch.setenv("HOME", str(tmp_path / "home"))


@pytest.fixture
def account(nowhere: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Account]:
    with moto.mock_aws():
        yield Account(tmp_path, monkeypatch)


def test_up_makes_what_is_needed_and_no_more(account: Account) -> None:
    reached = account.up()
    full = f"fever-one-{reached['id']}"
    key = account.folder / "key.pem"
    assert stat.S_IMODE(key.stat().st_mode) == 0o600
    assert reached["ssh"][:3] == ["ssh", "-i", str(key)]
    group = next(g for g in account.ec2.describe_security_groups()["SecurityGroups"] if g["GroupName"] == full)
    rules = {(rule["IpProtocol"], rule.get("FromPort")): rule for rule in group["IpPermissions"]}
    assert set(rules) == {("tcp", 22), ("-1", None)} or set(rules) == {("tcp", 22), ("-1", -1)}
    assert [row["CidrIp"] for row in rules["tcp", 22]["IpRanges"]] == ["1.2.3.4/32"]
    inside = next(rule for rule in group["IpPermissions"] if rule["IpProtocol"] == "-1")
    assert [pair["GroupId"] for pair in inside["UserIdGroupPairs"]] == [group["GroupId"]]
    assert not inside["IpRanges"]
    config = json.loads((account.folder / "cluster.yaml").read_text())
    assert config["provider"]["cache_stopped_nodes"] is False
    assert config["available_node_types"]["head"]["node_config"]["ImageId"] == account.image
    assert "secret" not in json.dumps(config)
    assert (account.folder / "files" / "token").read_text() == "secret"
    assert stat.S_IMODE((account.folder / "files" / "token").stat().st_mode) == 0o600
    head, worker = cluster.status(make_target(), account.folder)["instances"]
    assert (head["role"], head["spot"], worker["role"], worker["spot"]) == ("head", False, "worker", True)
    assert account.down() == []
    assert account.nothing_is_left()
    assert account.down() == []


def test_a_plan_makes_nothing(account: Account) -> None:
    lines = cluster.plan(make_target(), "one", account.folder)
    assert lines[0] == f"one: fever up would make in {REGION}, of image {account.image}"
    assert "workers  2 x m5.large, spot" in lines[2]
    assert "cost nothing; ssh from 1.2.3.4/32" in lines[3]
    assert re.search(
        r"about 0\.\d\d USD/h while it trains, until fever down \(AWS's list prices .*, 20\d\d-", lines[-1]
    )
    assert account.nothing_is_left()
    assert not account.launches
    with pytest.raises(FeverError, match=r"us-west-2 has no instance type 'm5\.huge'"):
        cluster.plan(make_target(head="m5.huge"), "one", account.folder)
    account.up()
    assert cluster.plan(make_target(), "one", account.folder)[-1] == "one is up already: its instances stay"


def test_what_a_cluster_cost_includes_what_aws_has_forgotten(account: Account) -> None:
    account.up()
    head, worker = cluster.status(make_target(), account.folder)["instances"]
    seen = json.loads((account.folder / "instances.json").read_text())
    gone = {**worker, "id": "i-gone", "hours": 10.0, "price": 0.05, "state": "running"}
    (account.folder / "instances.json").write_text(json.dumps({**seen, "i-gone": gone}))
    account.ec2.terminate_instances(InstanceIds=[worker["id"]])
    bill = cluster.status(make_target(), account.folder)
    assert {row["id"]: row["state"] for row in bill["instances"]} == {
        head["id"]: "running", worker["id"]: "terminated", "i-gone": "ended",
    }  # fmt: skip
    assert bill["estimate"] == pytest.approx(0.5, abs=0.01)
    assert cost.describe_bill(bill).startswith("about 0.50 USD (3 instances, 10.0 h together; AWS's list prices")
    assert account.down() == []
    assert account.nothing_is_left()


def test_up_again_keeps_what_is_there_and_lets_in_a_new_address(account: Account) -> None:
    first = account.up()
    account.monkeypatch.setattr(cluster, "_ray_runs", lambda *_: True)
    second = account.up(allow="5.6.7.8/32")
    assert (first["id"], first["ssh"], first["began"]) == (second["id"], second["ssh"], second["began"])
    assert "--no-restart" in account.launches[1]
    groups = account.ec2.describe_security_groups()["SecurityGroups"]
    mine = [group for group in groups if group["GroupName"].startswith("fever-")]
    assert [row["CidrIp"] for rule in mine[0]["IpPermissions"] for row in rule["IpRanges"]] == ["5.6.7.8/32"]
    account.monkeypatch.setattr(cluster, "_ray_runs", lambda *_: False)
    account.up(allow="5.6.7.8/32")
    assert "--no-restart" not in account.launches[2]
    with pytest.raises(FeverError, match="one was brought up with region: us-west-2; take it down to change that"):
        account.up(region="eu-west-1")
    with pytest.raises(FeverError, match=r"one was brought up with head: m5\.large"):
        account.up(head="m5.xlarge")
    assert len(account.launches) == 3


def test_a_newer_image_does_not_replace_a_head(account: Account) -> None:
    account.up()
    account.monkeypatch.setattr(cluster, "_ray_runs", lambda *_: True)
    account.register_image("20260101")
    account.up()
    config = json.loads((account.folder / "cluster.yaml").read_text())
    assert config["available_node_types"]["head"]["node_config"]["ImageId"] == account.image


@pytest.mark.parametrize(
    "operation",
    ["CreateRole", "PutRolePolicy", "CreateInstanceProfile", "AddRoleToInstanceProfile", "CreateKeyPair",
     "CreateSecurityGroup", "AuthorizeSecurityGroupIngress", "RunInstances"],
)  # fmt: skip
def test_interrupted_anywhere_it_leaves_nothing(account: Account, operation: str) -> None:
    account.interrupt(operation)
    with pytest.raises(KeyboardInterrupt):
        account.up()
    assert account.nothing_is_left()


@pytest.mark.parametrize("error", [KeyboardInterrupt(), FeverError("its head does not answer")])
def test_a_head_that_cannot_be_looked_at_is_not_left(account: Account, error: BaseException) -> None:
    def look(ssh: list[str]) -> dict[str, Any]:
        raise error

    with pytest.raises(type(error)):
        cluster.up(make_target(), "one", account.folder, account.token, account.said.append, look)
    assert account.nothing_is_left()


def test_a_refusal_in_the_middle_leaves_nothing(account: Account) -> None:
    account.interrupt("CreateSecurityGroup", refuse("UnauthorizedOperation", "CreateSecurityGroup"))
    with pytest.raises(FeverError, match="may not call CreateSecurityGroup; `fever aws policy` prints"):
        account.up()
    assert account.nothing_is_left()


def test_a_launch_that_fails_says_why_and_leaves_nothing(account: Account) -> None:
    def fail(words: list[str], log: Path, *rest: Any) -> str:
        account.launch(words, log)
        return "no more capacity"

    account.monkeypatch.setattr(cluster, "run_ray", fail)
    with pytest.raises(FeverError, match=r"could not bring one up: no more capacity .*up\.log"):
        account.up()
    assert account.nothing_is_left()


def test_a_cluster_that_was_up_stays_if_up_fails_later(account: Account) -> None:
    account.up()
    account.monkeypatch.setattr(cluster, "_ray_runs", lambda *_: True)
    account.monkeypatch.setattr(cluster, "run_ray", lambda words, log, *_: log.write_text("x") and "oh")
    with pytest.raises(FeverError, match="could not bring one up: oh"):
        account.up()
    assert len([row for row in find_leftovers(REGION) if row.kind == "instance"]) == 2
    record = json.loads((account.folder / "aws.json").read_text())
    (account.folder / "aws.json").write_text(json.dumps({**record, "up": False}))  # the first attempt was killed
    with pytest.raises(FeverError, match="could not bring one up: oh"):
        account.up()
    assert account.nothing_is_left()


def test_waits_until_aws_knows_the_profile(account: Account) -> None:
    def refuse_twice(words: list[str], log: Path, *rest: Any) -> str | None:
        tried.append(words)
        if len(tried) < 3:
            log.write_text("(InvalidParameterValue) ... Invalid IAM Instance Profile name, retrying.")
            return "Failed to launch"
        return account.launch(words, log)

    tried: list[Any] = []
    account.monkeypatch.setattr(cluster, "run_ray", refuse_twice)
    account.up()
    assert len(tried) == 3


BAD = {
    "region": ({"region": "us-west-22"}, "AWS has no region 'us-west-22'; did you mean us-west-2?"),
    "head": ({"head": "m5.huge"}, "us-west-2 has no instance type 'm5.huge'"),
    "worker": ({"workers": {"type": "q1.large"}}, "us-west-2 has no instance type 'q1.large'"),
    "mixed": ({"workers": {"type": "m6g.large"}}, "m5.large and m6g.large need different images"),
    "image": ({"image": "ami-00000000000000bad"}, "us-west-2 has no image 'ami-00000000000000bad'"),
    "ubuntu": ({"head": "m6g.large", "workers": {"type": "m6g.large"}}, "no Ubuntu image for arm64; set image"),
}


@pytest.mark.parametrize("what", BAD)
def test_bad_input_is_one_sentence_and_makes_nothing(account: Account, what: str) -> None:
    more, sentence = BAD[what]
    with pytest.raises(FeverError) as caught:
        account.up(**more)
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)
    assert account.nothing_is_left()
    assert not account.launches


def test_a_program_that_is_not_here_is_missed_before_anything_is_made(account: Account) -> None:
    account.monkeypatch.setattr(cluster, "PROGRAMS", ("no-rsync",))
    with pytest.raises(FeverError, match="no-rsync was not found on this machine, and Ray's launcher needs it"):
        account.up()
    assert account.nothing_is_left()
    assert not account.launches


def test_an_image_for_other_machines(account: Account) -> None:
    with pytest.raises(FeverError, match=r"is for x86_64, but m6g\.large is arm64"):
        account.up(image=account.image, head="m6g.large", workers={"type": "m6g.large"})


def test_a_name_that_aws_would_refuse(account: Account) -> None:
    for name in ("", "a b", "x" * 41, "-x"):
        with pytest.raises(FeverError, match="cannot be a cluster's name"):
            cluster.up(make_target(), name, account.folder, account.token, account.said.append)


@pytest.mark.usefixtures("nowhere")
def test_missing_credentials() -> None:
    resources.connect.cache_clear()
    with (
        moto.mock_aws(config={"core": {"mock_credentials": False}}),
        pytest.raises(FeverError, match="there are no credentials for AWS; run `aws configure`"),
    ):
        find_leftovers(REGION)
    resources.connect.cache_clear()


def test_credentials_that_are_refused(account: Account) -> None:
    account.interrupt("DescribeInstanceTypes", refuse("AuthFailure", "DescribeInstanceTypes"))
    with pytest.raises(FeverError, match="AWS refuses the credentials: because"):
        account.up()
    account.interrupt("DescribeInstanceTypes", refuse("ExpiredToken", "DescribeInstanceTypes"))
    with pytest.raises(FeverError, match="have expired"):
        account.up()


def test_boto3_is_an_optional_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "boto3", None)
    monkeypatch.setitem(sys.modules, "botocore.exceptions", None)
    with pytest.raises(FeverError, match=r'AWS needs boto3; install it with: pip install "fever\[aws\]"'):
        find_leftovers(REGION)


def test_own_address(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    answer = tmp_path / "answer"
    monkeypatch.setattr(cluster, "ECHO", answer.as_uri())
    answer.write_text("9.8.7.6\n")
    assert cluster.own_address() == "9.8.7.6/32"
    for text in ("<html>", None):
        answer.write_text(text) if text else answer.unlink()
        with pytest.raises(FeverError, match=r"does not tell this machine.s own address .*set `allow:`"):
            cluster.own_address()


# leftovers


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
    found = find_leftovers(REGION)
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
    assert remove_leftovers(found) == []
    assert find_leftovers(REGION) == []
    assert foreign(account) == before


def test_what_runs_is_told_apart(account: Account) -> None:
    account.up()
    old, new = ray_cluster(account, "old"), ray_cluster(account, "new")
    account.ec2.terminate_instances(InstanceIds=[old["instance"]])
    found = find_leftovers(REGION)
    assert [row.id for row in found if not row.running] == [old["group"]]
    running = {row.id: row for row in found if row.running}
    assert {new["instance"], new["group"], "ray-autoscaler-v1", f"ray-autoscaler_{REGION}"} <= set(running)
    assert len([row for row in found if row.name.startswith("fever-one-")]) == 6  # all that a cluster of fever's has
    assert "m5.large, running since 20" in running[new["instance"]].reason
    assert remove_leftovers([row for row in found if not row.running]) == []
    assert {row.id for row in find_leftovers(REGION)} == set(running) | {row.id for row in found if row.running}


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
