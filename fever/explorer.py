"""The sampler for learning from replay: n-step transitions with first priorities. NumPy only: no JAX, no Ray."""

from __future__ import annotations

from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any

import numpy as np

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
        spec, network, distribution, plan = self.spec, self.spec.network, self.distribution, self.exploration
        steps, count = steps or spec.steps, spec.envs
        mine = epsilons[spec.worker_index * count : (spec.worker_index + 1) * count]
        random = self.rng.random((steps, count)) < mine
        uniform = distribution.uniform(self.rng, (steps, count))
        noise = None if plan.greedy else distribution.noise(self.rng, (steps, count))
        rows = {
            "frames": np.empty((steps, count, self.stack), np.int64),
            "reached": np.empty((steps, count, self.stack), np.int64),  # frames of the observation after the step
            "actions": np.empty((steps, count, *distribution.action_shape), distribution.action_dtype),
            "rewards": np.empty((steps, count), np.float32),
            "terminated": np.empty((steps, count), bool),
            "chosen": np.zeros((steps, count), np.float32),  # value of the action
            "best": np.zeros((steps, count), np.float32),  # value of the best action
            "last": np.full((steps, count), np.nan, np.float32),  # value of an episode's last observation, where reset
        }
        ended = np.concatenate([self.ended, np.empty((steps, count), bool)])  # [2 + T, N]: row t + 2 is step t
        first = ended[1:-1] if self.envs.next_step else ended[2:]  # [T, N]: what step t reached begins an episode
        image = self.observation.dtype == np.uint8
        observed = [self.observation[:0] if image else self.observation]
        endings: list[tuple[int, dict[int, dict[str, Any]]]] = []
        env_seconds = inference_seconds = 0.0
        for t in range(steps):
            before = perf_counter()
            outputs, _ = network.act(params, self.observation, self.memory)
            actions = distribution.mode(outputs) if noise is None else distribution.sample(outputs, noise[t])
            actions[random[t]] = uniform[t][random[t]]
            rows["frames"][t], rows["actions"][t] = self.window, actions
            if plan.prioritized:
                rows["chosen"][t] = np.take_along_axis(outputs, actions, axis=1)[:, 0]
                rows["best"][t] = outputs.max(1)
            env_actions = distribution.to_env(actions)
            between = perf_counter()
            step = self.envs.step(env_actions)
            env_seconds += perf_counter() - between
            inference_seconds += between - before

            rows["rewards"][t], rows["terminated"][t] = step.rewards, step.terminated
            np.logical_or(step.terminated, step.truncated, out=ended[t + 2])
            lasts = {index: self._last(last, index, t) for index, last in step.final.items()}
            for index in np.flatnonzero(step.truncated & ~step.terminated).tolist() if plan.prioritized else ():
                if index in step.final:
                    values, _ = network.act(params, step.final[index][None], self.memory[:1])
                    rows["last"][t, index] = values.max()
            self.observation = step.observations
            self._look(step.observations, first[t])
            rows["reached"][t] = self.window
            for index, window in lasts.items():
                rows["reached"][t, index] = window
            if not image:
                observed.append(step.observations)
            if step.infos:
                endings.append((t, step.infos))
        self._check(np.stack(observed), rows["rewards"])
        self.steps_taken += steps
        valid = ~ended[1:-1] if self.envs.next_step else np.ones((steps, count), bool)
        episodes = self._episodes(rows["rewards"] * valid, valid, endings)
        counting = mine <= np.median(epsilons)
        episodes = [replace(episode, counts=bool(counting[episode.env_index])) for episode in episodes]
        if plan.clip_rewards:
            rows["rewards"] = np.sign(rows["rewards"])
        transitions = self._transitions({**rows, "ended": ended[2:], "valid": valid})
        self.ended = ended[-2:]
        seconds = {"env": env_seconds, "inference": inference_seconds, "total": perf_counter() - begin}
        return transitions, Report(int(valid.sum()), episodes, spec.worker_index, version, seconds, self.host)

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
        new = np.concatenate(self.frames) if self.frames else np.empty((0, *self.observation.shape[1:]))
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
