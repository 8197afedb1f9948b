"""Videos during training (`--video-every`): one episode with the current policy, in an environment of its own."""

from __future__ import annotations

import logging
import re
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

from fever import layout, signals
from fever.envs.source import EnvContext, EnvSource
from fever.errors import FeverError
from fever.plugins.network import load_policy
from fever.policy.spaces import Description, mismatch
from fever.runs.film import Camera, hide_windows
from fever.runs.video import VideoFile, can_write_mp4
from fever.text import format_number
from fever.training.callbacks import Callback, TrainingInfo
from fever.training.env_failures import failure_rules_of

if TYPE_CHECKING:
    from fever.training.trainer import Trainer

SEED = 3_000_000  # of the episode, which is the same one each time
STEPS = 1000  # of an episode at most,
SECONDS = 30.0  # and the time that filming it may take
KEPT = 20  # newest videos that stay, besides the first
ATTEMPTS = 3  # videos that fail in a row, until no more are tried
NAME = re.compile(re.escape(layout.TRAINING_VIDEO) + r"(\d+)\.(mp4|gif)")


def make_videos(trainer: Trainer) -> list[Callback]:
    """The callback that films, if the run asks for it. Raises `FeverError` if the environment cannot be filmed."""
    return [] if trainer.config.video_every is None else [Videos(trainer, trainer.config.video_every)]


class Videos(Callback):
    """Films an episode after the first iteration that passes a multiple of `every` steps.

    A video that fails does not end the run. Filming draws on none of the run's random streams.
    """

    def __init__(self, trainer: Trainer, every: int) -> None:
        self.trainer, self.every = trainer, every
        self.policy = load_policy(trainer.prepared.policy, {})
        self.kind = "mp4" if can_write_mp4() else "gif"
        self.camera: Camera | None = None
        self.source: EnvSource | None = None  # what the camera's environment was made of
        self.before = 0  # steps after the last iteration
        self.failed = 0  # videos in a row
        self.told = False  # whether a failure was said
        try:
            self._try_out()
        except FeverError as error:
            raise FeverError(f"--video-every: {error}") from error

    def _try_out(self) -> None:
        """Make the environment and draw it once."""
        with tempfile.TemporaryDirectory(prefix="fever-") as folder, signals.interruptible():
            camera = self._open(Path(folder))
            try:
                camera.try_out(SEED)
            finally:
                camera.close()

    def _open(self, workdir: Path) -> Camera:
        hide_windows()
        config, self.source = self.trainer.config, self.trainer.source
        assert isinstance(config.workers, int)
        first = max(1, config.workers) + 1  # no sampler begins with this index, and evaluation has the one before
        return Camera(self.source, EnvContext(first, workdir, failure_rules=failure_rules_of(config)))

    def on_start(self, info: TrainingInfo) -> None:
        self.before = info.steps

    def on_iteration(self, info: TrainingInfo) -> None:
        due = info.steps // self.every > self.before // self.every
        self.before = info.steps
        if not due or self.failed >= ATTEMPTS or not info.run.disk.ready():
            return
        began = time.perf_counter()
        try:
            with signals.interruptible():
                self._film(info)
            self.failed = 0
        except KeyboardInterrupt:
            signals.postpone()
        except Exception as error:  # noqa: BLE001 - of the environment, its graphics library, ffmpeg, the disk
            self._note(error)
        finally:
            seconds = time.perf_counter() - began
            self.trainer.seconds["videos"] += seconds
            self.trainer.progress.evaluation_seconds += seconds

    def _film(self, info: TrainingInfo) -> None:
        """Film an episode, and remove the videos that are too many."""
        run, deadline = info.run, time.monotonic() + SECONDS
        if self.source != self.trainer.source:
            self._close()  # a callback has changed its arguments
        if self.camera is None:
            self.camera = self._open(run.path.resolve() / layout.WORK / "video")
        self.policy.params = self.trainer.learner.weights()
        folder = run.to_write(layout.VIDEOS)
        path = folder / f"{layout.TRAINING_VIDEO}{info.steps:09}.{self.kind}"
        with VideoFile(path) as video:
            over = lambda: time.monotonic() > deadline  # noqa: E731
            row = self.camera.play(self.policy, video, STEPS, SEED, check=self._check, over=over)
        logging.info("%s: return %s, %d steps", path.name, format_number(row["return"]), row["length"])
        prune(folder, info.steps)

    def _check(self, observation: Description, action: Description, name: str) -> None:
        if found := mismatch((self.policy.observation, self.policy.action), (observation, action)):
            raise FeverError(f"{name} does not fit the run when it is filmed: it has {found}")

    def _note(self, error: Exception) -> None:
        """A video has failed: the first time it is said, and the environment is made anew for the next one."""
        self.failed += 1
        logging.warning("no video: %s", error, exc_info=True)
        if not self.told:
            self.told = True
            self.trainer.display.message(f"note: a video could not be made, and training goes on: {error}")
        self._close()

    def on_stop(self, info: TrainingInfo) -> None:
        self._close()

    def _close(self) -> None:
        camera, self.camera = self.camera, None
        if camera is not None:
            camera.close()


def prune(folder: Path, steps: int) -> None:
    """Remove videos that are too many, those of iterations that a resumed run has repeated, because they have more
    steps than the run, and what a kill has left of a video."""
    numbered = {
        path: int(found[1])
        for path in folder.iterdir()
        if (found := NAME.fullmatch(path.name)) and path.is_file() and not path.is_symlink()
    }
    later = [path for path, number in numbered.items() if number > steps]
    kept = sorted(numbered.keys() - set(later), key=lambda path: numbered[path])
    for path in (*later, *kept[1:-KEPT], *folder.glob(f".{layout.TRAINING_VIDEO}*")):
        path.unlink(missing_ok=True)
