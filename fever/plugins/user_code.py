"""Runs code of the user's before training begins: whatever it raises becomes one sentence with its place."""

from __future__ import annotations

import os
import re
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fever.errors import FeverError, TrainingError

LONGEST_MESSAGE = 300  # characters of an exception's message in a sentence
HINTS = {  # in the sentence of an exception -> what to do
    r"unexpected keyword argument '(seed|options)'": "; write it as: def reset(self, *, seed=None, options=None)",
    r"OpenGL|\bgl[A-Z]\w+|EGL|GLFW|MUJOCO_GL": (
        "; without a display, set MUJOCO_GL=egl or MUJOCO_GL=osmesa and install its library, or use xvfb-run"
    ),
}
PACKAGE = str(Path(__file__).parents[1])
INSTALLED = ("site-packages", "dist-packages", "<frozen", "<string>", sys.base_prefix + os.sep + "lib")


@contextmanager
def user_code(what: str) -> Iterator[None]:
    """Raise FeverError, "`what`: ValueError: no licence (simulator.py:12)", for any exception of the code inside, those
    that end a process included. Ctrl-C passes, and so do fever's own exceptions."""
    try:
        yield
    except (FeverError, TrainingError, KeyboardInterrupt):
        raise
    except BaseException as error:
        raise FeverError(f"{what}: {sentence_of(error)}") from error


def as_exception(error: BaseException) -> Exception:
    """An exception itself; for one that is no `Exception`, such as that of sys.exit(), a TrainingError."""
    if isinstance(error, Exception):
        return error
    failure = TrainingError(sentence_of(error))
    failure.__cause__ = error
    return failure


def sentence_of(error: BaseException) -> str:
    """An exception's type, message and place."""
    if isinstance(error, FeverError):
        return str(error)
    text = message_of(error)
    found = f"{type(error).__name__}{': ' if text else ''}{text}{place_of(error)}"
    return found + "".join(hint for pattern, hint in HINTS.items() if re.search(pattern, found))


def message_of(error: BaseException) -> str:
    """An exception's message in one line, shortened; its `__str__` may itself be wrong."""
    try:
        text = " ".join(str(error).split())
    except BaseException as other:  # noqa: BLE001 - a user's __str__ may raise anything
        return f"(its message cannot be read: {type(other).__name__})"
    return text if len(text) <= LONGEST_MESSAGE else f"{text[:LONGEST_MESSAGE]} ..."


def place_of(error: BaseException) -> str:
    """Where an exception was raised, as ` (file.py:12)`: the innermost line that is not of an installed package. Empty
    if there is none."""
    if isinstance(error, SyntaxError) and error.filename is not None:
        return f" ({_shortest(error.filename)}:{error.lineno})"
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not frame.filename.startswith(PACKAGE)]
    theirs = [frame for frame in own if not any(part in frame.filename for part in INSTALLED)]
    place = (theirs or own)[-1] if own else None
    return f" ({_shortest(place.filename)}:{place.lineno})" if place is not None else ""


def _shortest(file: str) -> str:
    """A path below the working folder as a relative one."""
    path, here = Path(file), Path.cwd()
    return str(path.relative_to(here)) if path.is_relative_to(here) else file
