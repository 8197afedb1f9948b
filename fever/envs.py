"""Environments: from a name to a batch of N of them with one step contract.

`EnvSource` says which environment; `make_envs` makes N of them as one `Envs`: natively vectorised where the
environment has that, otherwise a plain loop in this process (Gymnasium's SyncVectorEnv spends 40 % on copies).
"""

from __future__ import annotations

import difflib
import functools
import importlib
import inspect
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import gymnasium as gym
import numpy as np
from gymnasium.vector import AutoresetMode, VectorEnv

from fever.errors import ContractError, FeverError
from fever.policy.spaces import Description, describe, encode, last_mask, native_shape, with_mask

MASK = "action_mask"  # name of a mask of allowed actions, in infos or in a Dict observation
EXTRAS = {"mujoco": "mujoco", "box2d": "box2d", "Box2D": "box2d", "pygame": "render", "ale_py": "atari"}


@dataclass(frozen=True)
class EnvSource:
    """Which environment: an id, "module:Name", a class or a factory function, and the arguments for it."""

    target: str | Callable[..., Any]
    kwargs: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Take a partial function apart, so that name and arguments say all of it."""
        if isinstance(self.target, functools.partial) and not self.target.args:
            object.__setattr__(self, "kwargs", {**self.target.keywords, **self.kwargs})
            object.__setattr__(self, "target", self.target.func)

    @property
    def name(self) -> str:
        """What is written into configurations and messages; `EnvSource(name)` finds it again if it can be imported."""
        if isinstance(self.target, str):
            return self.target
        named = self.target if hasattr(self.target, "__qualname__") else type(self.target)
        return f"{named.__module__}:{named.__qualname__}"

    def resolve(self) -> tuple[Callable[..., Any] | None, gym.envs.registration.EnvSpec | None]:
        """Either a class or factory, or the specification of a registered id."""
        if not isinstance(self.target, str):
            return self.target, None
        module, _, name = self.target.rpartition(":")
        if module and not re.search(r"-v\d+$", name):
            return _import_attribute(module, name), None
        if module:
            _import_module(module)
        atari = _atari() if name.startswith("ALE/") else None
        if name not in gym.registry:
            raise FeverError(_unknown_environment(name))
        spec = gym.spec(name)
        return None, spec if atari is None else atari.prepare(spec, self.kwargs)

    @property
    def reward_threshold(self) -> float | None:
        """The return at which this environment counts as solved, where its registration states one."""
        _, spec = self.resolve()
        return spec.reward_threshold if spec is not None else None


@dataclass(frozen=True)
class EnvContext:
    """Where an environment runs; constructors that name these arguments get them."""

    worker_index: int = 0  # 0 in this process and for the first worker
    workdir: Path | None = None  # parent of the private folder of every environment
    render_mode: str | None = None


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
        if MASK in infos[0] and self.observation["type"] != "masked":
            self.observation = describe_mask(self.name, self.observation, self.action)
            self.masks = [None] * self.count
        for index, info in enumerate(infos):
            self._keep_mask(index, info)
        return self._encode(list(observations))

    def _reset(self, index: int, seed: int | None = None) -> tuple[Any, dict[str, Any]]:
        result = self.envs[index].reset(seed=seed)
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
            result = env.step(actions[index])
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
        if MASK in info and self.observation["type"] != "masked":
            self.observation = describe_mask(self.name, self.observation, self.action)
        return self._encode(observations, info)

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
                    last = _stack(self.observation, [info["final_obs"][index]])
                    final[index] = self._encode(last, {MASK: [infos[index].get(MASK)]}, np.array([True]))[0]
        over = terminated | truncated if self.next_step else None
        encoded = self._encode(observations, info, over).copy()  # it may use its own again
        rewards = np.array(rewards, np.float32)
        return Step(encoded, rewards, np.array(terminated), np.array(truncated), final, infos)

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
            raise ContractError(f"{self.name} breaks its contract at step {self.steps}: {error}") from error

    def close(self) -> None:
        self.env.close()


def make_envs(source: EnvSource, count: int, context: EnvContext) -> Envs:
    """Make N environments, natively vectorised if the source has that."""
    factory, spec = source.resolve()
    native = spec.vector_entry_point is not None if spec is not None else _is_vector_class(factory)
    return NativeEnvs(source, count, context) if native else LoopEnvs(source, count, context)


def make_one(source: EnvSource, context: EnvContext) -> Envs:
    """Make one environment whose episodes the caller begins: after the end of one, call `reset`."""
    factory, _ = source.resolve()
    if _is_vector_class(factory):
        return NativeEnvs(source, 1, context)
    return LoopEnvs(source, 1, context, autoreset=False)


def make_env(source: EnvSource, context: EnvContext, index: int = 0) -> gym.Env:
    """Make one ordinary environment; the caller closes it."""
    factory, spec = source.resolve()
    if spec is not None:
        constructor = _entry_point(source, spec.entry_point)
        _check_arguments(source, constructor, "max_episode_steps")  # gym.make's own
        arguments = {**source.kwargs, **_context_arguments(constructor, context, index)}
        if context.render_mode is not None:
            arguments["render_mode"] = context.render_mode
        return _construct(source, lambda: gym.make(spec, disable_env_checker=True, **arguments))
    assert factory is not None
    _check_arguments(source, factory)
    arguments = {**source.kwargs, **_context_arguments(factory, context, index)}
    if context.render_mode is not None and "render_mode" in (_parameters(factory) or {}):
        arguments["render_mode"] = context.render_mode
    env = _construct(source, lambda: factory(**arguments))
    if not hasattr(env, "observation_space") or not hasattr(env, "action_space"):
        raise FeverError(f"{source.name} made a {type(env).__name__}, which has no observation_space and action_space")
    return env


def make_vector_env(source: EnvSource, count: int, context: EnvContext) -> VectorEnv:
    """Make a natively vectorised environment; the caller closes it."""
    factory, spec = source.resolve()
    if spec is not None:
        _check_arguments(source, _entry_point(source, spec.vector_entry_point))
        return _construct(
            source,
            lambda: gym.make_vec(spec, num_envs=count, vectorization_mode="vector_entry_point", **source.kwargs),
        )
    assert factory is not None
    arguments = {**source.kwargs, **_context_arguments(factory, context, 0)}
    return _construct(source, lambda: factory(num_envs=count, **arguments))


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
        observation = describe_mask(name, observation, action, MASK)
    return observation, action


def describe_mask(name: str, observation: Description, action: Description, key: str | None = None) -> Description:
    """Describe observations whose mask of actions is in their part `key`, or else in the infos."""
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


def _entry_point(source: EnvSource, entry: Any) -> Any:
    """The constructor behind a registered id."""
    load = gym.envs.registration.load_env_creator
    return _construct(source, lambda: load(entry)) if isinstance(entry, str) else entry


def _check_arguments(source: EnvSource, constructor: Any, *more: str) -> None:
    """Refuse arguments that neither a constructor has nor are in `more`, before anything is made."""
    parameters = _parameters(constructor)
    if parameters is None or any(one.kind is inspect.Parameter.VAR_KEYWORD for one in parameters.values()):
        return
    for name in source.kwargs:
        if name not in parameters and name not in more:
            raise FeverError(f"{source.name} has no argument {name}; it has: {', '.join(parameters) or 'none'}")


def _construct(source: EnvSource, make: Callable[[], Any]) -> Any:
    """Call a constructor; a wrong argument or a missing package becomes one sentence."""
    try:
        return make()
    except (ImportError, gym.error.DependencyNotInstalled) as error:
        raise FeverError(_missing_package(source.name, error)) from error
    except TypeError as error:
        if "missing" not in str(error):
            raise
        raise FeverError(f"{source.name} cannot be made with the arguments {source.kwargs}: {error}") from error
    except gym.error.Error as error:
        raise FeverError(f"{source.name} cannot be made: {error}") from error


def _missing_package(name: str, error: Exception) -> str:
    text = str(error).strip().rstrip(".")
    for word, extra in EXTRAS.items():
        if word in text:
            return f'{name} needs a package that is not installed; install it with: pip install "fever[{extra}]"'
    return f"{name} needs a package that is not installed: {text}"


def _unknown_environment(name: str) -> str:
    if name.startswith("ALE/") and not any(known.startswith("ALE/") for known in gym.registry):
        return f'{name} needs the Atari environments; install them with: pip install "fever[atari]"'
    lowered = {known.lower(): known for known in gym.registry}
    close = [lowered[match] for match in difflib.get_close_matches(name.lower(), lowered, n=3, cutoff=0.5)]
    same = [known for known in gym.registry if known.lower().rpartition("-v")[0] == name.lower().rpartition("-v")[0]]
    names = list(dict.fromkeys(same[::-1] + close))[:3]
    hint = f"; did you mean {' or '.join(names)}?" if names else ""
    return f'there is no environment {name}{hint} (an environment of your own is written as "module:Name")'


def _atari() -> Any:
    """The module for ALE's environments, which registers their ids; None without ale-py."""
    try:
        from fever import atari
    except ModuleNotFoundError:
        return None
    return atari


def _import_module(module: str) -> Any:
    try:
        return importlib.import_module(module)
    except (TypeError, ValueError) as error:  # ".module", ""
        raise FeverError(f"{module!r} is not the name of a module") from error
    except ModuleNotFoundError as error:
        if error.name is not None and (module == error.name or module.startswith(f"{error.name}.")):
            raise FeverError(
                f"there is no module {module} here; start fever in the folder that has it, or install it"
            ) from error
        raise FeverError(f"module {module} cannot be imported: {error}") from error


def _import_attribute(module: str, name: str) -> Callable[..., Any]:
    found = home = _import_module(module)
    try:
        for part in name.split("."):
            found = getattr(found, part)
    except AttributeError as error:
        names = [key for key, value in vars(home).items() if callable(value) and key[0] != "_"]
        close = difflib.get_close_matches(name, names, n=3, cutoff=0.4)
        hint = f"; did you mean {' or '.join(close)}?" if close else ""
        raise FeverError(f"module {module} has no {name}{hint}") from error
    if not callable(found):
        raise FeverError(f"{module}:{name} is neither a class nor a factory function")
    return found


def _is_vector_class(factory: Any) -> bool:
    return inspect.isclass(factory) and issubclass(factory, VectorEnv)


def _parameters(constructor: Any) -> Mapping[str, inspect.Parameter] | None:
    """What a constructor takes; None for one written in C, which does not say."""
    try:
        return inspect.signature(constructor).parameters
    except (TypeError, ValueError):
        return None


def _context_arguments(constructor: Any, context: EnvContext, index: int) -> dict[str, Any]:
    """The arguments that this constructor names, out of worker_index, env_index and workdir."""
    wanted = _parameters(constructor) or {}
    arguments: dict[str, Any] = {}
    if "worker_index" in wanted:
        arguments["worker_index"] = context.worker_index
    if "env_index" in wanted:
        arguments["env_index"] = index
    if "workdir" in wanted and context.workdir is not None:
        folder = context.workdir / f"worker-{context.worker_index}-env-{index}"
        folder.mkdir(parents=True, exist_ok=True)
        arguments["workdir"] = folder
    return arguments


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
