"""Acts with a checkpoint's weights through RLlib's own env runner, with its connectors, for one agent or several.

No pickle is read: the algorithm is built from the run's configuration, and the weights and the connectors' states come
from safetensors and JSON.
"""

from __future__ import annotations

import pickle  # nosec B403 # writes only: the bytes of first observations are compared
import tempfile
import uuid
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

from fever.config import RunConfig
from fever.envs.source import EnvSource
from fever.errors import FeverError
from fever.rllib.adapter import rllib_config
from fever.rllib.catalogue import require_rllib, silence
from fever.rllib.environment import MakeEnv, Spaces, probe_spaces
from fever.rllib.settings import validated
from fever.rllib.structure import unpack
from fever.runs.checkpoint import WEIGHTS_PREFIX, Checkpoint
from fever.runs.film import frame_of, rate_of
from fever.runs.player import Scores
from fever.runs.run import Run
from fever.runs.trust import names_in
from fever.system import absolute_sys_path

LOOKBACK = 200  # steps of the episode that are kept for connectors, and at least half of it
FILM_STEPS = 64  # sampled at a time, until the episode ends


class Player:
    """One environment and the policies of a checkpoint; a context manager."""

    def __init__(self, checkpoint: Checkpoint, source: EnvSource, seed: int = 0, film: bool = False) -> None:
        require_rllib()
        self.folder = tempfile.TemporaryDirectory(prefix="fever-")
        workdir = Path(self.folder.name)
        config = trusted_config(checkpoint, source.name)
        self.spaces = probe_spaces(source)
        checkpoint.check_spaces(self.spaces.observation, self.spaces.action, source.name)
        config = config.model_copy(update={"workers": 0, "envs": 1, "seed": seed, "gpus_per_worker": 0.0})
        with silence():
            self.runner = make_runner(config, self.spaces, MakeEnv(source, workdir, absolute_sys_path(), render=film))
            self._load(checkpoint)

    @property
    def env(self) -> Any:
        """The one environment."""
        return self.runner.env.unwrapped.envs[0]

    def _load(self, checkpoint: Checkpoint) -> None:
        packed, arrays = checkpoint.field("algorithm", dict).get("connectors"), checkpoint.arrays()
        if isinstance(packed, dict) and "unknown" in packed:
            raise FeverError(
                f"a connector has a state that only RLlib can read ({packed['unknown']}); "
                f"use RLlib's Algorithm.from_checkpoint on {checkpoint.files}"
            )
        self.steps = checkpoint.field("steps", int)  # exploration may depend on them
        with checkpoint.reading("played with"):
            policies: dict[str, dict[str, np.ndarray]] = {}
            for name, value in arrays.items():
                if name.startswith(WEIGHTS_PREFIX):
                    policy, _, parameter = name.removeprefix(WEIGHTS_PREFIX).partition("/")
                    policies.setdefault(policy, {})[parameter] = value
            connectors = unpack(packed, arrays)
            state: dict[str, Any] = {"rl_module": policies, "num_env_steps_sampled_lifetime": self.steps}
            state |= {f"{name}_connector": value for name, value in connectors.items()}
            self.runner.set_state(state)

    def __enter__(self) -> Player:
        return self

    def __exit__(self, *error: object) -> None:
        self.runner.stop()
        self.folder.cleanup()


def trusted_config(checkpoint: Checkpoint, env: str = "") -> RunConfig:
    """The configuration of a checkpoint's run, all of whose names may be imported; whoever gave `env` has seen to that.

    Raises FeverError if the user does not trust the run.
    """
    run = Run(checkpoint.path.parents[1], checkpoint.trusted)
    config = run.config
    run.require_trust(name for name in names_in(config) if name != env)
    if config.algo != checkpoint.field("algo", str):  # or names were looked for in the settings of another library
        raise FeverError(f"{run.path} is damaged: its configuration and its checkpoint name different algorithms")
    return config


def make_runner(config: RunConfig, spaces: Spaces, make: MakeEnv) -> Any:
    """RLlib's env runner in this process, with one environment and untrained networks and connectors."""
    from ray.rllib.env.multi_agent_env_runner import MultiAgentEnvRunner
    from ray.rllib.env.single_agent_env_runner import SingleAgentEnvRunner
    from ray.tune.registry import register_env

    name = f"fever-{uuid.uuid4().hex}"
    register_env(name, make)
    rllib = rllib_config(config, spaces, name)
    rllib.env_runners(gym_env_vectorize_mode="sync")  # `Player.env` reaches into it
    kind = rllib.env_runner_cls or (MultiAgentEnvRunner if spaces.agents else SingleAgentEnvRunner)
    return kind(config=validated(rllib, config.algo), worker_index=0, num_workers=0)


def play(
    checkpoint: Checkpoint, source: EnvSource, seeds: list[int], deterministic: bool, max_steps: int | None = None
) -> Scores:
    """Play one episode after the other, each reset with its seed; returns are summed over agents."""
    begin = perf_counter()
    starts: list[bytes] = []
    with Player(checkpoint, source, seeds[0]) as player, silence():
        _seed_resets(player.env, seeds, starts, max_steps)
        played = player.runner.sample(num_episodes=len(seeds), explore=not deterministic)
    returns = np.array([float(episode.get_return()) for episode in played])
    lengths = np.array([episode.env_steps() for episode in played])
    return Scores(returns, lengths, seeds, [], len(set(starts[: len(seeds)])), perf_counter() - begin)


def _seed_resets(env: Any, seeds: list[int], starts: list[bytes], max_steps: int | None) -> None:
    """Have an environment reset with one seed after the other, note its first observations, and cut off episodes."""
    reset, step = env.reset, env.step
    length = 0

    def seeded(**arguments: Any) -> Any:
        nonlocal length
        length = 0
        result = reset(**{**arguments, "seed": seeds[len(starts) % len(seeds)]})
        starts.append(pickle.dumps(result[0]))
        return result

    def limited(action: Any) -> Any:
        nonlocal length
        observation, reward, terminated, truncated, info = step(action)
        length += 1
        if max_steps is not None and length >= max_steps:
            truncated = {**truncated, "__all__": True} if isinstance(truncated, dict) else True
        return observation, reward, terminated, truncated, info

    env.reset, env.step = seeded, limited


def film(
    checkpoint: Checkpoint, source: EnvSource, steps: int, seed: int, deterministic: bool = True
) -> tuple[list[np.ndarray], float, float]:
    """Frames, frames per second and return of one episode of at most `steps` steps."""
    total, length, done = 0.0, 0, False
    frames: list[np.ndarray] = []
    with Player(checkpoint, source, seed, film=True) as player, silence():
        _record_frames(player.env, source.name, frames)
        while length < steps and not done:
            piece, *_ = player.runner.sample(num_timesteps=min(FILM_STEPS, steps - length), explore=not deterministic)
            total += float(piece.get_return())
            length += piece.env_steps()
            done = piece.is_done
        rate = rate_of(player.env)
    return frames[: length + 1], rate, total


def _record_frames(env: Any, name: str, frames: list[np.ndarray]) -> None:
    """Append a frame at every reset and step. Gymnasium's wrappers do not fit environments with several agents."""

    def filmed(method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **more: Any) -> Any:
            result = method(*arguments, **more)
            frames.append(frame_of(env, name).copy())
            return result

        return call

    env.step, env.reset = filmed(env.step), filmed(env.reset)


class RllibPolicy:
    """A policy for an environment with one agent: `act(observation)` on raw observations."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        config = trusted_config(checkpoint)
        source = EnvSource(config.env, config.env_kwargs)
        with Player(checkpoint, source) as player:
            if player.spaces.agents:
                raise FeverError(f"{config.env} has several agents; play with all their policies: fever eval")
            self.runner, self.steps = player.runner, player.steps
            self.spaces = player.runner.env.single_observation_space, player.runner.env.single_action_space
        self.reset()

    def reset(self) -> None:
        """Begin a new episode with the next `act`."""
        self._episode: Any = None
        self._last: tuple[Any, dict[str, Any]] | None = None

    def act(self, observation: Any, deterministic: bool = True) -> Any:
        """The action for an observation, both as the environment has them."""
        from ray.rllib.core.columns import Columns
        from ray.rllib.env.single_agent_episode import SingleAgentEpisode

        if self._last is None:
            self._episode = SingleAgentEpisode(observation_space=self.spaces[0], action_space=self.spaces[1])
            self._episode.add_env_reset(observation=observation)
        else:
            action, more = self._last
            self._episode.add_env_step(observation, action, 0.0, extra_model_outputs=more)
            if len(self._episode) >= LOOKBACK:
                self._episode = self._episode.cut(len_lookback_buffer=LOOKBACK // 2)
        runner, explore = self.runner, not deterministic
        with silence():
            common = {"episodes": [self._episode], "explore": explore, "rl_module": runner.module, "shared_data": {}}
            batch, module = runner._env_to_module(**common), runner.module
            outputs = module.forward_exploration(batch, t=self.steps) if explore else module.forward_inference(batch)
            taken = runner._module_to_env(batch=outputs, **common)
        actions = taken.pop(Columns.ACTIONS)
        for_env = taken.pop(Columns.ACTIONS_FOR_ENV, actions)
        self._last = actions[0], {name: values[0] for name, values in taken.items()}
        return for_env[0]
