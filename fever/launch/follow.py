"""Showing a job while it runs: its log, or on a terminal the same live display as for a run on this machine.

What is shown is read from the run directory. For a job on a cluster that is a local copy, updated at every look.
"""

from __future__ import annotations

import json
import math
import re
import sys
import time
from pathlib import Path
from typing import Any, TextIO

from fever import layout
from fever.errors import FeverError
from fever.job import CONTINUED, ENDED, QUEUED
from fever.launch.jobs import LOOK_SECONDS, Job
from fever.runs.rows import Follower
from fever.text import say
from fever.training.display import Display, LiveDisplay, make_display

REPEAT_SECONDS = 120.0  # until a queued job's reason is said again if only its details changed
RAYS_OWN = re.compile(r"Running entrypoint for job |\d{4}-\d\d-\d\d .*\sINFO job_manager\.py")  # lines in a job's log


class Screen:
    """Prints a job's log as it grows."""

    def __init__(self, job: Job, stream: TextIO, place: int = 0) -> None:
        self.job, self.stream, self.place = job, stream, place

    def say(self, text: str) -> None:
        say(text, self.stream)

    def show(self) -> None:
        """Print what is new."""
        lines, self.place = read_more(self.job.log, self.place)
        remote_path = self.job.facts.get("remote_path")
        for line in lines:
            if not RAYS_OWN.match(line):
                self.say(line.replace(remote_path, str(self.job.run)) if remote_path else line)

    def finish(self) -> None:
        self.show()


class LiveScreen(Screen):
    """Feeds a display with a job's metrics; the log is shown before training begins, and its end when it fails."""

    def __init__(self, job: Job, stream: TextIO, display: Display, place: int = 0) -> None:
        super().__init__(job, stream, place)
        self.display = display
        self.started = False
        self.metrics = Follower(job.run / layout.METRICS, "iteration")

    def say(self, text: str) -> None:
        self.display.message(text)

    def show(self) -> None:
        from fever.runs.run import Run

        run = Run(self.job.run)
        if not self.started and (run.path / layout.METRICS).is_file():
            self.started = True
            self.display.start(run.config, run.path)
        if not self.started:
            super().show()
            return
        for row in self.metrics.rows():
            self.display.update(row)

    def finish(self) -> None:
        self.show()
        if self.started:
            self.display.stop()
        summary = summary_of(self.job)
        if summary is not None and self.started and self.job.code in (0, CONTINUED, 130):
            self.display.finish(summary)
        else:
            self.started = False
            super().show()


def read_more(path: Path, place: int) -> tuple[list[str], int]:
    """The complete lines of a file from a byte offset on, and the offset behind them; from 0 if the file is shorter."""
    try:
        with open(path, "rb") as file:
            if file.seek(0, 2) < place:
                place = 0
            file.seek(place)
            text = file.read()
    except FileNotFoundError:
        return [], place
    end = text.rfind(b"\n") + 1
    return text[:end].decode(errors="replace").splitlines(), place + end


def summary_of(job: Job) -> dict[str, Any] | None:
    """The summary of a job's run, with its directory on this machine."""
    try:
        return {**json.loads((job.run / layout.SUMMARY).read_text()), "run": str(job.run)}
    except (OSError, ValueError):
        return None


def follow(job: Job, screen: Screen) -> int | None:
    """Show a job until it ends; returns its exit code, None if it has none."""
    target = job.target
    watch = target.watch(job) if target is not None else job.watch()
    said, said_at = "", -math.inf
    try:
        while True:
            state, reason = watch.look()
            again = (
                REPEAT_SECONDS if reason.partition(";")[0] == said.partition(";")[0] else 0.0
            )  # only details changed
            if state == QUEUED and reason != said and time.monotonic() - said_at >= again:
                screen.say(f"{job.name} is queued {job.waited(reason)}")
                said, said_at = reason, time.monotonic()
            if state == ENDED:
                screen.finish()
                return job.code
            screen.show()
            time.sleep(LOOK_SECONDS)
    finally:
        watch.close()


def refresh(job: Job) -> None:
    """Copy what is new of a job's run directory, if it is on a cluster that is still up."""
    if (target := job.target) is not None:
        target.fetch(job)


def show(job: Job, place: int = 0, quiet: bool = False, log: bool = False) -> int:
    """Show a job until it ends or Ctrl-C detaches; returns the exit code. `log`: its log, not the live display."""
    screen = make_screen(job, place, quiet or log)
    try:
        code = follow(job, screen)
    except KeyboardInterrupt:
        if isinstance(screen, LiveScreen):
            screen.display.stop()
        again = f"fever attach {job.name}, fever logs {job.name}, fever stop {job.name}, fever jobs"
        say(f"\ndetached; the job continues: {again}", sys.stderr)
        return 0
    except FeverError:
        if isinstance(screen, LiveScreen):
            screen.display.stop()
        raise
    if code is None:
        place_of_log = f"; its log: {job.log}" if job.log.exists() else ""
        say(f"fever: {job.name} {job.state()[1]}{place_of_log}", sys.stderr)
        return 1
    return code


def make_screen(job: Job, place: int, quiet: bool) -> Screen:
    """A live display on a terminal, the log elsewhere."""
    display = make_display("quiet" if quiet else "auto")
    if isinstance(display, LiveDisplay):
        return LiveScreen(job, sys.stdout, display, place)
    return Screen(job, sys.stdout, place)
