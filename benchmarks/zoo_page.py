"""docs/zoo.md and its pictures, from the rows of the zoo and the results that `zoo.py` stored."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from pathlib import Path

from fever.text import format_count, format_duration, format_number
from fever.zoo.results import Result, read_result
from fever.zoo.rows import Row, Sheet, all_rows, text

ROOT = Path(__file__).parents[1]
PAGE, PICTURES = ROOT / "docs" / "zoo.md", ROOT / "docs" / "images" / "zoo"
HEADER = """\
# The zoo

<!-- Written by `python benchmarks/zoo.py --page`: change that, the files in fever/zoo, or the results. -->

Settings that are known to learn, for an environment and an algorithm, from published ones. `fever zoo` lists them.

```
fever train LunarLander-v3                 # takes the zoo's settings, and says so in one line
fever train LunarLander-v3 gamma=0.99      # what you set wins; the rest is the zoo's
fever train LunarLander-v3 --no-preset     # plain defaults
fever config ppo --env LunarLander-v3      # which value comes from where
make zoo ROW=lunarlander-ppo               # repeats a row in a checkout: trains 5 seeds, evaluates, writes the result
make zoo ROW=lunarlander-ppo CHECK=1       # repeats two seeds, and fails if they do not confirm it
```

- A preset is a run's environment, with exactly these arguments, and its algorithm. It has the algorithm's settings,
  the number of environments, and a budget: a run without any stop rule of yours ends there, or at the environment's
  reward threshold.
- It is under what you set: on the command line, in a YAML file (`preset: false` is `--no-preset`) or in Python
  (`fever.train(..., preset=False)`), and under what `fever tune` samples. A schedule of the preset's ends at its
  budget, and so does the run, unless you set `--stop-steps`.
- The run's `config.yaml` has all values, so a resumed run does not change when the zoo does.
- Only measured rows are presets. "Not measured yet" are settings that were published, for whoever measures them next.
- Rows with plain defaults change nothing. They say what the defaults reach.

**How scores are measured.** Each seed is trained to the end of the budget, without a reward threshold. Its last policy
plays 20 episodes with the most likely actions. The score is the mean over seeds, with a 95 % bootstrap interval of
that mean. Wall times are of a machine that had other work as well. Curves are of training's episodes, with the same
kind of band. The published score is one run's or a few runs', often in an older version of the environment: its source
says which. A check (`CHECK=1`) accepts means within the stored interval, widened on either side by the standard
deviation over seeds, and by at least 10 % of the mean.
"""


def write_page() -> None:
    """Write the page, and a picture for each result."""
    for name, sheet, algo, row in all_rows():
        if (result := read_result(name)) is not None:
            draw(result, row, f"{sheet.env}, {algo}", PICTURES / f"{name}.svg")
    PAGE.write_text(page())


def page() -> str:
    """The text of docs/zoo.md."""
    parts = [HEADER, "\n".join(overview())]
    env = ""
    for name, sheet, algo, row in all_rows():
        if (title := env_title(sheet)) != env:
            parts.append(f"## {title}\n")
            env = title
        parts.append("\n".join(section(name, sheet, algo, row)))
    return "\n".join(parts)


def env_title(sheet: Sheet) -> str:
    arguments = ", ".join(f"{name}={text(value)}" for name, value in sheet.env_kwargs.items())
    return sheet.env + (f" ({arguments})" if arguments else "")


def overview() -> Iterator[str]:
    """A line for each row."""
    yield "| row | environment | algorithm | steps | score | published |"
    yield "|---|---|---|---|---|---|"
    for name, sheet, algo, row in all_rows():
        result = read_result(name)
        found = f"{result.words}, {len(result.seeds)} seeds" if result is not None else "not measured yet"
        yield f"| {name} | {env_title(sheet)} | {algo} | {format_count(row.steps)} | {found} | {published(row)} |"
    yield ""


def published(row: Row) -> str:
    if row.anchor is None:
        return "-"
    deviation = f" ± {format_number(row.anchor.deviation)}" if row.anchor.deviation is not None else ""
    return f"{format_number(row.anchor.score)}{deviation} at {format_count(row.anchor.steps)}"


def section(name: str, sheet: Sheet, algo: str, row: Row) -> Iterator[str]:
    """Everything about one row."""
    result = read_result(name)
    yield f"### {name}\n"
    if result is not None:
        yield f"![learning curve](images/zoo/{name}.svg)\n"
        cores = f"{result.cores} cores, two runs at a time"
        each = ", ".join(map(format_number, result.scores))
        yield f"- score {result.words} after {result.steps:,} steps; each seed: {each}"
        yield f"- {format_duration(result.seconds)} a run (median, {cores}), fever {result.fever}, {result.date}"
        yield f"- `{result.command}`"
    else:
        words = shlex.join(["fever", "train", sheet.env, "--algo", algo])
        yield f"- not measured yet: `make zoo ROW={name}`; budget {row.steps:,} steps; `{words}`"
    if row.anchor is not None:
        yield f"- published: {published(row)} steps ({row.anchor.source})"
    if row.note:
        yield f"- {row.note}"
    if row.plain:
        yield "- plain defaults\n"
        return
    yield "\n| setting | value | source |\n|---|---|---|"
    for one, value in row.values.items():
        yield f"| {'--envs' if one == 'envs' else one} | {text(value)} | {row.source_of(one)} |"
    yield ""


def draw(result: Result, row: Row, title: str, path: Path) -> None:
    """A small picture of the curve, its band, and the published score."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    matplotlib.rcParams["svg.hashsalt"] = result.row  # the same picture from the same numbers
    matplotlib.rcParams["svg.fonttype"] = "none"  # text stays text, which is smaller than its outlines
    figure, axes = pyplot.subplots(figsize=(5, 2.6), layout="constrained")
    curve = result.curve
    axes.plot(curve.steps, curve.mean, label=f"{len(result.seeds)} seeds")
    if curve.low is not None and curve.high is not None:
        axes.fill_between(curve.steps, curve.low, curve.high, alpha=0.25, linewidth=0)
    if row.anchor is not None:
        axes.axhline(row.anchor.score, color="gray", linestyle="--", linewidth=1, label="published")
    axes.set(title=title, xlabel="environment steps", ylabel="return")
    axes.legend(frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)
