"""Brings clusters on AWS up and down, with Ray's own launcher and a configuration that is rendered and checked here.

    up      checks what AWS could refuse, creates role, key pair and security group, and runs `ray up`; if anything
            fails, all of it is removed
    down    runs `ray down`, then asks AWS what still exists, and removes that as well

The record folder of a cluster keeps its id, private key, configuration and logs.
"""

from __future__ import annotations

import ipaddress
import json
import re
import secrets
import shutil
import subprocess
import time
import urllib.request
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fever.errors import FeverError
from fever.job import JobFolder
from fever.launch.aws import config, cost, resources
from fever.launch.aws.config import render
from fever.launch.aws.launcher import run_ray
from fever.launch.aws.leftovers import Leftover, find_leftovers, remove_leftovers
from fever.launch.aws.resources import Clients, Facts, Names, translate_errors
from fever.launch.clusters.host_packages import describe_environment
from fever.signals import signals_interrupt, signals_wait

if TYPE_CHECKING:
    from fever.launch.aws.target import Aws

ECHO = "https://checkip.amazonaws.com"  # replies with the address that a request comes from
PROFILE_SECONDS = 10.0  # between attempts, until a new instance profile is known everywhere in AWS
PROFILE_ATTEMPTS = 6
DOWN_SECONDS = 180.0  # for Ray's launcher to end a cluster; after that it is done without Ray
ROUNDS = 5  # of removing what AWS shows
PROGRAMS = ("ssh", "rsync")  # that Ray's launcher runs here
FIXED = ("region", "head", "image", "user", "disk", "python")  # what cannot change without a new head
REMOVED = (  # from a record by `down`; logs stay
    "key.pem", "cluster.yaml", "known_hosts", "files/token", "files/constraints.txt", cost.SEEN, "aws.json",
)  # fmt: skip
LONGEST_NAME = 40  # of a cluster; names of roles have at most 64 characters


# up


@translate_errors()
def up(
    target: Aws,
    name: str,
    folder: Path,
    token: Path,
    say: Callable[[str], None],
    look: Callable[[list[str]], dict[str, Any]] = lambda ssh: {},
) -> dict[str, Any]:
    """Bring a cluster up, or up to date if it is up already; returns how its head is reached, and what `look` saw.

    `folder`: the cluster's record, which exists and is this user's alone; `token`: the file with Ray's token; `look` is
    called with the words of ssh that run a command on the head, as the last thing that may fail.
    Workers join after this returns. If it fails or is interrupted before the cluster is up for the first time, all that
    it created is removed before it raises; a cluster that was up before stays.
    """
    for program in PROGRAMS:
        if shutil.which(program) is None:
            raise FeverError(f"{program} was not found on this machine, and Ray's launcher needs it; install it")
    clients = resources.connect(target.region)
    record = _load(folder) or _new_record(target, name)
    _refuse_changes(target, name, record)
    names = Names(name, record["id"])
    facts = resources.inspect(clients, target.head, target.workers.type, record["image"] or target.image)
    allow = target.allow or own_address()
    old = _find_head(clients, names)
    record["image"] = facts.image  # even if there is a newer one: the head would be replaced
    environment = describe_environment((*target.packages, "boto3"), target.extras)  # the head launches workers with it
    try:
        with signals_interrupt():
            _save(folder, record)  # before anything is created, so that it can be found again
            made = _make(clients, target, names, folder, facts, allow, say)
            files = _gather(folder, token, environment.constraints)
            parts = config.Parts(**made, facts=facts, files=files, requirements=environment.requirements)
            _launch(target, names, folder, parts, old, say)
            head = _find_head(clients, names)
            if head is None:
                raise FeverError(f"AWS shows no head of {name} although Ray has launched it; see {folder}/up.log")
            seen = look(_ssh(target, folder, head))
            _save(folder, {**record, "up": True})
    except BaseException:
        if old is None or not record["up"]:
            with signals_wait(say):
                _undo(target, name, folder, say)
        raise
    return {**seen, **_describe(target, record, folder, head)}


def _make(
    clients: Clients, target: Aws, names: Names, folder: Path, facts: Facts, allow: str, say: Callable[[str], None]
) -> dict[str, Any]:
    """Create role, key pair and security group; those that exist are kept."""
    say(f"role, key pair and security group {names.full}; ssh from {allow}")
    if target.workers.spot and target.workers.count and resources.make_spot_role(clients):
        say(f"AWS has created {resources.SPOT_ROLE}, which this account did not have")
    profile = resources.make_role(clients, names, config.head_policy(names, target.region))
    resources.make_key(clients, names, folder / "key.pem")
    group = resources.make_group(clients, names, facts.vpc, allow)
    return {"profile": profile, "group": group, "key": folder / "key.pem"}


def _gather(folder: Path, token: Path, constraints: str) -> Path:
    """The folder that every instance gets; Ray's launcher keeps folders up to date, but not single files."""
    files = folder / "files"
    files.mkdir(mode=0o700, exist_ok=True)
    _write(files / "token", token.read_text())
    _write(files / "constraints.txt", constraints)
    return files


def _launch(target: Aws, names: Names, folder: Path, parts: config.Parts, old: Any, say: Callable[[str], None]) -> None:
    """Run `ray up`, repeatedly while AWS does not know the new instance profile everywhere."""
    rendered = render(target, names, parts)
    config.check(rendered)
    _write(folder / "cluster.yaml", json.dumps(rendered, indent=1))  # which is YAML too
    words = ["up", str(folder / "cluster.yaml"), "--yes", "--no-config-cache"]
    if old is None:
        (folder / "known_hosts").unlink(missing_ok=True)
    elif _ray_runs(target, folder, old):
        words.append("--no-restart")  # keep running jobs alive
    for attempt in range(PROFILE_ATTEMPTS):
        problem = run_ray(words, folder / "up.log", say, target.connect_seconds)
        if problem is None:
            return
        unknown = "Invalid IAM Instance Profile" in (folder / "up.log").read_text(errors="replace")
        if not unknown or attempt + 1 == PROFILE_ATTEMPTS:
            break
        say("AWS does not know the new instance profile everywhere yet; trying again")
        time.sleep(PROFILE_SECONDS)
    raise FeverError(f"Ray could not bring {names.cluster} up: {problem} (its log is {folder / 'up.log'})")


def _undo(target: Aws, name: str, folder: Path, say: Callable[[str], None]) -> None:
    """Remove everything of a cluster that did not come up."""
    say("removing what was created")
    try:
        left = down(target, name, folder, say, polite=False)
    except FeverError as error:
        left = [str(error)]
    for line in left:
        say(f"still there: {line}")
    if left:
        say(f"`fever aws leftovers {target.region}` removes them")


def own_address() -> str:
    """The address that this machine has as seen by AWS, as a network of one address."""
    try:
        with urllib.request.urlopen(ECHO, timeout=10) as answer:  # nosec B310 # a fixed https address
            return str(ipaddress.ip_network(answer.read(100).decode().strip()))
    except (OSError, ValueError) as error:
        how = "set `allow:` to the addresses that may use ssh, such as 1.2.3.4/32"
        raise FeverError(f"{ECHO} does not tell this machine's own address ({error}); {how}") from error


# down


@translate_errors()
def down(target: Aws, name: str, folder: Path, say: Callable[[str], None], polite: bool = True) -> list[str]:
    """End a cluster and remove all of its resources; returns descriptions of what AWS still shows of it.

    `polite`: run `ray down` first.
    """
    record = _load(folder)
    if record is None:
        return []
    names, region = Names(name, record["id"]), record["fixed"]["region"]
    if polite and (folder / "cluster.yaml").exists():
        say("ray down")
        run_ray(["down", str(folder / "cluster.yaml"), "--yes"], folder / "down.log", say, 30.0, DOWN_SECONDS)
    left: list[Leftover] = []
    for _ in range(ROUNDS):  # an instance whose launch was under way appears late
        mine = [row for row in find_leftovers(region) if row.name == names.full]
        if not mine:
            for file in REMOVED:
                (folder / file).unlink(missing_ok=True)
            with suppress(OSError):
                (folder / "files").rmdir()
            return []
        for row in mine:
            say(f"removing {row.kind} {row.id}")
        left = remove_leftovers(mine)
    return [str(row) for row in left or mine]


# what it costs


@translate_errors()
def status(target: Aws, folder: Path) -> dict[str, Any]:
    """The instances of a cluster, their hours, and their cost."""
    record = _load(folder)
    return cost.bill(target, folder, None if record is None else record["id"])


@translate_errors()
def plan(target: Aws, name: str, folder: Path) -> list[str]:
    """What `up` would make, and its price per hour, line by line; AWS is asked what it could refuse."""
    record = _load(folder) or _new_record(target, name)
    _refuse_changes(target, name, record)
    clients = resources.connect(target.region)
    facts = resources.inspect(clients, target.head, target.workers.type, record["image"] or target.image)
    lines = cost.describe_plan(target, name, facts.image)
    return [*lines, f"{name} is up already: its instances stay"] if record["up"] else lines


# the record


def _new_record(target: Aws, name: str) -> dict[str, Any]:
    if not re.fullmatch(rf"[A-Za-z0-9][\w.-]{{0,{LONGEST_NAME - 1}}}", name):
        raise FeverError(
            f"{name!r} cannot be a cluster's name: letters, digits, dots and dashes, at most {LONGEST_NAME}"
        )
    fixed = {key: getattr(target, key) for key in FIXED}
    return {"id": secrets.token_hex(4), "began": time.time(), "up": False, "image": None, "fixed": fixed}


def _refuse_changes(target: Aws, name: str, record: dict[str, Any]) -> None:
    for setting_name, value in record["fixed"].items():
        if getattr(target, setting_name) != value:
            raise FeverError(f"{name} was brought up with {setting_name}: {value}; take it down to change that")


def _load(folder: Path) -> dict[str, Any] | None:
    path = folder / "aws.json"
    return json.loads(path.read_text()) if path.exists() else None


def _save(folder: Path, record: dict[str, Any]) -> None:
    _write(folder / "aws.json", json.dumps(record))


def _write(path: Path, text: str) -> None:
    """Write a file that only this user can read, atomically."""
    JobFolder(path.parent).write_text(path.name, text, mode=0o600)


# the head


def _find_head(clients: Clients, names: Names) -> Any:
    heads = resources.list_instances(clients, resources.LIVING, fever_id=names.id, ray_node_type="head")
    return heads[0] if heads else None


def _ssh(target: Aws, folder: Path, head: Any) -> list[str]:
    known = ["-o", f"UserKnownHostsFile={folder / 'known_hosts'}", "-o", "StrictHostKeyChecking=accept-new"]
    words = ["ssh", "-i", str(folder / "key.pem"), "-o", "IdentitiesOnly=yes", "-o", "ConnectTimeout=20", *known]
    return [*words, f"{target.user}@{head['PublicIpAddress']}"]


def _ray_runs(target: Aws, folder: Path, head: Any) -> bool:
    words = [*_ssh(target, folder, head), "pgrep -x gcs_server"]
    with suppress(subprocess.TimeoutExpired):
        return subprocess.run(words, capture_output=True, stdin=subprocess.DEVNULL, timeout=60).returncode == 0
    return False


def _describe(target: Aws, record: dict[str, Any], folder: Path, head: Any) -> dict[str, Any]:
    return {
        "id": record["id"],
        "began": record["began"],
        "ssh": _ssh(target, folder, head),
        "dashboard": config.DASHBOARD,
        "address": f"{head['PrivateIpAddress']}:{config.PORT}",
    }
