"""The picture of a report."""

from __future__ import annotations

from pathlib import Path

import matplotlib.image
import pytest

from fever.scaling.figures import collect
from fever.scaling.measure import Measurement
from fever.scaling.model import Setting
from fever.scaling.picture import draw
from tests.scaling.synthetic import figures, plan, waits_for_learner


@pytest.mark.parametrize("overlaps", [False, True])
def test_the_picture_has_axes_units_and_a_legend(tmp_path: Path, overlaps: bool) -> None:
    law = {count: waits_for_learner(count) for count in (0, 1, 2, 4)}
    draw(figures(law, setting=Setting(overlaps, 2, 0.0)), [8, 16], tmp_path / "speedup")
    text = (tmp_path / "speedup.svg").read_text()
    for words in (
        "linear",
        "measured, 95 % interval",
        "predicted",
        "share of the time (%)",
        "number of workers (0: one process)",
    ):
        assert f">{words}</text>" in text
    assert matplotlib.image.imread(tmp_path / "speedup.png").shape[1] > 1000


def test_one_count_and_no_times_are_drawn_too(tmp_path: Path) -> None:
    found = collect(plan(1, 2), Setting(True), [Measurement(2, 1, "run", workers=2, samples_per_second=100.0)])
    draw(found, [], tmp_path / "speedup")
    assert (tmp_path / "speedup.png").is_file()
