"""The sampler for learning from replay: n-step transitions with initial priorities. NumPy only: no JAX, no Ray."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any

import numpy as np

from fever.envs.contract import Step
from fever.policy import Params
from fever.policy.networks import FORBIDDEN
from fever.policy.spaces import Description
from fever.replay.buffer import Transitions
from fever.replay.hindsight import Hindsight, Strategy
from fever.sampling.runner import Runner, Trajectory
from fever.sampling.spec import Report, SamplerSpec


@dataclass(frozen=True)
class Exploration:
    """How explorers act, and how transitions are made."""

    n_step: int  # rewards in a transition
    gamma: float
    explorers: int  # environments of all workers together
    greedy: bool  # act with the distribution's mode (action values) or with a sample (a stochastic policy)
    clip_rewards: bool  # learn from the sign of rewards (Mnih et al. 2015); returns are reported as they are
    prioritized: bool  # compute initial priorities
    noise: float = 0.0  # deviation of Gaussian noise on continuous actions, whose bounds are -1 and 1
    her: int = 0  # copies of every transition with other goals, see `Hindsight`; 0: none
    her_strategy: Strategy = "future"


class Explorer(Runner):
    """Steps N environments and turns the stream into transitions over n steps.

    A transition is sent once the n steps after it are known, which may be in a later call: incomplete rows are carried
    over. Its window ends with its episode: a termination is not bootstrapped from, a truncation is, from the episode's
    last observation.
    """

    def __init__(
        self, spec: SamplerSpec, observation: Description, action: Description, exploration: Exploration
    ) -> None:
        super().__init__(spec, observation, action)
        self.exploration = exploration
        self.stack = self.envs.stack
        self.frames: list[np.ndarray] = []  # not sent yet
        self.frame_count = 0
        self.window = np.zeros((spec.envs, self.stack), np.int64)  # frames of the current observations
        self._look(self.observation, np.ones(spec.envs, bool))
        self.carried: dict[str, np.ndarray] = {}
        self.hindsight: Hindsight | None = None
        if exploration.her:
            try:
                self.hindsight = Hindsight(self.envs, exploration.her, exploration.her_strategy, self.rng)
            except BaseException:
                self.close()
                raise

    def explore(
        self, params: Params, version: int, epsilons: np.ndarray, steps: int | None = None
    ) -> tuple[Transitions, Report]:
        """Take T steps in every environment. Explorer i, counted over all workers, acts at random with probability
        `epsilons[i]`; the episodes of the greedier half count in the mean return."""
        begin = perf_counter()
        spec, steps = self.spec, steps or self.spec.steps
        first = (
            spec.worker_index * spec.envs % len(epsilons)
        )  # workers that joined later start again at the first epsilon
        mine = epsilons[first : first + spec.envs]
        trajectory = self._take_steps(params, steps, self._chooser(mine, steps))
        rows = {
            "actions": trajectory.actions,
            "rewards": np.sign(trajectory.rewards) if self.exploration.clip_rewards else trajectory.rewards,
            "terminated": trajectory.terminated,
            "ended": trajectory.ended[2:],
            "failed": trajectory.failed[1:],
            "valid": trajectory.valid,
            **self._number(trajectory.steps, trajectory.first[1:]),
            **self._values(trajectory, params),
        }
        counting = mine <= np.median(epsilons)
        episodes = [
            replace(episode, counts=bool(counting[episode.env_index])) for episode in self._episodes(trajectory)
        ]
        copies = self._copies(trajectory, params)
        block = self._transitions(rows)
        if copies:
            joined: dict[str, Any] = {
                name: np.concatenate([getattr(block, name), array]) for name, array in copies.items()
            }
            block = replace(block, relabelled=len(copies["rewards"]), **joined)
        seconds = {**trajectory.seconds, "total": perf_counter() - begin}
        taken, failures = int(trajectory.valid.sum()), self.envs.recovery.take()
        of = spec.worker_index, version, seconds, self.host
        return block, Report(taken, episodes, *of, cores=self.cores, failures=failures)

    def _chooser(self, epsilons: np.ndarray, steps: int) -> Callable[[int, np.ndarray], np.ndarray]:
        """The function that chooses actions in each of the next T steps: by the policy, or at random."""
        distribution, leading = self.distribution, (steps, self.spec.envs)
        random: np.ndarray = self.rng.random(leading) < epsilons
        explores = [bool(row.any()) for row in random]
        uniform = distribution.uniform(self.rng, leading)
        noise = None if self.exploration.greedy else distribution.noise(self.rng, leading)
        masked = self.spec.network.mask > 0
        even = distribution.noise(self.rng, leading) if masked else None
        shift = self._shift(leading)

        def choose(t: int, outputs: np.ndarray) -> np.ndarray:
            action = distribution.mode(outputs) if noise is None else distribution.sample(outputs, noise[t])
            if shift is not None:
                action = (action + shift[t]).clip(-1, 1)
            if explores[t]:
                drawn = uniform[t]
                if even is not None:  # random actions respect the action mask as well
                    drawn = distribution.sample(np.where(outputs == FORBIDDEN, outputs, np.float32(0)), even[t])
                np.copyto(action, drawn, where=random[t, :, None])
            return action

        return choose

    def _shift(self, leading: tuple[int, ...]) -> np.ndarray | None:
        """Noise on continuous actions `[T, N, D]`, if there is any."""
        if not self.exploration.noise:
            return None
        shape = (*leading, *self.distribution.action_shape)
        return np.float32(self.exploration.noise) * self.rng.standard_normal(shape, np.float32)

    def _number(self, taken: list[Step], first: np.ndarray) -> dict[str, np.ndarray]:
        """Frames `[T, N, stack]` of the observations before and after each step; `first` `[T, N]` marks those after it
        that begin an episode."""
        frames = np.empty((len(taken), self.spec.envs, self.stack), np.int64)
        reached = np.empty_like(frames)
        for t, step in enumerate(taken):
            frames[t] = self.window
            lasts = {index: self._last(last, index) for index, last in step.final.items()}
            self._look(step.observations, first[t])
            reached[t] = self.window
            for index, window in lasts.items():
                reached[t, index] = window
        return {"frames": frames, "reached": reached}

    def _values(self, trajectory: Trajectory, params: Params) -> dict[str, np.ndarray]:
        """What initial priorities need, `[T, N]`: the value of the action, of the best one, and (NaN elsewhere) of the
        last observation of a truncated episode whose environment is reset already."""
        outputs, actions = trajectory.outputs, trajectory.actions
        last = np.full(outputs.shape[:2], np.nan, np.float32)
        if not self.exploration.prioritized:
            return {"chosen": np.zeros_like(last), "best": np.zeros_like(last), "last": last}
        for t, step in enumerate(trajectory.steps):
            for index, observation in step.final.items():
                if not step.terminated[index]:
                    values, _ = self.spec.network.act(params, observation[None], self.state[:1])
                    last[t, index] = values.max()
        return {"chosen": np.take_along_axis(outputs, actions, axis=2)[..., 0], "best": outputs.max(2), "last": last}

    def _copies(self, trajectory: Trajectory, params: Params) -> dict[str, np.ndarray]:
        """The copies of finished episodes as fields of `Transitions`; nothing if there are none.

        Their frames are new. Their priorities are computed like those of all other transitions, with these weights.
        """
        parts = self.hindsight.relabel(trajectory) if self.hindsight is not None else []
        if not parts:
            return {}
        copies = {name: np.concatenate([vars(part)[name] for part in parts]) for name in vars(parts[0])}
        here, there, actions = copies["observations"], copies["next_observations"], copies["actions"]
        rewards = np.sign(copies["rewards"]) if self.exploration.clip_rewards else copies["rewards"]
        discounts = np.where(copies["terminated"], np.float32(0), np.float32(self.exploration.gamma))
        priorities = np.zeros_like(rewards)
        if self.exploration.prioritized:
            network = self.spec.network
            values, following = (network.act(params, x, network.initial_state(len(x)))[0] for x in (here, there))
            chosen = np.take_along_axis(values, actions, axis=1)[:, 0]
            priorities = np.abs(rewards + discounts * following.max(1) - chosen)
        return {
            "observations": self._send(here)[:, None],
            "next_observations": self._send(there)[:, None],
            "actions": actions,
            "rewards": rewards,
            "discounts": discounts,
            "priorities": priorities,
        }

    def _send(self, frames: np.ndarray) -> np.ndarray:
        """Queue frames `[K, ...]` to be sent with the next transitions; returns their numbers `[K]`."""
        self.frames.append(frames)
        self.frame_count += len(frames)
        return np.arange(self.frame_count - len(frames), self.frame_count)

    def _look(self, observations: np.ndarray, first: np.ndarray) -> None:
        """Advance the window to these observations `[N, ...]`: one new frame each, all where an episode begins."""
        if self.stack == 1:
            self.window = self._send(observations)[:, None]
            return
        newest = self._send(observations[..., -1])
        self.window = np.concatenate([self.window[:, 1:], newest[:, None]], axis=1)
        for index in np.flatnonzero(first).tolist():
            self.window[index, :-1] = self._send(np.moveaxis(observations[index, ..., :-1], -1, 0))

    def _last(self, observation: np.ndarray, index: int) -> np.ndarray:
        """Frames `[stack]` of the last observation of an episode whose environment is reset already."""
        newest = self._send(observation[None] if self.stack == 1 else observation[None, ..., -1])
        return np.append(self.window[index, 1:], newest)

    def _transitions(self, fresh: dict[str, np.ndarray]) -> Transitions:
        """Join the rows `[T, N]` of this call to those carried over; returns the complete transitions."""
        n, gamma = self.exploration.n_step, self.exploration.gamma
        rows = {name: np.concatenate([self.carried.get(name, array[:0]), array]) for name, array in fresh.items()}
        rows["ended"][:-1] |= rows["failed"][1:]  # a failure cuts its episode in the step before, which may be carried
        length, count = rows["rewards"].shape
        complete = max(0, length - n)  # rows whose n steps, and the value behind them, are known
        rewards = np.zeros((complete, count), np.float32)
        power = np.ones((complete, count), np.float32)
        end = np.zeros((complete, count), np.int64)  # last row of each window
        alive = np.ones((complete, count), bool)
        for k in range(n):
            rewards += np.where(alive, np.float32(gamma**k) * rows["rewards"][k : k + complete], np.float32(0))
            end = np.where(alive, np.arange(k, k + complete)[:, None], end)
            power = np.where(alive, np.float32(gamma ** (k + 1)), power)
            alive &= ~rows["ended"][k : k + complete]
        columns = np.arange(count)
        discounts = np.where(rows["terminated"][end, columns], np.float32(0), power)
        values = np.where(
            np.isnan(rows["last"][end, columns]), rows["best"][end + 1, columns], rows["last"][end, columns]
        )
        keep = rows["valid"][:complete]
        self.carried = {name: array[complete:] for name, array in rows.items()}
        new = np.concatenate(self.frames)
        block = Transitions(
            stream=self.spec.generation << 20 | self.spec.worker_index,
            first_frame=self.frame_count - len(new),
            oldest_frame=int(min(self.window.min(), self.carried["frames"].min(initial=self.frame_count))),
            frames=new,
            observations=rows["frames"][:complete][keep],
            next_observations=rows["reached"][end, columns][keep],
            actions=rows["actions"][:complete][keep],
            rewards=rewards[keep],
            discounts=discounts[keep],
            priorities=np.abs(rewards + discounts * values - rows["chosen"][:complete])[keep],
        )
        self.frames = []
        return block
