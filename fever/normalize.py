"""Running mean and variance of observations and returns, merged batch by batch (Chan et al. 1979)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Moments:
    """Count, mean and variance of everything seen so far; merging is exact and in any order."""

    count: float
    mean: np.ndarray
    var: np.ndarray

    @classmethod
    def start(cls, shape: tuple[int, ...]) -> Moments:
        return cls(0.0, np.zeros(shape), np.ones(shape))

    @classmethod
    def of(cls, rows: np.ndarray) -> Moments:
        """Moments over the first axis."""
        rows = rows.astype(np.float64, copy=False)
        return cls(float(len(rows)), rows.mean(0), rows.var(0))

    def merge(self, other: Moments) -> Moments:
        """The moments of both samples together."""
        if other.count == 0:
            return self
        count = self.count + other.count
        delta = other.mean - self.mean
        mean = self.mean + delta * (other.count / count)
        square = self.var * self.count + other.var * other.count + delta**2 * (self.count * other.count / count)
        return Moments(count, mean, square / count)

    @property
    def std(self) -> np.ndarray:
        return np.sqrt(self.var + 1e-8)

    def arrays(self, name: str) -> dict[str, np.ndarray]:
        """For a checkpoint."""
        return {f"{name}/count": np.asarray(self.count), f"{name}/mean": self.mean, f"{name}/var": self.var}

    @classmethod
    def from_arrays(cls, name: str, arrays: dict[str, np.ndarray]) -> Moments:
        return cls(float(arrays[f"{name}/count"]), arrays[f"{name}/mean"], arrays[f"{name}/var"])
