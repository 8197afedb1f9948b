"""How far a run is: counters, statistics of its episodes, stop rules, and where its time goes."""

from __future__ import annotations

import time
from collections import Counter, deque
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np

from fever.config import Stop
from fever.files import as_count, as_list, as_number, as_seconds
from fever.runs.checkpoint import stop_reason, window_mean
from fever.text import INFO_PREFIX
from fever.training.worker_table import WorkerTable

if TYPE_CHECKING:
    from fever.algos.base import Iteration

FEWEST, MOST = 20, 100  # episodes that the score of training is taken over
NOISE = 0.02  # of the range of all returns: the standard error up to which so few episodes are enough
MOST_INFO_NAMES = 32  # of them become metrics; all are in episodes.jsonl


class Progress:
    """Counters and statistics of one run; a resumed run continues them."""

    def __init__(self, stop: Stop) -> None:
        self.stop = stop
        self.iteration = self.episodes = 0
        self.generation = 0  # how often the run was resumed, or Ray was started anew
        self.returns: deque[float] = deque(maxlen=max(stop.window, MOST))
        self.lengths: deque[int] = deque(maxlen=stop.window)
        self.range: tuple[float, float] | None = None  # the lowest and the highest return so far
        self.evaluates = False  # whether evaluations decide when the goal is reached
        self.evaluation: dict[str, Any] | None = None  # the latest: its steps and mean return
        self.evaluation_seconds = 0.0  # of all evaluations and videos, in all processes that trained the run
        self.info_names: set[str] = set()
        self.steps_by_host: Counter[str] = Counter()  # since this process began
        self.workers = WorkerTable()  # likewise
        self.seconds_before = 0.0  # of training, in the processes that this one continues
        self.begin: float | None = None  # when the loop began,
        self.end: float | None = None  # and when it ended

    @property
    def seconds(self) -> float:
        """Seconds of training so far, of all processes that trained the run."""
        if self.begin is None:
            return self.seconds_before
        return self.seconds_before + (self.end or time.perf_counter()) - self.begin

    def counters(self, steps: int) -> dict[str, Any]:
        """The columns that every row of metrics begins with."""
        return {
            "iteration": self.iteration,
            "steps": steps,
            "episodes": self.episodes,
            "seconds": round(self.seconds, 4),
        }

    def count(self, iteration: Iteration, steps: int) -> list[dict[str, Any]]:
        """Count an iteration, after which the run has this many steps; returns a row for each of its episodes."""
        self.iteration += 1
        rows = []
        for report in iteration.reports:
            self.steps_by_host[report.host] += report.steps
            self.workers.add(report)
            for episode in report.episodes:
                self.episodes += 1
                if episode.counts:
                    total = episode.total_reward
                    self.returns.append(total)
                    low, high = self.range or (total, total)
                    self.range = min(low, total), max(high, total)
                    self.lengths.append(episode.length)
                rows.append({
                    "episode": self.episodes, "steps": steps, "return": episode.total_reward,
                    "length": episode.length, "worker": report.worker_index, "env": episode.env_index,
                    "info": episode.info,
                })  # fmt: skip
        return rows

    def statistics(self) -> dict[str, float]:
        """Returns and lengths of the last `stop.window` episodes; empty before the first one ended."""
        if not self.returns:
            return {}
        returns = np.asarray(self.returns)[-self.stop.window :]
        return {
            "return_mean": float(returns.mean()),
            "return_min": float(returns.min()),
            "return_max": float(returns.max()),
            "length_mean": float(np.mean(self.lengths)),
        }

    def info_means(self, episodes: list[dict[str, Any]]) -> dict[str, float]:
        """The means of what environments reported in the last `info` of these episodes, as metrics."""
        values: dict[str, list[float]] = {}
        for episode in episodes:
            for name, value in episode["info"].items():
                values.setdefault(name, []).append(value)
        new = [name for name in values if name not in self.info_names]
        self.info_names.update(new[: MOST_INFO_NAMES - len(self.info_names)])
        return {INFO_PREFIX + name: float(np.mean(values[name])) for name in values if name in self.info_names}

    @property
    def score(self) -> float | None:
        """A lower bound of how good the policy is: the mean return of recent episodes minus its standard error; None
        before 20 episodes have ended.

        These are the last 20 episodes, or as many more, up to 100, as it takes until the standard error is at most
        2 % of the range of all returns so far.
        """
        if len(self.returns) < FEWEST or self.range is None:
            return None
        latest = np.array([*islice(reversed(self.returns), MOST)])  # the last one first
        sizes, centre = np.arange(FEWEST, len(latest) + 1), latest.mean()
        latest -= centre  # sums of squares of large numbers lose digits
        sums, squares = (np.cumsum(values)[FEWEST - 1 :] for values in (latest, latest**2))
        means = sums / sizes
        errors = np.sqrt(np.maximum(0.0, squares / sizes - means**2) / (sizes - 1))
        enough = np.flatnonzero(errors <= NOISE * (self.range[1] - self.range[0]))
        place = enough[0] if len(enough) else -1
        return float(centre + means[place] - errors[place])

    def stop_reason(self, steps: int) -> str:
        """The name of the first stop rule that is met, or nothing."""
        evaluated = self.evaluation["return_mean"] if self.evaluation else None
        reached = evaluated if self.evaluates else window_mean(self.returns, self.stop.window)
        return stop_reason(self.stop, reached, steps, self.iteration, self.seconds)

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps besides the iteration."""
        return {
            "episodes": self.episodes, "seconds": self.seconds, "generation": self.generation,
            "returns": list(self.returns), "lengths": list(self.lengths), "range": self.range,
            "evaluation": self.evaluation if self.evaluates else None, "evaluation_seconds": self.evaluation_seconds,
        }  # fmt: skip

    def restore(self, iteration: int, state: dict[str, Any]) -> None:
        """Continue from a checkpoint. Raises `KeyError` or `ValueError` if its state is not one that was written."""
        self.iteration, self.episodes = as_count(iteration), as_count(state["episodes"])
        self.seconds_before, self.generation = as_seconds(state["seconds"]), as_count(state["generation"]) + 1
        self.returns.extend(map(as_number, as_list(state["returns"])))
        self.lengths.extend(map(as_count, as_list(state["lengths"])))
        if bool(self.returns) is not bool(self.lengths):
            raise ValueError("returns without lengths, or lengths without returns")
        self.range = (min(self.returns), max(self.returns)) if self.returns else None
        if state.get("range"):
            low, high = map(as_number, as_list(state["range"]))
            self.range = low, high
        if self.evaluates and state.get("evaluation") is not None:
            kept = state["evaluation"]
            self.evaluation = {"steps": as_count(kept["steps"]), "return_mean": as_number(kept["return_mean"])}
        self.evaluation_seconds = as_seconds(state.get("evaluation_seconds", 0.0))


def phase_shares(iteration: Iteration, wall: float, workers: int) -> dict[str, float]:
    """Where the `wall` seconds of an iteration went: shares of environment, inference, transfer and learning.

    The shares of environment and inference are means over workers. Asynchronous workers sample while the learner
    learns: the workers' two shares and the learner's two then cover the same time, and each pair is at most 1. Their
    reports may include time before the iteration began; the workers' shares are then scaled down to sum to 1.
    """
    if not iteration.seconds:  # not known
        return {}
    width = max(1, workers)
    env = sum(report.seconds["env"] for report in iteration.reports) / width
    busy = sum(report.seconds["total"] for report in iteration.reports) / width
    spent = iteration.seconds.get
    waiting = max(0.0, spent("sample", 0.0) - busy) + spent("wait", 0.0)
    scale = min(1.0, wall / busy) if busy else 1.0
    shares = {
        "time_env": env * scale,
        "time_inference": (busy - env) * scale,
        "time_transfer": spent("transfer", 0.0) + waiting,
        "time_learn": spent("learn", 0.0),
    }
    return {name: round(seconds / wall, 4) for name, seconds in shares.items()}
