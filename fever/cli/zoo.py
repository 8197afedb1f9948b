"""Commands about settings: every setting of an algorithm, and the zoo's rows of settings that are known to learn."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fever.cli.completion import algorithms, environments
from fever.cli.jobs import Json
from fever.cli.options import json_object
from fever.cli.runs import plain
from fever.errors import FeverError
from fever.text import format_count, format_number, say

if TYPE_CHECKING:
    from fever.zoo.rows import Row

WIDE = 160  # columns of a table that is not for a terminal
Listed = list[tuple[str, str, str, str]]  # name, value, meaning and source of every setting
commands = typer.Typer()


@commands.command()
def config(
    algo: Annotated[
        str | None, typer.Argument(help="Algorithm; without it, list all.", autocompletion=algorithms)
    ] = None,
    env: Annotated[
        str | None,
        typer.Option(help="Show what a run in this environment gets from the zoo.", autocompletion=environments),
    ] = None,
    env_kwargs: Annotated[str | None, typer.Option(help="With --env: its keyword arguments, as a JSON object.")] = None,
) -> None:
    """Print every setting of an algorithm: default, meaning, and the source of the default."""
    from fever.algos.registry import list_algorithms

    if env_kwargs is not None and env is None:
        raise FeverError("--env-kwargs has no effect without --env; add --env ID")
    if algo is None:
        if env is not None:
            raise FeverError(f"--env {env} needs an algorithm, for example: fever config ppo --env {env}")
        say("\n".join(list_algorithms()))
        return
    rows = _settings(algo)
    if env is None:
        _table(f"settings of {algo}", ("setting", "default", "meaning", "source"), rows)
        return
    from fever.envs.source import EnvSource
    from fever.zoo.rows import find_row

    source = EnvSource(env, json_object(env_kwargs, "--env-kwargs") if env_kwargs is not None else {})
    row = find_row(source.name, source.kwargs, algo, measured=True)
    _table(
        f"settings of {algo} in {source.name}", ("setting", "value", "meaning", "where it comes from"),
        [*_from_zoo(rows, row), *_of_run(row)],
    )  # fmt: skip
    if row is None or row.plain:
        kwargs = f" with {json.dumps(source.kwargs)}" if source.kwargs else ""
        planned = row is None and find_row(source.name, source.kwargs, algo) is not None
        why = "has not measured its settings" if planned else "has no settings"
        say(f"the zoo {why} for {source.name}{kwargs} and {algo}: these are the defaults")


def _settings(algo: str) -> Listed:
    from fever.algos.registry import config_of, find_provider

    provider = find_provider(algo)
    if provider is not None:
        return provider.describe_settings(algo)
    fields = config_of(algo).model_fields
    return [(name, plain(field.default), field.description or "", _source(field)) for name, field in fields.items()]


def _source(field: Any) -> str:
    extra = field.json_schema_extra
    return str(extra["source"]) if isinstance(extra, dict) else ""


def _from_zoo(rows: Listed, row: Row | None) -> Listed:
    """Settings with the values that a run gets, and `zoo` or `default` before their sources."""
    from fever.zoo.rows import text

    ours = row.settings if row is not None else {}
    return [
        (name, text(ours[name]), meaning, f"zoo: {row.source_of(name)}")
        if row is not None and name in ours
        else (name, value, meaning, f"default: {source}" if source else "default")
        for name, value, meaning, source in rows
    ]


def _of_run(row: Row | None) -> Listed:
    """What a row sets besides the algorithm's settings."""
    if row is None or row.plain:
        return []
    steps = ("--stop-steps", str(row.steps), "of a run without any stop rule", f"zoo: {row.source_of('steps')}")
    if row.envs is None:
        return [steps]
    return [("--envs", str(row.envs), "environments", f"zoo: {row.source_of('envs')}"), steps]


@commands.command()
def zoo(as_json: Json = False) -> None:
    """List settings that are known to learn: environment, algorithm, budget, measured score, and a published one."""
    from fever.zoo.results import read_result
    from fever.zoo.rows import all_rows, text

    rows = [(name, sheet, algo, row, read_result(name)) for name, sheet, algo, row in all_rows()]
    if as_json:
        say(json.dumps([
            {
                "row": name, "env": sheet.env, "env_kwargs": sheet.env_kwargs, "algo": algo,
                **row.model_dump(mode="json"), "result": result.model_dump(mode="json") if result else None,
            }
            for name, sheet, algo, row, result in rows
        ]))  # fmt: skip
        return
    lines: list[tuple[str, ...]] = []
    for _, sheet, algo, row, result in rows:
        arguments = ", ".join(f"{name}={text(value)}" for name, value in sheet.env_kwargs.items())
        env = sheet.env + (f" ({arguments})" if arguments else "")
        anchor = row.anchor
        published = f"{format_number(anchor.score)} at {format_count(anchor.steps)}" if anchor else "-"
        lines.append((env, algo, format_count(row.steps), result.words if result else "not measured yet", published))
    _table("", ("environment", "algorithm", "steps", "score", "published"), lines)
    say(
        "fever train ENVIRONMENT --algo ALGORITHM takes these settings; "
        "fever config ALGORITHM --env ENVIRONMENT shows them"
    )


def _table(title: str, columns: tuple[str, ...], rows: Any) -> None:
    """Print a table; on a terminal it is as wide as that."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table(box=None, header_style="bold", title=title or None, title_justify="left")
    for column in columns:
        table.add_column(column, no_wrap=column not in ("meaning", "source", "where it comes from"))
    for row in rows:
        table.add_row(*map(escape, row))
    Console(width=None if sys.stdout.isatty() else WIDE).print(table)
