"""Durations, sizes and numbers as people write and read them."""

from __future__ import annotations

import math
import re

PHASES = {  # share of an iteration's time, a metric -> its name in displays and plots
    "time_env": "environment",
    "time_inference": "inference",
    "time_transfer": "transfer",
    "time_learn": "learning",
}


def parse_duration(text: str) -> float:
    """`"90"`, `"90s"`, `"10m"`, `"2h"`, `"1h30m"` to seconds."""
    match = re.fullmatch(r"(?:(\d+(?:\.\d+)?)h)?(?:(\d+(?:\.\d+)?)m)?(?:(\d+(?:\.\d+)?)s?)?", text.strip())
    if not text.strip() or match is None:
        raise ValueError(f"{text!r} is not a time; write 90s, 10m or 2h")
    hours, minutes, seconds = (float(part) if part else 0.0 for part in match.groups())
    return hours * 3600 + minutes * 60 + seconds


def format_duration(seconds: float) -> str:
    """Seconds for people: `8.3s`, `4m 05s`, `2h 10m`."""
    if seconds < 60:
        return f"{seconds:.1f}s"
    minutes = math.floor(seconds / 60)
    if minutes < 60:
        return f"{minutes}m {int(seconds % 60):02d}s"
    return f"{minutes // 60}h {minutes % 60:02d}m"


def format_bytes(count: float) -> str:
    """Bytes for people: `820 kB`, `4.2 MB`, `7.9 GB`."""
    if count < 1e6:
        return f"{count / 1e3:.0f} kB"
    return f"{count / 1e6:.1f} MB" if count < 1e9 else f"{count / 1e9:.1f} GB"


def figure(value: float | None) -> str:
    return "-" if value is None else f"{value:,.1f}"


def sparkline(values: list[float], width: int = 24) -> str:
    """The course of a metric in one line of characters."""
    if len(values) < 2:
        return ""
    picks = [values[round(place * (len(values) - 1) / (width - 1))] for place in range(width)]
    low, high = min(picks), max(picks)
    return "".join("▁▂▃▄▅▆▇█"[int((value - low) / (high - low or 1) * 7)] for value in picks)
