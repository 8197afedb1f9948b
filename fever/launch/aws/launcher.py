"""Ray's cluster launcher as a program that is run, watched and, if need be, ended."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from fever import system

RECORD = re.compile(r"\d{4}-\d\d-\d\d [\d:,]+\s+(\w+) \S+ -- (.*)")  # a line that the launcher itself has written
STEPS = {  # in what Ray's launcher prints -> what is said of it
    "Launched instance": "the head's instance is launched",
    "Waiting for SSH": "waiting for the head's ssh",
    "Processing file mounts": "sending files to the head",
    "Running setup commands": "installing on the head",
    "Starting the Ray runtime": "starting Ray on the head",
}


def run_ray(
    words: list[str], log: Path, say: Callable[[str], None], start_seconds: float, seconds: float = float("inf")
) -> str | None:
    """Run Ray's launcher to its end; returns None if it succeeded, otherwise its last words.

    `start_seconds`: how long it waits for an instance's ssh; `seconds`: after which it is ended. What it forgets in
    temporary folders is in the log's folder and removed.
    """
    variables = {
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_UP_enable_autoscaler_v2": "1",  # its default, said to spare the notice
        "AUTOSCALER_NODE_START_WAIT_S": str(int(start_seconds)),
        "PYTHONUNBUFFERED": "1",
        "TMPDIR": str(log.parent),
    }
    command = [sys.executable, "-m", "ray.scripts.scripts", *words, "--log-style=record", "--log-color=false"]
    said: set[str] = set()
    deadline = time.monotonic() + seconds
    with open(log, "w") as output:
        process = subprocess.Popen(
            command,
            env={**os.environ, **variables},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,  # Ctrl-C is for us, who then end it
        )
        try:
            while process.poll() is None and time.monotonic() < deadline:
                time.sleep(0.2)
                said |= _tell(log, said, say)
        finally:
            system.end(process)
            for path in log.parent.glob("ray-*"):
                path.unlink(missing_ok=True)
    return None if process.returncode == 0 else last_words(log.read_text(errors="replace"))


def _tell(log: Path, said: set[str], say: Callable[[str], None]) -> set[str]:
    """Say how far the launcher is; returns what was not said before."""
    text = log.read_text(errors="replace")
    new = [sentence for mark, sentence in STEPS.items() if mark in text and sentence not in said]
    for sentence in new:
        say(sentence)
    return set(new)


def last_words(text: str) -> str:
    """What tells best in the launcher's log why it failed."""
    lines = [re.sub(r"\x1b\[[0-9;]*m", "", line).strip() for line in text.splitlines()]
    before, failed, _ = "\n".join(lines).partition("New status: update-failed")
    telling: list[str] = []
    if failed:  # a command on the head: what it printed itself
        for line in reversed(before.splitlines()[:-1]):
            if RECORD.match(line) and telling:
                break
            telling = telling if RECORD.match(line) or not line else [line, *telling][:2]
    else:
        records = [match for match in map(RECORD.match, lines) if match and match[1] not in ("INFO", "VINFO", "VVINFO")]
        telling = [match[2] for match in records if match[2].strip("!")][-3:]
    telling = telling or [line for line in lines if line][-2:]
    return "; ".join(dict.fromkeys(telling))[-600:] or "it said nothing"
