"""Runs Ray's cluster launcher as a program, reports its progress, and ends it if it takes too long."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from fever import system

LOG_LINE = re.compile(r"\d{4}-\d\d-\d\d [\d:,]+\s+(\w+) \S+ -- (.*)")  # a line of the launcher's own log
STEPS = {  # a text in the launcher's log -> the progress that is reported
    "Launched instance": "the head's instance is launched",
    "Waiting for SSH": "waiting for the head's ssh",
    "Processing file mounts": "sending files to the head",
    "Running setup commands": "installing on the head",
    "Starting the Ray runtime": "starting Ray on the head",
}


def run_ray(
    words: list[str], log: Path, say: Callable[[str], None], start_seconds: float, seconds: float = float("inf")
) -> str | None:
    """Run Ray's launcher to its end; returns None if it succeeded, otherwise why it failed.

    `start_seconds`: how long it waits for an instance's ssh; `seconds`: after which it is ended. Its temporary files
    are in the log's folder, and are removed.
    """
    variables = {
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_UP_enable_autoscaler_v2": "1",  # the default; setting it avoids a notice
        "AUTOSCALER_NODE_START_WAIT_S": str(int(start_seconds)),
        "PYTHONUNBUFFERED": "1",
        "TMPDIR": str(log.parent),
    }
    command = [sys.executable, "-m", "ray.scripts.scripts", *words, "--log-style=record", "--log-color=false"]
    reported: set[str] = set()
    deadline = time.monotonic() + seconds
    with open(log, "w") as output:
        process = subprocess.Popen(
            command,
            env={**os.environ, **variables},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,  # Ctrl-C is for this process, which then ends it
        )
        try:
            while process.poll() is None and time.monotonic() < deadline:
                time.sleep(0.2)
                reported |= _report(log, reported, say)
        finally:
            system.end(process)
            for path in log.parent.glob("ray-*"):
                path.unlink(missing_ok=True)
    return None if process.returncode == 0 else failure_reason(log.read_text(errors="replace"))


def _report(log: Path, reported: set[str], say: Callable[[str], None]) -> set[str]:
    """Report the steps that the launcher has reached; returns those that were not reported before."""
    text = log.read_text(errors="replace")
    new = [sentence for mark, sentence in STEPS.items() if mark in text and sentence not in reported]
    for sentence in new:
        say(sentence)
    return set(new)


def failure_reason(text: str) -> str:
    """The lines of the launcher's log that say best why it failed."""
    lines = [re.sub(r"\x1b\[[0-9;]*m", "", line).strip() for line in text.splitlines()]
    before, failed, _ = "\n".join(lines).partition("New status: update-failed")
    telling: list[str] = []
    if failed:  # a command on the head: what it printed itself
        for line in reversed(before.splitlines()[:-1]):
            if LOG_LINE.match(line) and telling:
                break
            telling = telling if LOG_LINE.match(line) or not line else [line, *telling][:2]
    else:
        found = [match for match in map(LOG_LINE.match, lines) if match and match[1] not in ("INFO", "VINFO", "VVINFO")]
        telling = [match[2] for match in found if match[2].strip("!")][-3:]
    telling = telling or [line for line in lines if line][-2:]
    return "; ".join(dict.fromkeys(telling))[-600:] or "it printed nothing"
