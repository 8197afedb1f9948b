"""What every kind of sampler has: N environments, their random streams, and the books of their episodes. NumPy only: no
JAX, no Ray."""

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
from fever.policy.spaces import Description
from fever.sampling.spec import Episode, SamplerSpec


@dataclass
class Roll:
    """T steps of N environments as they were taken."""

    start: np.ndarray  # observations [N, ...] that the first step was taken from
    taken: list[Step]
    outputs: np.ndarray  # of the network, [T, N, ...]
    actions: np.ndarray  # [T, N, ...]
    ended_before: np.ndarray  # [2, N] bool: which episodes ended in the two steps before
    next_step: bool  # see `Envs.next_step`
    states: list[np.ndarray]  # recurrent state [N, S] after each step's observation; empty for a policy without memory
    seconds: dict[str, float]

    @cached_property
    def observations(self) -> np.ndarray:
        """`[T+1, N, ...]`; stacked when first asked for, because explorers do not need images this way."""
        return pile([self.start, *(step.observations for step in self.taken)])

    @cached_property
    def rewards(self) -> np.ndarray:
        """`[T, N]`, as are the next two."""
        return pile([step.rewards for step in self.taken])

    @cached_property
    def terminated(self) -> np.ndarray:
        return pile([step.terminated for step in self.taken])

    @cached_property
    def truncated(self) -> np.ndarray:
        return pile([step.truncated for step in self.taken])

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
        """The last infos of episodes, and in which step they ended."""
        return [(t, step.infos) for t, step in enumerate(self.taken) if step.infos]


class Runner:
    """N environments with their random streams and the books of their episodes."""

    def __init__(self, spec: SamplerSpec, observation: Description, action: Description) -> None:
        self.spec = spec
        self.envs = make_envs(spec.source, spec.envs, EnvContext(spec.worker_index, spec.workdir))
        try:
            streams = np.random.SeedSequence([spec.seed, spec.worker_index, spec.generation])
            self.rng = np.random.default_rng(streams)
            seeds = [int(seed) for seed in streams.spawn(1)[0].generate_state(spec.envs)]
            self.observation = self.envs.reset(seeds)
            check_spaces(self.envs, spec, observation, action)
        except BaseException:
            self.envs.close()
            raise
        self.distribution = distribution_for(action, spec.network.squashed)
        self.host = socket.gethostname()
        # Which episodes ended in the last two steps: from it follow where episodes begin and which steps are phantoms.
        begins = [True, False] if self.envs.next_step else [False, True]
        self.ended = np.repeat(np.array(begins)[:, None], spec.envs, axis=1)  # [2, N]
        self.state = spec.network.initial_state(spec.envs)
        self.returns = np.zeros(spec.envs)  # of the running episodes, as are the next two
        self.lengths = np.zeros(spec.envs, np.int64)
        self.steps_taken = 0

    def _roll(self, params: Params, steps: int, choose: Callable[[int, np.ndarray], np.ndarray]) -> Roll:
        """Take T steps. `choose(t, outputs)` makes actions `[N, ...]` of the network's outputs `[N, ...]`.

        The loop acts, steps, and does nothing else: while an environment waits, caches grow cold, and every line here
        costs several times of what it costs otherwise.
        """
        act, to_env, step_all = self.spec.network.actor(params), self.distribution.to_env, self.envs.step
        recurrent, delay = self.spec.network.state_size > 0, 0 if self.envs.next_step else 1
        observation, state, ended = self.observation, self.state, [*self.ended]
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
        seconds = {"env": env_seconds, "inference": perf_counter() - begin - env_seconds}
        roll = Roll(
            self.observation, taken, pile(outputs), pile(actions), self.ended, self.envs.next_step, states, seconds
        )
        self._check(roll)
        self.observation, self.state, self.ended = observation, state, roll.ended[-2:]
        self.steps_taken += steps
        return roll

    def _episodes(self, rewards: np.ndarray, valid: np.ndarray, endings: list[tuple[int, Any]]) -> list[Episode]:
        """The episodes that ended in this fragment, and the books of those that go on."""
        totals = self.returns + np.cumsum(rewards, axis=0, dtype=np.float64)  # [T, N], as if no episode had ended
        lengths = self.lengths + np.cumsum(valid, axis=0)
        counted, taken = np.zeros_like(totals[0]), np.zeros_like(lengths[0])  # of the episodes that did end
        episodes = []
        for t, infos in endings:
            for index, info in infos.items():
                total, length = float(totals[t, index] - counted[index]), int(lengths[t, index] - taken[index])
                episodes.append(Episode(total, length, index, scalars(info)))
                counted[index], taken[index] = totals[t, index], lengths[t, index]
        self.returns, self.lengths = totals[-1] - counted, lengths[-1] - taken
        return episodes

    def _check(self, roll: Roll) -> None:
        """Refuse observations and rewards that are not finite; say where they are."""
        arrays = {"reward": roll.rewards}
        if roll.start.dtype != np.uint8:
            arrays["observation"] = roll.observations
        for name, array in arrays.items():
            finite = np.isfinite(array)
            if not finite.all():
                place = np.argwhere(~finite)[0].tolist()
                row, index = place[:2]
                raise self._broken(name, array[tuple(place)], self.steps_taken + row + (name == "reward"), index)

    def _broken(self, name: str, value: float, step: int, index: int) -> ContractError:
        return ContractError(
            f"{self.spec.source.name} breaks its contract at step {step} of environment {index} of worker "
            f"{self.spec.worker_index}: the {name} is {'NaN' if np.isnan(value) else 'infinite'}"
        )

    def close(self) -> None:
        """Close the environments."""
        self.envs.close()


def check_spaces(envs: Envs, spec: SamplerSpec, observation: Description, action: Description) -> None:
    """Refuse environments whose spaces differ from those that the network was made for."""
    if (envs.observation, envs.action) != (observation, action):
        raise ContractError(f"{spec.source.name} has other spaces in worker {spec.worker_index} than it had at first")


def pile(rows: list[np.ndarray]) -> np.ndarray:
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
