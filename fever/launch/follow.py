"""Showing a job while it runs, wherever that is: its log, or on a terminal the same live panel as at home.

What is shown is read from the run directory here. For a job on a cluster that is a copy, which is brought up to date
before every look.
"""

from __future__ import annotations

import json
import re
import sys
import time
from pathlib import Path
from typing import Any, TextIO

from fever import layout
from fever.errors import FeverError
from fever.launch.clusters.link import UNKNOWN, Down, Link, connect
from fever.launch.clusters.ray_jobs import ApiError
from fever.launch.clusters.ssh import Unreachable
from fever.launch.jobs import ASK_SECONDS, ENDED, LOOK_SECONDS, QUEUED, RUNNING, Job, resume_words
from fever.launch.targets import Machines, restore_target
from fever.training.display import Display, LiveDisplay, make_display

BRISK_SECONDS = 20.0  # after its beginning, in which a scheduler is asked every second
BROKEN_SECONDS = 300.0  # for a broken connection, or a dead Ray, to come back
RAYS_OWN = re.compile(r"Running entrypoint for job |\d{4}-\d\d-\d\d .*\sINFO job_manager\.py")  # lines in a job's log


class News:
    """How a job stands whose files are here: its scheduler is asked now and then."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.state, self.word = QUEUED, ""
        self.code: int | None = None  # of an attempt that has ended; its job may be in the queue again
        self.began, self.asked = time.monotonic(), -ASK_SECONDS

    def look(self) -> tuple[str, str]:
        """QUEUED, RUNNING or ENDED, and a word about it."""
        code, now = self.job.code, time.monotonic()
        pause = 1.0 if self.state == QUEUED and now - self.began < BRISK_SECONDS else ASK_SECONDS
        ending = code is not None and self.state == RUNNING
        if ending or code != self.code or now - self.asked >= pause:
            self.state, self.word = self.job.state()
            self.code, self.asked = code, time.monotonic()
        return self.state, self.word

    def close(self) -> None: ...


class RemoteNews(News):
    """How a job on a cluster stands; its files are brought home at every look, over a connection that may break."""

    connection: Link | None = None
    silent: float | None = None  # since when Ray has not answered, though its machine does

    def look(self) -> tuple[str, str]:
        if not self.job.home:
            self._refresh()
        if self.job.code is not None:
            return ENDED, f"exit code {self.job.code}"
        return self.state, self.word

    def _refresh(self) -> None:
        deadline, told = time.monotonic() + BROKEN_SECONDS, False
        while True:
            try:
                self.look_once()
                return
            except (Unreachable, ApiError) as error:
                self.close()
                if time.monotonic() > deadline:
                    raise
                if not told:
                    print(f"fever: the connection broke ({error}); the run goes on, trying again", file=sys.stderr)
                    told = True
                time.sleep(2)

    def look_once(self) -> None:
        """Ask once, and bring home what is new; a cluster that is down has nothing more to tell."""
        try:
            self.connection = self.connection or connect(self.job)
            status = self.connection.look(self.job)
        except Down:
            if self.job.code is None:
                self.state, self.word = ENDED, "its cluster is down"
            return
        self.state, self.word = (QUEUED, "starting") if status == "PENDING" else (RUNNING, "")
        if status != UNKNOWN:
            self.silent = None
        elif self.silent is None:
            self.silent = time.monotonic()
            print("fever: Ray does not answer there; trying again", file=sys.stderr)
        elif time.monotonic() - self.silent > BROKEN_SECONDS:
            what = f"{self.job.name} seems to have died with its Ray; what it saved is in {self.job.run}"
            raise FeverError(f"{what}, go on with: {resume_words(self.job.run)}")

    def close(self) -> None:
        if self.connection is not None:
            self.connection.close()
            self.connection = None


class Screen:
    """Prints a job's log as it grows."""

    def __init__(self, job: Job, stream: TextIO, place: int = 0) -> None:
        self.job, self.stream, self.place = job, stream, place

    def say(self, text: str) -> None:
        print(text, file=self.stream, flush=True)

    def show(self) -> None:
        """What is new."""
        lines, self.place = read_more(self.job.log, self.place)
        there = self.job.facts.get("there")
        for line in lines:
            if not RAYS_OWN.match(line):
                self.say(line.replace(there, str(self.job.run)) if there else line)

    def finish(self) -> None:
        self.show()


class LiveScreen(Screen):
    """Feeds a display with a job's metrics; the log is shown before training begins, and its end when it fails."""

    def __init__(self, job: Job, stream: TextIO, display: Display, place: int = 0) -> None:
        super().__init__(job, stream, place)
        self.display = display
        self.started = False
        self.rows = 0  # place in the file of metrics

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
        lines, self.rows = read_more(run.path / layout.METRICS, self.rows)
        for line in lines:
            self.display.update(json.loads(line))

    def finish(self) -> None:
        self.show()
        if self.started:
            self.display.stop()
        summary = summary_of(self.job)
        if summary is not None and self.started and self.job.code in (0, 75, 130):
            self.display.finish(summary)
        else:
            self.started = False
            super().show()


def read_more(path: Path, place: int) -> tuple[list[str], int]:
    """The whole lines of a file from a place on, and where the next ones begin; from the start if it is shorter."""
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
    """How a job's run ended, with the directory that it has here."""
    try:
        return {**json.loads((job.run / layout.SUMMARY).read_text()), "run": str(job.run)}
    except (OSError, ValueError):
        return None


def on_cluster(job: Job) -> bool:
    """Whether a job is on a cluster of the user's own, so that its files have to be brought home."""
    target = job.facts.get("target")
    return target is not None and isinstance(restore_target(target), Machines)


def follow(job: Job, screen: Screen) -> int | None:
    """Show a job until it ends; returns its exit code, None if it has none."""
    news = RemoteNews(job) if on_cluster(job) else News(job)
    said = ""
    try:
        while True:
            state, word = news.look()
            if state == QUEUED and word != said:
                screen.say(f"{job.name} is queued{f': {word}' if word else ''}")
                said = word
            if state == ENDED:
                screen.finish()
                return job.code
            screen.show()
            time.sleep(LOOK_SECONDS)
    finally:
        news.close()


def refresh(job: Job) -> None:
    """Bring home what is new of a job, if it is on a cluster that is still up."""
    if on_cluster(job) and not job.home:
        news = RemoteNews(job)
        try:
            news.look_once()
        finally:
            news.close()


def show(job: Job, place: int = 0, quiet: bool = False, log: bool = False) -> int:
    """Show a job on this terminal until it ends or Ctrl-C detaches; returns the exit code. `log`: no live panel."""
    screen = make_screen(job, place, quiet or log)
    try:
        code = follow(job, screen)
    except KeyboardInterrupt:
        if isinstance(screen, LiveScreen):
            screen.display.stop()
        again = f"fever attach {job.name}, fever logs {job.name}, fever stop {job.name}, fever jobs"
        print(f"\ndetached; the job goes on: {again}", file=sys.stderr)
        return 0
    except FeverError:
        if isinstance(screen, LiveScreen):
            screen.display.stop()
        raise
    if code is None:
        place_of_log = f"; its log: {job.log}" if job.log.exists() else ""
        print(f"fever: {job.name} {job.state()[1]}{place_of_log}", file=sys.stderr)
        return 1
    return code


def make_screen(job: Job, place: int, quiet: bool) -> Screen:
    """A live panel on a terminal, the log elsewhere."""
    display = make_display("quiet" if quiet else "auto")
    if isinstance(display, LiveDisplay):
        return LiveScreen(job, sys.stdout, display, place)
    return Screen(job, sys.stdout, place)
