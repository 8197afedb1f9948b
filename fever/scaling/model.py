"""Speed by count: a small model whose parts are measured, and fitted to the counts that were run.

With w workers that together take X samples per second, each of them takes one every u = w / X seconds. Where workers
wait for the learner (PPO, A2C, TRPO), these seconds are a sum:

    u(w) = work(w) + learning(w) + transfer(w)

    work       environment and inference, which workers do side by side: (a + b fill) f. Processes that compute slow
               each other a little while there are cores for all (`fill`, the share of cores that are busy) and
               share the cores beyond (`f`, how many want a core over how many there are, at least 1)
    learning   b w: the samples of w workers are learned from one after the other
    transfer   a w + b w^2: sending weights and experience, waiting for the slowest worker. A batch has the same size
               for all w, so what each batch costs, a, and each worker's call, b, is that of 1 / w as many samples

Workers share the environments. Each acts in its own n at once, so its inference is (a + b / n) f per sample: with more
workers there are more calls of the network, until every worker has one environment. Where all workers have as many
environments and a batch grows with them (`--scale-batch`), learning and transfer are a + b w, and inference is like the
environment.

Where they do not wait (IMPALA, APPO, replay), the slower side decides: X(w) = min(w / work(w), 1 / learning), with the
learner as one more process that computes. If an algorithm does not say where its time goes, u(w) = a f + b w.

A worker computes during its inference and during the probed share of its environment's steps. `a` and `b` are least
squares over the counts that were run, of relative errors, and not negative. On machines of a job every worker has its
own core, whatever their number: there fill and f are constant.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fever.algos.batch import share

ENVIRONMENT, INFERENCE, TRANSFER, LEARNER, CORES = "environment", "inference", "transfer", "learner", "cores"
METRICS = {"time_env": ENVIRONMENT, "time_inference": INFERENCE, "time_transfer": TRANSFER, "time_learn": LEARNER}
MOST_DOUBLINGS = 12  # beyond the largest count, in which another bottleneck is looked for


@dataclass(frozen=True)
class Point:
    """One count that was run, means over the rounds."""

    count: int
    workers: int  # 0: in the learner's process
    rate: float  # samples per second
    shares: dict[str, float]  # part -> share of the time; empty: not known


@dataclass(frozen=True)
class Setting:
    """What is known besides the runs."""

    overlaps: bool  # whether workers sample while the learner learns
    cores: float | None = None  # that all workers share; None: as many as workers, or not known
    computing: float = 1.0  # share of an environment's step that is spent computing
    envs: int | None = None  # that workers share; None: every worker has as many
    same_batch: bool = False  # whether a batch has the same size for all counts; else it grows with the workers


class Model:
    """Predicts samples per second."""

    def __init__(self, points: Sequence[Point], setting: Setting) -> None:
        self.setting = setting
        self.explains = all(point.shares for point in points)
        self.points = [point for point in points if point.workers] or list(points)  # 0 has another transfer
        first = self.points[0].shares
        env, inference = first.get(ENVIRONMENT, 1.0), first.get(INFERENCE, 0.0)
        self.env = env / max(env + inference, 1e-9)  # share of a worker's work that is its environment's
        self.busy = self.env * setting.computing + 1 - self.env  # share of its work that it computes
        self.learner = max((point.shares.get(LEARNER, 0.0) for point in points), default=0.0)
        self.alone, self.crowded = self._fit_work()
        self.acting = self._fit_inference()
        self.learning = self._fit(LEARNER, 1.0, 0.0 if setting.overlaps or setting.same_batch else 1.0)
        self.transfer = self._fit(TRANSFER, 1.0, 1.0)

    def _fit_work(self) -> tuple[float, float]:
        """Seconds of a worker's work per sample, as (a, b) of (a + b fill) f; without its inference, if that depends on
        how environments are shared."""
        fills = [(self._contention(point.workers), point) for point in self.points]
        columns = [[over, fill * over] for (over, fill), _ in fills]
        if not self.explains:  # all that there is, as what workers do and what is done one after the other
            columns = [[over, max(1, point.workers)] for (over, _), point in fills]
            return fit(columns, [_span(point) for point in self.points], [_span(point) for point in self.points])
        if len({fill for (_, fill), _ in fills}) == 1:  # it cannot be told apart
            columns = [[over, 0.0] for over, _ in columns]
        with_inference = float(self.setting.envs is None)
        shares = [point.shares[ENVIRONMENT] + with_inference * point.shares[INFERENCE] for point in self.points]
        values = [_span(point) * share for point, share in zip(self.points, shares, strict=True)]
        return fit(columns, values, self._scale())

    def _fit_inference(self) -> tuple[float, float]:
        """Seconds of inference per sample, as (a, b) of (a + b / n) f; 0 if every worker has as many environments."""
        if not self.explains or self.setting.envs is None:
            return 0.0, 0.0
        values = [_span(point) * point.shares[INFERENCE] for point in self.points]
        calls = [self._calls(point.workers) for point in self.points]
        overs = [self._contention(point.workers)[0] for point in self.points]
        told = len(set(calls)) > 1
        columns = [[over, over * share if told else 0.0] for over, share in zip(overs, calls, strict=True)]
        return fit(columns, values, self._scale())

    def _scale(self) -> list[float]:
        """What errors of a worker's work are relative to."""
        if not self.setting.overlaps:
            return [_span(point) for point in self.points]
        return [_span(point) * (point.shares[ENVIRONMENT] + point.shares[INFERENCE]) for point in self.points]

    def _calls(self, workers: int) -> float:
        """Calls of the network per sample, 1 / n, where workers share environments."""
        return 1 / share(self.setting.envs or 1, workers)

    def _terms(self, workers: int) -> tuple[float, float]:
        """What a and b of learning and transfer are multiplied by."""
        size = max(1, workers)
        return (float(size), float(size**2)) if self.setting.same_batch else (1.0, float(size))

    def _fit(self, part: str, constant: float, slope: float) -> tuple[float, float]:
        """Seconds of a part, per sample of one worker, (a, b) of `_terms`; of an asynchronous learner, per sample."""
        if not self.explains:
            return 0.0, 0.0
        if self.setting.overlaps:
            values = [point.shares[part] / point.rate for point in self.points]
            columns = [[constant * self._contention(point.workers)[0], 0.0] for point in self.points]
            return fit(columns, values, values)
        values = [point.shares[part] * _span(point) for point in self.points]
        if len(self.points) == 1 and slope:  # all of it grows with the workers: a careful guess
            constant = 0.0
        terms = [self._terms(point.workers) for point in self.points]
        columns = [[constant * first, slope * second] for first, second in terms]
        return fit(columns, values, [_span(point) for point in self.points])

    def _contention(self, workers: int) -> tuple[float, float]:
        """How much longer computing takes because cores are shared, at least 1; the share of cores that are busy."""
        if self.setting.cores is None:
            return 1.0, 1.0
        wanted = max(1, workers) * self.busy + (self.learner if self.setting.overlaps else 0.0)
        return max(1.0, wanted / self.setting.cores), min(1.0, wanted / self.setting.cores)

    def seconds(self, workers: int) -> dict[str, float]:
        """Part -> seconds that it takes per sample of one worker; of an asynchronous learner, per sample of each."""
        over, fill = self._contention(workers)
        size = max(1, workers)
        if not self.explains:
            return {ENVIRONMENT: self.alone, CORES: self.alone * (over - 1), LEARNER: self.crowded * size}
        work, least = (self.alone + self.crowded * fill) * over, self.alone + self.crowded * self._contention(1)[1]
        parts = {ENVIRONMENT: self.env * least, INFERENCE: (1 - self.env) * least, CORES: max(0.0, work - least)}
        if self.setting.envs is not None:
            acting = self.acting[0] + self.acting[1] * self._calls(workers)
            parts = {ENVIRONMENT: least, INFERENCE: acting, CORES: max(0.0, work - least + acting * (over - 1))}
        if self.setting.overlaps:
            return parts | {LEARNER: self.learning[0] * over * size}
        terms = self._terms(workers)
        return parts | {LEARNER: _dot(self.learning, terms), TRANSFER: _dot(self.transfer, terms)}

    def rate(self, workers: int) -> float:
        """Samples per second of so many workers."""
        parts = self.seconds(workers)
        if self.setting.overlaps and self.explains:
            learner = parts.pop(LEARNER)
            return max(1, workers) / max(sum(parts.values()), learner)
        return max(1, workers) / sum(parts.values())

    def bottleneck(self, workers: int) -> str:
        """What limits the speed: the workers' side, which more of them shorten while there are cores, or what is done
        one after the other."""
        parts = self.seconds(workers)
        work = {part: parts.pop(part, 0.0) for part in (ENVIRONMENT, INFERENCE, CORES)}
        limit = max(parts, key=parts.__getitem__)
        if parts[limit] >= sum(work.values()):
            return limit
        return CORES if self._contention(workers)[0] > 1 else max(work, key=work.__getitem__)

    def next_bottleneck(self, workers: int) -> tuple[str, int] | None:
        """The first part that more workers do not shorten and that becomes the bottleneck as they double; and at how
        many workers. None if there is none within reach."""
        for doubling in range(MOST_DOUBLINGS + 1):
            part = self.bottleneck(size := max(1, workers) * 2**doubling)
            if part not in (ENVIRONMENT, INFERENCE):
                return part, size
        return None

    def describe(self) -> dict[str, float | tuple[float, float] | bool]:
        """The fitted parts, in seconds per sample."""
        return {
            "explains": self.explains, "overlaps": self.setting.overlaps, "computing": self.setting.computing,
            "same_batch": self.setting.same_batch, "work_alone": self.alone, "work_crowded": self.crowded,
            "inference": self.acting, "learning": self.learning, "transfer": self.transfer,
        }  # fmt: skip


def _span(point: Point) -> float:
    """Seconds between two samples of one worker."""
    return max(1, point.workers) / point.rate


def _dot(fitted: tuple[float, float], terms: tuple[float, float]) -> float:
    return fitted[0] * terms[0] + fitted[1] * terms[1]


def fit(columns: list[list[float]], values: list[float], scale: list[float]) -> tuple[float, float]:
    """Least squares of columns · (a, b) ≈ values, with errors relative to `scale`; neither a nor b is negative."""
    weights = 1 / np.maximum(np.array(scale), 1e-12)
    matrix, right = np.array(columns) * weights[:, None], np.array(values) * weights
    best, least = (0.0, 0.0), math.inf
    for used in ([0, 1], [0], [1]):  # both, or only one of them if the other would be negative
        solved = np.zeros(2)
        solved[used] = np.linalg.lstsq(matrix[:, used], right, rcond=None)[0]
        error = float(np.sum((matrix @ solved - right) ** 2))
        if (solved >= 0).all() and error < least - 1e-12:
            best, least = (float(solved[0]), float(solved[1])), error
    return best
