"""Play episodes with a trained policy: scores and videos."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fever.envs.contract import MASK, describe_info, describe_spaces
from fever.envs.make import make_envs
from fever.envs.source import EnvContext, EnvSource, make_env
from fever.errors import FeverError
from fever.runs.checkpoint import Checkpoint
from fever.runs.run import Run

PARALLEL = 8  # episodes played at once


@dataclass(frozen=True)
class Scores:
    """Returns [episodes] and lengths [episodes] of evaluated episodes, ordered by environment."""

    returns: np.ndarray
    lengths: np.ndarray

    def summary(self) -> dict[str, float]:
        return {
            "episodes": len(self.returns),
            "return_mean": float(self.returns.mean()),
            "return_std": float(self.returns.std()),
            "return_min": float(self.returns.min()),
            "return_max": float(self.returns.max()),
            "length_mean": float(self.lengths.mean()),
        }


def source_of(run: Run, checkpoint: Checkpoint | None = None) -> EnvSource:
    """The environment that a run was trained on, with the arguments in force when the checkpoint was written, or with
    those that the run began with."""
    config = run.config
    return EnvSource(config.env, {**config.env_kwargs, **(checkpoint.env_changes if checkpoint else {})})


def evaluate(
    checkpoint: Checkpoint, source: EnvSource, episodes: int = 20, seed: int = 1_000_000, deterministic: bool = True
) -> Scores:
    """Play episodes with frozen normalisation. Each of the parallel environments plays a fixed number of them, so that
    short episodes are not counted more often."""
    if checkpoint.provider is not None:
        return Scores(*checkpoint.provider.play(checkpoint, source, episodes, seed, deterministic))
    policy = checkpoint.policy()
    policy.rng = np.random.default_rng(seed)
    count = min(episodes, PARALLEL)
    quota = np.array([episodes // count + (index < episodes % count) for index in range(count)])
    returns: list[list[float]] = [[] for _ in range(count)]
    lengths: list[list[int]] = [[] for _ in range(count)]
    with tempfile.TemporaryDirectory(prefix="fever-") as folder:
        envs = make_envs(source, count, EnvContext(workdir=Path(folder)))
        try:
            seeds = np.random.SeedSequence(seed).generate_state(count)
            observations = envs.reset([int(one) for one in seeds])
            checkpoint.check_spaces(envs.observation, envs.action, source.name)
            first, phantom = np.ones(count, bool), np.zeros(count, bool)
            total, length = np.zeros(count), np.zeros(count, np.int64)
            while any(len(done) < share for done, share in zip(returns, quota, strict=True)):
                step = envs.step(policy.act_encoded(observations, first, deterministic))
                observations = step.observations
                total += step.rewards
                length += ~phantom
                ended = step.terminated | step.truncated
                for index in np.flatnonzero(ended).tolist():
                    if len(returns[index]) < quota[index]:
                        returns[index].append(float(total[index]))
                        lengths[index].append(int(length[index]))
                    total[index] = length[index] = 0
                first, phantom = (phantom, ended) if envs.next_step else (ended, phantom)
        finally:
            envs.close()
    return Scores(np.concatenate(returns), np.concatenate(lengths))


def record(checkpoint: Checkpoint, source: EnvSource, path: Path, steps: int, seed: int = 1_000_000) -> float:
    """Film one episode (at most `steps` steps) to an mp4 or gif file; returns its return."""
    check_video(path)
    if checkpoint.provider is not None:
        filmed, rate, total = checkpoint.provider.film(checkpoint, source, steps, seed)
        write_video(path, filmed, rate)
        return total
    policy = checkpoint.policy()
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
                action = policy.act(observation, mask=info.get(MASK))
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
