"""The step loop: N environments and a policy in, trajectories out. NumPy only: no JAX, no Ray."""

from __future__ import annotations

import socket
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from time import perf_counter
from typing import Any

import numpy as np

from fever.envs.contract import Envs, Step
from fever.envs.make import make_envs
from fever.envs.source import EnvContext
from fever.errors import ContractError
from fever.policy import Params, distribution_for
from fever.policy.spaces import Description, mismatch
from fever.sampling.spec import Episode, SamplerSpec


@dataclass
class Trajectory:
    """T steps of N environments."""

    start: np.ndarray  # observations [N, ...] that the first step was taken from
    steps: list[Step]
    outputs: np.ndarray  # of the network, [T, N, ...]
    actions: np.ndarray  # [T, N, ...]
    ended_before: np.ndarray  # [2, N] bool: which episodes ended in the two steps before
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
        return stack_rows([step.truncated for step in self.steps])

    @cached_property
    def ended(self) -> np.ndarray:
        """`[2 + T, N]` bool: row t + 2 is step t."""
        return np.concatenate([self.ended_before, self.terminated | self.truncated])

    @cached_property
    def valid(self) -> np.ndarray:
        """`[T, N]` bool, false for phantom steps."""
        return ~self.ended[1:-1] if self.next_step else np.ones_like(self.terminated)

    @cached_property
    def endings(self) -> list[tuple[int, dict[int, dict[str, Any]]]]:
        """(t, infos by environment index) of every step t in which an episode ended."""
        return [(t, step.infos) for t, step in enumerate(self.steps) if step.infos]


class EnvRunner:
    """Environments, the distribution of their actions, and the loop that steps them with a policy."""

    observation: np.ndarray  # [N, ...], what the next action is chosen from
    ended: np.ndarray  # [2, N] bool: which episodes ended in the last two steps

    def __init__(self, spec: SamplerSpec, envs: Envs, action: Description) -> None:
        self.spec, self.envs = spec, envs
        self.distribution = distribution_for(action, spec.network.squashed)
        self.host = socket.gethostname()
        self.state = spec.network.initial_state(envs.count)

    def _take_steps(
        self, params: Params, steps: int, choose: Callable[[int, np.ndarray], np.ndarray], until_end: bool = False
    ) -> Trajectory:
        """Take T steps, or fewer with `until_end`: the step in which an episode ends is then the last one.

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
                states.append(state)
                ended.append(step.terminated | step.truncated)
            observation = step.observations
            outputs.append(output)
            actions.append(action)
            taken.append(step)
            if until_end and step.infos:
                break
        seconds = {"env": env_seconds, "inference": perf_counter() - begin - env_seconds}
        network_outputs, chosen = stack_rows(outputs), stack_rows(actions)
        trajectory = Trajectory(start, taken, network_outputs, chosen, self.ended, self.envs.next_step, states, seconds)
        self.observation, self.state, self.ended = observation, state, trajectory.ended[-2:]
        return trajectory

    def _check_finite(self, trajectory: Trajectory, steps_before: int) -> None:
        """Raise ContractError where an observation or a reward is not finite."""
        arrays = {"reward": trajectory.rewards}
        if trajectory.start.dtype != np.uint8:
            arrays["observation"] = trajectory.observations
        for name, array in arrays.items():
            finite = np.isfinite(array)
            if not finite.all():
                place = np.argwhere(~finite)[0].tolist()
                row, index = place[:2]
                raise self._not_finite(name, array[tuple(place)], steps_before + row + (name == "reward"), index)

    def _not_finite(self, name: str, value: float, step: int, index: int) -> ContractError:
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
        super().__init__(spec, make_envs(spec.source, spec.envs, EnvContext(spec.worker_index, spec.workdir)), action)
        try:
            streams = np.random.SeedSequence([spec.seed, spec.worker_index, spec.generation])
            self.rng = np.random.default_rng(streams)
            seeds = [int(seed) for seed in streams.spawn(1)[0].generate_state(spec.envs)]
            self.observation = self.envs.reset(seeds)
            check_spaces(self.envs, spec, observation, action)
            self.alike = spec.envs > 1 and bool((self.observation == self.observation[0]).all())
        except BaseException:
            self.envs.close()
            raise
        # Where episodes begin and which steps are phantoms follows from the episodes that ended in the last two steps.
        begins = [True, False] if self.envs.next_step else [False, True]
        self.ended = np.repeat(np.array(begins)[:, None], spec.envs, axis=1)
        self.returns = np.zeros(spec.envs)  # of the running episodes
        self.lengths = np.zeros(spec.envs, np.int64)  # of the running episodes
        self.steps_taken = 0

    def starts_alike(self) -> bool:
        return self.alike

    def _run(self, params: Params, steps: int, choose: Callable[[int, np.ndarray], np.ndarray]) -> Trajectory:
        """Take T steps and check them; see `_take_steps`."""
        trajectory = self._take_steps(params, steps, choose)
        self._check_finite(trajectory, self.steps_taken)
        self.steps_taken += len(trajectory.steps)
        return trajectory

    def _episodes(self, trajectory: Trajectory) -> list[Episode]:
        """The episodes that ended in this trajectory; returns and lengths of the others are kept for the next one."""
        valid = trajectory.valid
        totals = self.returns + np.cumsum(trajectory.rewards * valid, axis=0, dtype=np.float64)  # [T, N], never reset
        lengths = self.lengths + np.cumsum(valid, axis=0)
        counted, taken = np.zeros_like(totals[0]), np.zeros_like(lengths[0])  # of the episodes that did end
        episodes = []
        for t, infos in trajectory.endings:
            for index, info in infos.items():
                total, length = float(totals[t, index] - counted[index]), int(lengths[t, index] - taken[index])
                episodes.append(Episode(total, length, index, scalars(info)))
                counted[index], taken[index] = totals[t, index], lengths[t, index]
        self.returns, self.lengths = totals[-1] - counted, lengths[-1] - taken
        return episodes


def check_spaces(envs: Envs, spec: SamplerSpec, observation: Description, action: Description) -> None:
    """Refuse environments whose spaces differ from those that the network was made for."""
    if found := mismatch((observation, action), (envs.observation, envs.action)):
        raise ContractError(
            f"{spec.source.name} has other spaces in worker {spec.worker_index} than the network was made for: {found}"
        )


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
