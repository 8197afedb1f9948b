"""Environments and an algorithm for the tests of RLlib, which need it to be installed."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.envs.classic_control import CartPoleEnv
from ray.rllib.algorithms.ppo import PPO, PPOConfig
from ray.rllib.env.multi_agent_env import MultiAgentEnv


class TwoAgents(MultiAgentEnv):
    """Two agents for ten steps. Action 1 gives reward 1 to `left`, 2 to `right`. `left` may observe a number."""

    metadata: dict[str, Any] = {"render_modes": ["rgb_array"], "render_fps": 5}

    def __init__(self, render_mode: str | None = None, number: bool = False) -> None:
        super().__init__()
        self.render_mode, self.number = render_mode, number
        self.agents = self.possible_agents = ["left", "right"]
        self.observation_spaces = {agent: gym.spaces.Box(-1, 1, (2,)) for agent in self.agents}
        if number:
            self.observation_spaces["left"] = gym.spaces.Discrete(3)
        self.action_spaces = {agent: gym.spaces.Discrete(2) for agent in self.agents}
        self.count = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[dict, dict]:
        self.count = 0
        return self._observations(), {}

    def step(self, actions: dict[str, int]) -> tuple[dict, dict, dict, dict, dict]:
        self.count += 1
        rewards = {"left": float(actions["left"]), "right": 2.0 * actions["right"]}
        return self._observations(), rewards, {"__all__": False}, {"__all__": self.count == 10}, {}

    def render(self) -> np.ndarray:
        return np.full((32, 32, 3), 20 * self.count, np.uint8)

    def _observations(self) -> dict[str, Any]:
        seen: dict[str, Any] = {agent: np.zeros(2, np.float32) for agent in self.agents}
        return {**seen, "left": self.count % 3} if self.number else seen


class OfRllib(CartPoleEnv):
    """A constructor as in RLlib's documentation: all arguments are one mapping."""

    def __init__(self, env_config: Any) -> None:
        super().__init__()
        self.length, self.number = env_config["length"], env_config.worker_index


class BreaksInStep(CartPoleEnv):
    """Fails after some steps."""

    def __init__(self, after: int = 3) -> None:
        super().__init__()
        self.left = after

    def step(self, action: Any) -> Any:
        self.left -= 1
        if self.left == 0:
            raise OSError("libwarehouse.so is not here")
        return super().step(action)


class OwnConfig(PPOConfig):
    """PPO's configuration with one more setting."""

    def __init__(self, algo_class: Any = None) -> None:
        super().__init__(algo_class=algo_class or OwnAlgorithm)
        self.own_setting = 1

    def training(self, *, own_setting: int | None = None, **more: Any) -> Any:
        if own_setting is not None:
            self.own_setting = own_setting
        return super().training(**more)


class OwnAlgorithm(PPO):
    """PPO that logs its own setting as a metric."""

    @classmethod
    def get_default_config(cls) -> OwnConfig:
        return OwnConfig()

    def training_step(self) -> None:
        super().training_step()
        self.metrics.log_value(("learners", "default_policy", "own_metric"), self.config.own_setting, window=1)
