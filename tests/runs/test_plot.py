from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from fever.runs.plot import _draw_phases, _panels, smooth

COMMON = ("steps", "steps_per_second", "return_mean", "time_env", "time_learn", "entropy", "explained_variance")


def curves(*names: str) -> dict[str, np.ndarray]:
    return {name: np.full(3, 0.75) for name in names}


def test_panels_are_what_the_runs_have() -> None:
    alone = _panels([curves(*COMMON, "info/score", "info/success")])
    assert list(alone) == ["return", "steps_per_second", "entropy", "time", "info/score", "info/success"]
    assert alone["info/success"] == "success"
    compared = _panels([curves(*COMMON), curves("steps", *(f"info/{number}" for number in range(20)))])
    assert list(compared)[:5] == ["return", "steps_per_second", "entropy", "explained_variance", "info/0"]
    assert len(compared) == 12


def test_shares_of_the_same_time_are_not_stacked() -> None:
    class Axis:
        def __init__(self) -> None:
            self.called: list[str] = []

        def __getattr__(self, name: str) -> Any:
            return lambda *_, **__: self.called.append(name)

    both, turns = Axis(), Axis()
    _draw_phases(both, curves("steps", "time_env", "time_learn"))
    _draw_phases(turns, {name: values / 2 for name, values in curves("steps", "time_env", "time_learn").items()})
    assert both.called.count("plot") == 2
    assert "stackplot" in turns.called


def test_missing_values_are_left_out_of_a_smooth_curve() -> None:
    curve = smooth(np.array([np.nan, np.nan, np.nan, 4.0, 4.0, np.nan]), points=2)
    assert curve[1:].tolist() == pytest.approx([np.nan, 4, 4, 4, 4], nan_ok=True)
