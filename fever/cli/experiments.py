"""Commands for experiments, which are runs that differ in their seed: comparisons, and trainings of several seeds."""

from __future__ import annotations

import json
import sys
from typing import Annotated, Any

import typer

from fever.cli import completion
from fever.cli.jobs import Json, leave_for
from fever.cli.runs import Runs, Scales
from fever.errors import FeverError
from fever.files import user_path
from fever.text import one_line, say

commands = typer.Typer()


@commands.command()
def compare(
    names: Annotated[
        list[str],
        typer.Argument(
            metavar="RUN...",
            help="Experiments: any run of each, or a pattern such as 'runs/ppo-*'. All are compared with the first.",
            autocompletion=completion.runs,
        ),
    ],
    scale: Scales = None,
    runs: Runs = "runs",
    as_json: Json = False,
) -> None:
    """Compare experiments over their seeds: differences with intervals, and whether the seeds are enough to tell."""
    from fever.experiments.compare import compare, parse_scale
    from fever.experiments.report import lines
    from fever.experiments.select import find_groups

    groups = find_groups(names, runs)
    report = compare(groups, parse_scale(scale or []))
    if as_json:
        say(json.dumps(report.as_json()))
        return
    for group in groups:
        say(one_line(f"{group.name}: {', '.join(group.paths)}"), sys.stderr)
    for line in lines(report):
        say(line)


def train_seeds(config: Any, several: dict[str, int], place: dict[str, Any], quiet: bool, as_json: bool) -> None:
    """Train an experiment with several seeds, here or on the target of `--on`, and exit."""
    if "seeds" not in several:
        raise FeverError("--parallel has no effect without --seeds; add --seeds 5")
    if place:
        _submit(config, several, place, quiet, as_json)
        return
    from fever.experiments.several import train_several
    from fever.experiments.table import errors_text, make_table

    table = make_table("quiet" if quiet else "auto", to_stderr=as_json)
    summary, code = train_several(config, several["seeds"], several.get("parallel"), table)
    if as_json:
        say(json.dumps(summary))
    elif quiet and summary["failed"]:
        failed = f"{summary['failed']} of {len(summary['runs'])} seeds failed: {errors_text(summary['runs'])}"
        say(one_line(f"fever: {failed}"), sys.stderr)
    if code:
        raise typer.Exit(code)


def _submit(config: Any, several: dict[str, int], place: dict[str, Any], quiet: bool, as_json: bool) -> None:
    """Submit one job per seed, all at once, and return without following their logs."""
    from fever.experiments.several import several_configs

    if "parallel" in several:
        raise FeverError("--parallel is for this machine; with --on every seed is a job of its own")
    if place.get("on") == "mpi":
        raise FeverError("--seeds does not go with --on mpi, whose ranks train one run; start one for each --seed")
    configs = several_configs(config, several["seeds"])
    submitted: list[str] = []
    for one in configs:
        try:
            leave_for(one, {**place, "detach": True}, quiet, False)
        except typer.Exit as done:
            if done.exit_code:
                raise
        except FeverError as error:
            if not submitted:
                raise
            raise FeverError(f"{len(submitted)} of {len(configs)} jobs were submitted, then: {error}") from error
        if place.get("dry_run"):
            return
        submitted.append(str(user_path(one.runs).resolve() / str(one.name)))
    if as_json:
        from fever.launch.jobs import list_jobs

        names = {str(job.run): job.name for job in list_jobs()}
        say(json.dumps({"jobs": [{"job": names.get(run), "run": run} for run in submitted]}))
    elif not quiet:
        say(one_line(f"next: fever jobs, and when they have ended: fever compare {submitted[0]} OTHER-RUN"))
