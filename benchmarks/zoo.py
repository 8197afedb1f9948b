"""Repeats a row of the zoo: trains it with several seeds, evaluates the last policies, writes the result and the page.

    python benchmarks/zoo.py                             # lists the rows
    python benchmarks/zoo.py lunarlander-ppo --seeds 5   # fever/zoo/results/lunarlander-ppo.json; `make zoo ROW=...`
    python benchmarks/zoo.py lunarlander-ppo --check     # two seeds against that; exit code 1 if they differ
    python benchmarks/zoo.py --page                      # docs/zoo.md and its pictures, from all results, as after each

Runs are in runs/zoo. One that reached its budget there is not repeated, so that a row can be continued: remove the
folder after fever itself has changed. A check trains anew, in a temporary folder.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from zoo_page import write_page

from fever import __version__
from fever.algos.registry import config_of
from fever.config import DEFAULT_ENVS
from fever.experiments.compare import score
from fever.experiments.scores import TRAINING, grid, read_curves
from fever.experiments.statistics import band
from fever.runs.run import Run
from fever.zoo.results import FOLDER, Result, read_result
from fever.zoo.rows import Row, Sheet, all_rows, text

AT_ONCE = 2  # runs
EPISODES, EVAL_SEED = 20, 1_000_000  # of the evaluation of each seed's last policy
POINTS = 60  # of a stored curve
CHECKED = 2  # seeds of a check
TOLERANCE = 0.1  # share of the stored mean by which a check's mean may be outside the stored interval

Found = tuple[str, Sheet, str, Row]  # name, file, algorithm, row


def train_command(found: Found, seed: int, steps: int, runs: Path) -> list[str]:
    """The words behind `fever` that train one seed to the end of the budget."""
    name, _, _, row = found
    envs = ["--envs", str(row.envs)] if row.envs is not None else []
    values = ["--no-preset", *envs, *(f"{key}={text(value)}" for key, value in row.settings.items())]
    return [*user_command(found, seed, steps), *values, "--runs", str(runs), "--name", f"{name}-{seed}"]


def user_command(found: Found, seed: int, steps: int) -> list[str]:
    """The words that do so once the row is measured, and so a preset."""
    _, sheet, algo, _ = found
    arguments = ["--env-kwargs", json.dumps(sheet.env_kwargs)] if sheet.env_kwargs else []
    return ["train", sheet.env, "--algo", algo, *arguments, "--seed", str(seed), "--stop-steps", str(steps)]


def fever(*words: str) -> dict[str, Any]:
    """What a command of fever's prints with --json."""
    done = subprocess.run([sys.executable, "-m", "fever", *words, "--json"], stdout=subprocess.PIPE, text=True)
    if done.returncode:
        sys.exit(f"failed: fever {shlex.join(words)}")
    return json.loads(done.stdout.splitlines()[-1])


def run_seed(found: Found, seed: int, steps: int, runs: Path) -> tuple[Run, float]:
    """Train one seed, unless that has been done, and evaluate its last policy; returns its run and score."""
    words = train_command(found, seed, steps, runs)
    run = Run(runs / words[-1])
    if run.saved and not fits(run, found, steps):
        sys.exit(f"{run.path} was trained with other settings or another budget; remove it")
    if not run.saved:
        fever(*words, "--quiet")
    elif (run.summary or {}).get("stop_reason") != "steps":
        fever("resume", str(run.path), "--quiet")
    options = ["--checkpoint", "last", "--episodes", str(EPISODES), "--seed", str(EVAL_SEED), "--no-compare"]
    mean = fever("eval", str(run.path), *options)["return_mean"]
    print(f"{found[0]}, seed {seed}: {mean:.1f} after {steps:,} steps", file=sys.stderr, flush=True)
    return run, mean


def fits(run: Run, found: Found, steps: int) -> bool:
    """Whether a run has the settings that the row and the defaults give now, and this budget."""
    _, _, algo, row = found
    wanted = config_of(algo).model_validate(row.settings).model_dump(mode="json")
    kept = run.config
    return (kept.settings, kept.envs, kept.stop.steps) == (wanted, row.envs or DEFAULT_ENVS, steps)


def repeat(found: Found, seeds: int, steps: int, runs: Path) -> Result:
    """Train and evaluate the first so many seeds, two at a time."""
    with ThreadPoolExecutor(AT_ONCE) as pool:
        pairs = list(pool.map(lambda seed: run_seed(found, seed, steps, runs), range(seeds)))
    scores = np.array([mean for _, mean in pairs])
    curves = read_curves([run for run, _ in pairs], TRAINING, [])
    every = np.linspace(grid(curves)[0], grid(curves)[-1], POINTS)
    lines = np.array([curve.at(every) for curve in curves])
    around, shown = band(lines), [f"{value:.4g}" for value in every]
    summaries = [run.summary or {} for run, _ in pairs]
    whole = score(scores)
    return Result(
        row=found[0],
        steps=steps,
        seeds=tuple(range(seeds)),
        scores=_short(scores),
        episodes=EPISODES,
        mean=_short([whole.mean])[0],
        interval=whole.interval and _short(whole.interval),
        seconds=round(statistics.median(summary["seconds"] for summary in summaries), 1),
        cores=os.cpu_count() or 1,
        fever=__version__,
        date=time.strftime("%Y-%m-%d"),
        command=shlex.join(["fever", *user_command(found, 0, steps)]),
        curve={
            "steps": tuple(map(float, shown)),
            "mean": _short(lines.mean(0)),
            "low": _short(around[0]) if around is not None else None,
            "high": _short(around[1]) if around is not None else None,
        },
    )


def _short(values: Any) -> tuple[float, ...]:
    """Numbers with four digits, which keeps the files small."""
    return tuple(float(f"{float(value):.4g}") for value in values)


def allowed(stored: Result) -> tuple[float, float]:
    """The means that a check accepts: the stored interval, widened on either side by the standard deviation over the
    stored seeds, and by at least `TOLERANCE` of the mean."""
    low, high = stored.interval or (stored.mean, stored.mean)
    spread = statistics.stdev(stored.scores) if len(stored.scores) > 1 else 0.0
    margin = max(TOLERANCE * abs(stored.mean), spread)
    return low - margin, high + margin


def check(found: Found, steps: int | None) -> bool:
    """Repeat two seeds of a stored result; returns whether their mean is among those that it allows."""
    stored = read_result(found[0])
    if stored is None:
        sys.exit(f"{found[0]} has no result yet: make zoo ROW={found[0]}")
    with tempfile.TemporaryDirectory(prefix="fever-zoo-") as folder:
        mean = repeat(found, CHECKED, steps or stored.steps, Path(folder)).mean
    low, high = allowed(stored)
    good = low <= mean <= high
    print(f"{found[0]}: {mean:.1f}, allowed {low:.1f} to {high:.1f}: {'ok' if good else 'NOT REPEATED'}")
    return good


def write(result: Result, folder: Path) -> Path:
    """Write a result into a folder; returns the file."""
    folder.mkdir(exist_ok=True)
    path = folder / f"{result.row}.json"
    path.write_text(json.dumps(result.model_dump(mode="json")).replace(', "', ',\n "') + "\n")
    return path


def main() -> None:
    """Do what the command line says."""
    parser = argparse.ArgumentParser(description="Repeats a row of the zoo, and writes its result.")
    parser.add_argument("row", nargs="?", help="name of a row; without it, list all")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, help="another budget than the row's, to try this program")
    parser.add_argument("--runs", type=Path, default=Path("runs/zoo"))
    parser.add_argument("--to", type=Path, default=FOLDER, help="folder of results")
    parser.add_argument("--check", action="store_true", help="repeat two seeds and compare with the stored result")
    parser.add_argument("--page", action="store_true", help="write docs/zoo.md and its pictures")
    options = parser.parse_args()
    rows = {found[0]: found for found in all_rows()}
    if options.page:
        write_page()
        return
    if options.row is None:
        print("\n".join(f"{name:26} {found[3].steps:>12,} steps" for name, found in rows.items()))
        return
    if options.row not in rows:
        sys.exit(f"there is no row {options.row}; there are: {', '.join(rows)}")
    found = rows[options.row]
    if options.check:
        sys.exit(0 if check(found, options.steps) else 1)
    result = repeat(found, options.seeds, options.steps or found[3].steps, options.runs)
    print(f"{result.row}: {result.words} over {len(result.seeds)} seeds; {write(result, options.to)}")
    if options.to == FOLDER:
        write_page()


if __name__ == "__main__":
    main()
