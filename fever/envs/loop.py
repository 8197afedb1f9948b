"""N environments with one step contract: natively vectorised where the environment has that, otherwise a plain loop in
this process (Gymnasium's SyncVectorEnv spends 40 % on copies)."""

from __future__ import annotations

from contextlib import suppress
from typing import Any, NamedTuple, Protocol

import gymnasium as gym
import numpy as np
from gymnasium.vector import AutoresetMode

from fever.envs.source import EnvContext, EnvSource, is_vector_class, make_env, make_vector_env
from fever.errors import ContractError, FeverError
from fever.policy.spaces import Description, describe, encode, last_mask, native_shape, with_mask

MASK = "action_mask"  # name of a mask of allowed actions, in infos or in a Dict observation


class Step(NamedTuple):
    """What one step of N environments gave.

    The arrays are the caller's to keep. `observations` are what the next action is chosen from. Where an episode ended
    and the environment was reset in the same step, its last observation is in `final`, otherwise the next row is a
    phantom (see `Envs.next_step`).
    """

    observations: np.ndarray  # encoded [N, ...]
    rewards: np.ndarray  # [N]
    terminated: np.ndarray  # [N] bool
    truncated: np.ndarray  # [N] bool
    final: dict[int, np.ndarray]  # index -> encoded last observation of the episode that ended
    infos: dict[int, dict[str, Any]]  # index -> the last info of the episode that ended


class Envs(Protocol):
    """N environments stepped together."""

    name: str  # for messages
    count: int
    observation: Description  # known for good after the first reset, whose infos may bring masks of actions
    action: Description
    next_step: bool  # True: after an episode's end the next step ignores its action and returns the reset observation
    stack: int  # frames in the last axis of an encoded image, newest last, that move on by one in every step; 1: none

    def reset(self, seeds: list[int]) -> np.ndarray: ...
    def step(self, actions: np.ndarray) -> Step: ...
    def close(self) -> None: ...


class LoopEnvs:
    """N ordinary environments in a loop, each reset in the step that ended its episode."""

    next_step = False
    stack = 1

    def __init__(self, source: EnvSource, count: int, context: EnvContext, autoreset: bool = True) -> None:
        self.name, self.count, self.autoreset = source.name, count, autoreset
        self.envs: list[gym.Env] = []
        self.steps = 0
        self.masks: list[Any] | None = None  # of the observations in hand, where infos have them
        try:
            for index in range(count):
                self.envs.append(make_env(source, context, index))
            self.observation, self.action = describe_spaces(
                self.name, self.envs[0].observation_space, self.envs[0].action_space
            )
        except BaseException:
            with suppress(Exception):  # why they cannot be made matters more than why one does not close
                self.close()
            raise

    def reset(self, seeds: list[int]) -> np.ndarray:
        observations, infos = zip(*(self._reset(index, seed) for index, seed in enumerate(seeds)), strict=True)
        self.observation = describe_info(self.name, self.observation, self.action, infos[0])
        if self.observation["type"] == "masked" and self.observation["key"] is None:
            self.masks = [None] * self.count
        for index, info in enumerate(infos):
            self._keep_mask(index, info)
        return self._encode(list(observations))

    def _reset(self, index: int, seed: int | None = None) -> tuple[Any, dict[str, Any]]:
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
            raise self._broken(f"info has no {MASK}, which it had at first", index) from error

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
                final[index] = self._encode([observation], index, info.get(MASK))[0]
                infos[index] = info
                if self.autoreset:
                    observation, info = self._reset(index)
            if self.masks is not None and (self.autoreset or index not in final):
                self._keep_mask(index, info)
            observations.append(observation)
        here = final[0][None] if final and not self.autoreset else self._encode(observations)
        return Step(here, rewards, terminated, truncated, final, infos)

    def _encode(self, observations: list[Any], last: int | None = None, mask: Any = None) -> np.ndarray:
        """Encode the observations of all environments, or the last one of an episode in environment `last`."""
        masks = self.masks
        if last is not None and self.observation["type"] == "masked":
            key = self.observation["key"]
            masks = [last_mask(self.observation, mask if key is None else dict(observations[0] or {}).get(key))]
        try:
            return encode(self.observation, _stack(self.observation, observations), masks)
        except ValueError as error:
            for index, observation in enumerate(observations):
                mine = masks[index : index + 1] if masks else None
                try:
                    encode(self.observation, _stack(self.observation, [observation]), mine)
                except ValueError as found:
                    raise self._broken(str(found), index if last is None else last) from error
            raise

    def _broken(self, what: str, index: int) -> ContractError:
        return ContractError(f"{self.name} breaks its contract at step {self.steps} of environment {index}: {what}")

    def close(self) -> None:
        close_all(self.envs)


class NativeEnvs:
    """A natively vectorised environment, in whichever of Gymnasium's two autoreset modes it has."""

    def __init__(self, source: EnvSource, count: int, context: EnvContext) -> None:
        self.name, self.count = source.name, count
        self.env = make_vector_env(source, count, context)
        self.steps = 0
        try:
            mode = self.env.metadata.get("autoreset_mode", AutoresetMode.NEXT_STEP)
            if mode == AutoresetMode.DISABLED:
                raise FeverError(f"{self.name} has autoreset disabled; make it with NEXT_STEP or SAME_STEP")
            self.next_step = mode == AutoresetMode.NEXT_STEP
            self.stack = int(getattr(self.env, "stacked_frames", 1))
            self.observation, self.action = describe_spaces(
                self.name, self.env.single_observation_space, self.env.single_action_space
            )
        except BaseException:
            self.env.close()
            raise

    def reset(self, seeds: list[int]) -> np.ndarray:
        observations, info = self.env.reset(seed=seeds[0])
        self.observation = describe_info(self.name, self.observation, self.action, info)
        return self._encode(observations, info).copy()  # it may use its own again

    def step(self, actions: np.ndarray) -> Step:
        self.steps += 1
        observations, rewards, terminated, truncated, info = self.env.step(actions)
        final: dict[int, np.ndarray] = {}
        infos: dict[int, dict[str, Any]] = {}
        ended = np.flatnonzero(terminated | truncated)
        if len(ended):
            ending = info if self.next_step else info.get("final_info", {})
            for index in ended.tolist():
                infos[index] = _info_of(ending, index)
                if not self.next_step:
                    final[index] = self._encode_last(info, index, infos[index].get(MASK))
        over = terminated | truncated if self.next_step else None
        encoded = self._encode(observations, info, over).copy()
        rewards = np.array(rewards, np.float32)
        return Step(encoded, rewards, np.array(terminated), np.array(truncated), final, infos)

    def _encode_last(self, info: dict[str, Any], index: int, mask: Any) -> np.ndarray:
        """Encode the last observation of an episode whose environment has been reset in the same step."""
        try:
            last = _stack(self.observation, [info["final_obs"][index]])
        except KeyError as error:
            raise self._broken("it resets in the step that ends an episode, but its info has no final_obs") from error
        except ValueError as error:
            raise self._broken(str(error)) from error
        return self._encode(last, {MASK: [mask]}, np.array([True]))[0]

    def _encode(self, observations: Any, info: dict[str, Any], over: np.ndarray | None = None) -> np.ndarray:
        """Encode a batch; where `over`, no action follows, so that masks do not matter."""
        masks = None
        try:
            if self.observation["type"] == "masked":
                key = self.observation["key"]
                masks = observations.get(key) if key else info.get(MASK)
                if masks is None:
                    raise ValueError(f"there is no {MASK}, which there was at first")
                if (over is not None and over.any()) or not isinstance(masks, np.ndarray) or masks.dtype == object:
                    masks = list(masks)
                    for index in () if over is None else np.flatnonzero(over).tolist():
                        masks[index] = last_mask(self.observation, masks[index])
            return encode(self.observation, observations, masks)
        except ValueError as error:
            raise self._broken(str(error)) from error

    def _broken(self, what: str) -> ContractError:
        return ContractError(f"{self.name} breaks its contract at step {self.steps}: {what}")

    def close(self) -> None:
        self.env.close()


def make_envs(source: EnvSource, count: int, context: EnvContext) -> Envs:
    """Make N environments, natively vectorised if the source has that."""
    return NativeEnvs(source, count, context) if source.vectorized else LoopEnvs(source, count, context)


def make_one(source: EnvSource, context: EnvContext) -> Envs:
    """Make one environment whose episodes the caller begins: after the end of one, call `reset`."""
    factory, _ = source.resolve()
    if is_vector_class(factory):
        return NativeEnvs(source, 1, context)
    return LoopEnvs(source, 1, context, autoreset=False)


def describe_spaces(name: str, observation_space: Any, action_space: Any) -> tuple[Description, Description]:
    """Describe both spaces of an environment, or say in one sentence why one cannot be used."""
    found = []
    for which, space in (("observation", observation_space), ("action", action_space)):
        try:
            found.append(describe(space))
        except ValueError as error:
            raise FeverError(f"{name} cannot be trained on: its {which} space: {error}") from error
    observation, action = found
    if observation["type"] == "dict" and MASK in observation["spaces"]:
        observation = _describe_mask(name, observation, action, MASK)
    return observation, action


def describe_info(name: str, observation: Description, action: Description, info: dict[str, Any]) -> Description:
    """The description of observations after a first reset, whose info may bring a mask of actions."""
    if MASK not in info or observation["type"] == "masked":
        return observation
    return _describe_mask(name, observation, action, None)


def _describe_mask(name: str, observation: Description, action: Description, key: str | None) -> Description:
    try:
        return with_mask(observation, action, key)
    except ValueError as error:
        raise FeverError(f"{name} cannot be trained on: {error}") from error


def close_all(envs: list[gym.Env]) -> None:
    """Close every environment, even if one of them fails to; the first failure is raised at the end."""
    failure: Exception | None = None
    for env in envs:
        try:
            env.close()
        except Exception as error:  # noqa: BLE001 - a user's close() may raise anything; the others must still close
            failure = failure or error
    envs.clear()
    if failure is not None:
        raise failure


def _stack(description: Description, observations: list[Any]) -> Any:
    """A list of N single observations to one batch with a leading axis N on every leaf."""
    if description["type"] == "masked":
        batch, key = _stack(description["observation"], observations), description["key"]
        if key is None:
            return batch
        try:
            return {**batch, key: np.array([item[key] for item in observations])}
        except KeyError as error:
            raise ValueError(f"the observation has no part {key!r}") from error
    if description["type"] in ("dict", "tuple"):
        parts = description["spaces"]
        pairs = parts.items() if description["type"] == "dict" else enumerate(parts)
        batch = {}
        for key, part in pairs:
            try:
                items = [item[key] for item in observations]
            except (KeyError, IndexError, TypeError) as error:
                raise ValueError(f"the observation has no part {key!r}") from error
            try:
                batch[key] = _stack(part, items)
            except ValueError as error:
                raise ValueError(f"in part {key!r}, {error}") from error
        return batch
    try:
        return np.array(observations)
    except ValueError as error:
        shapes = sorted({np.shape(item) for item in observations})
        raise ValueError(f"the observation has shape {shapes[0]} and {native_shape(description)} is right") from error


def _info_of(infos: dict[str, Any], index: int) -> dict[str, Any]:
    """One environment's entries out of a vector environment's dictionary of arrays."""
    row: dict[str, Any] = {}
    for key, value in infos.items():
        if key.startswith("_") or key in ("final_obs", "final_info"):
            continue
        present = infos.get(f"_{key}")
        if isinstance(value, np.ndarray) and len(value) > index and (present is None or present[index]):
            row[key] = value[index]
    return row
