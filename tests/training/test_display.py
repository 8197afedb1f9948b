from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from fever.config import RunConfig
from fever.training.display import LiveDisplay, Rate, algorithm_facts, closing_lines, progress_line

COMMON = {"seconds": 3.2, "steps": 24_000, "return_mean": 310.0}


@pytest.mark.parametrize(
    ("row", "facts"),
    [
        ({}, []),
        (
            {"step_fraction": 0.8, "kl": 0.00932, "steps_refused": 1.0},
            [("trust region", "KL 0.0093", "step 0.80, 1 refused so far")],
        ),
        (
            {"step_fraction": 0.0, "kl": 0.0, "steps_refused": 2.0},
            [("trust region", "KL 0.0000", "step refused, 2 refused so far")],
        ),
        (
            {"policy_lag": 2.13, "policy_lag_max": 4.0, "queue": 3.0, "fragments_dropped": 1600.0},
            [("weights", "2.1 batches old, 4 at most", "3 fragments wait, 1,600 dropped")],
        ),
    ],
)
def test_the_panel_has_what_matters_in_this_kind_of_learning(row: dict[str, Any], facts: list[Any]) -> None:
    assert algorithm_facts(COMMON | row) == facts


def test_a_line_of_the_log_says_when_a_step_was_refused_and_how_old_the_weights_are() -> None:
    assert "step refused" in progress_line(COMMON | {"step_fraction": 0.0}, 1.0)
    assert "refused" not in progress_line(COMMON | {"step_fraction": 0.5}, 1.0)
    assert "lag 2.1  " in progress_line(COMMON | {"policy_lag": 2.13}, 1.0)


def test_the_rate_of_a_first_iteration_is_its_own() -> None:
    rate = Rate()
    for seconds, steps in ((4.0, 1000), (5.0, 3000), (6.0, 6000)):
        rate.add(COMMON | {"seconds": seconds, "steps": steps, "steps_per_second": 250.0})
        assert rate.steps_per_second == {4.0: 250.0, 5.0: 2000.0, 6.0: 2500.0}[seconds]


@pytest.mark.parametrize(
    ("stop", "text"),
    [
        ({"seconds": 40}, "29% of 40s, 28.4s left"),
        ({"seconds": 40, "reward": 1e6}, "29% of 40s, at most 28.4s left"),
        ({"reward": 620}, "50% of return 620.0 "),
    ],
)
def test_the_panel_says_how_much_is_done_and_left(stop: dict[str, Any], text: str) -> None:
    console = Console(file=io.StringIO(), width=80, force_terminal=True, color_system=None)
    display = LiveDisplay(console)
    display.start(RunConfig(env="CartPole-v1", stop=stop), Path("runs/a"))
    display._draw(COMMON | {"seconds": 11.6, "iteration": 3, "episodes": 2})
    display.stop()
    assert text in console.file.getvalue()  # type: ignore[attr-defined]


def test_closing_lines_name_the_reason() -> None:
    summary = {
        "run": "runs/a", "algo": "ppo", "return_mean": 0.003, "steps": 2000, "episodes": 3, "seconds": 40.0,
        "steps_per_second": 50.0,
    }  # fmt: skip
    ended, stopped = (closing_lines(summary | {"stop_reason": reason}) for reason in ("time", "plateau"))
    numbers = "return 0.003 after 2,000 steps, 3 episodes, 40s (50 steps/s)"
    assert ended == [f"the time limit was reached: {numbers}", "run directory: runs/a", "next: fever eval runs/a"]
    assert stopped[0] == f"a callback stopped it (plateau): {numbers}"
