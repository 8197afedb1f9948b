"""What is wrong with what a training has left: rows that are missing, transitions that count twice, leftovers."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from chaos.envs import steps_taken
from chaos.processes import marked
from chaos.training import Training
from fever.runs.run import Run


def missing(rows: Sequence[dict[str, Any]], number: str, last: int) -> int:
    """How many of the numbers 1 ... `last` no row has."""
    return last - len({row[number] for row in rows} & set(range(1, last + 1)))


def rows_lost(run: Run, summary: dict[str, Any]) -> int:
    """Rows of metrics and of episodes that the run directory lacks, of those that its summary counts."""
    lost = missing(run.metrics(), "iteration", summary["iterations"])
    return lost + missing(run.episodes(), "episode", summary["episodes"])


def learned_twice(run: Run, summary: dict[str, Any], taken: int) -> int:
    """Transitions that count more than once. `taken`: steps that all environments took, in all processes.

    Experience and the episodes that ended in it travel together, so a fragment that is used twice shows as an episode
    whose identity is there twice, and one of which a part is used twice as an episode that is longer than it was. Rows
    that a resumed run has replaced do not count: the learner has forgotten them too.
    """
    episodes = [row for row in run.episodes() if "chaos_episode" in row["info"]]
    seen = Counter(row["info"]["chaos_episode"] for row in episodes)
    repeated = sum(row["length"] for row in episodes if seen[row["info"]["chaos_episode"]] > 1)
    longer = sum(max(0, row["length"] - int(row["info"]["chaos_length"])) for row in episodes)
    return repeated + longer + max(0, summary["steps"] - taken)


def contradictions(run: Run) -> list[str]:
    """Rows that cannot be true: steps that go back, returns that are no numbers, episodes without identity."""
    found, rows = [], run.metrics()
    if any(later["steps"] < row["steps"] for row, later in itertools.pairwise(rows)):
        found.append("steps go back")
    if any(not math.isfinite(row["return"]) for row in run.episodes() if row["return"] is not None):
        found.append("an episode's return is not a number")
    if any("chaos_episode" not in row["info"] for row in run.episodes()):
        found.append("episodes without identity")
    return found


def leftovers(training: Training) -> list[str]:
    """Processes, Ray's sessions, temporary files and locks that are there although the training has ended."""
    found = [f"process {process.pid}: {process.title[:60]}" for process in marked(training.mark)]
    found += [f"Ray's {path.name}" for path in (training.folder / "t").glob("ray/session_*") if not path.is_symlink()]
    found += [f"temporary {path.name}" for path in (training.folder / "t").iterdir() if path.name != "ray"]
    found += [f"home {path.name}" for path in (training.folder / "home").iterdir() if path.name not in KEPT_AT_HOME]
    found += [str(path.relative_to(training.path)) for path in hidden(training.path)]
    return found + (["the lock is held"] if training.run().running else [])


KEPT_AT_HOME = {".cache", ".config", ".fever"}  # caches, and what fever keeps about runs and clusters


def hidden(folder: Path) -> list[Path]:
    """Files and folders of a run directory that were meant to be renamed or removed."""
    return [path for path in folder.rglob(".*") if path.name[:2] != ".."]


def examine(training: Training, summary: dict[str, Any]) -> tuple[int, int, list[str]]:
    """Rows lost, transitions learned twice, and contradictions of a training that has ended."""
    run = training.run()
    taken = steps_taken(training.control)
    return rows_lost(run, summary), learned_twice(run, summary, taken), contradictions(run)
