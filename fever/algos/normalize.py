"""Running mean and variance of observations and returns, merged batch by batch (Chan et al. 1979)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fever.policy import Network, Params

REWARD_LIMIT = 10.0  # normalised rewards are clipped to this, as in SB3's VecNormalize


@dataclass(frozen=True)
class Moments:
    """Count, mean and variance of a sample. Samples can be merged exactly, in any order."""

    count: float
    mean: np.ndarray
    var: np.ndarray

    @classmethod
    def start(cls, shape: tuple[int, ...]) -> Moments:
        return cls(0.0, np.zeros(shape), np.ones(shape))

    @classmethod
    def of(cls, rows: np.ndarray) -> Moments:
        """Moments over the first axis."""
        if not len(rows):
            return cls.start(rows.shape[1:])
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


class Normalizer:
    """Running statistics of observations and returns, as in SB3's VecNormalize, kept by the learner.

    Batches are raw, `[T, B, ...]` as in `Fragment`. Rows that are not valid are left out of all statistics.
    """

    def __init__(self, network: Network, observations: bool, rewards: bool) -> None:
        self.scales_observations, self.scales_rewards = observations and network.normalizable, rewards
        self.observations, self.returns = Moments.start(network.input_shape), Moments.start(())
        self.returns_with_batch = self.returns

    def statistics(self) -> Params:
        """Mean and deviation that the network normalises observations by; part of its weights."""
        if not self.scales_observations:
            return {}
        mean, std = self.observations.mean, self.observations.std
        return {"observation/mean": mean.astype(np.float32), "observation/std": std.astype(np.float32)}

    def scale_rewards(self, batch: Params) -> None:
        """Divide the rewards of a batch by the deviation of discounted returns so far, those of the batch included.

        Changes `batch` in place and removes the returns (`discounted`) from it.
        """
        if self.scales_rewards:
            merged = self.returns.merge(Moments.of(batch.pop("discounted")[batch["valid"]]))
            batch["rewards"] = np.clip(batch["rewards"] / np.float32(merged.std), -REWARD_LIMIT, REWARD_LIMIT)
            self.returns_with_batch = merged

    def add(self, batch: Params) -> None:
        """Add a batch to the statistics. Called after learning from it: the probability ratios of its first gradient
        step are then 1, and a batch with which learning failed leaves the statistics as they were."""
        self.returns = self.returns_with_batch
        if self.scales_observations:
            self.observations = self.observations.merge(Moments.of(batch["observations"][:-1][batch["valid"]]))

    def arrays(self) -> dict[str, np.ndarray]:
        """For a checkpoint."""
        return self.observations.arrays("observations") | self.returns.arrays("returns")

    def restore(self, arrays: dict[str, np.ndarray]) -> None:
        self.observations = Moments.from_arrays("observations", arrays)
        self.returns = self.returns_with_batch = Moments.from_arrays("returns", arrays)
