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


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


@commands.command(rich_help_panel="Other machines")
def up(
    file: ClusterFile,
    min_hosts: Annotated[
        int | None, typer.Option(help="Least number of hosts that must come up.  \\[default: 1]")
    ] = None,
) -> None:
    """Start a cluster: Ray on every host that is not part of it yet."""
    record = load_cluster(file, min_hosts=min_hosts).up(file, say)
    cores = [count for count in record.hosts.values() if count]
    size = f"{len(cores)} hosts, {sum(cores)} cores" if cores else "workers follow"
    print(f"{record.name} is up: {size}; train with: fever train ENV --on {file}")


@commands.command(rich_help_panel="Other machines")
def status(file: ClusterFile, as_json: Json = False) -> None:
    """Show a cluster: hosts, cores in use, jobs, hours since it was started, cost."""
    from fever.launch.clusters.record import require_record
    from fever.launch.clusters.status import describe

    record = require_record(load_cluster(file), file)
    described = describe(record)
    if as_json:
        print(json.dumps(described))
        return
    print(f"{record.name}: up for {described['hours']:.1f} h, head {record.head}")
    for row in described["hosts"]:
        busy = f"{row['busy']:.1f} of {row['cores']} cores in use" if row["state"] == "up" else row["reason"]
        print(f"  {row['host']:20} {row['state']:8} {busy}")
    for row in described["jobs"]:
        print(f"  {row['job']:20} {row['state']:8} {row['reason']:24} {row['run']}")
    if cost := described["cost"]:
        for row in cost["instances"]:
            price = f"{row['price']:.3f} USD/h" if row["price"] is not None else "price unknown"
            spot = ", spot" if row["spot"] else ""
            print(f"  {row['id']:20} {row['state']:8} {row['type']}{spot}, {row['hours']:.1f} h, {price}")
        print(f"  about {cost['estimate']:.2f} USD so far, by prices of {cost['prices']} ({cost['note']})")


@commands.command(rich_help_panel="Other machines")
def down(
    file: ClusterFile,
    force: Annotated[
        bool, typer.Option("--force", help="Shut down even if results cannot be fetched; they are lost.")
    ] = False,
) -> None:
    """Shut a cluster down: fetch the results that are missing here, stop everything, report what is left."""
    from fever.launch.clusters import base
    from fever.launch.clusters.jobs import fetch_all, jobs_of
    from fever.launch.clusters.record import find_record, require_record

    target = load_cluster(file)
    if find_record(str(target.name)) is None and (left := target.down_unfinished(say, force)) is not None:
        _say_left(left, f"fever down {file}", force)
        return
    record = require_record(target, file)
    fetch_all(record, say, force)
    copies = bool(jobs_of(record)) and target.keeps_runs
    left = base.down(record, say, force)
    _say_left(left, f"fever down {file}", force)
    if copies:
        print(f"{record.head}: copies of the runs remain in {record.runs}; remove them when you like")
    print(f"{record.name} is down after {(time.time() - record.began) / 3600:.1f} h")


def _say_left(left: dict[str, list[str]], again: str, force: bool = False) -> None:
    """Print what is left of a cluster; raises FeverError if anything is, unless it is given up by `force`."""
    for host, things in left.items():
        print(f"{host}: {'stopped, nothing is left' if not things else 'left: ' + ', '.join(things)}")
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

    print(json.dumps(policy(region), indent=2))


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
        print(row)
    chosen = [row for row in found if running or not row.running]
    if not chosen:
        rest = "; --running removes what is running, too" if found else ""
        print(f"nothing is left in {region} of clusters that have ended{rest}")
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
        print(f"still there: {row}")
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
    from fever.text import format_bytes

    found = jobs.find_job(job)
    if (target := found.target) is None or not target.is_remote:
        raise FeverError(f"{found.name} needs no fetch: its run directory is on a shared file system, {found.run}")
    if found.home and to is None:
        print(f"{found.run}: all of it is here, verified")
        return
    where = (to.expanduser().resolve() / found.run.name) if to else None
    with remote.connect(found) as connection:
        try:
            state, _ = connection.state(found)
        except Unreachable:  # Ray is dead there, but files may still be readable
            state = "unknown"
        moved = connection.sync(found, where)
    print(f"{where or found.run}: {format_bytes(moved)} copied, verified; the job is {state.lower()}")


@commands.command(rich_help_panel="Other machines")
def tunnel(
    file: ClusterFile,
    port: Annotated[
        int | None,
        typer.Option(min=1, max=65535, help="Local port for Ray's dashboard.  \\[default: 8265 or a free one]"),
    ] = None,
) -> None:
    """Forward a cluster's Ray dashboard, TensorBoard and runs to this machine, until Ctrl-C."""
    from fever.launch.clusters.record import require_record
    from fever.launch.clusters.tunnel import open_tunnel

    open_tunnel(require_record(load_cluster(file), file), port)
