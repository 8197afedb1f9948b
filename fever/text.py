"""Durations, sizes and numbers as people write and read them."""

from __future__ import annotations

import math
import re
import sys
from typing import IO, Any

STATUS = {  # stop reason -> its label in tables; other reasons are shown as they are
    "reward": "goal reached",
    "steps": "step limit",
    "iterations": "iter. limit",
    "time": "time limit",
    "trials": "trials done",
    "limit": "job limit",
}
INTEGERS = range(-(2**63), 2**64)  # that settings may have: those of 64 bits, with a sign or without
INFO_PREFIX = "info/"  # before the names of metrics that environments report
PHASES = {  # metric, a share of an iteration's time -> its name in displays and plots
    "time_env": "environment",
    "time_inference": "inference",
    "time_transfer": "transfer",
    "time_learn": "learning",
}


CONTROL = re.compile(
    r"\x1b\[[0-?]*[ -/]*[@-~]"  # colours, moving the cursor
    r"|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)?"  # titles, links
    r"|[\x00-\x08\x0b-\x1f\x7f-\x9f]"  # all other control characters but tab and newline
    r"|[\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]"  # what changes the direction of text, or begins a line
)


def clean(text: str) -> str:
    """Text from a file, an environment or another machine as it may be printed: without what a terminal would obey.

    Newlines and tabs stay. Halves of surrogate pairs, which cannot be printed, become question marks.
    """
    return CONTROL.sub("", text).encode(errors="replace").decode()


def say(text: str, stream: IO[str] | None = None, end: str = "\n") -> None:
    """Print to standard output or another stream, cleaned; used instead of `print` everywhere but in code that is sent
    to hosts (ruff checks it)."""
    print(clean(text), file=stream or sys.stdout, end=end, flush=True)


def one_line(text: str) -> str:
    """The same as one line."""
    return clean(" ".join(text.splitlines()))


def shorten(text: str, length: int = 100) -> str:
    """A text for a sentence: at most so many characters of it."""
    return text if len(text) <= length else f"{text[: length - 3]}..."


def brief(value: Any) -> str:
    """A value for a sentence, as Python writes it."""
    try:
        return shorten(repr(value))
    except (ValueError, RecursionError):  # Python does not write integers of thousands of digits
        return f"this {type(value).__name__}"


def parse_duration(text: str) -> float:
    """`"90"`, `"90s"`, `"10m"`, `"2h"`, `"1h30m"` to seconds."""
    match = re.fullmatch(r"(?:(\d+(?:\.\d+)?)h)?(?:(\d+(?:\.\d+)?)m)?(?:(\d+(?:\.\d+)?)s?)?", text.strip())
    if not text.strip() or match is None:
        raise ValueError(f"{brief(text)} is not a time; write 90s, 10m or 2h")
    hours, minutes, seconds = (float(part) if part else 0.0 for part in match.groups())
    return hours * 3600 + minutes * 60 + seconds


def parse_count(text: str) -> int:
    """`"20000"`, `"20k"`, `"1.5M"`, `"2e4"` to a whole number."""
    match = re.fullmatch(r"(\d[\d_]*(?:\.\d+)?(?:e\d+)?)([kKmM]?)", text.strip())
    value = float(match[1]) * {"": 1, "k": 1e3, "m": 1e6}[match[2].lower()] if match else 0.5
    if math.isinf(value) or value != int(value):
        raise ValueError(f"{brief(text)} is not a number of steps; write 20000, 20k or 1M")
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
    if abs(value) > sys.float_info.max:  # also a whole number that is too large for a float
        value = math.copysign(math.inf, value)
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
