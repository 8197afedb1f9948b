"""How a job ended whose training has given no exit code: perhaps its script failed before fever started."""

from __future__ import annotations

import os
import re
from contextlib import suppress
from pathlib import Path

from fever.job import LOG, SCRIPT, STARTED, JobFolder
from fever.text import shorten

CLOCKS_SECONDS = 2.0  # by which clocks of machines may differ
TAIL_BYTES, TAIL_LINES = 4000, 8  # of a log, in which the cause is looked for
OF_LINE = re.compile(r"\S+: line (\d+): ")  # how bash's own messages begin
NO_CAUSE = ("#", "set ", "unset ", "export ", "exec ", "eval ")  # lines of a script that hardly fail, or name nothing


def how_it_ended(folder: JobFolder, said: str, submitted: float = 0.0) -> str:
    """A phrase with the likely cause; `said` is what the scheduler says of the job's end, or nothing. What is in the
    log from before this job was `submitted` (seconds since 1970) is an earlier one's."""
    words, last = f"; {said}" if said else "", tail(folder.path / LOG, submitted)
    scripted = (folder.path / SCRIPT).is_file()
    if folder.read(STARTED) is not None or (last and not scripted):
        return f"was killed{words}"
    if last:
        line = likely_cause(folder, last)
        cause = f"; likely cause, in its script: {line}" if line else ""
        return f"failed before fever started{words}; it said last: {shorten(last[-1].strip(), 200)}{cause}"
    if said and "CANCELLED" not in said:
        shared = f"is {folder.path} on a file system that its machines share?"
        return f"failed before fever started, and could not write its log{words}; {shared}"
    return "was cancelled before it began"


def tail(path: Path, since: float = 0.0) -> list[str]:
    """The last lines of a log that are not empty; none if nothing was written to it since then."""
    with suppress(OSError), open(path, "rb") as file:
        if os.fstat(file.fileno()).st_mtime < since - CLOCKS_SECONDS:
            return []
        file.seek(max(0, file.seek(0, 2) - TAIL_BYTES))
        return [line for line in file.read().decode(errors="replace").splitlines() if line.strip()][-TAIL_LINES:]
    return []


def likely_cause(folder: JobFolder, last: list[str]) -> str:
    """The line of a job's script that its last output is about, as bash gives its number or as it names the same."""
    script = (folder.read_text(SCRIPT) or "").splitlines()
    for text in reversed(last):
        found = OF_LINE.match(text)
        if found and 0 < int(found[1]) <= len(script) and _shares_a_word(line := script[int(found[1]) - 1], text):
            return line
    named = [line for line in script if line.split() and not line.startswith(NO_CAUSE)]
    about = [line for line in named if any(line.split()[-1].strip("'\"") in text for text in last)]
    return about[-1] if about else ""


def _shares_a_word(line: str, text: str) -> bool:
    """Whether a line of a script is what a message is about: a scheduler may have added lines before it."""
    return any(word.strip("'\"") in text for word in line.split() if len(word) > 2)
