"""Commands for jobs on other machines, `jobs`, `logs` and `stop`, and the options that go with `--on`."""

from __future__ import annotations

import json
import math
from typing import Annotated, Any

import typer

from fever.cli import completion
from fever.errors import FeverError
from fever.text import one_line, say

commands = typer.Typer()
JobName = Annotated[
    str,
    typer.Argument(
        metavar="JOB",
        help="Name of a job, its number at the scheduler, the name of its run, or: last.",
        autocompletion=completion.jobs,
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object as the last line of stdout.")]
PLACE_PANEL = "Where it runs"
On = Annotated[
    str | None,
    typer.Option(
        "--on",
        metavar="TARGET",
        help="Where to run: slurm, pbs, lsf, mpi, or the YAML file of a site or cluster.",
        rich_help_panel=PLACE_PANEL,
    ),
]


def _place(annotation: Any, help: str, *names: str) -> Any:
    return Annotated[annotation, typer.Option(*names, help=help, rich_help_panel=PLACE_PANEL)]


PLACE = {  # options of all commands that can run elsewhere, named like the settings of a target
    "on": On,
    "nodes": _place(int | None, "Number of machines.  \\[default: 1]"),
    "hosts": _place(int | None, "Number of a cluster's hosts to use.  \\[default: all]"),
    "cpus_per_node": _place(int | None, "Cores of each machine.  \\[default: all]"),
    "time": _place(str | None, "The job's time limit: 20m, 2h, or as for the scheduler: 1:30:00."),
    "account": _place(str | None, "Account that is charged."),
    "partition": _place(str | None, "Partition or queue."),
    "qos": _place(str | None, "Quality of service."),
    "interface": _place(str | None, "Network interface, such as ib0."),
    "gpus": _place(int | None, "Number of GPUs on the learner's machine."),
    "requeue": _place(bool | None, "Continue in a new job after the time limit.", "--requeue"),
    "dry_run": _place(bool | None, "Print the job's script and submit nothing.", "--dry-run"),
    "detach": _place(bool | None, "Submit, and return without following the log.", "--detach"),
}


def with_gpus(place: dict[str, Any], options: dict[str, Any]) -> dict[str, Any]:
    """The place with the GPUs of `--num-gpus`, an option of the former `rllib train`, if its kind asks for GPUs."""
    gpus = options.get("num_gpus", 0)
    if "on" not in place or "gpus" in place:
        return place
    if not 0 <= gpus < math.inf:
        raise FeverError(f"--num-gpus {gpus} cannot be used: must be a number, 0 or more")
    from fever.launch.targets import find_kind, load_target

    asks = "learner" in find_kind(load_target(place["on"], {}).kind).model_fields
    return {**place, "gpus": math.ceil(gpus)} if asks and gpus else place


def leave_for(config: Any, place: dict[str, Any], quiet: bool, as_json: bool, run: Any = None) -> None:
    """With `--on`, run on that target and exit; without it, return."""
    if place and "on" not in place:
        raise FeverError(f"--{next(iter(place)).replace('_', '-')} has no effect without --on; add --on TARGET")
    if not place:
        return
    from fever.launch.dispatch import Order, run_elsewhere

    on, dry_run, detach = place.pop("on"), place.pop("dry_run", False), place.pop("detach", False)
    flags = [*(["--quiet"] if quiet else []), *(["--json"] if as_json else [])]
    path = run.path.resolve() if run is not None else None
    raise typer.Exit(run_elsewhere(Order(config, on, path, flags, dry_run, detach, place)))


@commands.command(rich_help_panel="Other machines")
def jobs(as_json: Json = False) -> None:
    """List jobs on other machines with their states and run directories."""
    from fever.launch.jobs import list_jobs

    rows = [job.describe() for job in list_jobs()]
    if as_json:
        say(json.dumps(rows))
    elif not rows:
        say("there are no jobs; start one with: fever train CartPole-v1 --on slurm")
    for row in rows if not as_json else ():
        say(one_line(f"{row['job']:16} {row['state']:8} {row['reason']:24} {row['run']}"))


@commands.command(rich_help_panel="Other machines")
def logs(
    job: JobName,
    follow: Annotated[bool, typer.Option("-f", "--follow", help="Follow the log until the job ends.")] = False,
) -> None:
    """Print the log of a job."""
    from fever.launch import follow as following
    from fever.launch import jobs

    found = jobs.find_job(job)
    if follow:
        raise typer.Exit(following.show(found, log=True))
    following.refresh(found)
    if found.log.is_file():
        say(found.log.read_text(errors="replace"), end="")
    else:
        say(f"{found.name} has no log yet: it is {found.state()[0]}")


@commands.command(rich_help_panel="Other machines")
def stop(
    job: JobName, now: Annotated[bool, typer.Option("--now", help="Cancel the job without saving.")] = False
) -> None:
    """Stop a job after it has saved a checkpoint."""
    from fever.launch import jobs

    say(jobs.stop(jobs.find_job(job), now))
