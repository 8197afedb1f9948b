from __future__ import annotations

from typing import Any

import pytest

from fever.training.display import Rate, algorithm_facts, progress_line

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
