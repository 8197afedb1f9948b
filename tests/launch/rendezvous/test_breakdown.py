"""Parts of a job's time follow one another: they add up to the whole."""

from __future__ import annotations

import pytest

from fever.launch.rendezvous.breakdown import Moments, breakdown

BEFORE = {"queue": 7.0, "start": 2.0}
DRIVER = {"setup": 6.0, "first_batch": 1.0, "iterations": 20.0, "stop": 1.0, "other": 0.5}


@pytest.mark.parametrize(
    ("joined", "connect", "python", "setup"),
    [
        (None, 4.0, 3.5, 6.0),
        (13.0, 4.0, 3.5, 6.0),  # before the driver was started
        (16.0, 6.0, 1.5, 6.0),  # while Python started
        (20.0, 10.0, 0.0, 3.5),  # while the training was set up, which waits for it
        (40.0, 13.5, 0.0, 0.0),  # of no interest to it: no worker was there
    ],
)
def test_parts_add_up_and_hosts_that_join_late_count_once(
    joined: float | None, connect: float, python: float, setup: float
) -> None:
    moments = Moments(began=10.0, driver=14.0, joined=joined, ended=46.0, now=49.0)
    spent = breakdown(BEFORE, moments, DRIVER)
    assert sum(spent.values()) == pytest.approx(9.0 + 39.0)
    assert (spent["connect"], spent["python"], spent["setup"], spent["leave"]) == (connect, python, setup, 3.0)
    assert list(spent)[:4] == ["queue", "start", "connect", "python"]


def test_a_driver_that_says_nothing() -> None:
    spent = breakdown({}, Moments(0.0, 4.0, None, 9.0, 10.0), {})
    assert spent == {"connect": 4.0, "python": 5.0, "leave": 1.0}
