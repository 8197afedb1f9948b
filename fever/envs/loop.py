"""N ordinary environments in a plain loop in this process (Gymnasium's SyncVectorEnv spends 40 % on copies)."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np

from fever.envs.contract import MASK, Step, describe_info, describe_spaces, stack_observations
from fever.envs.recovery import EnvRecovery
from fever.envs.source import EnvContext, EnvSource, make_env
from fever.envs.watchdog import IDLE, WATCHDOG, Watch, close_before_replacing, close_within_limit
from fever.errors import ContractError
from fever.policy.spaces import Description, encode, last_mask, mismatch

RETURNS = "step() must return observation, reward (a number), terminated, truncated and info"  # its contract


class LoopEnvs:
    """N ordinary environments in a loop, each reset in the step that ended its episode.

    Without `autoreset`, an environment whose episode has ended waits for the next `reset` of all. Its row of
    observations is the episode's last one, and it must not be stepped: `narrow` leaves it out.

    An environment that raises, hangs or breaks its contract is made anew, if the context's `failure_rules` says so.
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
        self.numbers = list(range(count))  # of `envs`, among all
        self.waiting: list[tuple[int, gym.Env]] = []  # left out by `narrow`, with their numbers
        self.steps = 0
        self.masks: list[Any] | None = None  # of the current observations, if infos have them
        self.recovery = EnvRecovery(source.name, context.failure_rules, context.where)
        self.watch = context.watch(source.name)
        WATCHDOG.add(self.watch)
        try:
            for index in range(count):
                if context.failure_rules.replaces:
                    self.envs.append(self.recovery.make(partial(self._make, index)))
                else:
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
        number = self.numbers[index]
        self.outdated.discard(number)
        close_before_replacing(self.watch, self.envs[index].close, number)  # first: two may not fit beside each other
        make = partial(self._make, number)
        self.envs[index] = self.recovery.make(make) if self.recovery.count else make()
        if found := mismatch(self.spaces, self._describe(index)):
            raise ContractError(f"{self.name} with {self.source.kwargs} does not fit the run: it has {found}")
        parts = [self.seeds[number], self.changes] + [self.recovery.count] * bool(self.recovery.count)
        return int(np.random.SeedSequence(parts).generate_state(1)[0])

    def _make(self, number: int) -> gym.Env:
        """Make an environment that replaces another, within the limit of a reset: a constructor may hang, too."""
        with self.watch.calling("reset", number):
            return make_env(self.source, self.context, self.first_index + number)

    def _recover(
        self, index: int, call: str, error: BaseException, ago: int = 0, seed: int | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Make an environment anew that failed in this call; returns its first observation and info. A `seed` is tried
        once; afterwards it is a fresh one, because with the old one it might fail in the same way again."""
        while True:
            self.watch.index = IDLE
            steps = self.steps - ago
            self.recovery.note(self.numbers[index], call, error, steps, steps * self.count)
            fresh = self._renew(index)
            given, seed = seed, None
            try:
                observation, info = self._try_reset(index, fresh if given is None else given)
                if not np.isfinite(self._encode([observation], [index])).all():
                    raise self._broken("the first observation is NaN or infinite", index)
            except KeyboardInterrupt:
                raise
            except BaseException as again:  # noqa: BLE001 - anything is a failure
                call, error = "reset", again
            else:
                return observation, info

    def fail(self, index: int, error: Exception, ago: int = 0) -> dict[int, np.ndarray]:
        observation, _ = self._recover(index, "step", error, ago)
        return {index: self._encode([observation], [index])[0]}

    def reset(self, seeds: list[int]) -> np.ndarray:
        self.seeds = seeds
        for number, env in sorted(self.waiting, key=lambda pair: pair[0]):
            self.envs.insert(number, env)
        self.waiting, self.count = [], len(self.envs)
        self.numbers = list(range(self.count))
        self.masks = [None] * self.count if self.masks is not None else None
        begun = [self._reset(index, seed) for index, seed in enumerate(seeds)]
        observations = [observation for observation, _ in begun]
        self.observation = describe_info(self.name, self.observation, self.action, begun[0][1])
        if self.masks is None and self.observation["type"] == "masked" and self.observation["key"] is None:
            self.masks = [None] * self.count  # only now it is known that infos have them
            for index, (_, info) in enumerate(begun):
                self._keep_mask(index, info)
        while True:
            try:
                return self._encode(observations)
            except ContractError as error:
                index = self.blamed
                observations[index], _ = self._recover(index, "reset", error, seed=seeds[index])

    def narrow(self, keep: np.ndarray) -> None:
        """Step only the environments where `keep` `[N]` is true, until the next `reset`, which is of all again."""
        for index in reversed(np.flatnonzero(~keep).tolist()):
            self.waiting.append((self.numbers.pop(index), self.envs.pop(index)))
            if self.masks is not None:
                self.masks.pop(index)
        self.count = len(self.envs)

    def _reset(self, index: int, seed: int | None = None) -> tuple[Any, dict[str, Any]]:
        """Reset an environment; one that fails is made anew."""
        if self.numbers[index] in self.outdated:
            fresh = self._renew(index)
            seed = fresh if seed is None else seed
        try:
            return self._try_reset(index, seed)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # noqa: BLE001 - anything is a failure
            return self._recover(index, "reset", error, seed=seed)

    def _try_reset(self, index: int, seed: int | None) -> tuple[Any, dict[str, Any]]:
        watch = self.watch
        watch.serial, watch.call, watch.index = watch.serial + 1, "reset", self.numbers[index]
        try:
            result = self.envs[index].reset(seed=seed)
        finally:
            watch.index, watch.call = IDLE, "step"
        if not isinstance(result, tuple) or len(result) != 2 or not isinstance(result[1], dict):
            raise self._broken("reset() must return an observation and an info dictionary", index)
        self._keep_mask(index, result[1])
        return result

    def _keep_mask(self, index: int, info: Any) -> None:
        if self.masks is None:
            return
        try:
            self.masks[index] = info[MASK]
        except (KeyError, TypeError) as error:
            raise self._broken(f"info has no {MASK}, but had one after the first reset", index) from error

    def step(self, actions: np.ndarray) -> Step:
        count, watch, numbers = self.count, self.watch, self.numbers
        observations: list[Any] = []
        rewards = np.empty(count, np.float32)
        terminated, truncated = np.zeros(count, bool), np.zeros(count, bool)
        final: dict[int, np.ndarray] = {}
        infos: dict[int, dict[str, Any]] = {}
        failed: set[int] = set()
        self.steps += 1
        watch.serial, watch.call = watch.serial + 1, "step"
        try:
            for index, env in enumerate(self.envs):
                try:
                    watch.index = numbers[index]
                    result = env.step(actions[index])
                    watch.index = IDLE
                    try:
                        observation, reward, ended, cut, info = result
                        rewards[index] = reward
                        over = bool(ended or cut)
                    except (TypeError, ValueError) as error:
                        raise self._broken(RETURNS, index) from error
                    if over:
                        if not isinstance(info, dict):
                            raise self._broken("info must be a dictionary", index)
                        final[index] = self._encode_last(observation, index, info.get(MASK))
                        infos[index] = info
                        terminated[index], truncated[index] = ended, cut
                        if self.autoreset:
                            observation, info = self._reset(index)
                    if self.masks is not None and index not in final:  # a reset keeps its own
                        self._keep_mask(index, info)
                except KeyboardInterrupt:
                    raise
                except BaseException as error:  # noqa: BLE001 - anything is a failure
                    observation, _ = self._recover(index, "step", error)
                    failed.add(index)
                observations.append(observation)
        finally:
            watch.index = IDLE
        here = self._encode_all(observations, final, failed)
        step = Step(here, rewards, terminated, truncated, final, infos)
        return step.without({index: here[index] for index in failed}) if failed else step

    def _encode_all(self, observations: list[Any], final: dict[int, np.ndarray], failed: set[int]) -> np.ndarray:
        """Encode the observations after a step; an environment whose observation cannot be encoded has failed. If it
        has just been reset, the step before was a whole one."""
        for index in failed:
            final.pop(index, None)
        while True:
            try:
                if self.autoreset or not final:
                    return self._encode(observations)
                return self._encode_beside(observations, final)
            except ContractError as error:
                index = self.blamed
                begins = index in final
                observations[index], _ = self._recover(index, "reset" if begins else "step", error)
                failed |= set() if begins else {index}

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
        self.blamed = index
        return ContractError(
            f"{self.name} breaks its contract at step {self.steps} of environment {self.numbers[index]}: {what}"
        )

    def close(self) -> None:
        for number, env in self.waiting:
            self.numbers.append(number)
            self.envs.append(env)
        self.waiting = []
        try:
            close_all(self.envs, self.watch, self.numbers)
        finally:
            WATCHDOG.remove(self.watch)


def close_all(envs: list[gym.Env], watch: Watch, numbers: list[int]) -> None:
    """Close every environment, even if some fail to close or take too long; raises the first failure at the end.
    `numbers` are the environments' own, for messages."""
    failure: Exception | None = None
    for number, env in zip(numbers, envs, strict=False):  # none is missing, unless one could not be made
        try:
            close_within_limit(watch, env.close, number)
        except Exception as error:  # noqa: BLE001 - a user's close() may raise anything; the others must still close
            failure = failure or error
    envs.clear()
    if failure is not None:
        raise failure
