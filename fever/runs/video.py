"""Video files, written frame by frame: .mp4 through ffmpeg, .gif through Pillow. A file appears when it is complete."""

from __future__ import annotations

import os
import secrets
import subprocess
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, Protocol

import numpy as np

from fever.errors import FeverError
from fever.system import start

LARGEST_SIDE = 2048  # pixels; larger frames are made smaller by a whole factor
SMALLEST_SIDE = 16  # pixels, below which the codec refuses frames: they are made larger by a whole factor
GIF_RATE = 50.0  # frames per second at most: browsers slow faster ones down to 10
GIF_BYTES = 1 << 30  # of frames that wait in memory, because a gif is written at its end
CLOSE_SECONDS = 60.0  # for ffmpeg to write the rest


def can_write_mp4() -> bool:
    from importlib.util import find_spec

    return find_spec("imageio_ffmpeg") is not None


def check_video(path: Path) -> None:
    """Refuse a kind of file that cannot be written."""
    if path.suffix not in (".mp4", ".gif"):
        raise FeverError(f"{path}: a video is written as .mp4 or .gif")
    if path.suffix == ".mp4" and not can_write_mp4():
        raise FeverError('an mp4 needs ffmpeg; install it with: pip install "fever[render]", or choose a .gif')


class VideoFile:
    """A video that takes its place at `path` when the block is left without an exception; otherwise nothing is left.

    All frames have the size of the first one: others are scaled into it. Set `rate`, in frames per second, before the
    first frame.
    """

    def __init__(self, path: Path) -> None:
        check_video(path)
        self.path, self.rate = path, 30.0
        self.count = 0  # of frames
        self.partial = path.with_name(f".{path.stem}.{secrets.token_hex(4)}{path.suffix}")
        self.writer: Writer | None = None
        self.size: tuple[int, int] | None = None  # height and width of the first frame
        self.made: list[Path] = []  # folders that were made for it, the innermost first

    def __enter__(self) -> VideoFile:
        try:
            self.made = [parent for parent in self.path.parents if not parent.exists()]
            self.path.parent.mkdir(parents=True, exist_ok=True)
            if self.path.is_dir():
                raise FeverError(f"{self.path} cannot be written: it is a folder")
            os.close(os.open(self.partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666))
        except OSError as error:
            raise FeverError(f"{self.path} cannot be written: {error.strerror}") from error
        return self

    def add(self, frame: np.ndarray) -> None:
        """Append a frame `[height, width, 3]`, uint8."""
        if self.size is None:
            self.size = frame.shape[0], frame.shape[1]
        elif frame.shape[:2] != self.size:
            frame = _padded(frame, self.size)
        frame = _resized(frame)
        if self.writer is None:
            kind = Mp4 if self.path.suffix == ".mp4" else Gif
            self.writer = kind(self.partial, (frame.shape[0], frame.shape[1]), self.rate)
        self.writer.add(frame)
        self.count += 1

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        complete = False
        try:
            if self.writer is not None:
                self.writer.close(keep=kind is None)
            if kind is None:
                self._put_in_place()
                complete = True
        finally:
            if not complete:
                self.partial.unlink(missing_ok=True)
                with suppress(OSError):  # somebody else has put something there
                    for folder in self.made:
                        folder.rmdir()

    def _put_in_place(self) -> None:
        try:
            self.partial.replace(self.path)
        except OSError as error:
            raise FeverError(f"{self.path} cannot be written: {error.strerror}") from error


class Writer(Protocol):
    """Writes frames of one size to a file."""

    def __init__(self, path: Path, size: tuple[int, int], rate: float) -> None: ...
    def add(self, frame: np.ndarray) -> None: ...
    def close(self, keep: bool) -> None: ...  # without `keep`, nobody wants the file


class Mp4:
    """H.264 by a process of ffmpeg, which takes the frames through a pipe and ends with this process."""

    def __init__(self, path: Path, size: tuple[int, int], rate: float) -> None:
        import imageio_ffmpeg

        self.path, (height, width) = path, size
        odd = height % 2 or width % 2  # the codec wants even sides
        self.padding = ((0, height % 2), (0, width % 2), (0, 0)) if odd else None
        shape = f"{width + width % 2}x{height + height % 2}"
        try:
            program = imageio_ffmpeg.get_ffmpeg_exe()
        except RuntimeError as error:
            raise FeverError(f"an mp4 needs ffmpeg, and there is none: {error}; choose a .gif") from error
        words = [program, "-y", "-loglevel", "error", "-f", "rawvideo", "-pix_fmt", "rgb24", "-s", shape]
        words += ["-r", f"{rate:g}", "-i", "-", "-an", "-c:v", "libx264", "-preset", "veryfast", "-crf", "20"]
        words += ["-pix_fmt", "yuv420p", "-movflags", "+faststart", str(path.absolute())]
        self.errors: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - `close` closes it
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.DEVNULL, "stderr": self.errors}
        self.process = start(words, os.environ, start_new_session=True, **pipes)  # Ctrl-C is not for it

    def add(self, frame: np.ndarray) -> None:
        assert self.process.stdin is not None
        try:
            even = frame if self.padding is None else np.pad(frame, self.padding, "edge")
            self.process.stdin.write(np.ascontiguousarray(even).data)
        except BrokenPipeError:
            self._fail()

    def close(self, keep: bool) -> None:
        assert self.process.stdin is not None
        try:
            if not keep:
                self.process.kill()
            with suppress(BrokenPipeError):
                self.process.stdin.close()
            if self.process.wait(CLOSE_SECONDS) and keep:
                self._fail()
        finally:
            self.process.kill()
            self.process.wait()
            self.errors.close()

    def _fail(self) -> None:
        self.process.wait(CLOSE_SECONDS)
        self.errors.seek(0)
        said = self.errors.read().decode(errors="replace").strip().splitlines()
        raise FeverError(f"the video cannot be written: ffmpeg: {said[-1] if said else 'it ended without a word'}")


class Gif:
    """A gif, whose frames wait in memory with 256 colours each."""

    def __init__(self, path: Path, size: tuple[int, int], rate: float) -> None:
        self.path, self.rate = path, min(rate, GIF_RATE)
        self.most = max(1, GIF_BYTES // (size[0] * size[1]))
        self.images: list[Any] = []

    def add(self, frame: np.ndarray) -> None:
        from PIL import Image

        if len(self.images) >= self.most:
            raise FeverError(
                f"a gif of more than {self.most:,} frames of this size does not fit into memory; choose a .mp4, or "
                "fewer steps"
            )
        self.images.append(Image.fromarray(frame).convert("P", palette=Image.Palette.ADAPTIVE))

    def close(self, keep: bool) -> None:
        if not keep:
            return
        first, *others = self.images
        try:
            first.save(self.path, "GIF", save_all=True, append_images=others, duration=1000 / self.rate, loop=0)
        except OSError as error:
            raise FeverError(f"the video cannot be written: {error.strerror or error}") from error


def as_rgb(frame: Any) -> np.ndarray:
    """What `render` returned as `[height, width, 3]`, uint8: grey frames get three channels, a fourth one is left out,
    and fractions from 0 to 1 become bytes. Raises ValueError for what is no picture."""
    if not isinstance(frame, np.ndarray):
        raise ValueError(f"its render() returned {'nothing' if frame is None else f'a {type(frame).__name__}'}")
    if frame.ndim == 2:
        frame = frame[..., None]
    if frame.ndim != 3 or frame.shape[2] not in (1, 3, 4) or 0 in frame.shape:
        raise ValueError(f"its render() returned an array of shape {frame.shape}, which is no picture")
    if frame.dtype.kind not in "buif":
        raise ValueError(f"its render() returned an array of {frame.dtype}")
    if frame.dtype != np.uint8:
        scale = 255 if frame.dtype.kind in "bf" and frame.max() <= 1 else 1
        frame = np.clip(np.nan_to_num(frame.astype(np.float32)) * scale, 0, 255).astype(np.uint8)
    return np.repeat(frame, 3, axis=2) if frame.shape[2] == 1 else frame[..., :3]


def _padded(frame: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    """A frame scaled into another size, with black bars where its shape differs."""
    from PIL import Image, ImageOps

    return np.asarray(ImageOps.pad(Image.fromarray(np.ascontiguousarray(frame)), (size[1], size[0])))


def _resized(frame: np.ndarray) -> np.ndarray:
    """A frame that is neither too large nor too small for the codec, by a whole factor."""
    longest, shortest = max(frame.shape[:2]), min(frame.shape[:2])
    if longest > LARGEST_SIDE and shortest >= (factor := -(-longest // LARGEST_SIDE)):
        height, width = (side // factor for side in frame.shape[:2])
        blocks = frame[: height * factor, : width * factor].reshape(height, factor, width, factor, 3)
        return blocks.mean((1, 3)).astype(np.uint8)
    if shortest < SMALLEST_SIDE:
        factor = -(-SMALLEST_SIDE // shortest)
        return frame.repeat(factor, 0).repeat(factor, 1)
    return frame
