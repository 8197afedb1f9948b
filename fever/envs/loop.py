"""N ordinary environments in a plain loop in this process (Gymnasium's SyncVectorEnv spends 40 % on copies)."""

from __future__ import annotations

import logging
from contextlib import suppress
from dataclasses import replace
from typing import Any

import gymnasium as gym
import numpy as np

from fever.envs.contract import MASK, Step, describe_info, describe_spaces, stack_observations
from fever.envs.source import EnvContext, EnvSource, make_env
from fever.errors import ContractError, FeverError
from fever.policy.spaces import Description, encode, last_mask, mismatch


class LoopEnvs:
    """N ordinary environments in a loop, each reset in the step that ended its episode.

    Without `autoreset`, an environment whose episode has ended waits for the next `reset` of all. Its row of
    observations is the episode's last one, and it must not be stepped: `narrow` leaves it out.
    """

    next_step = False
    stack = 1

    def __init__(
        self, source: EnvSource, count: int, context: EnvContext, autoreset: bool = True, first_index: int = 0
    ) -> None:
        """`first_index` is the `env_index` of the first environment."""
        self.name, self.count, self.autoreset = source.name, count, autoreset
        self.source, self.context, self.first_index = source, context, first_index
        self.seeds: list[int] = []  # of the last `reset`
        self.changes = 0  # of the arguments, so far
        self.outdated: set[int] = set()  # environments that still have earlier arguments
        self.envs: list[gym.Env] = []
        self.waiting: list[tuple[int, gym.Env]] = []  # left out by `narrow`, with their places
        self.steps = 0
        self.masks: list[Any] | None = None  # of the current observations, if infos have them
        try:
            for index in range(count):
                self.envs.append(make_env(source, context, first_index + index))
            self.observation, self.action = self.spaces = self._describe(0)
        except BaseException:
            with suppress(Exception):  # the first error matters more than one of close()
                self.close()
            raise

    def _describe(self, index: int) -> tuple[Description, Description]:
        env = self.envs[index]
        return describe_spaces(self.name, env.observation_space, env.action_space)

    def change(self, kwargs: dict[str, Any]) -> None:
        """Make every environment anew with these arguments when its episode ends."""
        self.source = replace(self.source, kwargs=kwargs)
        self.changes += 1
        self.outdated = set(range(len(self.envs) + len(self.waiting)))

    def _renew(self, index: int) -> int:
        """Make an environment anew with the arguments in force; returns a seed for its first reset."""
        self.outdated.discard(index)
        try:
            self.envs[index].close()  # first: two of them may not fit beside each other
        except Exception:  # a user's close() may raise anything, and is no reason to end the run
            logging.warning("%s: an environment with earlier arguments was not closed", self.name, exc_info=True)
        self.envs[index] = make_env(self.source, self.context, self.first_index + index)
        if found := mismatch(self.spaces, self._describe(index)):
            raise ContractError(f"{self.name} with {self.source.kwargs} does not fit the run: it has {found}")
        return int(np.random.SeedSequence([self.seeds[index], self.changes]).generate_state(1)[0])

    def reset(self, seeds: list[int]) -> np.ndarray:
        self.seeds = seeds
        for place, env in reversed(self.waiting):
            self.envs.insert(place, env)
        self.waiting, self.count = [], len(self.envs)
        observations, infos = zip(*(self._reset(index, seed) for index, seed in enumerate(seeds)), strict=True)
        self.observation = describe_info(self.name, self.observation, self.action, infos[0])
        if self.observation["type"] == "masked" and self.observation["key"] is None:
            self.masks = [None] * self.count
        for index, info in enumerate(infos):
            self._keep_mask(index, info)
        return self._encode(list(observations))

    def narrow(self, keep: np.ndarray) -> None:
        """Step only the environments where `keep` `[N]` is true, until the next `reset`, which is of all again."""
        for index in reversed(np.flatnonzero(~keep).tolist()):
            self.waiting.append((index, self.envs.pop(index)))
            if self.masks is not None:
                self.masks.pop(index)
        self.count = len(self.envs)

    def _reset(self, index: int, seed: int | None = None) -> tuple[Any, dict[str, Any]]:
        if index in self.outdated:
            fresh = self._renew(index)
            seed = fresh if seed is None else seed
        try:
            result = self.envs[index].reset(seed=seed)
        except gym.error.Error as error:
            raise FeverError(f"{self.name}: {error}") from error
        if not isinstance(result, tuple) or len(result) != 2 or not isinstance(result[1], dict):
            raise self._broken("reset() must return an observation and an info dictionary", index)
        return result

    def _keep_mask(self, index: int, info: Any) -> None:
        if self.masks is None:
            return
        try:
            self.masks[index] = info[MASK]
        except (KeyError, TypeError) as error:
            raise self._broken(f"info has no {MASK}, but had one after the first reset", index) from error

    def step(self, actions: np.ndarray) -> Step:
        count = self.count
        observations: list[Any] = []
        rewards = np.empty(count, np.float32)
        terminated, truncated = np.zeros(count, bool), np.zeros(count, bool)
        final: dict[int, np.ndarray] = {}
        infos: dict[int, dict[str, Any]] = {}
        self.steps += 1
        for index, env in enumerate(self.envs):
            try:
                result = env.step(actions[index])
            except gym.error.Error as error:
                raise FeverError(f"{self.name}: {error}") from error
            try:
                observation, reward, ended, cut, info = result
                rewards[index] = reward
            except (TypeError, ValueError) as error:
                raise self._broken(
                    "step() must return observation, reward (a number), terminated, truncated and info", index
                ) from error
            if ended or cut:
                terminated[index], truncated[index] = ended, cut
                if not isinstance(info, dict):
                    raise self._broken("info must be a dictionary", index)
                final[index] = self._encode_last(observation, index, info.get(MASK))
                infos[index] = info
                if self.autoreset:
                    observation, info = self._reset(index)
            if self.masks is not None and (self.autoreset or index not in final):
                self._keep_mask(index, info)
            observations.append(observation)
        here = self._encode(observations) if self.autoreset or not final else self._encode_beside(observations, final)
        return Step(here, rewards, terminated, truncated, final, infos)

    def _encode_beside(self, observations: list[Any], final: dict[int, np.ndarray]) -> np.ndarray:
        """Encode the observations of all environments, in some of which (`final`) an episode has ended."""
        going = [index for index in range(self.count) if index not in final]
        rows = dict(final)
        if going:
            rows |= zip(going, self._encode([observations[index] for index in going], going), strict=True)
        return np.stack([rows[index] for index in range(self.count)])

    def _encode_last(self, observation: Any, index: int, mask: Any) -> np.ndarray:
        """Encode the last observation of an episode; `mask` is the one in its info."""
        masks = None
        if self.observation["type"] == "masked":
            key = self.observation["key"]
            masks = [last_mask(self.observation, mask if key is None else dict(observation or {}).get(key))]
        return self._encode([observation], [index], masks)[0]

    def _encode(
        self, observations: list[Any], indices: list[int] | None = None, masks: list[Any] | None = None
    ) -> np.ndarray:
        """Encode the observations of these environments; of all, if there are no indices. `masks` None: the current."""
        if masks is None and self.masks is not None:
            masks = self.masks if indices is None else [self.masks[index] for index in indices]
        try:
            return encode(self.observation, stack_observations(self.observation, observations), masks)
        except ValueError as error:
            for place, observation in enumerate(observations):
                mine = masks[place : place + 1] if masks else None
                try:
                    encode(self.observation, stack_observations(self.observation, [observation]), mine)
                except ValueError as found:
                    raise self._broken(str(found), place if indices is None else indices[place]) from error
            raise

    def _broken(self, what: str, index: int) -> ContractError:
        return ContractError(f"{self.name} breaks its contract at step {self.steps} of environment {index}: {what}")

    def close(self) -> None:
        self.envs += [env for _, env in self.waiting]
        self.waiting = []
        close_all(self.envs)


def close_all(envs: list[gym.Env]) -> None:
    """Close every environment, even if some fail to close; raises the first failure at the end."""
    failure: Exception | None = None
    for env in envs:
        try:
            env.close()
        except Exception as error:  # noqa: BLE001 - a user's close() may raise anything; the others must still close
            failure = failure or error
    envs.clear()
    if failure is not None:
        raise failure
