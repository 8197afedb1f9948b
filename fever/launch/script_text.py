"""What may be written into a shell script or into a scheduler's directive: every setting of a target passes here.

A directive is a comment for the shell and ends with its line, so a line break would begin a command. Shell commands
are made of quoted words; lines that a user writes as shell on purpose are the setting `shell` alone.
"""

from __future__ import annotations

import re
import shlex
import unicodedata
from typing import Annotated, Any, ClassVar

from pydantic import AfterValidator, ValidationInfo, field_validator

from fever.config import Settings, texts_in
from fever.errors import FeverError

BREAKS = ("Cc", "Zl", "Zp", "Cs")  # Unicode's categories of control characters, line ends, and what has no encoding
WORD = re.compile(r"[\w.,:/@+=%~^][\w.,:/@+=%~^-]*", re.ASCII)
PLACE = re.compile(r"(?<!\$)\{(\w+)\}", re.ASCII)  # to be filled in; ${NAME} is a variable
VARIABLE = re.compile(r"\$(?:\w+|\{\w+\})", re.ASCII)


def is_one_line(text: str) -> bool:
    """Whether a text stays on one line wherever it is written, and has no other control characters."""
    return not any(unicodedata.category(letter) in BREAKS for letter in text)


def require_one_line(**texts: object) -> None:
    """Raise FeverError if one of these, `what=text`, cannot be written into a script."""
    for what, text in texts.items():
        if not is_one_line(str(text)):
            raise FeverError(f"{what} {str(text)!r} has a line break or a control character, and goes into a script")


def quote_words(command: str) -> str:
    """A command of words, as a shell would split it, with every word quoted; variables such as $PBS_NODEFILE remain.

    Raises ValueError for a quotation that does not end.
    """
    return " ".join(quote_word(word) for word in shlex.split(command))


def quote_word(word: str) -> str:
    """A word quoted for the shell, except for its variables."""
    if not VARIABLE.search(word):
        return shlex.quote(word)
    parts = re.split(f"({VARIABLE.pattern})", word, flags=re.ASCII)
    return "".join(f'"{part}"' if number % 2 else part and shlex.quote(part) for number, part in enumerate(parts))


def _check_places(value: str) -> str:
    if unknown := [name for name in PLACE.findall(value) if name != "nodes"]:
        raise ValueError(f"{{{unknown[0]}}} is not known; {{nodes}} stands for the number of machines")
    return value


def _check_command(value: str) -> str:
    if not quote_words(value):  # raises ValueError
        raise ValueError("must not be empty")
    return _check_places(value)


def _check_word(value: str) -> str:
    if not WORD.fullmatch(value):
        raise ValueError(
            "must be one word of letters, digits and . , : / @ + = % ~ ^ - that does not begin with a dash"
        )
    return value


def _check_argument(value: str) -> str:
    if not value.strip():
        raise ValueError("must not be empty")
    if value.startswith("-"):
        raise ValueError("must not begin with a dash: it would be taken for an option")
    return value


def _check_option(value: str) -> str:
    if not value.startswith("-"):
        raise ValueError("must begin with a dash: it is an option of a command")
    quote_words(value)  # raises ValueError
    return value


Word = Annotated[str, AfterValidator(_check_word)]  # of a directive, where nothing is quoted
Argument = Annotated[str, AfterValidator(_check_argument)]  # of a command, quoted
Template = Annotated[str, AfterValidator(_check_places)]  # of a directive, in which {nodes} is replaced
Command = Annotated[str, AfterValidator(_check_command)]  # of words that are quoted, in which {nodes} is replaced
Option = Annotated[str, AfterValidator(_check_option)]  # of a command, perhaps with its value as a second word


class ScriptSettings(Settings):
    """Settings that reach scripts: each of their texts is one line, except for those of `free_text`."""

    free_text: ClassVar[frozenset[str]] = frozenset()

    @field_validator("*", mode="before")
    @classmethod
    def _one_line(cls, value: Any, info: ValidationInfo) -> Any:
        for text in texts_in(value, keys=True):
            if "\0" in text or not (info.field_name in cls.free_text or is_one_line(text)):
                raise ValueError("must be one line without control characters: it is written into a script")
        return value
