"""Environments that draw themselves, well or badly."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces


class PictureEnv(gym.Env):
    """Episodes of `length` steps; every frame is one shade of grey, 10 brighter than the one before.

    `draws` is what render() does: draw, or what goes wrong with it.
    """

    metadata = {"render_modes": ["rgb_array"], "render_fps": 10}
    observation_space = spaces.Box(-1, 1, (2,))
    action_space = spaces.Discrete(2)

    def __init__(
        self,
        render_mode: str | None = None,
        size: tuple[int, int] = (40, 60),
        length: int = 12,
        draws: str = "draw",
        bad_from: int = 0,
    ) -> None:
        self.render_mode, self.size, self.length, self.draws, self.bad_from = render_mode, size, length, draws, bad_from
        if draws == "ansi":
            self.metadata = {"render_modes": ["ansi"]}

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.passed = 0
        return self.np_random.uniform(-1, 1, 2).astype(np.float32), {}

    def step(self, action: Any) -> Any:
        self.passed += 1
        return np.zeros(2, np.float32), 1.0 + float(action), self.passed >= self.length, False, {}

    def render(self) -> Any:
        assert self.render_mode == "rgb_array"
        picture = np.full((*self.size, 3), 10 * self.passed % 250, np.uint8)
        if self.draws == "draw" or self.passed < self.bad_from:
            return picture
        if self.draws == "raise":
            raise RuntimeError("the renderer is gone")
        bad = {"none": None, "ansi": "+--+", "list": [picture], "flat": picture.ravel(), "wider": picture.repeat(2, 1)}
        return bad[self.draws]


class UndrawnEnv(PictureEnv):
    """Has no method render."""

    render = gym.Env.render
