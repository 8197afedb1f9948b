from __future__ import annotations

import pytest

from fever.text import format_count, format_duration, format_number


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "-"), (0.0, "0.0"), (0.003, "0.003"), (0.95, "0.95"), (-0.5, "-0.5"), (1.234, "1.23"), (9.996, "10.0"),
        (475.0, "475.0"), (1234.5, "1,234.5"), (-1e6, "-1,000,000"), (2e-7, "2e-07"), (float("nan"), "nan"),
    ],
)  # fmt: skip
def test_numbers_have_as_many_digits_as_they_need(value: float | None, text: str) -> None:
    assert format_number(value) == text


def test_counts_and_durations_are_short() -> None:
    assert [format_count(value) for value in (950, 24_576, 999_999, 1.2e6)] == ["950", "24.6k", "1.0M", "1.2M"]
    assert [format_duration(value) for value in (8.31, 40.0, 245, 7800)] == ["8.3s", "40s", "4m 05s", "2h 10m"]
