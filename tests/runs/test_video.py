"""Video files, read back by ffmpeg and by Pillow: frames, sizes, rates; and that nothing is left of a broken one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fever.errors import FeverError
from fever.runs import video
from fever.runs.video import VideoFile, as_rgb


def shades(count: int, height: int, width: int) -> list[np.ndarray]:
    """Frames of one colour each: red grows, blue falls."""
    frames = [np.zeros((height, width, 3), np.uint8) for _ in range(count)]
    for number, frame in enumerate(frames):
        frame[..., 0], frame[..., 2] = 20 * number, 200 - 20 * number
    return frames


def write(path: Path, frames: Iterable[np.ndarray], rate: float = 10) -> None:
    with VideoFile(path) as file:
        file.rate = rate
        for frame in frames:
            file.add(frame)


def read(path: Path) -> tuple[np.ndarray, float]:
    """The frames `[count, height, width, 3]` of an mp4, and how many there are in a second."""
    import imageio_ffmpeg

    reader = imageio_ffmpeg.read_frames(str(path))
    facts = next(reader)
    width, height = facts["size"]
    frames = [np.frombuffer(frame, np.uint8).reshape(height, width, 3) for frame in reader]
    return np.array(frames), facts["fps"]


@pytest.mark.parametrize(
    ("height", "width", "shown"),
    [
        (40, 60, (40, 60)),
        (41, 63, (42, 64)),  # the codec wants even sides
        (3, 5, (18, 30)),  # and not too short ones
        (1, 1, (16, 16)),
        (2100, 30, (1050, 16)),  # 15 wide
        (20, 4500, (6, 1500)),
    ],
)
def test_frames_of_any_size_are_read_back(height: int, width: int, shown: tuple[int, int], tmp_path: Path) -> None:
    frames = shades(4, height, width)
    write(tmp_path / "a.mp4", frames)
    found, rate = read(tmp_path / "a.mp4")
    assert (found.shape, rate) == ((4, *shown, 3), 10)
    for number in range(4):
        np.testing.assert_allclose(found[number].mean((0, 1)), frames[number][0, 0], atol=6)
    assert [path.name for path in tmp_path.iterdir()] == ["a.mp4"]


def test_rates_are_those_that_were_asked_for(tmp_path: Path) -> None:
    for rate in (0.5, 29.97, 60):
        write(tmp_path / "a.mp4", shades(6, 20, 20), rate)
        found, there = read(tmp_path / "a.mp4")
        assert (len(found), there) == (6, pytest.approx(rate, rel=1e-3))


@pytest.mark.parametrize(("rate", "milliseconds"), [(10, 100), (60, 20)])  # browsers slow faster gifs down
def test_a_gif_has_all_frames(rate: float, milliseconds: int, tmp_path: Path) -> None:
    from PIL import Image

    frames = shades(5, 31, 41)
    write(tmp_path / "a.gif", frames, rate)
    with Image.open(tmp_path / "a.gif") as image:
        assert (image.n_frames, image.size, image.info["duration"]) == (5, (41, 31), milliseconds)  # type: ignore[attr-defined]
        for number in range(5):
            image.seek(number)
            np.testing.assert_allclose(np.asarray(image.convert("RGB")), frames[number], atol=8)


def test_frames_of_another_size_fit_into_the_first_one(tmp_path: Path) -> None:
    small, wide = np.full((20, 20, 3), 200, np.uint8), np.full((20, 40, 3), 200, np.uint8)
    write(tmp_path / "a.mp4", [small, wide])
    found, _ = read(tmp_path / "a.mp4")
    assert found.shape == (2, 20, 20, 3)
    assert found[1][8:12].mean() == pytest.approx(200, abs=8)
    assert found[1][:3].mean() < 20  # a bar


@pytest.mark.parametrize("name", ["a.mp4", "a.gif"])
def test_nothing_is_left_of_a_video_that_was_interrupted(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    write(path, shades(2, 20, 20))
    before = path.read_bytes()

    def frames() -> Iterator[np.ndarray]:
        yield shades(1, 20, 20)[0]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write(path, frames())
    assert path.read_bytes() == before
    assert [*tmp_path.iterdir()] == [path]
    with pytest.raises(KeyboardInterrupt):
        write(tmp_path / "folder" / name, frames())
    assert [*tmp_path.iterdir()] == [path]  # the folder was made for it


def test_a_video_without_room_is_one_sentence_and_nothing_is_left(tmp_path: Path, monkeypatch: Any) -> None:
    program = tmp_path / "ffmpeg"
    program.write_text("#!/bin/sh\nhead -c 1000 > /dev/null\necho 'x: No space left on device' >&2\nexit 1\n")
    program.chmod(0o755)
    monkeypatch.setenv("IMAGEIO_FFMPEG_EXE", str(program))
    for count in (1, 2000):  # noticed at the end, and while frames are sent
        with pytest.raises(FeverError, match="cannot be written: ffmpeg: x: No space left on device"):
            write(tmp_path / "a.mp4", shades(1, 40, 40) * count)
    assert [path.name for path in tmp_path.iterdir()] == ["ffmpeg"]


def test_a_gif_that_does_not_fit_into_memory_is_refused(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(video, "GIF_BYTES", 3 * 400)
    write(tmp_path / "a.gif", shades(3, 20, 20))
    with pytest.raises(FeverError, match=r"more than 3 frames of this size .* choose a \.mp4"):
        write(tmp_path / "b.gif", shades(4, 20, 20))
    assert [path.name for path in tmp_path.iterdir()] == ["a.gif"]


def test_a_place_that_is_a_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.gif").mkdir()
    with pytest.raises(FeverError, match="it is a folder"):
        write(tmp_path / "a.gif", shades(1, 20, 20))


def test_frames_become_bytes_of_three_channels() -> None:
    assert as_rgb(np.full((2, 3), 7, np.uint8)).tolist() == np.full((2, 3, 3), 7).tolist()
    assert as_rgb(np.full((2, 3, 4), 7, np.int64)).shape == (2, 3, 3)
    assert as_rgb(np.full((2, 3, 1), 0.5, np.float32)).tolist() == np.full((2, 3, 3), 127).tolist()
    assert as_rgb(np.full((1, 1, 3), 300.0)).tolist() == [[[255] * 3]]
    assert as_rgb(np.full((1, 1), np.nan)).tolist() == [[[0] * 3]]
    assert as_rgb(np.ones((1, 1), bool)).tolist() == [[[255] * 3]]


@pytest.mark.parametrize(
    ("frame", "reason"),
    [
        (None, "returned nothing"),
        ("+--+", "returned a str"),
        (np.zeros(12), r"shape \(12,\), which is no picture"),
        (np.zeros((0, 4, 3)), "which is no picture"),
        (np.zeros((4, 4, 2)), "which is no picture"),
        (np.full((4, 4), "a"), "an array of <U1"),
    ],
)
def test_what_is_no_picture_is_refused(frame: Any, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        as_rgb(frame)
