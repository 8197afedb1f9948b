"""Commands for clusters on own machines or on AWS: `up`, `status`, `down`, `tunnel`, `attach`, `fetch`, `aws`."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from fever.cli.jobs import JobName, Json
from fever.errors import FeverError
from fever.files import user_path
from fever.text import format_bytes, one_line, say

commands = typer.Typer()
ClusterFile = Annotated[str, typer.Argument(metavar="FILE", help="The cluster's YAML file, with kind: ssh or aws.")]


def load_cluster(file: str, **options: Any) -> Any:
    """The target that a file describes; raises FeverError unless it is a cluster that `up` can start."""
    from fever.launch.clusters.base import ClusterTarget
    from fever.launch.targets import load_target

    target = load_target(file, {name: value for name, value in options.items() if value is not None})
    if not isinstance(target, ClusterTarget) or not target.starts_ray:
        raise FeverError(
            f"{file} has kind: {target.kind}, which is not started with up; submit with: fever train ENV --on {file}"
        )
    return target


def tell(text: str) -> None:
    say(text, sys.stderr)


@commands.command(rich_help_panel="Other machines")
def up(
    file: ClusterFile,
    min_hosts: Annotated[
        int | None, typer.Option(help="Least number of hosts that must come up.  \\[default: 1]")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Of kind: aws, show what would be made and its price, and make nothing.")
    ] = False,
) -> None:
    """Start a cluster: Ray on every host that is not part of it yet."""
    if dry_run:
        from fever.launch.clusters.record import record_folder

        target = load_cluster(file, min_hosts=min_hosts)
        for line in target.plan(record_folder(str(target.name))):
            say(line)
        return
    record = load_cluster(file, min_hosts=min_hosts).up(file, tell)
    cores = [count for count in record.hosts.values() if count]
    size = f"{len(cores)} hosts, {sum(cores)} cores" if cores else "workers follow"
    say(f"{record.name} is up: {size}; train with: fever train ENV --on {file}")


@commands.command(rich_help_panel="Other machines")
def status(file: ClusterFile, as_json: Json = False) -> None:
    """Show a cluster: hosts, cores in use, jobs, hours since it was started, cost."""
    from fever.launch.aws.cost import describe_bill
    from fever.launch.clusters.record import require_record
    from fever.launch.clusters.status import describe

    record = require_record(load_cluster(file), file)
    described = describe(record)
    if as_json:
        say(json.dumps(described))
        return
    say(f"{record.name}: up for {described['hours']:.1f} h, head {record.head}")
    for row in described["hosts"]:
        busy = f"{row['busy']:.1f} of {row['cores']} cores in use" if row["state"] == "up" else row["reason"]
        say(one_line(f"  {row['host']:20} {row['state']:8} {busy}"))
    for row in described["jobs"]:
        say(one_line(f"  {row['job']:20} {row['state']:8} {row['reason']:24} {row['run']}"))
    if cost := described["cost"]:
        for row in cost["instances"]:
            price = f"{row['price']:.3f} USD/h" if row["price"] is not None else "price unknown"
            spot = ", spot" if row["spot"] else ""
            say(f"  {row['id']:20} {row['state']:8} {row['type']}{spot}, {row['hours']:.1f} h, {price}")
        say(f"  so far {describe_bill(cost)}")


@commands.command(rich_help_panel="Other machines")
def down(
    file: ClusterFile,
    force: Annotated[
        bool, typer.Option("--force", help="Shut down even if results cannot be fetched; they are lost.")
    ] = False,
    purge: Annotated[
        bool,
        typer.Option(
            "--purge",
            help="Of ssh hosts, also remove the cluster's Python environments, those unused for 30 days, and copies of "
            "runs that are here. Also of a cluster that is down.",
        ),
    ] = False,
) -> None:
    """Shut a cluster down: fetch the results that are missing here, stop everything, report what is left."""
    from fever.launch.clusters import base
    from fever.launch.clusters.jobs import fetch_all
    from fever.launch.clusters.record import find_record, require_record

    target, record = load_cluster(file), None
    if purge and not target.keeps_runs:
        raise FeverError(f"--purge is for ssh hosts; of kind: {target.kind}, fever down leaves nothing")
    again = f"fever down {file}"
    if find_record(str(target.name)) is None and (left := target.down_unfinished(tell, force)) is not None:
        _say_left(left, {}, again, force)
    elif not purge or find_record(str(target.name)) is not None:
        record = require_record(target, file)
        fetch_all(record, tell, force)
        bill = _bill(record)
        left = base.down(record, tell, force)
        stays = record.target.describe_remains(record, [host for host, things in left.items() if not things])
        _say_left(left, stays, again, force)
        if any(stays.values()) and not purge:
            say(f"{again} --purge removes its environments, those unused for 30 days, and copies of runs that are here")
        say(f"{record.name} is down after {(time.time() - record.began) / 3600:.1f} h{bill}")
    if purge and (kept := (record.target if record else target).purge(record, say)):
        raise FeverError(f"not everything could be removed: {'; '.join(kept)}")


def _bill(record: Any) -> str:
    """What a cluster has cost, if it costs anything; what is unknown of that keeps no cluster up."""
    from fever.launch.aws.cost import describe_bill

    try:
        cost = record.target.describe_cost(record)
    except (FeverError, OSError) as error:
        return f"; what it cost is unknown: {error}"
    return f"; it cost {describe_bill(cost)}" if cost else ""


def _say_left(left: dict[str, list[str]], stays: dict[str, list[str]], again: str, force: bool) -> None:
    """Print what is left of a cluster; raises FeverError if anything is, unless it is given up by `force`."""
    for host, things in left.items():
        but = f" but {', '.join(stays[host])}" if stays.get(host) else ""
        say(f"{host}: {f'stopped, nothing is left{but}' if not things else 'left: ' + ', '.join(things)}")
    if any(left.values()) and not force:
        raise FeverError(
            f"the cluster is only partly down; run {again} again when its hosts answer, or add --force to forget them"
        )


aws_commands = typer.Typer(
    help="Permissions that fever needs on AWS, and resources that are left there.", no_args_is_help=True
)
commands.add_typer(aws_commands, name="aws", rich_help_panel="Other machines")
Region = Annotated[str, typer.Argument(metavar="REGION", help="Region, such as us-west-2.")]


@aws_commands.command()
def policy(
    region: Annotated[
        str | None,
        typer.Argument(metavar="[REGION]", help="Region, if it is in a partition such as China or GovCloud."),
    ] = None,
) -> None:
    """Print the least permissions that your AWS user needs, as an IAM policy."""
    from fever.launch.aws.config import policy

    say(json.dumps(policy(region), indent=2))


@aws_commands.command()
def leftovers(
    region: Region,
    running: Annotated[
        bool, typer.Option("--running", help="Also remove running instances and what belongs to them.")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Remove without asking.")] = False,
) -> None:
    """Find resources that earlier clusters of fever or Ray left in a region, and remove them after asking."""
    from fever.launch.aws.leftovers import find_leftovers, remove_leftovers

    found = find_leftovers(region)
    for row in found:
        say(str(row))
    chosen = [row for row in found if running or not row.running]
    if not chosen:
        rest = "; --running removes what is running, too" if found else ""
        say(f"nothing is left in {region} of clusters that have ended{rest}")
        return
    what = "running instances included" if any(row.running for row in chosen) else "none of them running"
    if not yes and not sys.stdin.isatty():
        raise FeverError(
            f"{len(chosen)} of these would be removed, {what}; confirm with --yes, because there is no terminal"
        )
    if not yes and not typer.confirm(f"Remove {len(chosen)} of these, {what}?"):
        return
    left = remove_leftovers(chosen)
    for row in left:
        say(f"still there: {row}")
    if left:
        raise typer.Exit(1)


@commands.command(rich_help_panel="Other machines")
def attach(job: JobName) -> None:
    """Show the live display of a job, with its whole history. Ctrl-C detaches."""
    from fever.launch import follow, jobs

    raise typer.Exit(follow.show(jobs.find_job(job)))


@commands.command(rich_help_panel="Other machines")
def fetch(
    job: JobName,
    to: Annotated[
        Path | None, typer.Option(help="Folder for the run directory.  \\[default: as when the job was started]")
    ] = None,
) -> None:
    """Copy a job's run directory to this machine: only new files, all verified."""
    from fever.launch import jobs
    from fever.launch.clusters import link as remote
    from fever.launch.clusters.ssh import Unreachable

    found = jobs.find_job(job)
    if (target := found.target) is None or not target.is_remote:
        raise FeverError(f"{found.name} needs no fetch: its run directory is on a shared file system, {found.run}")
    if found.home and to is None:
        say(f"{found.run}: all of it is here, verified")
        return
    where = (user_path(to).resolve() / found.run.name) if to else None
    with remote.connect(found) as connection:
        try:
            state, _ = connection.state(found)
        except Unreachable:  # Ray is dead there, but files may still be readable
            state = "unknown"
        moved = connection.sync(found, where)
    say(f"{where or found.run}: {format_bytes(moved)} copied, verified; the job is {state.lower()}")


@commands.command(rich_help_panel="Other machines")
def tunnel(
    file: ClusterFile,
    port: Annotated[
        int | None,
        typer.Option(min=1, max=65535, help="Local port for Ray's dashboard.  \\[default: 8265 or a free one]"),
    ] = None,
) -> None:
    """Show a cluster's runs, Ray dashboard and TensorBoard on this machine, until Ctrl-C."""
    from fever.launch.clusters.record import require_record
    from fever.launch.clusters.tunnel import open_tunnel

    open_tunnel(require_record(load_cluster(file), file), port)
