"""The zoo's files: `LunarLander-v3.yaml` has the rows of an environment, `ALE-Pong-v5.ram.yaml` those of the same id
with other arguments. Only the files of one environment are read to find a row."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import model_validator

from fever.config import MOST_ENVS, Count, Settings, load_yaml, setting, validate
from fever.text import brief

FOLDER = Path(__file__).parent
RESULTS = "results"  # in it: ROW.json for every row that is measured
DEFAULT = "default"  # in `sources`: of every value that has no source of its own
RUN_FIELDS = ("envs", "steps")  # values of a row that are no settings of the algorithm


class Anchor(Settings):
    """A published result that a row is compared with."""

    score: float = setting(..., "mean return of an episode")
    deviation: float | None = setting(None, "as its source gives it: over episodes of one run, or over runs")
    steps: Count = setting(..., "environment steps of the training")
    source: str = setting(..., "where it is published, and what is different there")


class Row(Settings):
    """Settings of one algorithm in one environment, and the budget that they are meant for."""

    settings: dict[str, Any] = setting({}, "the algorithm's settings that differ from its defaults; none: plain ones")
    envs: int | None = setting(None, "environments of the whole run; null: the default", gt=0, le=MOST_ENVS)
    steps: Count = setting(..., "environment steps at which a run without any stop rule ends")
    sources: dict[str, str] = setting({}, "value -> its source; `default`: of all others")
    anchor: Anchor | None = setting(None, "a published result")
    note: str = setting("", "what the source has and fever has not, or has in another way")

    @model_validator(mode="after")
    def _all_have_a_source(self) -> Row:
        if self.settings and (missing := [name for name in self.values if not self.source_of(name)]):
            raise ValueError(f"sources has nothing for {missing[0]}")
        return self

    @property
    def values(self) -> dict[str, Any]:
        """What is put under the user's values: settings, and `envs` if it has a value."""
        return {**self.settings, **({"envs": self.envs} if self.envs is not None else {})}

    @property
    def plain(self) -> bool:
        """Whether it stands for the algorithm's defaults."""
        return not self.settings and self.envs is None

    def source_of(self, name: str) -> str:
        return self.sources.get(name) or self.sources.get(DEFAULT, "")


class Sheet(Settings):
    """One file: an environment with its arguments, and its rows."""

    env: str = setting(..., "the environment's id, with the module that registers it if it needs one")
    env_kwargs: dict[str, Any] = setting({}, "its arguments; a run with others gets no preset")
    rows: dict[str, Row] = setting(..., "algorithm -> row")

    def fits(self, env: str, env_kwargs: dict[str, Any]) -> bool:
        """Whether this is about an environment with these arguments."""
        if plain_id(env) != plain_id(self.env) or env_kwargs.keys() != self.env_kwargs.keys():
            return False
        return all(type(env_kwargs[name]) is type(one) and env_kwargs[name] == one
                   for name, one in self.env_kwargs.items())  # fmt: skip


def plain_id(env: str) -> str:
    """An id without the module that registers it: `mobile_env:mobile-small-central-v0` without `mobile_env:`. Classes
    and functions, `module:Name`, keep theirs."""
    module, _, name = env.rpartition(":")
    return name if module and re.search(r"-v\d+$", name) else env


def find_row(env: str, env_kwargs: dict[str, Any], algo: str, measured: bool = False) -> Row | None:
    """The row of an environment, by its current id and all its arguments, and an algorithm; None if there is none.
    `measured`: only one that has a result."""
    stem = re.sub(r"[^\w+-]+", "-", plain_id(env))
    for path in sorted(FOLDER.iterdir()):
        if path.suffix == ".yaml" and path.name.startswith(f"{stem}.") and read_sheet(path).fits(env, env_kwargs):
            has_result = (FOLDER / RESULTS / f"{row_name(path, algo)}.json").is_file()
            return read_sheet(path).rows.get(algo) if has_result or not measured else None
    return None


def row_name(path: Path, algo: str) -> str:
    """`lunarlander-ppo` for the row of an algorithm in `LunarLander-v3.yaml`."""
    stem = re.sub(r"^ALE-|-v\d+", "", path.stem).replace(".", "-").lower()
    return f"{stem}-{algo}"


def all_rows() -> Iterator[tuple[str, Sheet, str, Row]]:
    """Every row: its name such as `lunarlander-ppo`, its file's content, its algorithm, and itself."""
    for path in sorted(FOLDER.glob("*.yaml"), key=lambda path: path.name.lower()):
        sheet = read_sheet(path)
        for algo, row in sheet.rows.items():
            yield row_name(path, algo), sheet, algo, row


@cache
def read_sheet(path: Path) -> Sheet:
    return validate(Sheet, load_yaml(path), path.name)


def written(values: dict[str, Any], most: int | None = None) -> str:
    """`gamma=0.999, steps=1024, ...` with the number of those beyond `most`."""
    words = [f"{name}={text(value)}" for name, value in values.items()]
    more = [] if most is None or len(words) <= most else [f"and {len(words) - most + 1} more"]
    return ", ".join([*words[: len(words) if not more else int(most or 0) - 1], *more])


def text(value: Any) -> str:
    """A value as it is written on the command line: `256,256`, `true`, `linear`."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list) and value and not any(isinstance(one, list) for one in value):
        return ",".join(map(text, value))
    return value if isinstance(value, str) else brief(value)
