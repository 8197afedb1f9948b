"""Where the time of a job went: parts that follow one another, and together are its time from submission on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


class Moments(NamedTuple):
    """What rank 0 has seen, by its own clock, in seconds."""

    began: float  # rank 0
    driver: float  # the driver was started
    joined: float | None  # the last host joined Ray; None if rank 0 has not seen that
    ended: float  # the driver
    now: float


def breakdown(before: Mapping[str, float], moments: Moments, driver: Mapping[str, float]) -> dict[str, float]:
    """Part -> seconds. `before` is what went before rank 0 began, `driver` the parts that the training counts itself;
    empty if it did not get so far.

    Hosts join while the driver's Python starts and its training is set up, which waits for the last of them. That time
    counts as `connect` and not as what the driver was meanwhile doing.
    """
    own = dict(driver)
    whole = moments.ended - moments.driver
    own = {"python": max(0.0, whole - sum(own.values())), **own}  # before the training, and after it
    waited = min(max(0.0, (moments.joined or 0.0) - moments.driver), own["python"] + own.get("setup", 0.0))
    for name in ("python", "setup"):
        taken = min(waited, own.get(name, 0.0))
        if taken:
            own[name] -= taken
            waited -= taken
    hidden = whole - sum(own.values())  # what was taken away
    connect = moments.driver - moments.began + max(0.0, hidden)
    return {**before, "connect": connect, **own, "leave": moments.now - moments.ended}
