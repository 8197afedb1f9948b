"""The step loop: N environments and a policy in, trajectories out. NumPy only: no JAX, no Ray."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from time import perf_counter
from typing import Any

import numpy as np

from fever.envs.contract import Envs, Step
from fever.envs.make import make_envs
from fever.envs.watchdog import close_quietly
from fever.errors import ContractError
from fever.policy import Params, distribution_for
from fever.policy.spaces import Description, mismatch
from fever.sampling.cores import own_cores
from fever.sampling.spec import Episode, SamplerSpec

LOOK = 64  # steps of an episode between two looks at whether it is still finite: one that is not may never end


@dataclass
class Trajectory:
    """T steps of N environments."""

    start: np.ndarray  # observations [N, ...] that the first step was taken from
    steps: list[Step]
    outputs: np.ndarray  # of the network, [T, N, ...]
    actions: np.ndarray  # [T, N, ...]
    ended_before: np.ndarray  # [2, N] bool: which episodes ended in the two steps before
    failed_before: np.ndarray  # [N] bool: which environments failed in the step before
    next_step: bool  # see `Envs.next_step`
    states: list[np.ndarray]  # recurrent state [N, S] after each step's observation; empty without recurrence
    seconds: dict[str, float]

    @cached_property
    def observations(self) -> np.ndarray:
        """`[T+1, N, ...]`; stacked on first use, because explorers do not need images this way."""
        return stack_rows([self.start, *(step.observations for step in self.steps)])

    @cached_property
    def rewards(self) -> np.ndarray:
        """`[T, N]`, as are the next two."""
        return stack_rows([step.rewards for step in self.steps])

    @cached_property
    def terminated(self) -> np.ndarray:
        return stack_rows([step.terminated for step in self.steps])

    @cached_property
    def truncated(self) -> np.ndarray:
        """An episode that was cut by a failure is truncated in the step before: its last observation is the one that
        the failed step was taken from. (If that step is in an earlier trajectory, its end was bootstrapped from.)"""
        rows = self._truncated.copy()
        rows[:-1] |= self.failed[2:] & ~self.terminated[:-1]
        return rows

    @cached_property
    def _truncated(self) -> np.ndarray:
        """As the environments say."""
        return stack_rows([step.truncated for step in self.steps])

    @cached_property
    def failed(self) -> np.ndarray:
        """`[1 + T, N]` bool: row t + 1 is step t, in which the environment failed and was made anew."""
        rows = np.zeros((1 + len(self.steps), self.start.shape[0]), bool)
        rows[0] = self.failed_before
        for t, step in enumerate(self.steps):
            if step.failed:
                rows[t + 1, list(step.failed)] = True
        return rows

    @cached_property
    def ended(self) -> np.ndarray:
        """`[2 + T, N]` bool: row t + 2 is step t, in which an episode ended and no environment failed."""
        return np.concatenate([self.ended_before, self.terminated | self._truncated])

    @cached_property
    def first(self) -> np.ndarray:
        """`[T + 1, N]` bool: an episode begins with this observation."""
        return (self.ended[: len(self.steps) + 1] if self.next_step else self.ended[1:]) | self.failed

    @cached_property
    def valid(self) -> np.ndarray:
        """`[T, N]` bool, false for phantom steps and for steps in which the environment failed."""
        return ~(self.ended[1:-1] | self.failed[1:]) if self.next_step else ~self.failed[1:]

    def until(self, end: int) -> Trajectory:
        """The steps before step `end`."""
        return replace(self, steps=self.steps[:end], outputs=self.outputs[:end], actions=self.actions[:end])

    def not_finite(self) -> Iterator[tuple[int, int, str, np.ndarray]]:
        """Step, environment, kind and array of every reward and observation that is not finite."""
        if not np.isfinite(self.rewards).all():
            yield from ((t, n, "reward", self.rewards[t, n]) for t, n in np.argwhere(~np.isfinite(self.rewards)))
        if self.start.dtype == np.uint8:
            return
        if not np.isfinite(self.observations).all():
            for t, step in enumerate(self.steps):
                bad = np.flatnonzero(~_finite_rows(step.observations))
                yield from ((t, n, "observation", step.observations[n]) for n in bad.tolist())
        lasts = [(t, n, "observation", last) for t, step in enumerate(self.steps) for n, last in step.final.items()]
        if lasts and not np.isfinite(np.concatenate([last for *_, last in lasts])).all():
            yield from (one for one in lasts if not np.isfinite(one[3]).all())

    @cached_property
    def endings(self) -> list[tuple[int, dict[int, dict[str, Any]]]]:
        """(t, infos by environment index) of every step t in which an episode ended."""
        return [(t, step.infos) for t, step in enumerate(self.steps) if step.infos]


class EnvRunner:
    """Environments, the distribution of their actions, and the loop that steps them with a policy."""

    observation: np.ndarray  # [N, ...], what the next action is chosen from
    ended: np.ndarray  # [2, N] bool: which episodes ended in the last two steps
    failed: np.ndarray  # [N] bool: which environments failed in the last step
    steps_taken = 0

    def __init__(self, spec: SamplerSpec, envs: Envs, action: Description) -> None:
        self.spec, self.envs = spec, envs
        self.distribution = distribution_for(action, spec.network.squashed)
        self.host, self.cores = socket.gethostname(), own_cores()
        self.state = spec.network.initial_state(envs.count)
        self.failed = np.zeros(envs.count, bool)

    def _take_steps(
        self, params: Params, steps: int, choose: Callable[[int, np.ndarray], np.ndarray], until_end: bool = False
    ) -> Trajectory:
        """Take T steps, or fewer with `until_end`: the step in which an episode ends or its environment fails is then
        the last one.

        `choose(t, outputs)` returns actions `[N, ...]` for the network's outputs `[N, ...]`. The loop acts, steps, and
        does nothing else: while an environment computes, caches grow cold, and every line here then costs several times
        as much.
        """
        act, to_env, step_all = self.spec.network.actor(params), self.distribution.to_env, self.envs.step
        recurrent, delay = self.spec.network.state_size > 0, 0 if self.envs.next_step else 1
        start = observation = self.observation
        state, ended = self.state, [*self.ended]
        outputs, actions, taken, states = [], [], [], []
        env_seconds, begin = 0.0, perf_counter()
        for t in range(steps):
            if recurrent:
                state = np.where(ended[t + delay][:, None], np.float32(0), state)
            output, state = act(observation, state)
            action = choose(t, output)
            env_action = to_env(action)
            before = perf_counter()
            step = step_all(env_action)
            env_seconds += perf_counter() - before
            if recurrent:
                if step.failed:
                    state = state.copy()
                    state[list(step.failed)] = 0
                states.append(state)
                ended.append(step.terminated | step.truncated)
            observation = step.observations
            outputs.append(output)
            actions.append(action)
            taken.append(step)
            if until_end and (step.infos or step.failed or (t % LOOK == 0 and not np.isfinite(observation).all())):
                break
        seconds = {"env": env_seconds, "inference": perf_counter() - begin - env_seconds}
        network_outputs, chosen = stack_rows(outputs), stack_rows(actions)
        ended_before = self.ended, self.failed
        trajectory = Trajectory(
            start, taken, network_outputs, chosen, *ended_before, self.envs.next_step, states, seconds
        )  # fmt: skip
        self.observation, self.state = observation, state
        trajectory = self._mend(trajectory)
        self.ended, self.failed = trajectory.ended[-2:], trajectory.failed[-1]
        self.steps_taken += len(taken)
        return trajectory

    def _finite_start(self, observations: np.ndarray) -> np.ndarray:
        """Observations after a reset; environments where they are not finite are made anew."""
        for index in np.flatnonzero(~_finite_rows(observations)).tolist():
            error = self._not_finite("observation", observations[index], self.steps_taken, index)
            rows = self.envs.fail(index, error)
            observations = np.stack([rows.get(place, row) for place, row in enumerate(observations)])
        return observations

    def _mend(self, trajectory: Trajectory) -> Trajectory:
        """The same trajectory, if all of it is finite. Otherwise environments are made anew whose rewards or
        observations are not, and they have failed in every step from the first such one on: what follows it is what a
        broken environment answered to actions that were chosen from NaN. If it is the observation after a reset that is
        not finite, the step that ended the episode before stays, and the steps after it have failed."""
        found: dict[int, tuple[int, ContractError]] = {}  # environment -> step, error
        for t, index, name, array in trajectory.not_finite():
            error = self._not_finite(name, array, self.steps_taken + t + 1, index)
            found[index] = min(found.get(index, (t, error)), (t, error), key=lambda pair: pair[0])
        for index, (t, error) in sorted(found.items(), key=lambda item: item[1][0]):
            if index in trajectory.steps[t].failed:  # made anew together with another one
                continue
            rows = self.envs.fail(index, error, len(trajectory.steps) - 1 - t)
            places, step = list(rows), trajectory.steps[t]
            first = t
            if places == [index] and index in step.final and self._begins_badly(step, index):
                step.observations[index] = rows[index]
                first = t + 1
            trajectory.steps[first:] = [step.without(rows) for step in trajectory.steps[first:]]
            for array in (trajectory.outputs, trajectory.actions):
                array[t + 1 :, places] = array[t, places]
            self.state = self.state.copy()
            self.state[places] = 0
        return replace(trajectory) if found else trajectory

    @staticmethod
    def _begins_badly(step: Step, index: int) -> bool:
        """Whether all of a step that ended an episode is finite, so that what is not is the next one's beginning."""
        return bool(np.isfinite(step.rewards[index]) and np.isfinite(step.final[index]).all())

    def _not_finite(self, name: str, array: np.ndarray, step: int, index: int) -> ContractError:
        value = np.extract(~np.isfinite(array), array)[0]
        return ContractError(
            f"{self.spec.source.name} breaks its contract at step {step} of {self._describe_env(index)}: the {name} is "
            f"{'NaN' if np.isnan(value) else 'infinite'}"
        )

    def _describe_env(self, index: int) -> str:
        return f"environment {index} of worker {self.spec.worker_index}"

    def change_env(self, kwargs: dict[str, Any]) -> None:
        """Make environments anew with these arguments when their episodes end."""
        self.envs.change(kwargs)

    def starts_alike(self) -> bool:
        """Whether all environments began with the same observation, though their seeds differ."""
        return False  # not known

    def close(self) -> None:
        """Close the environments."""
        self.envs.close()


class Runner(EnvRunner):
    """Steps N environments with a policy; tracks random streams and running episode returns."""

    def __init__(self, spec: SamplerSpec, observation: Description, action: Description) -> None:
        super().__init__(spec, make_envs(spec.source, spec.envs, spec.context), action)
        try:
            streams = np.random.SeedSequence([spec.seed, spec.worker_index, spec.generation])
            self.rng = np.random.default_rng(streams)
            seeds = [int(seed) for seed in streams.spawn(1)[0].generate_state(spec.envs)]
            self.steps_taken = 0
            self.observation = self._finite_start(self.envs.reset(seeds))
            check_spaces(self.envs, spec, observation, action)
            self.alike = spec.envs > 1 and bool((self.observation == self.observation[0]).all())
        except BaseException:
            close_quietly(spec.source.name, self.envs.close, limited=True)
            raise
        # Where episodes begin and which steps are phantoms follows from the episodes that ended in the last two steps.
        begins = [True, False] if self.envs.next_step else [False, True]
        self.ended = np.repeat(np.array(begins)[:, None], spec.envs, axis=1)
        self.returns = np.zeros(spec.envs)  # of the running episodes
        self.lengths = np.zeros(spec.envs, np.int64)  # of the running episodes

    def starts_alike(self) -> bool:
        return self.alike

    def _episodes(self, trajectory: Trajectory) -> list[Episode]:
        """The episodes that ended in this trajectory; returns and lengths of the others are kept for the next one. An
        episode that was cut by a failure is none of them: how it would have ended is not known."""
        valid = trajectory.valid
        totals = self.returns + np.cumsum(trajectory.rewards * valid, axis=0, dtype=np.float64)  # [T, N], never reset
        lengths = self.lengths + np.cumsum(valid, axis=0)
        counted, taken = np.zeros_like(totals[0]), np.zeros_like(lengths[0])  # of the episodes that did end
        episodes = []
        for t, step in enumerate(trajectory.steps):
            for index, info in step.infos.items():
                total, length = float(totals[t, index] - counted[index]), int(lengths[t, index] - taken[index])
                episodes.append(Episode(total, length, index, scalars(info)))
            for index in (*step.infos, *step.failed):
                counted[index], taken[index] = totals[t, index], lengths[t, index]
        self.returns, self.lengths = totals[-1] - counted, lengths[-1] - taken
        return episodes


def check_spaces(envs: Envs, spec: SamplerSpec, observation: Description, action: Description) -> None:
    """Refuse environments whose spaces differ from those that the network was made for."""
    if found := mismatch((observation, action), (envs.observation, envs.action)):
        raise ContractError(
            f"{spec.source.name} has other spaces in worker {spec.worker_index} than the network was made for: {found}"
        )


def _finite_rows(array: np.ndarray) -> np.ndarray:
    """Which rows `[N]` of an array `[N, ...]` are finite."""
    return np.isfinite(array).reshape(len(array), -1).all(1)


def stack_rows(rows: list[np.ndarray]) -> np.ndarray:
    """T arrays `[N, ...]` to one `[T, N, ...]`; as `np.stack`, in a third of its time for small ones."""
    return np.concatenate(rows).reshape(len(rows), *rows[0].shape)


def scalars(info: dict[str, Any]) -> dict[str, float]:
    """The entries of an info dictionary that are single numbers."""
    found = {}
    for key, value in info.items():
        if isinstance(value, (bool, int, float, np.number, np.bool_)) or (
            isinstance(value, np.ndarray) and value.shape == () and value.dtype.kind in "biuf"
        ):
            found[str(key)] = float(value)
    return found
