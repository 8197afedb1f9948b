"""Time limits as each scheduler's users write them, besides fever's own 90s, 20m and 2h."""

from __future__ import annotations

import re
from typing import NamedTuple

from fever.text import brief, parse_duration

UNITS = {"s": 1, "m": 60, "h": 3600}
NUMBERS = re.compile(r"(?:(\d+)-)?(\d+(?:\.\d+)?(?::\d+(?:\.\d+)?)*)")  # days, then numbers with colons


class TimeFormat(NamedTuple):
    """How a scheduler reads numbers that are separated by colons."""

    units: tuple[str, ...]  # of a number alone, of two numbers, of three
    days: bool  # whether days and a dash may come first, then hours
    examples: str

    def seconds(self, text: str) -> float:
        """The seconds in what was written in a file or on the command line. Raises ValueError if it is no time."""
        text = text.strip()
        try:
            return parse_duration(text) if re.search("[smh]", text) else self._numbers(text)
        except ValueError:
            raise ValueError(f"{brief(text)} is not a time; write {self.examples}, or 90s, 20m, 2h") from None

    def _numbers(self, text: str) -> float:
        match = NUMBERS.fullmatch(text)
        if match is None or (match[1] and not self.days):
            raise ValueError
        days, numbers = float(match[1] or 0), match[2].split(":")
        if len(numbers) > len(self.units):
            raise ValueError
        units = "hms"[: len(numbers)] if match[1] else self.units[len(numbers) - 1]
        return days * 86400 + sum(float(number) * UNITS[unit] for number, unit in zip(numbers, units, strict=True))


SLURM = TimeFormat(("m", "ms", "hms"), True, "20 or 20:00 (minutes), 1:30:00, 1-12 or 1-12:00 (days, hours)")
PBS = TimeFormat(("s", "ms", "hms"), False, "1200 (seconds), 20:00 (minutes) or 1:30:00")
LSF = TimeFormat(("m", "hm"), False, "20 (minutes) or 1:30 (hours, minutes)")
