from __future__ import annotations

import pytest

from fever.training.result import Result


def test_tensorboard_reads_the_events(result: Result) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(result.run.path))
    events.Reload()
    rows = result.run.metrics()
    scalars = events.Scalars("return_mean")
    assert [point.step for point in scalars] == [row["steps"] for row in rows]
    assert scalars[-1].value == pytest.approx(rows[-1]["return_mean"])
    assert set(events.Tags()["scalars"]) == {*rows[-1]} - {"steps"}
