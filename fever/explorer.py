"""The sampler for learning from replay: n-step transitions with first priorities. NumPy only: no JAX, no Ray."""

from __future__ import annotations

from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any

import numpy as np

from fever.envs import Step
from fever.policy import Params
from fever.policy.spaces import Description
from fever.replay import Transitions
from fever.sampler import Report, Runner, SamplerSpec


@dataclass(frozen=True)
class Exploration:
    """How explorers act, and what they make of it."""

    n_step: int  # rewards in a transition
    gamma: float
    explorers: int  # environments of all workers together
    greedy: bool  # act with the distribution's mode (action values) or with a sample (a stochastic policy)
    clip_rewards: bool  # learn from the sign of rewards (Mnih et al. 2015); returns are reported as they are
    prioritized: bool  # compute first priorities


class Explorer(Runner):
    """Steps N environments and turns the stream into transitions over n steps.

    A transition goes out once the n steps after it are known, which may be in a later call: rows that are not ripe are
    carried over. Its window ends with its episode: after a termination nothing is bootstrapped from, after a truncation
    the episode's true last observation is.
    """

    def __init__(
        self, spec: SamplerSpec, observation: Description, action: Description, exploration: Exploration
    ) -> None:
        super().__init__(spec, observation, action)
        self.exploration = exploration
        self.memory = spec.network.initial_state(spec.envs)  # of width 0: these networks have none
        self.stack = self.envs.stack
        self.frames: list[np.ndarray] = []  # not sent yet
        self.frame_count = 0
        self.window = np.zeros((spec.envs, self.stack), np.int64)  # frames of the current observations
        self._look(self.observation, np.ones(spec.envs, bool))
        self.carried: dict[str, np.ndarray] = {}

    def explore(
        self, params: Params, version: int, epsilons: np.ndarray, steps: int | None = None
    ) -> tuple[Transitions, Report]:
        """Take T steps in every environment. Explorer i, counted over all workers, acts at random with probability
        `epsilons[i]`; the episodes of the greedier half count in the mean return."""
        begin = perf_counter()
        spec, steps = self.spec, steps or self.spec.steps
        mine = epsilons[spec.worker_index * spec.envs : (spec.worker_index + 1) * spec.envs]
        start = self.observation
        taken, outputs, actions, seconds = self._step(params, mine, steps)
        rewards = np.stack([step.rewards for step in taken])
        observed = [start] if start.dtype == np.uint8 else [start, *(step.observations for step in taken)]
        self._check(np.stack(observed), rewards)
        terminated = np.stack([step.terminated for step in taken])
        truncated = np.stack([step.truncated for step in taken])
        ended = np.concatenate([self.ended, terminated | truncated])  # [2 + T, N]: row t + 2 is step t
        valid = ~ended[1:-1] if self.envs.next_step else np.ones_like(terminated)
        rows = {
            "actions": actions,
            "rewards": np.sign(rewards) if self.exploration.clip_rewards else rewards,
            "terminated": terminated,
            "ended": ended[2:],
            "valid": valid,
            **self._number(taken, ended[1:-1] if self.envs.next_step else ended[2:]),
            **self._values(taken, outputs, actions, params),
        }
        self.steps_taken += steps
        self.ended = ended[-2:]
        endings = [(t, step.infos) for t, step in enumerate(taken) if step.infos]
        counting = mine <= np.median(epsilons)
        episodes = [
            replace(episode, counts=bool(counting[episode.env_index]))
            for episode in self._episodes(rewards * valid, valid, endings)
        ]
        block = self._transitions(rows)
        seconds["total"] = perf_counter() - begin
        return block, Report(int(valid.sum()), episodes, spec.worker_index, version, seconds, self.host)

    def _step(self, params: Params, epsilons: np.ndarray, steps: int) -> tuple[list[Step], Any, Any, dict[str, float]]:
        """Act and step, and nothing else: with an environment that waits, all code here runs with cold caches.

        Returns the steps, the network's outputs `[T, N, ...]`, the actions `[T, N, ...]`, and where the time went.
        """
        network, distribution, leading = self.spec.network, self.distribution, (steps, self.spec.envs)
        random: np.ndarray = self.rng.random(leading) < epsilons
        explores = [bool(row.any()) for row in random]
        uniform = distribution.uniform(self.rng, leading)
        noise = None if self.exploration.greedy else distribution.noise(self.rng, leading)
        taken, outputs, actions = [], [], []
        env_seconds = inference_seconds = 0.0
        for t in range(steps):
            before = perf_counter()
            output, _ = network.act(params, self.observation, self.memory)
            action = distribution.mode(output) if noise is None else distribution.sample(output, noise[t])
            if explores[t]:
                np.copyto(action, uniform[t], where=random[t, :, None])
            env_action = distribution.to_env(action)
            between = perf_counter()
            step = self.envs.step(env_action)
            env_seconds += perf_counter() - between
            inference_seconds += between - before
            taken.append(step)
            outputs.append(output)
            actions.append(action)
            self.observation = step.observations
        return taken, np.stack(outputs), np.stack(actions), {"env": env_seconds, "inference": inference_seconds}

    def _number(self, taken: list[Step], first: np.ndarray) -> dict[str, np.ndarray]:
        """Frames `[T, N, stack]` of the observations before and after each step; `first` `[T, N]` marks those after it
        that begin an episode."""
        frames = np.empty((len(taken), self.spec.envs, self.stack), np.int64)
        reached = np.empty_like(frames)
        for t, step in enumerate(taken):
            frames[t] = self.window
            lasts = {index: self._last(last, index, t) for index, last in step.final.items()}
            self._look(step.observations, first[t])
            reached[t] = self.window
            for index, window in lasts.items():
                reached[t, index] = window
        return {"frames": frames, "reached": reached}

    def _values(self, taken: list[Step], outputs: Any, actions: Any, params: Params) -> dict[str, np.ndarray]:
        """What first priorities need, `[T, N]`: the value of the action, of the best one, and (NaN elsewhere) of the
        last observation of a truncated episode whose environment is reset already."""
        last = np.full(outputs.shape[:2], np.nan, np.float32)
        if not self.exploration.prioritized:
            return {"chosen": np.zeros_like(last), "best": np.zeros_like(last), "last": last}
        for t, step in enumerate(taken):
            for index, observation in step.final.items():
                if not step.terminated[index]:
                    values, _ = self.spec.network.act(params, observation[None], self.memory[:1])
                    last[t, index] = values.max()
        return {"chosen": np.take_along_axis(outputs, actions, axis=2)[..., 0], "best": outputs.max(2), "last": last}

    def _send(self, frames: np.ndarray) -> np.ndarray:
        """Have these frames `[K, ...]` sent with the next transitions; returns their numbers `[K]`."""
        self.frames.append(frames)
        self.frame_count += len(frames)
        return np.arange(self.frame_count - len(frames), self.frame_count)

    def _look(self, observations: np.ndarray, first: np.ndarray) -> None:
        """Move the window on to these observations `[N, ...]`: one new frame each, all of them where one begins."""
        if self.stack == 1:
            self.window = self._send(observations)[:, None]
            return
        newest = self._send(observations[..., -1])
        self.window = np.concatenate([self.window[:, 1:], newest[:, None]], axis=1)
        for index in np.flatnonzero(first).tolist():
            self.window[index, :-1] = self._send(np.moveaxis(observations[index, ..., :-1], -1, 0))

    def _last(self, observation: np.ndarray, index: int, t: int) -> np.ndarray:
        """Frames `[stack]` of the last observation of an episode whose environment is reset already."""
        if not np.isfinite(observation).all():
            raise self._broken("observation", observation.sum(), self.steps_taken + t + 1, index)
        newest = self._send(observation[None] if self.stack == 1 else observation[None, ..., -1])
        return np.append(self.window[index, 1:], newest)

    def _transitions(self, fresh: dict[str, np.ndarray]) -> Transitions:
        """Join the rows `[T, N]` of this call to those carried over; what is ripe goes out."""
        n, gamma = self.exploration.n_step, self.exploration.gamma
        rows = {name: np.concatenate([self.carried.get(name, array[:0]), array]) for name, array in fresh.items()}
        length, count = rows["rewards"].shape
        ripe = max(0, length - n)  # rows whose n steps, and the value behind them, are known
        rewards = np.zeros((ripe, count), np.float32)
        power = np.ones((ripe, count), np.float32)
        end = np.zeros((ripe, count), np.int64)  # last row of each window
        alive = np.ones((ripe, count), bool)
        for k in range(n):
            rewards += np.where(alive, np.float32(gamma**k) * rows["rewards"][k : k + ripe], np.float32(0))
            end = np.where(alive, np.arange(k, k + ripe)[:, None], end)
            power = np.where(alive, np.float32(gamma ** (k + 1)), power)
            alive &= ~rows["ended"][k : k + ripe]
        columns = np.arange(count)
        discounts = np.where(rows["terminated"][end, columns], np.float32(0), power)
        values = np.where(
            np.isnan(rows["last"][end, columns]), rows["best"][end + 1, columns], rows["last"][end, columns]
        )
        keep = rows["valid"][:ripe]
        self.carried = {name: array[ripe:] for name, array in rows.items()}
        new = np.concatenate(self.frames)
        block = Transitions(
            stream=self.spec.generation << 20 | self.spec.worker_index,
            first_frame=self.frame_count - len(new),
            oldest_frame=int(min(self.window.min(), self.carried["frames"].min(initial=self.frame_count))),
            frames=new,
            observations=rows["frames"][:ripe][keep],
            next_observations=rows["reached"][end, columns][keep],
            actions=rows["actions"][:ripe][keep],
            rewards=rewards[keep],
            discounts=discounts[keep],
            priorities=np.abs(rewards + discounts * values - rows["chosen"][:ripe])[keep],
        )
        self.frames = []
        return block
