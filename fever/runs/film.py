"""Films episodes with a policy: `fever watch`, and videos during training."""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from fever import layout
from fever.envs.contract import MASK, describe_info, describe_spaces
from fever.envs.source import EnvContext, EnvSource, is_vector_class, make_env
from fever.envs.watchdog import WATCHDOG, EnvTimeout, close_quietly
from fever.errors import FeverError
from fever.files import user_path
from fever.plugins.user_code import sentence_of, user_code
from fever.policy.spaces import Description
from fever.runs.checkpoint import Checkpoint
from fever.runs.evaluate import EVAL_SEED
from fever.runs.player import ENDS, episode_seeds
from fever.runs.run import Run
from fever.runs.video import VideoFile, as_rgb, can_write_mp4, check_video

USUAL_RATE, LOWEST_RATE, HIGHEST_RATE = 30.0, 0.1, 240.0  # frames per second
HIDDEN = {"PYGAME_HIDE_SUPPORT_PROMPT": "1", "SDL_VIDEODRIVER": "dummy", "SDL_AUDIODRIVER": "dummy"}

Row = dict[str, Any]  # of an episode: its number, seed, return, length and end, as in `Scores.rows`


def film(
    run: Run,
    checkpoint: Checkpoint,
    source: EnvSource,
    to: str | Path | None,
    steps: int,
    seed: int = EVAL_SEED,
    deterministic: bool = True,
    episodes: int = 1,
    tell: Callable[[int], None] = lambda done: None,
) -> tuple[Path, list[Row]]:
    """Film a checkpoint's policy to a file, which is by default in the run's folder of videos; returns the file and a
    row for each episode."""
    hide_windows()
    kind = "mp4" if can_write_mp4() else "gif"
    path = run.to_write(layout.VIDEOS) / f"{checkpoint.name}.{kind}" if to is None else user_path(to)
    return path, record(checkpoint, source, path, steps, seed, deterministic, episodes, tell)


def path_of(to: Path | None, word: str, several: bool) -> Path | None:
    """Where the video of a checkpoint goes: agent-best.mp4 where one alone, and not `several`, would be agent.mp4."""
    return to.with_name(f"{to.stem}-{word}{to.suffix}") if to is not None and several else to


def record(
    checkpoint: Checkpoint,
    source: EnvSource,
    path: Path,
    steps: int,
    seed: int = EVAL_SEED,
    deterministic: bool = True,
    episodes: int = 1,
    tell: Callable[[int], None] = lambda done: None,
) -> list[Row]:
    """Film episodes, each of at most `steps` steps, one after the other to an mp4 or gif file; returns a row for each.
    They are the first ones that an evaluation with this seed plays. `tell` is called with the number of those done."""
    check_video(path)
    seeds = episode_seeds(seed, episodes)
    with VideoFile(path) as video:
        if checkpoint.provider is not None:
            return _record_elsewhere(checkpoint, source, video, steps, seeds, deterministic, tell)
        policy, rows = checkpoint.policy(), []
        policy.rng = np.random.default_rng(seed)
        with tempfile.TemporaryDirectory(prefix="fever-") as folder:
            camera = Camera(source, EnvContext(workdir=Path(folder)))
            try:
                for number, one in enumerate(seeds):
                    row = camera.play(policy, video, steps, one, deterministic, checkpoint.check_spaces)
                    rows.append({"episode": number, **row})
                    tell(len(rows))
            finally:
                camera.close()
    return rows


def _record_elsewhere(
    checkpoint: Checkpoint,
    source: EnvSource,
    video: VideoFile,
    steps: int,
    seeds: list[int],
    deterministic: bool,
    tell: Callable[[int], None],
) -> list[Row]:
    """As `record`, for a policy of another library."""
    assert checkpoint.provider is not None
    rows = []
    for number, seed in enumerate(seeds):
        frames, rate, total = checkpoint.provider.film(checkpoint, source, steps, seed, deterministic)
        video.rate = rate
        for frame in frames:
            video.add(frame)
        row = {"episode": number, "seed": seed, "return": total, "length": len(frames) - 1, "end": None}
        rows.append(row)
        tell(len(rows))
    return rows


class Camera:
    """One environment that draws itself, in which episodes are filmed. Raises `FeverError` for whatever goes wrong in
    it, and for calls that take longer than the limits in the context."""

    def __init__(self, source: EnvSource, context: EnvContext) -> None:
        self.name, self.watch = source.name, context.watch(source.name)
        factory, _ = source.resolve()
        if is_vector_class(factory):
            raise FeverError(
                f"{self.name} cannot be filmed: it is natively vectorised, and draws no single environment"
            )
        self.env = make_env(source, replace(context, render_mode="rgb_array"))
        self.rate = rate_of(self.env)
        WATCHDOG.add(self.watch)

    def play(
        self,
        policy: Any,
        video: VideoFile,
        steps: int,
        seed: int,
        deterministic: bool = True,
        check: Callable[[Description, Description, str], None] = lambda *described: None,
        over: Callable[[], bool] = lambda: False,
    ) -> Row:
        """Film one episode of at most `steps` steps, which ends sooner if `over()` says so; returns its row without a
        number. `check` is called with the environment's spaces and name after the reset."""
        video.rate = self.rate
        with user_code(f"{self.name} cannot be filmed"):
            observation, info = self._limited("reset", partial(self.env.reset, seed=seed))
            has, takes = describe_spaces(self.name, self.env.observation_space, self.env.action_space)
            check(describe_info(self.name, has, takes, info), takes, self.name)
            policy.reset()
            video.add(self._frame())
            total, length, end = 0.0, 0, ENDS[2]
            while length < steps and not over():
                action = policy.act(observation, deterministic, mask=info.get(MASK))
                step = self._limited("step", partial(self.env.step, action))
                observation, reward, terminated, truncated, info = step
                total, length = total + float(reward), length + 1
                video.add(self._frame())
                if terminated or truncated:
                    end = ENDS[0 if terminated else 1]
                    break
        return {"seed": seed, "return": total, "length": length, "end": end}

    def try_out(self, seed: int) -> None:
        """Draw one frame, to find out whether that works."""
        with user_code(f"{self.name} cannot be filmed"):
            self._limited("reset", partial(self.env.reset, seed=seed))
            self._frame()

    def _frame(self) -> np.ndarray:
        return self._limited("step", partial(frame_of, self.env, self.name))  # a picture has the limit of a step

    def _limited(self, kind: str, call: Callable[[], Any]) -> Any:
        with self.watch.calling(kind):
            try:
                return call()
            except EnvTimeout as error:
                raise FeverError(str(error)) from None

    def close(self) -> None:
        WATCHDOG.remove(self.watch)
        close_quietly(self.name, self.env.close)


def hide_windows() -> None:
    """Have graphics libraries draw without a window, and without a display where there is none."""
    for variable, value in HIDDEN.items():
        os.environ.setdefault(variable, value)
    if "DISPLAY" not in os.environ:
        os.environ.setdefault("MUJOCO_GL", "egl")  # its default needs a display


def frame_of(env: Any, name: str) -> np.ndarray:
    """What an environment draws now, `[height, width, 3]`, uint8."""
    import gymnasium as gym

    try:
        frame = env.render()
    except (ImportError, gym.error.DependencyNotInstalled) as error:
        raise FeverError(f'{name} cannot be drawn; install what it needs with: pip install "fever[render]"') from error
    except NotImplementedError as error:
        raise FeverError(f"{name} cannot be drawn: it has no method render") from error
    except Exception as error:  # whatever a user's render() raises, or its graphics library
        raise FeverError(f"{name} cannot be drawn: {sentence_of(error)}") from error
    try:
        return as_rgb(frame)
    except ValueError as error:
        modes = _modes_of(env)
        if modes is not None and "rgb_array" not in modes:
            has = f"it has {', '.join(modes)}" if modes else "it has none"
            raise FeverError(f"{name} cannot be filmed: it has no render mode rgb_array ({has})") from error
        raise FeverError(f"{name} cannot be filmed: {error}; a picture is an array [height, width, 3]") from error


def _modes_of(env: Any) -> list[str] | None:
    """The render modes that an environment declares; None if it declares them in no way that can be read."""
    modes = _metadata(env).get("render_modes", [])
    return [str(mode) for mode in modes] if isinstance(modes, list | tuple | set) else None


def _metadata(env: Any) -> dict[str, Any]:
    found = getattr(env, "metadata", None)
    return found if isinstance(found, dict) else {}


def rate_of(env: Any) -> float:
    """Frames per second of an environment's videos: its `render_fps`, or 30 without one that can be used."""
    try:
        rate = float(_metadata(env).get("render_fps", USUAL_RATE))
    except (TypeError, ValueError):
        return USUAL_RATE
    return min(max(rate, LOWEST_RATE), HIGHEST_RATE) if math.isfinite(rate) and rate > 0 else USUAL_RATE
