"""A natively vectorised environment behind the same step contract."""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np
from gymnasium.vector import AutoresetMode

from fever.envs.contract import MASK, Step, describe_info, describe_spaces, stack_observations
from fever.envs.recovery import EnvRecovery
from fever.envs.source import EnvContext, EnvSource, make_vector_env
from fever.envs.watchdog import IDLE, WATCHDOG, close_before_replacing, close_within_limit
from fever.errors import ContractError, FeverError
from fever.policy.spaces import encode, last_mask


class NativeEnvs:
    """A natively vectorised environment, in whichever of Gymnasium's two autoreset modes it has.

    If it raises, hangs or breaks its contract, all of it is made anew: every episode is cut.
    """

    def __init__(self, source: EnvSource, count: int, context: EnvContext) -> None:
        self.name, self.count = source.name, count
        self.source, self.context = source, context
        self.seed = 0  # of the last `reset`
        self.recovery = EnvRecovery(source.name, context.failure_rules, context.where)
        self.watch = context.watch(source.name)
        self.steps = 0
        WATCHDOG.add(self.watch)
        try:
            make = partial(make_vector_env, source, count, context)
            self.env = self.recovery.make(self._make) if context.failure_rules.replaces else make()
        except BaseException:
            WATCHDOG.remove(self.watch)
            raise
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
            with suppress(Exception):  # the first error matters more than one of close()
                self.close()
            raise

    def reset(self, seeds: list[int]) -> np.ndarray:
        self.seed = seeds[0]
        try:
            return self._reset(seeds[0])
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # noqa: BLE001 - anything is a failure
            return self._recover("reset", error)

    def _reset(self, seed: int) -> np.ndarray:
        with self.watch.calling("reset"):
            observations, info = self.env.reset(seed=seed)
        self.observation = describe_info(self.name, self.observation, self.action, info)
        return self._encode(observations, info).copy()  # the environment may reuse its buffer

    def _recover(self, call: str, error: BaseException, ago: int = 0) -> np.ndarray:
        """Make the environment anew that failed in this call; returns its first observations."""
        while True:
            self.watch.index = IDLE
            steps = self.steps - ago
            self.recovery.note(0, call, error, steps, steps * self.count)
            close_before_replacing(self.watch, self.env.close)
            self.env = self.recovery.make(self._make)
            seed = int(np.random.SeedSequence([self.seed, self.recovery.count]).generate_state(1)[0])
            try:
                observations = self._reset(seed)
                if np.isfinite(observations).all():
                    return observations
                raise self._broken("a first observation is NaN or infinite")
            except KeyboardInterrupt:
                raise
            except BaseException as again:  # noqa: BLE001 - anything is a failure
                call, error = "reset", again

    def _make(self) -> Any:
        with self.watch.calling("reset"):  # a constructor may hang, too
            return make_vector_env(self.source, self.count, self.context)

    def fail(self, index: int, error: Exception, ago: int = 0) -> dict[int, np.ndarray]:
        return dict(enumerate(self._recover("step", error, ago)))

    def step(self, actions: np.ndarray) -> Step:
        self.steps += 1
        try:
            return self._step(actions)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # noqa: BLE001 - anything is a failure
            here, none = self._recover("step", error), np.zeros(self.count, bool)
            cut = Step(here, np.zeros(self.count, np.float32), none, none.copy(), {}, {})
            return cut.without(dict(enumerate(here)))
        finally:
            self.watch.index = IDLE

    def _step(self, actions: np.ndarray) -> Step:
        watch = self.watch
        watch.serial, watch.call, watch.index = watch.serial + 1, "step", 0
        observations, rewards, terminated, truncated, info = self.env.step(actions)
        watch.index = IDLE
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

    def change(self, kwargs: dict[str, Any]) -> None:
        """Refused: all environments would have to be made anew at once, in the middle of episodes."""
        raise FeverError(f"{self.name} is natively vectorised, so its arguments cannot be changed while it trains")

    def _encode_last(self, info: dict[str, Any], index: int, mask: Any) -> np.ndarray:
        """Encode the last observation of an episode whose environment has been reset in the same step."""
        try:
            last = stack_observations(self.observation, [info["final_obs"][index]])
        except KeyError as error:
            raise self._broken("it resets in the step that ends an episode, so its info must have final_obs") from error
        except ValueError as error:
            raise self._broken(str(error)) from error
        return self._encode(last, {MASK: [mask]}, np.array([True]))[0]

    def _encode(self, observations: Any, info: dict[str, Any], over: np.ndarray | None = None) -> np.ndarray:
        """Encode a batch; where `over`, the episode ended and its mask is not used."""
        masks = None
        try:
            if self.observation["type"] == "masked":
                key = self.observation["key"]
                masks = observations.get(key) if key else info.get(MASK)
                if masks is None:
                    raise ValueError(f"there is no {MASK}, but there was one after the first reset")
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
        try:
            close_within_limit(self.watch, self.env.close)
        finally:
            WATCHDOG.remove(self.watch)


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
