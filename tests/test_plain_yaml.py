"""YAML that a stranger may have written: JSON's types, a bounded size, one kind of error."""

from __future__ import annotations

import math
from typing import Any

import pytest
import yaml
from hypothesis import given, strategies

from fever import plain_yaml
from fever.plain_yaml import NotYaml, read


def doubled(levels: int, first: str, level: str) -> str:
    """Anchors of which each stands for the one before it ten times over."""
    lines = [f"m0: &m0 {first}"]
    for number in range(1, levels):
        lines.append(f"m{number}: &m{number} " + level.format(before=", ".join([f"*m{number - 1}"] * 10)))
    return "\n".join(lines)


BOMBS = [
    doubled(9, "[x]", "[{before}]"),
    doubled(30, "{x: 1}", "{{<<: [{before}]}}"),
    doubled(9, "!!pairs [x: y]", "!!pairs [x: [{before}]]"),
    "x: !!int 1" + ":1" * 100_000,
    "x: " + "9" * 5000,
    "[" * 100_000,
    "[" * 101 + "]" * 101,
    "{a: " * 101 + "}" * 101,
]


REFUSED = [
    "&a [*a]", "a: &a 1\nb: *a", "<<: {a: 1}", "!!bool maybe", '!!int ""', "!!float x", "!!timestamp x",
    "!!timestamp 2020-01-01", "!!set {a}", "!!omap [a: 1]", "!!pairs [a: 1]", "!!binary aGk=", '"\\UFFFFFFFF"',
    "!!python/name:os.system x", "!own x", "? [1]\n: 2", "18446744073709551616", "-9223372036854775809", "a: [",
    "%YAML 9.0\n---\na", "a\n---\nb", "!!int [1]", "!!str {}",
]  # fmt: skip


@pytest.mark.timeout(30)
@pytest.mark.parametrize("text", [*BOMBS, *REFUSED], ids=lambda text: text[:30])
def test_other_texts_are_one_error(text: str) -> None:
    with pytest.raises(NotYaml) as refused:
        read(text)
    assert 0 < len(str(refused.value)) < 300
    assert len(str(refused.value).splitlines()) == 1


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("", None),
        (
            "[yes, no, on, null, ~, 1_000, 0x10, -1, 1.5e+3, 1e-3]",
            [True, False, True, None, None, 1000, 16, -1, 1500, "1e-3"],
        ),
        (
            "a: 2024-01-31\nb: 2020-13-45\nc: 2001-01-01T00:00:00Z",
            {"a": "2024-01-31", "b": "2020-13-45", "c": "2001-01-01T00:00:00Z"},
        ),
        ("{a: =, 1: {b: [c]}}", {"a": "=", 1: {"b": ["c"]}}),
        ("[18446744073709551615, -9223372036854775808]", [2**64 - 1, -(2**63)]),
        ("[.inf, -.inf]", [math.inf, -math.inf]),
    ],
)
def test_values_are_what_json_holds(text: str, value: Any) -> None:
    assert read(text) == value


def test_values_within_values_are_read_up_to_a_depth() -> None:
    value = read("[" * 100 + "]" * 100)
    for _ in range(99):
        (value,) = value
    assert value == []


def test_what_pyyaml_writes_is_read() -> None:
    values = {"text": ["2024-01-31", "1e5", "yes", "=", "<<", "\0\u2028ä", ""], "numbers": [0, -1, 2**63, 1e300, 0.1]}
    assert read(yaml.safe_dump(values)) == values


def test_the_number_of_values_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plain_yaml, "SHORT", 0)
    monkeypatch.setattr(plain_yaml, "MOST_PARTS", 10)
    assert read("[1, 2, 3, 4, 5, 6, 7, 8, 9]") == [*range(1, 10)]
    with pytest.raises(NotYaml, match="more than 10 values"):
        read("[1, 2, 3, 4, 5, 6, 7, 8, 9, 10]")


JSON = strategies.recursive(
    strategies.none() | strategies.booleans() | strategies.integers() | strategies.floats() | strategies.text(),
    lambda parts: strategies.lists(parts) | strategies.dictionaries(strategies.text(), parts),
)


@given(JSON | strategies.text("[]{}:,-#'\"|> \n01.eE_a~=<?", max_size=40))
def test_short_texts_are_read_as_long_ones_are(value: Any) -> None:
    text = value if isinstance(value, str) else yaml.safe_dump(value)

    def outcome(length: int) -> Any:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(plain_yaml, "SHORT", length)
            try:
                return repr(read(text))
            except NotYaml as error:
                return str(error), error.line

    assert outcome(4096) == outcome(0)


def test_numbers_with_colons_are_text() -> None:
    texts = ["1:30:00", "20:00", "190:20:30.15", "00:20:00", "1-12"]
    assert read("[" + ", ".join(texts) + "]") == texts
    assert read("\n".join(f"- {text}" for text in texts) + "\n# %") == texts
    assert read("[1.5, 0x1F, 1_000, .inf, -3]") == [1.5, 31, 1000, math.inf, -3]
