"""Play episodes with a trained policy: scores and videos."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from fever.envs.contract import MASK, describe_info, describe_spaces
from fever.envs.source import EnvContext, EnvSource, make_env
from fever.errors import FeverError
from fever.runs.checkpoint import Checkpoint
from fever.runs.player import Player, Scores, episode_seeds
from fever.runs.run import Run

CHEAP_SECONDS = 5.0  # that greedy episodes take at most for sampled ones to be played as well
EVAL_SEED = 1_000_000  # of the episodes; training evaluates with other ones


def source_of(
    run: Run,
    env: str | Callable[..., Any] | None = None,
    env_kwargs: dict[str, Any] | None = None,
    checkpoint: Checkpoint | None = None,
) -> EnvSource:
    """The environment that a run was trained on, or another one.

    The run's own has the arguments in force when the checkpoint was written, or those that the run began with, and
    `env_kwargs` replace some of them; so has a class or factory, which may be the run's own again: a lambda cannot be
    found by its name. Another environment, by name, has `env_kwargs` alone.
    """
    config = run.config
    given = EnvSource(config.env if env is None else env, env_kwargs or {})
    if isinstance(given.target, str) and given.name != config.env:
        return given
    changed = checkpoint.env_changes if checkpoint is not None else {}
    source = EnvSource(given.target, {**config.env_kwargs, **changed, **given.kwargs})
    if config.env.startswith("__main__:") and env is None:  # workers have another main module: send the object
        factory, _ = source.resolve()
        assert factory is not None
        return EnvSource(factory, source.kwargs)
    return source


def evaluate(
    checkpoint: Checkpoint,
    source: EnvSource,
    episodes: int = 20,
    seed: int = EVAL_SEED,
    deterministic: bool = True,
    max_steps: int | None = None,
    tell: Callable[[int], None] = lambda done: None,
) -> Scores:
    """Play episodes with frozen normalisation, each with a seed of its own; they are cut off after `max_steps` steps.

    `source` may be the factory that the run was trained with, or another environment with the same spaces. `tell` is
    called with the number of episodes that have ended.
    """
    if checkpoint.provider is not None:
        return checkpoint.provider.play(checkpoint, source, episode_seeds(seed, episodes), deterministic, max_steps)
    policy = checkpoint.policy()
    policy.rng = np.random.default_rng(seed)
    with tempfile.TemporaryDirectory(prefix="fever-") as folder:
        player = Player(source, episodes, seed, EnvContext(workdir=Path(folder)), max_steps, anew=True)
        try:
            return player.play(
                policy,
                deterministic,
                lambda envs: checkpoint.check_spaces(envs.observation, envs.action, source.name),
                tell,
            )
        finally:
            player.close()


def compare_sampled(
    checkpoint: Checkpoint,
    source: EnvSource,
    greedy: Scores,
    seed: int = EVAL_SEED,
    max_steps: int | None = None,
    wanted: bool | None = None,
) -> Scores | None:
    """Play half of the episodes (at least 5) again with sampled actions; None if the policy does not sample.

    Unless it is `wanted` or not, that is done only if the greedy episodes took few seconds.
    """
    if wanted is False or (wanted is None and (checkpoint.provider is not None or greedy.seconds > CHEAP_SECONDS)):
        return None
    network = checkpoint.policy().network if checkpoint.provider is None else None
    if network is not None and (network.action_values or network.squashed == "deterministic"):
        return None
    count = len(greedy.returns)
    return evaluate(checkpoint, source, min(count, max(5, count // 2)), seed, False, max_steps)


def record(
    checkpoint: Checkpoint,
    source: EnvSource,
    path: Path,
    steps: int,
    seed: int = EVAL_SEED,
    deterministic: bool = True,
) -> float:
    """Film one episode (at most `steps` steps) to an mp4 or gif file; returns its return."""
    check_video(path)
    if checkpoint.provider is not None:
        filmed, rate, total = checkpoint.provider.film(checkpoint, source, steps, seed, deterministic)
        write_video(path, filmed, rate)
        return total
    policy = checkpoint.policy()
    policy.rng = np.random.default_rng(seed)
    frames: list[np.ndarray] = []
    total = 0.0
    with tempfile.TemporaryDirectory(prefix="fever-") as folder:
        env = make_env(source, EnvContext(workdir=Path(folder), render_mode="rgb_array"))
        try:
            has, takes = describe_spaces(source.name, env.observation_space, env.action_space)
            observation, info = env.reset(seed=seed)
            has = describe_info(source.name, has, takes, info)
            checkpoint.check_spaces(has, takes, source.name)
            frames.append(frame_of(env, source.name))
            for _ in range(steps):
                action = policy.act(observation, deterministic, mask=info.get(MASK))
                observation, reward, terminated, truncated, info = env.step(action)
                total += float(reward)
                frames.append(frame_of(env, source.name))
                if terminated or truncated:
                    break
            rate = int((env.metadata or {}).get("render_fps") or 30)
        finally:
            env.close()
    write_video(path, frames, rate)
    return total


def frame_of(env: Any, name: str) -> np.ndarray:
    import gymnasium as gym

    try:
        frame = env.render()
    except (ImportError, gym.error.DependencyNotInstalled) as error:
        raise FeverError(f'{name} cannot be drawn; install what it needs with: pip install "fever[render]"') from error
    except NotImplementedError as error:
        raise FeverError(f"{name} cannot be drawn: it has no method render") from error
    except Exception as error:  # whatever a user's render() raises, or its graphics library
        hint = (
            "; without a display, MuJoCo needs the libraries of EGL, or MUJOCO_GL=osmesa"
            if "OpenGL" in str(error)
            else ""
        )
        raise FeverError(f"{name} cannot be drawn: {type(error).__name__}: {error}{hint}") from error
    if not isinstance(frame, np.ndarray) or frame.ndim != 3:
        raise FeverError(f"{name} cannot be filmed: it has no render mode rgb_array")
    return frame.astype(np.uint8)


def check_video(path: Path) -> None:
    """Refuse a kind of file that `write_video` cannot write."""
    if path.suffix not in (".mp4", ".gif"):
        raise FeverError(f"{path}: a video is written as .mp4 or .gif")
    if path.suffix == ".mp4" and not can_write_mp4():
        raise FeverError('an mp4 needs ffmpeg; install it with: pip install "fever[render]", or choose a .gif')


def write_video(path: Path, frames: list[np.ndarray], rate: int) -> None:
    """Write frames as `.mp4` (with imageio-ffmpeg) or `.gif` (with Pillow)."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.open("wb").close()  # ffmpeg does not say by an error that it cannot
    except OSError as error:
        raise FeverError(f"{path} cannot be written: {error.strerror}") from error
    if path.suffix == ".gif":
        from PIL import Image

        images = [Image.fromarray(frame) for frame in frames]
        images[0].save(path, save_all=True, append_images=images[1:], duration=1000 / rate, loop=0)
        return
    import imageio_ffmpeg

    height, width = (side - side % 2 for side in frames[0].shape[:2])  # the codec wants even sides
    writer = imageio_ffmpeg.write_frames(
        str(path), (width, height), fps=rate, macro_block_size=2, ffmpeg_log_level="error"
    )
    writer.send(None)
    for frame in frames:
        writer.send(np.ascontiguousarray(frame[:height, :width, :3]))
    writer.close()


def can_write_mp4() -> bool:
    from importlib.util import find_spec

    return find_spec("imageio_ffmpeg") is not None
