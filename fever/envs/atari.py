"""Atari by ALE's own vector environment. Needs ale-py; `EnvSource` imports this for ids that begin with `ALE/`.

| | standard, from which `env_kwargs` may differ |
|---|---|
| observations | the last 4 frames (`stack_num`), newest last, grey, 84 x 84; zeros where an episode has no 4 yet |
| one step | 4 frames (`frameskip`), the brighter of the last two (`maxpool`) |
| sticky actions | every frame repeats the action before with probability 0.25 (`repeat_action_probability`) |
| start | up to 30 frames of doing nothing (`noop_max`), then the button where a game waits for it (`use_fire_reset`) |
| end | game over (with `episodic_life` the first life lost) or 108,000 frames (`max_num_frames_per_episode`) |
| rewards | the game's own score |

With `obs_type` ("ram", "rgb" or "grayscale") it is ALE's ordinary environment, without this preprocessing.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import gymnasium as gym
import numpy as np
from ale_py import ALEInterface, AtariVectorEnv, LoggerMode
from gymnasium.envs.registration import EnvSpec
from gymnasium.spaces import Box

ALEInterface.setLoggerMode(LoggerMode.Error)  # without its banner on standard error

DEFAULTS = {"reward_clipping": False, "num_threads": 1}  # more cores are used by more processes
FIXED = {"game", "num_envs", "batch_size", "autoreset_mode", "life_loss_info"}  # others would break the step contract
FRAMES_PER_SECOND = 60


def prepare(spec: EnvSpec, arguments: Mapping[str, Any]) -> EnvSpec:
    """The specification of an ALE id as fever makes it with these arguments."""
    if "obs_type" in arguments:
        return replace(spec, vector_entry_point=None)
    return replace(
        spec,
        entry_point="fever.envs.atari:Atari",
        vector_entry_point="fever.envs.atari:AtariEnvs",
        kwargs={**spec.kwargs, **DEFAULTS},
    )


def _signature(*more: inspect.Parameter) -> inspect.Signature:
    parameters = inspect.signature(AtariVectorEnv).parameters
    return inspect.Signature([one for name, one in parameters.items() if name not in FIXED] + [*more])


class AtariEnvs(AtariVectorEnv):
    """N preprocessed games: uint8 `[N, stack, H, W]`, newest last; in colour `[N, H, W, 3 * stack]`."""

    metadata: dict[str, Any] = {}  # a copy: the parent class writes into it, otherwise into that of every VectorEnv
    __signature__ = _signature()

    def __init__(self, game: str, num_envs: int, **options: Any) -> None:
        super().__init__(game, num_envs, **options)
        shape: tuple[int, ...] = self.ale.get_observation_shape()
        frames, height, width, *colours = shape
        self.stacked_frames = 1 if colours else frames  # see `Envs.stack`
        if colours:
            self.single_observation_space = Box(0, 255, (height, width, frames * colours[0]), np.uint8)
            self.observation_space = gym.vector.utils.batch_space(self.single_observation_space, num_envs)

    def reset(
        self, *, seed: int | np.ndarray | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, np.ndarray]]:
        if seed is not None:  # ALE takes 31 bits
            seed = np.random.SeedSequence(seed).generate_state(self.num_envs) >> 1
        observations: Any
        observations, infos = super().reset(seed=seed, options=options)
        return self._arrange(observations), infos

    def step(self, actions: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, dict[str, Any]]:
        observations, rewards, terminated, truncated, infos = super().step(actions)
        return self._arrange(observations), rewards, terminated, truncated, infos

    def _arrange(self, observations: Any) -> np.ndarray:
        if self.grayscale:
            return observations
        return np.moveaxis(observations, 1, -2).reshape(self.observation_space.shape)


class Atari(gym.Env):
    """One preprocessed game as an ordinary environment.

    It renders a second game in colour and full size, which stays in step with the first: same seed, same actions.
    """

    metadata = {"render_modes": ["rgb_array"]}
    __signature__ = _signature(inspect.Parameter("render_mode", inspect.Parameter.KEYWORD_ONLY, default=None))

    def __init__(self, game: str, render_mode: str | None = None, **options: Any) -> None:
        self.render_mode = render_mode
        self.picture: np.ndarray | None = None
        self.games = [AtariEnvs(game, 1, **options)]
        if render_mode is not None:
            full = {"img_height": 210, "img_width": 160, "grayscale": False, "stack_num": 1}
            self.games.append(AtariEnvs(game, 1, **{**options, **full}))
        self.metadata = {**self.metadata, "render_fps": FRAMES_PER_SECOND // options["frameskip"]}
        self.observation_space = self.games[0].single_observation_space
        self.action_space = self.games[0].single_action_space

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed)
        if seed is None and self.picture is None:  # both games need the same seed
            seed = int(self.np_random.integers(2**31))
        results = [game.reset(seed=seed) for game in self.games]
        (observations, info), self.picture = results[0], results[-1][0][0]
        return observations[0], _first(info)

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        results = [game.step(np.asarray(action)[None]) for game in self.games]
        (observations, rewards, terminated, truncated, info), self.picture = results[0], results[-1][0][0]
        return observations[0], float(rewards[0]), bool(terminated[0]), bool(truncated[0]), _first(info)

    def render(self) -> Any:
        return self.picture if self.render_mode is not None else None

    def close(self) -> None:
        for game in self.games:
            game.close()


def _first(infos: dict[str, np.ndarray]) -> dict[str, Any]:
    return {key: values[0] for key, values in infos.items()}
