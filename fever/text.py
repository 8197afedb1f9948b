"""Durations, sizes and numbers as people write and read them."""

from __future__ import annotations

import math
import re

STATUS = {  # stop reason -> its label in tables; other reasons are shown as they are
    "reward": "goal reached",
    "steps": "step limit",
    "iterations": "iter. limit",
    "time": "time limit",
    "trials": "trials done",
    "limit": "job limit",
}
INFO_PREFIX = "info/"  # before the names of metrics that environments report
PHASES = {  # metric, a share of an iteration's time -> its name in displays and plots
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


def parse_count(text: str) -> int:
    """`"20000"`, `"20k"`, `"1.5M"`, `"2e4"` to a whole number."""
    match = re.fullmatch(r"(\d[\d_]*(?:\.\d+)?(?:e\d+)?)([kKmM]?)", text.strip())
    value = float(match[1]) * {"": 1, "k": 1e3, "m": 1e6}[match[2].lower()] if match else 0.5
    if value != int(value):
        raise ValueError(f"{text!r} is not a number of steps; write 20000, 20k or 1M")
    return int(value)


def format_duration(seconds: float) -> str:
    """Seconds for people: `8.3s`, `40s`, `4m 05s`, `2h 10m`."""
    if seconds < 60:
        return f"{f'{seconds:.1f}'.removesuffix('.0')}s"
    minutes = math.floor(seconds / 60)
    if minutes < 60:
        return f"{minutes}m {int(seconds % 60):02d}s"
    return f"{minutes // 60}h {minutes % 60:02d}m"


def format_bytes(count: float) -> str:
    """Bytes for people: `820 kB`, `4.2 MB`, `7.9 GB`."""
    if count < 1e6:
        return f"{count / 1e3:.0f} kB"
    return f"{count / 1e6:.1f} MB" if count < 1e9 else f"{count / 1e9:.1f} GB"


def format_number(value: float | None) -> str:
    """A return or a score with as many digits as it needs: `1,234.5`, `21.4`, `0.95`, `0.003`; `-` for None."""
    if value is None:
        return "-"
    size = abs(value)
    if size >= 10 or size == 0 or not math.isfinite(value):
        return f"{value:,.{0 if size >= 1e5 else 1}f}"
    if size < 1e-4:
        return f"{value:.3g}"
    whole, _, decimals = f"{value:.{2 - math.floor(math.log10(size))}f}".partition(".")
    return f"{whole}.{decimals.rstrip('0') or '0'}"


def format_count(value: float) -> str:
    """A count in at most six characters: `950`, `24.6k`, `1.2M`."""
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= 0.99995 * limit:
            return f"{value / limit:.1f}{unit}"
    return f"{value:.0f}"


def sparkline(values: list[float], width: int = 24) -> str:
    """A curve as `width` characters; empty for fewer than two values."""
    if len(values) < 2:
        return ""
    picks = [values[round(place * (len(values) - 1) / (width - 1))] for place in range(width)]
    low, high = min(picks), max(picks)
    return "".join("▁▂▃▄▅▆▇█"[int((value - low) / (high - low or 1) * 7)] for value in picks)
