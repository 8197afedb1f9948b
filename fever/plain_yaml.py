"""YAML that holds what JSON can hold, and is no larger in memory than it looks: a file may come from anyone."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any, ClassVar

import yaml

from fever.text import INTEGERS, brief

MOST_PARTS = 200_000  # values and keys in a text; more would take many seconds to read
MOST_LEVELS = 100  # of values within values; pydantic writes no more than 255
SHORT = 4096  # characters of a text that the parser in C may read
UNUSUAL = frozenset("&*!%\\")  # characters of aliases, tags, directives and escapes
LONGEST_NUMBER = 100  # characters
PREFIX = "tag:yaml.org,2002:"  # of the names of types
NOT_READ = ("timestamp", "value")  # dates, and the name of a default, `=`: they are text
PLAIN = {  # numbers as they are meant: YAML 1.1 reads 1:30:00 as 5400, base 60, and 0022 as 18, base 8; here: text
    tag: re.compile(rf"(?!.*:)(?![-+]?0[0-7_]+$)(?:{pattern.pattern})", re.VERBOSE)
    for kinds in yaml.SafeLoader.yaml_implicit_resolvers.values()
    for tag, pattern in kinds
    if tag in (f"{PREFIX}int", f"{PREFIX}float")
}


class NotYaml(ValueError):
    """A text cannot be read. The message is one line; `line` counts from 1, and is None if it is not known."""

    def __init__(self, message: str, line: int | None = None) -> None:
        super().__init__(message)
        self.line = line


def read(text: str) -> Any:
    """The value of a YAML text: None, booleans, integers of 64 bits, floats, text, lists, and mappings whose keys are
    no lists or mappings. Dates are text. Raises `NotYaml` for whatever else it holds."""
    with suppress(Exception):  # what is wrong is found, and said, below
        if len(text) <= SHORT and not UNUSUAL & set(text) and levels(value := Short(text).get_single_data()):
            return value
    try:
        return Loader(text).get_single_data()
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        raise NotYaml([*str(error).splitlines(), "damaged"][0], mark.line + 1 if mark else None) from error
    except RecursionError as error:
        raise NotYaml("it is nested too deeply") from error
    except Exception as error:  # PyYAML's own mistakes: an IndexError for `!!int ""`, an OverflowError for "\UFFFFFFFF"
        raise NotYaml(f"it holds what cannot be read ({type(error).__name__})") from error


def levels(value: Any) -> int:
    """How deep values are nested in a value, 1 for a number; 0 for more than `MOST_LEVELS`."""
    parts, depth = [value], 0
    while parts:
        depth += 1
        parts = [one for part in parts if isinstance(part, dict | list) for one in _inside(part)]
    return depth if depth <= MOST_LEVELS else 0


def _inside(value: Any) -> Iterable[Any]:
    return value.values() if isinstance(value, dict) else value


class Loader(yaml.SafeLoader):
    """Knows JSON's types only, and neither aliases nor merge keys: a kilobyte of them can stand for gigabytes."""

    yaml_constructors: ClassVar[dict[Any, Callable[..., Any]]] = {}
    yaml_implicit_resolvers = {
        first: [(tag, PLAIN.get(tag, pattern)) for tag, pattern in kinds if tag.rpartition(":")[2] not in NOT_READ]
        for first, kinds in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }
    parts = levels = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        event = self.peek_event()
        if isinstance(event, yaml.AliasEvent):
            raise refusal("an alias, *name, is not read; write its value out", event)
        self.parts += 1
        if self.parts > MOST_PARTS:
            raise refusal(f"it holds more than {MOST_PARTS:,} values", event)
        if self.levels == MOST_LEVELS:
            raise refusal("it is nested too deeply", event)
        self.levels += 1
        node = super().compose_node(parent, index)
        self.levels -= 1
        return node

    def flatten_mapping(self, node: Any) -> None:
        """Leave merge keys as they are: no type is known for them."""


class Short(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    """Ten times as fast, for short texts without anything unusual: the parser in C crashes on 100,000 brackets."""

    yaml_constructors = Loader.yaml_constructors
    yaml_implicit_resolvers = Loader.yaml_implicit_resolvers
    flatten_mapping = Loader.flatten_mapping


def refusal(problem: str, where: Any) -> yaml.YAMLError:
    return yaml.constructor.ConstructorError(None, None, problem, where.start_mark)


def _number(loader: Loader, node: Any) -> Any:
    """A number or a boolean, where the text is one: `!!int x` is not."""
    kind = node.tag.rpartition(":")[2]
    text = loader.construct_scalar(node)
    try:
        value = None if len(text) > LONGEST_NUMBER else yaml.SafeLoader.yaml_constructors[node.tag](loader, node)
    except (LookupError, ValueError, OverflowError):
        value = None
    if value is None or (type(value) is int and value not in INTEGERS):
        raise refusal(f"{brief(text)} is not {'an integer of 64 bits' if kind == 'int' else f'a {kind}'}", node)
    return value


def _unknown(_: Loader, node: Any) -> Any:
    raise refusal(f"{brief(node.tag.replace(PREFIX, '!!'))} is not read", node)


TYPES: dict[str, Callable[..., Any]] = {
    "null": Loader.construct_yaml_null, "str": Loader.construct_yaml_str, "seq": Loader.construct_yaml_seq,
    "map": Loader.construct_yaml_map, "int": _number, "float": _number, "bool": _number,
}  # fmt: skip
Loader.yaml_constructors |= {f"{PREFIX}{name}": construct for name, construct in TYPES.items()}
Loader.yaml_constructors[None] = _unknown
